"""Exit policies on the real model: forced depths replay a run, a delayed exit is a forced one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cluster.llm import LLM
from protocol.config import CacheSettings, Configuration, SchedulerSettings, WorkerSettings
from protocol.sampling import SamplingParams
from tests.workload import WORKLOAD

if TYPE_CHECKING:
    from cluster.generation import Completion
    from protocol.config import ExitPolicyName

PROMPTS = [case.prompt for case in WORKLOAD]


def run(
    params: list[SamplingParams], policy: ExitPolicyName = "ouro", **settings: object
) -> list[Completion]:
    configuration = Configuration(
        worker=WorkerSettings(
            cache=CacheSettings(block_size=8, num_blocks=512),
            device="cpu",
            num_slots=8,
            num_threads=1,
        ),
        scheduler=SchedulerSettings.model_validate({"exit_policy": policy} | settings),
    )
    with LLM(configuration=configuration) as llm:
        return llm.generate(PROMPTS, params)


def forced(
    case_params: SamplingParams, done: Completion, depths: tuple[int, ...]
) -> SamplingParams:
    """The same request, made to leave at these depths and never to ask the gate."""
    return case_params.model_copy(
        update={
            "forced_depths": depths,
            "max_tokens": len(done.token_ids),
            "exit_threshold": 1.0,
            "min_loops": 1,
            "max_loops": None,
            "ignore_eos": True,
        }
    )


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("ouro", {}),
        ("ouro_delayed", {}),
        ("ouro", {"mode": "no_refill", "prefill_chunk_size": 16}),
        ("ouro_delayed", {"min_coda_batch": 4, "reservation": "incremental"}),
    ],
)
def test_the_depths_of_a_run_reproduce_its_tokens(
    policy: ExitPolicyName, settings: dict[str, Any]
) -> None:
    params = [case.params for case in WORKLOAD]
    adaptive = run(params, policy)
    assert len({depth for done in adaptive for depth in done.exit_depths}) >= 3
    wishes = [forced(p, done, done.exit_depths) for p, done in zip(params, adaptive, strict=True)]
    replay = run(wishes, **settings)
    assert [done.token_ids for done in replay] == [done.token_ids for done in adaptive]
    assert [done.exit_depths for done in replay] == [done.exit_depths for done in adaptive]


def test_other_depths_give_other_tokens() -> None:
    params = [case.params for case in WORKLOAD]
    adaptive = run(params)
    deep = [(4,) * len(done.token_ids) for done in adaptive]
    full = run([forced(p, d, depths) for p, d, depths in zip(params, adaptive, deep, strict=True)])
    assert [done.exit_depths for done in full] == deep
    assert [done.token_ids for done in full] != [done.token_ids for done in adaptive]


def test_a_delayed_exit_is_one_loop_later() -> None:
    params = [SamplingParams(max_tokens=2, exit_threshold=0.5, ignore_eos=True)] * len(PROMPTS)
    at_once, delayed = run(params), run(params, "ouro_delayed")
    pairs = [(a.exit_depths[1], b.exit_depths[1]) for a, b in zip(at_once, delayed, strict=True)]
    assert all(later == min(first + 1, 4) for first, later in pairs)
    assert any(first < 4 for first, _ in pairs)
