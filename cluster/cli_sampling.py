"""The flags of `loopmesh generate` that say how to sample: one for each of SamplingParams' fields.

Here a value is only read; whether it is a good one is for SamplingParams to say.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.stop_strings import MAX_STOP_STRINGS, checked_stop
from protocol.sampling import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable


def numbers(text: str) -> tuple[int, ...]:
    """Integers with commas between them. Example: "4,2,3" -> (4, 2, 3)."""
    try:
        return tuple(int(entry) for entry in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is no list of integers such as 4,2,3"
        ) from None


def biases(text: str) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias. Example: "14:-3,261:1.5" -> ((14, -3.0), (261, 1.5))."""
    try:
        pairs = [entry.split(":") for entry in text.split(",")]
        return tuple((int(token), float(bias)) for token, bias in pairs)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is no list of TOKEN:BIAS such as 14:-3,261:1.5"
        ) from None


@dataclass(frozen=True, slots=True)
class Flag:
    """A field of SamplingParams on the command line; without `read` it is a switch."""

    name: str
    read: Callable[[str], object] | None
    help: str
    metavar: str = "N"


FLAGS = (
    Flag("n", int, "answers to the prompt, one after the other (default 1)"),
    Flag("max_tokens", int, "most tokens to generate (default 16)"),
    Flag("min_tokens", int, "sample nothing that would end the text before so many tokens"),
    Flag("min_loops", int, "loops that every token takes at least (default 1)"),
    Flag("max_loops", int, "loops that a token takes at most (default: all of the model)"),
    Flag("exit_threshold", float, "leave once the gate is this sure, 0 to 1; 1 never leaves early"),
    Flag("forced_depths", numbers, "loops of each token, as an answer's exit_depths", "N,N,..."),
    Flag("temperature", float, "0 is greedy (default)"),
    Flag("top_p", float, "keep the most likely tokens that add up to this (default 1)"),
    Flag("top_k", int, "keep this many of the most likely tokens (default -1: all)"),
    Flag("seed", int, "same seed, same text (default: a new one each time)"),
    Flag("repetition_penalty", float, "above 1 repeats less of prompt and text (default 1)"),
    Flag("presence_penalty", float, "lowers tokens that the text has, -2 to 2 (default 0)"),
    Flag("frequency_penalty", float, "the same for each time that it has them, -2 to 2"),
    Flag("logit_bias", biases, "raises or lowers tokens, -100 to 100", "TOKEN:BIAS,..."),
    Flag("stop_token_ids", numbers, "end after any of these tokens", "N,N,..."),
    Flag("ignore_eos", None, "go on after an end token"),
    Flag("priority", int, "lower is sooner, where the scheduler goes by it (default 0)"),
    Flag("logprobs", int, f"tell log probabilities and N alternatives, 0 to {MAX_LOGPROBS}"),
)


def flag_name(field: str) -> str:
    """A field as it is written on the command line. Example: max_tokens -> --max-tokens."""
    return "--" + field.replace("_", "-")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of FLAGS, and --stop."""
    for flag in FLAGS:
        how: dict[str, Any] = {"action": "store_true", "default": None}
        if flag.read is not None:
            how = {"type": flag.read, "metavar": flag.metavar}
        parser.add_argument(flag_name(flag.name), help=flag.help, **how)
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help=f"end before this text; may be given up to {MAX_STOP_STRINGS} times",
    )


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """What the flags ask for. Raises pydantic's ValidationError."""
    given = {flag.name: getattr(arguments, flag.name) for flag in FLAGS}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def stop_strings(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The texts that end the answer. Raises RequestError."""
    return checked_stop(arguments.stop)
