"""The plan stream over real gRPC on this machine: who may speak, what is said, how it ends."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import grpc
import pytest

from cluster.plan_stream import AUTHORIZATION, CHANNEL_OPTIONS, METHOD, SERVICE, credentials
from cluster.ray_executor import RayExecutor
from cluster.worker_actor import WorkerActor
from protocol.codec import decode, encode
from protocol.config import CacheSettings, ClusterSettings, WorkerSettings
from protocol.errors import ConfigError, DeadlineError, ExecutorClosedError, WorkerLostError
from protocol.executor import MAX_PLANS_IN_FLIGHT
from protocol.identity import RequestKey
from protocol.lifecycle import Beat, Fault, Open, Opened, Synchronize, Synchronized
from protocol.plan import ExecutionPlan
from protocol.result import PlanResult
from tests.plans import TIMEOUT, PlanSender, admission, block_table, prefill
from tests.ray_cluster import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.lifecycle import Frame

HOST = "127.0.0.1"
SECRET = "correct horse"
A = RequestKey("a", 1)
WORKER = WorkerSettings(
    cache=CacheSettings(block_size=4, num_blocks=64), device="cpu", num_slots=4, num_threads=1
)
CLUSTER = ClusterSettings(beat_interval=0.05, silence_timeout=15.0, shutdown_timeout=5.0)


class Peer:
    """A scheduler's end that sends raw bytes. Owner: one test, which alone uses it."""

    def __init__(self, address: str, secret: str = SECRET) -> None:
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        run: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            f"/{SERVICE}/{METHOD}"
        )
        self.answers = run(
            iter(self._frames.get, None),
            metadata=((AUTHORIZATION, credentials(secret)),),
            timeout=TIMEOUT,
        )

    def send(self, data: bytes) -> None:
        self._frames.put(data)

    def receive(self) -> Frame:
        """The next frame that is no beat."""
        while isinstance(frame := decode(next(self.answers)), Beat):
            continue
        return frame

    def close(self) -> None:
        self._frames.put(None)
        self.answers.cancel()
        self._channel.close()


@pytest.fixture(scope="module")
def actor() -> Iterator[WorkerActor]:
    worker = WorkerActor(WORKER.model_dump_json(), CLUSTER.model_dump_json(), SECRET)
    yield worker
    worker.close()
    worker.close()


@pytest.fixture(scope="module")
def address(actor: WorkerActor) -> str:
    host, port, pid = actor.start(HOST)
    first, last = CLUSTER.plan_port_range
    assert (host, pid) == (HOST, os.getpid())
    assert first <= port <= last
    return f"{host}:{port}"


@pytest.fixture(scope="module")
def epochs() -> Iterator[int]:
    return iter(range(1, 1000))


@pytest.fixture
def peer(address: str) -> Iterator[Peer]:
    opened = Peer(address)
    yield opened
    opened.close()


def connect(address: str, epoch: int, settings: ClusterSettings = CLUSTER) -> RayExecutor:
    return RayExecutor.connect(address, SECRET, epoch, settings, TIMEOUT)


def test_a_wrong_secret_is_turned_away(address: str) -> None:
    with pytest.raises(WorkerLostError, match="secret is wrong"):
        RayExecutor.connect(address, "guess", 999, CLUSTER, TIMEOUT)


def test_nobody_listening_is_an_error_within_the_deadline() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        closed = f"{HOST}:{taken.getsockname()[1]}"
        with pytest.raises((WorkerLostError, DeadlineError)):
            RayExecutor.connect(closed, SECRET, 1, CLUSTER, timeout=5.0)


def test_a_ticket_that_was_dropped_gives_its_place_back(
    address: str, epochs: Iterator[int], caplog: pytest.LogCaptureFixture
) -> None:
    executor = connect(address, next(epochs))
    sender = PlanSender(executor)
    for _ in range(MAX_PLANS_IN_FLIGHT):
        sender.submit()
    executor.synchronize(TIMEOUT)
    held = sender.submit()
    assert "1 in flight" in repr(executor)
    executor.shutdown(TIMEOUT)
    held.retire()
    assert "0 in flight" in repr(executor)
    dropped = [record for record in caplog.records if record.name == "protocol.submission"]
    assert [record.args for record in dropped] == [(seq,) for seq in range(1, sender.seq)]


def test_frames_are_answered_in_order_and_beats_fill_the_silence(
    peer: Peer, epochs: Iterator[int]
) -> None:
    epoch = next(epochs)
    peer.send(encode(Open(epoch)))
    opened = peer.receive()
    assert isinstance(opened, Opened)
    assert (opened.epoch, opened.profile.num_blocks) == (epoch, 64)
    for seq in (1, 2):
        peer.send(encode(ExecutionPlan(epoch, seq)))
    peer.send(encode(Synchronize(epoch, 2)))
    answers = [peer.receive() for _ in range(3)]
    assert answers == [
        PlanResult(epoch, 1),
        PlanResult(epoch, 2),
        Synchronized(epoch, 2),
    ]
    beat = decode(next(peer.answers))
    assert isinstance(beat, Beat)
    assert (beat.epoch, beat.seq) == (epoch, 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "wire version"),
        (b"\x09" + encode(Open(1))[1:], "wire version 9"),
        (b"\x01\xc1garbage", "malformed"),
        (encode(Fault(1, "x")), "never sends Fault"),
        (encode(ExecutionPlan(7_777, 1)), "epoch 7777"),
        (encode(Open(1)), "not newer"),
    ],
    ids=["empty", "version", "garbage", "direction", "epoch", "old epoch"],
)
def test_a_frame_that_breaks_the_contract_ends_the_stream_with_the_reason(
    address: str, epochs: Iterator[int], data: bytes, message: str
) -> None:
    peer = Peer(address)
    peer.send(encode(Open(next(epochs))))
    assert isinstance(peer.receive(), Opened)
    peer.send(data)
    fault = peer.receive()
    assert isinstance(fault, Fault)
    assert message in fault.message
    with pytest.raises(StopIteration):
        next(peer.answers)
    peer.close()


