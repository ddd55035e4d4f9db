"""Worker: one device, opened once and closed once, with everything that lives on it."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import torch

from protocol.errors import ConfigError, ExecutorClosedError
from protocol.executor import MAX_PLANS_IN_FLIGHT
from protocol.layout import Layout
from protocol.profile import WorkerProfile
from worker.attention.choice import choose_attention
from worker.device_memory import DeviceUsers, forget_frames
from worker.graphs import (
    ROW_BUCKETS,
    TOKEN_BUCKETS,
    Capture,
    LoopGraphs,
    PrefillGraphs,
    buckets_up_to,
    most_rows,
)
from worker.model_runner import ModelRunner
from worker.models.registry import load_model, resolve_model
from worker.planning import block_shape, can_capture, open_slots, open_storage, plan_worker
from worker.readback import ReadbackPool
from worker.snapshot import snapshot_room
from worker.stages import Device, loop_chunks, loop_seats
from worker.streams import open_streams
from worker.tick_graphs import TickGraphs

if TYPE_CHECKING:
    from protocol.config import WorkerSettings
    from worker.kv_storage import KVStorage
    from worker.memory import MemoryPlan
    from worker.models.base import LoopedModel
    from worker.models.loop_kernels import LoopKernels
    from worker.readback import ReadbackLease

logger = logging.getLogger(__name__)

_Part = TypeVar("_Part")

SHARED_WARNING = (
    "KV layout shared: %s says nothing of having been trained for it. Every loop then reads KV "
    "that it never saw in training, and the text may be of no use; layout last_exited keeps the "
    "model's function"
)


_USERS = DeviceUsers()


class ModelSource(Protocol):
    """Makes a worker's model on its device."""

    def __call__(self, settings: WorkerSettings, device: torch.device) -> LoopedModel: ...


