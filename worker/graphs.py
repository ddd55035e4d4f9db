"""CUDA graphs of what decoding and prompts run most: captured at start-up, replayed by content.

A graph reads its rows from tensors of its own and all else from the slots, so it holds nothing of
any request, and one serves every batch that fits.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from worker.attention.backend import PackedChunks
from worker.batch import column

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from worker.batch import PrefillRows
    from worker.slot_table import SlotTable

logger = logging.getLogger(__name__)

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of the loop's graphs. A batch takes the smallest that holds it, the rest being padding."""

TOKEN_BUCKETS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens of the prefill's graphs; of more tokens, launching costs far less than computing."""

MAX_CHUNKS = 16
"""Prompts that one prefill graph may hold."""

WARM_UPS = 2
"""Runs before a capture, so that kernels are compiled and libraries have their workspaces."""


def buckets_up_to(buckets: Sequence[int], most: int) -> tuple[int, ...]:
    """The buckets that batches of at most `most` need: 40 rows -> 1, 2, 4, 8, 16, 24, 32, 48."""
    below = tuple(bucket for bucket in buckets if bucket < most)
    above = tuple(bucket for bucket in buckets if bucket >= most)
    return below + above[:1]


def most_rows(rows: int) -> int:
    """Rows of the largest decode batch, padding included: 40 -> 48, 300 -> 300."""
    return max(rows, buckets_up_to(ROW_BUCKETS, rows)[-1])


class Capture:
    """Captures graphs into one pool of memory, since they never run side by side.

    Owner: whoever opens the device. Mutated only by: `graph`, on one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: libraries keep a workspace for each stream that they ever ran on.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._started = time.perf_counter()
        # A capture gives cached memory back first, which is not to be counted.
        torch.cuda.empty_cache()
        self._free = torch.cuda.mem_get_info(device)[0]

    @property
    def num_bytes(self) -> int:
        """Device memory that is gone since this was made."""
        return self._free - torch.cuda.mem_get_info(self._device)[0]

    @torch.inference_mode()
    def graph(self, what: str, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The graph of `run`, and the tensor that holds its result after each replay."""
        device, stream = self._device, self._stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            result = run()
        logger.info("captured %s, %.1f s so far", what, time.perf_counter() - self._started)
        return graph, result


