"""Which attention backend a worker uses."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

from protocol.errors import ConfigError
from worker.attention.torch_backend import TorchAttention

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

    "auto" takes Triton where it can run. Raises ConfigError for a choice that is impossible.
    """
    hindrance = _hindrance(model, device)
    if name == "triton" and hindrance:
        raise ConfigError(f'attention "triton": {hindrance}; use "auto" or "torch"')
    backend: AttentionBackend
    if name == "torch" or hindrance:
        backend = TorchAttention()
    else:
        # Imported late: Triton is there only where CUDA is.
        from worker.attention.triton_backend import TritonAttention

        backend = TritonAttention(model.heads, model.kv_heads, model.head_dim, rows, device)
    why = f" ({hindrance})" if name == "auto" and hindrance else ""
    logger.info("attention %s: %s%s", name, backend.name, why)
    return backend


def _hindrance(model: LoopedModel, device: torch.device) -> str | None:
    """Why Triton cannot serve a model on a device; None when it can."""
    if device.type != "cuda":
        return f"Triton runs on CUDA, the device is {device}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if model.head_dim > MAX_HEAD_DIM:
        return f"head_dim {model.head_dim} is above {MAX_HEAD_DIM}"
    return None
