"""The largest steps as they are run for the memory plan: their sizes, and what they touch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from protocol.config import CacheSettings, WorkerSettings
from protocol.errors import ConfigError
from protocol.layout import Layout
from worker.attention.backend import PackedChunks
from worker.attention.torch_backend import TorchAttention
from worker.kv_storage import KVStorage
from worker.memory import longest_history
from worker.planning import block_shape, open_slots
from worker.probe import (
    SEGMENT_BYTES,
    in_segments,
    largest_prefill,
    probe_peak,
    run_largest_steps,
)
from worker.stages import Device
from worker.worker import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker.attention.backend import PagedRows
    from worker.models.layers import Rotary

CPU = torch.device("cpu")
SLOTS, TOKENS, HISTORY = 3, 40, 64


class Watched(TorchAttention):
    """Torch's attention that notes what it was asked for, once a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[str, int, int]] = []

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotary: Rotary,
        storage: KVStorage,
        metadata: PagedRows | PackedChunks,
    ) -> Tensor:
        if layer == 0:
            kind = "chunks" if isinstance(metadata, PackedChunks) else "rows"
            self.batches.append((kind, len(qkv), int(metadata.lengths.max())))
        return super().attend(layer, qkv, rotary, storage, metadata)


class RowsOfLogits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most rows of any result that is as wide as the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._vocab_size = vocab_size
        self.most = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dim() == 2 and found.shape[1] == self._vocab_size:
            self.most = max(self.most, found.shape[0])
        return found


def throw_away(layout: Layout) -> tuple[Device, Watched]:
    settings = WorkerSettings(cache=CacheSettings(layout=layout), num_slots=SLOTS, device="cpu")
    model, attention = load_settings(settings, CPU), Watched()
    storage = KVStorage(1, *block_shape(settings, model), CPU)
    slots = open_slots(settings, model, storage.scratch_block, CPU)
    return Device(model, slots, storage, attention, CPU), attention


def test_the_largest_steps_are_as_large_as_a_worker_takes() -> None:
    on, attention = throw_away(Layout.LAST_EXITED)
    logits = RowsOfLogits(on.model.profile.vocab_size)
    with logits:
        run_largest_steps(on, TOKENS, HISTORY)
    assert attention.batches == [("chunks", TOKENS, HISTORY), ("rows", SLOTS, HISTORY)]
    # Prompts have no logits. The columns of the slots themselves have a row for nobody.
    assert logits.most == SLOTS + 1 < TOKENS
    # All filters were on: those that penalize count what was sampled.
    assert on.slots.counts[:SLOTS].sum(1).tolist() == [1] * SLOTS


def test_they_write_to_the_scratch_block_alone() -> None:
    on, _ = throw_away(Layout.LAST_EXITED)
    run_largest_steps(on, TOKENS, HISTORY)
    assert on.storage.pages[on.storage.scratch_block].any()
    assert not on.storage.pages[0].any()


def test_a_shared_plane_prefills_by_rows() -> None:
    on, attention = throw_away(Layout.SHARED)
    run_largest_steps(on, TOKENS, HISTORY)
    assert attention.batches == [("rows", SLOTS, HISTORY)]


@pytest.mark.parametrize(
    ("tokens", "slots", "history", "starts", "counts"),
    [
        (512, 32, 2048, (1536,), (512,)),
        (10_000, 4, 4096, (0, 0, 2288), (4096, 4096, 1808)),
        (512, 2, 128, (0, 0), (128, 128)),
        (256, 2, 128, (0, 0), (128, 128)),
    ],
)
def test_the_largest_prefill(
    tokens: int, slots: int, history: int, starts: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    batch = largest_prefill(tokens, slots, history)
    assert (batch.starts, batch.counts) == (starts, counts)


@pytest.mark.parametrize(
    ("cache", "free", "history"),
    [
        (CacheSettings(num_blocks=64), None, 256),
        (CacheSettings(num_blocks=3), None, 16),
        (CacheSettings(kv_bytes=65 * 1000), None, 256),
        (CacheSettings(gpu_memory_utilization=0.5), 2 * 65 * 1000, 256),
        (CacheSettings(num_blocks=10_000), None, 2048),
        (CacheSettings(), None, 2048),
    ],
)
def test_a_history_is_as_long_as_kv_and_model_allow(
    cache: CacheSettings, free: int | None, history: int
) -> None:
    assert longest_history(cache, 1000, 4, 2048, free) == history


def test_a_peak_is_whole_segments_and_one_to_spare() -> None:
    sizes = [1, SEGMENT_BYTES, SEGMENT_BYTES + 1]
    assert [in_segments(size) / SEGMENT_BYTES for size in sizes] == [2, 2, 3]


def test_steps_that_do_not_fit_are_refused_with_the_mend() -> None:
    def fail() -> Device:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ConfigError) as caught:
        probe_peak(fail, 512, 2048)
    assert str(caught.value) == (
        "the largest steps do not fit beside the model, with 512 tokens in a step and up to 2048 "
        "seen by each row: lower max_step_tokens or num_slots, or free memory of the device (CUDA "
        "out of memory)"
    )


def test_another_failure_stays_what_it_is() -> None:
    def fail() -> Device:
        raise RuntimeError("no kernel image")

    with pytest.raises(RuntimeError, match="no kernel image"):
        probe_peak(fail, 512, 2048)
