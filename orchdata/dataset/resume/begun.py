"""Epochs that go on in the order that they began with: as states store them, and as a change of samples begins them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.resume.former import Former
from orchdata.dataset.resume.rows import (
    MOST_TEXT,
    SourceRows,
    ints_text,
    rows_of_samples,
    rows_text,
    text_ints,
    text_rows,
    within,
)
from orchdata.loaders.errors import StateError
from orchdata.loaders.storage.mapped_array import MappedArray
from orchdata.order.begun import BegunEpoch
from orchdata.order.listed import ListedOrder
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import Order
from orchdata.order.sources import PassStart

Ints = NDArray[np.int64]
_CHUNK = 1 << 20
_LARGEST = 1 << 62
_INTS = ("number", "num_rows", "position", "tokens")


class Begun(NamedTuple):
    """A begun epoch of a source, and in a run without passes of the whole mixture where this pass began."""

    epoch: BegunEpoch | None
    anchor: PassStart | None = None


def begun_of(order: Any, epoch: int) -> list[Begun]:
    """Return what is begun of each source of an order, as far as an epoch and later ones need it."""
    if isinstance(order, MixtureOrder):
        is_over = [
            order.stop != "repeat" and getattr(each.order.begun, "number", epoch) != epoch for each in order.sources
        ]
        return [
            Begun(None) if over else Begun(each.order.begun, each.anchor)
            for each, over in zip(order.sources, is_over, strict=True)
        ]
    assert isinstance(order, Order)
    return [Begun(order.begun if order.begun is not None and order.begun.number == epoch else None)]


def former_order(source: SourceRows, num_rows: int, excluded: Ints) -> Order:
    """Return the order of a source over the rows of then."""
    order = source.order
    if source.listed is not None:
        return ListedOrder(source.listed[~np.isin(source.listed, excluded)])
    return Order(num_rows, shuffle=order.shuffle, seed=order.seed, excluded=excluded, source=order.source)


def rest_of(
    source: SourceRows, former: Former, *, number: int, position: int, tokens: int, begun: BegunEpoch | None = None
) -> BegunEpoch:
    """Return the rest of an epoch from a position on, without the samples that cannot be used now.

    Args:
        begun: what it is the rest of, if the samples have changed in this epoch before: in the rows of `former`.
    """
    order = former_order(source, former.num_rows, former.excluded) if begun is None else begun.order
    removed = np.zeros(0, np.int64) if begun is None else begun.removed.array
    length = order.num_samples - len(removed)
    if not 0 <= position <= length:
        raise StateError(f"the state points at position {position} of an epoch of {length} samples")
    rows = former.rows
    if begun is not None and begun.rows.array.size:
        before = begun.rows.array
        rows = np.where(before >= 0, former.now(before), -1)
    gone = [removed]
    now = BegunEpoch(
        number=number,
        order=order,
        num_rows=former.num_rows if begun is None else begun.num_rows,
        excluded=MappedArray(former.excluded) if begun is None else begun.excluded,
        removed=MappedArray(removed),
        rows=MappedArray(rows),
        position=position,
        tokens=tokens,
    )
    for start in range(position, length, _CHUNK):
        stop = min(start + _CHUNK, length)
        row = now.rows_at(start, stop)
        lost = (row < 0) | _among(row, source.excluded)
        gone.append(now.former_positions(start, stop)[lost])
    return BegunEpoch(**{**vars(now), "removed": MappedArray(np.union1d(removed, np.concatenate(gone)))})


def dump_begun(sources: Sequence[SourceRows], begun: Sequence[Begun]) -> list[Any]:
    """Return what a state stores of the begun epochs of its sources, JSON-safe; None for a source without one."""
    found: list[Any] = []
    left = MOST_TEXT
    for source, (epoch, anchor) in zip(sources, begun, strict=True):
        entry: dict[str, Any] = {} if anchor is None else {"anchor": list(anchor)}
        if epoch is not None:
            texts = _texts(source, epoch)
            entry |= {name: getattr(epoch, name) for name in _INTS} | {"order": _digest(epoch.order)}
            size = sum(map(len, texts.values()))
            entry |= texts if size <= left else {"too_large": True}
            left -= size if size <= left else 0
        found.append(entry or None)
    return found


def begun_in(state: Mapping[str, Any], count: int) -> Sequence[Any]:
    """Return what a state stores of the begun epoch of each source. Raises StateError for another number of them."""
    stored = state.get("begun", [None] * count)
    if not isinstance(stored, list | tuple) or len(stored) != count:
        raise StateError(f"the state is damaged: its 'begun' is {stored!r:.80}")
    return stored


def load_begun(
    state: Mapping[str, Any], sources: Sequence[SourceRows], formers: Sequence[Former | None] | None = None
) -> list[Begun]:
    """Return the begun epochs of a state. Raises StateError.

    Args:
        formers: the rows when the state was written, of sources that have changed since.
    """
    stored = begun_in(state, len(sources))
    then = [None] * len(sources) if formers is None else formers
    return [_load(*each, state) for each in zip(stored, sources, then, strict=True)]


def _load(entry: Any, source: SourceRows, former: Former | None, state: Mapping[str, Any]) -> Begun:
    if entry is None:
        return Begun(None)
    if not isinstance(entry, Mapping):
        raise StateError(f"the state is damaged: its 'begun' has {entry!r:.80}")
    anchor = entry.get("anchor")
    if anchor is not None and not _is_start(anchor):
        raise StateError(f"the state is damaged: its 'begun' has {entry!r:.80}")
    start = None if anchor is None else PassStart(*anchor)
    if "number" not in entry:
        return Begun(None, start)
    if not all(type(entry.get(name)) is int and 0 <= entry[name] < _LARGEST for name in _INTS):
        raise StateError(f"the state is damaged: its 'begun' has {entry!r:.80}")
    if entry.get("too_large"):
        raise StateError(
            f"the samples of {source.called} have changed in the epoch of the state, and the rows of its order need "
            f"more than {MOST_TEXT >> 10} KiB, which no state stores: begin the next epoch by "
            f"loader.set_epoch({state['epoch'] + 1}) in place of load_state_dict"
        )
    num_rows = entry["num_rows"]
    num_then = len(source) if former is None else former.num_rows
    rows = np.cumsum(text_ints(entry["rows"])) if "rows" in entry else np.zeros(0, np.int64)
    if num_rows != (len(rows) if "rows" in entry else num_then) or not within(rows, -1, num_then - 1):
        raise StateError(f"the state is damaged: {num_rows} rows of its begun epoch are not those that it says")
    excluded = text_rows(entry["excluded"], num_rows) if "excluded" in entry else np.zeros(0, np.int64)
    if "rows" not in entry:
        by_split = rows_of_samples(source.split_samples, source.pieces) if former is None else former.by_split
        excluded = np.union1d(excluded, by_split)
    order = former_order(source, num_rows, excluded)
    if _digest(order) != entry.get("order"):
        raise StateError("the state is damaged: the rows of its begun epoch are not those that it says")
    removed = text_rows(entry["removed"], order.num_samples) if "removed" in entry else np.zeros(0, np.int64)
    begun = BegunEpoch(
        number=entry["number"],
        order=order,
        num_rows=num_rows,
        excluded=MappedArray(excluded),
        removed=MappedArray(removed),
        rows=MappedArray(rows),
        position=entry["position"],
        tokens=entry["tokens"],
    )
    if begun.position > begun.length:
        raise StateError(f"the state points at position {begun.position} of an epoch of {begun.length} samples")
    return Begun(begun, start)


def _is_start(anchor: Any) -> bool:
    """Return whether it is a `PassStart` as a state stores it."""
    is_list = isinstance(anchor, list | tuple) and len(anchor) == len(PassStart._fields)
    return is_list and all(type(each) is int and 0 <= each < _LARGEST for each in anchor)


def _texts(source: SourceRows, epoch: BegunEpoch) -> dict[str, str]:
    found, rows = {}, epoch.rows.array
    excluded = epoch.excluded.array
    if rows.size:
        found["rows"] = ints_text(np.diff(rows, prepend=0))
    else:
        by_split = rows_of_samples(source.split_samples, source.pieces)
        excluded = np.setdiff1d(excluded, by_split, assume_unique=True)
    if len(excluded):
        found["excluded"] = rows_text(excluded)
    if len(epoch.removed.array):
        found["removed"] = rows_text(epoch.removed.array)
    return found


def _digest(order: Any) -> str:
    return hashlib.blake2b(json.dumps(order.describe(), sort_keys=True).encode(), digest_size=8).hexdigest()


def _among(rows: Ints, others: Ints) -> NDArray[np.bool_]:
    """Return which of the rows are among others, which are ascending."""
    if not len(others):
        return np.zeros(len(rows), bool)
    at = np.minimum(np.searchsorted(others, rows), len(others) - 1)
    found: NDArray[np.bool_] = others[at] == rows
    return found
