"""How a batch is laid out: the frozen values for `DataLoader(collate_fn=...)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.checks import checked_count

Positions = Literal["restart", "mrope"]
Empty = Literal["dummy", "zero"]
Encoders = Literal["packed", "padded"]
Attention = Literal["document", "window"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Sequences one after another, without a batch dimension.

    Attributes:
        positions: "restart" counts from 0 in each sample; "mrope" gives (time, height, width) positions, after
            Qwen2-VL's multimodal rotary embedding: text and audio advance all three, an image's merged grid spans
            height and width and advances by its longer side; `llm.restart_position_ids` then count as "restart" does.
        empty: what a rank without any item of a modality gets: one minimal "dummy" item, which costs and caps do not
            count, with its tokens in a last sequence without loss; or tensors of "zero" length.
        multiple_of: each sample's LLM sequence is padded at its end to a multiple of this, and so is their total: 2 * C
            for context parallelism over C ranks, the ranks for sequence parallelism, 8 or 16 for FP8, or their least
            common multiple. `cu_seqlens`, costs and caps count the padding. Encoder sequences are not padded to it.
            Under `Teams(cut="loader")` sequences are joined, and each slice of them is padded to it instead.
        length: tokens of every microbatch, a multiple of `multiple_of`: one shape for compiled models, CUDA graphs and
            context parallelism. The rest is padding, a last sequence without loss. The cap of `llm` is this length
            less the tokens of dummies, and no sample may be longer. None: as long as its samples.
        encoder_lengths: modality -> positions, ascending: the input of its encoder is padded with a last sequence of
            zeros to the smallest of these lengths that is long enough; the largest is the phase's cap. The modality
            must define `Modality.padding`.
        concatenate: for pretraining on text. The documents of an epoch are joined in its order and cut into windows of
            `length` tokens. Every window is full, and each microbatch is one window. `batch_size` and
            `global_batch_size` count windows.
        attention: of windows. "document": each document in a window, or the part of it there, is a sequence of its own
            in `cu_seqlens`, with positions from 0. "window": the window is one sequence, with positions from 0.
    """

    positions: Positions = "restart"
    empty: Empty = "dummy"
    multiple_of: int = 1
    length: int | None = None
    encoder_lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    concatenate: bool = False
    attention: Attention = "document"
    encoders: ClassVar[Encoders] = "packed"

    def __post_init__(self) -> None:
        _check(self)
        if self.length is not None:
            checked_count(self.length, "Packed.length")
            if self.length % self.multiple_of:
                raise ValueError(
                    f"Packed.length={self.length} is no multiple of multiple_of={self.multiple_of}, to which sequences "
                    f"are padded: use {max(1, self.length // self.multiple_of) * self.multiple_of}"
                )
        if not isinstance(self.encoder_lengths, Mapping):
            raise ValueError(f"Packed.encoder_lengths is modality -> positions, got {self.encoder_lengths!r}")
        for name, lengths in self.encoder_lengths.items():
            if not isinstance(lengths, Iterable):
                raise ValueError(f"Packed.encoder_lengths of {name} must be ascending positions, got {lengths!r}")
            checked = tuple(checked_count(length, f"Packed.encoder_lengths of {name}") for length in lengths)
            if not checked or list(checked) != sorted(set(checked)):
                raise ValueError(f"Packed.encoder_lengths of {name} must be ascending positions, got {lengths!r}")
        # Ranks compare it: a plain dict of tuples.
        plain = {name: tuple(lengths) for name, lengths in self.encoder_lengths.items()}
        object.__setattr__(self, "encoder_lengths", plain)
        _check_windows(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Padded:
    """One row a sample: LLM tensors (num_samples, L), with an attention mask, as Hugging Face text models take them.

    L is the longest sample of the microbatch, aligned up to `multiple_of`. If that is at least the longest sample of
    the data set, L is always `multiple_of`: a fixed shape. Samples are balanced by the cost of the rectangle: a rank's
    `llm` load is its count of rows times the cost of its longest, and `Balance.max_tokens` caps rows times L.

    Attributes:
        positions, empty: as `Packed` has them; the dummy of a rank without samples is one row of `multiple_of`.
        multiple_of: L is a multiple of it. Encoder sequences are not aligned.
        encoders: "packed" keeps patches and frames one after another with `cu_seqlens`, as vision towers take them;
            "padded" gives (num_images, max_patches, patch_dim) and (num_clips, max_frames, num_mels) with masks. The
            costs of encoder phases count no padding either way.
    """

    positions: Positions = "restart"
    empty: Empty = "dummy"
    multiple_of: int = 1
    encoders: Encoders = "packed"
    # No microbatch has a fixed length.
    length: ClassVar[None] = None
    encoder_lengths: ClassVar[Mapping[str, Sequence[int]]] = {}
    concatenate: ClassVar[bool] = False
    attention: ClassVar[Attention] = "document"

    def __post_init__(self) -> None:
        _check(self)
        if self.encoders not in get_args(Encoders):
            raise ValueError(f"Padded.encoders must be 'packed' or 'padded', got {self.encoders!r}")


Layout: TypeAlias = Packed | Padded


def layout_of(collate_fn: object) -> Layout | None:
    """Return the layout of a `collate_fn`: itself, or that of a model's inputs. None for a function."""
    layout = collate_fn if isinstance(collate_fn, Packed | Padded) else getattr(collate_fn, "layout", None)
    return layout if isinstance(layout, Packed | Padded) else None


def row_lengths(layout: Layout, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the padded length in memory of each LLM sequence of `lengths` positions, int64 (num_samples,)."""
    aligned = -(-lengths // layout.multiple_of) * layout.multiple_of
    if isinstance(layout, Packed):
        return aligned
    return np.full_like(aligned, aligned.max(initial=0))


def _check(layout: Layout) -> None:
    name = type(layout).__name__
    if layout.positions not in get_args(Positions):
        raise ValueError(f"{name}.positions must be 'restart' or 'mrope', got {layout.positions!r}")
    if layout.empty not in get_args(Empty):
        raise ValueError(f"{name}.empty must be 'dummy' or 'zero', got {layout.empty!r}")
    checked_count(layout.multiple_of, f"{name}.multiple_of")


def _check_windows(layout: Packed) -> None:
    if not isinstance(layout.concatenate, bool):
        raise ValueError(f"Packed.concatenate must be True or False, got {layout.concatenate!r}")
    if layout.attention not in get_args(Attention):
        raise ValueError(f"Packed.attention must be 'document' or 'window', got {layout.attention!r}")
    if not layout.concatenate:
        if layout.attention != "document":
            raise ValueError(
                f"Packed.attention={layout.attention!r} is of windows of concatenated documents: pass length= and "
                "concatenate=True too"
            )
        return
    if layout.length is None:
        raise ValueError("Packed(concatenate=True) cuts documents into windows: pass length=, the tokens of a window")
    if layout.length < 2:
        raise ValueError(
            f"Packed(length={layout.length}, concatenate=True): the first token of a window has no label, so a window "
            "needs at least 2 tokens"
        )
    if layout.encoder_lengths:
        raise ValueError("Packed(concatenate=True) is for text alone, so encoder_lengths= has no meaning: leave it out")
    if layout.multiple_of > 1 and layout.attention == "document":
        raise ValueError(
            f"Packed.multiple_of={layout.multiple_of} pads each document, and windows of concatenated documents have "
            "no padding: leave it out, or use attention='window', with one sequence a window"
        )
