"""The stages that a token passes on a worker."""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    """What is to be run for a row next.

    PREFILL    a chunk of the prompt through every loop depth; keeps the last token's hidden state
    PRELUDE    embeds the last sampled token; the row starts again at depth 0
    RECURRENT  one pass of the shared stack at the row's own depth; yields its survival
    CODA       finalizes the position's KV at its exit depth, then samples the next token
    RESIDENT   all of the last three, tick by tick, until the request ends; the worker decides
    """

    PREFILL = "prefill"
    PRELUDE = "prelude"
    RECURRENT = "recurrent"
    CODA = "coda"
    RESIDENT = "resident"
