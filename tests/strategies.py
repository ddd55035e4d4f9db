"""Hypothesis strategies for everything that crosses between scheduler and worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from protocol.exit_rule import round_to_float32
from protocol.identity import RequestKey
from protocol.layout import Layout
from protocol.lifecycle import Beat, Fault, Open, Opened, Phase, Synchronize, Synchronized
from protocol.plan import (
    NO_LOGPROBS,
    Admission,
    CodaBatch,
    ExecutionPlan,
    Fork,
    Grant,
    PrefillBatch,
    PreludeBatch,
    RecurrentBatch,
    Resume,
)
from protocol.profile import ModelProfile, WorkerProfile
from protocol.resident import MAX_ENDING_IDS, ResidentBatch, ResidentTerms, RowState
from protocol.result import (
    CodaResult,
    FailedRow,
    PlanResult,
    PrefillResult,
    PreludeResult,
    RecurrentResult,
    ResidentResult,
    TokenLogprobs,
)
from protocol.rng import MAX_SEED, RngKey
from protocol.sampling import MAX_LOGPROBS
from protocol.snapshot import LossReason, SnapshotHandle, SnapshotLoss, SnapshotRoom

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.lifecycle import Frame

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
counts = st.integers(1, 2**31 - 1)
numbers = st.integers(0, 2**31 - 1)
tokens = st.integers(-1, 2**31 - 1)
generations = st.integers(1, 2**63 - 1)
sizes = st.integers(0, 2**50)
sequence_numbers = st.integers(1, 2**63 - 1)
survivals = st.floats(0.0, 1.0).map(round_to_float32)
request_keys = st.builds(RequestKey, text.filter(bool), generations)


def rows(batch: Callable[..., object], *columns: st.SearchStrategy[Any]) -> st.SearchStrategy:
    """Batches of `batch` with distinct keys and one entry a row from each column."""
    row = st.tuples(request_keys, *columns)
    drawn = st.lists(row, max_size=6, unique_by=lambda entry: entry[0])
    empty: tuple[tuple[object, ...], ...] = ((),) * (len(columns) + 1)
    return drawn.map(lambda entries: batch(*(zip(*entries, strict=True) if entries else empty)))


@st.composite
def block_tables(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Block tables of one to four planes of equal length."""
    planes, width = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    plane = st.lists(numbers, min_size=width, max_size=width).map(tuple)
    return tuple(draw(plane) for _ in range(planes))


resident_terms = st.builds(
    lambda loops, bound, max_tokens, ending, forced: ResidentTerms(
        min(loops), max(loops), bound, max_tokens, ending, forced * max_tokens
    ),
    st.tuples(counts, counts),
    st.floats(-1.0, 1.0),
    st.integers(1, 5),
    st.lists(numbers, max_size=MAX_ENDING_IDS).map(tuple),
    st.lists(counts, max_size=1).map(tuple),
)
rng_keys = st.builds(RngKey, st.integers(0, MAX_SEED), st.integers(0, 2**32 - 1))
admissions = st.builds(
    Admission,
    key=request_keys,
    prompt=st.lists(numbers, min_size=1, max_size=9).map(tuple),
    tables=block_tables(),
    rng=rng_keys,
    temperature=st.floats(0.0, 10.0),
    top_p=st.floats(0.0, 1.0),
    top_k=st.integers(-1, 2**31),
    repetition_penalty=st.floats(0.1, 10.0),
    presence_penalty=st.floats(-2.0, 2.0),
    frequency_penalty=st.floats(-2.0, 2.0),
    logit_bias=st.lists(st.tuples(numbers, st.floats(-100.0, 100.0)), max_size=5).map(tuple),
    min_tokens=numbers,
    banned_ids=st.lists(numbers, max_size=4).map(tuple),
    logprobs=st.integers(NO_LOGPROBS, MAX_LOGPROBS),
    prefilled=numbers,
    resident=st.none() | resident_terms,
)
grants = st.builds(Grant, request_keys, block_tables())
family = st.lists(request_keys, min_size=2, max_size=2, unique=True)
forks = st.builds(
    lambda keys, tables, rng: Fork(keys[0], keys[1], tables, rng), family, block_tables(), rng_keys
)
steps = st.one_of(
    rows(PrefillBatch, numbers, counts),
    rows(PreludeBatch, numbers, tokens),
    rows(RecurrentBatch, numbers, numbers),
    rows(CodaBatch, numbers, counts, numbers),
    st.builds(
        ResidentBatch,
        st.lists(request_keys, max_size=4, unique=True).map(tuple),
        counts,
        st.booleans(),
    ),
)
plans = st.builds(
    ExecutionPlan,
    epoch=sequence_numbers,
    seq=sequence_numbers,
    releases=st.lists(request_keys, max_size=4).map(tuple),
    admits=st.lists(admissions, max_size=3).map(tuple),
    grants=st.lists(grants, max_size=3).map(tuple),
    steps=st.lists(steps, max_size=4).map(tuple),
    suspends=st.lists(request_keys, max_size=3).map(tuple),
    resumes=st.lists(st.builds(Resume, request_keys, block_tables()), max_size=3).map(tuple),
    forks=st.lists(forks, max_size=3).map(tuple),
)
handles = st.builds(
    SnapshotHandle,
    request_keys,
    sequence_numbers,
    sizes,
    counts,
    st.integers(0, 2**32 - 1),
)
losses = st.builds(SnapshotLoss, request_keys, st.sampled_from(LossReason), text)
logprob_values = st.floats(max_value=0.0, width=32, allow_nan=False)


