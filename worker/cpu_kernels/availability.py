"""Whether the kernels of this package, and the library products beside them, can serve."""

from __future__ import annotations

import importlib.util

import torch


def hindrance(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why they cannot serve a model in this type on a device; None when they can."""
    if device.type != "cpu":
        return f"Numba's kernels run on a CPU, the device is {device}"
    if dtype != torch.float32:
        return f"Numba's kernels take float32, the model is {str(dtype).removeprefix('torch.')}"
    if importlib.util.find_spec("numba") is None:
        return "the package numba is not installed"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch was built without oneDNN"
    return None
