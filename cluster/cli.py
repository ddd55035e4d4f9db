"""loopmesh: the command line, and the only place that reads environment variables."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import ValidationError

from cluster.cli_sampling import add_sampling_flags, flag_name, sampling_params, stop_strings
from protocol.config import Configuration, parse_configuration
from protocol.errors import ConfigError, LoopmeshError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.generation import Completion
    from cluster.tokenizer import Tokenizer
    from cluster.workers import ExecutorKind

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
CONFIG_VARIABLE = "LOOPMESH_CONFIG"
RAY_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it for what `ray job submit` starts, whose workers then belong on that cluster."""

USER_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


class UsageError(Exception):
    """A wrong flag or a wrong value of one."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. User errors are one line on standard error."""
    try:
        arguments = build_parser().parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except SystemExit as stop:  # --help and --version
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left: let nothing more be written, also not when Python closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except ModuleNotFoundError as error:
        print(f"loopmesh: error: {error}: see `loopmesh doctor`", file=sys.stderr)
        return USER_ERROR
    except (UsageError, LoopmeshError, ValidationError) as error:
        print(f"loopmesh: error: {_one_line(error)}", file=sys.stderr)
        return USER_ERROR
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run` to its function."""
    parser = _Parser(prog="loopmesh", description="Serve looped language models.")
    parser.add_argument("--version", action="version", version=f"loopmesh {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_serve(commands)
    _add_batch(commands)
    demo = commands.add_parser("demo", help="serve the shipped model on a local cluster and use it")
    demo.set_defaults(run=_demo)
    status = commands.add_parser("status", help="show engines, lanes, debt, and who waits for room")
    status.add_argument("--address", help="the cluster's (default: $RAY_ADDRESS, or one here)")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.set_defaults(run=_status)
    doctor = commands.add_parser("doctor", help="check this machine and say what to mend")
    doctor.add_argument("--json", action="store_true", help="print one JSON list")
    doctor.add_argument("--host", default=DEFAULT_HOST, help=argparse.SUPPRESS)
    doctor.add_argument("--port", type=_port, default=DEFAULT_PORT, help="the endpoint's port")
    _add_config(doctor)
    doctor.set_defaults(run=_doctor)
    return parser


def _add_generate(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("generate", help="continue one prompt")
    parser.add_argument("prompt", help="the text to continue")
    add_sampling_flags(parser)
    parser.add_argument("--executor", choices=("local", "ray"), default="local")
    parser.add_argument("--workers", type=int, default=1, help="workers on Ray (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_model(parser)
    _add_config(parser)
    parser.set_defaults(run=_generate)


def _add_serve(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("serve", help="serve the OpenAI completions API on Ray")
    parser.add_argument("--host", default=DEFAULT_HOST)
    parser.add_argument("--port", type=_port, default=DEFAULT_PORT)
    parser.add_argument("--workers", type=int, help="number of workers")
    _add_model(parser)
    _add_config(parser)
    parser.set_defaults(run=_serve)


def _add_batch(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("batch", help="answer a file of requests in OpenAI's batch format")
    parser.add_argument("--input", required=True, metavar="URI", help="JSON lines to answer")
    parser.add_argument("--output", required=True, metavar="URI", help="where the answers go")
    parser.add_argument("--executor", choices=("local", "ray"), help="default: as --workers says")
    parser.add_argument("--workers", type=int, help="workers on Ray (default: one, without Ray)")
    parser.add_argument(
        "--max-errors", type=_count, metavar="N", help="stop once more lines than N have failed"
    )
    _add_model(parser)
    _add_config(parser)
    parser.set_defaults(run=_batch)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help='"ouro-tiny" (shipped), a directory or a hub id')
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--dtype", help="float32 or bfloat16")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help=f"JSON configuration (default: ${CONFIG_VARIABLE})"
    )


def _generate(arguments: argparse.Namespace) -> int:
    params, stop = sampling_params(arguments), stop_strings(arguments)
    if params.logprobs is not None and not arguments.json:
        raise UsageError("--logprobs: plain text has no place for them, add --json")
    configuration = _configuration(arguments)
    # Imported late: torch takes seconds to import, and --help and wrong flags need none of it.
    from cluster.api_types import Usage
    from cluster.llm import LLM
    from cluster.terminal import TextWriter, progress, show_choices, show_stream, summary

    progress(f"loading {configuration.worker.model.model}", sys.stderr)
    kind, workers = arguments.executor, arguments.workers
    with LLM(executor=kind, workers=workers, configuration=configuration) as llm:
        if arguments.json:
            (answer,) = llm.generate(arguments.prompt, params, stop=stop)
            told = [_as_json(choice, llm.tokenizer) for choice in answer.choices]
            body = told[0] if params.n == 1 else {"choices": told}
            print(json.dumps(body | {"usage": Usage.of(answer).model_dump()}))
            return 0
        coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        writer = TextWriter(sys.stdout, llm.profile.model.max_loops, coloured=coloured)
        started = time.monotonic()
        show = show_stream if params.n == 1 else show_choices
        answer = show(llm.stream(arguments.prompt, params, stop=stop), writer)
        progress(summary(answer, time.monotonic() - started), sys.stderr)
    return 0


def _as_json(choice: Completion, tokenizer: Tokenizer) -> dict[str, object]:
    from cluster.api_logprobs import ChoiceLogprobs

    logprobs = ChoiceLogprobs.of(choice, tokenizer)
    return {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "exit_depths": choice.exit_depths,
        "finish_reason": choice.finish_reason.value,
        "logprobs": None if logprobs is None else logprobs.model_dump(),
    }


def _serve(arguments: argparse.Namespace) -> int:
    configuration = _configuration(arguments)
    from cluster.server import run_server

    return run_server(configuration, arguments.host, arguments.port)


def _batch(arguments: argparse.Namespace) -> int:
    configuration = _configuration(arguments)
    from cluster.batch import BatchTask, run_batch

    is_submitted = RAY_JOB_VARIABLE in os.environ
    on_ray = arguments.workers is not None or is_submitted
    executor: ExecutorKind = arguments.executor or ("ray" if on_ray else "local")
    workers = configuration.cluster.num_workers if executor == "ray" else 1
    task = BatchTask(
        input=arguments.input,
        output=arguments.output,
        executor=executor,
        workers=workers if arguments.workers is None else arguments.workers,
        max_errors=arguments.max_errors,
        is_submitted=is_submitted,
    )
    return run_batch(task, configuration)


def _demo(_: argparse.Namespace) -> int:
    from cluster.demo import run_demo

    return run_demo()


def _status(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from cluster.status import joined_cluster, read_status, render

    with joined_cluster(arguments.address or os.environ.get("RAY_ADDRESS") or "auto"):
        status = read_status(time.time())
    print(json.dumps(asdict(status)) if arguments.json else render(status))
    return 1 if status.waiting else 0


def _doctor(arguments: argparse.Namespace) -> int:
    configuration = _configuration(arguments)
    from dataclasses import asdict

    from cluster.doctor import render, run_checks

    checks = run_checks(configuration, os.environ, arguments.host, arguments.port)
    print(json.dumps([asdict(check) for check in checks]) if arguments.json else render(checks))
    return 0 if all(check.ok for check in checks) else 1


def _configuration(arguments: argparse.Namespace) -> Configuration:
    """The configuration file, or the defaults, with the command's flags laid over it."""
    path = arguments.config or os.environ.get(CONFIG_VARIABLE)
    values: dict[str, Any] = _read_json(Path(path)) if path else {}
    base = parse_configuration(values).model_dump()
    for name in ("model", "revision", "dtype"):
        if (value := getattr(arguments, name, None)) is not None:
            base["worker"]["model"][name] = value
    if (device := getattr(arguments, "device", None)) is not None:
        base["worker"]["device"] = device
    if arguments.run is _serve and arguments.workers is not None:
        base["cluster"]["num_workers"] = arguments.workers
    return parse_configuration(base)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"configuration file {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"configuration file {path}: a JSON object is needed")
    return values


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number: give one from 0")
    return int(text)


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else 0
    if not 1 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: give a number from 1 to 65535")
    return port


def _one_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        parts = []
        for item in error.errors():
            where = f"{flag_name(str(item['loc'][0]))}: " if item["loc"] else ""
            parts.append(where + item["msg"].removeprefix("Value error, "))
        return "; ".join(parts)
    return " ".join(str(error).split())


def _version() -> str:
    """The version of this code: a checkout's own, which may not be installed, or the metadata's."""
    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    if project.exists():
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    try:
        return version("loopmesh")
    except PackageNotFoundError:
        return "of unknown version"


if __name__ == "__main__":
    sys.exit(main())
