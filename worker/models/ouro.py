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
from worker.device_memory import tensor_bytes
from worker.models.layers import inverse_frequencies
from worker.models.loop_kernels import loop_kernels

if TYPE_CHECKING:
    from torch import Tensor

    from worker.models.base import LayerAttention
    from worker.models.config import OuroConfig
    from worker.models.loop_kernels import LoopKernels


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


def _take_layer(weights: dict[str, Tensor], layer: int, kernels: LoopKernels) -> LayerWeights:
    def take(name: str) -> Tensor:
        return weights.pop(f"model.layers.{layer}.{name}.weight")

    projections = [take(f"self_attn.{name}_proj") for name in ("q", "k", "v")]
    gate_up = [take(f"mlp.{name}_proj") for name in ("gate", "up")]
    return LayerWeights(
        attention_norm=take("input_layernorm"),
        qkv=kernels.packed(torch.cat(projections)),
        output=kernels.packed(take("self_attn.o_proj")),
        attention_output_norm=take("input_layernorm_2"),
        mlp_norm=take("post_attention_layernorm"),
        gate_up=kernels.packed(torch.cat(gate_up)),
        down=kernels.packed(take("mlp.down_proj")),
        mlp_output_norm=take("post_attention_layernorm_2"),
    )


class OuroModel:
    """An Ouro checkpoint on one device; immutable once built. See LoopedModel for the verbs."""

    def __init__(
        self,
        config: OuroConfig,
        weights: dict[str, Tensor],
        name: str,
        fingerprint: str,
        kernels: LoopKernels | None = None,
    ) -> None:
        """Build from tensors named and shaped as `tensor_shapes` says, all of one dtype.

        Takes the tensors out of `weights`, so that a layer's separate projections are freed as
        soon as they are fused. `kernels` None takes the fastest for the device.
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
        self.heads = config.num_attention_heads
        self._embedding = weights.pop("model.embed_tokens.weight")
        self._norm = weights.pop("model.norm.weight")
        self._gate = weights.pop("model.early_exit_gate.weight")
        self._gate_bias = weights.pop("model.early_exit_gate.bias")
        tied = config.tie_word_embeddings
        self.dtype = self._embedding.dtype
        self.device = self._embedding.device
        self._kernels = loop_kernels(self.device, self.dtype) if kernels is None else kernels
        head = self._embedding if tied else weights.pop("lm_head.weight")
        self._head = self._kernels.packed(head)
        self._layers = [
            _take_layer(weights, layer, self._kernels) for layer in range(self.num_layers)
        ]
        self._frequencies = inverse_frequencies(config.rope_theta, self.head_dim, self.device)
        self.num_bytes = tensor_bytes(self, *self._layers)
        # Two of qkv and of what attention makes of it; gate, up and their product; four of hidden.
        heads = 2 * (self.heads + 2 * self.kv_heads) + self.heads
        elements = heads * self.head_dim + 3 * config.intermediate_size + 4 * self.hidden_size
        self.loop_row_bytes = elements * self.dtype.itemsize
        # The norm of whoever reads a layer's sum: the next layer, or the end of the loop.
        norms = [layer.attention_norm for layer in self._layers[1:]]
        self._next_norms = [*norms, self._norm]

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
        kernels, eps = self._kernels, self._eps
        heads = (hidden.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        rotary = kernels.rotary(positions, self._frequencies, self.dtype)
        x = kernels.norm(hidden, self._layers[0].attention_norm, eps)
        for index, (layer, next_norm) in enumerate(
            zip(self._layers, self._next_norms, strict=True)
        ):
            context = attend(index, kernels.linear(x, layer.qkv).view(heads), rotary)
            branch = kernels.branch(context.flatten(1), layer.output)
            hidden, x = kernels.residual_norm(
                hidden, branch, layer.attention_output_norm, layer.mlp_norm, eps
            )
            branch = kernels.branch(kernels.gated(x, layer.gate_up), layer.down)
            hidden, x = kernels.residual_norm(hidden, branch, layer.mlp_output_norm, next_norm, eps)
        return x

    def hazards(self, hidden: Tensor) -> Tensor:
        """sigmoid(gate . hidden + bias) as float32 [N], computed in float32."""
        return self._kernels.hazards(hidden, self._gate, self._gate_bias)

    def logits(self, hidden: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Next-token logits, float32 [N, vocab_size]; `hidden` is already normalised.

        They may be anything if `wanted`, int32 [1], is 0.
        """
        return self._kernels.head(hidden, self._head, wanted)
