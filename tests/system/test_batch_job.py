"""Batch jobs as processes: killed at several points, told to stop, and on a real Ray cluster."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from cluster.batch_parts import read_records
from cluster.ports import free_port
from tests.ray_cluster import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
TIMEOUT = 120.0
LINES = 200
WORDS = ("once", "upon", "a", "time", "there", "was", "small", "boy", "sun", "dog")


def line(index: int, chance: random.Random) -> dict[str, Any]:
    """A completion or a chat: greedy, or drawn from the body's seed or the line's."""
    text = " ".join(chance.choices(WORDS, k=chance.randint(2, 12)))
    body: dict[str, Any] = {"model": "ouro-tiny", "max_tokens": chance.randint(2, 6)}
    body |= {"exit_threshold": 0.9}
    body |= ({"temperature": 0.0}, {"seed": index}, {})[index % 3]
    if index % 4:
        return request(index, "/v1/completions", body | {"prompt": text})
    messages = [{"role": "user", "content": text}]
    return request(index, "/v1/chat/completions", body | {"messages": messages})


def request(index: int, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": f"r{index}", "method": "POST", "url": url, "body": body}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 good lines."""
    path = tmp_path_factory.mktemp("batch") / "in.jsonl"
    chance = random.Random(0)
    path.write_text("".join(json.dumps(line(i, chance)) + "\n" for i in range(LINES)))
    return path


