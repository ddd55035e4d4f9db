"""Which attention backend a worker uses."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

from protocol.errors import ConfigError
from worker.attention.torch_backend import TorchAttention
from worker.cpu_kernels.availability import hindrance

if TYPE_CHECKING:
    import torch

    from protocol.config import AttentionName
    from worker.attention.backend import AttentionBackend
    from worker.models.base import LoopedModel

logger = logging.getLogger(__name__)

MAX_HEAD_DIM = 256
"""Of the Triton kernels: a program keeps whole heads."""


def choose_attention(
    name: AttentionName, model: LoopedModel, rows: int, device: torch.device
) -> AttentionBackend:
    """The backend that a setting asks for, for decode batches of up to `rows` rows.

    "auto" takes Triton on CUDA and Numba elsewhere, or torch where they cannot run. Raises
    ConfigError for a choice that is impossible.
    """
    hindrances = {"triton": _triton(model, device), "numba": hindrance(model.dtype, device)}
    if hindrances.get(name):
        raise ConfigError(f'attention "{name}": {hindrances[name]}; use "auto" or "torch"')
    wanted = name
    if name == "auto":
        wanted = "triton" if device.type == "cuda" else "numba"
    why = hindrances.get(wanted)
    backend: AttentionBackend
    # Imported late: Triton is there only where CUDA is, and Numba need not be there.
    if wanted == "triton" and not why:
        from worker.attention.triton_backend import TritonAttention

        backend = TritonAttention(model.heads, model.kv_heads, model.head_dim, rows, device)
    elif wanted == "numba" and not why:
        from worker.attention.numba_backend import NumbaAttention

        backend = NumbaAttention()
    else:
        backend = TorchAttention()
    logger.info("attention %s: %s%s", name, backend.name, f" ({why})" if why else "")
    return backend


def _triton(model: LoopedModel, device: torch.device) -> str | None:
    """Why Triton cannot serve a model on a device; None when it can."""
    if device.type != "cuda":
        return f"Triton runs on CUDA, the device is {device}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if model.head_dim > MAX_HEAD_DIM:
        return f"head_dim {model.head_dim} is above {MAX_HEAD_DIM}"
    return None
