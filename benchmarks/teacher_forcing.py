"""A text through a looped model, each token at the depth that its gate picks.

The exit rule and the KV are those of serving (LAST_EXITED): a token that has left keeps the KV of
its last loop for every deeper one. All tokens of a window run side by side, loop by loop, which
gives what decoding them one by one would: a loop reads only what the same loop, or an earlier
exit, has written for the tokens before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from protocol.exit_rule import survival_bound

if TYPE_CHECKING:
    from torch import Tensor

    from worker.models.base import LayerAttention, LoopedModel
    from worker.models.layers import Rotary


@dataclass(frozen=True, slots=True)
class Scored:
    """What each of S tokens led to: logits float32 [S, V] for the next one, and depths [S]."""

    logits: Tensor
    depths: Tensor

    def losses(self, tokens: Tensor) -> Tensor:
        """Cross-entropy in nats [S - 1] of the tokens int64 [S] that they were scored for."""
        return functional.cross_entropy(self.logits[:-1], tokens[1:], reduction="none")


@torch.inference_mode()
def score(model: LoopedModel, tokens: Tensor, threshold: float, prompt: int = 0) -> Scored:
    """Tokens int64 [S] at their gate's depth, the first `prompt` of them at full depth.

    Survival and bound are float32, as protocol/exit_rule.py states.
    """
    count, loops = len(tokens), model.profile.max_loops
    kv = _WindowKV(model, count)
    active = torch.arange(count, device=model.device)
    survival = torch.ones(count, device=model.device)
    depths = torch.full_like(active, loops)
    hidden = model.embed(tokens)
    final = torch.empty_like(hidden)
    bound = survival_bound(threshold)
    for depth in range(1, loops + 1):
        hidden = model.loop(hidden, active, kv.attend(active))
        survival = survival * (1.0 - model.hazards(hidden))
        leaves = (survival <= bound) & (active >= prompt) | (depth == loops)
        final[active[leaves]] = hidden[leaves]
        depths[active[leaves]] = depth
        active, hidden, survival = active[~leaves], hidden[~leaves], survival[~leaves]
        if not len(active):
            break
    return Scored(model.logits(final), depths)


class _WindowKV:
    """KV of one window: for each layer that of every token's latest loop.

    Owner: score. Mutated only by: the attention that it gives out.
    """

    def __init__(self, model: LoopedModel, count: int) -> None:
        shape = (model.num_layers, model.kv_heads, count, model.head_dim)
        self._keys, self._values = (
            torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2)
        )

    def attend(self, active: Tensor) -> LayerAttention:
        """Attention of the tokens at the positions int64 [N], over all up to themselves."""
        kv_heads, count = self._keys.shape[1:3]
        seen = torch.arange(count, device=active.device) <= active[:, None]

        def attend(layer: int, qkv: Tensor, rotary: Rotary) -> Tensor:
            parts = [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads]
            query, key, value = torch.split(qkv, parts, dim=1)
            self._keys[layer][:, active] = rotary(key).transpose(0, 1)
            self._values[layer][:, active] = value.transpose(0, 1)
            output = functional.scaled_dot_product_attention(
                rotary(query).transpose(0, 1)[None],
                self._keys[layer][None],
                self._values[layer][None],
                attn_mask=seen,
                enable_gqa=parts[0] != kv_heads,
            )
            return output[0].transpose(0, 1)

        return attend
