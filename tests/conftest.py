"""Tests that need a CUDA device run only when asked for."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --run-gpu."""
    parser.addoption("--run-gpu", action="store_true", help="run the tests that need a CUDA device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what carries the marker `gpu` unless it was asked for and can run."""
    if not config.getoption("--run-gpu"):
        reason = "needs --run-gpu"
    elif not torch.cuda.is_available():
        reason = "torch sees no CUDA device"
    else:
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
