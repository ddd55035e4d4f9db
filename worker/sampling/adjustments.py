"""What changes logits before temperature: bias, penalties, and tokens that may not come yet.

All of it works on the device: the output counts are kept by CODA itself, so a penalty is right
although the token that it counts has never been on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from protocol.row_progress import check_vocabulary
from worker.upload import same

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from protocol.plan import Admission

_IN_PROMPT, _BANNED = 1, 2


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Which of them a request needs: known on the host, so a batch pays only for what it uses.

    `min_tokens` counts the first outputs among which some tokens are banned.
    """

    biased: bool
    penalized: bool
    min_tokens: int

    @classmethod
    def of(cls, admission: Admission) -> Self:
        """What a request asks for; neutral values ask for nothing."""
        penalties = (
            admission.repetition_penalty,
            admission.presence_penalty,
            admission.frequency_penalty,
        )
        return cls(
            biased=bool(admission.logit_bias),
            penalized=penalties != (1.0, 0.0, 0.0),
            min_tokens=admission.min_tokens if admission.banned_ids else 0,
        )


@dataclass(frozen=True, slots=True)
class AdjustmentNeeds:
    """Which adjustments some row of a batch needs; for the others they are neutral."""

    biased: bool
    penalized: bool
    banned: bool

    @classmethod
    def of(cls, rows: Sequence[Adjustments]) -> Self:
        """What these rows need together."""
        return cls(
            biased=any(row.biased for row in rows),
            penalized=any(row.penalized for row in rows),
            banned=any(row.min_tokens for row in rows),
        )

    @property
    def any(self) -> bool:
        """Whether there is anything to adjust."""
        return self.biased or self.penalized or self.banned


