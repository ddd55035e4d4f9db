"""The exceptions of Loopmesh: each message says what was wrong, where, and the mend."""

from __future__ import annotations


class LoopmeshError(Exception):
    """Base of every error that Loopmesh raises on purpose."""


class ConfigError(LoopmeshError):
    """A setting is wrong, or two settings contradict each other."""


class ModelError(LoopmeshError):
    """A checkpoint or tokenizer cannot be served: missing, unsafe, or of an unsupported shape."""


class RequestError(LoopmeshError):
    """A request is wrong in itself; sending it again unchanged can never work."""


class CapacityError(RequestError):
    """A request needs more than any worker has, even an idle one."""


class DuplicateRequestError(RequestError):
    """A request id is still in use by a live request."""


class OverloadedError(LoopmeshError):
    """There is no room now; the same request may work later."""


class ProtocolError(LoopmeshError):
    """Bytes or a plan break the contract between scheduler and worker."""


class DeadlineError(LoopmeshError):
    """A bounded wait ran out."""


class ExecutorClosedError(LoopmeshError):
    """Work was sent to an executor that has been shut down."""


class StartError(LoopmeshError):
    """An endpoint or a worker could not be brought up."""


class WorkerLostError(LoopmeshError):
    """A worker is gone: its process died, froze, or its stream was cut."""


class DrainingError(WorkerLostError):
    """An engine that is to end took no more requests; another will."""
