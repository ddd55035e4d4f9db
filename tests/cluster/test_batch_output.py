"""The parts of an output: whatever is cut off and whenever, each line is there once in the end."""

from __future__ import annotations

import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.batch_output import (
    DIRECTORY,
    SUMMARY,
    BatchOutput,
    Manifest,
    finished_summary,
    remove_parts,
    write_summary,
)
from cluster.batch_parts import (
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
from cluster.batch_storage import LocalStorage, Storage, open_storage
from protocol.errors import ConfigError

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator

LINES = 23
PART = 5


def line_of(index: int) -> str:
    """An output line; each fifth one is an error."""
    if index % 5 == 4:
        told = {"id": f"é{index}", "response": None, "error": {"code": "bad", "message": "no"}}
        return json.dumps(told, ensure_ascii=False)
    names = ("prompt_tokens", "completion_tokens", "loops_run", "loops_saved")
    usage = {name: index + place for place, name in enumerate(names)}
    return json.dumps({"id": index, "response": {"body": {"usage": usage}}, "error": None})


WHOLE = "".join(f"{line_of(index)}\n" for index in range(LINES)).encode()


def manifest(**fields: Any) -> Manifest:  # noqa: ANN401
    values = {
        "input_sha256": "00",
        "input_lines": LINES,
        "model_name": "m",
        "model_fingerprint": "11",
        "dtype": "float32",
        "layout": "last_exited",
        "exit_policy": "ouro",
        "max_line_bytes": 100,
        "part_lines": PART,
    }
    return Manifest.model_validate(values | fields)


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "local":
        yield open_storage(str(tmp_path / "out.jsonl"))
        return
    remote = open_storage(f"memory://{tmp_path}/out.jsonl")
    yield remote
    for name in ("", SUMMARY):
        if remote.exists(name):
            remote.remove(name)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(["{}", '{"a":"é"}'])), max_size=6),
    st.integers(0, 200),
)
def test_records_cut_at_any_byte_are_the_whole_ones(
    records: list[tuple[int, str]], place: int
) -> None:
    data = b"".join(encode_record(*record) for record in records)
    cut = data[:place]
    assert list(read_records(cut)) == records[: cut.count(b"\n")]


@pytest.mark.parametrize("tail", [b"\x00\x00\n", b"x\t{}\n", b"3 {}\n", b"3\t{\n", b"3\t{\xff}\n"])
def test_records_behind_damage_are_dropped(tail: bytes) -> None:
    assert list(read_records(b"1\t{}\n" + tail + b"2\t{}\n")) == [(1, "{}")]


def test_names_say_what_they_mean() -> None:
    assert sealed_part(sealed_name(7)) == 7
    assert segment_part(segment_name(7, 12)) == (7, 12)
    assert sealed_part(segment_name(7, 12)) is None
    assert segment_part(sealed_name(7)) is None
    assert sealed_part("00000007.jsonl.tmp") is None


def test_a_part_is_in_the_order_of_the_input_and_says_what_it_adds_up_to() -> None:
    tally = Tally.of(line_of(3)) + Tally.of(line_of(4)) + Tally.of(line_of(9))
    assert tally == Tally(3, 2, 3, 4, 5, 6, {"bad": 2})
    part = encode_part({9: line_of(9), 3: line_of(3), 4: line_of(4)}, tally)
    assert read_head(part) == tally
    assert part.split(b"\n")[1:] == [*(line_of(i).encode() for i in (3, 4, 9)), b""]


KILLS = st.lists(
    st.tuples(st.integers(0, LINES), st.integers(0, 9), st.integers(0, 90)), max_size=4
)


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), KILLS)
def test_a_job_killed_at_any_byte_again_and_again_writes_each_line_once(
    chance: random.Random, kills: list[tuple[int, int, int]]
) -> None:
    order = chance.sample(range(LINES), LINES)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "out.jsonl"
        parts = Path(f"{path}{DIRECTORY}")
        kept = 0
        for share, which, lost in [*kills, (LINES, 0, 0)]:
            storage = open_storage(str(path))
            output = BatchOutput(storage, manifest())
            assert output.before.lines == kept
            left = [index for index in order if not output.is_written(index)]
            for index in left[:share]:
                output.write(index, line_of(index))
            storage.close()
            kept = output.tally.lines - tear(sorted(parts.glob("*.open")), which, lost)
        output.finish({"failed": output.tally.failed})
        assert path.read_bytes() == WHOLE
        assert not parts.exists()


def tear(files: list[Path], which: int, lost: int) -> int:
    """Cut so many bytes off one of the files; the number of lines that are lost with them."""
    if not files:
        return 0
    file = files[which % len(files)]
    whole = file.read_bytes()
    kept = whole[: max(len(whole) - lost, 0)]
    file.write_bytes(kept)
    return whole.count(b"\n") - kept.count(b"\n")


class KilledError(Exception):
    """Ends a job in a test."""


