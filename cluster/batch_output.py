"""The output of a batch: parts beside the final file until all lines are there, then the file.

OUTPUT.parts/manifest.json        which input and settings the parts belong to
OUTPUT.parts/00000002.jsonl       a complete part, written at once
OUTPUT.parts/00000003.0001.open   records of a part that is not complete, only appended to
OUTPUT, OUTPUT.summary.json       written at the end, each at once; then the parts are removed
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.batch_parts import (
    HEAD_BYTES,
    Tally,
    encode_part,
    encode_record,
    read_head,
    read_records,
    sealed_name,
    sealed_part,
    segment_name,
    segment_part,
)
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.batch_storage import Storage

DIRECTORY = ".parts"
MANIFEST = f"{DIRECTORY}/manifest.json"
LOCK = f"{DIRECTORY}/lock"
SUMMARY = ".summary.json"

COMPLETE = "complete"
"""The state in a summary that says that the output is whole."""


class Manifest(BaseModel):
    """What decides the bytes of an output: a job only goes on with what has all of it the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = 1
    input_sha256: str
    input_lines: int
    model_name: str
    model_fingerprint: str
    dtype: str
    layout: str
    exit_policy: str
    max_line_bytes: int
    part_lines: int

    def differences(self, other: Manifest) -> list[str]:
        """Each field that differs, with both values."""
        mine, theirs = self.model_dump(), other.model_dump()
        return [
            f"{name} was {theirs[name]}, is {mine[name]}"
            for name in mine
            if mine[name] != theirs[name]
        ]


@dataclass(slots=True)
class _OpenPart:
    """A part that lacks lines. Owner: BatchOutput, which alone mutates it.

    `pending` has records that are not written yet, where files cannot grow; `segment` is the
    number of the segment that is written next.
    """

    lines: dict[int, str] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    segment: int = 0
    pending: bytearray = field(default_factory=bytearray)


