"""Files of a batch, on this machine or behind any fsspec URI.

Both kinds write a file whole under its name or not at all. Only this machine's files can grow line
by line and be locked; elsewhere each write is an object of its own, and two jobs with one output
are not kept apart.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

READ_BYTES = 2**20


def open_storage(uri: str) -> Storage:
    """The storage of a path or URI. Raises ConfigError for a scheme that cannot be used here."""
    try:
        filesystem, path = fsspec.url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{uri}: {error}") from error
    kind = LocalStorage if isinstance(filesystem, LocalFileSystem) else Storage
    return kind(filesystem, path)


class Storage:
    """A base path and names behind it ("" is the base itself). Immutable.

    Raises OSError, as whatever is behind it does.
    """

    grows_by_line = False
    """Whether `append` may be called again and again for one name."""

    def __init__(self, filesystem: Any, base: str) -> None:  # noqa: ANN401 (fsspec is untyped)
        self._filesystem = filesystem
        self._base = base

    def exists(self, name: str = "") -> bool:
        """Whether there is such a file."""
        return bool(self._filesystem.exists(self._base + name))

    def chunks(self, name: str = "") -> Iterator[bytes]:
        """The bytes of a file; .gz, .bz2 and .xz are unpacked by their names."""
        path = self._base + name
        opened = fsspec.core.OpenFile(self._filesystem, path, "rb", _compression(path))
        with opened as file:
            while chunk := file.read(READ_BYTES):
                yield chunk

    def read(self, name: str, limit: int | None = None) -> bytes:
        """The first `limit` bytes of a file; None reads all of it."""
        return bytes(self._filesystem.cat_file(self._base + name, start=0, end=limit))

    def names(self, directory: str) -> list[str]:
        """The names in a directory of the base, sorted; none when it is not there."""
        path = self._base + directory
        if not self._filesystem.isdir(path):
            return []
        self._filesystem.invalidate_cache(path)
        return sorted(Path(entry).name for entry in self._filesystem.ls(path, detail=False))

    def write_whole(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write a file so that its name shows all of it or nothing."""
        path = self._base + name
        partial = f"{path}.tmp"
        self._make_parent(path)
        with self._filesystem.open(partial, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            self._make_durable(file)
        self._rename(partial, path)

    def append(self, name: str, data: bytes) -> None:
        """Write the bytes of a file that is not there yet."""
        self._make_parent(self._base + name)
        self._filesystem.pipe_file(self._base + name, data)

    def close(self) -> None:
        """Close what append opened; idempotent."""

    def remove(self, name: str, *, recursive: bool = False) -> None:
        """Remove a file or a directory that is there."""
        self._filesystem.rm(self._base + name, recursive=recursive)

    def lock(self, name: str) -> AbstractContextManager[None]:
        """Hold a name against other jobs while the block runs; ConfigError when one has it."""
        return nullcontext()

    def _make_parent(self, path: str) -> None:
        self._filesystem.makedirs(path.rpartition("/")[0] or "/", exist_ok=True)

    def _make_durable(self, file: IO[bytes]) -> None:
        """Bytes that were taken elsewhere are as safe as they get."""

    def _rename(self, path: str, to: str) -> None:
        self._filesystem.mv(path, to)


class LocalStorage(Storage):
    """Files of this machine, or of what is mounted on it. Owner: one job.

    Mutated only by: append and close, which keep files open between lines.
    """

    grows_by_line = True

    def __init__(self, filesystem: Any, base: str) -> None:  # noqa: ANN401 (fsspec is untyped)
        super().__init__(filesystem, base)
        self._open: dict[str, IO[bytes]] = {}

    def append(self, name: str, data: bytes) -> None:
        """Add bytes to a file; they survive the death of this process at once."""
        file = self._open.get(name)
        if file is None:
            self._make_parent(self._base + name)
            file = Path(self._base + name).open("ab", buffering=0)  # noqa: SIM115 (see close)
            self._open[name] = file
        while data:  # a disk that is nearly full takes a part
            data = data[file.write(data) :]

    def close(self) -> None:
        """Close what append opened; idempotent."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def remove(self, name: str, *, recursive: bool = False) -> None:
        """Remove a file or a directory that is there."""
        if (file := self._open.pop(name, None)) is not None:
            file.close()
        super().remove(name, recursive=recursive)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold a name against other jobs while the block runs; it ends with this process."""
        path = Path(self._base + name)
        self._make_parent(str(path))
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(
                    f"{self._base}: another job writes this output: wait for it, or stop it"
                ) from error
            yield

    def _make_durable(self, file: IO[bytes]) -> None:
        file.flush()
        os.fsync(file.fileno())

    def _rename(self, path: str, to: str) -> None:
        os.replace(path, to)


def _compression(path: str) -> str | None:
    """How a file is packed, by its name."""
    name: str | None = fsspec.utils.infer_compression(path)
    return None if name == "zip" else name
