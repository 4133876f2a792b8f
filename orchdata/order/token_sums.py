"""Tokens of an epoch up to any position, and the position up to any number of tokens.

    tokens of each block (a fact of the data set) --the epoch's windows of blocks--> tokens up to each window
                                                  --one window per stream------------> tokens up to a position

With any seed, the shuffle moves whole blocks into windows. So an epoch costs one addition per block, and a look-up the
samples of one window per stream. The last span is kept, because the next step begins there.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.storage.cache import MappedArray
from orchdata.order.order import Order

Ints = NDArray[np.int64]

_BLOCKS_AT_ONCE = 4096
_EPOCHS_KEPT = 2


class TokenCounts(Protocol):
    """Tokens of samples: rows, int64 (n,) -> tokens, int64 (n,), each at least 1."""

    def __call__(self, row: Ints) -> Ints: ...


class TokenSums:
    """Sums of tokens along an order. Pickles, with its blocks as a mapped file.

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