def test_a_fault_loses_the_executor_with_the_worker_s_reason(
    address: str, epochs: Iterator[int]
) -> None:
    first, second = next(epochs), next(epochs)
    connect(address, second).shutdown(TIMEOUT)
    with pytest.raises(WorkerLostError, match="not newer"):
        connect(address, first)


def test_a_cut_stream_costs_the_epoch_and_not_the_model(
    address: str, epochs: Iterator[int]
) -> None:
    executor = connect(address, next(epochs))
    admit = admission(A, (5, 6, 7), block_table(executor.profile(), 4))
    PlanSender(executor).run(prefill(A, 0, 3), admits=(admit,))
    executor.shutdown(TIMEOUT)
    again = connect(address, next(epochs))
    forgotten = PlanSender(again).run(prefill(A, 0, 3))
    assert [row.key for row in forgotten.failed] == [A]
    again.shutdown(TIMEOUT)


def test_hanging_up_during_a_plan_costs_the_worker_nothing(
    address: str, epochs: Iterator[int]
) -> None:
    for _ in range(2 * MAX_PLANS_IN_FLIGHT):
        executor = connect(address, next(epochs))
        for seq in range(1, MAX_PLANS_IN_FLIGHT + 1):
            executor.submit(ExecutionPlan(executor.epoch, seq))
        executor.shutdown(TIMEOUT)
    last = PlanSender(connect(address, next(epochs)))
    held = [last.submit() for _ in range(MAX_PLANS_IN_FLIGHT)]
    assert [submission.collect(TIMEOUT).seq for submission in held] == [1, 2, 3, 4]
    last.executor.shutdown(TIMEOUT)


def test_a_newer_stream_takes_the_worker_over(address: str, epochs: Iterator[int]) -> None:
    old = connect(address, next(epochs))
    new = connect(address, next(epochs))
    assert eventually(lambda: old.lost() is not None)
    with pytest.raises(WorkerLostError):
        old.submit(ExecutionPlan(old.epoch, 1))
    assert PlanSender(new).run().seq == 1
    old.shutdown(TIMEOUT)
    new.shutdown(TIMEOUT)


def test_a_stopped_server_ends_its_streams() -> None:
    worker = WorkerActor(WORKER.model_dump_json(), CLUSTER.model_dump_json(), SECRET)
    host, port, _ = worker.start(HOST)
    executor = connect(f"{host}:{port}", 1)
    worker.close()
    assert eventually(lambda: executor.lost() is not None)
    executor.shutdown(TIMEOUT)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def test_a_port_range_that_is_taken_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port = taken.getsockname()[1]
        settings = CLUSTER.model_copy(update={"plan_port_range": (port, port)})
        worker = WorkerActor(WORKER.model_dump_json(), settings.model_dump_json(), SECRET)
        with pytest.raises(ConfigError, match="no free port"):
            worker.start(HOST)
        worker.close()


CHILD = """
import sys, threading
from cluster.worker_actor import WorkerActor
worker = WorkerActor(sys.argv[1], sys.argv[2], sys.argv[3])
print(*worker.start("127.0.0.1"), flush=True)
sys.stdin.read()
worker.close()
"""


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A worker in a process of its own, and its address."""
    arguments = (WORKER.model_dump_json(), CLUSTER.model_dump_json(), SECRET)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        host, port, _ = child.stdout.readline().split()
        yield child, f"{host}:{port}"
        child.kill()


def test_a_killed_process_is_noticed_and_ends_what_is_in_flight(
    process: tuple[subprocess.Popen[str], str],
) -> None:
    child, address = process
    executor = connect(address, 1)
    PlanSender(executor).run()
    child.send_signal(signal.SIGSTOP)  # so that the plan is surely still in flight
    submission = executor.submit(ExecutionPlan(1, 2))
    child.kill()
    with pytest.raises(WorkerLostError, match=address):
        submission.collect(TIMEOUT)
    with pytest.raises(WorkerLostError):
        executor.submit(ExecutionPlan(1, 3))
    executor.shutdown(TIMEOUT)


def test_a_frozen_process_is_given_up_after_the_silence_timeout(
    process: tuple[subprocess.Popen[str], str],
) -> None:
    child, address = process
    executor = connect(address, 1, CLUSTER.model_copy(update={"silence_timeout": 1.0}))
    child.send_signal(signal.SIGSTOP)
    with pytest.raises(WorkerLostError, match="silent for"):
        executor.submit(ExecutionPlan(1, 1)).collect(TIMEOUT)
    child.send_signal(signal.SIGCONT)
    executor.shutdown(TIMEOUT)
    with pytest.raises(ExecutorClosedError):
        executor.synchronize(TIMEOUT)
