"""The worker's end of a plan stream: one authenticated gRPC bidirectional stream per epoch.

A reader thread hands frames to the executor in order; the stream's own thread sends what comes
back, results in the order of their plans, and a beat whenever nothing else was sent for an
interval. Frames are opaque bytes to gRPC (`protocol/codec.py`).
"""

from __future__ import annotations

import hmac
import logging
import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc

from protocol.codec import decode, encode
from protocol.errors import ConfigError, LoopmeshError, ProtocolError
from protocol.lifecycle import Beat, Fault, FromWorker, Open, Opened, Synchronize, Synchronized
from protocol.plan import ExecutionPlan
from protocol.plan_size import FRAME_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.config import ClusterSettings
    from protocol.executor import Submission
    from worker.local_executor import LocalExecutor

logger = logging.getLogger(__name__)

SERVICE = "loopmesh.PlanStream"
METHOD = "Run"
AUTHORIZATION = "authorization"

# gRPC adds its own framing to a message; keepalive pings are off, since beats do that work and
# frequent pings end in GOAWAY.
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", FRAME_LIMIT + 1024),
    ("grpc.max_receive_message_length", FRAME_LIMIT + 1024),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
)


def credentials(secret: str) -> str:
    """The value of the authorization header for a worker's secret."""
    return f"Bearer {secret}"


class PlanStreamServer:
    """Owner: WorkerActor. Mutated only by: start and stop.

    Serves one stream at a time; a newer stream ends the older one, whose scheduler is gone.
    """

    def __init__(self, executor: LocalExecutor, secret: str, settings: ClusterSettings) -> None:
        self._executor = executor
        self._secret = secret
        self._settings = settings
        self._lock = threading.Lock()
        self._session: _Session | None = None
        # Two streams can overlap while an old one is being cut; a third would wait.
        pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="loopmesh-stream")
        self._server = grpc.server(pool, options=CHANNEL_OPTIONS)
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._run
        )
        service = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
        self._server.add_generic_rpc_handlers((service,))

    def start(self, host: str) -> int:
        """Listen on `host` and a free port of plan_port_range; returns the port."""
        first, last = self._settings.plan_port_range
        ports = range(first, last + 1)
        # Workers that start together on one node begin their search in different places.
        offset = random.randrange(len(ports))
        for step in range(len(ports)):
            port = ports[(offset + step) % len(ports)]
            try:
                self._server.add_insecure_port(f"{host}:{port}")
            except RuntimeError:
                continue
            self._server.start()
            return port
        raise ConfigError(f"no free port on {host} in plan_port_range ({first}, {last}); widen it")

    def stop(self, timeout: float) -> None:
        """End the stream and close the port; idempotent."""
        with self._lock:
            if self._session is not None:
                self._session.end("the worker shuts down")
        self._server.stop(grace=min(timeout, 1.0)).wait(timeout)

    def _run(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        metadata = dict(context.invocation_metadata())
        given = str(metadata.get(AUTHORIZATION, ""))
        if not hmac.compare_digest(given.encode(), credentials(self._secret).encode()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the plan stream's secret is wrong")
        session = _Session(self._executor, self._settings)
        with self._lock:
            if self._session is not None:
                self._session.end("a newer stream took over")
            self._session = session
        context.add_callback(lambda: session.end("the scheduler hung up"))
        reader = threading.Thread(
            target=session.read, args=(frames,), name="loopmesh-frames", daemon=True
        )
        reader.start()
        yield from session.send()


class _Session:
    """One epoch's stream. Owner: PlanStreamServer. Mutated only by: its reader and sender."""

    def __init__(self, executor: LocalExecutor, settings: ClusterSettings) -> None:
        self._executor = executor
        self._settings = settings
        self._epoch = 0
        self._out: queue.SimpleQueue[FromWorker | Submission | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unanswered: set[Submission] = set()
        self._ended = False

    def end(self, reason: str) -> None:
        """Make the sender stop after what is already queued."""
        logger.info("plan stream of epoch %d ends: %s", self._epoch, reason)
        self._out.put(None)

    def read(self, frames: Iterator[bytes]) -> None:
        """Handle frames in order until the stream is cut or breaks the contract."""
        try:
            for data in frames:
                self._handle(decode(data))
        except LoopmeshError as error:
            self._out.put(Fault(self._epoch, str(error)))
            self._out.put(None)
        except Exception:  # gRPC raises its own errors when the other side is gone
            logger.debug("plan stream reader stopped", exc_info=True)
            self._out.put(None)

    def send(self) -> Iterator[bytes]:
        """Frames to the scheduler: answers as they come, a beat after every quiet interval.

        When nobody reads them any more, what was not answered is retired.
        """
        try:
            yield from self._send()
        finally:
            with self._lock:
                self._ended = True
            for submission in self._unanswered:
                submission.retire()

    def _send(self) -> Iterator[bytes]:
        while True:
            try:
                item = self._out.get(timeout=self._settings.beat_interval)
            except queue.Empty:
                seq, steps_done, phase = self._executor.progress()
                if self._epoch:
                    yield encode(Beat(self._epoch, seq, steps_done, phase))
                continue
            if item is None:
                return
            frame = item if isinstance(item, FromWorker) else self._answer(item)
            yield encode(frame)
            if isinstance(frame, Fault):
                return

    def _answer(self, submission: Submission) -> FromWorker:
        """The result of a finished plan; its lease is free once the frame is encoded."""
        try:
            return submission.collect(timeout=0.0)
        except LoopmeshError as error:
            return Fault(self._epoch, str(error))
        finally:
            submission.retire()
            self._unanswered.discard(submission)

    def _handle(self, frame: object) -> None:
        match frame:
            case Open(epoch):
                self._executor.begin_epoch(epoch, self._settings.plan_timeout)
                self._epoch = epoch
                self._out.put(Opened(epoch, self._executor.profile()))
            case ExecutionPlan():
                submission = self._executor.submit(frame)
                with self._lock:
                    self._unanswered.add(submission)
                    if self._ended:
                        submission.retire()
                submission.add_done_callback(lambda: self._out.put(submission))
            case Synchronize(epoch, seq):
                self._executor.synchronize(self._settings.plan_timeout)
                self._out.put(Synchronized(epoch, seq))
            case _:
                raise ProtocolError(f"a scheduler never sends {type(frame).__name__}")
