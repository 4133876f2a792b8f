"""Images of a Hugging Face processor, as a modality.

    processor --image_modality--> HFImages(source=JSON, ...): (width, height) -> counts, text, extras
                                                              bytes -> the arrays of its image processor

Counts follow from a rule of the image processor's class where there is one (`image_rules`), compared with the processor
when the modality is made; for any other class a blank image of each size is measured, once. Pixels are the image
processor's own, or this library's where it was seen to give the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, product
from math import isqrt
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from orchdata.hf.image_rules import Outputs, picture_of_rows, write_rows
from orchdata.hf.processors import as_array, id_of, modules_of, placeholder_of, running, runs, source_of
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.image import ImageFiles, grid_positions
from orchdata.loaders.modalities.image_decode import load_rgb, png_of
from orchdata.loaders.modalities.modality import ArraySpec, Header, PartSize, Slot, as_tensor, check_size, stored

_SHARING: Final = "batch_num_images"
"""The output that says how many images a sample has, which decides what becomes of each."""

_GRID: Final = "image_grid_thw"
# Sizes at which a processor is looked at: a square, a flat, a tall and a tiny one.
_LOOKED_AT: Final = ((336, 336), (640, 400), (60, 48), (300, 1100))
_PATCH_SIDES: Final = (14, 16)
# What a rule raises where there is none, or where it is of another version of the class.
_NO_RULE: Final = (LookupError, ValueError, AttributeError, TypeError)


@dataclass(frozen=True, kw_only=True)
class Output:
    """One of the image processor's outputs, with Hugging Face's name: `shape` of one row, one part, or all numbers that
    follow from the size, as `per` says: "row", a tile or patch; "part", an image; "size", numbers. `batched`: whether
    an axis of images precedes the rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    per: Literal["row", "part", "size"]
    batched: bool = False

    @property
    def count(self) -> int:
        """Numbers of a row."""
        return int(np.prod(self.shape, dtype=np.int64))

    def num_rows(self, outputs: Outputs) -> int:
        return int(as_shape(outputs[self.name])[1 if self.batched else 0])


class _Found(NamedTuple):
    """What an image of one size becomes, and the text, in runs."""

    size: PartSize
    expansion: tuple[str | int, ...] | None


