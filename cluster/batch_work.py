"""LineWork: one line of a batch from its call to its answer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.batch_lines import answer_line
from scheduler.output import join

if TYPE_CHECKING:
    from cluster.api_calls import Call
    from cluster.batch_lines import BatchLine, RawLine
    from cluster.choices import ChoiceAssembler
    from scheduler.output import RequestOutput


@dataclass(slots=True)
class LineWork:
    """One line in work. Owner: BatchRun, which alone mutates it.

    `running` counts the choices that have not ended. `waiting` has the outputs that were not
    pushed yet: all of them, unless the text may end an answer.
    """

    raw: RawLine
    line: BatchLine
    call: Call
    assembler: ChoiceAssembler
    attempt: int
    running: int
    waiting: list[RequestOutput] = field(default_factory=list)

    def answer(self) -> str:
        """The output line, once every choice has ended."""
        outputs: dict[int, list[RequestOutput]] = defaultdict(list)
        for output in self.waiting:
            outputs[output.choice].append(output)
        for of_choice in outputs.values():
            self.assembler.push(join(of_choice))
        return answer_line(self.line, self.call, self.assembler.completion())
