"""Batched sampling against a slow reference that sorts, and its independence of the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.sampling.sampler import greedy, sample

NEG_INF = float("-inf")
Row = tuple[float, float, int, float]
EDGE = 1e-9
"""A uniform closer than this to a cumulative edge may round either way."""


def kept_ids(logits: list[float], temperature: float, top_p: float, top_k: int) -> list[int]:
    """Ids that survive both filters, by sorting."""
    order = sorted(logits, reverse=True)
    kth = order[min(top_k, len(order)) - 1] if top_k > 0 else NEG_INF
    left = [i for i, value in enumerate(logits) if value >= kth]
    weights = masses(logits, temperature)
    total = math.fsum(weights[i] for i in left)
    return [
        i
        for i in left
        if top_p >= 1.0
        or math.fsum(weights[j] for j in left if logits[j] > logits[i]) < top_p * total
    ]


def masses(logits: list[float], temperature: float) -> list[float]:
    return [math.exp((value - max(logits)) / temperature) for value in logits]


def reference(
    logits: list[float], temperature: float, top_p: float, top_k: int, u: float
) -> set[int]:
    """The token, or the two on both sides when u lies on a cumulative edge."""
    if temperature == 0:
        return {logits.index(max(logits))}
    weights = masses(logits, temperature)
    kept = [i for i in kept_ids(logits, temperature, top_p, top_k) if weights[i] > 0]
    total = math.fsum(weights[i] for i in kept)
    running, allowed = 0.0, set()
    for i in kept:
        below, running = running, running + weights[i] / total
        if below - EDGE <= u < running + EDGE:
            allowed.add(i)
    return allowed


def run(logits: torch.Tensor, rows: list[Row], **flags: bool) -> torch.Tensor:
    """Sample rows of (temperature, top_p, top_k, u)."""
    temperature, top_p, top_k, uniforms = zip(*rows, strict=True)
    return sample(
        logits,
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(top_p, dtype=torch.float32),
        torch.tensor(top_k),
        torch.tensor(uniforms, dtype=torch.float64),
        **flags,
    )


def one(
    logits: list[float],
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = -1,
    u: float = 0.0,
) -> int:
    token = run(torch.tensor([logits]), [(temperature, top_p, top_k, u)])
    return int(token.item())


def float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


@st.composite
def sampled_rows(draw: st.DrawFn) -> tuple[list[float], Row]:
    """Logits with many ties and some -inf, and parameters from the plain to the extreme."""
    finite = st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -7.0, 1e-40, -1e-40]),
        st.floats(-30, 30, width=32),
        st.floats(-(2.0**100), 2.0**100, width=32),
    )
    logits = draw(st.lists(st.one_of(finite, st.just(NEG_INF)), min_size=0, max_size=24))
    logits.insert(draw(st.integers(0, len(logits))), draw(finite))
    temperature = draw(st.sampled_from([0.0, 1e-30, 1e-3, 0.3, 0.7, 1.0, 1.3, 100.0, 1e30]))
    top_p = draw(st.one_of(st.sampled_from([1e-12, 0.1, 0.9, 1.0]), st.floats(0.001, 1.0)))
    top_k = draw(st.one_of(st.just(-1), st.integers(1, 30)))
    u = draw(st.floats(0.0, 1.0, exclude_max=True))
    return logits, (float32(temperature), float32(top_p), top_k, u)


@settings(max_examples=400, deadline=None)
@given(sampled_rows())
def test_every_row_agrees_with_the_sorting_reference(
    case: tuple[list[float], Row],
) -> None:
    logits, (temperature, top_p, top_k, u) = case
    token = one(logits, temperature, top_p, top_k, u)
    if temperature == 0:
        assert token == logits.index(max(logits))
        return
    if not on_top_p_edge(logits, temperature, top_p, top_k):
        assert token in reference(logits, temperature, top_p, top_k, u)
        assert token in kept_ids(logits, temperature, top_p, top_k)


def on_top_p_edge(logits: list[float], temperature: float, top_p: float, top_k: int) -> bool:
    """Whether a candidate's greater mass equals top_p up to rounding, so that either is right."""
    if top_p >= 1.0:
        return False
    left = kept_ids(logits, temperature, 1.0, top_k)
    weights = masses(logits, temperature)
    total = math.fsum(weights[i] for i in left)
    greater = (math.fsum(weights[j] for j in left if logits[j] > logits[i]) for i in left)
    return any(abs(mass / total - top_p) < EDGE for mass in greater)


