"""What a looped model gives in plain PyTorch: static batches, dense padded KV, a fixed depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from benchmarks.workload import Ask
    from worker.models.base import LayerAttention, LoopedModel
    from worker.models.layers import Rotary

PADDING = 0


def padded(asks: Sequence[Ask]) -> tuple[Tensor, Tensor]:
    """Prompts [B, P] padded on the left, and how much padding each has, [B]."""
    longest = max(len(ask.prompt) for ask in asks)
    pads = [longest - len(ask.prompt) for ask in asks]
    rows = [[PADDING] * pad + list(ask.prompt) for pad, ask in zip(pads, asks, strict=True)]
    return torch.tensor(rows), torch.tensor(pads)


class StaticBatches:
    """Runs requests batch by batch, greedily. Owner: one benchmark. Mutated only by: run.

    The model's own layers, one forward a loop, all loops for each token. A batch runs until its
    longest output ends, whoever else has ended by then.
    """

    def __init__(self, model: LoopedModel) -> None:
        self._model = model
        self._loops = model.profile.max_loops

    def cache_bytes(self, asks: Sequence[Ask]) -> int:
        """What the KV of a batch of all these takes."""
        model = self._model
        length = max(len(ask.prompt) for ask in asks) + max(ask.outputs for ask in asks)
        token = 2 * model.num_layers * model.kv_heads * model.head_dim * model.dtype.itemsize
        return len(asks) * length * self._loops * token

    @torch.inference_mode()
    def run(self, asks: Sequence[Ask], size: int) -> list[list[int]]:
        """The outputs of all requests, in batches of `size` as they come."""
        batches = (asks[first : first + size] for first in range(0, len(asks), size))
        return [outputs for batch in batches for outputs in self._run_batch(batch)]

    def _run_batch(self, asks: Sequence[Ask]) -> list[list[int]]:
        model = self._model
        prompts, pads = (tensor.to(model.device) for tensor in padded(asks))
        steps, width = max(ask.outputs for ask in asks), prompts.shape[1]
        cache = _Cache(model, self._loops, len(asks), width + steps, pads)
        tokens = cache.next_tokens(prompts, 0)
        found = [tokens]
        for step in range(1, steps):
            tokens = cache.next_tokens(tokens[:, None], width + step - 1)
            found.append(tokens)
        rows = torch.stack(found, dim=1).tolist()
        return [row[: ask.outputs] for row, ask in zip(rows, asks, strict=True)]


class _Cache:
    """Dense KV of one batch: [loops, layers] of [B, kv_heads, length, head_dim].

    Owner: one batch. Mutated only by: next_tokens.
    """

    def __init__(
        self, model: LoopedModel, loops: int, batch: int, length: int, pads: Tensor
    ) -> None:
        self._model, self._loops, self._pads = model, loops, pads
        shape = (loops, model.num_layers, batch, model.kv_heads, length, model.head_dim)
        self._keys, self._values = (
            torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2)
        )

    def next_tokens(self, tokens: Tensor, start: int) -> Tensor:
        """Greedy tokens [B] after `tokens` [B, T], which stand in the columns from `start` on."""
        model, (batch, count) = self._model, tokens.shape
        columns = torch.arange(start, start + count, device=model.device)
        positions = (columns - self._pads[:, None]).clamp(min=0).flatten()
        seen = torch.arange(start + count, device=model.device)
        mask = (seen <= columns[:, None]) & (seen >= self._pads[:, None, None])
        # Padding sees itself, since a row that sees nothing is not a number.
        mask = (mask | (seen == columns[:, None]))[:, None]
        hidden = model.embed(tokens.flatten())
        for depth in range(self._loops):
            hidden = model.loop(hidden, positions, self._attend(depth, batch, start, mask))
        last = hidden.view(batch, count, -1)[:, -1]
        return model.logits(last).argmax(dim=-1)

    def _attend(self, depth: int, batch: int, start: int, mask: Tensor) -> LayerAttention:
        kv_heads = self._model.kv_heads

        def attend(layer: int, qkv: Tensor, rotary: Rotary) -> Tensor:
            parts = [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads]
            query, key, value = torch.split(qkv, parts, dim=1)
            query, key, value = (
                part.view(batch, -1, *part.shape[1:]).transpose(1, 2)
                for part in (rotary(query), rotary(key), value)
            )
            end = start + key.shape[2]
            keys, values = self._keys[depth, layer], self._values[depth, layer]
            keys[:, :, start:end] = key
            values[:, :, start:end] = value
            output = functional.scaled_dot_product_attention(
                query,
                keys[:, :, :end],
                values[:, :, :end],
                attn_mask=mask,
                enable_gqa=parts[0] != kv_heads,
            )
            return output.transpose(1, 2).flatten(0, 1)

        return attend
