"""The main job, shown: a local cluster, the endpoint, several prompts at once, and its end."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.ports import free_port
from cluster.ray_session import ray_session
from cluster.server import serving
from cluster.terminal import progress
from protocol.config import ClusterSettings, Configuration
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

HOST = "127.0.0.1"
WORKERS = 2
EXIT_THRESHOLD = 0.9
MAX_TOKENS = 48
PROMPTS = (
    "Once upon a time",
    "One day, a little fox named Pip",
    "The capital of France is",
    "There was a small boat on the river",
    "Lily and her brother found a box",
    "In the morning the wind was cold and",
)


@dataclass(slots=True)
class Answer:
    """One streamed answer. Owner: the demo, which alone mutates it."""

    prompt: str
    text: str = ""
    exit_depths: list[int] = field(default_factory=list)
    loops_saved: int = 0
    loops_run: int = 0


def run_demo() -> int:
    """Run the whole demo; returns the exit code."""
    try:
        import openai  # only the demo talks to the endpoint as its clients do
    except ImportError as error:
        raise ConfigError("the demo needs the openai package: pip install -e '.[dev]'") from error
    started = time.perf_counter()
    say(f"[1/5] starting a local Ray cluster for {WORKERS} CPU workers")
    configuration = Configuration(cluster=ClusterSettings(num_workers=WORKERS))
    port = free_port(HOST)
    # Over-declared on purpose: the demo must also run on a machine with one core.
    with ray_session(address="local", num_cpus=WORKERS, object_store_memory=100 * 2**20) as owned:
        say("[2/5] deploying the endpoint with ouro-tiny")
        with serving(configuration, HOST, port, ray_ends=owned) as url:
            say(f"[3/5] {url}/v1 is up; sending {len(PROMPTS)} prompts at once")
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=60.0)
            asked = time.perf_counter()
            answers = asyncio.run(ask_all(client))
            seconds = time.perf_counter() - asked
            for answer in answers:
                show(answer)
            tokens = sum(len(answer.exit_depths) for answer in answers)
            say(f"[4/5] {tokens} tokens in {seconds:.1f} s; shutting down")
    say(f"[5/5] done in {time.perf_counter() - started:.1f} s")
    return 0


async def ask_all(client: AsyncOpenAI) -> list[Answer]:
    """Send every prompt at once and gather the answers."""
    async with client:
        return await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS))


async def ask(client: AsyncOpenAI, prompt: str) -> Answer:
    """Stream one completion; depths and loops come in the endpoint's extension fields."""
    answer = Answer(prompt)
    stream = await client.completions.create(
        model="ouro-tiny",
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"exit_threshold": EXIT_THRESHOLD},
    )
    async for event in stream:
        for choice in event.choices:
            answer.text += choice.text
            answer.exit_depths += (choice.model_extra or {}).get("exit_depths") or []
        if event.usage is not None:
            extra = event.usage.model_extra or {}
            answer.loops_saved, answer.loops_run = extra["loops_saved"], extra["loops_run"]
    return answer


def show(answer: Answer) -> None:
    """Print one answer with its exit depths and the loops it saved."""
    depths = "".join(str(depth) for depth in answer.exit_depths)
    full = answer.loops_run + answer.loops_saved
    print(f"\n> {answer.prompt}{answer.text}")
    print(f"  exit depths {depths}")
    print(
        f"  loops {answer.loops_run} of {full}: {answer.loops_saved / full:.0%} saved", flush=True
    )


def say(message: str) -> None:
    """One progress line."""
    progress(message, sys.stderr)
