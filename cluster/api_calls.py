"""Call: one checked request of the API, whoever brought it, and how its answer is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from cluster.api_chat import ChatChoice, ChatCompletionRequest, ChatCompletionResponse
from cluster.api_errors import invalid_request, model_not_found
from cluster.api_types import Choice, CompletionRequest, CompletionResponse, Usage
from cluster.choices import ChoiceAssembler
from cluster.generation import resolve_seed

if TYPE_CHECKING:
    from cluster.generation import Completion, TextDelta
    from cluster.tokenizer import Tokenizer
    from protocol.sampling import SamplingParams

GeneratingBody: TypeAlias = CompletionRequest | ChatCompletionRequest

BODIES: dict[str, type[CompletionRequest] | type[ChatCompletionRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
}
"""The body of each path that generates."""


@dataclass(frozen=True, slots=True)
class Call:
    """One checked request; `response_id` and `created` stand in all its answers.

    `params` has the seed that the answer is drawn with.
    """

    body: GeneratingBody
    prompt: list[int]
    params: SamplingParams
    seed: int
    response_id: str
    created: int
    tokenizer: Tokenizer

    def assembler(self, max_loops: int) -> ChoiceAssembler:
        """What builds the answer from the engine's outputs."""
        return ChoiceAssembler(
            self.tokenizer,
            n=self.params.n,
            prompt_tokens=len(self.prompt),
            max_loops=max_loops,
            seed=self.seed,
            stop=self.body.stop,
        )

    def answer(self, completion: Completion) -> str:
        """The whole answer as JSON."""
        usage = Usage.of(completion)
        if isinstance(self.body, CompletionRequest):
            choices = tuple(Choice.of(part, self.tokenizer) for part in completion.choices)
            return self._completion(choices, usage=usage)
        chats = tuple(ChatChoice.whole(part, self.tokenizer) for part in completion.choices)
        return ChatCompletionResponse(
            id=self.response_id,
            object="chat.completion",
            created=self.created,
            model=self.body.model,
            choices=chats,
            usage=usage,
        ).to_json()

    def opening(self) -> list[str]:
        """The events before the first piece of a streamed answer, as JSON."""
        if isinstance(self.body, CompletionRequest):
            return []
        return [self._chunk((ChatChoice.opening(index),)) for index in range(self.params.n)]

    def event(self, delta: TextDelta) -> str:
        """One event of a streamed answer, as JSON."""
        if isinstance(self.body, CompletionRequest):
            return self._completion((Choice.of(delta, self.tokenizer),))
        return self._chunk((ChatChoice.piece(delta, self.tokenizer),))

    def closing(self, completion: Completion) -> list[str]:
        """The events after the last piece of a streamed answer, as JSON."""
        if not self.body.include_usage:
            return []
        usage = Usage.of(completion)
        if isinstance(self.body, CompletionRequest):
            return [self._completion((), usage=usage)]
        return [self._chunk((), usage=usage)]

    def _completion(self, choices: tuple[Choice, ...], **usage: Usage | None) -> str:
        return CompletionResponse(
            id=self.response_id,
            object="text_completion",
            created=self.created,
            model=self.body.model,
            choices=choices,
            **self._usage(usage),
        ).to_json()

    def _chunk(self, choices: tuple[ChatChoice, ...], **usage: Usage | None) -> str:
        return ChatCompletionResponse(
            id=self.response_id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.body.model,
            choices=choices,
            **self._usage(usage),
        ).to_json()

    def _usage(self, given: dict[str, Usage | None]) -> dict[str, Usage | None]:
        """A stream that will end with its usage says null before; others do not name it."""
        return given or ({"usage": None} if self.body.include_usage else {})


def checked_call(
    body: GeneratingBody,
    model_name: str,
    tokenizer: Tokenizer,
    name: str,
    created: int,
    seed: int | None,
) -> Call:
    """The call that a valid body is.

    `name` becomes part of the answer's id; `seed` is taken when the body has none, and None draws
    one. Raises ApiError, RequestError or pydantic's ValidationError when it cannot run.
    """
    if body.model != model_name:
        raise model_not_found(body.model, model_name)
    params = body.to_sampling_params()
    if isinstance(body, ChatCompletionRequest):
        messages = [{"role": entry.role, "content": entry.text} for entry in body.messages]
        prompt = tokenizer.encode_chat(messages)
    elif isinstance(body.prompt, str):
        prompt = tokenizer.encode(body.prompt)
    else:
        prompt = list(body.prompt)
    if not prompt:
        raise invalid_request("prompt: empty; send at least one token", "prompt")
    chosen = resolve_seed(seed if params.seed is None else params.seed)
    kind = "chatcmpl" if isinstance(body, ChatCompletionRequest) else "cmpl"
    return Call(
        body=body,
        prompt=prompt,
        params=params.model_copy(update={"seed": chosen}),
        seed=chosen,
        response_id=f"{kind}-{name}",
        created=created,
        tokenizer=tokenizer,
    )
