"""What all tests share: those that need more than a CPU run only when asked for; no luck is needed.

Drawn examples are the same in each run, and none is timed: machines differ.
"""

from __future__ import annotations

import atexit
import os
import sys
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

from tests.ray_sessions import BEGUN

collect_ignore = [] if find_spec("numba") else ["worker/test_cpu_kernels.py"]
"""A GPU's worker does without Numba, and so do its tests."""

_STATUS = pytest.StashKey[int]()

settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --run-gpu and --run-autoscaler."""
    parser.addoption("--run-gpu", action="store_true", help="run the tests that need a CUDA device")
    parser.addoption(
        "--run-autoscaler", action="store_true", help="run the tests of a Ray cluster that grows"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what carries the marker `gpu` or `autoscaler` unless it was asked for and can run."""
    if not config.getoption("--run-gpu"):
        _skip(items, "gpu", "needs --run-gpu")
    elif not torch.cuda.is_available():
        _skip(items, "gpu", "torch sees no CUDA device")
    if not config.getoption("--run-autoscaler"):
        _skip(items, "autoscaler", "needs --run-autoscaler")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Note how it went, for the end of the process."""
    session.config.stash[_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process here if it has had Ray in it, once all is told and all handlers have run.

    Ray's threads outlive its sessions. While the process destroys its C++ objects, one of them may
    run into what is no more, and a run whose tests have all passed ends with a crash.
    """
    if BEGUN and _STATUS in config.stash:
        atexit._run_exitfuncs()  # noqa: SLF001 - what a normal exit does first
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_STATUS])


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
