"""From a request's outputs to text: one place for LLM, HTTP and whatever else answers users."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.stop_strings import StopSearch
from protocol.errors import ProtocolError
from protocol.exit_rule import FinishReason
from protocol.rng import MAX_SEED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.tokenizer import Tokenizer
    from protocol.result import TokenLogprobs
    from scheduler.output import RequestOutput


def resolve_seed(seed: int | None) -> int:
    """`seed`, or 63 bits of the system's entropy when the user gave none."""
    return secrets.randbelow(MAX_SEED + 1) if seed is None else seed


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one step added to an answer.

    `exit_depths` has one 1-based depth a token. `text` may lag behind the tokens while a character
    is incomplete, so it can be empty, and it never covers a special token. `logprobs` has one entry
    a token if the request asked for them, else none; `text_offsets` is where each token's text
    begins in the whole answer. `choice` says of which of several answers it is a piece.
    """

    text: str
    token_ids: tuple[int, ...]
    exit_depths: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    text_offsets: tuple[int, ...] = ()
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer, and what it cost in loops.

    `max_loops` is the loops of a full pass of the model, `seed` the one that drew the answer: the
    same request with this seed gives the same answer. `logprobs` and `text_offsets` are as in
    TextDelta. Of a request with `n` choices this is the one of index `choice`; choice 0 has the
    others, and `choices` are all of them.

    Example: max_loops 4 and exit_depths (4, 2, 3) are 9 loops run. The first output comes out of
    the prompt's last position, which always takes the full pass, so only the two outputs after it
    could save anything: loops_saved (4 - 2) + (4 - 3) = 3 of 8, mean_depth (2 + 3) / 2 = 2.5.
    """

    text: str
    token_ids: tuple[int, ...]
    exit_depths: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    max_loops: int
    seed: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    text_offsets: tuple[int, ...] = ()
    choice: int = 0
    others: tuple[Completion, ...] = ()

    @property
    def choices(self) -> tuple[Completion, ...]:
        """All answers to the prompt, in the order of their index; one unless more were asked."""
        return (self, *self.others)

    @property
    def loops_run(self) -> int:
        """Loops of all outputs."""
        return sum(self.exit_depths)

    @property
    def loops_saved(self) -> int:
        """Loops that full passes would have run more, over the outputs after the first."""
        return self.loops_possible - sum(self.exit_depths[1:])

    @property
    def loops_possible(self) -> int:
        """Loops of full passes over the outputs after the first."""
        return self.max_loops * len(self.exit_depths[1:])

    @property
    def mean_depth(self) -> float | None:
        """Mean exit depth of the outputs after the first; None when there is no such output."""
        later = self.exit_depths[1:]
        return sum(later) / len(later) if later else None


class TextAssembler:
    """Builds one answer. Owner: whoever asked for it. Mutated only by: push.

    The first of the `stop` strings in the text ends the answer before it (cluster/stop_strings.py).
    The engine does not know: whoever pushes then tells it to finish at `stop_index`, and pushes
    nothing more.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_tokens: int,
        max_loops: int,
        seed: int,
        stop: tuple[str, ...] = (),
        choice: int = 0,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._prompt_tokens = prompt_tokens
        self._max_loops = max_loops
        self._seed = seed
        self._choice = choice
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._exit_depths: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text_offsets: list[int] = []
        self._length = 0
        self._stop = StopSearch(stop)
        self._finish_reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        """Whether the last output has come."""
        return self._finish_reason is not None

    @property
    def stop_index(self) -> int | None:
        """The output index whose token completed a stop string; None while there is none."""
        return len(self._token_ids) - 1 if self._stop.found else None

    def push(self, output: RequestOutput) -> TextDelta:
        """The text of the next output.

        Raises WorkerLostError or LoopmeshError when the output reports that the request failed,
        ProtocolError when it does not continue the ones before.
        """
        if self.finished:
            raise ProtocolError(f"{output.key}: an output after the end")
        if output.finish_reason is FinishReason.ERROR:
            self._finish_reason = FinishReason.ERROR
            output.raise_error()
        if output.tokens and output.start_index != len(self._token_ids):
            raise ProtocolError(
                f"{output.key}: output {output.start_index} came, {len(self._token_ids)} is next"
            )
        text, offsets = self._read(output.tokens)
        reason, kept = output.finish_reason, len(offsets)
        if reason is not None and not self._stop.found:
            text += self._stop.push(self._detokenizer.finish())
            text += self._stop.finish()
        delta = TextDelta(
            text=text,
            token_ids=output.tokens[:kept],
            exit_depths=output.exit_depths[:kept],
            finish_reason=FinishReason.STOP if self._stop.found else reason,
            logprobs=output.logprobs[:kept],
            text_offsets=offsets,
            choice=self._choice,
        )
        self._text.append(text)
        self._token_ids.extend(delta.token_ids)
        self._exit_depths.extend(delta.exit_depths)
        self._logprobs.extend(delta.logprobs)
        self._text_offsets.extend(offsets)
        self._finish_reason = delta.finish_reason
        return delta

    def _read(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """The text of `tokens` up to a stop string, and where each that was read begins."""
        text, offsets = "", []
        for piece in self._detokenizer.pieces(tokens):
            offsets.append(self._length)
            self._length += len(piece)
            text += self._stop.push(piece)
            if self._stop.found:
                break
        return text, tuple(offsets)

    def completion(self) -> Completion:
        """The whole answer. Raises ProtocolError before its end."""
        if self._finish_reason is None:
            raise ProtocolError("the answer is not finished: push its last output first")
        return Completion(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            exit_depths=tuple(self._exit_depths),
            finish_reason=self._finish_reason,
            prompt_tokens=self._prompt_tokens,
            max_loops=self._max_loops,
            seed=self._seed,
            logprobs=tuple(self._logprobs),
            text_offsets=tuple(self._text_offsets),
            choice=self._choice,
        )
