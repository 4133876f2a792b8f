"""The usable rows of a data set as states store them: digests, and the rows that are left out.

    index, excluded rows --hashed once, when a state is first needed--> digests of samples, usable rows and tokens
    excluded rows --runs, deltas, zlib, base64--> text of a state

Digests bind a state to content: names of samples in their shards, not rules or formats. A state with other digests goes
on in the order that its epoch began with, for which it has the rows that were left out.
"""

from __future__ import annotations

import binascii
import hashlib
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.indexed.first import chosen_shards, num_first_rows
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.selection import Split, left_out
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.loaders.errors import StateError
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import Order
from orchdata.order.steps import Batches, TokenBatches
from orchdata.planning.windows import WindowBatches

Ints = NDArray[np.int64]

MOST_TEXT = 64 << 10
"""Characters of rows in a state. What does not fit comes from the index of then."""
_CHUNK_ROWS = 1 << 20
_MOST_BYTES = 1 << 32
_DIGEST_BYTES = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class SourceRows:
    """The rows of a data set, or of a source of a mixture.

    Attributes:
        name: of the source; "" without a mixture.
        order: of its usable rows.
        excluded: rows that do not come, ascending.
        by_tokens: whether steps or shares go by tokens, as pieces always do.
        exclude: returns the excluded rows of another index of the same shards, under the same arguments.
        listed: rows of the user's own order.
    """

    name: str
    dataset: ShardDataset
    index: Index
    order: Order
    excluded: Ints
    by_tokens: bool
    exclude: Callable[[Index], Ints]
    listed: Ints | None = None

    def __len__(self) -> int:
        """Number of rows: those of the index, or of its first samples."""
        return self.num_rows

    @cached_property
    def num_rows(self) -> int:
        """Number of rows: those of the index, or of its first samples."""
        return num_first_rows(self.index, self.dataset.selections)

    @cached_property
    def is_split(self) -> bool:
        """Whether any sample has several rows."""
        return self.index.is_split and bool(np.any(self.index.piece[: self.num_rows]))

    @property
    def called(self) -> str:
        """Its name in messages."""
        return f"source {self.name!r}" if self.name else "the data set"

    @cached_property
    def samples(self) -> str:
        """Digest of all samples by shard and key, usable or not."""
        if not len(self.excluded) and not self.is_split:
            return self.usable
        return self._digest(lambda start, stop: self.index.piece[start:stop] == 0)

    @cached_property
    def usable(self) -> str:
        """Digest of the usable rows by shard, key and piece."""
        return self._digest(self.is_usable, pieces=self.is_split)

    @cached_property
    def tokens(self) -> str:
        """Digest of the tokens of the usable rows."""
        digest = _hasher()
        for start, stop in _chunks(self.num_rows):
            digest.update(self.index.llm_tokens[start:stop][self.is_usable(start, stop)].astype("<i4").tobytes())
        return str(digest.hexdigest())

    @property
    def digests(self) -> dict[str, str]:
        """The digests that must be equal for a state to go on as if nothing had changed."""
        return {"usable": self.usable} | ({"tokens": self.tokens} if self.by_tokens or self.is_split else {})

    @cached_property
    def pieces(self) -> Ints:
        """Rows of each sample."""
        return np.diff(self.first_rows, append=self.num_rows)

    @cached_property
    def first_rows(self) -> Ints:
        """First row of each sample."""
        rows = self.index.sample_rows()
        return rows[: int(np.searchsorted(rows, self.num_rows))]

    @cached_property
    def split_samples(self) -> Ints:
        """Numbers of the samples that a split leaves out. They follow from keys, so no state stores them."""
        splits = [each for each in self.dataset.selections if isinstance(each, Split)]
        rows = left_out(self.index, splits) if splits else np.zeros(0, np.int64)
        found: Ints = np.searchsorted(self.first_rows, rows[self.index.piece[rows] == 0]).astype(np.int64)
        return found

    def is_usable(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which of the rows [start, stop) are usable."""
        usable = np.ones(stop - start, bool)
        low, high = np.searchsorted(self.excluded, [start, stop])
        usable[self.excluded[low:high] - start] = False
        return usable

    def numbers(self) -> dict[str, Any]:
        """Return what a state stores of these rows, JSON-safe; `texts` is the rest."""
        found: dict[str, Any] = {
            "num_rows": self.num_rows,
            "num_usable": self.num_rows - len(self.excluded),
            **self.digests,
        }
        return found | ({} if self.samples == self.usable else {"samples": self.samples})

    @cached_property
    def texts(self) -> dict[str, str]:
        """The excluded rows, and the rows of each sample, as texts."""
        rows = self.excluded
        if len(self.split_samples):
            rows = np.setdiff1d(rows, rows_of_samples(self.split_samples, self.pieces), assume_unique=True)
        found = {"excluded": rows_text(rows)} if len(rows) else {}
        return found | ({"pieces": ints_text(self.pieces)} if self.is_split else {})

    def _digest(self, chosen: Callable[[int, int], NDArray[np.bool_]], *, pieces: bool = False) -> str:
        """Return a digest of chosen rows: how many each shard has, their keys, and the numbers of their pieces."""
        index = self.index
        lengths_of, keys_of, pieces_of = _hasher(), _hasher(), _hasher()
        counts = np.zeros(len(chosen_shards(index, self.dataset.selections)), np.int64)
        for start, stop in _chunks(self.num_rows):
            mask = chosen(start, stop)
            offsets, data = index.keys(start, stop)
            lengths = np.diff(offsets)
            if not mask.all():
                data, lengths = data[np.repeat(mask, lengths)], lengths[mask]
            lengths_of.update(lengths.astype("<i4").tobytes())
            keys_of.update(np.ascontiguousarray(data))
            if pieces:
                pieces_of.update(index.piece[start:stop][mask].astype("<i4").tobytes())
            counts += np.bincount(index.shard[start:stop][mask], minlength=len(counts))
        whole = _hasher()
        for part in (counts.astype("<i8").tobytes(), *(each.digest() for each in (lengths_of, keys_of, pieces_of))):
            whole.update(part)
        return str(whole.hexdigest())


def rows_of(
    dataset: ShardDataset | Mixture,
    index: Index,
    order: Order | MixtureOrder,
    batches: Batches,
    listed: Ints | None,
    excluded: Ints,
    excluded_of: Callable[[ShardDataset, Index], Ints],
) -> tuple[SourceRows, ...]:
    """Return the usable rows of the data set, or of each source, for states."""
    parts: list[tuple[str, ShardDataset, Index, Order]] = []
    by_tokens = isinstance(batches, TokenBatches | WindowBatches)
    if isinstance(dataset, Mixture) and isinstance(order, MixtureOrder) and isinstance(index, JoinedIndex):
        by_tokens = by_tokens or order.by == "tokens"
        for leaf, own, source in zip(dataset.leaves, index.indexes, order.sources, strict=True):
            parts.append((leaf.name, leaf.dataset, own, source.order))
    elif isinstance(dataset, ShardDataset) and isinstance(order, Order):
        parts.append(("", dataset, index, order))
    return tuple(
        SourceRows(
            name=name,
            dataset=of,
            index=own,
            order=own_order,
            excluded=own_order.excluded if listed is None else excluded,
            by_tokens=by_tokens,
            exclude=partial(excluded_of, of),
            listed=listed,
        )
        for name, of, own, own_order in parts
    )


def dump_rows(sources: Sequence[SourceRows]) -> list[Any]:
    """Return what a state stores of the rows of its sources, in their order; a number stands for an equal entry."""
    found: list[Any] = []
    left = MOST_TEXT
    seen: dict[tuple[str, int, str, str], int] = {}
    for source in sources:
        # The first samples of an index have fewer rows, and rows that a split leaves out are not stored.
        split = hashlib.blake2b(source.split_samples.tobytes()).hexdigest()
        rows = (str(source.index.path), source.num_rows, source.order.excluded_digest, split)
        same = seen.setdefault(rows, len(found))
        if same < len(found):
            found.append(same)
            continue
        entry, texts = source.numbers(), source.texts
        size = sum(map(len, texts.values()))
        if size <= left:
            left -= size
            entry |= texts
        else:
            entry["too_large"] = True
        found.append(entry)
    return found


def load_rows(state: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    """Return the entry of each source that `dump_rows` has written. Raises StateError."""
    stored = state.get("rows")
    if not isinstance(stored, list | tuple) or len(stored) != count:
        raise StateError(f"the state is damaged: its 'rows' are {stored!r:.80}")
    entries: list[Mapping[str, Any]] = []
    for each in stored:
        entry = entries[each] if type(each) is int and 0 <= each < len(entries) else each
        kinds = {"num_rows": int, "num_usable": int, "usable": str}
        if not isinstance(entry, Mapping) or any(type(entry.get(name)) is not kind for name, kind in kinds.items()):
            raise StateError(f"the state is damaged: its 'rows' have {each!r:.80}")
        entries.append(entry)
    return entries


def rows_of_samples(samples: Ints, pieces: Ints) -> Ints:
    """Return the rows of samples, ascending, where each sample has so many rows."""
    first = np.cumsum(pieces) - pieces
    counts = pieces[samples]
    ends = np.cumsum(counts)
    return np.repeat(first[samples] - (ends - counts), counts) + np.arange(int(counts.sum()))


def rows_text(rows: Ints) -> str:
    """Return ascending rows as text: their runs, packed."""
    starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    stops = np.append(starts[1:], len(rows))
    first, lengths = rows[starts], stops - starts
    gaps = np.diff(first, prepend=0)
    return ints_text(np.concatenate([gaps, lengths]))


def text_rows(text: Any, below: int) -> Ints:
    """Return the rows of `rows_text`. Raises StateError for anything but ascending rows below a number."""
    both = text_ints(text)
    gaps, lengths = both[: len(both) // 2], both[len(both) // 2 :]
    # Each number is compared before any sum: sums of damaged numbers wrap around.
    are_runs = len(gaps) == len(lengths) <= below and within(gaps, 0, below) and within(lengths, 1, below)
    if not are_runs or int(lengths.sum()) > below:
        raise StateError(f"the state is damaged: {text!r:.60} are no rows")
    first, ends = np.cumsum(gaps), np.cumsum(lengths)
    rows = np.repeat(first - (ends - lengths), lengths) + np.arange(int(lengths.sum()))
    if len(rows) and (rows[0] < 0 or rows[-1] >= below or (np.diff(rows) <= 0).any()):
        raise StateError(f"the state is damaged: {text!r:.60} are no rows below {below}")
    return rows


def within(values: Ints, least: int, most: int) -> bool:
    """Return whether all values are at least `least` and at most `most`."""
    return bool(((values >= least) & (values <= most)).all())


def ints_text(values: Ints) -> str:
    """Return integers as text, with as many bytes each as the largest needs."""
    least, most = int(values.min(initial=0)), int(values.max(initial=0))
    width = next(size for size in (1, 2, 4, 8) if -(1 << (8 * size - 1)) <= least and most < 1 << (8 * size - 1))
    return f"{width}{b64encode(zlib.compress(values.astype(f'<i{width}').tobytes(), 9)).decode()}"


def text_ints(text: Any) -> Ints:
    """Return the integers of `ints_text`. Raises StateError for anything else."""
    try:
        width = int(text[:1])
        unpacked = zlib.decompressobj()
        data = unpacked.decompress(b64decode(text[1:], validate=True), _MOST_BYTES)
        if width not in (1, 2, 4, 8) or not unpacked.eof:
            raise ValueError(text[:1])
        return np.frombuffer(data, f"<i{width}").astype(np.int64)
    except (TypeError, ValueError, binascii.Error, zlib.error) as error:
        raise StateError(f"the state is damaged: {text!r:.60} stands for no rows") from error


def _hasher() -> Any:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _CHUNK_ROWS, count)) for start in range(0, count, _CHUNK_ROWS))
