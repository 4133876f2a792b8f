"""The memory of one modality in a microbatch.

`MediaPages` is the memory of the parts that the rank encodes. `MediaSlots` has the positions of the tokens of the parts
of its samples. `MediaWork` says which parts these are: the same where samples are assigned whole, others where phases
are assigned separately, and features travel between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.batch.tensors import MediaBatch
from orchdata.building.assembler import Share
from orchdata.building.memory import Reservation
from orchdata.loaders.generators import GeneratorMaker
from orchdata.loaders.index.index import Index
from orchdata.loaders.modalities.modality import PartSize, as_tensor, stored_dtype
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.sample import decode_part
from orchdata.planning.layout import Layout, encoder_lengths, padded_encoders
from orchdata.planning.route import Route

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PageSource:
    """What pages are laid out from. `recipes` are of each source; the first defines the tensors. `encoders` are
    modalities that every batch has, as a dummy where no sample has them.
    """

    index: Index
    recipes: tuple[Recipe, ...]
    layout: Layout
    encoders: tuple[str, ...]

    @property
    def recipe(self) -> Recipe:
        return self.recipes[0]

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """The names of the fields that batches have, in a mixture those of all sources."""
        return tuple(sorted({name for recipe in self.recipes for name in recipe.keep}))

    def recipe_of(self, row: int) -> Recipe:
        """Return the recipe that a sample is read by."""
        return self.recipes[self.index.source_of(row)]

    def check_rows(self, name: str, sizes: Sequence[PartSize]) -> None:
        """Raise DamagedIndexError for a part that takes more memory than the limits of indexing allow."""
        most = max(recipe.limits.sample_decoded_bytes for recipe in self.recipes)
        row_bytes = self.recipe.modalities[name].row_bytes()
        if sizes and (largest := max(size.num_rows for size in sizes)) * row_bytes > most:
            raise self.index.damaged(f"a part of {name} is said to have {largest} rows of {row_bytes} bytes")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MediaWork:
    """One modality of a microbatch on one rank. Parts are numbers in the index."""

    encoded: Ints  # int64 (num_encoded,), parts that it encodes, in that order
    encoded_sample: Ints  # index in the global batch of the sample of each
    arriving: Ints  # int64 (num_arriving,), parts of its samples, in the order in which their features arrive
    owner: Ints  # number of the sample of each among the rank's samples
    route: Route | None = None  # between them; None where they are the same
    first: Ints | None = None  # and rows: the segment of each that arrives; None where all rows do
    rows: Ints | None = None


def own_work(index: Index, rows: Ints, samples: Ints, modality: str) -> MediaWork:
    """Return the work of a rank that encodes its own samples: `rows`, with these indices in the global batch."""
    parts, owner = index.parts_of(rows, modality)
    return MediaWork(encoded=parts, encoded_sample=samples[owner], arriving=parts, owner=owner)


def planned_work(share: Share, modality: str) -> MediaWork:
    """Return the work that the plan gives a rank, or one of its peers: it encodes parts of any rank's samples."""
    plan, rank, microbatch, peer = share.plan, share.rank, share.microbatch, share.peer
    parts = plan.parts[modality]
    encoded, arriving = plan.encoded(modality, rank, microbatch, peer), plan.arriving(modality, rank, microbatch)
    places, (first, rows) = plan.places(rank, microbatch), plan.held_rows(modality, arriving, rank)
    ascending = np.argsort(places)
    return MediaWork(
        encoded=parts.part[encoded],
        encoded_sample=parts.sample[encoded],
        arriving=parts.part[arriving],
        owner=ascending[np.searchsorted(places, parts.sample[arriving], sorter=ascending)],
        route=plan.route(modality, rank, microbatch, peer),
        first=first,
        rows=rows,
    )


