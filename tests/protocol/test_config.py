"""Settings: one place, frozen, unknown keys and contradictions refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest
from pydantic import BaseModel, ValidationError

from protocol.config import ApiSettings, Configuration, WorkerSettings, parse_configuration
from protocol.errors import ConfigError
from protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_nothing_given_is_the_default() -> None:
    assert parse_configuration({}) == Configuration()
    assert parse_configuration({}).worker.model.model == "ouro-tiny"


def test_a_configuration_survives_json() -> None:
    configuration = parse_configuration(
        {"worker": {"cache": {"num_blocks": 9}}, "cluster": {"plan_port_range": [5000, 5001]}}
    )
    assert Configuration.model_validate_json(configuration.model_dump_json()) == configuration


def test_the_largest_step_suits_the_device_unless_it_is_set() -> None:
    default = WorkerSettings()
    assert (default.step_tokens("cpu"), default.step_tokens("cuda")) == (256, 2048)
    assert WorkerSettings(num_slots=300).step_tokens("cpu") == 300
    assert WorkerSettings(max_step_tokens=64).step_tokens("cuda") == 64


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"wroker": {}}, r"wroker: Extra inputs"),
        ({"worker": {"num_slots": 0}}, r"worker\.num_slots: .*greater than or equal to 1"),
        ({"worker": {"num_slots": "8"}}, r"worker\.num_slots: .*integer"),
        ({"worker": {"num_slots": 64, "max_step_tokens": 8}}, r"below num_slots 64"),
        ({"worker": {"device": "tpu"}}, r"worker\.device"),
        ({"worker": {"snapshot_bytes": -1}}, r"worker\.snapshot_bytes: .*greater than or equal"),
        ({"worker": {"model": {"dtype": "int4"}}}, r"worker\.model\.dtype"),
        ({"worker": {"cache": {"num_blocks": 1, "kv_bytes": 1}}}, "not both"),
        ({"worker": {"cache": {"gpu_memory_utilization": 0.0}}}, r"gpu_memory_ut.*greater than 0"),
        ({"worker": {"cache": {"gpu_memory_utilization": 1.1}}}, r"gpu_memory_ut.*equal to 1"),
        ({"worker": {"cache": {"graph_reserve_bytes": -1}}}, r"graph_reserve_b.*equal to 0"),
        ({"cluster": {"plan_port_range": [9, 8]}}, "is empty"),
        ({"cluster": {"beat_interval": 5, "silence_timeout": 6}}, "four beat_intervals"),
        ({"cluster": {"plan_timeout": float("inf")}}, r"cluster\.plan_timeout"),
        ({"scheduler": {"policy": "lifo"}}, r"scheduler\.policy"),
        ({"scheduler": {"admission_scan_limit": 0}}, r"scheduler\.admission_scan_limit"),
        ({"scheduler": {"max_admission_bypasses": -1}}, r"scheduler\.max_admission_bypasses"),
        ({"scheduler": {"kv_watermark": 1.0}}, r"scheduler\.kv_watermark"),
        ({"scheduler": {"max_running": 0}}, r"scheduler\.max_running"),
        ({"scheduler": {"reservation": "lazy"}}, r"scheduler\.reservation"),
        ({"scheduler": {"mode": "fill"}}, r"scheduler\.mode"),
        ({"scheduler": {"min_coda_batch": 0}}, r"scheduler\.min_coda_batch"),
        ({"scheduler": {"max_step_tokens": 0}}, r"scheduler\.max_step_tokens"),
        ({"scheduler": {"exit_policy": "trace"}}, r"scheduler\.exit_policy"),
        ({"scheduler": {"placement": "random"}}, r"scheduler\.placement"),
        ({"scheduler": {"prefix_caching": 1}}, r"scheduler\.prefix_caching: .*boolean"),
        ({"scheduler": {"preemption": True}}, 'set policy "priority" as well'),
        ({"scheduler": {"plans_in_flight": 0}}, r"scheduler\.plans_in_flight: .*equal to 1"),
        ({"scheduler": {"affinity_window": -1}}, r"scheduler\.affinity_window: .*equal to 0"),
        ([1], "configuration"),
    ],
)
def test_a_wrong_setting_is_named(values: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_configuration(values)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Configuration().worker.num_slots = 3


def models(settings: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The settings class and those inside it."""
    yield settings
    for field in settings.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from models(field.annotation)


def kind_of(annotation: object) -> object:
    """What a field holds when it is not None, without its bounds."""
    inner = [arg for arg in get_args(annotation) if arg is not type(None)]
    return kind_of(inner[0]) if inner else annotation


NUMBERS = [
    (settings, name, kind_of(field.annotation))
    for settings in models(Configuration)
    for name, field in settings.model_fields.items()
    if kind_of(field.annotation) in (int, float, bool) and name != "plan_port_range"
]


