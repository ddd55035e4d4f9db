"""The Ouro model: one stack of layers, run several times for each token.

Formulas follow the published modelling code of ByteDance/Ouro-1.4B (sandwich norms, split-half
rotary embedding, a linear exit gate read after every loop).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from protocol.profile import ModelProfile
from worker.models.layers import inverse_frequencies, rms_norm, rotary_tables, rotate, swiglu

if TYPE_CHECKING:
    from torch import Tensor

    from worker.models.base import LayerAttention
    from worker.models.config import OuroConfig


def tensor_shapes(config: OuroConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the checkpoint must hold, and no other.

    Linear weights are [out, in]; only the gate has a bias.
    """
    hidden, width = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "model.early_exit_gate.weight": (1, hidden),
        "model.early_exit_gate.bias": (1,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "input_layernorm_2.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm_2.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "mlp.gate_proj.weight": (width, hidden),
            prefix + "mlp.up_proj.weight": (width, hidden),
            prefix + "mlp.down_proj.weight": (hidden, width),
        }
    return shapes


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; projections that read the same input are one matrix.

    `qkv` [(heads + 2 kv_heads) * head_dim, H], rows in the order q, k, v; `gate_up` [2 * width, H],
    gate first. Each branch has a norm before it and one on its output, before the residual sum.
    """

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    attention_output_norm: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    mlp_output_norm: Tensor


def _take_layer(weights: dict[str, Tensor], layer: int) -> LayerWeights:
    def take(name: str) -> Tensor:
        return weights.pop(f"model.layers.{layer}.{name}.weight")

    projections = [take(f"self_attn.{name}_proj") for name in ("q", "k", "v")]
    gate_up = [take(f"mlp.{name}_proj") for name in ("gate", "up")]
    return LayerWeights(
        attention_norm=take("input_layernorm"),
        qkv=torch.cat(projections),
        output=take("self_attn.o_proj"),
        attention_output_norm=take("input_layernorm_2"),
        mlp_norm=take("post_attention_layernorm"),
        gate_up=torch.cat(gate_up),
        down=take("mlp.down_proj"),
        mlp_output_norm=take("post_attention_layernorm_2"),
    )


class OuroModel:
    """An Ouro checkpoint on one device; immutable once built. See LoopedModel for the verbs."""

    def __init__(
        self, config: OuroConfig, weights: dict[str, Tensor], name: str, fingerprint: str
    ) -> None:
        """Build from tensors named and shaped as `tensor_shapes` says, all of one dtype.

        Takes the tensors out of `weights`, so that a layer's separate projections are freed as
        soon as they are fused.
        """
        self.profile = ModelProfile(
            name=name,
            fingerprint=fingerprint,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            max_loops=config.total_ut_steps,
            eos_ids=config.eos_token_id,
            exit_threshold=config.early_exit_threshold,
        )
        self.num_layers = config.num_hidden_layers
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.hidden_size = config.hidden_size
        self._eps = config.rms_norm_eps
        self._heads = config.num_attention_heads
        self._embedding = weights.pop("model.embed_tokens.weight")
        self._norm = weights.pop("model.norm.weight")
        self._gate = weights.pop("model.early_exit_gate.weight")
        self._gate_bias = weights.pop("model.early_exit_gate.bias")
        tied = config.tie_word_embeddings
        self._head = self._embedding if tied else weights.pop("lm_head.weight")
        self._layers = [_take_layer(weights, layer) for layer in range(self.num_layers)]
        self.dtype = self._embedding.dtype
        self.device = self._embedding.device
        self._frequencies = inverse_frequencies(config.rope_theta, self.head_dim, self.device)

    def __repr__(self) -> str:
        return f"OuroModel({self.profile.name}, {self.num_layers} layers, {self.dtype})"

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [N, H] of token ids [N] (int64), unscaled."""
        return functional.embedding(tokens, self._embedding)

    def loop(self, hidden: Tensor, positions: Tensor, attend: LayerAttention) -> Tensor:
        """One pass of all layers and the final norm, [N, H] -> [N, H].

        The final norm belongs to the loop: what it returns feeds the next loop, the gate and the
        head alike. A token keeps its position at every depth.
        """
        cosine, sine = rotary_tables(positions, self._frequencies, self.dtype)
        for index, layer in enumerate(self._layers):
            x = rms_norm(hidden, layer.attention_norm, self._eps)
            x = self._attention(index, layer, x, cosine, sine, attend)
            hidden = hidden + rms_norm(x, layer.attention_output_norm, self._eps)
            x = rms_norm(hidden, layer.mlp_norm, self._eps)
            x = functional.linear(swiglu(functional.linear(x, layer.gate_up)), layer.down)
            hidden = hidden + rms_norm(x, layer.mlp_output_norm, self._eps)
        return rms_norm(hidden, self._norm, self._eps)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        cosine: Tensor,
        sine: Tensor,
        attend: LayerAttention,
    ) -> Tensor:
        rows, parts = x.shape[0], [self._heads, self.kv_heads, self.kv_heads]
        qkv = functional.linear(x, layer.qkv).view(rows, sum(parts), self.head_dim)
        query, key, value = torch.split(qkv, parts, dim=1)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        context = attend(index, query, key, value)
        return functional.linear(context.reshape(rows, self._heads * self.head_dim), layer.output)

    def hazards(self, hidden: Tensor) -> Tensor:
        """sigmoid(gate . hidden + bias) as float32 [N]; the product is in the model's dtype."""
        return functional.linear(hidden, self._gate, self._gate_bias).squeeze(-1).float().sigmoid()

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits, float32 [N, vocab_size]; `hidden` is already normalised."""
        return functional.linear(hidden, self._head).float()
