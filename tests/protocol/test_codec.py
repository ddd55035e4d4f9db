"""Every frame survives the wire; every other byte string is a ProtocolError and nothing else."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import WIRE_VERSION, decode, encode
from protocol.columns import pack_column
from protocol.errors import ProtocolError
from protocol.identity import RequestKey
from protocol.lifecycle import Fault
from protocol.plan import Admission, ExecutionPlan, RecurrentBatch
from protocol.plan_size import FRAME_LIMIT
from protocol.result import CodaResult, PlanResult, TokenLogprobs
from protocol.rng import RngKey
from tests.strategies import frames

if TYPE_CHECKING:
    from protocol.lifecycle import Frame

KEYS = tuple(RequestKey(f"request-{number}", number + 1) for number in range(64))


def assert_frame_or_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert decode(encode(decode(data))) is not None


@given(frames)
def test_a_frame_survives_the_wire(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


@given(frames, st.data())
def test_a_truncated_frame_is_refused(frame: Frame, data: st.DataObject) -> None:
    whole = encode(frame)
    kept = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ProtocolError):
        decode(whole[:kept])


@given(frames, st.binary(min_size=1, max_size=8))
def test_bytes_behind_a_frame_are_refused(frame: Frame, tail: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(frame) + tail)


@given(frames, st.data())
def test_a_changed_byte_gives_a_frame_or_a_protocol_error(
    frame: Frame, data: st.DataObject
) -> None:
    changed = bytearray(encode(frame))
    place = data.draw(st.integers(0, len(changed) - 1))
    changed[place] ^= data.draw(st.integers(1, 255))
    assert_frame_or_protocol_error(bytes(changed))


@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(garbage)


json_like = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.binary()),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=20,
)


@given(st.integers(-3, 12), st.lists(json_like, max_size=8))
def test_well_formed_arrays_of_wrong_content_never_raise_anything_else(
    kind: int, fields: list[object]
) -> None:
    assert_frame_or_protocol_error(
        bytes((WIRE_VERSION,)) + msgpack.packb([kind, *fields], use_bin_type=True)
    )


def test_another_version_is_named_with_the_mend() -> None:
    with pytest.raises(ProtocolError, match=r"wire version 9.*same Loopmesh version"):
        decode(bytes((9,)) + encode(Fault(1, "x"))[1:])


def test_both_directions_hold_the_frame_limit() -> None:
    with pytest.raises(ProtocolError, match="exceeds"):
        decode(bytes((WIRE_VERSION,)) + bytes(FRAME_LIMIT))
    prompt = tuple(range(FRAME_LIMIT // 4 + 1))
    admission = Admission(KEYS[0], prompt, ((),), RngKey(0), 0.0, 1.0, -1)
    with pytest.raises(ProtocolError, match="split it"):
        encode(ExecutionPlan(1, 1, admits=(admission,)))


def test_values_beyond_their_column_are_refused_when_encoding() -> None:
    batch = RecurrentBatch(KEYS[:1], (2**31,), (0,))
    with pytest.raises(ProtocolError, match="cannot encode"):
        encode(ExecutionPlan(1, 1, steps=(batch,)))


@pytest.mark.parametrize(
    "columns",
    [
        ((2,), (-0.5,), (1,), (-1.0,)),
        ((1, -1), (), (1,), (-1.0,)),
        ((1,), (-0.5,), (1,), (-1.0, -2.0)),
        ((-1,), (-0.5,), (), ()),
        ((1,), (float("nan"),), (1,), (-1.0,)),
    ],
)
def test_logprobs_that_do_not_fit_their_rows_are_refused(
    columns: tuple[tuple[float, ...], ...],
) -> None:
    told = TokenLogprobs(-0.5, (1,), (-1.0,))
    coda = CodaResult((RequestKey("a", 1),), (0,), (5,), (told,))
    good = encode(PlanResult(1, 1, (coda,), (), (0,)))
    frame = msgpack.unpackb(good[1:], use_list=True)
    assert bytes((WIRE_VERSION,)) + msgpack.packb(frame, use_bin_type=True) == good
    packed = [pack_column(code, column) for code, column in zip("ifif", columns, strict=True)]
    frame[4][0][-1] = packed
    with pytest.raises(ProtocolError):
        decode(bytes((WIRE_VERSION,)) + msgpack.packb(frame, use_bin_type=True))


def test_an_id_is_written_once_a_frame() -> None:
    positions = tuple(range(64))
    one = RecurrentBatch(KEYS, positions, (0,) * 64)
    small = encode(ExecutionPlan(1, 1, steps=(one,)))
    both = encode(ExecutionPlan(1, 1, steps=(one, one)))
    assert both.count(b"request-1\x02") == small.count(b"request-1\x02") == 1
    assert len(both) - len(small) < 64 * 3 * 4 + 32
