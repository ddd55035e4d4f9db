"""Settings: one place, frozen, unknown keys and contradictions refused by name."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from protocol.config import Configuration, parse_configuration
from protocol.errors import ConfigError
from protocol.sampling import SamplingParams


def test_nothing_given_is_the_default() -> None:
    assert parse_configuration({}) == Configuration()
    assert parse_configuration({}).worker.model.model == "ouro-tiny"


def test_a_configuration_survives_json() -> None:
    configuration = parse_configuration(
        {"worker": {"cache": {"num_blocks": 9}}, "cluster": {"plan_port_range": [5000, 5001]}}
    )
    assert Configuration.model_validate_json(configuration.model_dump_json()) == configuration


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


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 0},
        {"max_tokens": True},
        {"max_tokens": 1.0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "0.5"},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"top_k": -2},
        {"seed": -1},
        {"seed": 2**63},
        {"min_loops": 0},
        {"min_loops": 3, "max_loops": 2},
        {"exit_threshold": 1.5},
        {"ignore_eos": 1},
        {"stop_token_ids": (-1,)},
        {"priority": 0.5},
        {"forced_depths": (4, 0)},
        {"forced_depths": (4, 1.0)},
        {"priority": 2**31},
        {"surprise": 1},
    ],
)
def test_wrong_sampling_parameters_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SamplingParams.model_validate(values)


def test_integers_are_good_floats() -> None:
    assert SamplingParams.model_validate({"temperature": 1, "top_p": 1}).temperature == 1.0


def test_a_biased_token_is_named_once() -> None:
    assert SamplingParams.model_validate({"logit_bias": {5: 1.0}}).logit_bias == ((5, 1.0),)
    for wrong in ({"logit_bias": ((5, 1.0), (5, 2.0))}, {"min_tokens": 9, "max_tokens": 3}):
        with pytest.raises(ValidationError):
            SamplingParams.model_validate(wrong)
