"""Detokenizer: text from token ids as they come, without ever taking a character back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import tokenizers


class Detokenizer:
    """The text of one output. Owner: its TextAssembler. Mutated only by: push, pieces and finish.

    All pushes and finish, put together, equal the tokenizer's decode of all ids at once. Bytes
    that do not yet make a character are held back.

    Example: with one token a byte, pushing the bytes C3 and A9 gives "" and then "é"; pushing C3
    alone gives "" and finish gives "\\ufffd".
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._sent = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` complete; may be empty."""
        return "".join(self.pieces(tokens))

    def pieces(self, tokens: Sequence[int]) -> Iterator[str]:
        """The text that each of `tokens` completes, pushed as it is asked for."""
        step, backend = self._stream.step, self._backend
        for token in tokens:
            self._ids.append(token)
            piece = step(backend, token) or ""
            self._sent += len(piece)
            yield piece

    def finish(self) -> str:
        """The text still held; incomplete bytes become replacement characters."""
        rest = self._backend.decode(self._ids, skip_special_tokens=True)[self._sent :]
        self._sent += len(rest)
        return rest
