"""The Ouro model against its formulas in float64, and the ways of cutting one computation."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.checkpoints import config_values, random_tensors
from tests.model_driver import ModelDriver
from worker.models.config import OuroConfig
from worker.models.ouro import OuroModel, tensor_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from worker.models.layers import Rotary

TOKENS = [11, 3, 96, 0, 3, 42, 17, 8, 55, 23, 60, 1, 2]


def build(values: dict[str, Any], dtype: torch.dtype = torch.float32) -> OuroModel:
    tensors = {name: t.to(dtype) for name, t in random_tensors(values).items()}
    return OuroModel(OuroConfig.model_validate(values), tensors, "small", "0" * 64)


class DenseOuro:
    """One sequence, no cache, one head at a time, float64: the formulas as they are written.

    Owner: one test. Mutated only by: nothing.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.weights = {name: t.double() for name, t in random_tensors(values).items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, name: str, x: Tensor) -> Tensor:
        eps: float = self.values["rms_norm_eps"]
        scale = (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        return x / scale * self.weights[f"{name}.weight"]

    def rotate(self, x: Tensor) -> Tensor:
        """[T, head_dim], pairs (j, j + head_dim/2), one token and one pair at a time."""
        half = x.shape[1] // 2
        out = torch.empty_like(x)
        for position in range(x.shape[0]):
            for j in range(half):
                angle = torch.tensor(position * self.values["rope_theta"] ** (-j / half)).double()
                a, b = x[position, j], x[position, j + half]
                out[position, j] = a * angle.cos() - b * angle.sin()
                out[position, j + half] = b * angle.cos() + a * angle.sin()
        return out

    def attention(self, prefix: str, x: Tensor) -> Tensor:
        heads, dim = self.values["num_attention_heads"], self.values["head_dim"]
        group = heads // self.values["num_key_value_heads"]
        query, key, value = (
            self.linear(f"{prefix}self_attn.{part}_proj", x).split(dim, dim=1)  # type: ignore[no-untyped-call]
            for part in ("q", "k", "v")
        )
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        outputs = []
        for head in range(heads):
            scores = self.rotate(query[head]) @ self.rotate(key[head // group]).T / dim**0.5
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            outputs.append(weights @ value[head // group])
        return self.linear(f"{prefix}self_attn.o_proj", torch.cat(outputs, dim=1))

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        gate = self.linear(f"{prefix}mlp.gate_proj", x)
        up = self.linear(f"{prefix}mlp.up_proj", x)
        return self.linear(f"{prefix}mlp.down_proj", gate * gate.sigmoid() * up)

    def states(self, tokens: list[int]) -> list[Tensor]:
        """Hidden states [T, H] after each loop."""
        hidden = self.weights["model.embed_tokens.weight"][tokens]
        states = []
        for _ in range(self.values["total_ut_steps"]):
            for layer in range(self.values["num_hidden_layers"]):
                prefix = f"model.layers.{layer}."
                branch = self.attention(prefix, self.norm(f"{prefix}input_layernorm", hidden))
                hidden = hidden + self.norm(f"{prefix}input_layernorm_2", branch)
                branch = self.mlp(prefix, self.norm(f"{prefix}post_attention_layernorm", hidden))
                hidden = hidden + self.norm(f"{prefix}post_attention_layernorm_2", branch)
            hidden = self.norm("model.norm", hidden)
            states.append(hidden)
        return states


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_loop_equals_the_formulas(kv_heads: int) -> None:
    values = config_values(num_key_value_heads=kv_heads)
    model, dense = build(values), DenseOuro(values)
    states = ModelDriver(model, block_size=4).prefill([(0, 0, TOKENS)])
    for ours, exact in zip(states, dense.states(TOKENS), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=2e-5, rtol=1e-4)
        gate = dense.weights["model.early_exit_gate.bias"] + dense.linear(
            "model.early_exit_gate", exact
        )
        hazards = gate[:, 0].sigmoid()
        torch.testing.assert_close(model.hazards(ours).double(), hazards, atol=1e-5, rtol=0)
        logits = dense.linear("lm_head", exact)
        torch.testing.assert_close(model.logits(ours).double(), logits, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("cuts", [(1,), (5,), (4, 8), (1, 2, 3, 12)])
def test_a_chunked_prefill_equals_a_whole_one(cuts: tuple[int, ...]) -> None:
    model = build(config_values())
    whole = ModelDriver(model, block_size=4).prefill([(0, 0, TOKENS)])
    driver = ModelDriver(model, block_size=4)
    edges = (0, *cuts, len(TOKENS))
    parts = [driver.prefill([(0, start, TOKENS[start:end])]) for start, end in pairwise(edges)]
    for depth, state in enumerate(whole):
        joined = torch.cat([part[depth] for part in parts])
        torch.testing.assert_close(joined, state, atol=1e-5, rtol=0)


def test_chunks_of_several_sequences_in_one_batch_equal_each_alone() -> None:
    model = build(config_values())
    together = ModelDriver(model, sequences=2, block_size=4)
    together.prefill([(1, 0, TOKENS[:3])])
    states = together.prefill([(0, 0, TOKENS[4:]), (1, 3, TOKENS[3:7])])
    first = ModelDriver(model, block_size=4).prefill([(0, 0, TOKENS[4:])])
    second = ModelDriver(model, block_size=4).prefill([(0, 0, TOKENS[:7])])
    for depth, state in enumerate(states):
        torch.testing.assert_close(state[:9], first[depth], atol=1e-5, rtol=0)
        torch.testing.assert_close(state[9:], second[depth][3:], atol=1e-5, rtol=0)


def test_token_by_token_equals_prefill() -> None:
    model = build(config_values())
    whole = ModelDriver(model, block_size=4).prefill([(0, 0, TOKENS)])
    driver = ModelDriver(model, block_size=4)
    for position, token in enumerate(TOKENS):
        hidden = model.embed(torch.tensor([token]))
        for depth in range(driver.planes):
            hidden = driver.decode(hidden, [0], [position], [depth])
            torch.testing.assert_close(hidden[0], whole[depth][position], atol=1e-5, rtol=0)


def test_rows_at_mixed_depth_and_length_equal_each_alone() -> None:
    model = build(config_values())
    lengths, depths = [1, 6, 13, 9], [0, 2, 1, 2]

    def prefilled() -> ModelDriver:
        driver = ModelDriver(model, sequences=4, block_size=4)
        driver.prefill([(i, 0, TOKENS[:length]) for i, length in enumerate(lengths)])
        return driver

    hidden = torch.randn(4, model.hidden_size, generator=torch.Generator().manual_seed(2))
    together = prefilled().decode(hidden, range(4), lengths, depths)
    for i in range(4):
        alone = prefilled().decode(hidden[i : i + 1], [i], lengths[i : i + 1], depths[i : i + 1])
        torch.testing.assert_close(alone[0], together[i], atol=1e-5, rtol=0)


def test_each_depth_reads_its_own_plane() -> None:
    model = build(config_values())
    hidden = torch.randn(1, model.hidden_size, generator=torch.Generator().manual_seed(2))
    results = []
    for depth in range(3):
        driver = ModelDriver(model, block_size=4)
        driver.prefill([(0, 0, TOKENS)])
        results.append(driver.decode(hidden, [0], [len(TOKENS)], [depth]))
    assert (results[0] - results[1]).abs().max() > 1e-3
    assert (results[1] - results[2]).abs().max() > 1e-3


def test_rotary_angles_stay_exact_in_bfloat16() -> None:
    # Positions 1000 and 1001 are one bfloat16 number; their rotations must still differ.
    values = config_values(max_position_embeddings=2048)
    model = build(values, torch.bfloat16)
    seen = []

    def attend(layer: int, qkv: Tensor, rotary: Rotary) -> Tensor:
        if layer == 0:
            seen.append(rotary(qkv[:, :4]))
        return torch.zeros_like(qkv[:, :4])

    hidden = model.embed(torch.tensor([7, 7]))
    model.loop(hidden, torch.tensor([1000, 1001]), attend)
    assert (seen[0][0] - seen[0][1]).abs().max() > 0.1


def test_an_empty_batch_runs() -> None:
    model = build(config_values())
    none = torch.empty(0, dtype=torch.int64)
    hidden = model.loop(model.embed(none), none, lambda layer, qkv, rotary: qkv[:, :4])
    assert model.hazards(hidden).shape == (0,)
    assert model.logits(hidden).shape == (0, 97)


def test_tied_embeddings_serve_as_the_head() -> None:
    values = config_values(tie_word_embeddings=True)
    assert "lm_head.weight" not in tensor_shapes(OuroConfig.model_validate(values))
    model = build(values)
    hidden = torch.randn(2, model.hidden_size, generator=torch.Generator().manual_seed(2))
    expected = hidden @ random_tensors(values)["model.embed_tokens.weight"].T
    torch.testing.assert_close(model.logits(hidden), expected)


def test_the_profile_tells_what_the_configuration_says() -> None:
    model = build(config_values())
    profile = model.profile
    assert (profile.name, profile.fingerprint) == ("small", "0" * 64)
    assert (profile.vocab_size, profile.max_positions, profile.max_loops) == (97, 256, 3)
    assert (profile.eos_ids, profile.exit_threshold) == ((5,), 0.75)
    assert (model.num_layers, model.kv_heads, model.head_dim, model.hidden_size) == (2, 2, 8, 24)
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
