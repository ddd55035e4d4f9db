"""Frames as bytes: one version byte, then a msgpack array; number columns as raw little-endian.

The layout of a frame is [kind, fields...]. A plan or result opens with a table of its keys and
then names a request by its index in it, so an id is written once a frame. Nothing here is ever
unpickled, and whatever is wrong with the bytes is a ProtocolError.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgpack

from protocol.adjustment_codec import pack_adjustments, unpack_adjustments
from protocol.columns import (
    KeyTable,
    Packed,
    pack_column,
    pack_table,
    read_float,
    read_index,
    read_int,
    read_key_table,
    read_keys,
    read_text,
    unpack_column,
    unpack_table,
)
from protocol.errors import ProtocolError
from protocol.lifecycle import Beat, Fault, Open, Opened, Phase, Synchronize, Synchronized
from protocol.plan import Admission, ExecutionPlan, Fork, Grant, Resume
from protocol.plan_size import FRAME_LIMIT
from protocol.profile_codec import pack_profile, unpack_profile
from protocol.result import FailedRow, PlanResult
from protocol.rng import RngKey
from protocol.snapshot_columns import pack_answers, unpack_answers
from protocol.step_codec import BATCHES, RESULTS, pack_steps, pack_terms, unpack_steps, unpack_terms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol.identity import RequestKey
    from protocol.lifecycle import Frame

WIRE_VERSION = 1
_PLAN, _RESULT, _OPEN, _OPENED, _SYNC, _SYNCED, _BEAT, _FAULT = range(8)


def encode(frame: Frame) -> bytes:
    """The bytes of a frame. Raises ProtocolError when they would exceed FRAME_LIMIT."""
    try:
        body: bytes = msgpack.packb(_fields(frame), use_bin_type=True)
    except (ValueError, OverflowError, struct.error) as error:
        raise ProtocolError(f"cannot encode {type(frame).__name__}: {error}") from error
    if len(body) + 1 > FRAME_LIMIT:
        raise ProtocolError(
            f"a {type(frame).__name__} of {len(body) + 1} bytes exceeds the frame limit of "
            f"{FRAME_LIMIT}; split it"
        )
    return bytes((WIRE_VERSION,)) + body


def decode(data: bytes) -> Frame:
    """The frame in `data`. Raises ProtocolError, and nothing else, for any other bytes."""
    if len(data) > FRAME_LIMIT:
        raise ProtocolError(f"a frame of {len(data)} bytes exceeds the limit of {FRAME_LIMIT}")
    if not data or data[0] != WIRE_VERSION:
        found = data[0] if data else "no bytes"
        raise ProtocolError(
            f"wire version {found}, this end speaks {WIRE_VERSION}: "
            "run the same Loopmesh version on scheduler and workers"
        )
    try:
        kind, *fields = msgpack.unpackb(memoryview(data)[1:], raw=False, use_list=False)
        return _DECODERS[kind](*fields)
    except ProtocolError:
        raise
    except Exception as error:  # any failure to read foreign bytes is one and the same error
        raise ProtocolError(f"malformed frame: {type(error).__name__}: {error}") from error


def _fields(frame: Frame) -> tuple[object, ...]:
    match frame:
        case ExecutionPlan():
            return _plan_fields(frame)
        case PlanResult():
            return _result_fields(frame)
        case Open(epoch):
            return (_OPEN, epoch)
        case Opened(epoch, profile):
            return (_OPENED, epoch, pack_profile(profile))
        case Synchronize(epoch, seq):
            return (_SYNC, epoch, seq)
        case Synchronized(epoch, seq):
            return (_SYNCED, epoch, seq)
        case Beat(epoch, seq, steps_done, phase):
            return (_BEAT, epoch, seq, steps_done, phase.value)
        case Fault(epoch, message):
            return (_FAULT, epoch, message)


def _plan_fields(plan: ExecutionPlan) -> tuple[object, ...]:
    keys = KeyTable()
    releases = keys.column(plan.releases)
    admits = [
        (
            keys.index(item.key),
            pack_column("i", item.prompt),
            pack_table(item.tables),
            item.rng.seed,
            item.rng.stream,
            float(item.temperature),
            float(item.top_p),
            item.top_k,
            pack_adjustments(item),
            item.prefilled,
            pack_terms(item.resident),
        )
        for item in plan.admits
    ]
    grants = [(keys.index(item.key), pack_table(item.tables)) for item in plan.grants]
    steps = pack_steps(BATCHES, plan.steps, keys)
    resumes = [(keys.index(item.key), pack_table(item.tables)) for item in plan.resumes]
    forks = [
        (
            keys.index(item.key),
            keys.index(item.parent),
            pack_table(item.tables),
            item.rng.seed,
            item.rng.stream,
        )
        for item in plan.forks
    ]
    changes = (releases, admits, grants, steps, keys.column(plan.suspends), resumes, forks)
    return (_PLAN, plan.epoch, plan.seq, keys.fields(), *changes)


def _decode_plan(
    epoch: int,
    seq: int,
    keys: Packed,
    releases: bytes,
    admits: Packed,
    grants: Packed,
    steps: Packed,
    suspends: bytes,
    resumes: Packed,
    forks: Packed,
) -> ExecutionPlan:
    table = read_key_table(keys)
    return ExecutionPlan(
        epoch=read_int(epoch),
        seq=read_int(seq),
        releases=read_keys(table, releases),
        admits=tuple(_decode_admission(table, *fields) for fields in admits),
        grants=tuple(Grant(table[read_index(key, table)], unpack_table(t)) for key, t in grants),
        steps=unpack_steps(BATCHES, steps, table),
        suspends=read_keys(table, suspends),
        resumes=tuple(Resume(table[read_index(key, table)], unpack_table(t)) for key, t in resumes),
        forks=tuple(_decode_fork(table, *fields) for fields in forks),
    )


def _decode_fork(
    table: Sequence[RequestKey],
    key: int,
    parent: int,
    blocks: Sequence[bytes],
    seed: int,
    stream: int,
) -> Fork:
    return Fork(
        key=table[read_index(key, table)],
        parent=table[read_index(parent, table)],
        tables=unpack_table(blocks),
        rng=RngKey(read_int(seed), read_int(stream)),
    )


def _decode_admission(
    table: Sequence[RequestKey],
    key: int,
    prompt: bytes,
    blocks: Sequence[bytes],
    seed: int,
    stream: int,
    temperature: float,
    top_p: float,
    top_k: int,
    adjustments: Packed,
    prefilled: int,
    resident: Packed,
) -> Admission:
    return Admission(
        key=table[read_index(key, table)],
        prompt=unpack_column("i", prompt),
        tables=unpack_table(blocks),
        rng=RngKey(read_int(seed), read_int(stream)),
        temperature=read_float(temperature),
        top_p=read_float(top_p),
        top_k=read_int(top_k),
        **unpack_adjustments(adjustments),
        prefilled=read_int(prefilled),
        resident=unpack_terms(resident),
    )


def _result_fields(result: PlanResult) -> tuple[object, ...]:
    keys = KeyTable()
    steps = pack_steps(RESULTS, result.steps, keys)
    failed = [(keys.index(row.key), row.message) for row in result.failed]
    times = pack_column("i", [min(us, 2**31 - 1) for us in result.device_us])
    answers = pack_answers(result.suspended, result.lost, keys)
    return (_RESULT, result.epoch, result.seq, keys.fields(), steps, failed, times, answers)


def _decode_result(
    epoch: int,
    seq: int,
    keys: Packed,
    steps: Packed,
    failed: Packed,
    device_us: bytes,
    answers: Packed,
) -> PlanResult:
    table = read_key_table(keys)
    suspended, lost = unpack_answers(answers, table)
    return PlanResult(
        epoch=read_int(epoch),
        seq=read_int(seq),
        steps=unpack_steps(RESULTS, steps, table),
        failed=tuple(
            FailedRow(table[read_index(key, table)], read_text(text)) for key, text in failed
        ),
        device_us=unpack_column("i", device_us),
        suspended=suspended,
        lost=lost,
    )


def _decode_beat(epoch: int, seq: int, steps_done: int, phase: str) -> Beat:
    return Beat(read_int(epoch), read_int(seq), read_int(steps_done), Phase(phase))


_DECODERS: dict[int, Callable[..., Frame]] = {
    _PLAN: _decode_plan,
    _RESULT: _decode_result,
    _OPEN: lambda epoch: Open(read_int(epoch)),
    _OPENED: lambda epoch, profile: Opened(read_int(epoch), unpack_profile(*profile)),
    _SYNC: lambda epoch, seq: Synchronize(read_int(epoch), read_int(seq)),
    _SYNCED: lambda epoch, seq: Synchronized(read_int(epoch), read_int(seq)),
    _BEAT: _decode_beat,
    _FAULT: lambda epoch, message: Fault(read_int(epoch), read_text(message)),
}
