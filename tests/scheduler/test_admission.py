"""What the engine refuses, with which words, and that a refusal leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import (
    CapacityError,
    ConfigError,
    DuplicateRequestError,
    OverloadedError,
    RequestError,
    WorkerLostError,
)
from protocol.layout import Layout
from protocol.sampling import SamplingParams
from tests.scheduler.bench import Bench, make_engine, make_model, make_profile

CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"request_id": ""}, RequestError, "request id ''"),
    ({"request_id": "x" * 257}, RequestError, "1 to 256 characters"),
    ({"request_id": 5}, RequestError, "request id 5"),
    ({"prompt": []}, RequestError, "the prompt is empty"),
    ({"prompt": [1, 64]}, RequestError, r"prompt token 1 is 64, not an int in \[0, 64\)"),
    ({"prompt": [-1]}, RequestError, "prompt token 0 is -1"),
    ({"prompt": [True]}, RequestError, "prompt token 0 is True"),
    ({"prompt": [1.0]}, RequestError, "prompt token 0 is 1.0"),
    ({"prompt": 5}, RequestError, "the prompt is 5, not a list of token ids"),
    ({"prompt": "abc"}, RequestError, "prompt token 0 is 'a'"),
    ({"min_loops": 5}, RequestError, "min_loops 5 exceeds the 4 loops of toy"),
    ({"max_loops": 9}, RequestError, "max_loops 9 exceeds the 4 loops of toy; ask for at most 4"),
    ({"stop_token_ids": (64,)}, RequestError, r"stop token 64 is not in \[0, 64\)"),
    (
        {"forced_depths": (4, 1), "max_tokens": 3},
        RequestError,
        "forced_depths has 2 entries for max_tokens 3",
    ),
    (
        {"forced_depths": (3, 1), "max_tokens": 2},
        RequestError,
        "forced_depths starts with 3; the first output of toy .* takes 4 loops",
    ),
    (
        {"forced_depths": (4, 1, 5), "max_tokens": 2},
        RequestError,
        r"forced_depths\[2\] is 5, not in \[1, 4\]",
    ),
    ({"logit_bias": {5: 1.0, 64: 1.0}}, RequestError, r"logit_bias: token 64 is not in \[0, 64\)"),
    (
        {"min_tokens": 1, "stop_token_ids": tuple(range(1, 64))},
        RequestError,
        "min_tokens 1: every token of toy ends this request",
    ),
    ({"seed": -1}, RequestError, "seed -1"),
    ({"seed": 2**63}, RequestError, "seed"),
    ({"seed": True}, RequestError, "seed True"),
    (
        {"prompt": [1] * 60, "max_tokens": 6},
        RequestError,
        "need 65 positions, toy has 64: .* max_tokens to at most 5",
    ),
    (
        {"prompt": [1] * 9, "max_tokens": 9},
        CapacityError,
        "9 prompt tokens and max_tokens 9 need 20 KV blocks, the largest worker has 16",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), CASES)
def test_a_refused_request_leaves_no_trace(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine = make_engine(make_profile(num_blocks=8), make_profile(num_blocks=16))
    before = engine.stats()
    values: dict[str, Any] = {"request_id": "a", "prompt": [1], "seed": 7} | change
    request_id, prompt, seed = values.pop("request_id"), values.pop("prompt"), values.pop("seed")
    with pytest.raises(error, match=message):
        engine.add(request_id, prompt, SamplingParams(**values), seed)
    assert engine.stats() == before
    assert not engine.has_work()
    assert engine.add("a", [1], SamplingParams(), 7).generation == 1


def test_parameters_are_sampling_parameters() -> None:
    engine = make_engine()
    wrong: Any = {"max_tokens": 3}
    with pytest.raises(RequestError, match=r"the parameters are .*: give SamplingParams\(...\)"):
        engine.add("a", [1], wrong, 7)
    assert not engine.has_work()


def test_the_largest_request_that_fits() -> None:
    engine = make_engine(make_profile(num_blocks=64))
    engine.add("positions", [1] * 60, SamplingParams(max_tokens=5), 7)
    small = make_engine(make_profile(num_blocks=12))
    small.add("blocks", [1] * 9, SamplingParams(max_tokens=4), 7)
    with pytest.raises(CapacityError):
        small.add("more", [1] * 9, SamplingParams(max_tokens=5), 7)


def test_a_full_queue_turns_requests_away() -> None:
    engine = make_engine(max_waiting=2)
    for request_id in "ab":
        engine.add(request_id, [1], SamplingParams(), 7)
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        engine.add("c", [1], SamplingParams(), 7)
    engine.plan(1.0)
    engine.add("c", [1], SamplingParams(), 7)
    assert engine.stats().waiting == 1


def test_an_id_in_use_is_refused_until_its_release_is_answered() -> None:
    bench = Bench()
    bench.add("a", max_tokens=1)
    for _ in range(3):
        with pytest.raises(DuplicateRequestError, match="'a' is in use"):
            bench.add("a")
        bench.step()
    assert bench.add("a").generation == 2


def test_without_a_lane_nothing_is_taken() -> None:
    engine = make_engine()
    engine.close_lane("lane-0", "gone")
    with pytest.raises(WorkerLostError, match="no worker is available"):
        engine.add("a", [1], SamplingParams(), 7)
    engine.add_lane("lane-0", 2, make_profile())
    engine.add("a", [1], SamplingParams(), 7)


def test_lanes_are_checked() -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match="lane-0 is open already"):
        engine.add_lane("lane-0", 2, make_profile())
    with pytest.raises(ConfigError, match="lane-1 serves model other, lane lane-0 toy"):
        engine.add_lane("lane-1", 1, make_profile(model=make_model("other")))
    with pytest.raises(ConfigError, match=r"lane-1 keeps KV in the layout shared, lane lane-0 in"):
        engine.add_lane("lane-1", 1, make_profile(layout=Layout.SHARED))
    engine.close_lane("lane-0", "gone")
    with pytest.raises(ConfigError, match="epoch 1 is not after 1"):
        engine.add_lane("lane-0", 1, make_profile())
    assert engine.lanes == ()
    assert repr(engine) == "<Engine 0 lanes, 0 waiting, 0 requests>"
