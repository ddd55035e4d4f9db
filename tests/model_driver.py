"""Drives a model over paged KV by hand: what the model runner does, in its plainest form."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from protocol.layout import Layout
from worker.attention.backend import PackedChunks, PagedRows, paged_attention
from worker.attention.torch_backend import TorchAttention
from worker.kv_storage import KVStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from worker.attention.backend import AttentionBackend
    from worker.models.base import LoopedModel


class ModelDriver:
    """Owner: one test. Mutated only by: its own prefill and decode, which write KV.

    Every sequence has room for `max_tokens` at every depth. Blocks are handed out in a shuffled
    order, so that no test passes by pages that happen to lie side by side.
    """

    def __init__(
        self,
        model: LoopedModel,
        sequences: int = 1,
        max_tokens: int = 64,
        block_size: int = 16,
        layout: Layout = Layout.LAST_EXITED,
        backend: AttentionBackend | None = None,
    ) -> None:
        self.model = model
        self.planes = layout.planes(model.profile.max_loops)
        self.block_size = block_size
        width = -(-max_tokens // block_size)
        count = sequences * self.planes * width
        self.storage = KVStorage(
            count,
            model.num_layers,
            model.kv_heads,
            block_size,
            model.head_dim,
            model.dtype,
            model.device,
        )
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
        self.tables = order.view(sequences, self.planes, width).to(model.device)
        self.backend = TorchAttention() if backend is None else backend

    def prefill(self, chunks: Sequence[tuple[int, int, Sequence[int]]]) -> list[Tensor]:
        """Run (sequence, start, ids) chunks through every depth: hidden [T, H] after each loop."""
        device = self.model.device
        bounds = (0, *accumulate(len(ids) for _, _, ids in chunks))
        tokens = torch.tensor([token for _, _, ids in chunks for token in ids], device=device)
        positions = torch.cat([torch.arange(s, s + len(ids)) for _, s, ids in chunks]).to(device)
        owners = torch.tensor([seq for seq, _, ids in chunks for _ in ids], device=device)
        lengths = torch.tensor([start + len(ids) for _, start, ids in chunks], device=device)
        sequences = torch.tensor([seq for seq, _, _ in chunks], device=device)
        hidden, states = self.model.embed(tokens), []
        for depth in range(self.planes):
            metadata = PackedChunks(
                positions=positions,
                tables=self.tables.flatten(0, 1),
                table_rows=owners * self.planes + depth,
                block_size=self.block_size,
                chunk_rows=sequences * self.planes + depth,
                lengths=lengths,
                edges=torch.tensor(bounds, device=device),
                bounds=bounds,
            )
            attend = paged_attention(self.backend, self.storage, metadata)
            hidden = self.model.loop(hidden, positions, attend)
            states.append(hidden)
        return states

    def decode(
        self,
        hidden: Tensor,
        sequences: Sequence[int],
        positions: Sequence[int],
        depths: Sequence[int],
    ) -> Tensor:
        """One loop of single-token rows, each at its own position and depth."""
        device = self.model.device
        position = torch.tensor(positions, device=device)
        owner = torch.tensor(sequences, device=device)
        depth = torch.tensor(depths, device=device).clamp(max=self.planes - 1)
        rows = PagedRows(
            positions=position,
            lengths=position + 1,
            tables=self.tables.flatten(0, 1),
            table_rows=owner * self.planes + depth,
            block_size=self.block_size,
        )
        attend = paged_attention(self.backend, self.storage, rows)
        return self.model.loop(hidden, position, attend)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> tuple[Tensor, Tensor]:
        """`count` greedy tokens of each prompt at full depth, all prompts in one batch.

        Returns tokens and top-1 minus top-2 margins, both [prompts, count].
        """
        chunks = [(index, 0, ids) for index, ids in enumerate(prompts)]
        ends = torch.tensor(list(accumulate(len(ids) for ids in prompts)))
        hidden = self.prefill(chunks)[-1][ends - 1]
        rows = range(len(prompts))
        tokens, margins = [], []
        for step in range(count):
            values, ids = self.model.logits(hidden).topk(2)
            tokens.append(ids[:, 0])
            margins.append(values[:, 0] - values[:, 1])
            hidden = self.model.embed(ids[:, 0])
            positions = [len(ids) + step for ids in prompts]
            for depth in range(self.planes):
                hidden = self.decode(hidden, rows, positions, [depth] * len(prompts))
        return torch.stack(tokens, 1), torch.stack(margins, 1)
