"""Every setting of Loopmesh, in one place: frozen, checked, unknown keys refused."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protocol.errors import ConfigError
from protocol.executor import MAX_PLANS_IN_FLIGHT
from protocol.layout import Layout

Count = Annotated[int, Field(strict=True, ge=1)]
Seconds = Annotated[float, Field(strict=True, gt=0.0, allow_inf_nan=False)]
Delay = Annotated[float, Field(strict=True, ge=0.0, allow_inf_nan=False)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]

ExitPolicyName: TypeAlias = Literal["ouro", "ouro_delayed"]
AttentionName: TypeAlias = Literal["auto", "torch", "triton", "numba"]
PlacementName: TypeAlias = Literal["loop_debt", "least_requests", "round_robin"]

DEFAULT_MODEL = "ouro-tiny"
"""The model shipped inside the package."""


class Settings(BaseModel):
    """Base of every settings class."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(Settings):
    """Which model, and in which precision.

    `model` is "ouro-tiny" (shipped), a directory, or a Hugging Face hub id.
    """

    model: Annotated[str, Field(min_length=1)] = DEFAULT_MODEL
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"


class CacheSettings(Settings):
    """KV storage of one worker. At most one of `num_blocks` and `kv_bytes` is set.

    `layout` "shared" keeps one plane for all depths; see protocol/layout.py for what that means.

    With neither, a CPU worker takes 256 MiB. A CUDA worker takes `gpu_memory_utilization` of the
    memory that is free once the model is loaded, less what it has still to allocate: slots, ticks,
    its largest step, which is run to see, and `graph_reserve_bytes` for captured graphs, kernels
    and library workspaces.
    """

    block_size: Count = 16
    num_blocks: Count | None = None
    kv_bytes: Count | None = None
    layout: Layout = Layout.LAST_EXITED
    gpu_memory_utilization: Annotated[float, Field(strict=True, gt=0.0, le=1.0)] = 0.9
    graph_reserve_bytes: Annotated[int, Field(strict=True, ge=0)] = 640 * 2**20

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_blocks is not None and self.kv_bytes is not None:
            raise ValueError("set num_blocks or kv_bytes, not both")
        return self


STEP_TOKENS = {"cpu": 256, "cuda": 2048}
"""Tokens of the largest step, by the device: how many it takes until more make a prompt no faster,
and few enough that rows which decode do not wait for long."""


class WorkerSettings(Settings):
    """One worker: its device, its slots and its largest step.

    `device` "auto" is cuda where there is one, else cpu. `max_step_tokens` bounds the prompt tokens
    of a step, and its rows; None takes what suits the device. `num_threads` bounds the CPU threads
    of one worker; None leaves torch's choice. `snapshot_bytes` bounds the host memory that
    suspended requests take; 0 keeps none of them. `max_ticks` is the most loops that it runs by
    itself in one plan; with 0 the scheduler plans each.

    `attention` "auto" takes the best backend that the device and the model allow; another choice
    is taken or refused. `cuda_graphs` captures the loop of decoding rows when the worker starts,
    where the attention can be captured. `streams` is what a GPU runs single steps on: one stream,
    or three, so that loops, what lies between two tokens and copies run side by side.
    """

    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    num_slots: Count = 32
    max_step_tokens: Count | None = None
    num_threads: Count | None = None
    snapshot_bytes: Annotated[int, Field(strict=True, ge=0)] = 256 * 2**20
    attention: AttentionName = "auto"
    cuda_graphs: Annotated[bool, Field(strict=True)] = True
    max_ticks: Annotated[int, Field(strict=True, ge=0)] = 256
    streams: Literal[1, 3] = 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_step_tokens is not None and self.max_step_tokens < self.num_slots:
            raise ValueError(
                f"max_step_tokens {self.max_step_tokens} is below num_slots {self.num_slots}: "
                "every slot may have a row in one decode step"
            )
        return self

    def step_tokens(self, device_type: str) -> int:
        """`max_step_tokens`, or what suits a kind of device: "cpu" or "cuda"."""
        return self.max_step_tokens or max(STEP_TOKENS[device_type], self.num_slots)


