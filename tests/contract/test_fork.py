"""Forks: the choices of one request, prefilled once, the same for every executor."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import pytest

from protocol.config import CacheSettings, WorkerSettings
from protocol.identity import RequestKey
from protocol.plan import Admission, CodaBatch, Fork, Grant, Resume
from protocol.result import CodaResult, RecurrentResult, TokenLogprobs
from protocol.rng import RngKey
from tests.homes import HOMES, open_home
from tests.plans import PlanSender, block_table, coda, prefill, prelude, recurrent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.plan import BlockTable, Step
    from protocol.profile import WorkerProfile
    from protocol.result import PlanResult, StepResult

Said: TypeAlias = tuple[tuple[float, ...], tuple[TokenLogprobs | None, ...]]

A, B, C = (RequestKey("a", generation) for generation in (1, 2, 3))
PROMPT = (1648, 1424, 261, 658, 14, 900, 31, 7, 12)
DEPTHS = (2, 1, 3)
ROOM = 12
AREA = 12
"""Blocks of ROOM tokens, over all planes."""

SETTINGS = WorkerSettings(
    cache=CacheSettings(block_size=4, num_blocks=64), device="cpu", num_slots=3, num_threads=1
)


@pytest.fixture(scope="module", params=HOMES)
def shared(request: pytest.FixtureRequest) -> Iterator[PlanSender]:
    with open_home(request.param) as open_executor:
        yield PlanSender(open_executor(SETTINGS))


@pytest.fixture
def sender(shared: PlanSender) -> Iterator[PlanSender]:
    """The shared executor, cleared afterwards."""
    yield shared
    assert not shared.run(releases=(A, B, C)).failed


@pytest.fixture
def profile(sender: PlanSender) -> WorkerProfile:
    return sender.executor.profile()


def admission(profile: WorkerProfile, length: int, stream: int = 0, area: int = 0) -> Admission:
    """A request that samples, with everything that changes its logits, over its own blocks."""
    return Admission(
        A,
        PROMPT[:length],
        block_table(profile, ROOM, first=area * AREA),
        RngKey(7, stream),
        0.9,
        0.95,
        200,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias=((55, 3.0), (8, -2.0)),
        min_tokens=2,
        banned_ids=(0,),
        logprobs=2,
    )


def child_table(profile: WorkerProfile, shared: int, area: int, of: int = 0) -> BlockTable:
    """The table of another area, its first blocks those of area `of`."""
    theirs = block_table(profile, ROOM, first=of * AREA)
    own = block_table(profile, ROOM, first=area * AREA)
    return tuple(a[:shared] + b[shared:] for a, b in zip(theirs, own, strict=True))


def fork(profile: WorkerProfile, key: RequestKey, stream: int, shared: int, area: int) -> Fork:
    return Fork(key, A, child_table(profile, shared, area), RngKey(7, stream))


def course(key: RequestKey, length: int, full: int) -> list[Step]:
    """All steps of one choice after its prompt."""
    steps: list[Step] = [coda(key, length - 1, full, 0)]
    for output, depth in enumerate(DEPTHS):
        position = length + output
        steps.append(prelude(key, position))
        steps += [recurrent(key, position, loop) for loop in range(depth)]
        steps.append(coda(key, position, depth, output + 1))
    return steps


def clean(result: PlanResult) -> PlanResult:
    """The result, with nothing failed or lost in it."""
    assert (result.failed, result.lost) == ((), ())
    return result


def told(steps: list[StepResult]) -> list[Said]:
    """What a choice says, whoever it is: tokens, logprobs and survivals."""
    said: list[Said] = []
    for step in steps:
        match step:
            case CodaResult(_, _, tokens, logprobs):
                said.append((tokens, logprobs))
            case RecurrentResult(_, _, _, survivals):
                said.append((survivals, ()))
    return said


def start(sender: PlanSender, length: int) -> WorkerProfile:
    """The parent through its prompt, in two chunks."""
    profile = sender.executor.profile()
    clean(
        sender.run(
            prefill(A, 0, 3), prefill(A, 3, length - 3), admits=(admission(profile, length),)
        )
    )
    return profile


def alone(sender: PlanSender, length: int, stream: int) -> list[Said]:
    """What a request of its own with this stream says."""
    profile = sender.executor.profile()
    clean(
        sender.run(
            prefill(A, 0, 3),
            prefill(A, 3, length - 3),
            admits=(admission(profile, length, stream, area=3),),
        )
    )
    steps = course(A, length, profile.model.max_loops)
    answers = [clean(sender.run(step)).steps[0] for step in steps]
    sender.run(releases=(A,))
    return told(answers)


@pytest.mark.parametrize("length", [7, 8, 9])
@pytest.mark.parametrize("is_shared", [True, False])
def test_choices_say_what_requests_of_their_own_would(
    sender: PlanSender, length: int, is_shared: bool
) -> None:
    expected = {key: alone(sender, length, n) for n, key in enumerate((A, B, C))}
    profile = start(sender, length)
    shared = length // 4 if is_shared else 0
    clean(
        sender.run(forks=(fork(profile, B, 1, shared, area=1), fork(profile, C, 2, shared, area=2)))
    )
    left = {key: course(key, length, profile.model.max_loops) for key in (A, B, C)}
    answers: dict[RequestKey, list[StepResult]] = {A: [], B: [], C: []}
    while any(left.values()):
        for key in (A, B, C):
            answers[key] += clean(sender.run(left[key].pop(0))).steps
    assert {key: told(steps) for key, steps in answers.items()} == expected


def test_the_first_tokens_are_sampled_side_by_side_in_the_plan_of_the_forks(
    sender: PlanSender,
) -> None:
    firsts: list[float] = []
    for stream in range(3):
        tokens, _ = alone(sender, 6, stream)[0]
        firsts += tokens
    profile = start(sender, 6)
    full = profile.model.max_loops
    result = clean(
        sender.run(
            CodaBatch((A, B, C), (5,) * 3, (full,) * 3, (0,) * 3),
            forks=(fork(profile, B, 1, 1, area=1), fork(profile, C, 2, 1, area=2)),
        )
    )
    assert isinstance(result.steps[0], CodaResult)
    assert list(result.steps[0].tokens) == firsts


def test_a_choice_goes_on_when_its_parent_is_gone(sender: PlanSender) -> None:
    expected = alone(sender, 7, 1)
    profile = start(sender, 7)
    clean(sender.run(forks=(fork(profile, B, 1, 1, area=1),)))
    clean(sender.run(coda(A, 6, profile.model.max_loops, 0)))
    # The parent's own blocks go to another request; the shared ones stay as they are.
    own = tuple(plane[1:] for plane in block_table(profile, ROOM))
    guest = replace(admission(profile, 8), key=C, tables=own)
    clean(sender.run(prefill(C, 0, 8), releases=(A,), admits=(guest,)))
    steps = course(B, 7, profile.model.max_loops)
    assert told([clean(sender.run(step)).steps[0] for step in steps]) == expected


@pytest.mark.parametrize("moved", [A, B])
@pytest.mark.parametrize("cut", [0, 1, 4])
def test_parent_and_choice_are_suspended_and_resumed_like_any_request(
    sender: PlanSender, moved: RequestKey, cut: int
) -> None:
    expected = {key: alone(sender, 7, n) for n, key in enumerate((A, B))}
    profile = start(sender, 7)
    clean(sender.run(forks=(fork(profile, B, 1, 1, area=1),)))
    answers = {}
    for key in (A, B):
        steps = course(key, 7, profile.model.max_loops)
        before = [clean(sender.run(step)).steps[0] for step in steps[:cut]]
        if key == moved:
            (handle,) = clean(sender.run(suspends=(key,))).suspended
            assert handle.bytes == profile.snapshots.size(7, 7 + (cut > 1))
            resume = Resume(key, block_table(profile, ROOM, first=3 * AREA))
            clean(sender.run(resumes=(resume,)))
        after = [clean(sender.run(step)).steps[0] for step in steps[cut:]]
        answers[key] = told([*before, *after])
    assert answers == expected


def test_forks_come_behind_admits_and_before_grants(sender: PlanSender) -> None:
    expected = alone(sender, 7, 1)
    profile = start(sender, 7)
    whole = child_table(profile, 1, area=1)
    first = Fork(B, A, tuple(plane[:2] for plane in whole), RngKey(7, 1))
    more = Grant(B, tuple(plane[2:] for plane in whole))
    steps = course(B, 7, profile.model.max_loops)
    result = clean(sender.run(*steps, forks=(first,), grants=(more,)))
    assert told(list(result.steps)) == expected
    # All slots are taken, but one is released and one suspended in the same plan.
    clean(sender.run(admits=(replace(admission(profile, 7, 0, 2), key=C),)))
    late = fork(profile, B, 1, 1, area=3)
    clean(sender.run(releases=(B,), suspends=(C,), forks=(late,)))


def test_what_may_not_be_forked_fails_the_fork_alone(sender: PlanSender) -> None:
    profile = start(sender, 7)
    wide = child_table(profile, 1, area=1)
    partial = child_table(profile, 2, area=1)
    swapped = tuple(plane[::-1] for plane in child_table(profile, 1, area=1))
    wrong = {
        "has no slot": Fork(B, C, wide, RngKey(7, 1)),
        "2 planes, not 4": Fork(B, A, wide[:2], RngKey(7, 1)),
        "beyond the 64": Fork(B, A, tuple((99,) * 3 for _ in wide), RngKey(7, 1)),
        "room for 4 tokens, 7 are written": Fork(B, A, tuple(p[:1] for p in wide), RngKey(7, 1)),
        "beyond the first 1 of each plane": Fork(B, A, partial, RngKey(7, 1)),
        "beyond the first 0 of each plane": Fork(B, A, swapped, RngKey(7, 1)),
    }
    for message, item in wrong.items():
        (failed,) = sender.run(forks=(item,)).failed
        assert (failed.key, message in failed.message) == (B, True), failed.message
        (still,) = sender.run(forks=(fork(profile, B, 1, 1, area=1),)).failed
        assert still == failed
        sender.run(releases=(B,))
    # Nothing of all that took a slot or touched the parent.
    good = (fork(profile, B, 1, 1, area=1), fork(profile, C, 2, 1, area=2))
    clean(sender.run(coda(A, 6, profile.model.max_loops, 0), forks=good))


def test_a_parent_is_through_its_prompt_and_has_sampled_nothing(sender: PlanSender) -> None:
    profile = sender.executor.profile()
    item = fork(profile, B, 1, 1, area=1)
    clean(sender.run(prefill(A, 0, 6), admits=(admission(profile, 7),)))
    (early,) = sender.run(forks=(item,)).failed
    assert (early.key, "not through" in early.message) == (B, True)
    clean(sender.run(prefill(A, 6, 1), coda(A, 6, profile.model.max_loops, 0), releases=(B,)))
    (late,) = sender.run(forks=(item,)).failed
    assert (late.key, "has sampled already" in late.message) == (B, True)
    clean(sender.run(prelude(A, 7), releases=(B,)))
    (later,) = sender.run(forks=(item,)).failed
    assert "has sampled already" in later.message
    clean(sender.run(recurrent(A, 7, 0), releases=(B,)))


def test_a_failed_or_suspended_parent_is_no_parent(sender: PlanSender) -> None:
    profile = start(sender, 7)
    item = fork(profile, B, 1, 1, area=1)
    clean(sender.run(suspends=(A,)))
    (asleep,) = sender.run(forks=(item,)).failed
    assert (asleep.key, "has no slot" in asleep.message) == (B, True)
    resume = Resume(A, block_table(profile, ROOM))
    clean(sender.run(resumes=(resume,), releases=(B,)))
    assert [row.key for row in sender.run(recurrent(A, 5, 3)).failed] == [A]
    (orphan,) = sender.run(forks=(item,)).failed
    assert (orphan.key, "its parent a#1 has failed" in orphan.message) == (B, True)


def test_a_fork_takes_a_key_and_a_slot_of_its_own(sender: PlanSender) -> None:
    profile = start(sender, 7)
    item = fork(profile, B, 1, 1, area=1)
    clean(sender.run(forks=(item,)))
    (twice,) = sender.run(forks=(item,)).failed
    assert "admitted twice" in twice.message
    sender.run(releases=(B,))
    clean(sender.run(forks=(item,)))
    clean(sender.run(suspends=(B,)))
    (asleep,) = sender.run(forks=(item,)).failed
    assert "is suspended: it cannot be admitted again" in asleep.message
    sender.run(releases=(B,))
    clean(sender.run(forks=(item, fork(profile, C, 2, 1, area=2))))
    extra = RequestKey("a", 4)
    (full,) = sender.run(forks=(replace(item, key=extra),)).failed
    assert (full.key, "slots are taken" in full.message) == (extra, True)
    sender.run(releases=(extra,))
