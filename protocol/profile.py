"""WorkerProfile: what only a worker knows, and a scheduler needs to plan for it."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.layout import Layout
from protocol.snapshot import NO_SNAPSHOTS, SnapshotRoom


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The model that a worker serves.

    `fingerprint` is equal on two workers only if their weights and configuration are;
    `max_positions` bounds prompt + outputs; `max_loops` is the depth of a full pass;
    `exit_threshold` is the checkpoint's own default.
    """

    name: str
    fingerprint: str
    vocab_size: int
    max_positions: int
    max_loops: int
    eos_ids: tuple[int, ...]
    exit_threshold: float

    def __post_init__(self) -> None:
        if min(self.vocab_size, self.max_positions, self.max_loops) < 1:
            raise ValueError("model profile: sizes are at least 1")


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """One worker's device and room.

    `num_blocks` counts usable KV blocks over all planes, the scratch block already taken out;
    a request of T tokens needs planes * ceil(T / block_size). `max_step_tokens` bounds the rows
    of a decode step and the tokens of a prefill step. `snapshots` is the room for suspended
    requests. `max_ticks` is the most ticks of a ResidentBatch; 0 when the worker runs none.
    """

    model: ModelProfile
    device: str
    dtype: str
    num_slots: int
    num_blocks: int
    block_size: int
    planes: int
    max_step_tokens: int
    layout: Layout = Layout.LAST_EXITED
    snapshots: SnapshotRoom = NO_SNAPSHOTS
    max_ticks: int = 0

    def __post_init__(self) -> None:
        sizes = (self.num_slots, self.num_blocks, self.block_size, self.planes)
        if min(*sizes, self.max_step_tokens) < 1 or self.max_ticks < 0:
            raise ValueError("worker profile: sizes are at least 1")
        if self.planes != self.layout.planes(self.model.max_loops):
            raise ValueError(
                f"worker profile: {self.planes} planes for {self.model.max_loops} loops are not "
                f"the layout {self.layout.value}"
            )
