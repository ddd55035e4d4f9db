"""RayExecutor: the executor whose worker is a Ray actor behind a plan stream.

One executor is one stream and one epoch. Its receiver thread turns frames into results; its watch
thread gives the worker up when nothing, not even a beat, has come for `silence_timeout`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, Self

import grpc

from cluster.plan_stream import AUTHORIZATION, CHANNEL_OPTIONS, METHOD, SERVICE, credentials
from protocol.codec import decode, encode
from protocol.errors import (
    ExecutorClosedError,
    LoopmeshError,
    ProtocolError,
    WorkerLostError,
)
from protocol.lifecycle import Beat, Fault, Open, Opened, Synchronize, Synchronized
from protocol.plan_order import PlanOrder
from protocol.result import PlanResult
from protocol.submission import FutureSubmission, TicketNet, wait

if TYPE_CHECKING:
    from protocol.config import ClusterSettings
    from protocol.lifecycle import ToWorker
    from protocol.plan import ExecutionPlan
    from protocol.profile import WorkerProfile

logger = logging.getLogger(__name__)


class RayExecutor:
    """Owner: one engine driver. Mutated only by: its methods, and its receiver thread."""

    def __init__(self, address: str, secret: str, epoch: int, settings: ClusterSettings) -> None:
        self._address = address
        self._order = PlanOrder(epoch)
        self._net = TicketNet()
        self._settings = settings
        self._lock = threading.Lock()
        self._pending: dict[int, Future[PlanResult]] = {}
        self._synchronizing: dict[int, Future[None]] = {}
        self._opened: Future[WorkerProfile] = Future()
        self._profile: WorkerProfile
        self._lost: str | None = None
        self._closed = False
        self._stop = threading.Event()
        self._heard = time.monotonic()
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        run: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            f"/{SERVICE}/{METHOD}"
        )
        self._call = run(
            iter(self._frames.get, None), metadata=((AUTHORIZATION, credentials(secret)),)
        )
        self._threads = [
            threading.Thread(target=self._receive, name="loopmesh-results", daemon=True),
            threading.Thread(target=self._watch, name="loopmesh-watch", daemon=True),
        ]

    @classmethod
    def connect(
        cls, address: str, secret: str, epoch: int, settings: ClusterSettings, timeout: float
    ) -> Self:
        """Open the stream to a worker at "host:port" and wait until its epoch stands.

        Raises WorkerLostError when nobody listens there or the secret is wrong, ProtocolError
        when the worker refuses the epoch, DeadlineError after `timeout` seconds.
        """
        executor = cls(address, secret, epoch, settings)
        try:
            executor._open(timeout)
        except BaseException:
            executor.shutdown(settings.shutdown_timeout)
            raise
        return executor

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"lost: {self._lost}" if self._lost else "open"
        where = f"{self._address} epoch {self.epoch}"
        return f"<RayExecutor {where}, {self._order.in_flight} in flight, {state}>"

    @property
    def epoch(self) -> int:
        """The epoch that every plan carries."""
        return self._order.epoch

    def profile(self) -> WorkerProfile:
        """Device, model and room of the worker."""
        return self._profile

    def lost(self) -> str | None:
        """Why the worker is gone, or None."""
        return self._lost

    def submit(self, plan: ExecutionPlan) -> FutureSubmission[PlanResult]:
        """Send a plan; see protocol.executor.Executor.submit for what it raises."""
        frame = encode(plan)
        self._net.reclaim()
        with self._lock:
            self._require_open()
            self._order.take(plan, self._profile)
            future: Future[PlanResult] = Future()
            self._pending[plan.seq] = future
            self._frames.put(frame)
        return FutureSubmission(plan.seq, future, lambda result: result, self._retired, self._net)

    def synchronize(self, timeout: float) -> None:
        """Return once every submitted plan has run on the worker."""
        self._net.reclaim()
        done: Future[None] = Future()
        with self._lock:
            self._require_open()
            seq = self._order.last_seq
            self._synchronizing[seq] = done
            self._send(Synchronize(self.epoch, seq))
        wait(done, timeout, "synchronize")

    def shutdown(self, timeout: float) -> None:
        """End the stream and its threads; idempotent.

        The worker keeps its model, and drops the epoch's slots when the next stream opens.
        """
        self._closed = True
        self._fail_all(ExecutorClosedError("the executor is shut down; open a new one"))
        self._stop.set()
        self._frames.put(None)
        self._call.cancel()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout)
        self._channel.close()
        self._net.reclaim()

    def _open(self, timeout: float) -> None:
        for thread in self._threads:
            thread.start()
        self._send(Open(self.epoch))
        self._profile = wait(self._opened, timeout, f"opening a stream to {self._address}")

    def _send(self, frame: ToWorker) -> None:
        self._frames.put(encode(frame))

    def _require_open(self) -> None:
        if self._closed:
            raise ExecutorClosedError("the executor is shut down; open a new one")
        if self._lost is not None:
            raise WorkerLostError(self._lost)

    def _retired(self) -> None:
        with self._lock:
            self._order.retire()

    def _receive(self) -> None:
        try:
            for data in self._call:
                self._heard = time.monotonic()
                self._handle(decode(data))
            reason = "its stream ended"
        except LoopmeshError as error:
            reason = str(error)
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        self._lose(f"worker at {self._address} is gone: {reason}")

    def _handle(self, frame: object) -> None:
        match frame:
            case PlanResult():
                self._deliver(frame)
            case Beat():
                pass
            case Opened(epoch, profile) if epoch == self.epoch:
                self._opened.set_result(profile)
            case Synchronized(_, seq):
                with self._lock:
                    done = self._synchronizing.pop(seq, None)
                if done is not None:
                    done.set_result(None)
            case Fault(_, message):
                raise ProtocolError(f"it ended the epoch: {message}")
            case _:
                raise ProtocolError(f"it sent an unexpected {type(frame).__name__}")

    def _deliver(self, result: PlanResult) -> None:
        with self._lock:
            future = self._pending.pop(result.seq, None) if result.epoch == self.epoch else None
        if future is None:
            logger.warning("%r: dropped result %d of epoch %d", self, result.seq, result.epoch)
        else:
            future.set_result(result)

    def _watch(self) -> None:
        limit = self._settings.silence_timeout
        while not self._stop.wait(limit / 8):
            silent = time.monotonic() - self._heard
            if silent > limit:
                self._lose(f"worker at {self._address} is gone: silent for {silent:.1f} s")
                self._call.cancel()
                return

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._lost is None and not self._closed:
                logger.warning("%s", reason)
                self._lost = reason
        self._stop.set()
        self._fail_all(WorkerLostError(reason))

    def _fail_all(self, error: LoopmeshError) -> None:
        """End every wait with `error`. Only the first end of a future counts."""
        with self._lock:
            futures: list[Future[Any]] = [
                self._opened,
                *self._pending.values(),
                *self._synchronizing.values(),
            ]
            self._pending.clear()
            self._synchronizing.clear()
        for future in futures:
            try:
                future.set_exception(error)
            except InvalidStateError:
                continue