class Worker:
    """Owner: one LocalExecutor. Mutated only by: its device thread.

    Everything is created by open and dropped by close; between the two nothing is allocated per
    request but the snapshots of suspended ones. Use `Worker.open`. Once closed, only `profile`,
    `memory_plan` and `steps_done` are left.
    """

    def __init__(
        self,
        profile: WorkerProfile,
        memory_plan: MemoryPlan,
        runner: ModelRunner,
        readback: ReadbackPool,
        storage: KVStorage,
    ) -> None:
        self.profile = profile
        self.memory_plan = memory_plan
        self._runner: ModelRunner | None = runner
        self._readback: ReadbackPool | None = readback
        self._storage: KVStorage | None = storage
        self._device = torch.device(profile.device)
        self._steps_done = 0

    @classmethod
    def open(cls, settings: WorkerSettings, load: ModelSource | None = None) -> Self:
        """Open the device, load the model and create every buffer.

        `load` makes the model in place of reading the one that the settings name. Raises
        ConfigError for a device that is not there or storage that holds nothing, ModelError for a
        checkpoint that cannot be served. Whatever it raises, nothing stays allocated.
        """
        device = resolve_device(settings.device)
        if device.index is not None:
            torch.cuda.set_device(device)  # kernels are launched on the thread's own device
        _USERS.enter()
        try:
            return cls._open(settings, device, load or load_settings)
        except BaseException as error:
            forget_frames(error)
            _USERS.leave(device)
            raise

    @classmethod
    def _open(cls, settings: WorkerSettings, device: torch.device, load: ModelSource) -> Self:
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        model = load(settings, device)
        layout = settings.cache.layout
        if layout is Layout.SHARED:
            logger.warning(SHARED_WARNING, model.profile.name)
        attention = choose_attention(
            settings.attention, model, most_rows(settings.num_slots), device
        )
        readback = open_readback(settings, device)
        memory = plan_worker(settings, model, attention, readback, device)
        logger.info("%s on %s: %s", model.profile.name, device, memory)
        slots = open_slots(settings, model, memory.num_blocks, device)
        storage = open_storage(memory, block_shape(settings, model), device)
        streams = open_streams(device, settings.streams, settings.num_slots)
        profile = WorkerProfile(
            model=model.profile,
            device=str(device),
            dtype=settings.model.dtype,
            num_slots=settings.num_slots,
            num_blocks=memory.num_blocks,
            block_size=slots.block_size,
            planes=slots.planes,
            max_step_tokens=settings.step_tokens(device.type),
            layout=layout,
            snapshots=snapshot_room(settings.snapshot_bytes, slots, model),
            max_ticks=settings.max_ticks,
        )
        on = Device(model, slots, storage, attention, device)
        if settings.cuda_graphs:
            on = with_graphs(on, settings.num_slots, settings.step_tokens(device.type))
        ticks = open_tick_graphs(on, settings.num_slots, settings.max_ticks)
        runner = ModelRunner(on, profile.snapshots, ticks, streams)
        return cls(profile, memory, runner, readback, storage)

    def __repr__(self) -> str:
        state = "closed" if self._runner is None else repr(self._runner)
        return f"<Worker {self.profile.model.name} on {self.profile.device}, {state}>"

    @property
    def closed(self) -> bool:
        """Whether everything has been given back."""
        return self._runner is None

    @property
    def runner(self) -> ModelRunner:
        """What runs plans. Raises ExecutorClosedError once the worker is closed."""
        return _still_open(self._runner)

    @property
    def readback(self) -> ReadbackPool:
        """The leases of plans. Raises ExecutorClosedError once the worker is closed."""
        return _still_open(self._readback)

    @property
    def storage(self) -> KVStorage:
        """The KV. Raises ExecutorClosedError once the worker is closed."""
        return _still_open(self._storage)

    @property
    def asynchronous(self) -> bool:
        """Whether plans are enqueued; else they have run once their execution returns."""
        return self._device.type == "cuda"

    @property
    def steps_done(self) -> int:
        """Steps that have run, also once the worker is closed. Any thread may ask."""
        runner = self._runner
        return self._steps_done if runner is None else runner.steps_done

    def give_back(self, lease: ReadbackLease) -> None:
        """Return a lease; once the worker is closed there is nobody to return it to."""
        pool = self._readback
        if pool is not None:
            pool.give_back(lease)

    def close(self) -> None:
        """Drop every request, and all that open has made; idempotent."""
        runner, storage = self._runner, self._storage
        if runner is None or storage is None:
            return
        runner.reset()
        storage.close()
        self._steps_done = runner.steps_done
        self._runner = self._readback = self._storage = None
        del runner, storage
        _USERS.leave(self._device)


def _still_open(part: _Part | None) -> _Part:
    if part is None:
        raise ExecutorClosedError("the worker is closed; open a new one")
    return part


def load_settings(
    settings: WorkerSettings, device: torch.device, kernels: LoopKernels | None = None
) -> LoopedModel:
    """The model that the settings name, on a device; `kernels` None takes the fastest."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.model.dtype]
    directory = resolve_model(settings.model)
    return load_model(directory, dtype, device, settings.model.model, kernels)


def open_readback(settings: WorkerSettings, device: torch.device) -> ReadbackPool:
    """A lease for each plan in flight; of what ticks leave, only a GPU's has to be copied."""
    lines, seats = 0, 0
    if device.type == "cuda" and settings.max_ticks:
        lines, seats = 1 + settings.max_ticks, most_rows(settings.num_slots)
    return ReadbackPool(
        MAX_PLANS_IN_FLIGHT, settings.step_tokens(device.type), device, lines, seats
    )


def with_graphs(on: Device, rows: int, tokens: int) -> Device:
    """The same with graphs for decode and prefill batches of these sizes, where that can be done.

    The layout SHARED prefills token by token, without.
    """
    if not can_capture(on.attention, on.device):
        return on
    slots, width, capture = on.slots, on.slots.tables.shape[2], Capture(on.device)
    loops = LoopGraphs(
        capture,
        partial(loop_seats, on, width=width),
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