class BatchOutput:
    """Owner: one job, which holds LOCK. Mutated only by: write, flush, discard, finish.

    `tally` is that of all lines so far, `before` that of those that earlier jobs left.
    """

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._manifest = manifest
        self._open: dict[int, _OpenPart] = {}
        self._sealed = bytearray(-(-manifest.input_lines // manifest.part_lines))
        self._first_open = 0
        self.tally = Tally()
        self._begin()
        self._resume()
        self.before = self.tally

    @property
    def first_open(self) -> int:
        """The lowest part that lacks lines; the number of parts when none does."""
        while self._first_open < len(self._sealed) and self._sealed[self._first_open]:
            self._first_open += 1
        return self._first_open

    def is_written(self, index: int) -> bool:
        """Whether the output of an input line is there."""
        part = self.part_of(index)
        return bool(self._sealed[part]) or (part in self._open and index in self._open[part].lines)

    def part_of(self, index: int) -> int:
        """The part that an input line belongs to."""
        return index // self._manifest.part_lines

    def write(self, index: int, line: str) -> None:
        """Keep the output of an input line that is not there yet; seals its part with the last."""
        part = self.part_of(index)
        entry = self._open.setdefault(part, _OpenPart())
        self._take(entry, index, line)
        record = encode_record(index, line)
        if len(entry.lines) == self._size(part):
            self._seal(part)
        elif self._storage.grows_by_line:
            self._storage.append(self._path(segment_name(part, entry.segment)), record)
        else:
            entry.pending += record

    def flush(self) -> None:
        """Write what waits to be written."""
        for part, entry in self._open.items():
            if entry.pending:
                name = segment_name(part, entry.segment)
                self._storage.append(self._path(name), bytes(entry.pending))
                entry.pending.clear()
                entry.segment += 1

    def close(self) -> None:
        """Flush and close files; idempotent."""
        self.flush()
        self._storage.close()

    def discard(self) -> None:
        """Remove everything that was kept, for good."""
        self._open.clear()
        self._storage.close()
        remove_parts(self._storage)

    def finish(self, summary: dict[str, Any]) -> None:
        """Put the parts together, write the summary, and remove the parts."""
        self._storage.close()
        self._storage.write_whole("", self._all_lines())
        write_summary(self._storage, self._manifest, COMPLETE, summary)
        remove_parts(self._storage)

    def _all_lines(self) -> Iterator[bytes]:
        for part in range(len(self._sealed)):
            in_head = True
            for chunk in self._storage.chunks(self._path(sealed_name(part))):
                if not in_head:
                    yield chunk
                    continue
                _, newline, after = chunk.partition(b"\n")
                in_head = not newline
                yield after

    def _begin(self) -> None:
        """Write the manifest, or compare it with the one that is there."""
        if not self._storage.exists(MANIFEST):
            self._storage.write_whole(MANIFEST, [self._manifest.model_dump_json().encode()])
            return
        begun = read_manifest(self._storage.read(MANIFEST), MANIFEST)
        if differences := self._manifest.differences(begun):
            raise ConfigError(
                f"the output was begun with other input or settings ({'; '.join(differences)}): "
                f"give it the same, choose another output, or remove its {DIRECTORY}"
            )

    def _resume(self) -> None:
        """Read what earlier jobs wrote."""
        names = self._storage.names(DIRECTORY)
        for name in names:
            if (part := sealed_part(name)) is not None and part < len(self._sealed):
                self._sealed[part] = True
                self.tally += read_head(self._storage.read(self._path(name), HEAD_BYTES))
        for name in names:
            if (place := segment_part(name)) is not None and place[0] < len(self._sealed):
                self._resume_segment(name, *place)
        for part in list(self._open):
            if len(self._open[part].lines) == self._size(part):
                self._seal(part)

    def _resume_segment(self, name: str, part: int, number: int) -> None:
        if self._sealed[part]:
            self._storage.remove(self._path(name))
            return
        entry = self._open.setdefault(part, _OpenPart())
        entry.segment = max(entry.segment, number + 1)
        for index, line in read_records(self._storage.read(self._path(name))):
            if self.part_of(index) == part and index not in entry.lines:
                self._take(entry, index, line)

    def _take(self, entry: _OpenPart, index: int, line: str) -> None:
        entry.lines[index] = line
        tally = Tally.of(line)
        entry.tally += tally
        self.tally += tally

    def _seal(self, part: int) -> None:
        entry = self._open.pop(part)
        whole = encode_part(entry.lines, entry.tally)
        self._storage.write_whole(self._path(sealed_name(part)), [whole])
        self._sealed[part] = True
        for number in range(entry.segment + 1):
            if self._storage.exists(self._path(segment_name(part, number))):
                self._storage.remove(self._path(segment_name(part, number)))

    def _size(self, part: int) -> int:
        """Lines of a part: the last one may have fewer."""
        size = self._manifest.part_lines
        return min(size, self._manifest.input_lines - part * size)

    def _path(self, name: str) -> str:
        return f"{DIRECTORY}/{name}"


def read_manifest(data: bytes, name: str) -> Manifest:
    """A manifest from its bytes. Raises ConfigError for what is none."""
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        raise ConfigError(
            f"{name} is of another version, or damaged: remove the {DIRECTORY} beside the output "
            "to begin anew"
        ) from error


def write_summary(
    storage: Storage, manifest: Manifest, state: str, summary: dict[str, Any]
) -> None:
    """Write how a job ended, beside its output."""
    body = {"state": state} | summary | {"manifest": manifest.model_dump()}
    storage.write_whole(SUMMARY, [json.dumps(body, indent=2).encode(), b"\n"])


def finished_summary(storage: Storage, manifest: Manifest) -> dict[str, Any] | None:
    """The summary of the same batch when its output is whole already, else None.

    Raises ConfigError for an output that is of something else.
    """
    if not storage.exists():
        return None
    summary = _read_summary(storage)
    if summary.get("state") == COMPLETE and summary.get("manifest") == manifest.model_dump():
        return summary
    if storage.exists(MANIFEST):
        return None  # its job died between the output and the summary
    raise ConfigError("the output is there already, of another batch: remove it or choose another")


def _read_summary(storage: Storage) -> dict[str, Any]:
    """The summary beside an output; empty when there is none."""
    if not storage.exists(SUMMARY):
        return {}
    try:
        summary = json.loads(storage.read(SUMMARY))
    except ValueError:
        return {}
    return summary if isinstance(summary, dict) else {}


def remove_parts(storage: Storage) -> None:
    """Remove what an output is put together from, if it is there."""
    if storage.exists(DIRECTORY):
        storage.remove(DIRECTORY, recursive=True)