@st.composite
def token_logprobs(draw: st.DrawFn) -> TokenLogprobs:
    """Log probabilities with up to MAX_LOGPROBS alternatives."""
    tops = draw(st.lists(st.tuples(numbers, logprob_values), max_size=MAX_LOGPROBS))
    ids, values = zip(*tops, strict=True) if tops else ((), ())
    return TokenLogprobs(draw(logprob_values), ids, values)


@st.composite
def resident_results(draw: st.DrawFn) -> ResidentResult:
    """Rows with some outputs each, with log probabilities or without, and some ticks."""
    keys = draw(st.lists(request_keys, max_size=4, unique=True))
    sizes = [draw(st.integers(0, 3)) for _ in keys]
    ticks = draw(st.integers(0, 4))
    told = st.lists(st.none() | token_logprobs(), min_size=sum(sizes), max_size=sum(sizes))
    return ResidentResult(
        keys=tuple(keys),
        tokens=tuple(tuple(draw(numbers) for _ in range(size)) for size in sizes),
        exit_depths=tuple(tuple(draw(counts) for _ in range(size)) for size in sizes),
        loops=tuple(draw(numbers) for _ in keys),
        states=tuple(draw(st.sampled_from(RowState)) for _ in keys),
        live=tuple(draw(numbers) for _ in range(ticks)),
        exits=tuple(draw(numbers) for _ in range(ticks)),
        finished=tuple(draw(numbers) for _ in range(ticks)),
        logprobs=tuple(draw(st.just([]) | told)),
    )


step_results = st.one_of(
    resident_results(),
    rows(PrefillResult, numbers),
    rows(PreludeResult, numbers),
    rows(RecurrentResult, numbers, numbers, survivals),
    rows(CodaResult, numbers, numbers),
    rows(CodaResult, numbers, numbers, st.one_of(st.none(), token_logprobs())),
)


@st.composite
def results(draw: st.DrawFn) -> PlanResult:
    """Results with a device time for each step."""
    done = draw(st.lists(step_results, max_size=4))
    return PlanResult(
        epoch=draw(sequence_numbers),
        seq=draw(sequence_numbers),
        steps=tuple(done),
        failed=tuple(draw(st.lists(st.builds(FailedRow, request_keys, text), max_size=3))),
        device_us=tuple(draw(numbers) for _ in done),
        suspended=tuple(draw(st.lists(handles, max_size=3))),
        lost=tuple(draw(st.lists(losses, max_size=3))),
    )


models = st.builds(
    ModelProfile,
    name=text,
    fingerprint=text,
    vocab_size=counts,
    max_positions=counts,
    max_loops=counts,
    eos_ids=st.lists(numbers, max_size=3).map(tuple),
    exit_threshold=st.floats(0.0, 1.0),
)


@st.composite
def profiles(draw: st.DrawFn) -> WorkerProfile:
    """Profiles whose planes are those of their layout."""
    model, layout = draw(models), draw(st.sampled_from(Layout))
    slots, blocks, block_size, tokens = (draw(counts) for _ in range(4))
    planes = layout.planes(model.max_loops)
    names, room = (draw(text), draw(text)), SnapshotRoom(*(draw(sizes) for _ in range(4)))
    sizes_of = (slots, blocks, block_size, planes, tokens)
    return WorkerProfile(model, *names, *sizes_of, layout, room, draw(numbers))


frames: st.SearchStrategy[Frame] = st.one_of(
    plans,
    results(),
    st.builds(Open, sequence_numbers),
    st.builds(Opened, sequence_numbers, profiles()),
    st.builds(Synchronize, sequence_numbers, sequence_numbers),
    st.builds(Synchronized, sequence_numbers, sequence_numbers),
    st.builds(Beat, sequence_numbers, numbers, numbers, st.sampled_from(Phase)),
    st.builds(Fault, sequence_numbers, text),
)