class DyingStorage(LocalStorage):
    """Dies before its n-th change, or within it. Owner: one test. Mutated only by: its changes."""

    def __init__(self, base: Path, changes: int, *, within: bool) -> None:
        super().__init__(LocalFileSystem(), str(base))
        self._left = changes
        self._within = within

    def append(self, name: str, data: bytes) -> None:
        if self._dies():
            super().append(name, data[: len(data) // 2])
            raise KilledError
        super().append(name, data)

    def write_whole(self, name: str, chunks: Iterable[bytes]) -> None:
        if self._dies():
            partial = Path(f"{self._base}{name}.tmp")
            partial.parent.mkdir(exist_ok=True)
            partial.write_bytes(b"".join(chunks)[:9])
            raise KilledError
        super().write_whole(name, chunks)

    def remove(self, name: str, *, recursive: bool = False) -> None:
        if self._dies():
            for file in Path(f"{self._base}{name}").glob("0*.jsonl"):
                file.unlink()
                break
            raise KilledError
        super().remove(name, recursive=recursive)

    def _dies(self) -> bool:
        self._left -= 1
        if self._left == 0 and not self._within:
            raise KilledError
        return self._left == 0


def run_job(storage: Storage) -> bool:
    """Run a batch as a job does; whether there was anything to do."""
    if finished_summary(storage, manifest()) is not None:
        remove_parts(storage)
        return False
    output = BatchOutput(storage, manifest())
    for index in range(LINES):
        if not output.is_written(index):
            output.write(index, line_of(index))
    output.finish({"failed": output.tally.failed})
    return True


@pytest.mark.parametrize("within", [False, True])
def test_a_job_may_die_at_each_of_its_changes(tmp_path: Path, within: bool) -> None:
    for changes in range(1, 100):
        path = tmp_path / f"{changes}.jsonl"
        dying = DyingStorage(path, changes, within=within)
        try:
            with closing(dying):
                run_job(dying)
        except KilledError:
            run_job(open_storage(str(path)))
            assert path.read_bytes() == WHOLE, changes
            assert not Path(f"{path}{DIRECTORY}").exists()
            assert not run_job(open_storage(str(path)))
        else:
            assert changes > LINES
            return
    raise AssertionError("it never came to its end")


def test_lines_of_any_storage_come_back(storage: Storage) -> None:
    first = BatchOutput(storage, manifest())
    for index in (7, 1, 0, 2, 3, 4, 22):
        first.write(index, line_of(index))
    assert first.first_open == 1
    first.close()
    second = BatchOutput(storage, manifest())
    assert second.before == first.tally
    assert [i for i in range(LINES) if second.is_written(i)] == [0, 1, 2, 3, 4, 7, 22]
    for index in range(LINES):
        if not second.is_written(index):
            second.write(index, line_of(index))
            second.flush()
    assert second.first_open == 5
    second.finish({"failed": 4})
    assert b"".join(storage.chunks()) == WHOLE
    assert storage.names(DIRECTORY) == []
    assert finished_summary(storage, manifest()) is not None


def test_what_is_left_of_a_sealed_part_is_removed_and_a_full_one_is_sealed(
    storage: Storage,
) -> None:
    output = BatchOutput(storage, manifest())
    for index in range(PART):
        output.write(index, line_of(index))
    # A job may die before it removes the records of a part that it sealed, or before it seals.
    storage.append(f"{DIRECTORY}/{segment_name(0, 0)}", encode_record(0, line_of(0)))
    records = b"".join(encode_record(i, line_of(i)) for i in range(PART, 2 * PART))
    storage.append(f"{DIRECTORY}/{segment_name(1, 3)}", records)
    storage.close()
    again = BatchOutput(storage, manifest())
    assert (again.first_open, again.tally.lines) == (2, 2 * PART)
    assert [name for name in storage.names(DIRECTORY) if name.endswith("open")] == []


def test_an_empty_input_has_an_empty_output(storage: Storage) -> None:
    output = BatchOutput(storage, manifest(input_lines=0))
    assert output.first_open == 0
    output.finish({"failed": 0})
    assert b"".join(storage.chunks()) == b""


@pytest.mark.parametrize(
    ("field", "value"), [("input_sha256", "ff"), ("dtype", "bfloat16"), ("part_lines", 6)]
)
def test_another_input_or_setting_is_refused_by_name(
    storage: Storage, field: str, value: object
) -> None:
    BatchOutput(storage, manifest()).close()
    with pytest.raises(ConfigError, match=f"{field} was .*, is {value}"):
        BatchOutput(storage, manifest(**{field: value}))


def test_a_damaged_manifest_is_refused(storage: Storage) -> None:
    storage.write_whole(f"{DIRECTORY}/manifest.json", [b"{"])
    with pytest.raises(ConfigError, match="damaged"):
        BatchOutput(storage, manifest())


def test_an_output_that_is_there_is_the_same_batch_s_or_refused(storage: Storage) -> None:
    assert finished_summary(storage, manifest()) is None
    storage.write_whole("", [b"something else"])
    with pytest.raises(ConfigError, match="already, of another batch"):
        finished_summary(storage, manifest())
    write_summary(storage, manifest(), "interrupted", {})
    with pytest.raises(ConfigError, match="already, of another batch"):
        finished_summary(storage, manifest())
    write_summary(storage, manifest(), "complete", {"failed": 3})
    summary = finished_summary(storage, manifest())
    assert summary is not None
    assert summary["failed"] == 3
    with pytest.raises(ConfigError, match="already, of another batch"):
        finished_summary(storage, manifest(dtype="bfloat16"))


def test_a_job_that_died_before_its_summary_puts_the_output_together_again(
    storage: Storage,
) -> None:
    output = BatchOutput(storage, manifest())
    for index in range(LINES):
        output.write(index, line_of(index))
    output.close()
    storage.write_whole("", [b"half a summary's worth"])
    assert finished_summary(storage, manifest()) is None
    BatchOutput(storage, manifest()).finish({"failed": 4})
    assert b"".join(storage.chunks()) == WHOLE
