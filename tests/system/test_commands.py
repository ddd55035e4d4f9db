"""The commands that start Ray, as a user runs them: what they print, and that nothing stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from cluster.llm import LLM
from cluster.ports import free_port
from protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
TIMEOUT = 120.0
PROMPT = "Once upon a time"


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`loopmesh ...` in a home of its own; afterwards no process with that home is left."""
    with tempfile.TemporaryDirectory(prefix="loopmesh-") as home:
        environment = os.environ | {
            "HOME": home,
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": home,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        environment.pop("RAY_ADDRESS", None)
        with subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", *arguments],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()
        left = psutil.wait_procs(processes_of(home), timeout=20)[1]
        for straggler in left:
            straggler.kill()
        assert not left


def processes_of(home: str) -> list[psutil.Process]:
    """Live processes whose environment has this home."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == home:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_generate_on_two_ray_workers_says_what_this_process_says() -> None:
    flags = ("--max-tokens", "12", "--exit-threshold", "0.9", "--json")
    with command("generate", PROMPT, *flags, "--executor", "ray", "--workers", "2") as process:
        out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    answer = json.loads(out)
    with LLM() as llm:
        (here,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, exit_threshold=0.9))
    assert answer["text"] == here.text
    assert answer["token_ids"] == list(here.token_ids)
    assert answer["exit_depths"] == list(here.exit_depths)
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12


def test_serve_answers_until_it_is_told_to_stop() -> None:
    with command("serve", "--port", "0") as process:
        _, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 2
        assert "--port" in err
    port = free_port()
    with command("serve", "--port", str(port)) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "ready" in line:
                break
        body = {"model": "ouro-tiny", "prompt": PROMPT, "max_tokens": 3}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, err
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)


def test_serve_says_in_one_line_why_it_cannot_start() -> None:
    with command("serve", "--port", str(free_port()), "--model", "/no/such/model") as process:
        _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    last = err.strip().splitlines()[-1]
    assert last.startswith("loopmesh: error: ")
    assert "/no/such/model" in last
    assert "Traceback" not in err


def test_the_demo_shows_every_answer_its_depths_and_what_was_saved() -> None:
    with command("demo") as process:
        out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    assert re.findall(r"\[(\d)/5\]", err) == ["1", "2", "3", "4", "5"]
    answers = out.strip().split("\n> ")
    assert len(answers) == 6
    assert "Once upon a time, by the river, there lived a small boy named Felix." in answers[0]
    for answer in answers:
        depths = re.search(r"exit depths (\d+)", answer)
        assert depths is not None
        assert set(depths[1]) <= set("1234")
        run, full = map(int, re.search(r"loops (\d+) of (\d+)", answer).groups())  # type: ignore[union-attr]
        assert run == sum(map(int, depths[1]))
        assert full == 4 * len(depths[1])