class LogitAdjuster:
    """Owner: SlotTable. Mutated only by: it when it places a request, and count on the device.

    bias float32, counts int32 (occurrences in the output) and marks uint8 (in the prompt, banned)
    [slots, V]; penalties float32 [slots, 3] (repetition, presence, frequency). That is 9 bytes a
    slot and token: 14 MiB for 32 slots of 49,152 tokens. They are columns of the slot table, filled
    for every request, so that a slot keeps nothing and a snapshot has everything.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self.bias = torch.zeros(num_slots, vocab_size, dtype=torch.float32, device=device)
        self.counts = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
        self.marks = torch.zeros(num_slots, vocab_size, dtype=torch.uint8, device=device)
        self.penalties = torch.zeros(num_slots, 3, dtype=torch.float32, device=device)
        self.penalties[:, 0] = 1.0  # neutral, for slots that nobody has filled yet

    @staticmethod
    def bytes_needed(num_slots: int, vocab_size: int) -> int:
        """Device memory of the whole table, in bytes."""
        return num_slots * (vocab_size * 9 + 12)

    def adjust(
        self,
        logits: Tensor,
        slots: Sequence[int],
        output_indices: Sequence[int],
        needs: Sequence[Adjustments],
    ) -> None:
        """Change float32 logits [N, V] in place, each row as its request asked.

        In this order: bias; the penalties; -inf for what is banned at this output index. Rows that
        ask for nothing keep their bits.
        """
        biased = [row for row, need in enumerate(needs) if need.biased]
        penalized = [row for row, need in enumerate(needs) if need.penalized]
        early = [row for row, need in enumerate(needs) if output_indices[row] < need.min_tokens]
        self._change(logits, slots, biased, lambda x, slot: x + self.bias[slot])
        self._change(logits, slots, penalized, self._penalize)
        self._change(logits, slots, early, self._ban)

    def adjust_seats(
        self, logits: Tensor, seats: Tensor, early: Tensor, needs: AdjustmentNeeds
    ) -> Tensor:
        """The same for slots int64 [N] whose rows the host does not know.

        `early` bool [N] says where tokens are banned. What a row did not ask for is neutral for it:
        a bias of 0, a repetition of 1, penalties of 0.
        """
        if logits.is_cuda and needs.any:
            # Imported late: Triton is there only where CUDA is.
            from worker.kernels.logits import adjust

            columns = (self.bias, self.counts, self.marks, self.penalties)
            return adjust(logits.contiguous(), seats, early, columns, _IN_PROMPT, _BANNED)
        if needs.biased:
            logits = logits + self.bias[seats]
        if needs.penalized:
            logits = self._penalize(logits, seats)
        if needs.banned:
            banned = (self.marks[seats] & _BANNED).bool() & early[:, None]
            logits = logits.masked_fill(banned, float("-inf"))
        return logits

    def count(self, tokens: Tensor, slots: Sequence[int], needs: Sequence[Adjustments]) -> None:
        """Count the sampled tokens int64 [N] of the rows whose penalties need it."""
        rows = [row for row, need in enumerate(needs) if need.penalized]
        if rows:
            slot = self._ids([slots[row] for row in rows])
            self.counts[slot, tokens[self._ids(rows)]] += 1

    def count_seats(self, tokens: Tensor, seats: Tensor) -> None:
        """The same for slots int64 [N] whose rows the host does not know.

        Rows whose penalties are neutral, among them padding, count nothing.
        """
        repetition, presence, frequency = self.penalties[seats].unbind(1)
        asked = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
        self.counts[seats, tokens] += asked.to(torch.int32)

    def _penalize(self, logits: Tensor, slot: Tensor) -> Tensor:
        counts = self.counts[slot]
        seen = (counts > 0) | (self.marks[slot] & _IN_PROMPT).bool()
        repetition, presence, frequency = self.penalties[slot].unsqueeze(2).unbind(1)
        return penalize(logits, seen, counts, repetition, presence, frequency)

    def _ban(self, logits: Tensor, slot: Tensor) -> Tensor:
        return logits.masked_fill((self.marks[slot] & _BANNED).bool(), float("-inf"))

    def _change(
        self,
        logits: Tensor,
        slots: Sequence[int],
        rows: Sequence[int],
        change: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        if rows:
            row = self._ids(rows)
            logits[row] = change(logits[row], self._ids([slots[index] for index in rows]))

    def _ids(self, values: Sequence[int]) -> Tensor:
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def adjustment_columns(
    admission: Admission, vocab_size: int, device: torch.device
) -> dict[str, Tensor]:
    """The rows of a request that has not run yet, by their column's name.

    What the request asked for lies on the host, what is neutral on the device, which then need not
    be sent it. Raises ProtocolError for a token beyond the vocabulary.
    """
    check_vocabulary(admission, vocab_size)
    asks, shape = Adjustments.of(admission), (vocab_size,)
    columns = {
        "bias": same(0.0, torch.float32, device, shape),
        "counts": same(0, torch.int32, device, shape),
        "marks": same(0, torch.uint8, device, shape),
        "penalties": torch.tensor(
            (
                admission.repetition_penalty,
                admission.presence_penalty,
                admission.frequency_penalty,
            )
        ),
    }
    if asks.biased:
        tokens, biases = zip(*admission.logit_bias, strict=True)
        columns["bias"] = bias = torch.zeros(vocab_size)
        bias[list(tokens)] = torch.tensor(biases, dtype=torch.float32)
    if asks.penalized or asks.min_tokens:
        columns["marks"] = marks = torch.zeros(vocab_size, dtype=torch.uint8)
        marks[list(admission.prompt)] = _IN_PROMPT
        marks[list(admission.banned_ids)] |= _BANNED
    return columns


def penalize(
    logits: Tensor,
    seen: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Logits float32 [N, V] after the three penalties, each float32 [N, 1].

    `seen` bool [N, V] marks tokens of prompt or output, `counts` int32 [N, V] counts those of the
    output. Repetition (Keskar et al., "CTRL", 2019): positive logits of seen tokens / repetition,
    others * repetition. Frequency and presence as OpenAI defines them: minus count * frequency,
    minus presence where the count is above 0.

    Example: logits (2, -1, 1), all seen, counts (2, 1, 0), repetition 2, presence 0.5,
    frequency 0.25 -> (1 - 0.5 - 0.5, -2 - 0.25 - 0.5, 0.5) = (0, -2.75, 0.5).
    """
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    return logits - counts * frequency - (counts > 0) * presence
