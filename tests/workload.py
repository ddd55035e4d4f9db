"""One mixed workload whose every decision has room to spare, for equality tests.

Prompt lengths from 2 to 150 tokens, greedy and seeded sampling, thresholds 0.5, 0.9 and 1.0,
loop bounds, filters, end of sequence and length.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.sampling import SamplingParams

MARGIN = 1e-4
"""No decision of the workload is closer than this; kernels differ by about 1e-6."""

STORY = (
    "One day, a little fox named Pip found a red ball near the old mill. Pip was happy and wanted "
    "to share it with his best friend, a grey rabbit called Hazel. "
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request of the workload."""

    prompt: str
    params: SamplingParams


def _case(prompt: str, seed: int, **params: float) -> Case:
    return Case(prompt, SamplingParams.model_validate({"max_tokens": 20, "seed": seed, **params}))


WORKLOAD = (
    _case("Once upon a time", 1, exit_threshold=0.9),
    _case(STORY * 4, 2, exit_threshold=0.5),
    _case("The capital of France is", 3, exit_threshold=1.0),
    _case(STORY, 14, exit_threshold=0.9, temperature=0.8),
    _case("In the", 16, exit_threshold=0.5, temperature=0.6, max_tokens=28),
    _case(STORY * 2, 6, exit_threshold=1.0, temperature=0.7, max_loops=3),
    _case("The sun was", 7, exit_threshold=0.9, min_loops=2, temperature=1.2, top_k=20),
    _case("She said", 8, exit_threshold=0.5, temperature=0.9, top_p=0.9),
    _case(STORY * 3 + "Then", 9, exit_threshold=0.9, max_tokens=1),
    _case("The end.", 10, exit_threshold=0.9, max_tokens=30),
    _case("Tom had", 11, exit_threshold=1.0, max_tokens=24),
    _case("A cat and a dog", 12, exit_threshold=0.5, max_loops=2, min_loops=2),
)
