"""Compiled functions that run on the very threads that torch computes on.

Two OpenMP runtimes in one process fight for its cores: threads of one spin, waiting for more, while
those of the other have work. So a kernel is handed to the runtime that torch has loaded; where none
is found, it runs on the calling thread alone.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from llvmlite import binding
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

logger = logging.getLogger(__name__)

_ENTRY = types.void(types.CPointer(types.int64))
# What a sum needs to be computed in lanes. Numbers that are none are still told apart.
_FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}

thread_number = types.ExternalFunction("loopmesh_thread_number", types.int32())
"""Compiled code only: which thread of the team this is."""
num_threads = types.ExternalFunction("loopmesh_num_threads", types.int32())
"""Compiled code only: how many threads the team has."""


@intrinsic
def pointer(typing_context, address):
    """Compiled code only: the int64 address of a tensor as the pointer that `carray` takes."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@njit
def floats(address):
    """Compiled code only: the float32 tensor that begins at an address."""
    return carray(pointer(address), (1,), np.float32)


@njit
def integers(address):
    """Compiled code only: the int64 tensor that begins at an address."""
    return carray(pointer(address), (1,), np.int64)


@njit
def octets(address):
    """Compiled code only: the uint8 or bool tensor that begins at an address."""
    return carray(pointer(address), (1,), np.uint8)


class Kernel:
    """A compiled function of some 64-bit words, run once by each thread of a team. Immutable.

    Which part of the work is whose follows from `thread_number()` and `num_threads()`.
    """

    def __init__(self, function: Callable[..., None], *, exact: bool = False) -> None:
        """`exact` keeps every operation as it is written; else sums may be computed in lanes."""
        self._name = function.__name__
        self._compiled = _compile(function, set() if exact else _FAST_MATH)
        self._run_alone = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._compiled.address)

    def __repr__(self) -> str:
        return f"Kernel({self._name})"

    def __call__(
        self,
        numbers: tuple[float, ...],
        tensors: tuple[Tensor, ...],
        flags: tuple[int, ...] = (),
        *,
        alone: bool = False,
    ) -> None:
        """Run over the words of these numbers, the addresses of tensors, then the flags.

        An int is a word, a float is the bits of its double. `alone` is for what is over before a
        team would have begun.
        """
        form = "".join("d" if isinstance(number, float) else "q" for number in numbers)
        addresses = [tensor.data_ptr() for tensor in tensors]
        words = struct.pack(f"{form}{len(addresses) + len(flags)}q", *numbers, *addresses, *flags)
        threads = 1 if alone else torch.get_num_threads()
        if threads == 1 or _RUNTIME is None:
            self._run_alone(words)
        else:
            _RUNTIME.GOMP_parallel(self._compiled.address, words, threads, 0)


def _compile(function, fast_math):
    """Compile, or load what an earlier process has compiled for the same processor."""
    options = {"fastmath": fast_math, "error_model": "numpy"}
    try:
        return cfunc(_ENTRY, cache=True, **options)(function)
    except RuntimeError as error:  # neither beside the source nor at home may a file be written
        logger.warning("kernels are compiled anew in each process: %s", error)
        return cfunc(_ENTRY, **options)(function)


def _find_runtime() -> ctypes.CDLL | None:
    """torch's own library, if its OpenMP runtime can be reached through it and takes work."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    runtime = ctypes.CDLL(str(library)) if library.exists() else None
    if runtime is None or not hasattr(runtime, "GOMP_parallel"):
        logger.info("kernels use one thread: %s has no OpenMP runtime to share", library)
        return None
    entry = runtime.GOMP_parallel
    entry.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    return runtime


def _address(function):
    return ctypes.cast(function, ctypes.c_void_p).value


_RUNTIME = _find_runtime()
_ALONE = ctypes.CFUNCTYPE(ctypes.c_int)
_zero, _one = _ALONE(lambda: 0), _ALONE(lambda: 1)
binding.add_symbol(
    "loopmesh_thread_number", _address(_RUNTIME.omp_get_thread_num if _RUNTIME else _zero)
)
binding.add_symbol(
    "loopmesh_num_threads", _address(_RUNTIME.omp_get_num_threads if _RUNTIME else _one)
)