class MediaSlots:
    """The positions of the tokens of one modality. Slots number the parts as they arrive; `owner` is the sample of
    each. `needed` are the rows that arrive and have positions, None for all: of a slice some have none.
    """

    def __init__(self, source: PageSource, name: str, work: MediaWork, num_samples: int, reserved: Reservation) -> None:
        self.owner = work.owner
        self._name = name
        self._num_samples = num_samples
        # The slots of a sample are used in the order of its parts, for any order of arrival.
        self._by_sample = np.lexsort((work.arriving, work.owner))
        self._first = np.searchsorted(work.owner[self._by_sample], np.arange(num_samples + 1))
        self._tokens = source.index.part_tokens[work.arriving].astype(np.int64)
        self._rows_first = np.zeros_like(self._tokens) if work.first is None else work.first
        self._starts = starts_of(self._tokens if work.rows is None else work.rows)
        self._sizes = source.index.sizes(work.arriving, source.recipe)
        self._ropes = [rope_of(source, name, size) for size in self._sizes]
        self._rope_span = source.recipe.modalities[name].rope_span
        self._written = np.zeros(len(work.arriving), np.bool_)
        self._dummy: Ints | None = None
        reserved.add(f"{name} positions", (int(self._starts[-1]),), np.int64)

    def lay(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._positions = arrays[f"{self._name} positions"]

    @property
    def positions(self) -> Ints:
        """Raises RuntimeError where a slot was not written."""
        _check_written(self._written, f"tokens of {self._name} parts")
        needed = self.needed
        mine = self._positions if needed is None else self._positions[needed]
        return mine if self._dummy is None else self._dummy

    @property
    def needed(self) -> Ints | None:
        is_here = self._positions >= 0
        return None if is_here.all() else np.flatnonzero(is_here)

    def append(self, start: int, tokens: int) -> None:
        """Put the tokens of a dummy at `start`, where no sample has a part."""
        self._dummy = np.arange(start, start + tokens)

    def of_sample(self, number: int) -> list[int]:
        """Return the slots of a sample, in the order of its parts."""
        slots: list[int] = self._by_sample[self._first[number] : self._first[number + 1]].tolist()
        return slots

    def size(self, slot: int) -> PartSize:
        """Return the size of its part in the index."""
        return self._sizes[slot]

    def rope(self, slot: int, first: int, tokens: int) -> Ints | None:
        """Return the positions of `tokens` of its tokens under "mrope", as `Modality.rope`."""
        rope = self._ropes[slot]
        return None if rope is None else rope[:, first : first + tokens]

    def rope_span(self, slot: int, tokens: int) -> int | None:
        """As `Modality.rope_span`, for a part with all tokens together; else None."""
        return self._rope_span(self._sizes[slot]) if tokens == self._tokens[slot] else None

    def sample_tokens(self) -> Ints:
        """Count the tokens of this modality in each sample, int64 (num_samples,)."""
        totals = np.zeros(self._num_samples, np.int64)
        np.add.at(totals, self.owner, self._tokens)
        return totals

    def put(self, slot: int, start: int, first: int, tokens: int, held: tuple[int, int] | None = None) -> None:
        """Put `tokens` of its tokens, from its `first`, at `start`. A slot is written when its last token is. `held`:
        the first position that this rank has, and the one after the last; None for all.
        """
        begin, end = self._starts[slot : slot + 2].tolist()
        shift = begin - int(self._rows_first[slot])  # of a row that arrives, from its number in the part
        low, high = (min(max(shift + row, begin), end) for row in (first, first + tokens))
        places = np.arange(start + low - shift - first, start + high - shift - first)
        if held is not None:
            places[(places < held[0]) | (places >= held[1])] = -1
            assert np.count_nonzero(places >= 0) == max(0, min(held[1], start + tokens) - max(held[0], start))
        self._positions[low:high] = places
        self._written[slot] = first + tokens == self._tokens[slot]


class MediaPages:
    """The memory of the parts of one modality that are encoded here, in that order; a dummy if there is none."""

    def __init__(self, source: PageSource, name: str, work: MediaWork, reserved: Reservation) -> None:
        self._name = name
        self._layout = source.layout
        self._route = work.route
        modality = self._modality = source.recipe.modalities[name]

        # The parts, or a dummy if there is none, then padding to a length of the layout.
        self._sizes = source.index.sizes(work.encoded, source.recipe)
        source.check_rows(name, self._sizes)
        self._tokens = source.index.part_tokens[work.encoded].astype(np.int64)
        self._valid = np.ones(len(self._sizes), np.bool_)
        self._written = np.zeros(len(self._sizes), np.bool_)
        self._dummy = not self._sizes and source.layout.empty == "dummy"
        if self._dummy:
            self._sizes = [modality.dummy()]
            if work.route is None:
                self._tokens = np.array([self._sizes[0].tokens])
        self._parts = len(self._sizes)
        self._padding = _padding(source, name, self._sizes)
        if self._padding is not None:
            self._sizes = [*self._sizes, self._padding]

        # Where each part is in the arrays of the modality.
        self._num_rows = np.array([size.num_rows for size in self._sizes], np.int64)
        self._padded = padded_encoders(source.layout)
        self._specs = modality.arrays()
        largest = self._num_rows.max(initial=0)
        rows = np.full_like(self._num_rows, largest) if self._padded else self._num_rows  # that each takes in memory
        self._starts = {"row": starts_of(rows), "part": np.arange(len(self._sizes) + 1)}
        for array, spec in self._specs.items():
            shape = (int(self._starts[spec.per][-1]), *spec.row_shape)
            reserved.add(f"{name}.{array}", shape, stored_dtype(spec.dtype))

    def lay(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays = {array: arrays[f"{self._name}.{array}"] for array in self._specs}
        if self._dummy:
            ends = {array: self._starts[spec.per][1] for array, spec in self._specs.items()}
            rows = {array: self._sizes[0].num_rows if spec.per == "row" else 1 for array, spec in self._specs.items()}
            for array, end in ends.items():
                self._arrays[array][rows[array] : end] = 0
            self._modality.fill_dummy(
                self._sizes[0], {name: self._arrays[name][:count] for name, count in rows.items()}
            )
        for name, spec in self._specs.items():
            self._arrays[name][self._starts[spec.per][self._parts] :] = 0  # padding

    def route(self) -> Route | None:
        """Return the route of the features; those of failed parts travel as zeros."""
        if self._route is None or self._valid.all():
            return self._route
        starts = starts_of(self._tokens)
        spans = [np.arange(starts[part], starts[part + 1]) for part in np.flatnonzero(~self._valid)]
        return replace(self._route, zeroed=np.concatenate(spans))

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
        decode_part(self._name, data, size, out, recipe, field, generator)
        self._written[part] = True

    def batch(self) -> MediaBatch:
        """Return its tensors. Raises RuntimeError where a part was not written."""
        if not self._dummy:
            _check_written(self._written, f"{self._name} parts")
        extras = self._modality.extras(self._sizes)
        masks: dict[str, Any] = {}
        fixed = bool(encoder_lengths(self._layout, self._name))  # max_seqlen must not vary where shapes do not
        max_seqlen = int(self._num_rows.sum() if fixed else self._num_rows.max(initial=0))
        if self._padded:
            masks["mask"] = torch.from_numpy(row_mask(self._num_rows, max_seqlen))
            indices = np.nonzero(row_mask(self._tokens, int(self._tokens.max(initial=0))))
            masks["token_places"] = torch.from_numpy(np.stack(indices).astype(np.int64))
        return MediaBatch(
            arrays={
                **{array: self._tensor(array) for array in self._specs},
                **{array: torch.from_numpy(values) for array, values in extras.items()},
            },
            cu_seqlens=cu_seqlens(starts_of(self._num_rows)),
            max_seqlen=max_seqlen,
            num_tokens=int(self._tokens.sum()),
            padding_tokens=0 if self._padding is None else self._padding.tokens,
            valid=None if self._route is None else torch.from_numpy(self._valid),
            part_axes=self._modality.part_axes(self._sizes),
            **masks,
        )

    def _tensor(self, array: str) -> torch.Tensor:
        spec = self._specs[array]
        tensor: torch.Tensor = as_tensor(self._arrays[array], spec.dtype)
        if not self._padded or spec.per == "part":
            return tensor
        return tensor.view(len(self._sizes), int(self._num_rows.max(initial=0)), *spec.row_shape)


def _padding(source: PageSource, name: str, sizes: Sequence[PartSize]) -> PartSize | None:
    """Return the padding after these parts up to the next of the layout's lengths; None for none."""
    used = sum(size.positions for size in sizes)
    lengths = encoder_lengths(source.layout, name)
    if not lengths or used in lengths:
        return None
    length = next((each for each in lengths if each > used), None)
    size = None if length is None else source.recipe.modalities[name].padding(length - used)
    if size is None or length is None or used + size.positions != length:
        raise RuntimeError(f"{used} {name} positions of a microbatch cannot be padded to one of {list(lengths)}")
    return size


def rope_of(source: PageSource, name: str, size: PartSize) -> Ints | None:
    """Return the positions of a part's tokens under "mrope", as `Modality.rope`; None in another layout."""
    if source.layout.positions != "mrope":
        return None
    rope = source.recipe.modalities[name].rope(size)
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


def _check_written(written: NDArray[np.bool_], what: str) -> None:
    if not written.all():
        raise RuntimeError(f"{what} {np.flatnonzero(~written).tolist()} of a microbatch were never written")
