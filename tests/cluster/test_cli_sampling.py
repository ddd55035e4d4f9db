"""Every field of SamplingParams has its flag, and every flag reaches the engine."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import pytest

from cluster.cli import main
from cluster.cli_sampling import (
    FLAGS,
    add_sampling_flags,
    biases,
    numbers,
    sampling_params,
    stop_strings,
)
from protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

EVERYTHING: dict[str, Any] = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 5,
    "seed": 9,
    "min_loops": 2,
    "max_loops": 3,
    "exit_threshold": 0.25,
    "ignore_eos": True,
    "stop_token_ids": (7, 8),
    "priority": -4,
    "forced_depths": (4, 1, 2),
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 1.0,
    "logit_bias": ((5, -1.5), (6, 2.0)),
    "min_tokens": 2,
    "logprobs": 0,
    "n": 2,
}


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser)
    return parser.parse_args(argv)


def written(value: object) -> list[str]:
    """A value as it is written behind its flag."""
    match value:
        case True:
            return []
        case tuple():
            entries = (
                ":".join(map(str, entry)) if isinstance(entry, tuple) else str(entry)
                for entry in value
            )
            return [",".join(entries)]
        case _:
            return [str(value)]


def test_each_parameter_has_its_flag() -> None:
    names = [flag.name for flag in FLAGS]
    assert set(names) == set(SamplingParams.model_fields)
    assert len(set(names)) == len(names)
    argv: list[str] = []
    for name, value in EVERYTHING.items():
        argv += ["--" + name.replace("_", "-"), *written(value)]
    assert sampling_params(parse(*argv)) == SamplingParams(**EVERYTHING)
    plain = SamplingParams()
    changed = {name for name in names if EVERYTHING[name] != getattr(plain, name)}
    assert changed == set(names), "each value must differ from its default"


def test_without_flags_it_is_the_default() -> None:
    assert sampling_params(parse()) == SamplingParams()
    assert stop_strings(parse()) == ()


def test_stop_strings_add_up() -> None:
    assert stop_strings(parse("--stop", "a b", "--stop", "c")) == ("a b", "c")


def test_lists_are_read_with_commas() -> None:
    assert numbers("4, 2,3") == (4, 2, 3)
    assert biases("5:-1,6: 2.5") == ((5, -1.0), (6, 2.5))
    for text in ("", "5", "5:", ":1", "5:1:2", "5:1,", "x:1"):
        with pytest.raises(argparse.ArgumentTypeError, match="TOKEN:BIAS"):
            biases(text)
    for text in ("", "1,", "1.5", "[1]"):
        with pytest.raises(argparse.ArgumentTypeError, match="integers"):
            numbers(text)


def generated(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["generate", "Once upon a time", "--json", *flags]) == 0
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    return body


def test_every_flag_counts(capsys: pytest.CaptureFixture[str]) -> None:
    plain = generated(capsys)
    ids = plain["token_ids"]
    assert plain["finish_reason"] == "length"
    long = ["--max-tokens", "48"]
    repeating = generated(capsys, *long)["token_ids"]
    for bias in ("--repetition-penalty", "--presence-penalty", "--frequency-penalty"):
        assert generated(capsys, *long, bias, "2")["token_ids"] != repeating
    banned = generated(capsys, "--logit-bias", f"{ids[0]}:-100,{ids[1]}:-100")["token_ids"]
    assert not {ids[0], ids[1]} & set(banned)
    stopped = generated(capsys, "--stop-token-ids", str(ids[2]))
    end = ids.index(ids[2]) + 1
    assert (stopped["token_ids"], stopped["finish_reason"]) == (ids[:end], "stop")
    later = generated(capsys, "--stop-token-ids", str(ids[2]), "--min-tokens", "16")
    assert len(later["token_ids"]) == 16
    depths = [4, 1, 2, 3]
    forced = generated(capsys, "--max-tokens", "4", "--forced-depths", "4,1,2,3")
    assert forced["exit_depths"] == depths


def test_stop_strings_end_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    whole = generated(capsys)["text"]
    begin = whole.index("lived")
    body = generated(capsys, "--stop", "nowhere", "--stop", "lived")
    assert (body["text"], body["finish_reason"]) == (whole[:begin], "stop")
    assert main(["generate", "Once upon a time", "--stop", "lived"]) == 0
    assert capsys.readouterr().out == whole[:begin] + "\n"


def test_log_probabilities_are_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    body = generated(capsys, "--max-tokens", "3", "--logprobs", "2")
    told = body["logprobs"]
    assert len(told["token_logprobs"]) == len(told["tokens"]) == 3
    assert [max(top, key=top.__getitem__) for top in told["top_logprobs"]] == told["tokens"]
    assert "".join(told["tokens"]) == body["text"]


def test_priority_reaches_a_scheduler_that_goes_by_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "priority.json"
    path.write_text('{"scheduler": {"policy": "priority"}}')
    flags = ["--config", str(path), "--priority", "-3", "--max-tokens", "2", "--ignore-eos"]
    assert len(generated(capsys, *flags)["token_ids"]) == 2
