"""Refuses whatever makes the host wait for a value of the device, on a CPU as well.

On a CPU every value is at hand, so a readback costs nothing there and shows nowhere; here it
raises. Two modes watch: one sees what Python asks of a tensor, the other what torch runs below.
"""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from worker import stages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_ASKING = frozenset(
    (
        "item",
        "tolist",
        "cpu",
        "numpy",
        "nonzero",
        "argwhere",
        "__int__",
        "__bool__",
        "__float__",
        "__index__",
        "__array__",
    )
)
_READING = frozenset(("aten::item", "aten::is_nonzero", "aten::_local_scalar_dense"))
_TELLING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Marks of operations whose result, or its shape, torch itself reads on the host."""
_INDEXING = frozenset(
    (
        "aten::index",
        "aten::_unsafe_index",
        "aten::index_put",
        "aten::index_put_",
        "aten::_index_put_impl_",
    )
)


class ReadbackError(AssertionError):
    """A value was read back where none may be."""


class _Asked(TorchFunctionMode):
    """What Python asks of a tensor; .tolist() of a host tensor shows nowhere else."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        name, kwargs = func.__name__, kwargs or {}
        if name in _ASKING and not (name == "nonzero" and _is_the_definition_of_finalize(args)):
            raise ReadbackError(f"Tensor.{name} waits for the device")
        if name == "to" and _names_the_host([*args[1:], *kwargs.values()]):
            raise ReadbackError("Tensor.to(cpu) waits for the device")
        if name == "where" and len(args) + len(kwargs) == 1:
            raise ReadbackError("where without values counts on the host")
        if name == "__setitem__" and _is_number_by_index(*args[1:]):
            raise ReadbackError("a number assigned by index is copied while the host waits")
        return func(*args, **kwargs)


class _Run(TorchDispatchMode):  # type: ignore[no-untyped-call] # of its base's set-up
    """What torch runs, whoever asked for it."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        name, kwargs = str(func.name()).split(".")[0], kwargs or {}  # type: ignore[no-untyped-call]
        if name in _INDEXING:
            if any(
                index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
            ):
                raise ReadbackError(f"{name} by a mask counts on the host")
        elif name in _READING or any(tag in func.tags for tag in _TELLING):
            if not (name == "aten::nonzero" and _is_the_definition_of_finalize(args)):
                raise ReadbackError(f"{name} waits for the device")
        elif _leaves_the_device(name, args, kwargs):
            raise ReadbackError(f"{name} to the host, other than into a pinned lease")
        return func(*args, **kwargs)


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call] # the same
    """Counts the operations that torch runs within it. Owner: one test."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        self.operations += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def no_readback() -> Iterator[None]:
    """Within it, a readback raises ReadbackError."""
    with _Asked(), _Run():  # type: ignore[no-untyped-call]
        yield


def _is_the_definition_of_finalize(args: tuple[Any, ...]) -> bool:
    # On a CPU, and nowhere else, finalize picks the cells that it copies: it is the definition
    # that the kernel on CUDA must equal, and that one needs no list.
    return args[0].device.type == "cpu" and any(
        frame.name == "finalize" and frame.filename == stages.__file__
        for frame in traceback.extract_stack()
    )


def _is_number_by_index(index: object, value: object) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    by_index = any(isinstance(part, torch.Tensor) for part in parts)
    return by_index and isinstance(value, int | float)


def _names_the_host(values: Sequence[object]) -> bool:
    return any(
        (isinstance(value, str) and value == "cpu")
        or (isinstance(value, torch.device) and value.type == "cpu")
        for value in values
    )


def _leaves_the_device(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a copy to the host is more than enqueued."""
    if name == "aten::copy_":
        target, source = args[:2]
        waits = not (target.is_pinned() and (kwargs.get("non_blocking") or args[2:] == (True,)))
        return source.is_cuda and not target.is_cuda and waits
    if name in ("aten::to", "aten::_to_copy"):
        return args[0].is_cuda and _names_the_host([*args[1:], *kwargs.values()])
    return False
