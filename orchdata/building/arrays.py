"""The arrays of a microbatch: of its sequences, and of one modality, whose parts the rank encodes and whose tokens its
samples have. Where samples are assigned whole, these are the same parts; where phases are assigned separately, features
travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.batch.tensors import IGNORE, MediaBatch
from orchdata.building.step import Share
from orchdata.loaders.errors import FieldError
from orchdata.loaders.generators import GeneratorMaker
from orchdata.loaders.modalities.modality import PartSize, as_tensor, decode_part, stored_dtype
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.text.preprocessor import WHY_COUNTS_DIFFER
from orchdata.planning.balance import Layout
from orchdata.planning.route import Route

if TYPE_CHECKING:
    from orchdata.building.pages import IndexedShards

Ints = NDArray[np.int64]
Arrays = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shapes and dtypes of arrays by name, known before there is memory for them."""


class Media:
    """One modality of a microbatch, of the samples with these indices in the global batch. Parts that are encoded here
    are numbered in that order, a dummy if there is none; slots number those of its samples, as their features arrive.
    """

    def __init__(
        self, shards: IndexedShards, layout: Layout, name: str, share: Share, samples: Ints, arrays: Arrays
    ) -> None:
        index, plan, where = shards.index, share.plan, (share.rank, share.microbatch)
        self._name, self._layout = name, layout
        modality = self.modality = shards.recipe.modalities[name]

        # The parts that are encoded, with the index in the global batch of the sample of each, and those that arrive,
        # with the number of the sample of each among the rank's; of a slice of a sample some rows of each arrive.
        self.travels = bool(plan.parts)
        self._route: Route | None = None
        if self.travels:
            parts = plan.parts[name]
            encoded, arrives = plan.encoded(name, *where, share.peer), plan.arriving(name, *where)
            self.encoded, self.encoded_sample = parts.part[encoded], parts.sample[encoded]
            arriving = parts.part[arrives]
            ascending = np.argsort(samples)
            self.owner = ascending[np.searchsorted(samples, parts.sample[arrives], sorter=ascending)]
            self._rows_first, rows = plan.held_rows(name, arrives, share.rank)
            self._route = plan.route(name, *where, share.peer)
        else:
            self.encoded, self.owner = index.parts_of(plan.row[samples], name)
            self.encoded_sample, arriving = samples[self.owner], self.encoded
            rows = index.part_tokens[arriving].astype(np.int64)
            self._rows_first = np.zeros_like(rows)
        self.slot_tokens, self._rows_starts = index.part_tokens[arriving].astype(np.int64), starts_of(rows)
        arrays[f"{name} positions"] = (int(self._rows_starts[-1]),), np.dtype(np.int64)

        # The slots of a sample are used in the order of its parts, for any order of arrival.
        self._by_sample = np.lexsort((arriving, self.owner))
        self._slots = np.searchsorted(self.owner[self._by_sample], np.arange(len(samples) + 1)).tolist()
        self.sizes = index.sizes(arriving, shards.recipe)
        self.ropes = [rope_of(shards, layout, name, size) for size in self.sizes]
        self._placed = np.zeros(len(arriving), np.bool_)
        self.dummy_positions: Ints | None = None

        # The parts, or a dummy if there is none, then padding to a length of the layout.
        self._sizes = index.sizes(self.encoded, shards.recipe)
        self._tokens = index.part_tokens[self.encoded].astype(np.int64)
        self._valid, self._written = np.ones(len(self._sizes), np.bool_), np.zeros(len(self._sizes), np.bool_)
        self._dummy = not self._sizes and layout.empty == "dummy"
        if self._dummy:
            self._sizes = [modality.dummy()]
            self._tokens = self._tokens if self.travels else np.array([self._sizes[0].tokens])
        self._parts = len(self._sizes)
        self._padding: PartSize | None = None
        used, lengths = sum(size.positions for size in self._sizes), layout.encoder_lengths.get(name, ())
        if lengths and (length := next((each for each in lengths if each >= used), 0)) != used:
            self._padding = modality.padding(length - used) if length else None
            if self._padding is None or used + self._padding.positions != length:
                raise RuntimeError(f"{used} {name} positions of a microbatch cannot be padded to one of {lengths}")
            self._sizes = [*self._sizes, self._padding]

        # Where each part is in the arrays of the modality.
        self._num_rows = np.array([size.num_rows for size in self._sizes], np.int64)
        self._padded, self._specs = layout.encoders == "padded", modality.arrays()
        longest = np.full_like(self._num_rows, self._num_rows.max(initial=0))
        rows = starts_of(longest if self._padded else self._num_rows)
        self._starts = {"row": rows, "part": np.arange(len(self._sizes) + 1)}
        for array, spec in self._specs.items():
            shape = (int(self._starts[spec.per][-1]), *spec.row_shape)
            arrays[f"{name}.{array}"] = shape, np.dtype(stored_dtype(spec.dtype))

    def lay(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take the memory that was reserved, with any contents."""
        self._positions = arrays[f"{self._name} positions"]
        self._arrays = {array: arrays[f"{self._name}.{array}"] for array in self._specs}
        if self._dummy:
            self.modality.fill_dummy(self._sizes[0], self._rows_of(0))
        for array, spec in self._specs.items():
            self._arrays[array][self._starts[spec.per][self._parts] :] = 0  # padding

    def _rows_of(self, part: int) -> dict[str, NDArray[Any]]:
        """Return the rows of one part in each array. What follows them, up to the next part, becomes zero."""
        rows: dict[str, NDArray[Any]] = {}
        for array, spec in self._specs.items():
            start, stop = self._starts[spec.per][part : part + 2].tolist()
            end = start + self._sizes[part].num_rows if spec.per == "row" else stop
            rows[array], self._arrays[array][end:stop] = self._arrays[array][start:end], 0
        return rows

    def slots_of(self, number: int) -> Iterator[int]:
        """Return the slots of a sample, in the order of its parts."""
        slots: list[int] = self._by_sample[self._slots[number] : self._slots[number + 1]].tolist()
        return iter(slots)

    def put(self, slot: int, start: int, first: int, tokens: int, held: tuple[int, int] | None = None) -> None:
        """Put `tokens` of its tokens, from its `first`, at `start`. A slot is written when its last token is. `held`:
        the first position that this rank has, and the one after the last; None for all.
        """
        begin, end = self._rows_starts[slot : slot + 2].tolist()
        shift = begin - int(self._rows_first[slot])  # of a row that arrives, from its number in the part
        low, high = (min(max(shift + row, begin), end) for row in (first, first + tokens))
        places = np.arange(start + low - shift - first, start + high - shift - first)
        if held is not None:
            places[(places < held[0]) | (places >= held[1])] = -1
            assert np.count_nonzero(places >= 0) == max(0, min(held[1], start + tokens) - max(held[0], start))
        self._positions[low:high] = places
        self._placed[slot] = first + tokens == self.slot_tokens[slot]

    def positions(self) -> tuple[Ints, Route | None]:
        """Return where the features of its parts go, and the route on which they come: features of failed parts travel
        as zeros, and rows that have no position are left out. Raises RuntimeError where a slot was not written.
        """
        check_written(self._placed, f"tokens of {self._name} parts")
        route, positions = self._route, self._positions
        if route is not None and not self._valid.all():
            starts = starts_of(self._tokens)
            spans = [np.arange(starts[part], starts[part + 1]) for part in np.flatnonzero(~self._valid)]
            route = replace(route, zeroed=np.concatenate(spans))
        if not (is_here := positions >= 0).all():
            needed = np.flatnonzero(is_here)
            positions, route = positions[needed], None if route is None else replace(route, receive_order=needed)
        return positions if self.dummy_positions is None else self.dummy_positions, route

    def blank(self, part: int) -> None:
        """Fill a `part` that failed with zeros, and mark it."""
        self._valid[part] = False
        for array, spec in self._specs.items():
            start, stop = self._starts[spec.per][part : part + 2]
            self._arrays[array][start:stop] = 0
        self._written[part] = True

    def decode(
        self, part: int, data: bytes | memoryview, field: str, recipe: Recipe, generator: GeneratorMaker
    ) -> None:
        """Decode one part of a sample of `recipe` into its rows. Raises FieldError."""
        modality = recipe.modalities[self._name]
        decode_part(modality, data, self._sizes[part], self._rows_of(part), recipe.limits, field, generator)
        self._written[part] = True

    def batch(self) -> MediaBatch:
        """Return its tensors. Raises RuntimeError where a part was not written."""
        if not self._dummy:
            check_written(self._written, f"{self._name} parts")
        longest, masks = int(self._num_rows.max(initial=0)), {}
        fixed = bool(self._layout.encoder_lengths.get(self._name))  # max_seqlen must not vary where shapes do not
        if self._padded:
            masks["mask"] = torch.from_numpy(row_mask(self._num_rows, longest))
            indices = np.nonzero(row_mask(self._tokens, int(self._tokens.max(initial=0))))
            masks["token_places"] = torch.from_numpy(np.stack(indices).astype(np.int64))
        arrays = {}
        for array, spec in self._specs.items():
            arrays[array] = as_tensor(self._arrays[array], spec.dtype)
            if self._padded and spec.per == "row":
                arrays[array] = arrays[array].view(len(self._sizes), longest, *spec.row_shape)
        arrays |= {array: torch.from_numpy(of) for array, of in self.modality.extras(self._sizes).items()}
        return MediaBatch(
            arrays=arrays,
            cu_seqlens=cu_seqlens(starts_of(self._num_rows)),
            max_seqlen=int(self._num_rows.sum()) if fixed else longest,
            num_tokens=int(self._tokens.sum()),
            padding_tokens=0 if self._padding is None else self._padding.tokens,
            valid=torch.from_numpy(self._valid) if self.travels else None,
            part_axes=self.modality.part_axes(self._sizes),
            **masks,
        )


class SequenceArrays(NamedTuple):
    """The sequences of a microbatch, one after another, int64 (T,). Positions are (1, T), restarting at each sample;
    under "mrope" (4, T), also time, height, width. `text_ids` are the tokens of text alone.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    text_ids: NDArray[np.int64]

    def like(self, length: int) -> SequenceArrays:
        """Return arrays for a sequence of so many tokens of text."""
        return SequenceArrays(*(np.empty((*array.shape[:-1], length), np.int64) for array in self))

    def blank(self, start: int, stop: int, first: int = 0, first_mrope: int = 0) -> None:
        """Write padding or a dummy sequence: id 0, no loss, positions that count from `first` and `first_mrope`."""
        self.input_ids[start:stop] = 0
        self.labels[start:stop] = IGNORE
        self.position_ids[0, start:stop] = np.arange(first, first + stop - start)
        self.position_ids[1:, start:stop] = np.arange(first_mrope, first_mrope + stop - start)


class SequenceWriter:
    """Writes one sequence from `start` to `end`, span by span. `field` is the one in errors."""

    def __init__(self, arrays: SequenceArrays, start: int, end: int, field: str) -> None:
        self._arrays, self._start, self._field = arrays, start, field
        self.end, self.cursor = end, start
        self.position = 0  # under "mrope", of time, height and width
        arrays.position_ids[0, start:end] = np.arange(end - start)

    def put(self, ids: Any, tokens: int, labels: Any, rope: Ints | None = None, rope_span: int | None = None) -> int:
        """Write the tokens of a text, or of a part, whose ids and labels are equal. Return the position of the first.
        Raises FieldError. Under "mrope" `rope` has positions of its tokens from 0, (3, tokens), None continues to
        count; `rope_span` those from its first token to what follows it, None for one more than the largest.
        """
        arrays, start = self._arrays, self.cursor
        stop = self.cursor = start + tokens
        if stop > self.end:
            raise self.disagreement()
        arrays.input_ids[start:stop] = ids
        arrays.labels[start:stop] = labels
        if rope is not None:
            arrays.position_ids[1:, start:stop] = self.position + rope
            self.position += int(rope.max()) + 1 if rope_span is None else rope_span
        else:
            if len(arrays.position_ids) > 1:
                arrays.position_ids[1:, start:stop] = np.arange(self.position, self.position + tokens)
            self.position += tokens
        return start

    def disagreement(self) -> FieldError:
        planned = self.end - self._start
        reason = f"the index says {planned} tokens, the text yields another number: {WHY_COUNTS_DIFFER}"
        return FieldError(self._field, reason)


def rope_of(shards: IndexedShards, layout: Layout, name: str, size: PartSize) -> Ints | None:
    """Return the positions of a part's tokens under "mrope", as `Modality.rope`; None in another layout."""
    if layout.positions != "mrope":
        return None
    rope = shards.recipe.modalities[name].rope(size)
    if rope is not None and np.shape(rope) != (3, size.tokens):
        raise ValueError(f"rope() of {name} gave shape {np.shape(rope)} for {size}, not (3, {size.tokens})")
    return rope


def starts_of(lengths: Sequence[int] | Ints) -> Ints:
    """Return running sums from 0: int64 (len(lengths) + 1,)."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def cu_seqlens(starts: Ints) -> torch.Tensor:
    return torch.from_numpy(starts.astype(np.int32))


def row_mask(lengths: Ints, width: int) -> NDArray[np.bool_]:
    """Return True for the first `lengths[i]` of `width` elements in row i: (num_rows, width)."""
    mask: NDArray[np.bool_] = np.arange(width) < lengths[:, None]
    return mask


def check_written(written: NDArray[np.bool_], what: str) -> None:
    if not written.all():
        raise RuntimeError(f"{what} {np.flatnonzero(~written).tolist()} of a microbatch were never written")
