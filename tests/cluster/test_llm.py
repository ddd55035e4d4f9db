from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cluster.llm import LLM
from protocol.config import (
    CacheSettings,
    ClusterSettings,
    Configuration,
    ModelSettings,
    SchedulerSettings,
    WorkerSettings,
)
from protocol.errors import (
    CapacityError,
    ConfigError,
    ExecutorClosedError,
    LoopmeshError,
    ModelError,
    RequestError,
    WorkerLostError,
)
from protocol.exit_rule import FinishReason
from protocol.sampling import SamplingParams
from worker.models.registry import resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = WorkerSettings(
    device="cpu", num_slots=4, max_step_tokens=64, cache=CacheSettings(num_blocks=257)
)
GREEDY = SamplingParams(max_tokens=2)
ADAPTIVE = SamplingParams(max_tokens=12, exit_threshold=0.9)


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with LLM("ouro-tiny", configuration=Configuration(worker=SMALL)) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The shared LLM, which a test must leave without a block or a request in use."""
    yield shared
    stats = shared.stats()
    assert (stats.waiting, stats.running, stats.releasing, stats.rng_keys) == (0, 0, 0, 0)
    assert stats.free_blocks == stats.total_blocks


def test_one_prompt_gives_the_recorded_answer(llm: LLM) -> None:
    item = json.loads((resolve_model(ModelSettings()) / "golden_last_exited.json").read_text())
    first = item["items"][0]
    (run,) = (r for r in first["runs"] if r["threshold"] == 0.9 and r["min_loops"] == 1)
    params = SamplingParams(max_tokens=len(run["ids"]), exit_threshold=0.9, ignore_eos=True)
    (answer,) = llm.generate(first["prompt"], params)
    assert list(answer.token_ids) == run["ids"]
    assert answer.text == llm.tokenizer.decode(run["ids"])
    assert answer.prompt_tokens == len(first["ids"])
    assert (answer.max_loops, answer.exit_depths[0]) == (4, 4)
    assert answer.loops_saved > 0


def test_a_batch_answers_in_order_whatever_finishes_first(llm: LLM) -> None:
    prompts: list[str | list[int]] = ["Once upon a time", [1648, 1424, 261, 658], "One day", "It"]
    params = [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=3),
        SamplingParams(max_tokens=9, temperature=0.8, seed=5, exit_threshold=0.5),
        SamplingParams(max_tokens=1),
    ]
    together = llm.generate(prompts, params)
    alone = [llm.generate(p, w)[0] for p, w in zip(prompts, params, strict=True)]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert [a.exit_depths for a in together] == [a.exit_depths for a in alone]
    assert [len(a.token_ids) for a in together] == [20, 3, 9, 1]
    assert together[1].token_ids == together[0].token_ids[:3]
    assert together[2].seed == 5
    assert all(a.finish_reason is FinishReason.LENGTH for a in together)


def test_token_ids_are_one_prompt_and_an_empty_batch_is_nothing(llm: LLM) -> None:
    assert len(llm.generate([1648, 1424], ADAPTIVE)) == 1
    assert llm.generate([]) == []
    with pytest.raises(RequestError, match="list of its own"):
        llm.generate([1648, "Once"])  # type: ignore[arg-type]


def test_a_batch_longer_than_the_queue_of_a_server_runs() -> None:
    configuration = Configuration(worker=SMALL, scheduler=SchedulerSettings(max_waiting=1))
    with LLM(configuration=configuration) as llm:
        assert len(llm.generate(["Once"] * 9, SamplingParams(max_tokens=2))) == 9


def test_a_drawn_seed_repeats_its_answer(llm: LLM) -> None:
    (first,) = llm.generate("Once", SamplingParams(max_tokens=8, temperature=1.0))
    again = SamplingParams(max_tokens=8, temperature=1.0, seed=first.seed)
    assert llm.generate("Once", again)[0] == first


def test_a_stream_gives_the_same_answer_piece_by_piece(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", ADAPTIVE)
    deltas = []
    while True:
        try:
            deltas.append(next(stream))
        except StopIteration as end:
            answer = end.value
            break
    (whole,) = llm.generate("Once upon a time", ADAPTIVE)
    assert answer.token_ids == whole.token_ids
    assert answer.exit_depths == whole.exit_depths
    assert "".join(delta.text for delta in deltas) == answer.text == whole.text
    # A plan of several ticks brings several tokens at once; how many is a matter of speed.
    assert 1 < len(deltas) <= len(answer.token_ids)
    assert deltas[-1].finish_reason is answer.finish_reason


@pytest.mark.parametrize("bad", ["", [4096], [5] * 3000])
def test_one_bad_prompt_stops_the_batch_before_it_runs(llm: LLM, bad: str | list[int]) -> None:
    tokens = llm.stats().tokens
    with pytest.raises(RequestError, match=r"^prompt 1: "):
        llm.generate(["Once", bad, "It"])
    assert llm.stats().tokens == tokens


def test_a_request_that_can_never_fit_is_refused_with_numbers(llm: LLM) -> None:
    with pytest.raises(CapacityError, match=r"\d"):
        llm.generate("Once", SamplingParams(max_tokens=1900))


def test_parameters_are_one_for_all_or_one_for_each(llm: LLM) -> None:
    with pytest.raises(RequestError, match="1 SamplingParams for 2 prompts"):
        llm.generate(["a", "b"], [ADAPTIVE])
    with pytest.raises(RequestError, match="4 loops"):
        llm.generate("a", SamplingParams(max_loops=5))


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("Once", {"max_tokens": 3}, "the parameters are {'max_tokens': 3}: give SamplingParams"),
        ("Once", [{"max_tokens": 3}], "the parameters are {'max_tokens': 3}: give SamplingParams"),
        ("Once", 5, "the parameters are 5: give SamplingParams, or a list of them"),
        (5, None, "the prompts are 5: give a text, or a list of prompts"),
        ([1.5], None, "the prompt is 1.5, not a text or a list of token ids"),
        (["Once", None], None, "prompt 1: the prompt is None, not a text or a list of token ids"),
        ([["Once"]], None, "prompt token 0 is 'Once', not an int"),
    ],
)
def test_what_is_no_prompt_and_no_parameters_is_named(
    llm: LLM,
    prompts: Any,  # noqa: ANN401
    params: Any,  # noqa: ANN401
    message: str,
) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        llm.generate(prompts, params)


def test_a_closed_stream_is_aborted_and_drained(llm: LLM) -> None:
    stream = llm.stream("Once", SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    assert llm.stats().running == 1
    stream.close()
    assert llm.stats().running == 0
    assert len(llm.generate("Once", ADAPTIVE)) == 1


def test_an_interrupted_run_is_aborted_and_drained(llm: LLM) -> None:
    stream = llm.stream("Once", SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt())
    assert llm.stats().running == 0


def test_a_stream_that_never_began_holds_nothing(llm: LLM) -> None:
    llm.stream("Once")
    assert len(llm.generate("Once", ADAPTIVE)) == 1


def test_one_run_at_a_time(llm: LLM) -> None:
    stream = llm.stream("Once", ADAPTIVE)
    next(stream)
    with pytest.raises(RequestError, match="in use"):
        llm.generate("Once")
    assert "busy" in repr(llm)
    stream.close()
    assert "idle" in repr(llm)


def test_nothing_runs_after_close() -> None:
    llm = LLM(configuration=Configuration(worker=SMALL))
    stream = llm.stream("Once")
    llm.close()
    llm.close()
    assert "closed" in repr(llm)
    with pytest.raises(ExecutorClosedError, match="open a new one"):
        llm.generate("Once")
    with pytest.raises(ExecutorClosedError):
        next(stream)


def test_a_worker_that_does_not_answer_fails_the_run_with_its_reason() -> None:
    impatient = Configuration(worker=SMALL, cluster=ClusterSettings(plan_timeout=1e-9))
    with LLM(configuration=impatient) as llm:
        with pytest.raises(LoopmeshError, match="no answer to plan 1"):
            llm.generate(["Once", "It"])
        with pytest.raises(WorkerLostError):
            llm.generate("Once")


def test_wrong_settings_are_refused_before_anything_is_open() -> None:
    with pytest.raises(ConfigError, match="executor='ray'"):
        LLM(workers=2)
    with pytest.raises(ModelError, match="no such directory"):
        LLM("/no/such/model")


def test_a_model_argument_goes_before_the_configuration() -> None:
    configuration = Configuration(
        worker=SMALL.model_copy(update={"model": ModelSettings(model="/no/such/model")})
    )
    with pytest.raises(ModelError):
        LLM(configuration=configuration)
    with LLM("ouro-tiny", configuration=configuration) as llm:
        assert llm.profile.model.name == "ouro-tiny"
        assert llm.profile.num_slots == SMALL.num_slots


def test_ray_is_not_imported() -> None:
    code = (
        "import sys\n"
        "from cluster.llm import LLM\n"
        "with LLM() as llm: llm.generate('Once')\n"
        "print(sorted({'ray', 'grpc', 'starlette', 'fastapi'} & set(sys.modules)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout == "[]\n"


def test_stop_strings_end_each_answer_for_itself(llm: LLM) -> None:
    prompts = ["Once upon a time", "The sun was"]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = llm.generate(prompts, params)
    middle = len(plain[0].text) // 2
    stop = plain[0].text[middle : middle + 6]
    before = llm.stats().finished.get(FinishReason.STOP, 0)
    first, second = llm.generate(prompts, params, stop=[stop, "never in it"])
    assert first.text == plain[0].text[: plain[0].text.index(stop)]
    assert first.finish_reason is FinishReason.STOP
    assert first.token_ids == plain[0].token_ids[: len(first.token_ids)]
    assert len(first.token_ids) < 24
    assert second == replace(plain[1], seed=second.seed)
    assert llm.stats().finished[FinishReason.STOP] == before + 1
    stream = llm.stream(prompts[0], params, stop=stop)
    assert "".join(delta.text for delta in stream) == first.text
    with pytest.raises(RequestError, match="stop string"):
        llm.generate(prompts, params, stop="")


def test_a_tenant_s_prompts_share_what_they_start_with(llm: LLM) -> None:
    prompt = [1648, 1424, 261, 658] * 9
    hits = []
    for tenant in ("red", "red", "blue"):
        before = llm.stats().prefix_hit_tokens
        llm.generate(prompt, GREEDY, tenant=tenant)
        for _ in llm.stream(prompt, GREEDY, tenant=tenant):
            pass
        hits.append(llm.stats().prefix_hit_tokens - before)
    assert hits == [32, 64, 32]
