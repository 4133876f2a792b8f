"""Hugging Face's fast tokenizers: a value that is compared by content, and tokenizes with offsets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.tokenizer_threads import note_threads

_PROBE: Final = "It's 1 of 12:\n\n  d\u00e9j\u00e0 vu \U0001f600 <s></s>"
_WAY_OUT: Final = (
    "wrap it, as in TextPreprocessor(lambda text: tokenizer.encode(text, add_special_tokens=False), id=...)"
)
_SPLITS: Final = "`split_special_tokens`, `encode_special_tokens`"
_BATCH_CHARACTERS: Final = 1 << 20
"""Of the texts of one call: what it returns takes a hundred times as much memory until it is in arrays."""
_NOWHERE: Final = (0, 0)


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
        return _arrays(self._encoding(text, add_special_tokens))

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: Sequence[bool]) -> list[Encoded | Exception]:
        """Tokens of each text as `encode` returns them, or the exception that it raises, in the order of the texts.

        All cores work, and other Python threads run meanwhile.

        Args:
            add_special_tokens: of each text.
        """
        results: dict[int, Encoded | Exception] = {}
        for numbers, some, added in _groups(texts, add_special_tokens):
            results.update(zip(numbers, self._results(some, added), strict=True))
        return [results[number] for number in range(len(texts))]

    def count_batch(
        self, texts: Sequence[str], *, add_special_tokens: Sequence[bool], without: frozenset[int]
    ) -> list[int | None]:
        """Number of tokens of each text; None if it cannot be tokenized, or has a token of `without`.

        This takes less time than `encode_batch`, as offsets are left out. Arguments are those of `encode_batch`.
        """
        counts: dict[int, int | None] = {}
        for numbers, some, added in _groups(texts, add_special_tokens):
            running = self._running
            encode_batch = getattr(running, "encode_batch_fast", running.encode_batch)  # without offsets
            try:
                encodings = encode_batch(some, add_special_tokens=added)
            except Exception:  # noqa: BLE001 - `encode_batch` says which text it is
                counts.update(dict.fromkeys(numbers))
                continue
            for number, encoding in zip(numbers, encodings, strict=True):
                is_plain = not without or without.isdisjoint(encoding.ids)
                counts[number] = len(encoding) if is_plain else None
        return [counts[number] for number in range(len(texts))]

    def _results(self, texts: list[str], add_special_tokens: bool) -> Iterator[Encoded | Exception]:
        try:
            encodings = self._running.encode_batch(texts, add_special_tokens=add_special_tokens)
        except Exception:  # noqa: BLE001 - of one of the texts, which is then found
            for text in texts:
                try:
                    yield self.encode(text, add_special_tokens=add_special_tokens)
                except Exception as error:  # noqa: BLE001 - the caller decides
                    yield error
            return
        encodings.reverse()
        while encodings:
            yield _arrays(encodings.pop())  # each is freed before the next becomes arrays

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        """What the tokenizer makes of a text. Its `encode` would hold the interpreter's lock, a batch does not."""
        running = self._running
        try:
            return running.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except Exception:  # noqa: BLE001 - its `encode` says what is wrong with the text
            return running.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, special ones included."""
        text: str = self._running.decode(token_ids, skip_special_tokens=False)
        return text

    def token_id(self, text: str) -> int | None:
        """The id of a text that is one token, else None."""
        token: int | None = self._running.token_to_id(text)
        return token if token is not None and self(text).count(token) == 1 else None

    @cached_property
    def added(self) -> dict[int, str]:
        """Id -> text of its added tokens."""
        return {token: added.content for token, added in self._running.get_added_tokens_decoder().items()}

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._encoding(text, False).ids
        return ids

    def start(self) -> None:
        """Build the tokenizer in this process. Raises ImportError, and errors of another version of tokenizers."""
        _ = self._running

    @cached_property
    def _running(self) -> Any:
        import tokenizers

        note_threads()
        return tokenizers.Tokenizer.from_str(self.json)

    def __reduce__(self) -> tuple[Any, ...]:
        return FastTokenizer, (self.json, self.special_tokens)


def _groups(texts: Sequence[str], add_special_tokens: Sequence[bool]) -> Iterator[tuple[list[int], list[str], bool]]:
    """Yield (numbers of texts, these texts, their flag), so that each group can be one call."""
    for added in (False, True):
        mine = [number for number, each in enumerate(add_special_tokens) if each == added]
        for numbers in _batches(mine, texts):
            yield numbers, [texts[number] for number in numbers], added


def _batches(numbers: Sequence[int], texts: Sequence[str]) -> Iterator[list[int]]:
    """Group the numbers of texts, in order, so that one call has not too many characters."""
    batch: list[int] = []
    characters = 0
    for number in numbers:
        if batch and characters + len(texts[number]) > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
        batch.append(number)
        characters += len(texts[number])
    if batch:
        yield batch


def _arrays(encoding: Any) -> Encoded:
    """The tokens of one text. Another Python thread never waits for all of them: `encoding.offsets` is one long call,
    and so many objects that all objects of the process may be collected.
    """
    ids = np.array(encoding.ids, np.int32)
    place = encoding.token_to_chars
    pairs = (place(token) or _NOWHERE for token in range(len(ids)))
    offsets = np.fromiter(chain.from_iterable(pairs), np.int64, 2 * len(ids)).reshape(-1, 2)
    return Encoded(ids, offsets[:, 0], offsets[:, 1])


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
    note_threads()  # the call of transformers below is a batch
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
