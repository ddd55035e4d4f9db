"""A Llama with as many operations a token as a looped model, under Hugging Face generate.

Needs the extra `baseline` (transformers); whoever asks looks with `is_available` first.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from benchmarks.static_batch import PADDING, padded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.workload import Ask
    from worker.models.config import OuroConfig

MISSING = (
    "Hugging Face is left out: transformers is not installed "
    "(pip install -c constraints.txt -e '.[baseline]')"
)


def is_available() -> bool:
    """Whether transformers is there."""
    return importlib.util.find_spec("transformers") is not None


class LlamaBatches:
    """Static batches through `generate`, greedy. Owner: one benchmark. Mutated only by: nothing.

    The looped stack is unrolled: layers x loops layers of the same shapes, random weights.
    """

    def __init__(self, config: OuroConfig) -> None:
        # Imported late: the package is optional, and slow to import.
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        torch.manual_seed(0)
        llama = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers * config.total_ut_steps,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=PADDING,
            tie_word_embeddings=False,
        )
        self._terms = GenerationConfig
        self._model = LlamaForCausalLM(llama).eval()

    @property
    def num_layers(self) -> int:
        """Layers of the unrolled model."""
        return int(self._model.config.num_hidden_layers)

    @torch.inference_mode()
    def run(self, asks: Sequence[Ask], size: int) -> list[list[int]]:
        """The outputs of all requests, in batches of `size` as they come."""
        found = []
        for first in range(0, len(asks), size):
            batch = asks[first : first + size]
            prompts, pads = padded(batch)
            mask = torch.arange(prompts.shape[1]) >= pads[:, None]
            terms = self._terms(
                do_sample=False,
                max_new_tokens=max(ask.outputs for ask in batch),
                pad_token_id=PADDING,
            )
            whole = self._model.generate(
                prompts, attention_mask=mask.long(), generation_config=terms
            )
            rows = whole[:, prompts.shape[1] :].tolist()
            found += [row[: ask.outputs] for row, ask in zip(rows, batch, strict=True)]
        return found
