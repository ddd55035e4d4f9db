"""What the files of an unfinished batch hold: records of single lines, and parts that are complete.

A record is one output line behind the index of its input line, so records may stand in the order
in which requests ended. A part is the output of a fixed range of input lines, in their order,
behind one line that counts it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from pydantic_core import from_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HEAD_BYTES = 2**13
"""More than the first line of a part can have: a dozen numbers, and a count for each error code."""

_SEALED = re.compile(r"(\d{8,})\.jsonl")
_SEGMENT = re.compile(r"(\d{8,})\.(\d{4,})\.open")


@dataclass(frozen=True, slots=True)
class Tally:
    """What some output lines add up to; `failed` ones have an error, counted by its code."""

    lines: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    loops_run: int = 0
    loops_saved: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, line: str) -> Self:
        """That of one output line."""
        value = from_json(line)
        if value["error"] is not None:
            return cls(lines=1, failed=1, errors={value["error"]["code"]: 1})
        usage = value["response"]["body"]["usage"]
        names = ("prompt_tokens", "completion_tokens", "loops_run", "loops_saved")
        return cls(lines=1, **{name: usage[name] for name in names})

    def __add__(self, other: Tally) -> Tally:
        errors = self.errors
        if other.errors:
            errors = dict(sorted((Counter(errors) + Counter(other.errors)).items()))
        return Tally(
            self.lines + other.lines,
            self.failed + other.failed,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.loops_run + other.loops_run,
            self.loops_saved + other.loops_saved,
            errors,
        )

    def as_dict(self) -> dict[str, Any]:
        """Its fields, for JSON."""
        names = ("lines", "failed", "prompt_tokens", "completion_tokens", "loops_run")
        return {name: getattr(self, name) for name in (*names, "loops_saved", "errors")}


def sealed_name(part: int) -> str:
    """The name of a complete part."""
    return f"{part:08d}.jsonl"


def segment_name(part: int, number: int) -> str:
    """The name of a file of records of a part that is not complete."""
    return f"{part:08d}.{number:04d}.open"


def sealed_part(name: str) -> int | None:
    """The part that a name of sealed_name means; None for other names."""
    match = _SEALED.fullmatch(name)
    return int(match[1]) if match else None


def segment_part(name: str) -> tuple[int, int] | None:
    """The part and number that a name of segment_name means; None for other names."""
    match = _SEGMENT.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def encode_record(index: int, line: str) -> bytes:
    """One record. Example: (7, "{}") is b"7\\t{}\\n"."""
    return f"{index}\t{line}\n".encode()


def read_records(data: bytes) -> Iterator[tuple[int, str]]:
    """The records of a segment up to the first that is not whole.

    A job may die within a write, and a machine may lose the end of a file or fill it with zeros.
    """
    *whole, _ = data.split(b"\n")
    for entry in whole:
        index, tab, line = entry.partition(b"\t")
        if not (tab and index.isdigit() and line.startswith(b"{") and line.endswith(b"}")):
            return
        try:
            yield int(index), line.decode()
        except UnicodeDecodeError:
            return


def encode_part(lines: Mapping[int, str], tally: Tally) -> bytes:
    """A complete part: what it adds up to, then its lines in the order of the input."""
    head = json.dumps(tally.as_dict())
    return "".join(f"{line}\n" for line in (head, *(lines[i] for i in sorted(lines)))).encode()


def read_head(data: bytes) -> Tally:
    """The tally of a complete part, from its first HEAD_BYTES."""
    return Tally(**from_json(data.partition(b"\n")[0]))
