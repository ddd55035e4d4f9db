"""The four stages on one device: gather by slot, compute, scatter by slot.

Each function runs one batch of a plan whose rows were already checked, enqueues its work and
returns device tensors for readback, or nothing. None reads a value back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from protocol.plan import NO_LOGPROBS, SLOT_TOKEN
from protocol.rng import Purpose
from worker.attention.backend import paged_attention
from worker.batch import column, decode_rows, prefill_rows, table_width
from worker.resident_table import PENDING
from worker.sampling.logprobs import token_logprobs
from worker.sampling.philox import uniform
from worker.sampling.sampler import greedy, sample
from worker.seats import commit_seats, gather_seats

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from protocol.plan import CodaBatch, PrefillBatch, PreludeBatch, RecurrentBatch
    from worker.attention.backend import AttentionBackend, PackedChunks
    from worker.graphs import LoopGraphs, PrefillGraphs
    from worker.kv_storage import KVStorage
    from worker.models.base import LoopedModel
    from worker.row_record import SamplingKind
    from worker.sampling.logprobs import Logprobs
    from worker.slot_table import SlotTable


NO_TOKEN = -1
"""Returned by CODA for a row whose logits are not numbers."""


@dataclass(frozen=True, slots=True)
class Device:
    """What every stage works on; the objects are the worker's and live as long as it does."""

    model: LoopedModel
    slots: SlotTable
    storage: KVStorage
    attention: AttentionBackend
    device: torch.device
    loop_graphs: LoopGraphs | None = None
    prefill_graphs: PrefillGraphs | None = None


def run_prefill(
    on: Device, batch: PrefillBatch, slots: Sequence[int], last: Sequence[bool]
) -> None:
    """Run prompt chunks through every depth; see prefill_passes."""
    for _ in prefill_passes(on, batch, slots, last):
        pass


def num_passes(on: Device, batch: PrefillBatch) -> int:
    """The passes of a prefill batch: one a depth, or, one plane serving all depths, one a token."""
    return on.model.profile.max_loops if _by_depth(on) else max(batch.counts)


def prefill_passes(
    on: Device, batch: PrefillBatch, slots: Sequence[int], last: Sequence[bool]
) -> Iterator[None]:
    """Run prompt chunks through every depth, one of `num_passes` passes each time it is asked.

    `last` marks the chunks that end their prompt: the hidden state of their final token stays in
    the slot for the first CODA, at full depth.
    """
    finals = on.slots.hidden.new_zeros(len(slots), on.slots.hidden.shape[1])
    passes = _prefill_by_depth if _by_depth(on) else _prefill_by_position
    for left in passes(on, batch, slots, finals):
        if not left:
            _leave_prompts(on, batch, slots, last, finals)
        yield


def _leave_prompts(
    on: Device,
    batch: PrefillBatch,
    slots: Sequence[int],
    last: Sequence[bool],
    finals: Tensor,
) -> None:
    ended = [index for index, ends_prompt in enumerate(last) if ends_prompt]
    if ended:
        slot = column([slots[index] for index in ended], on.device)
        ends = [batch.starts[index] + batch.counts[index] - 1 for index in ended]
        on.slots.hidden[slot] = finals[column(ended, on.device)]
        on.slots.position[slot] = column(ends, on.device)
        # Filled, here and below: an assigned number is copied from the host, which waits for it.
        on.slots.loops.index_fill_(0, slot, on.model.profile.max_loops)
        on.slots.resident.state.index_fill_(0, slot, PENDING)


def _by_depth(on: Device) -> bool:
    return not on.slots.planes == 1 < on.model.profile.max_loops


