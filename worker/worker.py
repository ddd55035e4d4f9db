"""Worker: one device, opened once and closed once, with everything that lives on it."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

import torch

from protocol.errors import ConfigError
from protocol.executor import MAX_PLANS_IN_FLIGHT
from protocol.layout import Layout
from protocol.profile import WorkerProfile
from worker.attention.choice import choose_attention
from worker.graphs import (
    ROW_BUCKETS,
    TOKEN_BUCKETS,
    Capture,
    LoopGraphs,
    PrefillGraphs,
    buckets_up_to,
    most_rows,
)
from worker.kv_storage import KVStorage
from worker.memory import plan_memory
from worker.model_runner import ModelRunner
from worker.models.registry import load_model, resolve_model
from worker.readback import ReadbackPool
from worker.sampling.adjustments import LogitAdjuster
from worker.slot_table import SlotTable
from worker.snapshot import snapshot_room
from worker.stages import Device, loop_chunks, loop_seats
from worker.tick_graphs import TickGraphs

if TYPE_CHECKING:
    from protocol.config import WorkerSettings
    from worker.memory import MemoryPlan

logger = logging.getLogger(__name__)

SHARED_WARNING = (
    "KV layout shared: %s says nothing of having been trained for it. Every loop then reads KV "
    "that it never saw in training, and the text may be of no use; layout last_exited keeps the "
    "model's function"
)


class Worker:
    """Owner: one LocalExecutor. Mutated only by: its device thread.

    Everything is created by open and dropped by close; between the two nothing is allocated per
    request but the snapshots of suspended ones. Use `Worker.open`.
    """

    def __init__(
        self,
        profile: WorkerProfile,
        runner: ModelRunner,
        readback: ReadbackPool,
        storage: KVStorage,
    ) -> None:
        self.profile = profile
        self.runner = runner
        self.readback = readback
        self.storage = storage
        self.closed = False

    @classmethod
    def open(cls, settings: WorkerSettings) -> Self:
        """Open the device, load the model and create every buffer.

        Raises ConfigError for a device that is not there or storage that holds nothing, ModelError
        for a checkpoint that cannot be served.
        """
        device = resolve_device(settings.device)
        if device.index is not None:
            torch.cuda.set_device(device)  # kernels are launched on the thread's own device
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        directory = resolve_model(settings.model)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.model.dtype]
        model = load_model(directory, dtype, device, settings.model.model)
        layout = settings.cache.layout
        if layout is Layout.SHARED:
            logger.warning(SHARED_WARNING, model.profile.name)
        planes = layout.planes(model.profile.max_loops)
        block_size = settings.cache.block_size
        shape = (model.num_layers, model.kv_heads, block_size, model.head_dim, dtype)
        pages = -(-model.profile.max_positions // block_size)
        memory = plan_memory(
            settings.cache,
            KVStorage.bytes_per_block(*shape),
            planes,
            pages * planes * settings.num_slots,
            device,
        )
        adjuster = LogitAdjuster.bytes_needed(settings.num_slots + 1, model.profile.vocab_size)
        logger.info(
            "%s on %s: %s, %d bytes for penalties", model.profile.name, device, memory, adjuster
        )
        storage = open_storage(memory, shape, device)
        slots = SlotTable(
            num_slots=settings.num_slots,
            hidden_size=model.hidden_size,
            planes=planes,
            max_loops=model.profile.max_loops,
            max_positions=model.profile.max_positions,
            block_size=block_size,
            scratch_block=storage.scratch_block,
            vocab_size=model.profile.vocab_size,
            dtype=dtype,
            device=device,
        )
        profile = WorkerProfile(
            model=model.profile,
            device=str(device),
            dtype=settings.model.dtype,
            num_slots=settings.num_slots,
            num_blocks=memory.num_blocks,
            block_size=block_size,
            planes=planes,
            max_step_tokens=settings.max_step_tokens,
            layout=layout,
            snapshots=snapshot_room(settings.snapshot_bytes, slots, model),
            max_ticks=settings.max_ticks,
        )
        attention = choose_attention(
            settings.attention, model, most_rows(settings.num_slots), device
        )
        on = Device(model, slots, storage, attention, device)
        if settings.cuda_graphs:
            on = with_graphs(on, settings.num_slots, settings.max_step_tokens)
        ticks = open_tick_graphs(on, settings.num_slots, settings.max_ticks)
        runner = ModelRunner(on, profile.snapshots, ticks)
        readback = ReadbackPool(MAX_PLANS_IN_FLIGHT, settings.max_step_tokens, device)
        return cls(profile, runner, readback, storage)

    def __repr__(self) -> str:
        state = "closed" if self.closed else repr(self.runner)
        return f"<Worker {self.profile.model.name} on {self.profile.device}, {state}>"

    def close(self) -> None:
        """Drop every request and the KV storage; idempotent."""
        if not self.closed:
            self.closed = True
            self.runner.reset()
            self.storage.close()


def open_storage(
    memory: MemoryPlan, shape: tuple[int, int, int, int, torch.dtype], device: torch.device
) -> KVStorage:
    """The KV storage of a plan. Raises ConfigError when the device cannot hold it."""
    try:
        return KVStorage(memory.num_blocks, *shape, device)
    except RuntimeError as error:  # torch's OutOfMemoryError is one too
        raise ConfigError(
            f"{memory.num_blocks} KV blocks ({memory.source}) of {memory.block_bytes} bytes do not "
            f"fit on {device}: lower cache.num_blocks or cache.kv_bytes"
        ) from error


def with_graphs(on: Device, rows: int, tokens: int) -> Device:
    """The same with graphs for decode and prefill batches of these sizes, where that can be done.

    The layout SHARED prefills token by token, without.
    """
    if on.device.type != "cuda" or not on.attention.abilities.device_metadata:
        return on
    slots, width, capture = on.slots, on.slots.tables.shape[2], Capture(on.device)
    loops = LoopGraphs(
        capture,
        lambda seats: loop_seats(on, seats, width),
        buckets_up_to(ROW_BUCKETS, rows),
        slots.trash,
        on.device,
    )
    prefills = None
    if slots.planes == on.model.profile.max_loops:
        prefills = PrefillGraphs(
            capture, partial(loop_chunks, on), slots, buckets_up_to(TOKEN_BUCKETS, tokens)
        )
    logger.info("%s and %s take %d bytes", loops, prefills, capture.num_bytes)
    return replace(on, loop_graphs=loops, prefill_graphs=prefills)


def open_tick_graphs(on: Device, rows: int, max_ticks: int) -> TickGraphs | None:
    """Graphs of resident ticks for as many rows, where the loop has been captured."""
    if on.loop_graphs is None or not max_ticks:
        return None
    capture = Capture(on.device)
    buckets = buckets_up_to(ROW_BUCKETS, rows)
    ticks = TickGraphs(capture, on, on.loop_graphs, buckets, max_ticks)
    logger.info("%s take %d bytes", ticks, capture.num_bytes)
    return ticks


def resolve_device(name: str) -> torch.device:
    """The torch device of a setting: "auto" is cuda where there is one, else cpu."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name}: torch sees no CUDA device here; use --device cpu")
    return device
