"""The memory of one modality in a microbatch: the parts that the rank encodes, and where the tokens of its samples are.

Where samples are assigned whole, these are the same parts; where phases are assigned separately, features travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.batch.tensors import MediaBatch
from orchdata.building.contents import IndexedShards
from orchdata.building.step import Share
from orchdata.loaders.generators import GeneratorMaker
from orchdata.loaders.modalities.modality import PartSize, as_tensor, decode_part, stored_dtype
from orchdata.loaders.recipe import Recipe
from orchdata.planning.balance import Layout
from orchdata.planning.route import Route

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
        index, plan = shards.index, share.plan
        self._name, self._layout = name, layout
        modality = self.modality = shards.recipe.modalities[name]

        # The parts that are encoded, with the index in the global batch of the sample of each, and those that arrive,
        # with the number of the sample of each among the rank's; of a slice of a sample some rows of each arrive.
        self._route: Route | None = None
        self.travels, first, rows = bool(plan.parts), None, None
        if self.travels:
            parts, where = plan.parts[name], (share.rank, share.microbatch)
            encoded, arrives = plan.encoded(name, *where, share.peer), plan.arriving(name, *where)
            first, rows = plan.held_rows(name, arrives, share.rank)
            self.encoded, self.encoded_sample, arriving = (
                parts.part[encoded],
                parts.sample[encoded],
                parts.part[arrives],
            )
            ascending = np.argsort(samples)
            self.owner = ascending[np.searchsorted(samples, parts.sample[arrives], sorter=ascending)]
            self._route = plan.route(name, *where, share.peer)
        else:
            self.encoded, self.owner = index.parts_of(plan.row[samples], name)
            self.encoded_sample, arriving = samples[self.owner], self.encoded

        # The slots of a sample are used in the order of its parts, for any order of arrival.
        self._by_sample = np.lexsort((arriving, self.owner))
        self._slots = np.searchsorted(self.owner[self._by_sample], np.arange(len(samples) + 1)).tolist()
        self.sizes = index.sizes(arriving, shards.recipe)
        self.ropes = [rope_of(shards, layout, name, size) for size in self.sizes]
        self.slot_tokens = index.part_tokens[arriving].astype(np.int64)
        self._rows_first = np.zeros_like(self.slot_tokens) if first is None else first
        self._rows_starts = starts_of(self.slot_tokens if rows is None else rows)
        self._placed = np.zeros(len(arriving), np.bool_)
        self.dummy_positions: Ints | None = None
        arrays[f"{name} positions"] = (int(self._rows_starts[-1]),), np.dtype(np.int64)

        # The parts, or a dummy if there is none, then padding to a length of the layout.
        self._sizes = index.sizes(self.encoded, shards.recipe)
        largest, row_bytes = max((size.num_rows for size in self._sizes), default=0), modality.row_bytes()
        if largest * row_bytes > max(recipe.limits.sample_decoded_bytes for recipe in shards.recipes):
            raise index.damaged(f"a part of {name} is said to have {largest} rows of {row_bytes} bytes")
        self._tokens = index.part_tokens[self.encoded].astype(np.int64)
        self._valid = np.ones(len(self._sizes), np.bool_)
        self._written = np.zeros(len(self._sizes), np.bool_)
        self._dummy = not self._sizes and layout.empty == "dummy"
        if self._dummy:
            self._sizes = [modality.dummy()]
            if not self.travels:
                self._tokens = np.array([self._sizes[0].tokens])
        self._parts = len(self._sizes)
        used, lengths = sum(size.positions for size in self._sizes), layout.encoder_lengths.get(name, ())
        self._padding: PartSize | None = None
        if lengths and used not in lengths:
            length = next((each for each in lengths if each > used), None)
            self._padding = None if length is None else modality.padding(length - used)
            if self._padding is None or used + self._padding.positions != length:
                raise RuntimeError(
                    f"{used} {name} positions of a microbatch cannot be padded to one of {list(lengths)}"
                )
            self._sizes = [*self._sizes, self._padding]

        # Where each part is in the arrays of the modality.
        self._num_rows = np.array([size.num_rows for size in self._sizes], np.int64)
        self._padded = layout.encoders == "padded"
        self._specs = modality.arrays()
        longest = np.full_like(self._num_rows, self._num_rows.max(initial=0))
        self._starts = {
            "row": starts_of(longest if self._padded else self._num_rows),
            "part": np.arange(len(self._sizes) + 1),
        }
        for array, spec in self._specs.items():
            shape = (int(self._starts[spec.per][-1]), *spec.row_shape)
            arrays[f"{name}.{array}"] = shape, np.dtype(stored_dtype(spec.dtype))

    def lay(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take the memory that was reserved, with any contents."""
        self._positions = arrays[f"{self._name} positions"]
        self._arrays = {array: arrays[f"{self._name}.{array}"] for array in self._specs}
        if self._dummy:
            rows = {array: self._sizes[0].num_rows if spec.per == "row" else 1 for array, spec in self._specs.items()}
            for array, spec in self._specs.items():
                self._arrays[array][rows[array] : self._starts[spec.per][1]] = 0
            filled = {array: self._arrays[array][:count] for array, count in rows.items()}
            self.modality.fill_dummy(self._sizes[0], filled)
        for array, spec in self._specs.items():
            self._arrays[array][self._starts[spec.per][self._parts] :] = 0  # padding

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
        size, out = self._sizes[part], {}
        for array, spec in self._specs.items():
            start, stop = (int(end) for end in self._starts[spec.per][part : part + 2])
            end = start + size.num_rows if spec.per == "row" else stop
            out[array] = self._arrays[array][start:end]
            if stop > end:
                self._arrays[array][end:stop] = 0  # the memory may have contents of another batch
        decode_part(recipe.modalities[self._name], data, size, out, recipe.limits, field, generator)
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
