"""Suspend and resume: the same for every executor, in every stage, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from protocol.config import CacheSettings, WorkerSettings
from protocol.identity import RequestKey
from protocol.plan import Resume
from protocol.result import CodaResult, PrefillResult
from protocol.snapshot import LossReason
from tests.courses import ROOM, Course
from tests.homes import HOMES, open_home
from tests.plans import PlanSender, admission, block_table, coda, prefill, prelude, recurrent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.plan import Step
    from protocol.profile import WorkerProfile
    from protocol.result import PlanResult, StepResult

A, B, C, D = (RequestKey(name, 3) for name in "abcd")
LONG = RequestKey("long", 1)
COURSES = (
    Course(A, (1648, 1424, 261, 658, 14), (2, 1, 4)),
    Course(B, (900, 31, 7), (3, 4)),
    Course(C, (12, 3000, 55, 8, 1911, 77), (1, 2)),
    Course(D, (2, 3), (4, 1, 1, 2)),
)
TOKEN_BYTES = 4 * 4 * 2 * 4 * 64 * 4  # planes, layers, K and V, heads, head size, float32
ADJUSTMENT_BYTES = 9 * 4096 + 12  # bias, output counts and marks of the vocabulary, penalties
SLACK = 2**14  # what else is in a record; less than a token
SETTINGS = WorkerSettings(
    cache=CacheSettings(block_size=4, num_blocks=64),
    device="cpu",
    num_slots=2,
    num_threads=1,
    snapshot_bytes=27 * TOKEN_BYTES + 3 * ADJUSTMENT_BYTES + SLACK,
)


@pytest.fixture(scope="module", params=HOMES)
def shared(request: pytest.FixtureRequest) -> Iterator[PlanSender]:
    """One executor of each home, with two slots and room for three suspended courses."""
    with open_home(request.param) as open_executor:
        yield PlanSender(open_executor(SETTINGS))


@pytest.fixture
def sender(shared: PlanSender) -> Iterator[PlanSender]:
    """The shared executor, cleared afterwards."""
    yield shared
    assert not shared.run(releases=(A, B, C, D, LONG)).failed


@pytest.fixture
def profile(sender: PlanSender) -> WorkerProfile:
    return sender.executor.profile()


def clean(result: PlanResult) -> PlanResult:
    """The result, with nothing failed or lost in it."""
    assert (result.failed, result.lost) == ((), ())
    return result


def undisturbed(sender: PlanSender, course: Course) -> list[StepResult]:
    """What each step of a course gives when it is left alone."""
    profile = sender.executor.profile()
    clean(sender.run(admits=(course.admit(profile, 0),)))
    answers = [clean(sender.run(step)).steps[0] for step in course.steps(profile)]
    sender.run(releases=(course.key,))
    return answers


def start(sender: PlanSender, course: Course, area: int = 0, steps: int = 3) -> None:
    """Admit a course and run its first steps."""
    profile = sender.executor.profile()
    clean(sender.run(*course.steps(profile)[:steps], admits=(course.admit(profile, area),)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_request_goes_on_elsewhere_whenever_it_was_suspended(
    sender: PlanSender, profile: WorkerProfile, temperature: float
) -> None:
    course = Course(A, COURSES[0].prompt, COURSES[0].depths, temperature)
    expected, steps = undisturbed(sender, course), course.steps(profile)
    for cut in range(len(steps)):
        clean(sender.run(admits=(course.admit(profile, 0),)))
        before = [clean(sender.run(step)).steps[0] for step in steps[:cut]]
        (handle,) = clean(sender.run(suspends=(A,))).suspended
        assert handle.key == A
        # The next one takes its slot and writes over its blocks.
        start(sender, Course(B, (7,) * 11, ()))
        first = clean(sender.run(steps[cut], resumes=(course.resume(profile, 1),)))
        after = [clean(sender.run(step)).steps[0] for step in steps[cut + 1 :]]
        assert [*before, *first.steps, *after] == expected
        sender.run(releases=(A, B))


def test_a_suspend_after_every_plan_changes_nothing(
    sender: PlanSender, profile: WorkerProfile
) -> None:
    course = COURSES[0]
    steps, alone = course.steps(profile), []
    for cut in range(len(steps)):
        start(sender, course, steps=cut + 1)
        (handle,) = clean(sender.run(suspends=(A,))).suspended
        alone.append((handle.bytes, handle.checksum))
        sender.run(releases=(A,))
    expected = undisturbed(sender, course)
    clean(sender.run(admits=(course.admit(profile, 0),)))
    answers, moved = [], []
    for turn, step in enumerate(steps):
        answers.append(clean(sender.run(step)).steps[0])
        (handle,) = clean(sender.run(suspends=(A,))).suspended
        moved.append((handle.bytes, handle.checksum))
        start(sender, Course(B, (turn + 1,) * 11, ()), area=turn % 2)
        sender.run(resumes=(course.resume(profile, 1 - turn % 2),), releases=(B,))
    assert answers == expected
    # The checksum covers KV, hidden state, token, survival and progress.
    assert moved == alone


def test_four_requests_on_two_slots_embed_their_own_tokens(
    sender: PlanSender, profile: WorkerProfile
) -> None:
    expected = {course.key: undisturbed(sender, course) for course in COURSES}
    outputs = {
        key: [answer.tokens[0] for answer in answers if isinstance(answer, CodaResult)]
        for key, answers in expected.items()
    }
    assert len({tuple(tokens[:2]) for tokens in outputs.values()}) == len(COURSES)
    left = {course.key: list(course.steps(profile)) for course in COURSES}
    answers: dict[RequestKey, list[StepResult]] = {course.key: [] for course in COURSES}
    seated: list[tuple[RequestKey, int]] = []
    turn = 0
    while any(left.values()):
        for course in COURSES:
            key = course.key
            if not left[key]:
                continue
            if all(seat[0] != key for seat in seated):
                leaving = seated.pop(0)[0] if len(seated) == SETTINGS.num_slots else None
                area = next(a for a in _from(turn) if all(seat[1] != a for seat in seated))
                turn += 1
                seated.append((key, area))
                clean(
                    sender.run(
                        suspends=(leaving,) if leaving is not None else (),
                        resumes=(course.resume(profile, area),) if answers[key] else (),
                        admits=() if answers[key] else (course.admit(profile, area),),
                    )
                )
            answers[key] += clean(sender.run(left[key].pop(0))).steps
    assert answers == expected


def _from(turn: int) -> list[int]:
    """The areas, another one first each turn, so that every course moves about."""
    return [(turn + offset) % 5 for offset in range(5)]


def test_a_handle_says_what_the_snapshot_takes(sender: PlanSender, profile: WorkerProfile) -> None:
    assert profile.snapshots.limit == SETTINGS.snapshot_bytes
    assert profile.snapshots.token_bytes == TOKEN_BYTES
    for steps, written in [(0, 0), (1, 2), (2, 5), (3, 5), (4, 5), (5, 6)]:
        start(sender, COURSES[0], steps=steps)
        (handle,) = clean(sender.run(suspends=(A,))).suspended
        assert handle.bytes == profile.snapshots.size(5, written)
        assert (handle.epoch, handle.planes) == (sender.executor.epoch, profile.planes)
        sender.run(releases=(A,))


def test_two_are_suspended_at_once_and_come_back_crosswise(
    sender: PlanSender, profile: WorkerProfile
) -> None:
    first, second = COURSES[:2]
    expected = undisturbed(sender, first)[3], undisturbed(sender, second)[3]
    start(sender, first, area=0)
    start(sender, second, area=1)
    suspended = clean(sender.run(suspends=(A, B))).suspended
    assert [handle.key for handle in suspended] == [A, B]
    assert suspended[0].checksum != suspended[1].checksum
    back = clean(
        sender.run(
            first.steps(profile)[3],
            second.steps(profile)[3],
            resumes=(second.resume(profile, 0), first.resume(profile, 1)),
        )
    )
    assert back.steps == expected


def test_a_plan_releases_then_suspends_then_resumes_then_admits_then_runs(
    sender: PlanSender, profile: WorkerProfile
) -> None:
    a, b, c, d = COURSES
    start(sender, c, area=2)
    clean(sender.run(suspends=(C,)))
    start(sender, a, area=0)
    start(sender, b, area=1)
    both_slots_change = clean(
        sender.run(
            c.steps(profile)[3],
            d.steps(profile)[0],
            releases=(A,),
            suspends=(B,),
            resumes=(c.resume(profile, 3),),
            admits=(d.admit(profile, 4),),
        )
    )
    assert [handle.key for handle in both_slots_change.suspended] == [B]
    assert [step.keys for step in both_slots_change.steps] == [(C,), (D,)]


def test_one_plan_moves_a_request_to_other_blocks(
    sender: PlanSender, profile: WorkerProfile
) -> None:
    course = COURSES[0]
    expected = undisturbed(sender, course)
    start(sender, course, area=0, steps=5)
    moved = clean(
        sender.run(course.steps(profile)[5], suspends=(A,), resumes=(course.resume(profile, 1),))
    )
    start(sender, Course(B, (7,) * 11, ()), area=0)
    rest = [clean(sender.run(step)).steps[0] for step in course.steps(profile)[6:]]
    assert [*moved.steps, *rest] == expected[5:]


def test_suspending_an_unknown_or_a_failed_request_fails_it(
    sender: PlanSender, profile: WorkerProfile
) -> None:
    unknown = sender.run(suspends=(B,))
    assert [row.key for row in unknown.failed] == [B]
    assert (unknown.suspended, unknown.lost) == ((), ())
    start(sender, COURSES[0])
    assert [row.key for row in sender.run(recurrent(A, 5, 3)).failed] == [A]
    failed = sender.run(suspends=(A,))
    assert [row.key for row in failed.failed] == [A]
    assert failed.suspended == ()
    # It still has its slot: with one more request both are taken, until it is released.
    start(sender, COURSES[2], area=1, steps=1)
    assert [row.key for row in sender.run(admits=(COURSES[3].admit(profile, 2),)).failed] == [D]
    clean(sender.run(admits=(COURSES[3].admit(profile, 2),), releases=(A, D)))


def test_suspending_twice_fails_the_request_until_it_is_released(
    sender: PlanSender, profile: WorkerProfile
) -> None:
    start(sender, COURSES[0])
    twice = sender.run(suspends=(A, A))
    assert [handle.key for handle in twice.suspended] == [A]
    assert [row.key for row in twice.failed] == [A]
    back = sender.run(resumes=(COURSES[0].resume(profile, 1),))
    assert ([row.key for row in back.failed], back.lost) == ([A], ())


@pytest.mark.parametrize("step", [prelude(A, 5), coda(A, 4, 4, 0), prefill(A, 0, 2)], ids=repr)
def test_a_row_of_a_suspended_request_fails_it(sender: PlanSender, step: Step) -> None:
    start(sender, COURSES[0])
    clean(sender.run(suspends=(A,)))
    refused = sender.run(step)
    assert [row.key for row in refused.failed] == [A]
    assert refused.steps[0].keys == ()


def test_a_suspended_request_is_not_admitted_again(
    sender: PlanSender, profile: WorkerProfile
) -> None:
    start(sender, COURSES[0])
    clean(sender.run(suspends=(A,)))
    assert [row.key for row in sender.run(admits=(COURSES[0].admit(profile, 1),)).failed] == [A]
    start(sender, COURSES[1], area=0, steps=1)
    start(sender, COURSES[2], area=1, steps=1)


def test_resuming_twice_fails_the_request(sender: PlanSender, profile: WorkerProfile) -> None:
    start(sender, COURSES[0])
    clean(sender.run(suspends=(A,)))
    clean(sender.run(resumes=(COURSES[0].resume(profile, 1),)))
    again = sender.run(resumes=(COURSES[0].resume(profile, 2),))
    assert ([row.key for row in again.failed], again.lost) == ([A], ())


def test_resuming_what_was_never_suspended_is_a_loss(
    sender: PlanSender, profile: WorkerProfile
) -> None:
    answer = sender.run(prelude(A, 5), resumes=(COURSES[0].resume(profile, 0),))
    assert [(loss.key, loss.reason) for loss in answer.lost] == [(A, LossReason.MISSING)]
    assert answer.lost[0].message
    assert [(row.key, row.message) for row in answer.failed] == [(A, answer.lost[0].message)]
    again = sender.run(resumes=(COURSES[0].resume(profile, 0),))
    assert ([row.key for row in again.failed], again.lost) == ([A], ())


@pytest.mark.parametrize("width", [0, 1])
def test_too_few_blocks_fail_the_request_and_take_no_slot(
    sender: PlanSender, profile: WorkerProfile, width: int
) -> None:
    start(sender, COURSES[0])
    clean(sender.run(suspends=(A,)))
    narrow = tuple(plane[:width] for plane in block_table(profile, ROOM))
    short = sender.run(resumes=(Resume(A, narrow),))
    assert ([row.key for row in short.failed], short.lost) == ([A], ())
    assert "5 are written" in short.failed[0].message
    start(sender, COURSES[1], area=0, steps=1)
    start(sender, COURSES[2], area=1, steps=1)


def test_as_many_blocks_as_are_written_are_enough(
    sender: PlanSender, profile: WorkerProfile
) -> None:
    course = COURSES[0]
    expected = undisturbed(sender, course)
    start(sender, course)
    clean(sender.run(suspends=(A,)))
    narrow = block_table(profile, len(course.prompt), first=24)
    back = clean(sender.run(*course.steps(profile)[3:5], resumes=(Resume(A, narrow),)))
    assert list(back.steps) == expected[3:5]


def test_no_free_slot_fails_the_resume_alone(sender: PlanSender, profile: WorkerProfile) -> None:
    start(sender, COURSES[0])
    clean(sender.run(suspends=(A,)))
    start(sender, COURSES[1], area=0)
    start(sender, COURSES[2], area=1)
    full = sender.run(
        COURSES[1].steps(profile)[3],
        COURSES[2].steps(profile)[3],
        resumes=(COURSES[0].resume(profile, 2),),
    )
    assert ([row.key for row in full.failed], full.lost) == ([A], ())
    assert [step.keys for step in full.steps] == [(B,), (C,)]


def test_a_release_drops_the_snapshot(sender: PlanSender, profile: WorkerProfile) -> None:
    start(sender, COURSES[0])
    clean(sender.run(suspends=(A,)))
    gone = sender.run(releases=(A,), resumes=(COURSES[0].resume(profile, 1),))
    assert [loss.reason for loss in gone.lost] == [LossReason.MISSING]
    sender.run(releases=(A,))
    start(sender, COURSES[0])


def test_a_snapshot_beyond_the_bound_is_a_loss_of_that_request(
    sender: PlanSender, profile: WorkerProfile
) -> None:
    table = block_table(profile, 32, first=12)
    start(sender, COURSES[1])
    clean(sender.run(prefill(LONG, 0, 30), admits=(admission(LONG, (5,) * 30, table),)))
    over = sender.run(COURSES[1].steps(profile)[3], suspends=(LONG,))
    assert [(loss.key, loss.reason) for loss in over.lost] == [(LONG, LossReason.OVER_BOUND)]
    assert (over.suspended, over.failed) == ((), ())
    assert "worker.snapshot_bytes" in over.lost[0].message
    assert over.steps[0].keys == (B,)
    # Its slot is free, and it is failed until it is released.
    start(sender, COURSES[2], area=2, steps=1)
    failed = sender.run(coda(LONG, 29, 4, 0)).failed
    assert [(row.key, row.message) for row in failed] == [(LONG, over.lost[0].message)]
    sender.run(releases=(LONG, C))
    fresh = sender.run(prefill(LONG, 0, 30), admits=(admission(LONG, (5,) * 30, table),))
    assert clean(fresh).steps == (PrefillResult((LONG,), (30,)),)


def test_the_bound_counts_all_that_is_suspended_and_gets_it_back(
    sender: PlanSender, profile: WorkerProfile
) -> None:
    table = block_table(profile, 16, first=12)
    long = admission(LONG, (5,) * 14, table)
    for ending in range(6):
        clean(sender.run(prefill(LONG, 0, 14), admits=(long,)))
        clean(sender.run(suspends=(LONG,)))
        if ending % 2:
            clean(sender.run(resumes=(Resume(LONG, table),)))
        sender.run(releases=(LONG,))
    clean(sender.run(prefill(LONG, 0, 14), admits=(long,)))
    start(sender, Course(A, (3,) * 11, ()), area=0)
    clean(sender.run(suspends=(LONG, A)))
    start(sender, COURSES[3], area=4)
    (fits,) = clean(sender.run(suspends=(D,))).suspended
    assert fits.bytes == profile.snapshots.size(2, 2)
    start(sender, COURSES[1], area=4)
    over = sender.run(suspends=(B,))
    assert [loss.reason for loss in over.lost] == [LossReason.OVER_BOUND]