def _prefill_by_depth(
    on: Device, batch: PrefillBatch, slots: Sequence[int], finals: Tensor
) -> Iterator[int]:
    """A whole chunk at each depth before the next; yields how many depths are left.

    In the end `finals` has the last hidden state of each chunk, [chunks, hidden_size].
    """
    rows = prefill_rows(on.slots, batch, slots, on.device)
    hidden = on.model.embed(rows.tokens)
    next_depth = None
    if on.prefill_graphs is not None and on.prefill_graphs.fits(len(hidden), len(slots)):
        next_depth = on.prefill_graphs.begin(hidden, rows)
    loops = on.model.profile.max_loops
    for depth in range(loops):
        if next_depth is not None:
            hidden = next_depth()
        else:
            hidden = loop_chunks(on, hidden, rows.at_depth(on.slots, depth))
        if depth == loops - 1:
            ends = column([bound - 1 for bound in rows.bounds[1:]], on.device)
            finals.copy_(hidden[ends])
        yield loops - 1 - depth


def loop_chunks(on: Device, hidden: Tensor, chunks: PackedChunks) -> Tensor:
    """One loop of prompt chunks at their depth: hidden states [N, H] -> [N, H]."""
    attend = paged_attention(on.attention, on.storage, chunks)
    return on.model.loop(hidden, chunks.positions, attend)


def _prefill_by_position(
    on: Device, batch: PrefillBatch, slots: Sequence[int], finals: Tensor
) -> Iterator[int]:
    """Each token through every depth before the next one of its request (SHARED).

    A token's last loop overwrites what its earlier ones wrote, and the next token reads that; run
    by depth, the result would depend on where chunks begin. Requests run side by side. Yields how
    many tokens are left; `finals` has the last hidden state of each chunk, [chunks, hidden_size].
    """
    longest = max(batch.counts)
    for wave in range(longest):
        chunks = [index for index, count in enumerate(batch.counts) if wave < count]
        positions = [batch.starts[index] + wave for index in chunks]
        slot = column([slots[index] for index in chunks], on.device)
        position = column(positions, on.device)
        width = table_width(on.slots, positions)
        rows = decode_rows(on.slots, slot, position, position.new_zeros(len(chunks)), width)
        attend = paged_attention(on.attention, on.storage, rows)
        hidden = on.model.embed(on.slots.prompt[slot, position])
        for _ in range(on.model.profile.max_loops):
            hidden = on.model.loop(hidden, position, attend)
        finals[column(chunks, on.device)] = hidden
        yield longest - 1 - wave


def run_prelude(on: Device, batch: PreludeBatch, slots: Sequence[int]) -> None:
    """Embed each row's token, the host's or the slot's, and start its loops again."""
    slot = column(slots, on.device)
    tokens = on.slots.token[slot]
    if any(token != SLOT_TOKEN for token in batch.tokens):
        given = column(batch.tokens, on.device)
        tokens = given.where(given != SLOT_TOKEN, tokens)
    on.slots.hidden[slot] = on.model.embed(tokens)
    on.slots.survival.index_fill_(0, slot, 1.0)
    on.slots.position[slot] = column(batch.positions, on.device)
    on.slots.loops.index_fill_(0, slot, 0)


def run_recurrent(on: Device, batch: RecurrentBatch, slots: Sequence[int]) -> Tensor:
    """One loop a row, at the position and depth that its slot tells; survivals float32 [N]."""
    if on.loop_graphs is not None and on.loop_graphs.fits(len(slots)):
        return on.loop_graphs.replay(slots)
    return loop_seats(on, column(slots, on.device), table_width(on.slots, batch.positions))


def loop_seats(on: Device, seats: Tensor, width: int) -> Tensor:
    """One loop of the slots int64 [N] that sit in a batch; returns survivals float32 [N].

    Everything else is read from the slots, so a batch is nothing but its seats; those of the trash
    slot are padding. `width` blocks of a table hold the longest of these rows.

    s <- f32(s * f32(1 - hazard)), as protocol/exit_rule.py states it.
    """
    hidden, rows = gather_seats(on.slots, seats, width)
    attend = paged_attention(on.attention, on.storage, rows)
    hidden = on.model.loop(hidden, rows.positions, attend)
    return commit_seats(on.slots, seats, hidden, on.model.hazards(hidden))