class SchedulerSettings(Settings):
    """How requests are batched.

    `prefill_chunk_size` bounds one request's prompt tokens in a plan, `max_prefill_tokens` those
    of all requests, so that decoding rows never wait for a whole prompt; None takes half of the
    worker's largest step, and all of it. `max_waiting` bounds the queue; beyond it a request is
    turned away. One of several choices counts once.

    `policy` orders the queue: by arrival, or by `SamplingParams.priority`, lower sooner.
    `admission_scan_limit` bounds how many waiting requests are looked at for a plan, and
    `max_admission_bypasses` how often others may pass one that does not fit yet (0: never).
    `kv_watermark` is the share of a lane's blocks that an admission leaves free unless the lane is
    idle. `max_running` bounds the requests on a lane; None takes as many as it has slots.
    `reservation` "full" takes all blocks of a request when it is placed, "incremental" each when a
    plan first needs it; either way a placed request is sure to get them. "overcommit" promises a
    request no more than its prompt's blocks, as far as the worker could keep a snapshot of it: when
    blocks run out, the last ones by the queue's order are suspended, each at most once, and go on
    later with all their blocks promised.

    `mode` "refill" samples a token that has left the loops with the next plan, and its successor
    joins those still looping; "no_refill" lets it wait until the loops of all others are done too.
    `min_coda_batch` lets such tokens wait for each other, unless nobody is looping.
    `max_step_tokens` bounds the prompt tokens of a plan and the rows that it decodes loop by loop
    together; None takes the worker's largest step.

    `exit_policy` "ouro" lets a token leave after the loop whose gate reaches its threshold,
    "ouro_delayed" one loop later. `placement` chooses among the lanes with room: the one that owes
    the fewest loops, the one with the fewest requests, or each in turn.

    `prefix_caching` keeps the KV of prompts, so that a later prompt of the same tenant that starts
    alike starts further on. `affinity_window` is how many loops of debt a worker may carry above
    the least loaded one and still be preferred for what it has cached, whatever the placement.

    `resident` lets workers that can decide exits and ends themselves, up to `max_ticks` loops a
    plan, or as many as take `tick_interval` seconds: outputs come with their plan. While prompts of
    the lane are in work there are as few as keep that interval, and no more of the prompts than
    that a pass of them keeps it. Requests that need the scheduler for every loop (delayed exits,
    tokens that wait for others, many stop tokens) do without.

    `plans_in_flight` is how many plans a worker may have at once; None is two for a GPU, on which
    one is enqueued while the other runs, else one. A second one is only made while every token
    knows what is next without the answer to the first: on its worker, with "ouro_delayed", forced
    depths, no early exit, or in the prompt.

    `preemption` lets the first of the queue take the room of running requests of lower priority,
    which are suspended and go on later; it needs policy "priority".
    """

    prefill_chunk_size: Count | None = None
    max_prefill_tokens: Count | None = None
    max_waiting: Count = 1024
    policy: Literal["fcfs", "priority"] = "fcfs"
    admission_scan_limit: Count = 64
    max_admission_bypasses: Annotated[int, Field(strict=True, ge=0)] = 8
    kv_watermark: Annotated[float, Field(strict=True, ge=0.0, lt=1.0)] = 0.0
    max_running: Count | None = None
    reservation: Literal["full", "incremental", "overcommit"] = "full"
    mode: Literal["refill", "no_refill"] = "refill"
    min_coda_batch: Count = 1
    max_step_tokens: Count | None = None
    exit_policy: ExitPolicyName = "ouro"
    placement: PlacementName = "loop_debt"
    prefix_caching: Annotated[bool, Field(strict=True)] = True
    affinity_window: Annotated[int, Field(strict=True, ge=0)] = 256
    preemption: Annotated[bool, Field(strict=True)] = False
    plans_in_flight: Annotated[int, Field(strict=True, ge=1, le=MAX_PLANS_IN_FLIGHT)] | None = None
    resident: Annotated[bool, Field(strict=True)] = True
    max_ticks: Count = 16
    tick_interval: Seconds = 0.05

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.preemption and self.policy != "priority":
            raise ValueError('preemption goes by priority: set policy "priority" as well')
        return self


class ClusterSettings(Settings):
    """Workers on Ray, and how long anything may take.

    `num_cpus` and `num_gpus` are what one worker asks of Ray. The worker listens on a free port
    of `plan_port_range` (first, last). An engine updates its metrics every `metrics_interval`.
    `grows` says that a cluster autoscaler adds nodes: a worker that no node can hold then waits
    `place_timeout` for one, else it fails at once. An engine that is to end takes no more requests
    and waits `drain_timeout` for those it has.
    """

    num_workers: Count = 1
    num_cpus: Annotated[float, Field(strict=True, ge=0.0, allow_inf_nan=False)] = 1.0
    num_gpus: Annotated[float, Field(strict=True, ge=0.0, allow_inf_nan=False)] = 0.0
    plan_port_range: tuple[Port, Port] = (20000, 29999)
    grows: Annotated[bool, Field(strict=True)] = False
    place_timeout: Seconds = 30.0
    start_timeout: Seconds = 180.0
    plan_timeout: Seconds = 120.0
    silence_timeout: Seconds = 15.0
    beat_interval: Seconds = 0.25
    shutdown_timeout: Seconds = 10.0
    metrics_interval: Seconds = 5.0
    drain_timeout: Seconds = 300.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        first, last = self.plan_port_range
        if first > last:
            raise ValueError(
                f"plan_port_range ({first}, {last}) is empty: give the lower port first"
            )
        if self.silence_timeout < 4 * self.beat_interval:
            raise ValueError(
                f"silence_timeout {self.silence_timeout:g} is below four beat_intervals of "
                f"{self.beat_interval:g}: raise it or beat more often"
            )
        return self


