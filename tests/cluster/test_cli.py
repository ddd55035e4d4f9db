from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from cluster.cli import main
from tests.cluster.signals import usual_interrupts

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = [sys.executable, "-m", "cluster.cli"]
RECORDED = ", by the river, there lived a small boy"
ADAPTIVE = ["generate", "Once upon a time", "--max-tokens", "10", "--exit-threshold", "0.9"]
ENDLESS = ["generate", "Once", "--max-tokens", "1900", "--ignore-eos"]
TIMEOUT = 120.0


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOPMESH_CONFIG", raising=False)


def error_line(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a wrong command leaves on standard error, after progress."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *before, last = captured.err.splitlines()
    assert all(line.startswith("loopmesh: loading") for line in before)
    assert last.startswith("loopmesh: error: ")
    return last


def test_generate_prints_the_text_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ADAPTIVE) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(RECORDED)
    assert "\x1b" not in captured.out
    assert "% of loops saved" in captured.err.splitlines()[-1]


def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ADAPTIVE, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert set(body) == {
        "text",
        "token_ids",
        "exit_depths",
        "finish_reason",
        "logprobs",
        "usage",
    }
    assert body["logprobs"] is None
    assert body["text"].startswith(RECORDED)
    assert len(body["token_ids"]) == len(body["exit_depths"]) == 10
    assert body["finish_reason"] == "length"
    assert body["usage"]["loops_run"] == sum(body["exit_depths"])
    assert body["usage"]["prompt_tokens"] == 4


def generated(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["generate", "Once upon a time", "--json", *flags]) == 0
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    return body


