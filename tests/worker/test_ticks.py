"""Ticks of fixed size leave every tensor as ticks of exactly the rows that take part do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.config import ModelSettings
from protocol.resident import ResidentBatch, ResidentTerms
from tests.ticks import SLOTS, WIDTH, WISHES, Row, World, requests
from worker.boundary import commit, leaves
from worker.models.registry import load_model, resolve_model
from worker.padded_boundary import FULL, SAMPLED, padded_boundary, variant_of
from worker.resident import ResidentTicks
from worker.stages import finalize, loop_seats
from worker.tick_lines import TickLines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from worker.models.base import LoopedModel
    from worker.padded_boundary import TickVariant

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> LoopedModel:
    return load_model(resolve_model(ModelSettings()), torch.float32, CPU, "ouro-tiny")


@pytest.mark.parametrize("wishes", [({},), ({}, *WISHES)], ids=["plain", "full"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data(), st.integers(0, 5), st.integers(1, 6), st.integers(0, 3))
def test_padding_changes_nothing(
    model: LoopedModel,
    wishes: tuple[dict[str, Any], ...],
    data: st.DataObject,
    started: int,
    ticks: int,
    padding: int,
) -> None:
    rows = data.draw(requests(wishes))
    eager, padded = (World(model, rows, started) for _ in range(2))
    batch = ResidentBatch(eager.keys, ticks)
    kinds = [slot.sampling for slot in eager.live]
    # What serves more than anybody asks for changes nothing, either.
    variant = data.draw(st.sampled_from((variant_of(kinds), FULL)))
    with torch.inference_mode():
        picked = ResidentTicks(eager.on, batch, eager.live)
        picked.run(lambda: False)
        found = picked.read([])
        seats = torch.full((len(rows) + padding,), SLOTS)
        lines = TickLines.of(len(seats), ticks, seats, SLOTS)
        lines.begin(padded.rows, SLOTS)
        padded_boundary(padded.on, lines, variant)
        for _ in range(ticks):
            loop_seats(padded.on, lines.seats, WIDTH)
            padded_boundary(padded.on, lines, variant)
    for name, value in eager.tensors().items():
        torch.testing.assert_close(padded.tensors()[name], value, atol=1e-4, rtol=0, msg=name)
    tokens = lines.tokens.T.tolist()[: len(rows)]
    depths = lines.exit_depths.T.tolist()[: len(rows)]
    assert tuple(tuple(t for t in row if t >= 0) for row in tokens) == found.tokens
    assert tuple(tuple(d for d in row if d >= 0) for row in depths) == found.exit_depths
    headers = [tuple(line) for line in lines.header.tolist()[1:] if line[0]]
    assert headers == list(zip(found.live, found.exits, found.finished, strict=True))
    told = lines.leave_logprobs(lines.tokens, [kind.logprobs for kind in kinds])()
    assert len(told) == len(found.logprobs)
    for ours, theirs in zip(told, found.logprobs, strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.top_ids == theirs.top_ids
            values = ([each.logprob, *each.top_logprobs] for each in (ours, theirs))
            torch.testing.assert_close(*map(torch.tensor, values), atol=1e-4, rtol=0)
    trash = padded.slots.trash
    assert not padded.slots.counts[trash].any()
    assert int(padded.slots.position[trash]) == int(padded.slots.resident.outputs[trash]) == 0
    assert bool(padded.slots.hidden[trash].isfinite().all())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(requests(({}, *WISHES)), st.integers(0, 5), st.integers(1, 6))
def test_compiled_code_leaves_every_bit_as_torch_does(
    model: LoopedModel, rows: Sequence[Row], started: int, ticks: int
) -> None:
    found = []
    compiled, plain = (World(model, rows, started) for _ in range(2))
    assert compiled.slots.compiled
    plain.slots.compiled = False
    for world in (compiled, plain):
        run = ResidentTicks(world.on, ResidentBatch(world.keys, ticks), world.live)
        with torch.inference_mode():
            run.run(lambda: False)
            found.append(run.read([]))
    assert found[0] == found[1]
    for name, value in plain.tensors().items():
        assert torch.equal(compiled.tensors()[name], value), name


def test_compiled_code_leaves_padding_and_broken_rows_as_torch_does(model: LoopedModel) -> None:
    rows = [Row(ResidentTerms(1, 4, 0.5, 9), 0.0, blocks) for blocks in (2, 1, 1)]
    worlds = [World(model, rows, 0) for _ in range(2)]
    worlds[1].slots.compiled = False
    left = []
    for world in worlds:
        seats = torch.tensor([SLOTS, *world.rows, SLOTS])
        world.slots.hidden[world.rows[1]] = float("nan")
        with torch.inference_mode():
            tokens, broken = torch.tensor([0, 7, 8, 9, 0]), torch.tensor([0, 0, 1, 0, 0]).bool()
            finalize(world.on, seats)
            ends = commit(world.on, seats, tokens, broken)
            before = leaves(world.on, seats)[1:4]
            survivals = loop_seats(world.on, seats, WIDTH)
            left.append((ends, before, survivals.nan_to_num(-1.0), leaves(world.on, seats)[1:4]))
    for ours, theirs in zip(*left, strict=True):
        assert torch.equal(ours, theirs)
    assert left[0][0].tolist() == [False, False, True, False, False]
    for name, value in worlds[1].tensors().items():
        torch.testing.assert_close(
            worlds[0].tensors()[name], value, atol=0, rtol=0, equal_nan=True, msg=name
        )


def padded_tokens(world: World, ticks: int, variant: TickVariant) -> list[list[int]]:
    """What so many ticks of fixed size sample, row by row."""
    lines = TickLines.of(len(world.keys), ticks, torch.tensor(world.rows), SLOTS)
    lines.begin(world.rows, SLOTS)
    with torch.inference_mode():
        padded_boundary(world.on, lines, variant)
        for _ in range(ticks):
            loop_seats(world.on, lines.seats, WIDTH)
            padded_boundary(world.on, lines, variant)
    return lines.tokens.T.tolist()


@pytest.mark.parametrize("wish", WISHES, ids=lambda wish: "-".join(wish))
def test_the_full_variant_heeds_every_wish(model: LoopedModel, wish: dict[str, Any]) -> None:
    terms = ResidentTerms(1, 1, -1.0, 10)
    rows = [Row(terms, 1.5, 4, wish), Row(terms, 1.5, 4)]
    eager = World(model, rows, 0)
    picked = ResidentTicks(eager.on, ResidentBatch(eager.keys, 9), eager.live)
    with torch.inference_mode():
        picked.run(lambda: False)
        found = picked.read([]).tokens
    tokens = padded_tokens(World(model, rows, 0), 9, FULL)
    assert tuple(map(tuple, tokens)) == found
    plain, other = padded_tokens(World(model, [Row(terms, 1.5, 4)] * 2, 0), 9, SAMPLED)
    assert tokens[1] == other
    assert (tokens[0] != plain) is (set(wish) != {"logprobs"})


@pytest.mark.parametrize("after", [1, 3])
def test_ticks_end_with_the_one_in_which_they_are_told_to(model: LoopedModel, after: int) -> None:
    world = World(model, [Row(ResidentTerms(1, 4, -1.0, 6), 0.0, 4)], 0)
    told = iter([False] * (after - 1) + [True])
    ticks = ResidentTicks(world.on, ResidentBatch(world.keys, 64), world.live)
    with torch.inference_mode():
        ticks.run(lambda: next(told))
        assert ticks.read([]).ticks == after


@pytest.mark.parametrize(
    ("wishes", "temperature", "name"),
    [
        (({}, {}), 0.0, "greedy"),
        (({"top_p": 0.5}, {}), 0.0, "greedy"),  # nobody draws
        (({}, {}), 0.8, "sampled"),
        *((({}, wish), 0.8, "full") for wish in WISHES),
        (({}, {"logprobs": 0}), 0.0, "full"),
    ],
)
def test_the_smallest_variant_that_serves_all_rows_is_taken(
    model: LoopedModel, wishes: Sequence[Mapping[str, Any]], temperature: float, name: str
) -> None:
    terms = ResidentTerms(1, 4, -1.0, 6)
    world = World(model, [Row(terms, temperature, 4, wish) for wish in wishes], 0)
    assert variant_of(slot.sampling for slot in world.live).name == name
