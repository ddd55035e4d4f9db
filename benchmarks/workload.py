"""What is asked of an engine and of what it is compared with: the same requests, seeded."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from protocol.sampling import SamplingParams
from worker.models.registry import EMBEDDED_DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FULL_DEPTH = 4

Range = tuple[int, int]
"""The least and the most of something, both included."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt, how many outputs, and, for random weights, their exit depths."""

    prompt: tuple[int, ...]
    outputs: int
    depths: tuple[int, ...] = ()

    def params(self, threshold: float) -> SamplingParams:
        """Greedy, and exactly so many outputs."""
        return SamplingParams(
            max_tokens=self.outputs,
            exit_threshold=threshold,
            forced_depths=self.depths or None,
            ignore_eos=True,
            seed=0,
        )


def held_out() -> Mapping[str, tuple[int, ...]]:
    """The token ids that ouro-tiny was not trained on, by where they come from."""
    # Imported late: random requests do without.
    import numpy as np

    with np.load(EMBEDDED_DIRECTORY / "heldout.npz") as sources:
        return {name: tuple(map(int, ids)) for name, ids in sources.items()}


def held_out_asks(count: int, prompts: Range, outputs: Range, seed: int = 0) -> list[Ask]:
    """Requests whose prompts are pieces of held-out text, of mixed lengths, sources in turn."""
    pick = random.Random(seed)
    sources = list(held_out().values())
    asks = []
    for index in range(count):
        text = sources[index % len(sources)]
        length = pick.randint(*prompts)
        start = pick.randrange(len(text) - length)
        asks.append(Ask(text[start : start + length], pick.randint(*outputs)))
    return asks


def random_asks(
    count: int,
    prompt: int,
    outputs: int,
    depths: Sequence[int],
    vocab_size: int,
    *,
    concurrency: int = 1,
    seed: int = 0,
) -> list[Ask]:
    """Requests of random tokens, whose outputs leave after shuffled `depths`, over and over.

    The first `concurrency` of them start together, so they have fewer outputs, each a bit more than
    the one before: the others then come one by one.
    """
    pick = random.Random(seed)
    asks = []
    for number in range(count):
        many = -(-outputs * min(number + 1, concurrency) // concurrency)
        tokens = tuple(pick.randrange(1, vocab_size) for _ in range(prompt))
        tens = (pick.sample(depths, len(depths)) for _ in range(many))
        trace = (FULL_DEPTH, *chain.from_iterable(tens))[:many]
        asks.append(Ask(tokens, many, trace))
    return asks
