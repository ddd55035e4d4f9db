"""Several choices of one request, from the API's body to the engine and back."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import openai
import pytest

from cluster.choices import ChoiceAssembler
from cluster.cli import main
from cluster.llm import LLM
from cluster.output_stream import OutputStream
from cluster.terminal import TextWriter, show_choices, summary
from protocol.config import CacheSettings, Configuration, WorkerSettings
from protocol.errors import ProtocolError, RequestError
from protocol.exit_rule import FinishReason
from protocol.sampling import SamplingParams
from tests.cluster.completion_services import (
    TOKENIZER,
    PlayedService,
    engine_service,
    output,
    running_server,
)
from tests.cluster.http_client import error_of, events, post
from tests.cluster.test_scheduler_actor import LONG, PROMPT, SHORT, at_rest, served, until

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from cluster.generation import Completion, TextDelta
    from scheduler.output import RequestOutput

HELLO, OTHER = TOKENIZER.encode("Hello wide world"), TOKENIZER.encode("Tom had a cat")
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
WARM = SamplingParams(max_tokens=10, temperature=1.0, seed=5, ignore_eos=True)


def interleaved() -> list[RequestOutput]:
    """Two choices token by token, the second one first to end."""
    first = [output(i, (token,)) for i, token in enumerate(HELLO)]
    second = [output(i, (token,), choice=1) for i, token in enumerate(OTHER)]
    first[-1] = replace(first[-1], finish_reason=LENGTH)
    second[-1] = replace(second[-1], finish_reason=STOP)
    mixed = [item for pair in zip(first, second, strict=False) for item in pair[::-1]]
    count = min(len(first), len(second))
    return [*mixed, *second[count:], *first[count:]]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    small = WorkerSettings(device="cpu", num_slots=4, cache=CacheSettings(num_blocks=257))
    with LLM("ouro-tiny", configuration=Configuration(worker=small)) as opened:
        yield opened


def test_a_whole_answer_has_every_choice_and_one_prompt() -> None:
    service = PlayedService(*interleaved())
    body = asyncio.run(post(service, n=2)).json()
    assert service.calls[0][1].n == 2
    first, second = body["choices"]
    assert (first["index"], first["text"], first["finish_reason"]) == (
        0,
        "Hello wide world",
        "length",
    )
    assert (second["index"], second["text"], second["finish_reason"]) == (
        1,
        "Tom had a cat",
        "stop",
    )
    count = len(HELLO) + len(OTHER)
    assert body["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": count,
        "total_tokens": count + 1,
        "loops_run": 4 + 2 * (len(HELLO) - 1) + 4 + 2 * (len(OTHER) - 1),
        "loops_saved": 2 * (count - 2),
    }


def test_a_stream_tells_of_each_piece_whose_it_is() -> None:
    answer = asyncio.run(
        post(
            PlayedService(*interleaved()), n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    *pieces, last, done = events(answer)
    assert done == "[DONE]"
    assert last["usage"]["completion_tokens"] == len(HELLO) + len(OTHER)
    assert last["usage"]["prompt_tokens"] == 1
    choices = [piece["choices"][0] for piece in pieces]
    assert [choice["index"] for choice in choices[:4]] == [1, 0, 1, 0]
    texts = ["".join(c["text"] for c in choices if c["index"] == index) for index in (0, 1)]
    assert texts == ["Hello wide world", "Tom had a cat"]
    ends = [(c["index"], c["finish_reason"]) for c in choices if c["finish_reason"]]
    assert sorted(ends) == [(0, "length"), (1, "stop")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_its_choice_alone(stream: bool) -> None:
    service = PlayedService(*interleaved())
    answer = asyncio.run(post(service, n=2, stop=" wide", stream=stream))
    if stream:
        choices = [event["choices"][0] for event in events(answer)[:-1]]
    else:
        choices = answer.json()["choices"]
    texts = ["".join(c["text"] for c in choices if c["index"] == index) for index in (0, 1)]
    assert texts == ["Hello", "Tom had a cat"]
    (finish,) = service.finished
    assert (finish[0], finish[2]) == ("r", 0)
    # What came of it after that is left out, and does not end the answer.
    ids = [token for c in choices if c["index"] == 0 for token in c["token_ids"]]
    assert len(ids) < len(HELLO)


def test_one_choice_that_fails_fails_the_request() -> None:
    failed = output(1, (), FinishReason.ERROR, "worker gone", choice=1)
    service = PlayedService(output(0, (5,)), output(0, (5,), choice=1), failed)
    response = asyncio.run(post(service, n=2))
    assert response.status_code == 500
    assert "worker gone" in error_of(response)["message"]
    assert service.closed == 1


@pytest.mark.parametrize("n", [0, -1, 129, True, 1.0, "2"])
def test_an_impossible_number_of_choices_is_refused(n: object) -> None:
    service = PlayedService(*interleaved())
    response = asyncio.run(post(service, n=n))
    assert (response.status_code, error_of(response)["param"]) == (400, "n")
    assert service.calls == []


def test_an_output_after_the_end_of_a_choice_is_an_error() -> None:
    assembler = ChoiceAssembler(TOKENIZER, n=2, prompt_tokens=1, max_loops=4, seed=1)
    assembler.push(output(0, (5,), LENGTH, choice=1))
    with pytest.raises(ProtocolError, match="an output after the end"):
        assembler.push(output(1, (5,), choice=1))
    with pytest.raises(ProtocolError, match="not finished"):
        assembler.completion()
    assert not assembler.finished


def test_merged_outputs_keep_their_choice() -> None:
    async def run() -> None:
        stream = OutputStream()
        for index in range(2):
            stream.put(output(index, (5 + index,), choice=1))
            stream.put(output(index, (7 + index,), choice=0))
        merged = await stream.take()
        assert [(item.choice, item.tokens) for item in merged] == [(1, (5, 6)), (0, (7, 8))]

    asyncio.run(run())


def tokens_of(outputs: list[RequestOutput]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for item in outputs:
        found.setdefault(item.choice, []).extend(item.tokens)
    return found


def test_the_engine_s_consumer_gets_every_choice_to_its_end() -> None:
    params = SHORT.model_copy(update={"n": 3, "temperature": 1.0})

    async def run() -> None:
        async with served() as (actor, client):
            outputs = [item async for item in client.generate(PROMPT, params)]
            found = tokens_of(outputs)
            assert sorted(map(len, found.values())) == [6, 6, 6]
            assert len({tuple(tokens) for tokens in found.values()}) == 3
            assert client.serving == ()
            single = params.model_copy(update={"n": 1})
            assert (
                tokens_of([item async for item in client.generate(PROMPT, single)])[0] == found[0]
            )
            await until(at_rest, actor)

    asyncio.run(run())


def test_closing_a_generation_after_one_choice_has_ended_aborts_the_others() -> None:
    params = LONG.model_copy(update={"n": 2, "max_tokens": 400})

    async def run() -> None:
        async with served() as (actor, client):
            async with aclosing(client.generate(PROMPT, params)) as outputs:
                request_id = (await anext(outputs)).key.request_id
                await client.finish(request_id, 0, 1)
                async for item in outputs:
                    if item.finish_reason is not None:
                        assert (item.choice, item.finish_reason) == (1, STOP)
                        break
                assert client.serving == (request_id,)
            await until(at_rest, actor)
            assert (await actor.stats()).finished == {STOP: 1, FinishReason.ABORT: 1}

    asyncio.run(run())


def test_a_renewal_knows_a_request_until_its_last_choice_has_ended() -> None:
    params = LONG.model_copy(update={"n": 2, "max_tokens": 900})

    async def run() -> None:
        async with served() as (actor, _), aclosing(actor.outputs("ingress-1")) as frames:
            await anext(frames)
            assert await actor.submit("ingress-1", "r1", PROMPT, params, 1) is None
            await anext(frames)
            await actor.finish("r1", 0)
            while (await actor.stats()).running:
                await actor.renew("ingress-1", [])
            await until(at_rest, actor)
            assert (await actor.stats()).finished == {STOP: 1, FinishReason.ABORT: 1}

    asyncio.run(run())


def test_a_client_that_goes_away_aborts_every_choice() -> None:
    params = LONG.model_copy(update={"n": 3, "max_tokens": 400})

    async def run() -> None:
        async with engine_service() as service:
            async with aclosing(service.generate(PROMPT, params, tenant="")) as outputs:
                await anext(outputs)
            await service.rest()
            assert service.engine.stats().finished == {FinishReason.ABORT: 3}

    asyncio.run(run())


def test_the_openai_client_gets_choices_with_logprobs() -> None:
    wish: dict[str, Any] = {"model": "ouro-tiny", "prompt": "Once upon a time", "seed": 3}
    wish |= {"n": 3, "max_tokens": 8, "temperature": 1.0, "logprobs": 2}
    with (
        running_server() as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = client.completions.create(**wish)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        assert len({choice.text for choice in whole.choices}) == 3
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 4
        counts = []
        for choice in whole.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.tokens is not None
            counts.append(len(choice.logprobs.tokens))
        assert sum(counts) == whole.usage.completion_tokens
        pieces = [piece.choices[0] for piece in client.completions.create(**wish, stream=True)]
        for choice in whole.choices:
            own = [piece for piece in pieces if piece.index == choice.index]
            assert "".join(piece.text for piece in own) == choice.text


def test_an_llm_gives_one_completion_a_prompt_with_all_choices(llm: LLM) -> None:
    three = WARM.model_copy(update={"n": 3})
    answers = llm.generate(["Once", "The sun"], three)
    assert len(answers) == 2
    for answer in answers:
        assert [choice.choice for choice in answer.choices] == [0, 1, 2]
        assert answer.choices[0] is answer
        assert len({choice.text for choice in answer.choices}) == 3
    alone = llm.generate("Once", WARM)[0]
    assert alone.choices == (alone,)
    assert (alone.text, alone.token_ids) == (answers[0].text, answers[0].token_ids)
    assert llm.generate("Once", WARM.model_copy(update={"n": 2}))[0].others == answers[0].others[:1]


def test_an_llm_ends_each_choice_at_its_own_stop_string(llm: LLM) -> None:
    three = WARM.model_copy(update={"n": 3})
    plain = llm.generate("Once", three)[0]
    text = plain.choices[1].text
    pieces = (text[start : start + 6] for start in range(3, len(text) - 6))
    stop = next(piece for piece in pieces if piece not in plain.text)
    stopped = llm.generate("Once", three, stop=stop)[0]
    assert stopped.text == plain.text
    assert stopped.choices[1].text == text[: text.index(stop)]
    assert stopped.choices[1].finish_reason is STOP


def test_an_llm_streams_the_pieces_of_all_choices(llm: LLM) -> None:
    three = WARM.model_copy(update={"n": 3})
    pieces: list[TextDelta] = []
    stream = llm.stream("Once", three)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            answer: Completion = end.value
            break
    for choice in answer.choices:
        own = [piece.text for piece in pieces if piece.choice == choice.choice]
        assert "".join(own) == choice.text


def test_more_choices_than_slots_are_refused_by_an_llm(llm: LLM) -> None:
    with pytest.raises(RequestError, match="n 5 takes as many slots, the largest worker has 4"):
        llm.generate("Once", WARM.model_copy(update={"n": 5}))


def test_the_command_prints_choices_one_after_the_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["generate", "Once", "--n", "2", "--max-tokens", "6", "--temperature", "1"]
    command += ["--seed", "3", "--ignore-eos"]
    assert main([*command, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert set(body) == {"choices", "usage"}
    texts = [choice["text"] for choice in body["choices"]]
    assert len(set(texts)) == 2
    assert body["usage"]["completion_tokens"] == 12
    assert main(command) == 0
    captured = capsys.readouterr()
    assert captured.out == f"[choice 0]\n{texts[0]}\n[choice 1]\n{texts[1]}\n"
    assert "12 tokens in" in captured.err
    assert main([*command, "--n", "0"]) == 2
    assert "--n: " in capsys.readouterr().err


def test_pieces_of_choices_are_written_choice_by_choice() -> None:
    assembler = ChoiceAssembler(TOKENIZER, n=2, prompt_tokens=1, max_loops=4, seed=1)

    def played() -> Generator[TextDelta, None, Completion]:
        for item in interleaved():
            delta = assembler.push(item)
            assert delta is not None
            yield delta
        return assembler.completion()

    out = io.StringIO()
    answer = show_choices(played(), TextWriter(out, 4, coloured=False))
    assert out.getvalue() == "[choice 0]\nHello wide world\n[choice 1]\nTom had a cat\n"
    count = len(HELLO) + len(OTHER)
    assert summary(answer, 1.0).startswith(f"{count} tokens in 1.00 s")
    assert summary(answer, 1.0).endswith("mean exit depth 2.00 of 4, 50.0 % of loops saved")