@dataclass(frozen=True, slots=True)
class Sampled:
    """What CODA leaves: tokens int64 [N], and the logprobs of the rows that asked, in order."""

    tokens: Tensor
    logprobs: Logprobs | None


def run_coda(
    on: Device, batch: CodaBatch, slots: Sequence[int], kinds: Sequence[SamplingKind]
) -> Sampled:
    """Finalize each row's KV, sample its next token.

    The token also stays in the slot, so the next PRELUDE need not wait for the host.
    """
    slot = column(slots, on.device)
    finalize(on, slot)
    logits = on.model.logits(on.slots.hidden[slot])
    adjusts = [kind.adjusts for kind in kinds]
    on.slots.adjuster.adjust(logits, slots, batch.output_indices, adjusts)
    tokens = draw(on, logits, slot, column(batch.output_indices, on.device), kinds)
    on.slots.token[slot] = tokens
    on.slots.adjuster.count(tokens, slots, adjusts)
    return Sampled(
        tokens=tokens.masked_fill(logits.isnan().any(dim=1), NO_TOKEN),
        logprobs=_logprobs(logits, tokens, [kind.logprobs for kind in kinds], on.device),
    )


def _logprobs(
    logits: Tensor, tokens: Tensor, counts: Sequence[int], device: torch.device
) -> Logprobs | None:
    asked = [row for row, count in enumerate(counts) if count != NO_LOGPROBS]
    if not asked:
        return None
    rows = column(asked, device)
    return token_logprobs(logits[rows], tokens[rows], alternatives=max(counts) > 0)


def draw(
    on: Device, logits: Tensor, seats: Tensor, counters: Tensor, kinds: Sequence[SamplingKind]
) -> Tensor:
    """One token int64 [N] of the slots int64 [N], each by its own parameters.

    `counters` int64 [N] are output indices; `kinds` those of at least all these rows: a batch does
    what any of them needs.
    """
    random = [kind for kind in kinds if kind.random]
    if not random:
        return greedy(logits)
    return sample(
        logits,
        temperature=on.slots.temperature[seats],
        top_p=on.slots.top_p[seats],
        top_k=on.slots.top_k[seats],
        uniforms=uniform(on.slots.rng_words[seats], Purpose.SAMPLE, counters),
        any_top_k=any(kind.top_k for kind in random),
        any_top_p=any(kind.top_p for kind in random),
    )


def finalize(on: Device, seats: Tensor) -> None:
    """Copy the KV of each slot's token from its exit plane into every deeper one (LAST_EXITED).

    With one plane (SHARED) there is none deeper.
    Example: 4 planes, exit depth 2 -> plane 1 is copied to planes 2 and 3; exit depth 4 copies
    nothing.
    """
    planes, table = on.slots.planes, on.slots
    if planes == 1:
        return
    if seats.is_cuda:
        # Imported late: Triton is there only where CUDA is.
        from worker.kernels.finalize import finalize as finalize_on_cuda

        pages = on.storage.pages
        finalize_on_cuda(seats, table.position, table.loops, table.tables, pages, table.trash)
        return
    if table.compiled:
        # Imported late: Numba need not be there.
        from worker.cpu_kernels.slots import finalize as finalize_compiled

        pages = on.storage.pages
        finalize_compiled(seats, table.position, table.loops, table.tables, pages, table.trash)
        return
    depths = torch.arange(planes, device=on.device)
    is_deeper = (depths >= table.loops[seats][:, None]) & (seats != table.trash)[:, None]
    row, target = is_deeper.nonzero(as_tuple=True)
    if not len(row):
        return
    slot = seats[row]
    position = table.position[slot]
    page = position // table.block_size
    on.storage.copy_tokens(
        table.tables[slot, table.loops[slot] - 1, page],
        table.tables[slot, target, page],
        position % table.block_size,
    )
