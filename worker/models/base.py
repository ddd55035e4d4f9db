"""What every looped model offers the model runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from protocol.profile import ModelProfile
    from worker.models.layers import Rotary


class LayerAttention(Protocol):
    """Attention of one batch at every layer; knows where each row's KV lies."""

    def __call__(self, layer: int, qkv: Tensor, rotary: Rotary) -> Tensor:
        """Rotate, write the KV of these rows, attend over the history that each row may see.

        qkv [N, heads + 2 kv_heads, head_dim]: queries, keys and values, none of them rotated yet.
        Returns [N, heads, head_dim] in the same dtype.
        """
        ...


class LoopedModel(Protocol):
    """A model whose shared stack runs several times for each token.

    A forward of N rows is `embed`, then `loop` once a depth, then `logits`; `hazards` reads the
    gate after any loop. Hidden states are [N, hidden_size] in `dtype` on `device`. Nothing here
    keeps state, so rows of different requests and depths share a call.
    """

    @property
    def profile(self) -> ModelProfile: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        ...

    @property
    def loop_row_bytes(self) -> int:
        """Memory that a loop takes for each of its rows while it runs, at most."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [N, H] of token ids [N] (int64)."""
        ...

    def loop(self, hidden: Tensor, positions: Tensor, attend: LayerAttention) -> Tensor:
        """One pass of all layers and the final norm: [N, H] at int64 positions [N] -> [N, H]."""
        ...

    def hazards(self, hidden: Tensor) -> Tensor:
        """Probability [N] (float32) that the token is ready after the loop that gave `hidden`."""
        ...

    def logits(self, hidden: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Next-token logits [N, vocab_size] (float32) of states that a loop returned.

        `wanted` int32 [1], on the device: if it is 0 nobody reads them, and they may be anything.
        """
        ...
