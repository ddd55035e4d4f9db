"""The choices of one answer: which output is whose, and when all of them have ended."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.generation import TextAssembler

if TYPE_CHECKING:
    from cluster.generation import Completion, TextDelta
    from cluster.tokenizer import Tokenizer
    from scheduler.output import RequestOutput


class ChoiceAssembler:
    """Builds all choices of one answer. Owner: whoever asked for it. Mutated only by: push.

    Each choice has a detokenizer, stop strings and an end of its own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        n: int,
        prompt_tokens: int,
        max_loops: int,
        seed: int,
        stop: tuple[str, ...] = (),
    ) -> None:
        self._choices = [
            TextAssembler(
                tokenizer,
                prompt_tokens=prompt_tokens,
                max_loops=max_loops,
                seed=seed,
                stop=stop,
                choice=choice,
            )
            for choice in range(n)
        ]

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finished for choice in self._choices)

    def push(self, output: RequestOutput) -> TextDelta | None:
        """The text of the next output; None when a stop string has ended its choice before it.

        Raises what TextAssembler.push raises.
        """
        choice = self._choices[output.choice]
        if choice.stop_index is not None:
            return None
        return choice.push(output)

    def stop_index(self, choice: int) -> int | None:
        """See TextAssembler.stop_index."""
        return self._choices[choice].stop_index

    def completion(self) -> Completion:
        """Choice 0, with the others. Raises ProtocolError before the end of all."""
        first, *others = (choice.completion() for choice in self._choices)
        return replace(first, others=tuple(others))
