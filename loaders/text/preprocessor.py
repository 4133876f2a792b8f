"""Text -> token ids: any callable tokenizer, Hugging Face's fast tokenizers (with offsets), or the UTF-8 bytes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from functools import cached_property
from itertools import accumulate, chain, groupby
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError, pass_trouble
from orchdata.loaders.locks import lock_of, note_threads
from orchdata.loaders.text.jinja import JinjaTemplate
from orchdata.loaders.text.loss_spans import learned_ending
from orchdata.loaders.text.template import ChatTemplate

Tokenizer = Callable[[str], Sequence[int]]
Overflow = Literal["error", "truncate", "split"]
Marks = Literal["refuse", "keep"]

BYTES_ID: Final = "utf-8-bytes"
_AUTOMATIC: Final = -1
_INT32_MAX: Final = 2**31 - 1

WHY_COUNTS_DIFFER: Final = (
    "its bytes or the tokenizer of the recipe's id changed (index again), or the tokenizer gives other ids while "
    "several threads use it (leave TextPreprocessor.thread_safe out, and use it nowhere else at the same time)"
)

# Field names that data sets use for their text, in order of preference; chat JSON has precedence over all of them.
TEXT_FIELDS: Final = ("txt", "text", "caption", "transcript", "transcription", "sentence")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPreprocessor:
    """How text becomes token ids.

    Text must be valid UTF-8; a byte order mark is dropped.

    Attributes:
        tokenizer: any callable str -> list[int]; None takes the UTF-8 bytes, ids 0..255. It is called once per stretch
            of text with equal loss between media, by one thread at a time: calls of the same object take turns in all
            recipes with it, calls of a bound method in all uses of its object. A fast tokenizer of Hugging Face (a
            `tokenizers.Tokenizer`, or one of transformers) is kept as a `FastTokenizer`: all text of a sample is then
            tokenized in one call, as Hugging Face does, by any number of threads.
        id: name of the tokenizer in the fingerprint of the index: change it whenever the tokenizer changes. Required
            with a tokenizer. For a fast one it is always a hash of its content.
        template: what surrounds the turns of a conversation; `ChatTemplate.from_jinja` takes that of a model.
        bos_token_id, eos_token_id: put at the start and end of every sample. The last carries loss if the token before
            it does. In a chat of a jinja template and a fast tokenizer it is learned after the last answer without one.
        image_token_id, audio_token_id: stand in `input_ids` where features go. Default: 256 and 257 for bytes, 0
            with a tokenizer. Never carry loss.
        image_start_id, image_end_id, audio_start_id, audio_end_id: put around every image or clip. No loss.
        image_placeholder, audio_placeholder: text that marks where a part goes; "" for no such text.
        marks: whether a word in brackets that stands for media in the data of some tool (`<image_1>`, `<|video|>`,
            `<bbox>`) makes a sample bad where it is left in the text ("refuse"), or is text ("keep").
        add_special_tokens: whether plain text gets the tokens that a fast tokenizer puts around every text; they carry
            loss as the text does. For chats the template decides.
        thread_safe: let several threads call the tokenizer at the same time. It is not part of the fingerprint:
            results may not depend on it.
        fields: names of plain-text fields, the first match wins: the whole field or its last extension, without numbers
            and ".gz" ("txt" matches `0.txt`, `en.txt.gz`), or one with its number ("0.txt"). JSON members are always
            inspected.
        max_tokens: maximum of a sample's LLM sequence in tokens, including media and special ids; None for no maximum.
        overflow: how to treat a longer sample. "error": the sample fails. "truncate": keep its first `max_tokens`
            tokens; the sample fails if media would be cut or no token with loss is left. "split": make pieces of up to
            `max_tokens` tokens, each a row of its own with a first token without loss; samples with media fail.
    """

    tokenizer: Tokenizer | None = field(default=None, kw_only=False)
    id: str | None = None
    template: ChatTemplate | JinjaTemplate = ChatTemplate()
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    image_token_id: int = _AUTOMATIC
    audio_token_id: int = _AUTOMATIC
    image_start_id: int | None = None
    image_end_id: int | None = None
    audio_start_id: int | None = None
    audio_end_id: int | None = None
    image_placeholder: str = "<image>"
    audio_placeholder: str = "<audio>"
    marks: Marks = "refuse"
    add_special_tokens: bool = True
    thread_safe: bool = False
    fields: tuple[str, ...] = TEXT_FIELDS
    max_tokens: int | None = None
    overflow: Overflow = "error"

    def __post_init__(self) -> None:
        # Check the tokenizer and its id.
        fast = fast_tokenizer(self.tokenizer)
        if fast is not None:
            object.__setattr__(self, "tokenizer", fast)
            object.__setattr__(self, "id", fast.id)
        if self.tokenizer is not None and not callable(self.tokenizer):
            raise TypeError(f"tokenizer must be a callable str -> list[int], got {type(self.tokenizer).__name__}")
        if self.tokenizer is not None and not self.id:
            raise ValueError(
                'TextPreprocessor needs an id with a tokenizer, as in TextPreprocessor(tokenizer, id="my-bpe-v3"): '
                "the index keeps token counts under that name"
            )
        if self.tokenizer is None and self.id not in (None, BYTES_ID):
            raise ValueError(f"TextPreprocessor got id={self.id!r} but no tokenizer")
        if not isinstance(self.template, ChatTemplate | JinjaTemplate):
            raise TypeError(
                f"TextPreprocessor.template must be an od.ChatTemplate, got {self.template!r:.80}: "
                "od.ChatTemplate.from_jinja takes a tokenizer, or the text of a template"
            )
        if isinstance(self.fields, str):
            raise ValueError(f"TextPreprocessor.fields must be a tuple of names, got the string {self.fields!r}")
        if self.marks not in get_args(Marks):
            raise ValueError(f'TextPreprocessor.marks must be "refuse" or "keep", got {self.marks!r}')
        if self.image_placeholder and self.image_placeholder == self.audio_placeholder:
            raise ValueError(f"image_placeholder and audio_placeholder are both {self.image_placeholder!r}")
        # Resolve the defaults that depend on the tokenizer.
        resolved: dict[str, Any] = {"id": self.id or BYTES_ID, "fields": tuple(name.lower() for name in self.fields)}
        for name, for_bytes in (("image_token_id", 256), ("audio_token_id", 257)):
            if getattr(self, name) == _AUTOMATIC:
                resolved[name] = for_bytes if self.tokenizer is None else 0
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
        for name in _SPECIAL_IDS:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and 0 <= value <= _INT32_MAX):
                raise ValueError(f"TextPreprocessor.{name} must be an int in [0, {_INT32_MAX}], got {value!r}")
        most = self.max_tokens
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or not 2 <= most <= _INT32_MAX):
            raise ValueError(
                f"TextPreprocessor.max_tokens must be an int from 2 (a first token carries no loss) to {_INT32_MAX}, "
                f"got {most!r}"
            )
        if self.overflow not in get_args(Overflow):
            names = ", ".join(map(repr, get_args(Overflow)))
            raise ValueError(f"TextPreprocessor.overflow must be one of {names}, got {self.overflow!r}")
        if most is None and self.overflow != "error":
            raise ValueError(
                f"TextPreprocessor.overflow={self.overflow!r} needs max_tokens, the most tokens that a sample may have"
            )

    def required_modules(self) -> tuple[str, ...]:
        """Modules that reading text imports; see `Modality.required_modules`."""
        tokenizes = ("tokenizers",) if isinstance(self.tokenizer, FastTokenizer) else ()
        renders = ("jinja2", "jinja2.sandbox") if isinstance(self.template, JinjaTemplate) else ()
        return (*tokenizes, *renders)

    def set_up_process(self) -> None:
        """See `Modality.set_up_process`."""
        for running in (self.tokenizer, self.template):
            if isinstance(running, FastTokenizer | JinjaTemplate):
                running.start()

    @property
    def vocab_size(self) -> int:
        """Number of ids in byte text: 256 bytes and the special ids. Raises ValueError with a tokenizer."""
        if self.tokenizer is not None:
            raise ValueError(f"the vocabulary of tokenizer {self.id!r} is not known here: ask the tokenizer")
        return max(255, *(getattr(self, name) or 0 for name in _SPECIAL_IDS)) + 1

    @property
    def whole(self) -> bool:
        """Whether all text of a sample is tokenized in one call: a fast tokenizer gives offsets."""
        return isinstance(self.tokenizer, FastTokenizer)

    def token_id(self, text: str | None) -> int | None:
        """The id of a text that is one token of a fast tokenizer, else None."""
        return self.tokenizer.token_id(text) if isinstance(self.tokenizer, FastTokenizer) and text else None

    @property
    def ending(self) -> str:
        """What the template writes after the last answer and has learned, without blanks around it."""
        if isinstance(self.template, JinjaTemplate):
            return learned_ending(self.template)
        return self.template.after(self.template.loss_roles[-1] if self.template.loss_roles else "").strip()

    @property
    def learns_end(self) -> bool:
        """Whether each chat learns an end token, or a text of the template, after its last answer."""
        asked = self.eos_token_id is not None and self.whole and isinstance(self.template, JinjaTemplate)
        return asked or bool(self.ending)

    def is_ended(self, answer: str) -> bool:
        """Whether an answer ends with what the template writes after it, or with an added token of a fast tokenizer."""
        answer = answer.rstrip()
        added = tuple(self.tokenizer.added.values()) if isinstance(self.tokenizer, FastTokenizer) else ()
        return bool(self.ending and answer.endswith(self.ending)) or answer.endswith(added)

    def is_added_token(self, text: str) -> bool:
        """Whether a fast tokenizer has this text as an added token."""
        return isinstance(self.tokenizer, FastTokenizer) and text in self.tokenizer.added.values()

    def encode_all(self, texts: Sequence[tuple[str, bool]]) -> list[Encoded | DecodeError]:
        """Return the tokens of whole texts, with offsets, or the error of each text that the tokenizer fails for.

        Texts are (text, whether it gets the tokens that are around every text).
        """
        assert isinstance(self.tokenizer, FastTokenizer)
        strings, added = [text for text, _ in texts], [each for _, each in texts]
        return [
            self._failed(each, text) if isinstance(each, Exception) else each
            for text, each in zip(strings, self.tokenizer.encode_batch(strings, add_special_tokens=added), strict=True)
        ]

    def count_all(self, texts: Sequence[tuple[str, bool]], without: Collection[int]) -> list[int | None]:
        """Return the number of tokens of each text; None where `encode_all` fails, or gives a token of `without`."""
        assert isinstance(self.tokenizer, FastTokenizer)
        strings, added = [text for text, _ in texts], [each for _, each in texts]
        return self.tokenizer.count_batch(strings, add_special_tokens=added, without=frozenset(without))

    def _failed(self, error: Exception, text: str) -> DecodeError:
        """Return the error of a text that the tokenizer fails for. Raises as `pass_trouble`."""
        pass_trouble(error)
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            return _not_unicode(problem)
        failed = DecodeError(f"tokenizer {self.id!r} failed: {error!r}")
        failed.__cause__ = error
        return failed

    def encode(self, text: str) -> NDArray[np.int32]:
        """Token ids of `text`, (num_tokens,).

        Raises DecodeError if the tokenizer fails or returns no ids. An exception that says nothing about the text, such
        as a MemoryError, passes.
        """
        try:
            if self.tokenizer is None:
                return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
            # Until the ids are copied: the next call may reuse their memory.
            with nullcontext() if self.thread_safe or self.whole else lock_of(self.tokenizer):
                return _checked_ids(self.tokenizer(text), self.id)
        except DecodeError:
            raise
        except Exception as error:
            raise self._failed(error, text) from error

    def decode(self, token_ids: NDArray[np.int32]) -> str | None:
        """The text of token ids, for people to read; None if the tokenizer cannot decode.

        For a tokenizer that is a method, such as `tokenizer.encode`, the `decode` of its object is used.
        """
        ids = token_ids.tolist()
        if self.tokenizer is None:
            return b"".join(bytes([each]) if each < 256 else f"<{each}>".encode() for each in ids).decode(
                errors="replace"
            )
        decode = getattr(self.tokenizer, "decode", None) or getattr(
            getattr(self.tokenizer, "__self__", None), "decode", None
        )
        if decode is None:
            return None
        try:
            with lock_of(self.tokenizer):
                text = decode(ids)
        except Exception as error:  # noqa: BLE001 - a special id of the recipe that the tokenizer does not know
            pass_trouble(error)
            return None
        return text if isinstance(text, str) else None

    def describe(self) -> dict[str, Any]:
        """All that token ids depend on, JSON-safe; the tokenizer is represented by its id."""
        kind, values = type(self.template), dict[str, Any]()
        for each in dataclass_fields(self.template):
            value = getattr(self.template, each.name)
            values[each.name] = list(value) if isinstance(value, tuple) else value
        if kind is not ChatTemplate:
            values["class"] = f"{kind.__module__}.{kind.__qualname__}"
        described: dict[str, Any] = {"tokenizer": self.id, "fields": list(self.fields), "template": values}
        for name in (*_SPECIAL_IDS, "image_placeholder", "audio_placeholder"):
            described[name] = getattr(self, name)
        described |= {} if self.marks == "refuse" else {"marks": self.marks}
        described |= {"add_special_tokens": self.add_special_tokens} if self.whole else {}
        described |= {} if self.max_tokens is None else {"max_tokens": self.max_tokens, "overflow": self.overflow}
        if type(self) is not TextPreprocessor:
            own = {each.name for each in dataclass_fields(self)} - _OWN_FIELDS
            described |= {name: getattr(self, name) for name in sorted(own)}
            described["class"] = f"{type(self).__module__}.{type(self).__qualname__}"
        return described


_OWN_FIELDS: Final = frozenset(each.name for each in dataclass_fields(TextPreprocessor))
_SPECIAL: Final = "bos_token eos_token image_token audio_token image_start image_end audio_start audio_end"
_SPECIAL_IDS: Final = tuple(f"{name}_id" for name in _SPECIAL.split())


def _not_unicode(error: UnicodeEncodeError) -> DecodeError:
    return DecodeError(f"the text is not valid Unicode: {error.reason} at character {error.start}")


def decode_utf8(payload: bytes | memoryview) -> str:
    """Text of a UTF-8 payload, without a byte order mark. Raises DecodeError."""
    try:
        return str(payload, "utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DecodeError(f"not valid UTF-8: {error.reason} at byte {error.start}") from None


def _checked_ids(returned: object, name: str | None) -> NDArray[np.int32]:
    if type(returned) is list and returned and type(returned[0]) is int:
        try:
            fast = array("i", returned)  # several times faster than NumPy, which is only needed to explain an error
        except (TypeError, OverflowError):
            pass
        else:
            if min(returned) >= 0:
                return np.frombuffer(fast, np.int32)
    try:
        ids = np.asarray(returned)
    except (ValueError, OverflowError):
        ids = np.asarray(None)
    if ids.size == 0 and ids.ndim == 1:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        text = repr(returned)
        raise DecodeError(
            f"tokenizer {name!r} returned {type(returned).__name__} {text[:60]}{'...' if len(text) > 60 else ''}, not "
            "a list of ints; wrap it, as in lambda text: tokenizer.encode(text).ids"
        )
    low, high = ids.min(), ids.max()
    if low < 0 or high > _INT32_MAX:
        raise DecodeError(f"tokenizer {name!r} returned id {low if low < 0 else high}, outside [0, {_INT32_MAX}]")
    return ids.astype(np.int32)


_PROBE: Final = "It's 1 of 12:\n\n  d\u00e9j\u00e0 vu \U0001f600 <s></s>"
_WAY_OUT: Final = (
    "wrap it, as in TextPreprocessor(lambda text: tokenizer.encode(text, add_special_tokens=False), id=...)"
)
_SPLITS: Final = "`split_special_tokens`, `encode_special_tokens`"
_BATCH_CHARACTERS: Final = 1 << 20
"""Of the texts of one call: what it returns takes a hundred times as much memory until it is in arrays."""
_NOWHERE: Final = (0, 0)


class Encoded(NamedTuple):
    """Tokens of one text, in order: arrays of shape (num_tokens,)."""

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]  # characters of each; start and end are equal for tokens without characters
    ends: NDArray[np.int64]


@dataclass(frozen=True)
class FastTokenizer:
    """A tokenizer, compared by content in every process. Several threads may use it at the same time."""

    json: str = field(repr=False)  # `tokenizers.Tokenizer.to_str`, without truncation and padding
    special_tokens: tuple[tuple[str, str], ...] = ()  # (name, token) as in `special_tokens_map`

    @cached_property
    def id(self) -> str:
        """A hash of the content."""
        digest = hashlib.blake2b(self.json.encode(), digest_size=16)
        digest.update(repr(self.special_tokens).encode())
        return digest.hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoded:
        """Tokens of `text`, including those around every text if `add_special_tokens`."""
        (encoded,) = self.encode_batch([text], add_special_tokens=[add_special_tokens])
        if isinstance(encoded, Exception):
            raise encoded
        return encoded

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: Sequence[bool]) -> list[Encoded | Exception]:
        """Tokens of each text as `encode` returns them, or the exception that it raises, in the order of the texts.

        All cores work, and other Python threads run meanwhile: a tokenizer's own `encode` holds the interpreter's lock.
        """
        results: dict[int, Encoded | Exception] = {}
        for numbers, some, added in _groups(texts, add_special_tokens):
            try:
                encodings = self._running.encode_batch(some, add_special_tokens=added)
            except Exception:  # noqa: BLE001 - of one of the texts; its own `encode` says what is wrong with it
                for number, text in zip(numbers, some, strict=True):
                    try:
                        if len(some) > 1:
                            results[number] = self.encode(text, add_special_tokens=added)
                        else:
                            results[number] = _arrays(self._running.encode(text, add_special_tokens=added))
                    except Exception as error:  # noqa: BLE001 - the caller decides
                        results[number] = error
                continue
            encodings.reverse()
            for number in numbers:
                results[number] = _arrays(encodings.pop())  # each is freed before the next becomes arrays
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
        try:  # its `encode` would hold the interpreter's lock, a batch does not
            encoding = self._running.encode_batch([text], add_special_tokens=False)[0]
        except Exception:  # noqa: BLE001 - its `encode` says what is wrong with the text
            encoding = self._running.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
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
    """Yield (numbers of texts, these texts, their flag), so that each group can be one call of not too much text."""
    for added in (False, True):
        numbers = [number for number, each in enumerate(add_special_tokens) if each == added]
        ends = accumulate(len(texts[number]) for number in numbers)
        for _, group in groupby(zip(numbers, ends, strict=True), key=lambda each: each[1] // _BATCH_CHARACTERS):
            some = [number for number, _ in group]
            yield some, [texts[number] for number in some], added


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
    """Return the value of a `tokenizers.Tokenizer`, or of a fast tokenizer of transformers; else None. Raises
    ValueError for one that is slow, gives other ids than its backend, or splits special tokens.
    """
    if given is None or isinstance(given, FastTokenizer):
        return given
    name = f"the tokenizer {type(given).__name__}"
    of_transformers = hasattr(given, "apply_chat_template") and hasattr(given, "special_tokens_map")
    backend: Any = getattr(given, "backend_tokenizer", None) if of_transformers else given
    if not all(callable(getattr(backend, method, None)) for method in ("to_str", "encode", "no_truncation")):
        if of_transformers:
            raise ValueError(f"{name} has no offsets, as it is no fast tokenizer: {_WAY_OUT}")
        return None
    if getattr(given, "split_special_tokens", False) if of_transformers else backend.encode_special_tokens:
        raise ValueError(
            f"{name} splits special tokens into pieces ({_SPLITS}), which its JSON does not contain: {_WAY_OUT}"
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
            raise ValueError(f"{name} gives other ids than its backend tokenizer: {_WAY_OUT}")
    return fast