@pytest.mark.parametrize(("settings", "name", "kind"), NUMBERS)
def test_a_number_is_a_number_of_its_kind(settings: type[BaseModel], name: str, kind: type) -> None:
    wrong = {int: (True, 1.5, "1"), float: (True, "1", float("nan")), bool: (1, "yes")}
    assert len(NUMBERS) >= 32
    for value in wrong[kind]:
        with pytest.raises(ValidationError, match=name):
            settings.model_validate({name: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "n\n.*greater than or equal to 1"),
        ({"n": 129}, "n\n.*less than or equal to 128"),
        ({"n": True}, "n\n.*valid integer"),
        ({"max_tokens": 0}, "max_tokens\n.*greater than or equal to 1"),
        ({"max_tokens": True}, "max_tokens\n.*valid integer"),
        ({"max_tokens": 1.0}, "max_tokens\n.*valid integer"),
        ({"temperature": -0.1}, "temperature\n.*greater than or equal to 0"),
        ({"temperature": float("nan")}, "temperature\n.*finite number"),
        ({"temperature": "0.5"}, "temperature\n.*valid number"),
        ({"top_p": 0.0}, "top_p\n.*greater than 0"),
        ({"top_p": 1.1}, "top_p\n.*less than or equal to 1"),
        ({"top_k": 0}, r"top_k is -1 \(keep every token\) or at least 1"),
        ({"top_k": -2}, "top_k\n.*greater than or equal to -1"),
        ({"seed": -1}, "seed\n.*greater than or equal to 0"),
        ({"seed": 2**63}, "seed\n.*less than or equal to 9223372036854775807"),
        ({"min_loops": 0}, "min_loops\n.*greater than or equal to 1"),
        ({"min_loops": 3, "max_loops": 2}, "max_loops 2 is below min_loops 3: raise it or lower"),
        ({"exit_threshold": 1.5}, "exit_threshold\n.*less than or equal to 1"),
        ({"exit_threshold": float("inf")}, "exit_threshold\n"),
        ({"ignore_eos": 1}, "ignore_eos\n.*valid boolean"),
        ({"stop_token_ids": (-1,)}, r"stop_token_ids\.0\n.*greater than or equal to 0"),
        ({"stop_token_ids": (True,)}, r"stop_token_ids\.0\n.*valid integer"),
        ({"priority": 0.5}, "priority\n.*valid integer"),
        ({"priority": 2**31}, "priority\n.*less than or equal to 2147483647"),
        ({"forced_depths": (4, 0)}, r"forced_depths\.1\n.*greater than or equal to 1"),
        ({"forced_depths": (4, 1.0)}, r"forced_depths\.1\n.*valid integer"),
        ({"repetition_penalty": 0.0}, "repetition_penalty\n.*greater than or equal to 0.000001"),
        ({"repetition_penalty": -1.0}, "repetition_penalty\n.*greater than or equal to 0.000001"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty\n"),
        ({"presence_penalty": 2.5}, "presence_penalty\n.*less than or equal to 2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty\n.*greater than or equal to -2"),
        ({"logit_bias": {5: 101.0}}, r"logit_bias\.0\.1\n.*less than or equal to 100"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "token 5 appears twice: give it one bias"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias\n.*at most 300 items"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens 9 exceeds max_tokens 3: lower it or"),
        ({"logprobs": -1}, "logprobs\n.*greater than or equal to 0"),
        ({"logprobs": 21}, "logprobs\n.*less than or equal to 20"),
        ({"logprobs": True}, "logprobs\n.*valid integer"),
        ({"surprise": 1}, "surprise\n.*Extra inputs are not permitted"),
    ],
)
def test_a_wrong_sampling_parameter_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SamplingParams.model_validate(values)


def test_sampling_parameters_are_normal_and_hashable() -> None:
    given = {"stop_token_ids": [3, 5], "logit_bias": {7: 1}, "forced_depths": [4] * 16}
    params = SamplingParams.model_validate(given)
    assert params.stop_token_ids == (3, 5)
    assert params.logit_bias == ((7, 1.0),)
    assert hash(params) == hash(SamplingParams.model_validate(given))
    with pytest.raises(ValidationError, match="frozen"):
        params.seed = 3


def test_integers_are_good_floats() -> None:
    assert SamplingParams.model_validate({"temperature": 1, "top_p": 1}).temperature == 1.0


def test_the_served_name_is_the_model_s_unless_there_is_another() -> None:
    assert Configuration().model_name == "ouro-tiny"
    assert Configuration(api=ApiSettings(served_model_name="tiny")).model_name == "tiny"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"autoscaling": {"enabled": True, "min_engines": 5}},
            "min_engines 5 is above max_engines 4: raise the latter",
        ),
        (
            {"autoscaling": {"enabled": True, "min_ingresses": 3}},
            "min_ingresses 3 is above max_ingresses 2",
        ),
        (
            {"autoscaling": {"report_interval": 5.0, "stale_after": 14.0}},
            "stale_after 14 is below three report_intervals of 5",
        ),
        (
            {"autoscaling": {"enabled": True, "target_requests": 256}},
            "autoscaling.target_requests 256 is not below api.max_requests 256",
        ),
    ],
)
def test_autoscaling_that_could_not_work_is_named(values: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_configuration(values)


def test_without_autoscaling_its_bounds_say_nothing() -> None:
    fixed = parse_configuration({"autoscaling": {"min_engines": 6, "target_requests": 1000}})
    assert fixed.autoscaling.min_engines == 6
