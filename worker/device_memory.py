"""Memory as a device sees it: what tensors take, what is free, and giving back what nobody uses."""

from __future__ import annotations

import gc
import threading
import traceback
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


def tensor_bytes(*owners: object) -> int:
    """Bytes of the tensors among the attributes of these objects, each tensor counted once."""
    tensors = {
        id(value): value
        for owner in owners
        for value in _attributes(owner)
        if isinstance(value, Tensor)
    }
    return sum(tensor.nbytes for tensor in tensors.values())


def _attributes(owner: object) -> Iterator[object]:
    names = vars(owner) if hasattr(owner, "__dict__") else getattr(type(owner), "__slots__", ())
    return (getattr(owner, name) for name in names)


def free_memory(device: torch.device) -> int | None:
    """Bytes that a CUDA device has left; None for a CPU, whose memory is not planned."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # what torch keeps for later is free as well
    return torch.cuda.mem_get_info(device)[0]


def forget_frames(error: BaseException) -> None:
    """Drop the variables of the functions that an error has left, and of those behind its causes.

    Whoever holds the error would hold what they had made. Frames still running are left alone.
    """
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        found = todo.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            todo += [found.__cause__, found.__context__]


class DeviceUsers:
    """Counts who holds device memory in this process. Owner: worker/worker.py.

    Mutated only by: enter and leave, from any thread. Libraries keep a workspace for each stream
    they ever ran on, and captured graphs know its address, so it may only go with the last user.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def __repr__(self) -> str:
        return f"<DeviceUsers {self._count}>"

    @property
    def count(self) -> int:
        """Users that have entered and not left."""
        return self._count

    def enter(self) -> None:
        """Somebody is about to allocate."""
        with self._lock:
            self._count += 1

    def leave(self, device: torch.device) -> None:
        """A user has dropped all it had: give the device what nobody uses any more."""
        with self._lock:
            self._count -= 1
            if device.type != "cuda":
                return
            gc.collect()
            if not self._count:
                # torch has no other name for it.
                torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001
            torch.cuda.empty_cache()
