"""Bias, penalties and min_tokens on the device against the definitions, number by number."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ProtocolError
from protocol.exit_rule import round_to_float32 as f32
from protocol.identity import RequestKey
from protocol.plan import Admission
from protocol.rng import RngKey
from worker.sampling.adjustments import Adjustments, LogitAdjuster, adjustment_columns, penalize

VOCAB, SLOTS = 12, 3
CPU = torch.device("cpu")


def admission(prompt: tuple[int, ...] = (1,), **fields: Any) -> Admission:  # noqa: ANN401
    return Admission(RequestKey("a", 1), prompt, ((0,),), RngKey(7), 0.0, 1.0, -1, **fields)


def reference(logits: list[float], item: Admission, outputs: list[int]) -> list[float]:
    """The definition, in float32 after every operation."""
    counts, bias = Counter(outputs), dict(item.logit_bias)
    repetition, presence, frequency = (
        f32(value)
        for value in (item.repetition_penalty, item.presence_penalty, item.frequency_penalty)
    )
    changed = []
    for token, logit in enumerate(logits):
        value = f32(logit + f32(bias.get(token, 0.0)))
        if token in item.prompt or counts[token]:
            value = f32(value / repetition if value > 0 else value * repetition)
        value = f32(value - f32(counts[token] * frequency))
        value = f32(value - (presence if counts[token] else 0.0))
        if len(outputs) < item.min_tokens and token in item.banned_ids:
            value = -math.inf
        changed.append(value)
    return changed


def admit(adjuster: LogitAdjuster, slot: int, item: Admission) -> None:
    """Fill a slot's rows, as the slot table does."""
    for name, row in adjustment_columns(item, VOCAB, CPU).items():
        getattr(adjuster, name)[slot].copy_(row)


def output(adjuster: LogitAdjuster, slot: int, item: Admission, tokens: list[int]) -> None:
    """Let a slot's request sample these tokens."""
    for token in tokens:
        adjuster.count(torch.tensor([token]), [slot], [Adjustments.of(item)])


ids = st.integers(0, VOCAB - 1)
logit_rows = st.lists(st.floats(-30.0, 30.0, width=32), min_size=VOCAB, max_size=VOCAB)
penalty = st.sampled_from([0.0, 0.5, -2.0, 1.3])
admissions = st.builds(
    admission,
    prompt=st.lists(ids, min_size=1, max_size=6).map(tuple),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7, 4.0]),
    presence_penalty=penalty,
    frequency_penalty=penalty,
    logit_bias=st.dictionaries(ids, st.floats(-100.0, 100.0), max_size=4).map(
        lambda pairs: tuple(pairs.items())
    ),
    min_tokens=st.integers(0, 4),
    banned_ids=st.lists(ids, max_size=3).map(tuple),
)
requests = st.tuples(logit_rows, admissions, st.lists(ids, max_size=6))


@given(st.lists(requests, min_size=SLOTS, max_size=SLOTS), st.permutations(range(SLOTS)))
@settings(deadline=None)
def test_every_row_of_any_batch_agrees_with_the_definition(
    rows: list[tuple[list[float], Admission, list[int]]], slots: list[int]
) -> None:
    adjuster = LogitAdjuster(SLOTS, VOCAB, CPU)
    for slot, (_, item, tokens) in zip(slots, rows, strict=True):
        admit(adjuster, slot, item)
        output(adjuster, slot, item, tokens)
    needs = [Adjustments.of(item) for _, item, _ in rows]
    logits = torch.tensor([row for row, _, _ in rows])
    before = logits.clone()
    adjuster.adjust(logits, slots, [len(tokens) for _, _, tokens in rows], needs)
    for index, (row, item, tokens) in enumerate(rows):
        assert logits[index].tolist() == reference(row, item, tokens)
        alone = before[index : index + 1].clone()
        adjuster.adjust(alone, slots[index : index + 1], [len(tokens)], needs[index : index + 1])
        assert torch.equal(alone[0], logits[index])