class LoopGraphs:
    """The recurrent step, one graph a bucket. Owner: Device. Mutated only by: replay.

    What `launch` returns is overwritten by the next one.
    """

    def __init__(
        self,
        capture: Capture,
        run: Callable[[Tensor], Tensor],
        buckets: Sequence[int],
        trash: int,
        device: torch.device,
    ) -> None:
        """Capture `run`, one loop of seats int64 [N] that returns survivals float32 [N]."""
        self._trash = trash
        self._device = device
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        for bucket in sorted(buckets, reverse=True):
            seats = torch.full((bucket,), trash, dtype=torch.int64, device=device)
            graph, survivals = capture.graph(f"a loop of {bucket} rows", partial(run, seats))
            self._graphs[bucket] = graph, seats, survivals
        self._sizes = sorted(self._graphs)

    def __repr__(self) -> str:
        return f"<LoopGraphs of {self._sizes} rows>"

    def fits(self, rows: int) -> bool:
        """Whether there is a graph for so many rows."""
        return 0 < rows <= self._sizes[-1]

    def bucket_of(self, rows: int) -> int:
        """The rows of the smallest graph that holds so many."""
        return next(size for size in self._sizes if size >= rows)

    def seats_of(self, bucket: int) -> Tensor:
        """The seats int64 [bucket] that `launch` reads."""
        return self._graphs[bucket][1]

    def launch(self, bucket: int) -> Tensor:
        """One loop of the seats of a bucket; survivals float32 [bucket]."""
        graph, _, survivals = self._graphs[bucket]
        graph.replay()
        return survivals

    def replay(self, slots: Sequence[int]) -> Tensor:
        """One loop of these slots, in the smallest graph that holds them; survivals float32 [N]."""
        return self.replay_seats(column(slots, self._device))

    def replay_seats(self, slots: Tensor) -> Tensor:
        """The same for slots int64 [N] on the device."""
        count = len(slots)
        bucket = self.bucket_of(count)
        self.seats_of(bucket).fill_(self._trash)[:count] = slots
        return self.launch(bucket)[:count].clone()


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What one prefill graph reads, see PackedChunks; `hidden` is where its result goes as well."""

    hidden: Tensor
    chunks: PackedChunks


def _one_pass(run: Callable[[Tensor, PackedChunks], Tensor], tokens: _Tokens) -> Tensor:
    return tokens.hidden.copy_(run(tokens.hidden, tokens.chunks))


class PrefillGraphs:
    """One pass of prompt chunks at one depth, one graph a bucket of tokens.

    Owner: Device. Mutated only by: what `begin` returns. A pass leaves its hidden states where the
    next one reads them, and its addresses at the next depth.
    """

    def __init__(
        self,
        capture: Capture,
        run: Callable[[Tensor, PackedChunks], Tensor],
        slots: SlotTable,
        buckets: Sequence[int],
    ) -> None:
        """Capture `run`, one loop of hidden states [N, H] and their chunks -> [N, H]."""
        self._slots = slots
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, _Tokens]] = {}
        for bucket in sorted(buckets, reverse=True):
            tokens = self._tokens(bucket)
            one_pass = partial(_one_pass, run, tokens)
            graph, _ = capture.graph(f"a prefill pass of {bucket} tokens", one_pass)
            self._graphs[bucket] = graph, tokens
        self._sizes = sorted(self._graphs)

    def __repr__(self) -> str:
        return f"<PrefillGraphs of {self._sizes} tokens>"

    def fits(self, tokens: int, chunks: int) -> bool:
        """Whether there is a graph for so many tokens of so many chunks."""
        return 0 < tokens <= self._sizes[-1] and chunks <= MAX_CHUNKS

    def begin(self, hidden: Tensor, rows: PrefillRows) -> Callable[[], Tensor]:
        """A function that runs the next depth, from 0, and returns its hidden states [N, H].

        They are overwritten by the next pass of any batch.
        """
        count, chunks = len(hidden), len(rows.lengths)
        bucket = next(size for size in self._sizes if size >= count)
        graph, tokens = self._graphs[bucket]
        held, slots = tokens.chunks, self._slots
        trash = slots.trash * slots.planes
        tokens.hidden.zero_()[:count] = hidden
        held.positions.zero_()[:count] = rows.positions
        # Each pass goes to the next plane, the first to plane 0.
        held.table_rows.fill_(trash - 1)[:count] = rows.row_slots * slots.planes - 1
        held.chunk_rows.fill_(trash - 1)[:chunks] = rows.chunk_slots * slots.planes - 1
        held.lengths.zero_()[:chunks] = rows.lengths
        # Behind the last chunk all edges are its end: those chunks are empty.
        held.edges.fill_(count)[: chunks + 1] = rows.edges

        def next_depth() -> Tensor:
            held.table_rows.add_(1)
            held.chunk_rows.add_(1)
            graph.replay()
            return tokens.hidden[:count]

        return next_depth

    def _tokens(self, bucket: int) -> _Tokens:
        """The inputs of a graph: nothing but padding, at the first depth."""
        slots = self._slots
        device, trash = slots.hidden.device, slots.trash * slots.planes

        def filled(count: int, value: int) -> Tensor:
            return torch.full((count,), value, dtype=torch.int64, device=device)

        hidden = torch.zeros(bucket, slots.hidden.shape[1], dtype=slots.hidden.dtype, device=device)
        chunks = PackedChunks(
            positions=filled(bucket, 0),
            tables=slots.plane_tables,
            table_rows=filled(bucket, trash),
            block_size=slots.block_size,
            chunk_rows=filled(MAX_CHUNKS, trash),
            lengths=filled(MAX_CHUNKS, 0),
            edges=filled(MAX_CHUNKS + 1, 0),
            bounds=(),
        )
        return _Tokens(hidden, chunks)
