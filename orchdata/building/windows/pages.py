"""The memory of a window: the slices of the pieces of documents in it. They fill it, and have no media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.batch.batch import Batch, SampleId
from orchdata.batch.tensors import IGNORE, LLMBatch, TextBatch
from orchdata.building.assembler import Share
from orchdata.building.media_pages import PageSource, cu_seqlens, starts_of
from orchdata.building.memory import Reservation
from orchdata.building.sequence import SequenceArrays
from orchdata.loaders.samples.kept import KeptValue
from orchdata.planning.layout import Packed

Ints = NDArray[np.int64]


class WindowPages:
    """The memory of one window. `lay` provides it, and must be called first.

    Args:
        rows: documents of its pieces, int64 (num_pieces,). A rank without a window has none: all is padding then.
        first, tokens: int64 (num_pieces,), the first token of each piece in its document, and the number of tokens.

    Attributes:
        num_bytes: of each piece of memory that it needs.
    """

    def __init__(self, source: PageSource, rows: Ints, first: Ints, tokens: Ints) -> None:
        index, layout = source.index, source.layout
        assert isinstance(layout, Packed)
        assert layout.length is not None
        self._layout = layout
        self._length: int = layout.length
        self._ids: tuple[SampleId, ...] = tuple((index.shard_of(int(row)).url, index.key(int(row))) for row in rows)
        self._numbers = tuple(index.piece[rows].tolist())
        self._ranges = tuple(zip(first.tolist(), (first + tokens).tolist(), strict=True))
        self._starts = starts_of(tokens)
        reserved = self._reserved = Reservation()
        reserved.add("input_ids", (self._length,), np.int64)
        reserved.add("labels", (self._length,), np.int64)
        reserved.add("position_ids", (4 if layout.positions == "mrope" else 1, self._length), np.int64)
        reserved.add("text_ids", (int(self._starts[-1]),), np.int64)
        self.num_bytes = reserved.num_bytes
        self._written = np.zeros(len(rows), np.bool_)

    def lay(self, memory: Sequence[NDArray[np.uint8]]) -> None:
        """Take pieces of memory of `num_bytes`, with any contents."""
        arrays = self._reserved.lay(memory)
        self._arrays = SequenceArrays(*(arrays[name] for name in SequenceArrays._fields))
        if not len(self._ids):
            self._arrays.blank(0, self._length)

    def write(self, number: int, token_ids: NDArray[np.int32], *, has_labels: bool) -> None:
        """Write the tokens of a piece, (tokens,). The first has no label: what precedes it is not in the window."""
        start, stop = self._place(number)
        arrays = self._arrays
        arrays.input_ids[start:stop] = arrays.text_ids[start:stop] = token_ids
        arrays.labels[start:stop] = token_ids if has_labels else IGNORE
        arrays.labels[start] = IGNORE
        arrays.position_ids[:, start:stop] = self._positions(start, stop)
        self._written[number] = True

    def blank(self, number: int) -> None:
        """Write a piece of a document that failed: id 0, no labels."""
        start, stop = self._place(number)
        first = int(self._positions(start, stop)[0])
        self._arrays.blank(start, stop, first, first)
        self._arrays.text_ids[start:stop] = 0
        self._written[number] = True

    def batch(self, share: Share, samples: Ints, fields: Mapping[str, list[KeptValue]]) -> Batch:
        """Return the batch over this memory, of the pieces with these indices in the global batch. Raises RuntimeError
        where a piece was not written.
        """
        if not self._written.all():
            raise RuntimeError(f"pieces {np.flatnonzero(~self._written).tolist()} of a window were never written")
        plan, arrays = share.plan, self._arrays
        return Batch(
            text=TextBatch(input_ids=torch.from_numpy(arrays.text_ids), cu_seqlens=cu_seqlens(self._starts)),
            media={},
            llm=self._llm(),
            sample_ids=self._ids,
            pieces=self._numbers,
            token_ranges=self._ranges,
            plan=plan,
            step=plan.step,
            microbatch=share.index,
            num_microbatches=plan.num_microbatches,
            dp_size=plan.num_ranks,
            loss_tokens=int((arrays.labels != IGNORE).sum()),
            global_loss_tokens=plan.global_loss_tokens,
            sources=torch.from_numpy(plan.source[samples]) if plan.sources else None,
            fields=fields,
        )

    def _llm(self) -> LLMBatch:
        arrays, is_padding = self._arrays, not len(self._ids)
        starts = self._starts
        if is_padding or self._layout.attention == "window":
            starts = np.array([0, self._length])
        restart, *_ = positions = torch.from_numpy(arrays.position_ids)
        mrope = self._layout.positions == "mrope"
        lengths = np.zeros(1, np.int32) if is_padding else np.diff(starts).astype(np.int32)
        return LLMBatch(
            input_ids=torch.from_numpy(arrays.input_ids),
            position_ids=positions[1:] if mrope else restart,
            labels=torch.from_numpy(arrays.labels),
            cu_seqlens=cu_seqlens(starts),
            lengths=torch.from_numpy(lengths),
            max_seqlen=self._length,
            restart_position_ids=restart if mrope else None,
            media_positions={},
            media_owners={},
            dummies={},
        )

    def _place(self, number: int) -> tuple[int, int]:
        start, stop = self._starts[number : number + 2].tolist()
        return start, stop

    def _positions(self, start: int, stop: int) -> Ints:
        return np.arange(start, stop) if self._layout.attention == "window" else np.arange(stop - start)