def test_every_sampling_flag_counts(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = generated(capsys)
    assert (len(fixed["token_ids"]), set(fixed["exit_depths"])) == (16, {4})
    eager = ["--exit-threshold", "0"]
    assert set(generated(capsys, *eager)["exit_depths"][1:]) == {1}
    assert set(generated(capsys, *eager, "--min-loops", "3")["exit_depths"][1:]) == {3}
    assert set(generated(capsys, "--max-loops", "2")["exit_depths"][1:]) == {2}
    warm = ["--temperature", "1.5", "--seed", "3"]
    assert generated(capsys, *warm) == generated(capsys, *warm)
    assert generated(capsys, *warm)["token_ids"] != fixed["token_ids"]
    for narrow in (["--top-k", "1"], ["--top-p", "0.000001"]):
        assert generated(capsys, *warm, *narrow)["token_ids"] == fixed["token_ids"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice"),
        (["generate"], "prompt"),
        (["generate", "x", "--fly"], "--fly"),
        (["generate", "x", "--top-k", "a"], "--top-k"),
        (["generate", "x", "--max-tokens", "0"], "--max-tokens: "),
        (["generate", "x", "--temperature", "nan"], "--temperature: "),
        (["generate", "x", "--min-loops", "3", "--max-loops", "2"], "below min_loops"),
        (["generate", "x", "--max-loops", "9"], "9"),
        (["generate", "x", "--dtype", "float8"], "float32"),
        (["generate", "x", "--device", "tpu"], "worker.device"),
        (["generate", "x", "--model", "/no/such/model"], "/no/such/model"),
        (["generate", "x", "--workers", "2"], "executor='ray'"),
        (["generate", "x", "--executor", "fast"], "fast"),
        (["generate", ""], "empty"),
        (["generate", "x", "--logit-bias", "5"], "--logit-bias: '5' is no list of TOKEN:BIAS"),
        (["generate", "x", "--logit-bias", "5:200"], "--logit-bias: "),
        (["generate", "x", "--logit-bias", "5:1,5:2"], "token 5 appears twice"),
        (["generate", "x", "--stop-token-ids", "1,b"], "--stop-token-ids: '1,b' is no list"),
        (["generate", "x", "--stop-token-ids", "4096"], "stop token 4096"),
        (["generate", "x", "--forced-depths", "4,2"], "forced_depths has 2 entries"),
        (["generate", "x", "--forced-depths", "4,,2"], "--forced-depths: "),
        (["generate", "x", "--repetition-penalty", "0"], "--repetition-penalty: "),
        (["generate", "x", "--presence-penalty", "3"], "--presence-penalty: "),
        (["generate", "x", "--frequency-penalty", "inf"], "--frequency-penalty: "),
        (["generate", "x", "--min-tokens", "17"], "min_tokens 17 exceeds max_tokens 16"),
        (["generate", "x", "--priority", "0.5"], "--priority"),
        (["generate", "x", "--logprobs", "21", "--json"], "--logprobs: "),
        (["generate", "x", "--logprobs", "2"], "--logprobs: plain text"),
        (["generate", "x", "--stop", ""], "a stop string is a text"),
        (["generate", "x", *["--stop", "y"] * 5], "at most 4"),
        (["generate", "a\udcff"], "Unicode"),
        (["serve", "--workers", "0"], "cluster.num_workers"),
        (["serve", "--port", "http"], "--port"),
        (["doctor", "--config", "/no/such/file"], "/no/such/file"),
    ],
)
def test_a_wrong_command_is_one_line_that_says_why(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert message in error_line(capsys, *argv)


@pytest.mark.parametrize("content", ["{", "[]", '{"surprise": 1}', '{"api": {"max_requests": 0}}'])
def test_a_wrong_configuration_file_is_a_user_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    path = tmp_path / "loopmesh.json"
    path.write_text(content)
    assert "configuration" in error_line(capsys, "generate", "x", "--config", str(path))


def test_flags_go_before_the_file_and_the_file_before_the_variable(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, variable = tmp_path / "file.json", tmp_path / "variable.json"
    file.write_text('{"worker": {"model": {"model": "/from/file"}}}')
    variable.write_text('{"worker": {"model": {"model": "/from/variable"}}}')
    monkeypatch.setenv("LOOPMESH_CONFIG", str(variable))
    assert "/from/variable" in error_line(capsys, "generate", "x")
    assert "/from/file" in error_line(capsys, "generate", "x", "--config", str(file))
    assert main([*ADAPTIVE, "--config", str(file), "--model", "ouro-tiny"]) == 0


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"loopmesh \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert main(["generate", "--help"]) == 0
    assert "--exit-threshold" in capsys.readouterr().out


def test_doctor_fails_with_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert main(["doctor", "--port", port]) == 1
        assert "FAIL  http port" in capsys.readouterr().out
        assert main(["doctor", "--port", port, "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)
    (found,) = (check for check in checks if check["name"] == "http port")
    assert not found["ok"]
    assert "--port" in found["mend"]


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_colours_and_a_legend(no_color: str, coloured: bool) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        child = subprocess.Popen(
            [*COMMAND, *ADAPTIVE],
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"NO_COLOR": no_color},
        )
        os.close(theirs)
        shown = b""
        try:
            while piece := screen.read(4096):
                shown += piece
        except OSError:  # how Linux says that the other side has closed
            pass
        assert child.wait(TIMEOUT) == 0
    assert (b"\x1b[38;5;" in shown) == coloured
    assert (b"exit depth: " in shown) == coloured
    plain = re.sub(rb"\x1b\[[0-9;]*m", b"", shown).decode()
    assert RECORDED in plain


def test_an_interrupt_ends_quietly() -> None:
    with usual_interrupts():
        child = subprocess.Popen(
            [*COMMAND, *ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    assert child.stdout is not None
    assert child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=TIMEOUT)
    assert child.returncode == 130
    assert errors.splitlines() == ["loopmesh: loading ouro-tiny"]


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    child = subprocess.Popen(
        [*COMMAND, *ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.read(1)
    child.stdout.close()
    errors = child.stderr.read()
    child.stderr.close()
    assert child.wait(TIMEOUT) == 141
    assert errors.splitlines() == ["loopmesh: loading ouro-tiny"]


def test_generate_does_not_import_ray() -> None:
    code = (
        "import sys\n"
        "from cluster.cli import main\n"
        "assert main(['generate', 'Once', '--max-tokens', '2']) == 0\n"
        "print(sorted({'ray', 'grpc'} & set(sys.modules)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["doctor"], 1, "FAIL  devices: torch"),
        (["generate", "x"], 2, "see `loopmesh doctor`"),
    ],
)
def test_a_missing_dependency_is_reported_in_words(
    argv: list[str], code: int, message: str
) -> None:
    # An entry of None in sys.modules makes an import fail as if nothing were installed.
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from cluster.cli import main\n"
        f"sys.exit(main({argv!r}))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert run.returncode == code
    assert message in run.stdout + run.stderr
    assert "Traceback" not in run.stderr
