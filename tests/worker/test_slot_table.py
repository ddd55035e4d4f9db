"""Slots: one record a request, freed whole, and every misuse refused by name."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from protocol.errors import ProtocolError
from protocol.identity import RequestKey
from protocol.plan import Admission, Grant
from protocol.rng import RngKey
from protocol.row_progress import RowProgress
from worker.row_record import COLUMNS, RowRecord
from worker.slot_table import Slot, SlotTable

A, B, C = RequestKey("a", 1), RequestKey("b", 2), RequestKey("a", 3)
SCRATCH = 90


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(
        num_slots=2,
        hidden_size=8,
        planes=3,
        max_loops=3,
        max_positions=20,
        block_size=4,
        scratch_block=SCRATCH,
        vocab_size=32,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def admission(
    key: RequestKey, first: int = 0, width: int = 2, prompt: tuple[int, ...] = (5, 6)
) -> Admission:
    tables = tuple(tuple(range(first + p * 5, first + p * 5 + width)) for p in range(3))
    return Admission(key, prompt, tables, RngKey(2**40 + 3, 7), 0.5, 0.9, 12)


def test_admission_fills_the_whole_row(table: SlotTable) -> None:
    table.admit(admission(A, first=10))
    row, progress = table.slot(A).index, table.slot(A).progress
    assert progress == RowProgress(A, prompt_length=2, max_loops=3, capacity=8)
    assert table.prompt[row, :2].tolist() == [5, 6]
    assert table.tables[row].tolist() == [
        [10, 11, SCRATCH, SCRATCH, SCRATCH],
        [15, 16, SCRATCH, SCRATCH, SCRATCH],
        [20, 21, SCRATCH, SCRATCH, SCRATCH],
    ]
    assert table.rng_words[row].tolist() == [3, 2**8, 7]
    assert float(table.temperature[row]) == 0.5
    assert table.top_p[row].item() == pytest.approx(0.9)
    assert table.top_k[row].item() == 12
    assert table.survival[row].item() == 1.0


def test_prefill_starts_behind_what_is_in_the_blocks_already(table: SlotTable) -> None:
    table.admit(replace(admission(A, prompt=(5, 6, 7, 8, 9)), prefilled=4))
    assert table.slot(A).progress.prefilled == 4
    assert table.slot(A).progress.position == -1
    for wrong in (
        replace(admission(B, first=40, prompt=(5, 6)), prefilled=2),
        replace(admission(B, first=40, width=1, prompt=(5,) * 9), prefilled=8),
    ):
        with pytest.raises(ProtocolError, match=r"2 of 2 tokens are prefilled|room for 4 tokens"):
            table.admit(wrong)
        assert repr(table) == "<SlotTable 1 live, 1 free>"


def test_a_reused_slot_keeps_nothing_of_its_last_request(table: SlotTable) -> None:
    table.admit(admission(A, first=10, width=5))
    table.admit(admission(B, first=40))
    row = table.slot(A).index
    table.survival[row] = 0.25
    table.release(A)
    table.admit(admission(C, first=60, width=1))
    slot = table.slot(C)
    assert slot.index == row
    assert table.survival[row].item() == 1.0
    assert table.tables[row, 0].tolist() == [60, *[SCRATCH] * 4]
    assert A not in table


def test_a_grant_is_appended_to_every_plane(table: SlotTable) -> None:
    table.admit(admission(A, first=0, width=2))
    table.grant(Grant(A, ((30,), (31,), (32,))))
    slot = table.slot(A)
    assert slot.progress.capacity == 12
    assert table.tables[slot.index, :, 2].tolist() == [30, 31, 32]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (((1,), (2,)), "2 planes, not 3"),
        (tuple((1, 2, 3, 4, 5, 6) for _ in range(3)), "more than 5 blocks"),
        (((1,), (2,), (SCRATCH,)), "beyond the 90"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_and_takes_no_slot(
    table: SlotTable, tables: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        table.admit(Admission(A, (1,), tables, RngKey(0), 0.0, 1.0, -1))
    assert len(table) == 0
    table.admit(admission(A))
    table.admit(admission(B, first=40))
    with pytest.raises(ProtocolError, match="all 2 slots"):
        table.admit(admission(C, first=60))
    assert len(table) == 2


def test_a_prompt_longer_than_the_model_is_refused(table: SlotTable) -> None:
    with pytest.raises(ProtocolError, match="prompt of 21 tokens"):
        table.admit(admission(A, prompt=tuple(range(21))))


def test_unknown_requests_are_named(table: SlotTable) -> None:
    with pytest.raises(ProtocolError, match="a#1 has no slot"):
        table.slot(A)
    table.release(A)
    assert len(table) == 0


def test_clear_frees_every_slot(table: SlotTable) -> None:
    table.admit(admission(A))
    table.admit(admission(B, first=40))
    table.clear()
    assert table.keys() == ()
    table.admit(admission(C))
    table.admit(admission(B, first=40))
    assert repr(table) == "<SlotTable 2 live, 0 free>"


def columns(table: SlotTable) -> dict[str, torch.Tensor]:
    """Every tensor of the table but the block tables, which belong to no record."""
    return {
        name: value
        for name, value in vars(table).items()
        if isinstance(value, torch.Tensor) and name != "tables"
    }


def test_a_record_has_every_column_and_every_host_field(table: SlotTable) -> None:
    assert set(COLUMNS) == set(columns(table))
    host = {field.name for field in fields(RowRecord)} - set(COLUMNS)
    assert host == {field.name for field in fields(Slot)} - {"index"}


def test_a_record_moves_every_column_into_another_slot(table: SlotTable) -> None:
    table.admit(admission(A, first=10, prompt=(1, 2, 3)))
    old = table.slot(A)
    old.progress.prefilled = 2
    for number, column in enumerate(columns(table).values()):
        column[old.index] = torch.arange(1, column[0].numel() + 1).view(column[0].shape) + number
    before = {name: column[old.index].clone() for name, column in columns(table).items()}
    record = table.record(A)
    table.release(A)
    table.admit(admission(B, first=40))
    assert table.slot(B).index == old.index
    for column in columns(table).values():
        column.zero_()
    table.place(record, ((60, 61), (70, 71), (80, 81)))
    new = table.slot(A)
    assert new.index != old.index
    assert (new.progress, new.sampling) == (old.progress, old.sampling)
    assert table.tables[new.index, 2].tolist() == [80, 81, *[SCRATCH] * 3]
    for name, column in columns(table).items():
        expected = before[name]
        if name == "prompt":
            expected[3:] = 0  # the rest of the row is nobody's
        assert torch.equal(column[new.index], expected), name
        assert expected.any(), name


def test_a_record_is_a_copy_that_tells_every_change_by_its_checksum(table: SlotTable) -> None:
    table.admit(admission(A))
    record = table.record(A)
    assert record.num_bytes == table.row_bytes + 2 * 8
    checksums = {record.checksum()}
    row = table.slot(A).index
    for column in columns(table).values():
        column[row] += 1
        checksums.add(table.record(A).checksum())
    table.slot(A).progress.prefilled = 1
    checksums.add(table.record(A).checksum())
    assert len(checksums) == len(COLUMNS) + 2
    assert record.checksum() in checksums
    assert replace(record).checksum() == record.checksum()


def test_blocks_that_do_not_hold_what_is_written_take_no_slot(table: SlotTable) -> None:
    table.admit(admission(A, prompt=(1,) * 8))
    table.slot(A).progress.prefilled = 5
    record = table.record(A)
    table.release(A)
    with pytest.raises(ProtocolError, match="room for 4 tokens, 5 are written"):
        table.place(record, ((1,), (2,), (3,)))
    assert len(table) == 0
    table.place(record, ((1, 2), (3, 4), (5, 6)))
    assert table.slot(A).progress.capacity == 8


def test_a_record_takes_the_output_counts_to_another_slot(table: SlotTable) -> None:
    wish = replace(admission(A), repetition_penalty=2.0, logit_bias=((3, 0.5),), min_tokens=9)
    table.admit(replace(wish, banned_ids=(7,)))
    first = table.slot(A)
    for token in (4, 4, 9):
        table.adjuster.count(torch.tensor([token]), [first.index], [first.sampling.adjusts])
    record = table.record(A)
    table.release(A)
    table.admit(admission(B))
    table.place(record, admission(A).tables)
    then = table.slot(A)
    assert then.index != first.index
    assert then.sampling == first.sampling
    logits = torch.ones(1, 32)
    table.adjuster.adjust(logits, [then.index], [3], [then.sampling.adjusts])
    halved, banned = (4, 5, 6, 9), (7,)
    expected = [0.5 if token in halved else 1.0 for token in range(32)]
    expected[3] = 1.5
    for token in banned:
        expected[token] = float("-inf")
    assert logits[0].tolist() == expected
    other = table.slot(B)
    assert table.counts[other.index].sum() == 0
