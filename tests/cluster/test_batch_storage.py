from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import pytest

from cluster.batch_storage import open_storage
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.parametrize("uri", ["nowhere://a/b", "gdrive://a/b"])
def test_a_scheme_that_cannot_be_used_says_why(uri: str) -> None:
    with pytest.raises(ConfigError, match=uri):
        open_storage(uri)


def test_a_path_and_a_file_uri_are_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"ab\ncd")
    for uri in (str(tmp_path / "in.jsonl"), f"file://{tmp_path}/in.jsonl"):
        assert b"".join(open_storage(uri).chunks()) == b"ab\ncd"


def test_a_packed_file_is_unpacked_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(b"ab\ncd"))
    assert b"".join(open_storage(str(tmp_path / "in.jsonl.gz")).chunks()) == b"ab\ncd"


def test_a_file_that_fails_on_its_way_leaves_the_last_one(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "deep" / "out"))
    storage.write_whole("", [b"first"])

    def failing() -> Iterator[bytes]:
        yield b"second"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        storage.write_whole("", failing())
    assert storage.read("") == b"first"
    assert storage.read("", 2) == b"fi"


def test_what_is_appended_is_there_at_once(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "out"))
    storage.append(".parts/a", b"1")
    storage.append(".parts/a", b"2")
    assert (tmp_path / "out.parts" / "a").read_bytes() == b"12"
    assert storage.names(".parts") == ["a"]
    storage.remove(".parts/a")
    storage.close()
    assert storage.names(".parts") == []
    assert storage.names(".nothing") == []


def test_one_job_at_a_time_holds_an_output(tmp_path: Path) -> None:
    first, second = (open_storage(str(tmp_path / "out")) for _ in range(2))
    refused = pytest.raises(ConfigError, match="another job writes")
    with first.lock(".parts/lock"), refused, second.lock(".parts/lock"):
        pass
    with second.lock(".parts/lock"):
        assert storage_is_there(tmp_path)


def storage_is_there(directory: Path) -> bool:
    return (directory / "out.parts" / "lock").exists()
