"""The largest steps of a worker, run before its KV is there, to see what memory they take.

Derived figures know what the layers of a loop keep; they do not know what an attention backend
copies, nor what torch rounds up. So a CUDA worker runs the steps themselves, over throw-away slots
and a KV of two blocks: every table names the scratch block, and what comes out means nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from protocol.errors import ConfigError
from protocol.identity import RequestKey
from protocol.plan import CodaBatch, PrefillBatch
from protocol.sampling import MAX_LOGPROBS
from worker.batch import column, prefill_rows, table_width
from worker.row_record import SamplingKind
from worker.sampling.adjustments import Adjustments
from worker.stages import loop_chunks, loop_seats, run_coda

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.stages import Device

SEGMENT_BYTES = 20 * 2**20
"""What torch takes from a CUDA device at once, but for tensors of more than half of that."""

_EVERYTHING = SamplingKind(
    random=True,
    top_k=True,
    top_p=True,
    adjusts=Adjustments(biased=True, penalized=True, min_tokens=1),
    logprobs=MAX_LOGPROBS,
)


def probe_peak(make: Callable[[], Device], tokens: int, history: int) -> int:
    """Bytes of a CUDA device that the largest steps take and give back.

    `make` makes what they run on, which is dropped before this returns. Prompts have up to `tokens`
    tokens in a step, and no row sees more than `history`. Whatever else this process allocates on
    the device meanwhile is counted in. Raises ConfigError when the device cannot hold the steps.
    """
    try:
        return _measure(make(), tokens, history)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the largest steps do not fit beside the model, with {tokens} tokens in a step and "
            f"up to {history} seen by each row: lower max_step_tokens or num_slots, or free memory "
            f"of the device ({error})"
        ) from error
    finally:
        torch.cuda.empty_cache()


def _measure(on: Device, tokens: int, history: int) -> int:
    """What a second run takes above what is there before it.

    The first loads kernels and makes the workspaces of libraries, which are not given back and have
    a bound of their own, cache.graph_reserve_bytes. Counted is the memory that torch reserves: the
    plan compares its sum with what the device has free, pieces are rounded up, and those of one
    step may not serve the next. Where steps find room in what was reserved before, the bytes that
    they allocate are more.
    """
    run_largest_steps(on, tokens, history)
    torch.cuda.synchronize(on.device)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved(on.device)
    allocated = torch.cuda.memory_allocated(on.device)
    torch.cuda.reset_peak_memory_stats(on.device)
    run_largest_steps(on, tokens, history)
    torch.cuda.synchronize(on.device)
    taken = max(
        torch.cuda.max_memory_reserved(on.device) - reserved,
        torch.cuda.max_memory_allocated(on.device) - allocated,
    )
    return in_segments(taken)


def in_segments(size: int) -> int:
    """Bytes in whole segments, and one more.

    The same steps find other pieces free than they found in the probe, and may begin another
    segment for it. Example: 21 MiB -> 60 MiB.
    """
    return (-(-size // SEGMENT_BYTES) + 1) * SEGMENT_BYTES


@torch.inference_mode()
def run_largest_steps(on: Device, tokens: int, history: int) -> None:
    """One after the other: a prefill pass, a loop and a coda, each as large as it gets.

    All depths of a prefill take the same, so one is run. The layout SHARED has no prefill pass: it
    runs a prompt in batches that are no larger than the loop's.
    """
    table, count = on.slots, on.slots.trash
    slots, keys = list(range(count)), tuple(_key(number) for number in range(count))
    if table.planes == on.model.profile.max_loops:
        batch = largest_prefill(tokens, count, history)
        rows = prefill_rows(table, batch, slots[: len(batch.keys)], on.device)
        loop_chunks(on, on.model.embed(rows.tokens), rows.at_depth(table, 0))
    table.position.fill_(history - 1)
    loop_seats(on, column(slots, on.device), table_width(table, [history - 1]))
    codas = CodaBatch(keys, (history - 1,) * count, (1,) * count, (0,) * count)
    run_coda(on, codas, slots, [_EVERYTHING] * count)


def largest_prefill(tokens: int, slots: int, history: int) -> PrefillBatch:
    """The prefill that takes most: the longest chunks that there can be, at the end of a history.

    Example: 10,000 tokens, 4 slots, histories of 4096 -> 4096, 4096 and 1808 tokens, the last from
    2288.
    """
    whole, rest = divmod(tokens, history)
    counts = ([history] * whole + [rest] * bool(rest))[:slots]
    return PrefillBatch(
        keys=tuple(_key(number) for number in range(len(counts))),
        starts=tuple(history - count for count in counts),
        counts=tuple(counts),
    )


def _key(number: int) -> RequestKey:
    return RequestKey(f"probe-{number}", 1)