class ApiSettings(Settings):
    """Limits of the HTTP endpoint.

    `consumer_lease` is how long a request outlives the last sign of its ingress.
    """

    served_model_name: str | None = None
    max_requests: Count = 256
    max_body_bytes: Count = 2**20
    request_timeout: Seconds = 300.0
    consumer_lease: Seconds = 10.0


class BatchSettings(Settings):
    """Batch jobs: `loopmesh batch`.

    A line of more than `max_line_bytes` is an error line. Results are kept in parts of `part_lines`
    input lines each until all are there. `requests_per_slot` requests are in work for each slot of
    the workers, so that none waits for the next. A line whose worker is lost is run again up to
    `max_retries` times. Progress is told every `progress_interval`; where files cannot grow, as in
    object stores, results are written every `flush_interval`.
    """

    max_line_bytes: Count = 2**20
    part_lines: Count = 1000
    requests_per_slot: Count = 2
    max_retries: Annotated[int, Field(strict=True, ge=0)] = 3
    progress_interval: Seconds = 10.0
    flush_interval: Seconds = 10.0


class AutoscalingSettings(Settings):
    """How many engines and ingress replicas Ray Serve keeps.

    Without `enabled` there are `min_engines` and `min_ingresses`, whatever the load. With it,
    engines follow their loop debt: there are as many as it takes to have at most `target_debt`
    seconds of work for each, and one leaves only when the others would have `slack` of that to
    spare. More are started once that has been so for `up_delay` seconds, fewer kept after
    `down_delay`. Engines report every `report_interval`; a report older than `stale_after` says
    nothing, and while one is missing no engine leaves. Ingress replicas follow their open requests,
    `target_requests` each, with the same delays.
    """

    enabled: Annotated[bool, Field(strict=True)] = False
    min_engines: Count = 1
    max_engines: Count = 4
    target_debt: Seconds = 10.0
    slack: Annotated[float, Field(strict=True, ge=0.0, lt=1.0)] = 0.3
    up_delay: Delay = 10.0
    down_delay: Delay = 120.0
    report_interval: Seconds = 2.0
    stale_after: Seconds = 20.0
    min_ingresses: Count = 1
    max_ingresses: Count = 2
    target_requests: Count = 64

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("engines", "ingresses"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if self.enabled and least > most:
                raise ValueError(f"min_{name} {least} is above max_{name} {most}: raise the latter")
        if self.stale_after < 3 * self.report_interval:
            raise ValueError(
                f"stale_after {self.stale_after:g} is below three report_intervals of "
                f"{self.report_interval:g}: a report that is one late would count as missing"
            )
        return self


class Configuration(Settings):
    """All settings of the engines of one application and its endpoint."""

    worker: WorkerSettings = WorkerSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    cluster: ClusterSettings = ClusterSettings()
    api: ApiSettings = ApiSettings()
    batch: BatchSettings = BatchSettings()
    autoscaling: AutoscalingSettings = AutoscalingSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        scaling = self.autoscaling
        if scaling.enabled and scaling.target_requests >= self.api.max_requests:
            raise ValueError(
                f"autoscaling.target_requests {scaling.target_requests} is not below "
                f"api.max_requests {self.api.max_requests}: an ingress would turn requests away "
                "before there is another"
            )
        return self

    @property
    def model_name(self) -> str:
        """The name that clients, and metrics, have for the model."""
        return self.api.served_model_name or self.worker.model.model


def parse_configuration(values: object) -> Configuration:
    """The Configuration in `values` (a mapping, as from JSON).

    Raises ConfigError that names each wrong key and what it should be.
    """
    try:
        return Configuration.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in item['loc']) or 'configuration'}: {item['msg']}"
            for item in error.errors()
        ]
        raise ConfigError("configuration: " + "; ".join(lines)) from error
