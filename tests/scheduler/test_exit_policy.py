"""After which loop a token leaves, by policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from protocol.exit_rule import NEVER, round_to_float32, survival_bound
from protocol.sampling import SamplingParams
from scheduler.exit_policy import LEAVES, STAYS, Forced, Ouro, OuroDelayed, exit_policy
from tests.scheduler.bench import Bench, exit_after, make_model, texts

if TYPE_CHECKING:
    from scheduler.exit_policy import ExitPolicy

# (min_loops, max_loops, threshold) under a constant hazard of 0.3: cumulative 0.3, 0.51, 0.657,
# 0.7599; and the depths at which ouro and ouro_delayed leave.
TABLE = [
    (2, 4, 0.5, 2, 3),
    (3, 4, 0.5, 3, 4),
    (1, 4, 0.0, 1, 2),
    (1, 4, 1.0, 4, 4),
    (2, 2, 0.5, 2, 2),
    (1, 3, 0.6, 3, 3),
    (1, 1, 0.0, 1, 1),
    (4, 4, 0.1, 4, 4),
    (1, 4, 0.75, 4, 4),
]


def depth_of(policy: ExitPolicy, hazard: float = 0.3, output_index: int = 1) -> int:
    """The exit depth, told from the signals that the policy asks for, and from no other."""
    survival, signals = 1.0, [False]
    for loops in range(1, 10):
        survival = round_to_float32(survival * round_to_float32(1.0 - hazard))
        signals.append(policy.fires(loops, survival))
        awaited = policy.awaits(output_index, loops)
        assert awaited in (STAYS, LEAVES) or 0 < awaited <= loops
        if awaited == LEAVES or (awaited != STAYS and signals[awaited]):
            return loops
    raise AssertionError("no exit")


@pytest.mark.parametrize(("least", "most", "threshold", "at_once", "delayed"), TABLE)
def test_where_a_constant_hazard_leaves(
    least: int, most: int, threshold: float, at_once: int, delayed: int
) -> None:
    rule = Ouro(least, most, survival_bound(threshold))
    assert depth_of(rule) == at_once
    assert depth_of(OuroDelayed(rule)) == delayed


@pytest.mark.parametrize(("least", "most", "threshold", "at_once", "delayed"), TABLE)
@pytest.mark.parametrize("policy", ["ouro", "ouro_delayed"])
def test_an_engine_follows_its_policy(
    policy: str, least: int, most: int, threshold: float, at_once: int, delayed: int
) -> None:
    bench = Bench(hazard=lambda key, position, depth: 0.3, exit_policy=policy)
    bench.add("a", max_tokens=4, min_loops=least, max_loops=most, exit_threshold=threshold)
    depth = at_once if policy == "ouro" else delayed
    assert texts(bench.finish()) == {"a": ([1, 2, 3, 4], [4, depth, depth, depth])}


def test_a_gate_that_is_sure_never_beats_threshold_one() -> None:
    assert depth_of(Ouro(1, 4, NEVER), hazard=1.0) == 4
    assert depth_of(OuroDelayed(Ouro(1, 4, NEVER)), hazard=1.0) == 4


def test_a_delayed_exit_is_not_revoked_and_does_not_outlive_its_token() -> None:
    # The gate of position 1 fires after its first loop and takes it back; others never fire.
    bench = Bench(
        hazard=lambda key, position, depth: float(position == 1 and depth == 0),
        exit_policy="ouro_delayed",
    )
    bench.add("a", max_tokens=4, exit_threshold=0.5)
    assert texts(bench.finish())["a"][1] == [4, 2, 4, 4]


def test_forced_depths_take_each_output_out_and_ask_no_gate() -> None:
    bench = Bench(hazard=exit_after({1: 1}))
    bench.add("a", max_tokens=5, forced_depths=(4, 3, 1, 2, 4, 1), min_loops=2, max_loops=2)
    bench.add("b", max_tokens=3, exit_threshold=0.5)
    assert texts(bench.finish()) == {
        "a": ([1, 2, 3, 4, 5], [4, 3, 1, 2, 4]),
        "b": ([1, 2, 3], [4, 1, 4]),
    }


@pytest.mark.parametrize(
    ("threshold", "at_once", "delayed"),
    [
        (0.99, [1, 2, 3, LEAVES], [STAYS, 1, 2, LEAVES]),
        (1.0, [STAYS, STAYS, STAYS, LEAVES], [STAYS, STAYS, STAYS, LEAVES]),
    ],
)
def test_which_signals_a_token_of_four_loops_waits_for(
    threshold: float, at_once: list[int], delayed: list[int]
) -> None:
    rule = Ouro(1, 4, survival_bound(threshold))
    loops = range(1, 5)
    assert [rule.awaits(1, loop) for loop in loops] == at_once
    assert [OuroDelayed(rule).awaits(1, loop) for loop in loops] == delayed
    assert [Forced((4, 3)).awaits(1, loop) for loop in (1, 2, 3)] == [STAYS, STAYS, LEAVES]


def test_which_policy_a_request_gets() -> None:
    model = make_model()
    rule = Ouro(1, 4, survival_bound(0.9))
    assert exit_policy(SamplingParams(), model, "ouro") == rule
    assert exit_policy(SamplingParams(), model, "ouro_delayed") == OuroDelayed(rule)
    wish = SamplingParams(min_loops=2, max_loops=3, exit_threshold=0.5)
    assert exit_policy(wish, model, "ouro") == Ouro(2, 3, 0.5)
    forced = SamplingParams(max_tokens=1, forced_depths=(4,))
    assert exit_policy(forced, model, "ouro_delayed") == Forced((4,))