def test_the_worked_example() -> None:
    changed = penalize(
        torch.tensor([[2.0, -1.0, 1.0]]),
        torch.ones(1, 3, dtype=torch.bool),
        torch.tensor([[2, 1, 0]], dtype=torch.int32),
        *(torch.tensor([[value]]) for value in (2.0, 0.5, 0.25)),
    )
    assert changed.tolist() == [[0.0, -2.75, 0.5]]


def test_neutral_values_keep_every_bit() -> None:
    adjuster = LogitAdjuster(SLOTS, VOCAB, CPU)
    neutral, busy = admission(), admission(repetition_penalty=2.0, logit_bias=((3, 5.0),))
    assert Adjustments.of(neutral) == Adjustments(False, False, 0)
    admit(adjuster, 0, neutral)
    admit(adjuster, 1, busy)
    special = [-0.0, 0.0, math.nan, math.inf, -math.inf, 1e-45, -1e-45, 3e38, 1.0, -1.0, 2.0, 3.0]
    logits = torch.tensor([special, special])
    before = logits.clone()
    needs = [Adjustments.of(neutral), Adjustments.of(busy)]
    adjuster.adjust(logits, [0, 1], [0, 0], needs)
    adjuster.count(torch.tensor([4, 4]), [0, 1], needs)
    assert torch.equal(logits[0].view(torch.int32), before[0].view(torch.int32))
    assert not torch.equal(logits[1].view(torch.int32), before[1].view(torch.int32))


def test_a_reused_slot_keeps_nothing_of_its_last_request() -> None:
    adjuster = LogitAdjuster(1, VOCAB, CPU)
    everything = admission(
        tuple(range(VOCAB)),
        repetition_penalty=3.0,
        logit_bias=tuple((token, 9.0) for token in range(VOCAB)),
        min_tokens=9,
        banned_ids=tuple(range(VOCAB)),
    )
    admit(adjuster, 0, everything)
    output(adjuster, 0, everything, list(range(VOCAB)))
    row = [float(token) - 5.0 for token in range(VOCAB)]
    for then in (
        admission((2,), presence_penalty=1.0),
        admission((2,), logit_bias=((4, -1.0),)),
        admission((2,), min_tokens=2, banned_ids=(5,)),
        admission((2,)),
    ):
        admit(adjuster, 0, then)
        logits = torch.tensor([row])
        adjuster.adjust(logits, [0], [0], [Adjustments.of(then)])
        assert logits[0].tolist() == reference(row, then, [])


@pytest.mark.parametrize("fields", [{"logit_bias": ((VOCAB, 1.0),)}, {"banned_ids": (VOCAB,)}])
def test_a_token_beyond_the_vocabulary_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=r"token 12 is not in \[0, 12\)"):
        adjustment_columns(admission(**fields), VOCAB, CPU)


def test_the_table_is_as_large_as_it_says() -> None:
    adjuster = LogitAdjuster(5, VOCAB, CPU)
    columns = (adjuster.bias, adjuster.counts, adjuster.marks, adjuster.penalties)
    assert sum(column.nbytes for column in columns) == LogitAdjuster.bytes_needed(5, VOCAB)


def test_what_is_neutral_takes_no_memory_and_nothing_to_send() -> None:
    plain = adjustment_columns(admission(tuple(range(VOCAB))), VOCAB, torch.device("meta"))
    for name in ("bias", "counts", "marks"):
        assert plain[name].shape == (VOCAB,)
        assert plain[name].untyped_storage().nbytes() <= 4
        assert plain[name].is_meta
    asked = adjustment_columns(
        admission((1,), logit_bias=((2, 1.0),), presence_penalty=0.5), VOCAB, torch.device("meta")
    )
    assert asked["bias"].tolist() == [0.0, 0.0, 1.0, *[0.0] * (VOCAB - 3)]
    assert asked["marks"].tolist() == [0, 1, *[0] * (VOCAB - 2)]
