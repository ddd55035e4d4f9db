"""Every metric by name: what it is, its labels, its buckets. Knows no Ray.

Names follow vLLM's, with our prefix. Ray puts "ray_" before and, for a counter, "_total" behind.
`docs/metrics.md` has the same table for operators, and a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Prometheus's kinds."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `labels` come on top of `model_name`, which all have, and take few values.

    `buckets` are the upper bounds of a histogram, in the unit of its name.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exported(self) -> str:
        """Its name in Prometheus, without the suffixes of a histogram's series.

        Example: counter loopmesh_loops -> ray_loopmesh_loops_total.
        """
        return f"ray_{self.name}" + ("_total" if self.kind is Kind.COUNTER else "")

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series in Prometheus: three for a histogram, else one."""
        if self.kind is not Kind.HISTOGRAM:
            return (self.exported,)
        return tuple(f"{self.exported}_{suffix}" for suffix in ("bucket", "count", "sum"))


MODEL_LABEL = "model_name"

_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)


def _gauge(name: str, text: str) -> Metric:
    return Metric(f"loopmesh_{name}", Kind.GAUGE, text)


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"loopmesh_{name}", Kind.COUNTER, text, labels)


def _seconds(name: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(f"loopmesh_{name}_seconds", Kind.HISTOGRAM, text, (), buckets)


# What an engine reports.
REQUESTS_RUNNING = _gauge("num_requests_running", "Choices on a worker that may give outputs.")
REQUESTS_WAITING = _gauge("num_requests_waiting", "Choices in the queue, suspended ones included.")
REQUESTS_SUSPENDED = _gauge("num_requests_suspended", "Choices suspended into host memory.")
KV_USAGE = _gauge(
    "kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1; idle cached blocks are free."
)
LANES = _gauge("num_lanes", "Workers that the engine can use.")
LANES_WANTED = _gauge("num_lanes_wanted", "Workers that the engine was started with.")
LOOP_DEBT = _gauge("loop_debt", "Loops that the running requests are expected to need still.")
LOOP_DEBT_SECONDS = _gauge("loop_debt_seconds", "The loop debt over the loops a second of late.")
LOOPS_PER_SECOND = _gauge("loops_per_second", "Loops of delivered tokens a second, while busy.")
MEAN_EXIT_DEPTH = _gauge("mean_exit_depth", "Mean exit depth of the tokens delivered of late.")
GENERATION_TOKENS = _counter("generation_tokens", "Tokens delivered.")
LOOPS = _counter("loops", "Loops of delivered tokens: the sum of their exit depths.")
LOOPS_SAVED = _counter("loops_saved", "Loops that delivered tokens stayed below a full pass.")
FINISHED = _counter("request_success", "Choices that ended, by reason.", "finished_reason")
PREEMPTIONS = _counter(
    "num_preemptions", "Requests suspended for want of blocks or for a higher priority.", "reason"
)
PREFIX_QUERIES = _counter("prefix_cache_queries", "Placements that asked for a cached prefix.")
PREFIX_HIT_TOKENS = _counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.")

# What an ingress reports.
PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of the requests that gave an output.")
REJECTIONS = _counter("admission_rejections", "Requests that the engine did not take.", "reason")
RESPONSES = _counter("http_requests", "HTTP answers begun.", "route", "code")
FIRST_TOKEN = _seconds(
    "time_to_first_token", "From the request's arrival at the engine client to a token.", _FIRST
)
BETWEEN_OUTPUTS = _seconds(
    "inter_token_latency",
    "Between two outputs of a choice, which may bring several tokens.",
    _BETWEEN,
)
PER_TOKEN = _seconds(
    "request_time_per_output_token", "A choice's mean time a token, after its first.", _BETWEEN
)
WHOLE = _seconds("e2e_request_latency", "From arrival to the last token of all choices.", _WHOLE)

ENGINE_METRICS = (
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    REQUESTS_SUSPENDED,
    KV_USAGE,
    LANES,
    LANES_WANTED,
    LOOP_DEBT,
    LOOP_DEBT_SECONDS,
    LOOPS_PER_SECOND,
    MEAN_EXIT_DEPTH,
    GENERATION_TOKENS,
    LOOPS,
    LOOPS_SAVED,
    FINISHED,
    PREEMPTIONS,
    PREFIX_QUERIES,
    PREFIX_HIT_TOKENS,
)
INGRESS_METRICS = (
    PROMPT_TOKENS,
    REJECTIONS,
    RESPONSES,
    FIRST_TOKEN,
    BETWEEN_OUTPUTS,
    PER_TOKEN,
    WHOLE,
)