@contextmanager
def job(source: Path, target: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A job in a process of its own, in parts of 64 lines."""
    config = target.with_suffix(".config.json")
    config.write_text(json.dumps({"batch": {"part_lines": 64}, "worker": {"num_slots": 16}}))
    files = ("--input", str(source), "--output", str(target), "--config", str(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_JOB_CONFIG_JSON_ENV_VAR", None)
    with subprocess.Popen(
        [sys.executable, "-m", "cluster.batch_job", *files, *flags],
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


def finished(source: Path, target: Path, *flags: str) -> int:
    """Run a job to its end; its exit code."""
    with job(source, target, *flags) as process:
        process.communicate(timeout=TIMEOUT)
        return process.returncode


def written(target: Path) -> int:
    """Output lines that are safe on the disk."""
    parts = Path(f"{target}.parts")
    sealed = sum(len(path.read_bytes().splitlines()) - 1 for path in parts.glob("*.jsonl"))
    return sealed + sum(len(list(read_records(p.read_bytes()))) for p in parts.glob("*.open"))


def summary(target: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(Path(f"{target}.summary.json").read_text())
    return told


@pytest.fixture(scope="module")
def expected(source: Path) -> bytes:
    """The output of a job that nothing happened to."""
    target = source.with_name("expected.jsonl")
    assert finished(source, target) == 0
    return target.read_bytes()


def until_written(process: subprocess.Popen[str], target: Path, lines: int) -> None:
    """Return as soon as a job has written so many lines."""
    deadline = time.monotonic() + TIMEOUT
    while written(target) < lines:
        assert time.monotonic() < deadline
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.02)
        assert process.poll() is None, process.communicate()


def test_a_job_that_is_killed_or_told_to_stop_again_and_again_misses_nothing(
    source: Path, expected: bytes, tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    kept = 0
    for point, number in ((1, signal.SIGKILL), (50, signal.SIGKILL), (90, signal.SIGTERM)):
        with job(source, target) as process:
            until_written(process, target, point)
            process.send_signal(number)
            _, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == (130 if number is signal.SIGTERM else -number)
        assert "Traceback" not in err
        assert kept < written(target) < LINES
        kept = written(target)
        assert not target.exists()
    told = summary(target)
    assert (told["state"], told["lines"]) == ("interrupted", kept)
    assert finished(source, target) == 0
    assert target.read_bytes() == expected
    told = summary(target)["this_job"]
    assert (told["lines_before"], told["lines"]) == (kept, LINES - kept)
    assert not Path(f"{target}.parts").exists()


def test_broken_lines_change_no_answer_of_the_others(
    source: Path, expected: bytes, tmp_path: Path
) -> None:
    good = source.read_bytes().splitlines()
    bad = [b"{", b"\xff\xfe", good[0], b'{"custom_id": "x", "surprise": 1}', b"x" * (2**20 + 1)]
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_bytes(b"\n".join([*good[:5], *bad, *good[5:]]) + b"\n")
    target = tmp_path / "out.jsonl"
    assert finished(mixed, target) == 3
    lines = target.read_bytes().splitlines(keepends=True)
    assert b"".join(lines[:5] + lines[5 + len(bad) :]) == expected
    codes = [json.loads(text)["error"]["code"] for text in lines[5 : 5 + len(bad)]]
    assert codes == [
        "invalid_json",
        "not_utf8",
        "duplicate_custom_id",
        "invalid_line",
        "line_too_long",
    ]


class Cluster:
    """A cluster as an operator starts it, and the command that submits to it. Never changes."""

    def __init__(self, dashboard: str, environment: dict[str, str], directory: Path) -> None:
        self.dashboard = dashboard
        self._environment = environment
        self._directory = directory

    def submit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`ray job submit` of a batch from a checkout; returns when the job has ended."""
        command = [sys.executable, "-m", "cluster.batch_job", *arguments]
        flags = ("--address", self.dashboard, "--working-dir", str(self._directory))
        return subprocess.run(
            [*ray_command("job", "submit"), *flags, "--", *command],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )


def ray_command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from ray.scripts.scripts import main; main()", *arguments]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """`ray start --head` with ports, home and folder of its own; every process of it is ended."""
    with tempfile.TemporaryDirectory(prefix="loopmesh-", ignore_cleanup_errors=True) as home:
        checkout = Path(home) / "checkout"
        for package in ("cluster", "protocol", "scheduler", "worker"):
            shutil.copytree(ROOT / package, checkout / package)
        environment = os.environ | {
            "HOME": home,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("RAY_ADDRESS", None)
        dashboard = free_port()
        start = ray_command("start", "--head", "--block", "--disable-usage-stats")
        ports = {
            "port": free_port(),
            "ray-client-server-port": free_port(),
            "dashboard-port": dashboard,
            "dashboard-agent-listen-port": free_port(),
            "min-worker-port": 0,
            "max-worker-port": 0,
        }
        flags = [f"--{name}={value}" for name, value in ports.items()]
        room = ["--num-cpus=4", f"--object-store-memory={80 * 2**20}", f"--temp-dir={home}/ray"]
        with subprocess.Popen(
            [*start, *flags, *room],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as head:
            try:
                if not eventually(lambda: head.poll() is not None or answers(dashboard)):
                    pytest.skip("Ray's dashboard does not come up on this machine")
                if head.poll() is not None:
                    pytest.skip(f"ray start --head: {head.communicate()[0][-500:]}")
                yield Cluster(f"http://127.0.0.1:{dashboard}", environment, checkout)
            finally:
                whole = psutil.Process(head.pid)
                end([*whole.children(recursive=True), whole])


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/api/version", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def end(processes: list[psutil.Process]) -> None:
    """End processes that this test started."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not psutil.wait_procs(processes, timeout=20)[1]


@pytest.mark.ray
def test_a_submitted_job_runs_on_the_cluster_s_workers(
    cluster: Cluster, source: Path, expected: bytes, tmp_path: Path
) -> None:
    few, target = tmp_path / "few.jsonl", tmp_path / "out.jsonl"
    few.write_bytes(b"".join(source.read_bytes().splitlines(keepends=True)[:24]) + b"{\n")
    ended = cluster.submit("--input", str(few), "--output", str(target), "--workers", "2")
    assert "complete: 25 of 25 lines, 1 of them error lines" in ended.stdout, ended.stderr
    assert target.read_bytes().splitlines()[:24] == expected.splitlines()[:24]
    assert summary(target)["this_job"]["workers"] == 2
    # Ray calls a job failed whose exit code is not 0.
    listed = httpx.get(f"{cluster.dashboard}/api/jobs/", timeout=TIMEOUT).json()
    (entry,) = [entry for entry in listed if entry["type"] == "SUBMISSION"]
    assert (entry["status"], entry["driver_exit_code"]) == ("FAILED", 3)
