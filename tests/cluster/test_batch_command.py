"""`loopmesh batch` in this process: files in, files out, exit codes."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from cluster import batch_job
from cluster.batch_storage import LocalStorage
from cluster.cli import main
from cluster.llm import LLM
from protocol.sampling import SamplingParams
from tests.cluster.completion_services import TOKENIZER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ADAPTIVE = SamplingParams(max_tokens=6, exit_threshold=0.9)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOPMESH_CONFIG", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)


def completion(name: str, **body: Any) -> dict[str, Any]:  # noqa: ANN401
    fields = {"model": "ouro-tiny", "prompt": "Once", "max_tokens": 6, "exit_threshold": 0.9}
    fields |= {"temperature": 0.0} | body
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": fields}


def chat(name: str, content: str) -> dict[str, Any]:
    line = completion(name) | {"url": "/v1/chat/completions"}
    del line["body"]["prompt"]
    line["body"]["messages"] = [{"role": "user", "content": content}]
    return line


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def run(source: Path, target: Path, *flags: str) -> int:
    return main(["batch", "--input", str(source), "--output", str(target), *flags])


def test_answers_are_those_of_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in", completion("a"), chat("b", "Hi"), completion("c", stop=" a"))
    target = tmp_path / "out"
    assert run(source, target) == 0
    told = [json.loads(text) for text in target.read_text().splitlines()]
    assert [entry["custom_id"] for entry in told] == ["a", "b", "c"]
    prompts: list[str | list[int]] = [
        "Once",
        TOKENIZER.encode_chat([{"role": "user", "content": "Hi"}]),
    ]
    with LLM() as llm:
        plain, talk = llm.generate(prompts, ADAPTIVE)
    (choice,) = told[0]["response"]["body"]["choices"]
    assert (choice["text"], choice["exit_depths"]) == (plain.text, list(plain.exit_depths))
    (choice,) = told[1]["response"]["body"]["choices"]
    assert choice["message"]["content"] == talk.text
    out = capsys.readouterr().out
    assert out.startswith("complete: 3 of 3 lines, 0 of them error lines")
    assert "% of full depth saved" in out
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert (summary["state"], summary["lines"], summary["failed"]) == ("complete", 3, 0)
    usages = [entry["response"]["body"]["usage"] for entry in told]
    for name in ("prompt_tokens", "completion_tokens", "loops_run", "loops_saved"):
        assert summary[name] == sum(usage[name] for usage in usages)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "out.summary.json"]


def test_error_lines_have_an_exit_code_that_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in", completion("a"), "{", completion("a"))
    target = tmp_path / "out"
    assert run(source, target) == 3
    written = target.read_bytes()
    out = capsys.readouterr().out
    assert "errors: 1 x duplicate_custom_id" in out
    assert "errors: 1 x invalid_json" in out
    assert run(source, target) == 3
    assert target.read_bytes() == written
    assert "complete already" in capsys.readouterr().err


def test_too_many_errors_have_one_too_and_it_goes_on_when_more_are_allowed(
    tmp_path: Path,
) -> None:
    source, target = write(tmp_path / "in", "{", completion("a")), tmp_path / "out"
    assert run(source, target, "--max-errors", "0") == 4
    assert not target.exists()
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert (summary["state"], summary["errors"]) == ("too many errors", {"invalid_json": 1})
    assert run(source, target, "--max-errors", "1") == 3
    assert len(target.read_text().splitlines()) == 2


def test_an_empty_input_has_an_empty_output(tmp_path: Path) -> None:
    assert run(write(tmp_path / "in"), tmp_path / "out") == 0
    assert (tmp_path / "out").read_bytes() == b""


def test_memory_and_packed_files_are_fsspec_s(tmp_path: Path) -> None:
    text = json.dumps(completion("a")) + "\n"
    (tmp_path / "in.gz").write_bytes(gzip.compress(text.encode()))
    target = f"memory://{tmp_path}/out"
    assert main(["batch", "--input", f"file://{tmp_path}/in.gz", "--output", target]) == 0
    with fsspec.open(target) as file:
        assert json.loads(file.read())["custom_id"] == "a"
    memory = fsspec.filesystem("memory")
    memory.rm(str(tmp_path), recursive=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--input"),
        (["--input", "/no/such/file", "--output", "OUT"], "--input /no/such/file"),
        (["--input", "IN", "--output", "nowhere://x"], "nowhere"),
        (["--input", "IN", "--output", "OUT", "--workers", "0"], "0 workers"),
        (
            ["--input", "IN", "--output", "OUT", "--workers", "2", "--executor", "local"],
            "2 workers",
        ),
        (["--input", "IN", "--output", "OUT", "--max-errors", "-1"], "--max-errors"),
        (["--input", "IN", "--output", "OUT", "--model", "/no/model"], "/no/model"),
        (["--input", "IN", "--output", "IN/out"], "--output: "),
        (["--input", "IN", "--output", "IN"], "is the input"),
    ],
)
def test_what_cannot_be_begun_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    names = {"IN": str(write(tmp_path / "in", completion("a"))), "OUT": str(tmp_path / "out")}
    assert (
        batch_job.main(
            [flag.replace("IN", names["IN"]).replace("OUT", names["OUT"]) for flag in flags]
        )
        == 2
    )
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_output_of_another_input_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    assert run(write(tmp_path / "in", "{", completion("a")), target, "--max-errors", "0") == 4
    assert run(write(tmp_path / "in", completion("b")), target) == 2
    assert "input_sha256 was" in capsys.readouterr().err
    assert run(write(tmp_path / "in", "{", completion("a")), target) == 3
    assert run(write(tmp_path / "in", completion("b")), target) == 2
    assert "of another batch" in capsys.readouterr().err
    assert not (tmp_path / "out.parts").exists()


def test_a_disk_that_fails_is_a_code_and_the_job_goes_on_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in", "{", completion("a"), completion("b"))
    target = tmp_path / "out"

    def append(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(LocalStorage, "append", append)
        assert run(source, target) == 1
    assert "error: no space left" in capsys.readouterr().err
    assert json.loads((tmp_path / "out.summary.json").read_text())["state"] == "failed"
    assert run(source, target) == 3


def test_a_submitted_job_is_warned_of_an_output_that_will_not_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in", completion("a"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    local = ("--executor", "local")
    assert main(["batch", "--input", str(source), "--output", "out", *local]) == 0
    assert "warning: --output out is in this job's copy" in capsys.readouterr().err
    assert run(source, tmp_path / "out", *local) == 0
    assert "warning" not in capsys.readouterr().err


def test_an_input_that_changes_while_it_is_read_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = write(tmp_path / "in", completion("a")), tmp_path / "out"
    read = LocalStorage.chunks

    def once(self: LocalStorage, name: str = "") -> Iterator[bytes]:
        yield from read(self, name)
        write(source, completion("b"))

    monkeypatch.setattr(LocalStorage, "chunks", once)
    assert run(source, target) == 1
    assert "the input has changed" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.summary.json"]


def test_without_ray_nothing_of_ray_is_loaded(tmp_path: Path) -> None:
    source = write(tmp_path / "in", completion("a"))
    code = (
        "import sys; from cluster.cli import main;"
        f"main(['batch', '--input', {str(source)!r}, '--output', {str(tmp_path / 'out')!r}]);"
        "print(sorted({'ray', 'grpc', 'starlette', 'fastapi'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout.splitlines()[-1] == "[]"
