"""A batch of decoding rows, and the model under it: what one loop is measured on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker.attention.backend import PagedRows, paged_attention
from worker.attention.choice import choose_attention
from worker.graphs import most_rows
from worker.kv_storage import KVStorage
from worker.models.config import OuroConfig
from worker.models.layers import inverse_frequencies
from worker.models.loop_kernels import loop_kernels
from worker.models.ouro import OuroModel, tensor_shapes
from worker.slot_table import SlotTable
from worker.stages import Device, loop_seats

if TYPE_CHECKING:
    from torch import Tensor

    from protocol.config import AttentionName
    from worker.models.loop_kernels import LoopKernels

OURO_1_4B = OuroConfig(
    model_type="ouro",
    vocab_size=49152,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=128,
    max_position_embeddings=65536,
    total_ut_steps=4,
    rope_theta=1_000_000.0,
)
"""Shapes of ByteDance/Ouro-1.4B."""


def random_weights(
    config: OuroConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Seeded random weights of unit gain, made on the device; norms are 1."""
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        values = torch.empty(shape, dtype=dtype, device=device)
        if "norm" in name:
            weights[name] = values.fill_(1.0)
        else:
            weights[name] = values.normal_(0.0, shape[-1] ** -0.5, generator=generator)
    return weights


def random_model(config: OuroConfig, dtype: torch.dtype, device: torch.device) -> OuroModel:
    """A model of these shapes with random weights."""
    return OuroModel(config, random_weights(config, dtype, device), "random", "random")


class LoopBatch:
    """Rows at mixed depth, each with `context` tokens. Owner: one measurement.

    Mutated only by: its loops, which `rewind` takes back. Row r is at depth r mod the loops of the
    model and stands at the last of its tokens. It has blocks of its own for every plane, or with
    `read_planes` only for the one that it reads, where all would not fit on a device.
    """

    def __init__(
        self,
        config: OuroConfig,
        model: OuroModel,
        rows: int,
        context: int,
        block_size: int,
        *,
        read_planes: bool = False,
        attention: AttentionName = "auto",
    ) -> None:
        self.config, self.model, self.rows, self.context = config, model, rows, context
        device, loops = model.device, model.profile.max_loops
        width = -(-context // block_size)
        blocks = rows * width * (1 if read_planes else loops)
        shape = (model.num_layers, model.kv_heads, block_size, model.head_dim)
        self.storage = KVStorage(blocks, *shape, model.dtype, device)
        for part in torch.split(self.storage.pages, 1024):
            part.normal_()
        self.slots = SlotTable(
            num_slots=rows,
            hidden_size=model.hidden_size,
            planes=loops,
            max_loops=loops,
            max_positions=context,
            block_size=block_size,
            scratch_block=self.storage.scratch_block,
            vocab_size=1,
            dtype=model.dtype,
            device=device,
        )
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).to(device)
        self.seats = torch.arange(rows, device=device)
        self._depths = self.seats % loops
        if read_planes:
            self.slots.tables[self.seats, self._depths] = order.view(rows, width)
        else:
            self.slots.tables[:rows] = order.view(rows, loops, width)
        self.slots.position[:rows] = context - 1
        self._hidden = torch.randn(rows, model.hidden_size, device=device).to(model.dtype)
        backend = choose_attention(attention, model, most_rows(rows), device)
        self.on = Device(model, self.slots, self.storage, backend, device)
        self._width = width
        self.rewind()

    def rewind(self) -> None:
        """Put every row back to where it began."""
        self.slots.loops[: self.rows] = self._depths
        self.slots.hidden[: self.rows] = self._hidden

    def loop(self, seats: Tensor | None = None) -> Tensor:
        """One loop of all rows, or of these seats; their survivals."""
        return loop_seats(self.on, self.seats if seats is None else seats, self._width)

    def attention(self) -> None:
        """The attention of one loop alone, with rotation and KV write."""
        model, slots = self.model, self.slots
        position = slots.position[self.seats]
        own = self.seats * slots.planes + self._depths
        rows = PagedRows(position, slots.plane_tables, own, slots.block_size, position + 1)
        attend = paged_attention(self.on.attention, self.storage, rows)
        frequencies = inverse_frequencies(self.config.rope_theta, model.head_dim, model.device)
        kernels = loop_kernels(model.device, model.dtype)
        rotary = kernels.rotary(position, frequencies, model.dtype)
        together = model.heads + 2 * model.kv_heads
        qkv = self._hidden.repeat(1, -(-together * model.head_dim // model.hidden_size))
        qkv = qkv[:, : together * model.head_dim].view(self.rows, together, model.head_dim)
        for layer in range(model.num_layers):
            attend(layer, qkv.contiguous(), rotary)

    @property
    def loop_parameters(self) -> int:
        """Weights of all layers, as one loop reads them."""
        shapes = tensor_shapes(self.config).items()
        return sum(torch.Size(shape).numel() for name, shape in shapes if ".layers." in name)

    @property
    def num_bytes(self) -> int:
        """What a loop must read: the layers' weights and each row's history."""
        model = self.model
        token = KVStorage.bytes_per_block(
            model.num_layers, model.kv_heads, 1, model.head_dim, model.dtype
        )
        weights = self.loop_parameters * model.dtype.itemsize
        return weights + self.rows * self.context * token

    @property
    def flops(self) -> int:
        """Operations of a loop: two a weight and row, four a query element and token seen."""
        model = self.model
        attention = 4 * model.num_layers * model.heads * model.head_dim * self.context
        return self.rows * (2 * self.loop_parameters + attention)


class Products:
    """The matrix products of one loop, over weights of their own. Owner: one measurement.

    Mutated only by: nothing.
    """

    def __init__(
        self,
        config: OuroConfig,
        dtype: torch.dtype,
        device: torch.device,
        kernels: LoopKernels | None = None,
    ) -> None:
        """`kernels` None takes the fastest for the device."""
        self._kernels = loop_kernels(device, dtype) if kernels is None else kernels
        hidden, width, dim = config.hidden_size, config.intermediate_size, config.head_dim
        queries = config.num_attention_heads * dim
        together = queries + 2 * config.num_key_value_heads * dim
        shapes = [(together, hidden), (hidden, queries), (2 * width, hidden), (hidden, width)]

        def weight(shape: tuple[int, int]) -> Tensor:
            values = torch.randn(shape, dtype=dtype, device=device) * shape[1] ** -0.5
            return self._kernels.packed(values)

        self._weights = [
            [weight(shape) for shape in shapes] for _ in range(config.num_hidden_layers)
        ]
        self._queries = queries

    def run(self, x: Tensor) -> None:
        """All products of rows x [N, H]."""
        context = x.repeat(1, -(-self._queries // x.shape[1]))[:, : self._queries].contiguous()
        for qkv, output, gate_up, down in self._weights:
            self._kernels.linear(x, qkv)
            self._kernels.branch(context, output)
            self._kernels.branch(self._kernels.gated(x, gate_up), down)
