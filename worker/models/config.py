"""Configuration of an Ouro checkpoint, read and checked before anything else is."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protocol.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic_core import ErrorDetails

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

# Keys that describe the file, training, or another library's run time, and change no result here.
_IGNORED_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "initializer_range",
        "max_window_layers",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

Count = Annotated[int, Field(strict=True, ge=1)]
TokenId = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0.0)]

_log = logging.getLogger(__name__)


class OuroConfig(BaseModel):
    """Sizes and constants of one Ouro model; keys are those of the published config.json.

    `total_ut_steps` is the number of loops of a full pass. `eos_token_id` holds every id that ends
    a generation; a file may give none, one id or a list.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    model_type: Literal["ouro"]
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Annotated[int, Field(strict=True, ge=2, multiple_of=2)]
    max_position_embeddings: Count
    total_ut_steps: Count
    rope_theta: Positive
    rms_norm_eps: Positive = 1e-6
    early_exit_threshold: Annotated[float, Field(strict=True, ge=0.0, le=1.0)] = 1.0
    hidden_act: Literal["silu"] = "silu"
    tie_word_embeddings: Annotated[bool, Field(strict=True)] = False
    rope_scaling: None = None
    use_sliding_window: Literal[False] = False
    sliding_window: None = None
    layer_types: tuple[Literal["full_attention"], ...] | None = None
    eos_token_id: tuple[TokenId, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Resolve the keys that other keys stand in for."""
        values = dict(values)
        if (rope := values.pop("rope_parameters", None)) is not None:
            values["rope_theta"] = _rope_theta(rope, values.get("rope_theta"))
        if values.get("use_sliding_window") is False:
            values["sliding_window"] = None  # the width is unused while the window is off
        heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
        if values.get("num_key_value_heads") is None:
            values["num_key_value_heads"] = heads
        if values.get("head_dim") is None:
            values["head_dim"] = _default_head_dim(hidden, heads)
        match values.get("eos_token_id"):
            case None:
                values["eos_token_id"] = ()
            case int(token):
                values["eos_token_id"] = (token,)
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if any(token >= self.vocab_size for token in self.eos_token_id):
            raise ValueError(f"eos_token_id {self.eos_token_id} is outside the vocabulary")
        return self


def _rope_theta(rope: object, otherwise: object) -> object:
    """Theta of `rope_parameters`, where newer transformers releases put it."""
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters is {rope!r}, supported is rope_type 'default'")
    if unknown := sorted(rope.keys() - {"rope_type", "rope_theta"}):
        raise ValueError(f"rope_parameters has {unknown}, supported are rope_type and rope_theta")
    return rope.get("rope_theta", otherwise)


def _default_head_dim(hidden: object, heads: object) -> object:
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return None  # the check of those keys says what is wrong
    if hidden % heads:
        raise ValueError(
            f"no head_dim, and hidden_size {hidden} is not a multiple of {heads} heads"
        )
    return hidden // heads


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint. Raises ModelError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent}: no {path.name}; is this a model directory?") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value


def read_config(directory: Path) -> OuroConfig:
    """The configuration of the Ouro checkpoint in `directory`.

    The end-of-sequence ids of generation_config.json, where it has any, replace those of
    config.json: chat variants extend the list only there. A key that is not known is reported as
    a logged warning. Raises ModelError that lists each key whose value cannot be served.
    """
    values = read_json(directory / CONFIG_FILE)
    if (directory / GENERATION_FILE).exists():
        generation = read_json(directory / GENERATION_FILE)
        if generation.get("eos_token_id") not in (None, []):
            values["eos_token_id"] = generation["eos_token_id"]
    known = OuroConfig.model_fields.keys() | _IGNORED_KEYS | {"rope_parameters"}
    if unknown := sorted(values.keys() - known):
        _log.warning("%s: ignoring unknown keys: %s", directory / CONFIG_FILE, ", ".join(unknown))
    try:
        return OuroConfig.model_validate(values)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise ModelError(f"{directory / CONFIG_FILE}: " + "; ".join(lines)) from error


def _explain(item: ErrorDetails) -> str:
    key = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    if not key or item["type"] == "missing":
        return f"{key}: {message}" if key else str(message)
    return f"{key} is {item['input']!r}, which is not supported: {message}"
