"""What a user may ask of one generation."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from protocol.rng import MAX_SEED

LoopCount = Annotated[int, Field(strict=True, ge=1)]
TokenId = Annotated[int, Field(strict=True, ge=0)]

MAX_TEMPERATURE = 1e6
MAX_TOP_K = 2**31 - 1
MAX_PRIORITY = 2**31 - 1
"""Bounds that the wire and a device's float32 and int32 tables can hold."""


class SamplingParams(BaseModel):
    """Sampling and looping parameters of one request; immutable and checked on construction.

    temperature 0 is greedy. `top_k` -1 keeps every token. `seed` None draws one from the system.
    `max_loops` None means all loops of the model, `exit_threshold` None the model's own threshold;
    1.0 never leaves early. A stop token stays in the output's ids. `priority` counts only where the
    scheduler orders by it; lower is sooner. With `forced_depths`, output i leaves after
    forced_depths[i] loops: the loop bounds and the gate are not consulted. The first is a full
    pass, as it always is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_tokens: Annotated[int, Field(strict=True, ge=1)] = 16
    temperature: Annotated[float, Field(strict=True, ge=0.0, le=MAX_TEMPERATURE)] = 0.0
    top_p: Annotated[float, Field(strict=True, gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(strict=True, ge=-1, le=MAX_TOP_K)] = -1
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_SEED)] | None = None
    min_loops: Annotated[int, Field(strict=True, ge=1)] = 1
    max_loops: Annotated[int, Field(strict=True, ge=1)] | None = None
    exit_threshold: Annotated[float, Field(strict=True, ge=0.0, le=1.0)] | None = None
    ignore_eos: Annotated[bool, Field(strict=True)] = False
    stop_token_ids: tuple[TokenId, ...] = ()
    priority: Annotated[int, Field(strict=True, ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    forced_depths: tuple[LoopCount, ...] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k == 0:
            raise ValueError("top_k is -1 (keep every token) or at least 1")
        if self.max_loops is not None and self.max_loops < self.min_loops:
            raise ValueError(f"max_loops {self.max_loops} is below min_loops {self.min_loops}")
        return self
