"""RowRecord: everything that a worker keeps of a request, but its slot and its blocks."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from protocol.row_progress import RowProgress
    from worker.sampling.adjustments import Adjustments


@dataclass(frozen=True, slots=True)
class SamplingKind:
    """What a request's sampling needs: known on the host, so a batch skips what no row needs.

    `logprobs` counts the alternatives to tell, NO_LOGPROBS for a request that asks for nothing.
    """

    random: bool
    top_k: bool
    top_p: bool
    adjusts: Adjustments
    logprobs: int


@dataclass(frozen=True, slots=True)
class RowRecord:
    """One row of the slot table, of any device: what an admission makes and a snapshot holds.

    Every tensor field has the name, dtype and shape of a row of the slot table's column of that
    name; `prompt` [P] is cut to the prompt's length. A column of the slot table that is no field
    here would be lost by a suspend.
    """

    progress: RowProgress
    sampling: SamplingKind
    prompt: Tensor
    hidden: Tensor
    token: Tensor
    survival: Tensor
    position: Tensor
    loops: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    rng_words: Tensor
    bias: Tensor
    counts: Tensor
    marks: Tensor
    penalties: Tensor

    def columns(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its column's name."""
        return ((name, getattr(self, name)) for name in COLUMNS)

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors."""
        return sum(value.nbytes for _, value in self.columns())

    def checksum(self) -> int:
        """CRC-32 over the whole record."""
        crc = zlib.crc32(repr((self.progress, self.sampling)).encode())
        for _, value in self.columns():
            crc = tensor_checksum(value, crc)
        return crc


COLUMNS = tuple(field.name for field in fields(RowRecord) if field.type == "Tensor")
"""The columns of the slot table, but for the block tables."""


def tensor_checksum(values: Tensor, crc: int = 0) -> int:
    """CRC-32 over a host tensor's bytes, going on from `crc`."""
    return zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().data, crc)