def random_batch(rows: int, vocabulary: int) -> tuple[torch.Tensor, list[Row]]:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    logits = (logits * 8).round() / 8  # coarse values, so that ties are everywhere
    logits[:, ::17] = NEG_INF
    uniforms = torch.rand(rows, generator=generator, dtype=torch.float64).tolist()
    temperatures, top_ps, top_ks = [0.0, 0.6, 1.0, 1.8], [1.0, 0.9, 0.3, 1e-6], [-1, 1, 5, 60, 9999]
    return logits, [
        (float32(temperatures[i % 4]), float32(top_ps[i // 4 % 4]), top_ks[i % 5], uniforms[i])
        for i in range(rows)
    ]


def test_a_mixed_batch_agrees_with_the_reference_row_by_row() -> None:
    logits, rows = random_batch(160, 300)
    tokens = run(logits, rows)
    assert tokens.dtype == torch.int64
    for values, row, token in zip(logits.tolist(), rows, tokens.tolist(), strict=True):
        assert not on_top_p_edge(values, row[0] or 1.0, row[1], row[2])
        assert reference(values, *row) == {token}


@pytest.mark.parametrize("vocabulary", [1, 7, 1000, 50_000])
def test_a_row_does_not_depend_on_its_batch(vocabulary: int) -> None:
    logits, rows = random_batch(40, vocabulary)
    together = run(logits, rows)
    for i in range(0, 40, 3):
        assert run(logits[i : i + 1], rows[i : i + 1]).item() == together[i].item()
    backwards = run(logits.flip(0), rows[::-1])
    assert torch.equal(backwards.flip(0), together)


def test_flags_save_work_and_change_no_token() -> None:
    logits, rows = random_batch(40, 500)
    cold = [(0.0, *row[1:]) for row in rows]
    assert torch.equal(greedy(logits), run(logits, cold))
    no_k = [(row[0], row[1], -1, row[3]) for row in rows]
    assert torch.equal(run(logits, no_k, any_top_k=False), run(logits, no_k))
    no_p = [(row[0], 1.0, row[2], row[3]) for row in rows]
    assert torch.equal(run(logits, no_p, any_top_p=False), run(logits, no_p))


def test_an_empty_batch_gives_no_tokens() -> None:
    empty = torch.empty(0)
    tokens = sample(
        torch.empty(0, 9), empty, empty, torch.empty(0, dtype=torch.int64), empty.double()
    )
    assert tokens.shape == (0,)


def test_temperature_zero_takes_the_lowest_id_among_equals_whatever_else_is_asked() -> None:
    assert one([1.0, 3.0, 3.0], temperature=0.0, top_p=0.1, top_k=1, u=0.999) == 1


def test_k_of_one_keeps_all_equals_of_the_largest() -> None:
    logits = [2.0, 5.0, 5.0, 4.9]
    assert [one(logits, top_k=1, u=u) for u in (0.0, 0.49, 0.51, 0.999)] == [1, 1, 2, 2]


def test_the_kth_largest_counts_equals_one_by_one() -> None:
    # Sorted: 5, 5, 4, 3. The second largest is 5, so 4 is dropped; the third is 4.
    logits = [3.0, 5.0, 4.0, 5.0]
    assert {one(logits, 1.0, 1.0, 2, u / 100) for u in range(100)} == {1, 3}
    assert {one(logits, 1.0, 1.0, 3, u / 100) for u in range(100)} == {1, 2, 3}


def test_zero_and_negative_zero_are_equal_logits() -> None:
    assert {one([-0.0, 0.0, -1.0], 1.0, 1.0, 1, u) for u in (0.1, 0.9)} == {0, 1}


def test_a_tiny_top_p_keeps_the_largest_and_its_equals() -> None:
    assert {one([1.0, 2.0, 2.0], 1.0, 1e-30, -1, u) for u in (0.0, 0.6, 0.999)} == {1, 2}


def test_top_p_drops_what_has_exactly_that_share_above_it() -> None:
    logits = [0.0, 0.0, -200.0]
    assert {one(logits, 1.0, 1.0, -1, u / 10) for u in range(10)} == {0, 1}
    # Id 2 has a share of 1 - 1e-87 above it, which is not below 0.999.
    assert one(logits, 1.0, 0.999, -1, 1.0 - 2.0**-53) == 1


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    # All: shares .5 .25 .125 .125, so top_p 0.6 keeps two. After top_k 2: 2/3 and 1/3, where the
    # second has 2/3 above it and goes too.
    logits = [math.log(4.0), math.log(2.0), 0.0, 0.0]
    assert one(logits, 1.0, 0.6, -1, 0.99) == 1
    assert one(logits, 1.0, 0.6, 2, 0.99) == 0


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = [-50.0, 40.0, 39.0, NEG_INF, 0.0]
    assert {one(logits, temperature, u=u) for u in (0.0, 0.5, 1.0 - 2.0**-53)} == {1}


def test_a_huge_temperature_is_uniform_over_what_is_possible() -> None:
    logits = [100.0, NEG_INF, -100.0, 0.0]
    tokens = [one(logits, 1e30, u=u) for u in (0.0, 0.3, 0.34, 0.6, 0.67, 0.999)]
    assert tokens == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 1.0 - 2.0**-53])
def test_an_impossible_token_is_never_drawn_at_either_end(u: float) -> None:
    assert one([NEG_INF, 0.0, NEG_INF], u=u) == 1


def test_the_largest_uniform_stays_inside_the_vocabulary() -> None:
    logits = torch.randn(2000, 5, generator=torch.Generator().manual_seed(4)) * 2
    logits[:, 3:] = NEG_INF
    tokens = run(logits, [(0.9, 1.0, -1, 1.0 - 2.0**-53)] * 2000)
    assert set(tokens.tolist()) == {2}


def test_top_p_of_one_keeps_even_a_weight_below_its_rounding() -> None:
    assert one([-40.0, 0.0], top_p=1.0, u=0.0) == 0


@pytest.mark.parametrize(
    ("logits", "token"),
    [
        ([NEG_INF, NEG_INF, NEG_INF], 0),
        ([0.0, float("inf"), 1.0], 1),
        ([0.0, 1.0, float("nan")], 2),
    ],
)
@pytest.mark.parametrize("u", [0.0, 0.999])
def test_a_row_without_a_distribution_is_greedy(logits: list[float], token: int, u: float) -> None:
    assert one(logits, 1.0, 0.5, 2, u) == token


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    count = 20_000
    uniforms = [(i + 0.5) / count for i in range(count)]
    tokens = run(logits.expand(count, 4), [(0.8, 1.0, -1, u) for u in uniforms])
    shares = torch.bincount(tokens, minlength=4) / count
    torch.testing.assert_close(shares, (logits / 0.8).softmax(-1), atol=1e-4, rtol=0)
