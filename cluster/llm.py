"""LLM: a looped model in a few lines of Python, in this process or on Ray workers.

    with LLM("ouro-tiny") as llm:
        print(llm.generate("Once upon a time")[0].text)

One call runs at a time: generate takes a whole batch, stream one prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Self

from cluster.choices import ChoiceAssembler
from cluster.engine_session import EngineSession
from cluster.generation import resolve_seed
from cluster.interrupts import interrupts_held
from cluster.stop_strings import checked_stop
from protocol.config import Configuration
from protocol.errors import ExecutorClosedError, LoopmeshError, RequestError
from protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from types import TracebackType

    from cluster.generation import Completion, TextDelta
    from cluster.tokenizer import Tokenizer
    from cluster.workers import ExecutorKind
    from protocol.profile import WorkerProfile
    from scheduler.output import RequestOutput
    from scheduler.stats import EngineStats

Prompt = str | list[int]


class LLM:
    """A loaded model. Owner: one thread of the caller. Mutated only by: its own methods.

    `model` is "ouro-tiny", a directory or a hub id; None takes the configuration's. `executor`
    "local" runs one worker in this process and never imports Ray; "ray" starts `workers` of them
    on Ray. Raises ConfigError or ModelError, and leaves nothing open then.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        executor: ExecutorKind = "local",
        workers: int = 1,
        configuration: Configuration | None = None,
    ) -> None:
        self._configuration = _with_model(configuration or Configuration(), model)
        self._ids = itertools.count()
        self._busy = False
        self._closed = False
        # A caller's own batch is never turned away: the queue is as long as the batch.
        self._session = EngineSession.open(self._configuration, executor, workers)
        self._engine, self._driver = self._session.engine, self._session.driver
        self._tokenizer, self._profile = self._session.tokenizer, self._session.profile

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "busy" if self._busy else "idle"
        return f"<LLM {self._profile.model.name} on {self._profile.device}, {state}>"

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def profile(self) -> WorkerProfile:
        """The model and the room of one worker."""
        return self._profile

    def stats(self) -> EngineStats:
        """What is running, what is free, and the totals so far."""
        return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        tenant: str = "",
    ) -> list[Completion]:
        """The answers to all prompts, run together, in the order of the prompts.

        A prompt is a text or a list of token ids; a list of integers is one prompt. `params` is
        one for all or one for each; None is greedy. There is one Completion a prompt, whatever
        `n`: choice 0, which has all of them in `choices`. Each answer ends before the first of the
        `stop` strings in it. Prompts of one `tenant` share the KV of what they start with. Raises
        RequestError before anything runs when a prompt or its parameters are wrong, LoopmeshError
        when a request fails; whatever ends the call early, also Ctrl-C, aborts the rest and leaves
        nothing behind.
        """
        batch = _as_batch(prompts)
        wishes = _one_each(params, len(batch))
        with closing(self._run(batch, wishes, checked_stop(stop), tenant)) as run:
            while True:
                try:
                    next(run)
                except StopIteration as end:
                    answers: list[Completion] = end.value
                    return answers

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        tenant: str = "",
    ) -> Generator[TextDelta, None, Completion]:
        """The answer to one prompt, as it grows; the generator's return value is all of it.

        With `n` choices their pieces come as they are sampled, each with its index in `choice`.
        Nothing runs before the first `next`. Closing the generator aborts the request.
        """
        wishes = [params or SamplingParams()]
        with closing(self._run([prompt], wishes, checked_stop(stop), tenant)) as run:
            while True:
                try:
                    delta = next(run)
                except StopIteration as end:
                    answer: Completion = end.value[0]
                    return answer
                yield delta

    def close(self) -> None:
        """Shut the workers down; idempotent. The LLM cannot be used after it."""
        if not self._closed:
            self._closed = True
            self._session.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        stop: tuple[str, ...],
        tenant: str,
    ) -> Generator[TextDelta, None, list[Completion]]:
        """Run a batch to its end, yielding every piece of text as it comes."""
        self._claim()
        assemblers: dict[str, ChoiceAssembler] = {}
        try:
            for index, (prompt, wish) in enumerate(zip(prompts, params, strict=True)):
                try:
                    self._add(prompt, wish, stop, tenant, assemblers)
                except LoopmeshError as error:
                    raise _with_index(error, index, len(prompts)) from error
            while not all(assembler.finished for assembler in assemblers.values()):
                for output in self._step():
                    request_id = output.key.request_id
                    assembler = assemblers[request_id]
                    delta = assembler.push(output)
                    if delta is None:
                        continue
                    if (stop_index := assembler.stop_index(output.choice)) is not None:
                        self._engine.finish(request_id, stop_index, output.choice)
                    yield delta
            return [assembler.completion() for assembler in assemblers.values()]
        finally:
            self._settle(assemblers)

    def _claim(self) -> None:
        if self._closed:
            raise ExecutorClosedError("this LLM is closed: open a new one")
        if self._busy:
            raise RequestError("this LLM is in use: finish or close the running stream first")
        self._busy = True

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        stop: tuple[str, ...],
        tenant: str,
        assemblers: dict[str, ChoiceAssembler],
    ) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"the parameters are {params!r:.80}: give SamplingParams(...)")
        if not isinstance(prompt, str | Sequence):
            raise RequestError(f"the prompt is {prompt!r:.80}, not a text or a list of token ids")
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        seed = resolve_seed(params.seed)
        request_id = str(next(self._ids))
        max_loops = self._profile.model.max_loops
        # Known before it is added: an interrupt in between must not leave a request behind.
        assemblers[request_id] = ChoiceAssembler(
            self._tokenizer,
            n=params.n,
            prompt_tokens=len(ids),
            max_loops=max_loops,
            seed=seed,
            stop=stop,
        )
        self._engine.add(request_id, ids, params, seed, tenant=tenant)

    def _settle(self, assemblers: Mapping[str, ChoiceAssembler]) -> None:
        """Abort what still runs and wait until the workers gave every block back."""
        try:
            for request_id in assemblers:
                self._engine.abort(request_id)  # does nothing to one that has ended
            with interrupts_held():
                self._driver.drain(self._configuration.cluster.shutdown_timeout)
        except BaseException:
            self.close()  # an engine that cannot be drained is of no further use
            raise
        finally:
            self._busy = False

    def _step(self) -> list[RequestOutput]:
        with interrupts_held():
            return self._driver.step()


def _with_model(configuration: Configuration, model: str | None) -> Configuration:
    if model is None:
        return configuration
    named = configuration.worker.model.model_copy(update={"model": model})
    worker = configuration.worker.model_copy(update={"model": named})
    return configuration.model_copy(update={"worker": worker})


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a text and a list of integers are one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"the prompts are {prompts!r:.80}: give a text, or a list of prompts")
    ids = [entry for entry in prompts if isinstance(entry, int)]
    if ids and len(ids) == len(prompts):
        return [ids]
    batch = [entry for entry in prompts if not isinstance(entry, int)]
    if len(batch) != len(prompts):
        raise RequestError("token ids beside prompts: put each prompt's ids in a list of its own")
    return batch


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence):
        raise RequestError(
            f"the parameters are {params!r:.80}: give SamplingParams, or a list of them"
        )
    if len(params) != count:
        raise RequestError(
            f"{len(params)} SamplingParams for {count} prompts: give one for all, or one for each"
        )
    return list(params)


def _with_index(error: LoopmeshError, index: int, count: int) -> LoopmeshError:
    """`error` with the place of the prompt that it is about."""
    return error if count == 1 else type(error)(f"prompt {index}: {error}")