@dataclass(frozen=True, kw_only=True)
class HFImages(ImageFiles):
    """Images as a Hugging Face processor prepares them: made by `image_modality`.

    Arrays have the names of Hugging Face's image processor, a row a tile or patch; extras are what follows from an
    image's size (`image_grid_thw`, `image_sizes`). An extent is (width, height), then the numbers of the extras.
    """

    source: str = field(repr=False)  # the image processor and what else its processor says of images, as JSON
    outputs: tuple[Output, ...]  # of the image processor
    counted: Literal["rule", "measured"]  # by a rule of its class, or on a blank image of each size
    native: bool = False  # this library prepares pixels itself: it was seen to do it as the image processor does
    merge: int = 0  # side of a merged token in patches, where tokens are a grid of them; 0 where they are not
    row_positions: int = 1  # that the encoder computes for a row (patches of a tile)
    placeholder: str = ""  # in rendered chats: `slot.mark`, but for a few, as Gemma-3's start token
    slot: Slot = Slot()  # the token of one feature
    num_extents: int = 2

    def arrays(self) -> Mapping[str, ArraySpec]:
        return {each.name: ArraySpec(each.shape, each.dtype, each.per) for each in self.outputs if each.per != "size"}

    def required_modules(self) -> tuple[str, ...]:
        return (*super().required_modules(), "transformers", *modules_of(self.source))

    def set_up_process(self) -> None:
        super().set_up_process()
        running(self.source)

    def count_header(self, header: Header, limits: Limits) -> PartSize:
        width, height = header
        check_size(width, height, limits)
        try:
            return _found(self, width, height).size
        except (ValueError, ZeroDivisionError) as error:  # an aspect ratio that the processor refuses
            raise DecodeError(f"an image of {width} x {height} pixels, which its processor refuses: {error}") from error

    def among(self, size: PartSize, count: int) -> PartSize:
        """LLaVA-OneVision takes the whole picture alone of each image of several, without its tiles."""
        return size if self._sharing(size) is None else _found(self, *size.extent[:2], count).size

    def _sharing(self, size: PartSize) -> int | None:
        """The images of its sample, where the processor tells them apart by it; None where it does not."""
        return None if self._sharing_index is None else int(size.extent[self._sharing_index])

    @cached_property
    def _sharing_index(self) -> int | None:
        """Index in an extent of the number of images that share a sample."""
        sized = [each for each in self.outputs if each.per == "size"]
        at = next((at for at, each in enumerate(sized) if each.name == _SHARING), None)
        return None if at is None else 2 + sum(each.count for each in sized[:at])

    def expand(self, size: PartSize) -> tuple[str | int, ...] | None:
        return _found(self, *size.extent[:2], self._sharing(size) or 1).expansion

    def decode_into(
        self, data: bytes | memoryview, size: PartSize, out: Mapping[str, NDArray[Any]], limits: Limits
    ) -> None:
        pixels, transparency = load_rgb(data, limits)
        decoded, indexed = pixels.shape[1::-1], (size.extent[0], size.extent[1])
        if decoded != indexed:
            raise DecodeError(
                f"decoded to {decoded[0]} x {decoded[1]} pixels, the index says {indexed[0]} x {indexed[1]}: "
                "index again"
            )
        sharing = self._sharing(size) or 1
        if self.native and sharing == 1 and transparency is None:
            write_rows(running(self.source).settings, pixels, *out.values())
            return
        image: Any = Image.fromarray(pixels)
        if transparency is not None:  # left in RGB, where processors show it as white
            image.info["transparency"] = transparency
        outputs, _ = running(self.source).outputs(image, copies=min(sharing, 2))
        if sharing > 1:
            outputs = {name: values[:1] for name, values in outputs.items()} | {_SHARING: np.array([sharing])}
        numbers = self._numbers(outputs)
        if numbers != tuple(size.extent[2:]):
            raise DecodeError(f"prepared to {numbers}, the index says {tuple(size.extent[2:])}: index again")
        for each in self.outputs:
            if each.per == "size":
                continue
            values = stored(outputs[each.name], each.dtype)
            values, target = values[0] if each.batched else values, out[each.name]
            if values.shape != target.shape:
                raise DecodeError(
                    f"prepared to {each.name} of shape {values.shape}, the index says {target.shape}: index again"
                )
            target[...] = values

    def extras(self, sizes: Sequence[PartSize]) -> Mapping[str, NDArray[Any]]:
        """Return the arrays that follow from sizes, with Hugging Face's names and dtypes, one row an image."""
        extras, first = {}, 2
        for each in self.outputs:
            if each.per == "size":
                rows = [size.extent[first : first + each.count] for size in sizes]
                extras[each.name] = np.array(rows, each.dtype).reshape(len(sizes), *each.shape)
                first += each.count
        return extras

    def part_axes(self, sizes: Sequence[PartSize]) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Tiles, where the processor gives a row of them for each image."""
        lengths = tuple(size.num_rows for size in sizes)
        return {each.name: (1, lengths) for each in self.outputs if each.batched and each.per == "row"}

    def to_file(
        self, data: bytes | memoryview, size: PartSize, arrays: Mapping[str, NDArray[Any]], limits: Limits
    ) -> tuple[str, bytes]:
        """Return the picture that the rows contain, tiles side by side; the arrays if rows have another form."""
        try:
            rows = as_tensor(arrays["pixel_values"], self.arrays()["pixel_values"].dtype).float().numpy()
            picture = picture_of_rows(running(self.source).settings, rows, self._grid(size) if self.merge else None)
        except _NO_RULE:
            return super().to_file(data, size, arrays, limits)
        return "png", png_of(picture[None])

    def _grid(self, size: PartSize) -> tuple[int, int]:
        """Return the number of patches along height and width, for tokens that are a grid."""
        _, high, wide = self.extras([size])[_GRID][0].tolist()
        return high, wide

    def parameters(self) -> dict[str, Any]:
        """Leave out how counts and pixels are computed, which changes neither."""
        left_out = ("counted", "native")
        return {name: value for name, value in super().parameters().items() if name not in left_out}

    def rope(self, size: PartSize) -> NDArray[np.int64] | None:
        """Return positions as Qwen2-VL's, for tokens that are a grid: one moment, the merged grid."""
        if not self.merge:
            return None
        high, wide = self._grid(size)
        return grid_positions(np.zeros(1, np.int64), high // self.merge, wide // self.merge)

    def dummy(self) -> PartSize:
        """Return one merged token, one tile, or the image of fewest tiles if tokens depend on its size."""
        if self.merge:
            side = self.merge
            extras = self.extras([_found(self, *_LOOKED_AT[0]).size])
            numbers = {name: values.ravel().tolist() for name, values in extras.items()} | {_GRID: [1, side, side]}
            return PartSize(side * side * self.row_positions, 1, side * side, (0, 0, *chain(*numbers.values())))
        sizes = [_found(self, *size).size for size in _LOOKED_AT]
        least = min(sizes, key=lambda size: (size.num_rows, size.tokens))
        is_tiled = len(next(each.shape for each in self.outputs if each.per == "row")) == 3
        if not is_tiled or any(each.per == "size" for each in self.outputs):
            return least
        return PartSize(self.row_positions, least.tokens // least.num_rows, 1, least.extent)

    def fill_dummy(self, size: PartSize, out: Mapping[str, NDArray[Any]]) -> None:
        """Fill pixels with zeros; masks and positions are those of a blank image."""
        super().fill_dummy(size, out)
        others = [each for each in self.outputs if each.per != "size" and "pixel_values" not in each.name]
        if not others or self.merge:
            return
        blank, _ = running(self.source).measured(*size.extent[:2])
        for each in others:
            values = stored(blank[each.name], each.dtype)
            out[each.name][...] = (values[0] if each.batched else values)[: len(out[each.name])]

    def decoding_bytes(self, parts: Sequence[tuple[Header, PartSize]]) -> int:
        """Return the bytes of the largest image's pixels, and of its processor's values before they are copied."""
        rows = 0 if self.native else max(size.num_rows for _, size in parts)
        return super().decoding_bytes(parts) + rows * self.row_bytes()

    def _read(self, outputs: Outputs, text: str | None, size: tuple[int, int], rows: int | None = None) -> _Found:
        """Return what an image of (width, height) becomes, of so many rows, from outputs and text of its processor."""
        if rows is None:
            rows = next(each.num_rows(outputs) for each in self.outputs if each.per == "row")
        expansion, positions = None if text is None else runs(text, str(self.slot.mark)), rows * self.row_positions
        if expansion is None:
            tokens = rows // self.merge**2 if self.merge else positions
        else:
            tokens = sum(run for run in expansion if isinstance(run, int))
        return _Found(PartSize(positions, tokens, rows, (*size, *self._numbers(outputs))), expansion)

    def _numbers(self, outputs: Outputs) -> tuple[int, ...]:
        """Return the numbers that follow from the size, from one image's outputs."""
        sized = [as_array(outputs[each.name]).reshape(-1).tolist() for each in self.outputs if each.per == "size"]
        return tuple(chain(*sized))


def as_shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if hasattr(value, "shape") else np.shape(value)


@lru_cache(maxsize=1 << 16)
def _found(images: HFImages, width: int, height: int, sharing: int = 1) -> _Found:
    """Return what an image of a size becomes. Raises ValueError for a size that the processor refuses."""
    run = running(images.source)
    outputs, text = run.ruled(width, height) if images.counted == "rule" else run.measured(width, height)
    if sharing == 1:
        return images._read(outputs, text, (width, height))
    outputs = {**outputs, _SHARING: np.array([sharing], np.int64)}
    return images._read(outputs, run.text(outputs), (width, height), rows=1)


def image_modality(processor: Any, *, patch_size: int | None = None) -> HFImages:
    """Images as a processor of Hugging Face prepares them.

    Args:
        processor: a `ProcessorMixin` that has an `image_processor`, or an image processor by itself.
        patch_size: side in pixels of what the vision tower computes one position for, where the processor does not
            tell (it tells for Qwen-VL, LLaVA and LLaVA-NeXT): costs count positions. By default 14 or 16, whichever
            gives a whole number of patches to a token; else a token is a position.

    Raises:
        TypeError: no image processor in it.
        ValueError: outputs that no batch can hold, or that do not follow from an image's size; a token for features
            that is not one of its tokenizer's.
    """
    whole = processor if hasattr(processor, "image_processor") else None
    image_processor = processor.image_processor if whole is not None else processor
    if not callable(getattr(image_processor, "preprocess", None)):
        raise TypeError(f"{type(processor).__name__} has no image processor of transformers' in it")
    source = source_of(whole, image_processor)
    name = type(processor).__name__
    run = running(source)
    looked_at = [
        np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8) for width, height in _LOOKED_AT
    ]
    try:
        seen = [run.outputs(Image.fromarray(image)) for image in looked_at]
    except Exception as error:  # of settings that are missing, or do not go together
        raise ValueError(f"{name} does not take images as it is set: {type(error).__name__}: {error}") from error
    slot = _slot(whole, seen[0][1])
    kept = set(seen[0][0]) if whole is None else _inputs(whole, seen[0][0])
    with suppress(*_NO_RULE):
        kept &= run.ruled(*_LOOKED_AT[0])[0].keys()
    outputs = _outputs(name, [each for each, _ in seen], kept)
    merge = getattr(image_processor, "merge_size", 0) if any(o.name == _GRID for o in outputs) else 0
    if whole is None and not merge and patch_size is None:
        raise ValueError(f"{name} does not say how many tokens an image becomes: give its processor, or patch_size")
    measured = HFImages(
        source=source,
        outputs=outputs,
        counted="measured",
        merge=merge,
        row_positions=1 if merge else _row_positions(outputs, whole, patch_size),
        placeholder=placeholder_of(whole),
        slot=slot,
        num_extents=2 + sum(each.count for each in outputs if each.per == "size"),
    )
    counted = [measured._read(*each, size) for each, size in zip(seen, _LOOKED_AT, strict=True)]
    ruled = replace(measured, counted="rule")
    if _says(ruled, counted):
        return replace(ruled, native=_prepares(ruled, looked_at, [each for each, _ in seen]))
    if not _says(measured, counted):
        raise ValueError(
            f"{name}: what becomes of an image does not follow from its size, as counts of an index have to"
        )
    return measured


def _says(images: HFImages, counted: Sequence[_Found]) -> bool:
    """Return whether the images are counted as the processor counted the examples."""
    try:
        return all(_found(images, *size) == found for size, found in zip(_LOOKED_AT, counted, strict=True))
    except _NO_RULE:
        return False


def _prepares(images: HFImages, looked_at: Sequence[NDArray[np.uint8]], seen: Sequence[Outputs]) -> bool:
    """Return whether this library gives the processor's values, to the bit."""
    rows = [each for each in images.outputs if each.per != "size"]
    if len(rows) != 1 or rows[0].dtype != "float32":
        return False
    try:
        for image, outputs in zip(looked_at, seen, strict=True):
            expected = as_array(outputs[rows[0].name]).reshape(-1, *rows[0].shape)
            values = np.empty_like(expected)
            write_rows(running(images.source).settings, image, values)
            if not np.array_equal(values, expected):
                return False
    except _NO_RULE:
        return False
    return True


def _inputs(processor: Any, outputs: Outputs) -> set[str]:
    """Which outputs of its image processor a processor hands to the model."""
    blank, mark = Image.new("RGB", _LOOKED_AT[0]), placeholder_of(processor)
    ends = [str(getattr(processor, f"image_{end}_token", None) or "") for end in ("start", "end")]
    refusal: Exception | None = None
    # Some ask for tokens around each image, and some read their image processor's outputs as tensors.
    asked = product(dict.fromkeys((mark, f"{ends[0]}{mark}{ends[1]}")), ({}, {"return_tensors": "pt"}))
    for text, options in asked:
        try:
            return outputs.keys() & set(processor(images=[blank], text=[text], **options))
        except Exception as error:  # noqa: BLE001 - of classes that ask for another text, or for more than an image
            refusal = refusal or error
    raise ValueError(
        f"{type(processor).__name__} does not take an image with the text {mark!r}, by which what it hands to its "
        f"model is found ({type(refusal).__name__}: {refusal})"
    ) from refusal


def _outputs(name: str, seen: Sequence[Outputs], kept: set[str]) -> tuple[Output, ...]:
    """Describe the arrays that an image processor gives, from its outputs for several sizes. Raises ValueError."""
    names = [each for each in seen[0] if each in kept]
    floats = [each for each in names if hasattr(seen[0][each], "dtype") and seen[0][each].dtype.is_floating_point]
    main = next(iter(floats), "")
    dims = len(as_shape(seen[0][main])) if main else 0
    if dims not in (2, 3, 4, 5):
        raise ValueError(f"{name} gives no array of tiles or patches for an image: {', '.join(seen[0])}")
    batched = dims in (3, 5)
    described = []
    for each in names:
        shapes = [as_shape(outputs[each]) for outputs in seen]
        rows = [as_shape(outputs[main])[1 if batched else 0] for outputs in seen]
        leading = [(1, count) if batched else (count,) for count in rows]
        dtype = str(seen[0][each].dtype).removeprefix("torch.") if hasattr(seen[0][each], "dtype") else "int64"
        per_row = all(shape[: len(lead)] == lead for shape, lead in zip(shapes, leading, strict=True))
        if each == main or (per_row and len(shapes[0]) >= dims - 1 and (batched or max(rows) > 1)):
            shape = {shape[len(lead) :] for shape, lead in zip(shapes, leading, strict=True)}
            per: Literal["row", "part", "size"] = "row"
        else:
            shape = {shape[1:] for shape in shapes}
            per = "size" if not dtype.startswith(("float", "bfloat")) else "part"
            if any(shape[:1] != (1,) for shape in shapes):
                raise ValueError(f"{name} gives {each} of shape {shapes[0]}, neither a row an image nor a row a tile")
        if len(shape) > 1:
            shown = ", ".join(map(str, sorted(shape)))
            raise ValueError(
                f"{name} gives {each} whose rows have another shape for every image ({shown}): only processors whose "
                "tiles or patches are all of one shape can be used"
            )
        described.append(Output(name=each, shape=shape.pop(), dtype=dtype, per=per, batched=batched and per == "row"))
    return tuple(described)


def _slot(processor: Any, text: str | None) -> Slot:
    """The token of one feature, from the text that stands for an image: of the added ones, that which stands there most
    often. The image_token of some processors is another, which stands there once, as in Llama 4.
    """
    if processor is None:
        return Slot()
    name, tokenizer = type(processor).__name__, processor.tokenizer
    if text is None:
        raise ValueError(f"{name} has no image_token: how its images stand in text is not known")
    named = [getattr(holder, "image_token", None) for holder in (tokenizer, processor)]
    marks = [*(str(each) for each in named if each is not None), *map(str, tokenizer.get_added_vocab())]
    counts = {mark: text.count(mark) for mark in dict.fromkeys(marks) if mark and mark in text}
    if not counts:
        raise ValueError(
            f"{name} puts {text[:80]!r} for an image, in which no added token of its tokenizer stands: add the one of "
            "a feature as a special token"
        )
    mark = max(counts, key=counts.__getitem__)
    return Slot(mark=mark, token_id=id_of(tokenizer, mark))


def _row_positions(outputs: Sequence[Output], processor: Any, patch: int | None) -> int:
    """Return the patches of a tile: from its pixels, by the side of a patch or by the merged tokens of a tile."""
    shape = next(each.shape for each in outputs if each.per == "row")
    if len(shape) != 3:
        return 1
    high, wide = shape[1:]
    patch = patch or getattr(processor, "patch_size", None)
    names = ("num_image_tokens", "image_seq_length", "image_seq_len")
    tokens = next((number for name in names if isinstance(number := getattr(processor, name, None), int)), 1)
    side = isqrt(tokens)
    fits = [each for each in _PATCH_SIDES if side * side == tokens and high >= each and (high // each) % side == 0]
    patch = patch or (fits[0] if fits else None)
    return max(1, (high // patch) * (wide // patch)) if patch else tokens
