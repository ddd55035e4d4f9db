"""What a request must fulfil before the engine takes it; nothing here changes anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import CapacityError, ConfigError, RequestError
from protocol.exit_rule import ending_ids
from protocol.identity import MAX_REQUEST_ID_LENGTH
from protocol.rng import MAX_SEED
from protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from protocol.profile import ModelProfile, WorkerProfile
    from scheduler.lane import Lane


def check_request_id(request_id: object) -> None:
    """Raise RequestError unless the id is text of an allowed length."""
    if type(request_id) is not str or not 0 < len(request_id) <= MAX_REQUEST_ID_LENGTH:
        limit = MAX_REQUEST_ID_LENGTH
        raise RequestError(
            f"request id {request_id!r:.80} is not a text of 1 to {limit} characters"
        )


def check_tenant(tenant: object) -> None:
    """Raise RequestError unless the tenant is a text; the empty one is the tenant of all others."""
    if type(tenant) is not str:
        raise RequestError(f"tenant {tenant!r:.80} is not a text")


def checked_prompt(prompt: Sequence[int], model: ModelProfile) -> tuple[int, ...]:
    """The prompt's token ids. Raises RequestError unless each is an int of the vocabulary."""
    try:
        tokens = tuple(prompt)
    except TypeError as error:
        raise RequestError(f"the prompt is {prompt!r:.80}, not a list of token ids") from error
    if not tokens:
        raise RequestError("the prompt is empty: send at least one token")
    for index, token in enumerate(tokens):
        # bool is a subclass of int, and True would silently become token 1.
        if type(token) is not int or not 0 <= token < model.vocab_size:
            raise RequestError(
                f"prompt token {index} is {token!r:.80}, not an int in [0, {model.vocab_size})"
            )
    return tokens


def check_params(params: SamplingParams, seed: int, model: ModelProfile) -> None:
    """Raise RequestError for bounds that the model does not have, or a seed out of range."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"the parameters are {params!r:.80}: give SamplingParams(...)")
    for name, loops in (("min_loops", params.min_loops), ("max_loops", params.max_loops)):
        if loops is not None and loops > model.max_loops:
            raise RequestError(
                f"{name} {loops} exceeds the {model.max_loops} loops of {model.name}; "
                f"ask for at most {model.max_loops}"
            )
    check_forced_depths(params, model)
    for token in params.stop_token_ids:
        if token >= model.vocab_size:
            raise RequestError(f"stop token {token} is not in [0, {model.vocab_size})")
    for token, _ in params.logit_bias:
        if token >= model.vocab_size:
            raise RequestError(f"logit_bias: token {token} is not in [0, {model.vocab_size})")
    ending = ending_ids(params.stop_token_ids, model.eos_ids, ignore_eos=params.ignore_eos)
    if params.min_tokens and len(ending) >= model.vocab_size:
        raise RequestError(
            f"min_tokens {params.min_tokens}: every token of {model.name} ends this request; "
            "leave a token out of stop_token_ids"
        )
    if type(seed) is not int or not 0 <= seed <= MAX_SEED:
        raise RequestError(f"seed {seed!r:.80} is not an int in [0, 2**63)")


def check_forced_depths(params: SamplingParams, model: ModelProfile) -> None:
    """Raise RequestError unless each output has a depth that the model can run it at."""
    depths, full = params.forced_depths, model.max_loops
    if depths is None:
        return
    if len(depths) < params.max_tokens:
        raise RequestError(
            f"forced_depths has {len(depths)} entries for max_tokens {params.max_tokens}: "
            "give one for each output"
        )
    if depths[0] != full:
        raise RequestError(
            f"forced_depths starts with {depths[0]}; the first output of {model.name} comes from "
            f"the prompt, which takes {full} loops"
        )
    for index, depth in enumerate(depths):
        if not 1 <= depth <= full:
            raise RequestError(f"forced_depths[{index}] is {depth}, not in [1, {full}]")


def check_room(
    num_prompt: int, params: SamplingParams, model: ModelProfile, lanes: Collection[Lane]
) -> None:
    """Raise RequestError or CapacityError if the request could never run, even alone."""
    num_tokens = num_prompt + params.max_tokens - 1
    if num_tokens > model.max_positions:
        raise RequestError(
            f"{num_prompt} prompt tokens and max_tokens {params.max_tokens} need {num_tokens} "
            f"positions, {model.name} has {model.max_positions}: shorten the prompt or lower "
            f"max_tokens to at most {max(model.max_positions - num_prompt + 1, 0)}"
        )
    if any(could_hold(lane, num_tokens, num_prompt, params.n) for lane in lanes):
        return
    wide = [lane for lane in lanes if lane.num_slots >= params.n]
    if not wide:
        raise CapacityError(
            f"n {params.n} takes as many slots, the largest worker has "
            f"{max(lane.num_slots for lane in lanes)}: ask for fewer choices or give the worker "
            "more slots"
        )
    lane = max(wide, key=lambda lane: lane.kv.total_blocks)
    choices = f", each of {params.n} choices," if params.n > 1 else ""
    raise CapacityError(
        f"{num_prompt} prompt tokens and max_tokens {params.max_tokens}{choices} need "
        f"{lane.blocks_needed(num_tokens, num_prompt, params.n)} KV blocks, the largest worker has "
        f"{lane.kv.total_blocks}: shorten the request or give the worker more blocks"
    )


def could_hold(lane: Lane, num_tokens: int, num_prompt: int, choices: int) -> bool:
    """Whether the lane, were it empty, had slots and blocks for so many choices of a prompt."""
    needed = lane.blocks_needed(num_tokens, num_prompt, choices)
    return choices <= lane.num_slots and needed <= lane.kv.total_blocks


def check_profile(lane: str, profile: WorkerProfile, others: Iterable[Lane]) -> None:
    """Raise ConfigError for a lane of another model or KV layout than the others."""
    for other in others:
        if other.profile.model.fingerprint != profile.model.fingerprint:
            raise ConfigError(
                f"lane {lane} serves model {profile.model.fingerprint}, lane {other.name} "
                f"{other.profile.model.fingerprint}: give every worker the same model"
            )
        if other.profile.layout is not profile.layout:
            raise ConfigError(
                f"lane {lane} keeps KV in the layout {profile.layout.value}, lane {other.name} "
                f"in {other.profile.layout.value}: give every worker the same"
            )
