"""One request at a time, straight from the definitions: what every executor must reproduce.

No plan, no slot, no batch: a loop over tokens and depths that also records how close each decision
was, since kernels differ between machines and batch shapes by about 1e-6.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from protocol.exit_rule import exits, survival_bound
from protocol.layout import Layout
from protocol.rng import Purpose, RngKey
from tests.model_driver import ModelDriver
from worker.sampling.philox import uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from protocol.profile import ModelProfile
    from protocol.sampling import SamplingParams
    from worker.models.base import LoopedModel


@dataclass(slots=True)
class ReferenceRun:
    """Tokens and exit depths of one request, and the smallest margin of any decision in it.

    `logprobs` has the log probabilities of all tokens [V], float64, before temperature.
    """

    tokens: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    margin: float = float("inf")

    def note(self, margin: float) -> None:
        """Keep the smaller margin."""
        self.margin = min(self.margin, margin)


@torch.inference_mode()
def reference_run(
    model: LoopedModel,
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    layout: Layout = Layout.LAST_EXITED,
    *,
    delayed: bool = False,
    stream: int = 0,
) -> ReferenceRun:
    """Generate as the layout and the exit rule define it: `ouro`, or `delayed` by one loop.

    `stream` is the index of the choice.
    """
    driver = ModelDriver(model, max_tokens=len(prompt) + params.max_tokens, layout=layout)
    run = ReferenceRun()
    full = model.profile.max_loops
    if layout is Layout.LAST_EXITED:
        hidden, depth = driver.prefill([(0, 0, prompt)])[-1][-1:], full
    else:  # one token after the other, each through all loops
        for position, token in enumerate(prompt):
            hidden, depth = _full_pass(driver, token, position), full
    for index in range(params.max_tokens):
        logits = adjusted(model.logits(hidden)[0], params, prompt, run.tokens, model.profile)
        token = _sample(logits, params, RngKey(seed, stream), index, run)
        run.logprobs.append(logits.double().log_softmax(0))
        run.tokens.append(token)
        run.exit_depths.append(depth)
        if token in params.stop_token_ids:
            break
        if not params.ignore_eos and token in model.profile.eos_ids:
            break
        if index + 1 == params.max_tokens:
            break
        position = len(prompt) + index
        hidden, depth = _loops(driver, token, position, params, run, delayed)
        _copy_exit(driver, position, depth)
    return run


def _full_pass(driver: ModelDriver, token: int, position: int) -> Tensor:
    hidden = driver.model.embed(torch.tensor([token]))
    for depth in range(driver.model.profile.max_loops):
        hidden = driver.decode(hidden, [0], [position], [depth])
    return hidden


def adjusted(
    logits: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    outputs: Sequence[int],
    profile: ModelProfile,
) -> Tensor:
    """Logits [V] after bias, penalties and min_tokens, token by token as they are defined."""
    values = logits.clone()
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in set(prompt) | set(outputs):
        repetition = params.repetition_penalty
        values[token] *= 1 / repetition if values[token] > 0 else repetition
    for token in set(outputs):
        values[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty
    if len(outputs) < params.min_tokens:
        endings = (*params.stop_token_ids, *(() if params.ignore_eos else profile.eos_ids))
        values[list(endings)] = float("-inf")
    return values


def _loops(
    driver: ModelDriver,
    token: int,
    position: int,
    params: SamplingParams,
    run: ReferenceRun,
    delayed: bool,
) -> tuple[Tensor, int]:
    model = driver.model
    hidden = model.embed(torch.tensor([token]))
    survival = torch.ones(1)
    full = params.max_loops or model.profile.max_loops
    threshold = 1.0 if params.exit_threshold is None else params.exit_threshold
    bound = survival_bound(threshold)
    due = False
    for loops in range(1, full + 1):
        hidden = driver.decode(hidden, [0], [position], [loops - 1])
        survival = survival * (1.0 - model.hazards(hidden))
        value = float(survival)
        if threshold < 1.0 and params.min_loops <= loops < full:
            run.note(abs(value - bound))
        fires = exits(loops, value, min_loops=params.min_loops, max_loops=full, bound=bound)
        if due or (fires and not delayed) or loops == full:
            return hidden, loops
        due = fires
    raise AssertionError("the last loop always exits")


def _copy_exit(driver: ModelDriver, position: int, depth: int) -> None:
    page = position // driver.block_size
    for target in range(depth, driver.planes):
        driver.storage.copy_tokens(
            driver.tables[0, depth - 1, page : page + 1],
            driver.tables[0, target, page : page + 1],
            torch.tensor([position % driver.block_size]),
        )


def _sample(
    logits: Tensor, params: SamplingParams, key: RngKey, index: int, run: ReferenceRun
) -> int:
    """Sort, filter, walk the distribution: slow and obvious."""
    if params.temperature == 0.0:
        best = logits.topk(2).values
        run.note(float(best[0] - best[1]))
        return int(logits.argmax())
    scaled = logits.double() / params.temperature
    order = scaled.sort(descending=True).values
    kept = torch.ones_like(scaled, dtype=torch.bool)
    if params.top_k > 0:
        run.note(float(order[params.top_k - 1] - order[params.top_k]))
        kept &= scaled >= order[params.top_k - 1]
    weights = torch.where(kept, (scaled - order[0]).exp(), 0.0)
    ascending = weights.sort().values
    up_to = torch.searchsorted(ascending, weights, right=True) - 1
    greater = 1.0 - ascending.cumsum(0)[up_to] / weights.sum()
    if params.top_p < 1.0:
        run.note(float((greater[kept] - params.top_p).abs().min()))
    weights = torch.where(kept & ((greater < params.top_p) | (params.top_p == 1.0)), weights, 0.0)
    mass = weights.cumsum(0) / weights.sum()
    words = torch.tensor([[*key.philox_key(), key.stream]])
    draw = float(uniform(words, Purpose.SAMPLE, torch.tensor([index])))
    run.note(float((mass - draw).abs().min()))
    return int((mass > draw).nonzero()[0])
