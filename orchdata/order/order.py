"""The order of an epoch: position -> sample, seeded, resumable, without a permutation in memory; and tokens along it.

    position --stream, window, block (native.permutation)--> k-th usable sample --skip the excluded--> index row

Any position is computed independently, so resuming costs nothing, and all ranks compute the same samples without
communication. The order depends only on the number of samples, the excluded rows, `Shuffle`, seed and epoch.

    tokens of each block (a fact of the data set) --the epoch's windows of blocks--> tokens up to each window
                                                  --one window per stream------------> tokens up to a position
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.storage.cache import MappedArray
from orchdata.native.permutation import BLOCK, blocks_in_sequence, derive_key, shuffled_rows

Ints = NDArray[np.int64]
By = Literal["tokens", "samples"]

FORMAT = 1  # of the sequence itself: a change of the algorithm must not resume an older state
_WINDOW = 64
_BLOCKS_AT_ONCE = 4096
_EPOCHS_KEPT = 2

_LARGEST = {"window": 1 << 31, "streams": 1 << 16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shuffle:
    """How far samples are shuffled, and from how many streams they are drawn.

    Blocks of 256 consecutive samples (the last block may be smaller) are permuted over the whole stream. Then the
    samples of `window` neighbouring blocks are permuted among themselves. A stream of up to `window * 256` samples is
    thus one uniform permutation. A larger one is shuffled within a window of `window` blocks, so that reads stay close
    to each other.

    Attributes:
        window: number of blocks that are shuffled together; a larger window shuffles better and reads more widely.
        streams: number of contiguous ranges of the samples; their sizes differ by at most one. Position p is drawn from
            stream p % streams, so the shares of the streams in a global batch differ by at most one. In a mixture each
            source has its own streams, and shares differ by at most one per source.
    """

    window: int = _WINDOW
    streams: int = 1

    def __post_init__(self) -> None:
        for name in ("window", "streams"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST[name]:
                raise ValueError(f"Shuffle.{name} must be an integer from 1 to {_LARGEST[name]}, got {value!r}")


class Samples(NamedTuple):
    """Samples in sequence; all arrays are (n,). Pieces of documents in windows have all columns."""

    source: NDArray[np.int32]  # and row: the sample, as `SampleOrder.rows` gives it
    row: Ints
    stream: Ints  # of its source, that it is drawn from
    passes: NDArray[np.int32] | None = None  # of the pass through its source, from 0; None without names
    tokens: Any = None  # of a piece, at least 1
    first: Any = None  # token of the piece in its document
    epoch: Any = None  # whose pass through the documents the piece belongs to: that of the step, or the one before

    def take(self, indices: Any) -> Samples:
        columns: Any = (None if column is None else column[indices] for column in self)
        return Samples(*columns)

    @staticmethod
    def concatenate(parts: Sequence[Samples]) -> Samples:
        """Return samples of sources with names as one; or others, if there are any."""
        if not parts:
            none = np.zeros(0, np.int64)
            return Samples(none.astype(np.int32), none, none, none.astype(np.int32))
        columns: Any = (None if each[0] is None else np.concatenate(each) for each in zip(*parts, strict=True))
        return Samples(*columns)


class SampleOrder(Protocol):
    """The seeded sequence of an epoch's samples, with O(1) access to any position.

    Attributes:
        num_samples: usable samples of the data set.
        sources: those of a mixture; one data set is a source without a name.
        names, loss_weights: of the sources.
        by: what the sequence depends on of each sample besides its place.
        travels: whether tasks of steps carry their samples: to find them costs more than to send them.
    """

    num_samples: int
    sources: tuple[MixedSource, ...] = ()
    names: tuple[str, ...] = ()
    loss_weights: tuple[float, ...] = ()
    by: By = "samples"
    travels: bool = False

    def length(self, epoch: int) -> int:
        """Return the samples of an epoch."""

    def samples(self, epoch: int, start: int, stop: int) -> Samples:
        """Return the samples at positions [start, stop) of an epoch."""

    def rows(self, epoch: int, start: int, stop: int) -> tuple[NDArray[np.int32], Ints]:
        """Return their (source, row) alone."""
        source, row, *_ = self.samples(epoch, start, stop)
        return source, row


class Order(SampleOrder):
    """The sequence of samples of every epoch over one dataset. It pickles, with excluded rows as a mapped file.

    Args:
        num_samples: rows of the dataset.
        shuffle: None for the order of the dataset itself.
        seed: any integer; another seed gives another sequence.
        excluded: rows to leave out, sorted and distinct, int64 (num_excluded,). They are removed before shuffling.
        source: number of the dataset in a mixture; `rows` returns it for every sample.

    Attributes:
        excluded_digest: hex digest of the excluded rows.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        shuffle: Shuffle | None,
        seed: int,
        excluded: Ints | None = None,
        source: int = 0,
    ) -> None:
        if num_samples < 0:
            raise ValueError(f"num_samples must be at least 0, got {num_samples}")
        rows = np.zeros(0, np.int64) if excluded is None else np.array(excluded, np.int64)
        if rows.ndim != 1 or (np.diff(rows) <= 0).any() or (rows.size and not 0 <= rows[0] <= rows[-1] < num_samples):
            raise ValueError(f"excluded must be sorted, distinct rows below {num_samples}")

        self.num_samples = num_samples - rows.size
        self.shuffle = shuffle
        self.seed = seed
        self.source = source
        self.excluded_digest = hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest()
        # Usable samples before each excluded row: sample k comes after every excluded row with at most k before it.
        self._before = MappedArray(rows - np.arange(rows.size))

    @property
    def excluded(self) -> Ints:
        """The excluded rows, ascending."""
        before = self._before.array
        return before + np.arange(before.size)

    @property
    def orders(self) -> tuple[Order, ...]:
        """The order of each source."""
        return (self,)

    def sums(self, counts: TokenCounts) -> TokenSums:
        """Return the sums of tokens along the order."""
        return TokenSums(self, counts)

    def given(self, epoch: int) -> list[tuple[int, int]]:
        """Return the samples and tokens that each of `sources` gives in an epoch."""
        return []

    @property
    def streams(self) -> int:
        """Position p is drawn from stream p % streams."""
        return 1 if self.shuffle is None else self.shuffle.streams

    def length(self, epoch: int) -> int:
        """Return the samples of an epoch, equal for all epochs."""
        return self.num_samples

    def rows(self, epoch: int, start: int, stop: int) -> tuple[NDArray[np.int32], Ints]:
        """Return the samples at positions [start, stop) of an epoch: (source, row), each (stop - start,), new.

        Work and memory are O(stop - start), for any start.

        Raises:
            ValueError: positions outside of the epoch, or a negative epoch.
        """
        if not 0 <= start <= stop <= self.num_samples:
            raise ValueError(f"positions [{start}, {stop}) are not within an epoch of {self.num_samples} samples")
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        return self.located(self._samples(epoch, start, stop))

    def samples(self, epoch: int, start: int, stop: int) -> Samples:
        return Samples(*self.rows(epoch, start, stop), np.arange(start, stop) % self.streams)

    def located(self, samples: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return (source, row) of usable samples, given by number in [0, num_samples). Overwrites `samples`."""
        before = self._before.array
        if before.size:
            samples += np.searchsorted(before, samples, side="right")
        return np.full(len(samples), self.source, np.int32), samples

    def stream_bounds(self) -> Ints:
        """Return the first usable sample of each stream, by number, and the number of all: int64 (streams + 1,)."""
        size, extra = divmod(self.num_samples, self.streams)
        stream = np.arange(self.streams + 1)
        return stream * size + np.minimum(stream, extra)

    def block_bounds(self) -> Ints:
        """Return the first usable sample of each block, by number, and the number of all: int64 (num_blocks + 1,).

        Each stream is cut into blocks of 256 samples, from its first sample on; its last block may be smaller. Blocks
        are numbered from one stream to the next.
        """
        starts, num_blocks = self.stream_bounds()[:-1], self._blocks_of_streams()
        first = np.cumsum(num_blocks) - num_blocks  # block of each stream
        in_stream = np.arange(num_blocks.sum()) - np.repeat(first, num_blocks)
        return np.append(np.repeat(starts, num_blocks) + in_stream * BLOCK, self.num_samples)

    def window_bounds(self) -> Ints:
        """Return how many blocks come before each window of each stream: int64 (streams, num_windows + 1).

        Blocks are counted over all streams, one after the other. A row ends with the end of the stream's last window,
        twice if the stream has a window less than others. All samples of a window come before all of the next window
        of its stream.
        """
        num_blocks = self._blocks_of_streams()[:, None]
        num_windows = -(-num_blocks // self._window)
        number = np.minimum(np.arange(self.num_windows + 1), num_windows)
        return np.cumsum(num_blocks)[:, None] - num_blocks + number * num_blocks // np.maximum(1, num_windows)

    @property
    def num_windows(self) -> int:
        """Windows of the longest stream."""
        samples = -(-self.num_samples // self.streams)
        return -(-samples // (self._window * BLOCK))

    @property
    def _window(self) -> int:
        return _WINDOW if self.shuffle is None else self.shuffle.window

    def _blocks_of_streams(self) -> Ints:
        return -(-np.diff(self.stream_bounds()) // BLOCK)

    def blocks(self, epoch: int) -> Ints:
        """Return the blocks of one stream after the other, each in its sequence of an epoch: int64 (num_blocks,)."""
        num_blocks = int(self._blocks_of_streams().sum())
        if self.shuffle is None:
            return np.arange(num_blocks)
        blocks = np.empty(num_blocks, np.uint64)
        blocks_in_sequence(np.uint64(self.num_samples), np.uint64(self.streams), self._key(epoch), blocks)
        return blocks.view(np.int64)

    def _key(self, epoch: int) -> np.uint64:
        return np.uint64(derive_key(np.uint64(self.seed & (1 << 64) - 1), np.uint64(epoch)))

    def _samples(self, epoch: int, start: int, stop: int) -> Ints:
        if self.shuffle is None or start == stop:
            return np.arange(start, stop, dtype=np.int64)
        out = np.empty(stop - start, np.uint64)
        window, streams = np.uint64(self.shuffle.window), np.uint64(self.shuffle.streams)
        shuffled_rows(np.uint64(self.num_samples), window, streams, self._key(epoch), np.uint64(start), out)
        return out.view(np.int64)

    def describe(self) -> dict[str, object]:
        """Return what the sequence depends on, JSON-safe: two orders with equal descriptions are equal."""
        shuffle = None if self.shuffle is None else {"window": self.shuffle.window, "streams": self.shuffle.streams}
        return {
            "format": FORMAT,
            "num_samples": self.num_samples,
            "excluded": self.excluded_digest,
            "num_excluded": int(self._before.array.size),
            "shuffle": shuffle,
            "seed": None if self.shuffle is None else self.seed,
        }


class ListedOrder(Order):
    """The same rows in the same sequence in every epoch. It pickles, with the rows as a mapped file.

    Args:
        listed: distinct rows, int64 (num_listed,).
        excluded: rows to leave out.
    """

    def __init__(self, listed: Ints, excluded: Ints) -> None:
        rows = listed[~np.isin(listed, excluded)]
        super().__init__(len(rows), shuffle=None, seed=0)
        self._rows = MappedArray(rows)
        self._digest = hashlib.blake2b(np.ascontiguousarray(listed).tobytes(), digest_size=8).hexdigest()

    def located(self, samples: Ints) -> tuple[NDArray[np.int32], Ints]:
        source, indices = super().located(samples)
        return source, self._rows.array[indices]

    def describe(self) -> dict[str, object]:
        return super().describe() | {"rows": self._digest}


class TokenCounts(Protocol):
    """Tokens of samples: rows, int64 (n,) -> tokens, int64 (n,), each at least 1."""

    def __call__(self, row: Ints) -> Ints: ...


class TokenSums:
    """Sums of tokens along an order. Pickles, with its blocks as a mapped file.

    With any seed, the shuffle moves whole blocks into windows. So an epoch costs one addition per block, and a look-up
    the samples of one window per stream. The last span is kept, because the next step begins there.

    Args:
        order: order of the samples.
        counts: tokens of each sample.
        blocks: tokens of every block, stream after stream; by default they are computed.

    Attributes:
        total: tokens of an epoch.
    """

    def __init__(self, order: Order, counts: TokenCounts, blocks: MappedArray | None = None) -> None:
        self._order = order
        self._counts = counts
        self._blocks = MappedArray(_add_up(order, counts)) if blocks is None else blocks
        self.total = int(self._blocks.array.sum())
        self._epochs: dict[int, _Epoch] = {}
        self._span: tuple[int, _Span] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenSums, (self._order, self._counts, self._blocks)

    def of_epoch(self, epoch: int) -> int:
        """Return the tokens of an epoch, equal for all epochs."""
        return self.total

    def of_epochs_before(self, epoch: int) -> int:
        """Return the tokens of all epochs before this one."""
        return epoch * self.total

    def before(self, epoch: int, position: int) -> int:
        """Return the tokens of the samples before a position, from 0 to num_samples."""
        if position == 0:
            return 0
        span, number = self._known_span(epoch), position - 1
        if span is None or not span.first <= number < span.first + len(span.ends):
            grid = self._epoch(epoch).grid
            low = int(np.searchsorted(grid, number // self._order.streams, side="right")) - 1
            span = self._compute_span(epoch, low, low + 1)
        return int(span.ends[number - span.first])

    def position(self, epoch: int, tokens: int) -> int:
        """Return how many samples end within the first `tokens` tokens of the epoch."""
        if tokens >= self.total:
            return self._order.num_samples
        span = self._known_span(epoch)
        if span is None or not span.base <= tokens < span.ends[-1]:
            kept = self._epoch(epoch)
            # From the last grid point that is certainly not beyond, to the first that certainly is.
            low = max(0, int(np.searchsorted(kept.most, tokens, side="right")) - 1)
            high = int(np.searchsorted(kept.least, tokens, side="right"))
            span = self._compute_span(epoch, low, max(high, low + 1))
        return span.first + int(np.searchsorted(span.ends, tokens, side="right"))

    def _known_span(self, epoch: int) -> _Span | None:
        """Return the span that is kept of an epoch. Where no stream has a second window, it is the whole epoch."""
        kept, order = self._span, self._order
        if kept is not None and kept[0] == epoch:
            return kept[1]
        if order.num_windows > 1:
            return None
        return self._keep_span(epoch, 0, 0, self._counts(order.rows(epoch, 0, order.num_samples)[1]))

    def _compute_span(self, epoch: int, low: int, high: int) -> _Span:
        """Compute the sums between two points of the grid."""
        order, kept = self._order, self._epoch(epoch)
        streams = order.streams
        first, last = int(kept.grid[low]), int(kept.grid[high])
        stream = np.arange(streams)
        window = np.count_nonzero(kept.starts <= first, axis=1) - 1
        begins, base = kept.starts[stream, window], int(kept.sums[stream, window].sum())
        start, stop = int(begins.min()) * streams, min(last * streams, order.num_samples)
        tokens = self._counts(order.rows(epoch, start, stop)[1])
        head = first * streams - start  # samples before the first grid point
        position = np.arange(start, start + head)
        base += int(tokens[:head][position // streams >= begins[position % streams]].sum())
        return self._keep_span(epoch, first * streams, base, tokens[head:])

    def _keep_span(self, epoch: int, first: int, base: int, tokens: Ints) -> _Span:
        span = _Span(first, base, base + np.cumsum(tokens))
        self._span = epoch, span
        return span

    def _epoch(self, epoch: int) -> _Epoch:
        kept = self._epochs.get(epoch)
        if kept is None:
            kept = _epoch_of(self._order, self._blocks.array, epoch)
            self._epochs = dict([*self._epochs.items(), (epoch, kept)][-_EPOCHS_KEPT:])
        return kept


class MixedSource(NamedTuple):
    """One source of a mixture.

    Attributes:
        order: order of its own rows; a pass is one epoch of it.
        counts: tokens of its own rows.
        sums: sums of `counts` along `order`.
        first_row: index of its first row among the rows of all sources.
        loss_weight: weight of each of its loss tokens.
    """

    name: str
    order: Order
    counts: TokenCounts
    sums: TokenSums
    first_row: int
    loss_weight: float = 1.0


class _Span(NamedTuple):
    """Computed positions: `ends` has the tokens up to and with each from `first` on, `base` is those before it."""

    first: int
    base: int
    ends: Ints


class _Epoch(NamedTuple):
    """Sums over windows.

    Attributes:
        starts: samples of each stream before each of its windows, and of all, int64 (streams, num_windows + 1); a
            stream with a window less than others has the number of all twice.
        sums: tokens of these samples.
        grid: samples of each stream before some points of the epoch.
        least, most: bounds on the tokens of all streams before these points.
    """

    starts: Ints
    sums: Ints
    grid: Ints
    least: Ints
    most: Ints


def _epoch_of(order: Order, blocks: Ints, epoch: int) -> _Epoch:
    # Samples and tokens before each window, first of all streams together, then of its own stream.
    in_sequence, bounds = order.blocks(epoch), order.window_bounds()
    sizes = np.diff(order.block_bounds())
    starts, sums = (np.append(0, np.cumsum(each[in_sequence]))[bounds] for each in (sizes, blocks))
    starts -= starts[:, :1].copy()
    sums -= sums[:, :1].copy()
    # The first stream is the longest. Each of its windows begins in one window of each other stream, or on its edge.
    grid = starts[0]
    num_streams, width = starts.shape
    row = np.arange(num_streams)[:, None]
    apart = row * (grid[-1] + 1)  # one ascending sequence over all streams
    here = np.searchsorted((starts + apart).ravel(), (grid + apart).ravel(), side="right").reshape(starts.shape) - 1
    here -= row * width
    after = np.minimum(here + (starts[row, here] < grid), width - 1)
    return _Epoch(starts, sums, grid, least=sums[row, here].sum(axis=0), most=sums[row, after].sum(axis=0))


def _add_up(order: Order, counts: TokenCounts) -> Ints:
    bounds = order.block_bounds()
    sums = np.zeros(len(bounds) - 1, np.int64)
    for first in range(0, len(sums), _BLOCKS_AT_ONCE):
        mine = bounds[first : first + _BLOCKS_AT_ONCE + 1]
        tokens = counts(order.located(np.arange(mine[0], mine[-1]))[1])
        sums[first : first + _BLOCKS_AT_ONCE] = np.add.reduceat(tokens, mine[:-1] - mine[0])
    return sums


class ShuffleQuality(NamedTuple):
    """How well an epoch is shuffled.

    Attributes:
        mean_displacement: mean distance between a sample's index in the dataset and its position in the epoch, as a
            fraction of the number of samples; 0 without shuffling, 1/3 for a uniform permutation.
        sources_per_batch: mean number of distinct sources in a batch.
    """

    mean_displacement: float
    sources_per_batch: float


def shuffle_quality(
    order: Order, epoch: int, batch_size: int, *, source: NDArray[np.integer] | None = None, max_batches: int = 256
) -> ShuffleQuality:
    """Measure an epoch's shuffle on up to `max_batches` batches spread evenly over it.

    Args:
        order: the order to measure.
        epoch: the epoch to measure.
        batch_size: samples of one global batch.
        source: the source of each row (num_rows,), such as `Index.shard`; default: blocks of 256 consecutive rows.
        max_batches: number of batches to measure.
    """
    if order.num_samples == 0:
        return ShuffleQuality(0.0, 0.0)
    num_batches = -(-order.num_samples // batch_size)
    chosen = np.unique(np.linspace(0, num_batches - 1, min(num_batches, max_batches)).astype(np.int64))
    displacement, seen, sources = 0.0, 0, 0
    for batch in chosen.tolist():
        start, stop = batch * batch_size, min(order.num_samples, (batch + 1) * batch_size)
        rows = order.rows(epoch, start, stop)[1]
        displacement += float(np.abs(rows - np.arange(start, stop)).sum())
        seen += stop - start
        sources += np.unique(rows // BLOCK if source is None else source[rows]).size
    return ShuffleQuality(displacement / seen / order.num_samples, sources / len(chosen))
