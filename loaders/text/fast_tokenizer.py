"""Hugging Face's fast tokenizers: a value that is compared by content, and tokenizes with offsets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_PROBE: Final = "It's 1 of 12:\n\n  d\u00e9j\u00e0 vu \U0001f600 <s></s>"
_WAY_OUT: Final = (
    "wrap it, as in TextPreprocessor(lambda text: tokenizer.encode(text, add_special_tokens=False), id=...)"
)
_SPLITS: Final = "`split_special_tokens`, `encode_special_tokens`"


class Encoded(NamedTuple):
    """Tokens of one text, in order.

    Attributes:
        ids: int32 (num_tokens,).
        starts, ends: int64 (num_tokens,), characters of each; equal for tokens without characters.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


@dataclass(frozen=True)
class FastTokenizer:
    """A tokenizer, compared by content in every process. Several threads may use it at the same time.

    Attributes:
        json: `tokenizers.Tokenizer.to_str`, without truncation and padding.
        special_tokens: (name, token) as in `special_tokens_map`.
    """

    json: str = field(repr=False)
    special_tokens: tuple[tuple[str, str], ...] = ()

    @cached_property
    def id(self) -> str:
        """A hash of the content."""
        digest = hashlib.blake2b(self.json.encode(), digest_size=16)
        digest.update(repr(self.special_tokens).encode())
        return digest.hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoded:
        """Tokens of `text`, including those around every text if `add_special_tokens`."""
        encoding = self._running.encode(text, add_special_tokens=add_special_tokens)
        ids = np.array(encoding.ids, np.int32)
        offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(ids)).reshape(-1, 2)
        return Encoded(ids, offsets[:, 0], offsets[:, 1])

    def encode_batch(self, texts: Sequence[tuple[str, bool]]) -> list[Encoded]:
        """Tokens of several texts, each with those around every text if its flag says so."""
        return [self.encode(text, add_special_tokens=added) for text, added in texts]

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, special ones included."""
        text: str = self._running.decode(token_ids, skip_special_tokens=False)
        return text

    def token_id(self, text: str) -> int | None:
        """The id of a text that is one token, else None."""
        token: int | None = self._running.token_to_id(text)
        return token if token is not None and self(text).count(token) == 1 else None

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._running.encode(text, add_special_tokens=False).ids
        return ids

    def start(self) -> None:
        """Build the tokenizer in this process. Raises ImportError, and errors of another version of tokenizers."""
        _ = self._running

    @cached_property
    def _running(self) -> Any:
        import tokenizers

        return tokenizers.Tokenizer.from_str(self.json)

    def __reduce__(self) -> tuple[Any, ...]:
        return FastTokenizer, (self.json, self.special_tokens)


def fast_tokenizer(given: Any) -> FastTokenizer | None:
    """Return the value of a `tokenizers.Tokenizer`, or of a fast tokenizer of transformers; else None.

    Raises:
        ValueError: a slow tokenizer of transformers, one that gives other ids than its backend, or one that splits
            special tokens.
    """
    if given is None or isinstance(given, FastTokenizer):
        return given
    of_transformers = hasattr(given, "apply_chat_template") and hasattr(given, "special_tokens_map")
    backend: Any = getattr(given, "backend_tokenizer", None) if of_transformers else given
    if not all(callable(getattr(backend, name, None)) for name in ("to_str", "encode", "no_truncation")):
        if of_transformers:
            raise ValueError(f"{_name(given)} has no offsets, as it is no fast tokenizer: {_WAY_OUT}")
        return None
    if getattr(given, "split_special_tokens", False) if of_transformers else backend.encode_special_tokens:
        raise ValueError(
            f"{_name(given)} splits special tokens into pieces ({_SPLITS}), which its JSON does not contain: {_WAY_OUT}"
        )
    running = type(backend).from_str(backend.to_str())
    running.no_truncation()
    running.no_padding()
    special_tokens = tuple(sorted(given.special_tokens_map.items())) if of_transformers else ()
    fast = FastTokenizer(running.to_str(), special_tokens)
    if of_transformers:
        ids = given(_PROBE, truncation=False, padding=False)["input_ids"]
        if list(ids) != fast.encode(_PROBE, add_special_tokens=True).ids.tolist():
            raise ValueError(f"{_name(given)} gives other ids than its backend tokenizer: {_WAY_OUT}")
    return fast


def _name(given: Any) -> str:
    return f"the tokenizer {type(given).__name__}"
