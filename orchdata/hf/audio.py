"""Audio as a Hugging Face processor takes it: `audio_modality(processor)`.

    clip --decoded, mono, resampled to the extractor's rate--> wave --as the processor does it--> arrays, and text

Arrays and extras, which follow from sizes alone, carry the names that the model's `forward` has for them. Of Qwen2Audio
and Whisper a row of `input_features` is a window (num_mels, 3000), of Qwen2_5Omni a frame (num_mels,). `tensor_axes`:
0, rows are the first dimension of HF's own tensor of a clip; k > 0, it is `np.moveaxis(rows, 0, k - 1)[None]`.

A rule of ours is used where it gives what the processor itself gives, tokens, text and values, on clips of several
lengths; else the processor, kept as JSON, runs: on silence of the clip's length to count, on the clip to decode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.hf.processors import as_array, class_at, id_of, joined, merged_kwargs, path_of, runs
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.audio import AudioPreprocessor, Clips, WindowSize, write_features
from orchdata.loaders.modalities.modality import ArraySpec, Header, PartSize, Slot

LongClips = Literal["error", "cut", "split"]

# Our own rules: how far silence is appended to a clip, and whether its features have tokens in the text.
_RULES: Final[Mapping[str, Mapping[str, Any]]] = {
    "Qwen2AudioProcessor": {"fill": "window"},
    "Qwen2_5OmniProcessor": {"fill": "none"},
    "WhisperProcessor": {"fill": "window", "places": False},
}


@dataclass(frozen=True, kw_only=True)
class WhisperAudio(AudioPreprocessor):
    """Audio of models whose tower is Whisper's or made like it, computed by `AudioPreprocessor`."""

    slot: Slot = Slot(mark="")  # the processor's audio token
    places: bool = True  # False for Whisper itself, whose decoder's text has no place for audio

    def arrays(self) -> Mapping[str, ArraySpec]:
        return {"input_features": ArraySpec(self.row_shape[::-1], self.dtype)}

    @property
    def tensor_axes(self) -> dict[str, int]:
        return {"input_features": 0 if self.fill == "window" else 2}

    def window_size(self, num_samples: int) -> WindowSize:
        size = super().window_size(num_samples)
        return size if self.places else size._replace(tokens=0)

    def among(self, size: PartSize, count: int) -> PartSize:
        if not self.places:
            raise DecodeError(f"{count} clips, where a decoder's text is of one")
        return size

    def expand(self, size: PartSize) -> tuple[str | int, ...] | None:
        """The feature tokens of each window, without text between."""
        if not self.places:
            return None
        return tuple(self.window_size(stop - start).tokens for start, stop in self.windows(size.extent[0]))

    def extras(self, sizes: Sequence[PartSize]) -> Mapping[str, NDArray[Any]]:
        if not self.places:
            return {}
        lengths = self.window_lengths(sizes)
        if self.fill != "window":
            return {"audio_feature_lengths": lengths}
        return {"feature_attention_mask": (np.arange(self.row_shape[0]) < lengths[:, None]).astype(np.int32)}

    def dummy(self) -> PartSize:
        # Qwen2-Audio takes features whose tokens do not follow one another for those of texts not yet expanded.
        return self._shortest(2 if self.places else 1)

    def decode_into(
        self, data: bytes | memoryview, size: PartSize, out: Mapping[str, NDArray[Any]], limits: Limits
    ) -> None:
        from orchdata.loaders.modalities.audio_decode import decode_wave

        rows = out["input_features"]
        wave = decode_wave(data, self.sample_rate, size.extent[0], limits)
        write_features(wave, self, rows.swapaxes(1, 2) if rows.ndim == 3 else rows)


def audio_modality(processor: Any, *, long_clips: LongClips = "error") -> WhisperAudio | HFAudio:
    """How a Hugging Face processor takes audio; `long_clips` are above `chunk_length` of its feature extractor. Raises
    TypeError for no processor of audio; ValueError for one that does not tell what becomes of a clip, or that cannot do
    `long_clips`.
    """
    name = type(processor).__name__
    if extractor_of(processor) is None:
        raise TypeError(f"{name} has no feature extractor for audio: give it none, Recipe(audio=None)")
    given = described(processor)
    modality = _by_rule(processor, given, long_clips)
    if modality is not None:
        return modality
    if long_clips == "split":
        raise ValueError(f'{name} decides by itself what becomes of long clips: long_clips="error" or "cut"')
    token, token_id = _audio_token(processor)
    sample_rate = int(extractor_of(processor).sampling_rate)
    try:
        shapes = shapes_of(processor, given, sample_rate)
    except Exception as error:
        raise ValueError(
            f"{name} does not tell what it makes of a clip alone ({type(error).__name__}: {error})"
        ) from error
    return HFAudio(
        slot=Slot(mark=token, token_id=token_id),
        places=bool(token),
        processor=given,
        sample_rate=sample_rate,
        shapes=shapes,
        long_clips=long_clips,
    )


def _by_rule(processor: Any, given: str, long_clips: LongClips) -> WhisperAudio | None:
    """The processor's audio by a rule of ours; None where there is none, or where it makes something else."""
    rule, extractor = _RULES.get(type(processor).__name__), extractor_of(processor)
    if rule is None or type(extractor).__name__ != "WhisperFeatureExtractor" or extractor.dither:
        return None
    if not rule.get("places", True) and long_clips == "split":
        raise ValueError('an encoder-decoder takes one window a text: long_clips="error" or "cut"')
    token, token_id = _audio_token(processor) if rule.get("places", True) else ("", 0)
    try:
        modality = WhisperAudio(
            **rule,
            slot=Slot(mark=token, token_id=token_id),
            sample_rate=extractor.sampling_rate,
            num_mels=extractor.feature_size,
            hop_length=extractor.hop_length,
            n_fft=extractor.n_fft,
            tokens_per_second=max(1, extractor.sampling_rate // (4 * extractor.hop_length)),
            window_seconds=extractor.chunk_length,
            long_clips=long_clips,
        )
    except ValueError:
        return None
    return modality if _is_proven(modality, processor, rebuilt(given)[1]) else None


def _is_proven(rule: WhisperAudio, processor: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the processor gives what the rule gives, for noise of several lengths."""
    longest = rule.window_samples or 0
    for num_samples in {321, min(8_077, longest), *([longest - 100] if longest <= 60 * rule.sample_rate else [])}:
        wave = np.random.default_rng(num_samples).normal(scale=0.1, size=num_samples).astype(np.float32)
        arrays, text = processed(processor, kwargs, wave)
        size = rule.window_size(num_samples)
        rows = np.empty((size.rows, *rule.row_shape), np.float32)
        write_features(wave, rule, rows)
        given = np.asarray(arrays["input_features"][0]).T[: size.filled if rule.fill == "none" else None]
        ours = rows if rule.fill == "none" else rows[0]
        if text != (rule.slot.mark or "") * size.tokens or ours.shape != given.shape:
            return False
        if not np.allclose(ours, given, rtol=0, atol=1e-5):
            return False
        mask = arrays.get("feature_attention_mask")
        if mask is not None and int(np.asarray(mask).sum()) != size.filled:
            return False
    return True


def _audio_token(processor: Any) -> tuple[str, int]:
    """The token that stands for audio, and its id; ("", 0) where the text has none. Raises ValueError."""
    token = getattr(processor, "audio_token", None)
    return ("", 0) if token is None else (str(token), id_of(processor.tokenizer, str(token), is_added=False))


_EXTRACTORS: Final = ("feature_extractor", "audio_processor")
# Lengths that show what follows from a clip's length: within a window, beyond it, and far beyond it.
_TRIED_SECONDS: Final = (0.5, 1.0, 2.37, 40.0, 75.0)
# Clips above it are counted twice, to see whether the processor drops their end.
_SHORT_SECONDS: Final = 20
_TAIL_SECONDS: Final = 0.1


class Shape(NamedTuple):
    """What a processor returns under a name: shape and dtype of a row, and the axis of one clip's tensor that rows lie
    along.
    """

    name: str
    row: tuple[int, ...]
    dtype: str
    per: Literal["row", "part"]
    axis: int

    @property
    def is_array(self) -> bool:
        return np.dtype(self.dtype).kind == "f"

    def rows(self, values: NDArray[Any] | None) -> NDArray[Any]:
        """(rows, *row) of what was returned for one clip."""
        if values is None:
            return np.empty(0)
        return np.moveaxis(values[0], self.axis - 1, 0) if self.axis else values


class _Measured(NamedTuple):
    """A clip of some length: rows of its arrays, what stands in the text, whether its end is dropped, and extras."""

    rows: int
    pieces: tuple[str | int, ...]
    is_cut: bool
    extras: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class HFAudio(Clips):
    """Audio of any processor, which runs for each clip.

    An array whose size along one dimension follows the clip's length has rows along it (`tensor_axes`), and one whose
    first dimension does has windows for rows; one that is (1, ...) for every clip has a row a part. Integers and masks
    follow from the length alone, and are extras.
    """

    num_extents = 1

    slot: Slot = Slot(mark="")  # the processor's audio token
    places: bool = True  # whether it has one
    processor: str  # JSON of all that it needs, see `described`
    sample_rate: int  # Hz
    shapes: tuple[Shape, ...]  # of each array and extra
    long_clips: Literal["error", "cut"] = "error"  # of what the processor would cut without a word
    tracks: bool = False  # as `AudioPreprocessor` has it

    def arrays(self) -> Mapping[str, ArraySpec]:
        return {each.name: ArraySpec(each.row, each.dtype, each.per) for each in self.shapes if each.is_array}

    @property
    def tensor_axes(self) -> dict[str, int]:
        return {each.name: each.axis for each in self.shapes if each.per == "row"}

    def required_modules(self) -> tuple[str, ...]:
        source = json.loads(self.processor)
        return (*super().required_modules(), "transformers", source["class"][0], source["extractor"]["class"][0])

    def set_up_process(self) -> None:
        super().set_up_process()
        rebuilt(self.processor)

    def extras(self, sizes: Sequence[PartSize]) -> Mapping[str, NDArray[Any]]:
        measured = [_measured(self, size.extent[0]).extras for size in sizes]
        names = [each.name for each in self.shapes if not each.is_array] if sizes else []
        return {name: np.concatenate([extras[name] for extras in measured]) for name in names}

    def part_axes(self, sizes: Sequence[PartSize]) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Return frames and samples, of which the model takes one row a clip; windows follow one another."""
        axes: dict[str, tuple[int, tuple[int, ...]]] = {}
        for each in self.shapes:
            if each.per == "row" and each.axis:
                lengths = [
                    size.num_rows if each.is_array else len(_measured(self, size.extent[0]).extras[each.name])
                    for size in sizes
                ]
                axes[each.name] = each.axis, tuple(lengths)
        return axes

    def count_header(self, header: Header, limits: Limits) -> PartSize:
        frames, rate = self.checked_header(header, limits)
        return self._size(-(-frames * self.sample_rate // rate))

    def _size(self, num_samples: int) -> PartSize:
        """Raises DecodeError."""
        rows, pieces, is_cut, _ = _measured(self, num_samples)
        seconds = num_samples / self.sample_rate
        if is_cut and self.long_clips == "error":
            raise DecodeError(f'its processor drops the end of a clip of {seconds:.3f} s: long_clips="cut" lets it')
        tokens = sum(piece for piece in pieces if isinstance(piece, int))
        if self.places and not tokens:
            raise DecodeError(f"its processor makes no token of a clip of {seconds:.3f} s: leave it out of the data")
        # Frames of a window: the longest side of the largest array.
        largest = max((each for each in self.shapes if each.is_array), key=lambda each: np.prod(each.row))
        positions = rows if largest.axis or not largest.row else rows * max(largest.row)
        return PartSize(max(1, positions), tokens, rows, (num_samples,))

    def expand(self, size: PartSize) -> tuple[str | int, ...] | None:
        """Return the text that the processor writes for the clip."""
        return _measured(self, size.extent[0]).pieces if self.places else None

    def decode(self, data: bytes | memoryview, limits: Limits) -> Mapping[str, Any]:
        raise NotImplementedError("a clip is decoded to the length that the index says: decode_into()")

    def decode_into(
        self, data: bytes | memoryview, size: PartSize, out: Mapping[str, NDArray[Any]], limits: Limits
    ) -> None:
        from orchdata.loaders.modalities.audio_decode import decode_wave

        wave = decode_wave(data, self.sample_rate, size.extent[0], limits)
        measured = _measured(self, size.extent[0])
        arrays, text = processed(*rebuilt(self.processor), wave)
        if text != joined(measured.pieces, self.slot.mark or ""):
            raise DecodeError("its processor writes other text for the clip than for silence of its length")
        for each in self.shapes:
            rows = each.rows(arrays.get(each.name))
            expected = out[each.name] if each.is_array else measured.extras[each.name]
            if rows.shape != expected.shape or str(rows.dtype) != each.dtype:
                raise DecodeError(
                    f"its processor makes {each.name} of shape {rows.shape} and dtype {rows.dtype} of the clip, the "
                    f"index says {expected.shape} and {each.dtype}: index again"
                )
            if each.is_array:
                expected[...] = rows
            elif not np.array_equal(rows, expected):
                raise DecodeError(f"its processor makes another {each.name} of the clip than of silence of its length")

    def dummy(self) -> PartSize:
        """The shortest clip, in tenths of a second, that the processor takes."""
        return _shortest(self)


def extractor_of(processor: Any) -> Any:
    """Return the feature extractor of audio, or None."""
    return next((extractor for name in _EXTRACTORS if (extractor := getattr(processor, name, None)) is not None), None)


def described(processor: Any) -> str:
    """All that its audio depends on, as JSON; what is rebuilt of it has no tokenizer. Raises TypeError where the
    extractor's parameters have no JSON form.
    """
    name = next(name for name in _EXTRACTORS if getattr(processor, name, None) is not None)
    extractor = getattr(processor, name)
    kwargs: dict[str, Any] = {}
    if type(processor).__name__ != "WhisperProcessor":  # which hands on what it is called with, and nothing else
        kwargs = merged_kwargs(processor)["audio_kwargs"]
    parameters = json.loads(extractor.to_json_string())
    parameters = {key: value for key, value in parameters.items() if not key.endswith("_class")}
    source = {
        "transformers": import_module("transformers").__version__,
        "class": path_of(processor),
        "extractor": {"name": name, "class": path_of(extractor), "parameters": parameters},
        "kwargs": {**_plain_items(kwargs), "sampling_rate": extractor.sampling_rate, "return_tensors": "pt"},
        "attributes": _plain_items(vars(processor)),
    }
    return json.dumps(source, sort_keys=True)


def _plain_items(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that JSON can hold, without text templates."""
    items: dict[str, Any] = {}
    for name, value in values.items():
        try:
            if name != "chat_template" and json.loads(json.dumps(value)) == value:
                items[name] = value
        except (TypeError, ValueError):
            continue
    return items


@lru_cache(maxsize=8)
def rebuilt(given: str) -> tuple[Any, dict[str, Any]]:
    """The processor without its tokenizer, and what its audio method is called with: no thread changes it."""
    source = json.loads(given)
    kind, extractor = class_at(source["class"]), source["extractor"]
    processor = kind.__new__(kind)
    for name, value in source["attributes"].items():
        setattr(processor, name, value)
    setattr(processor, extractor["name"], class_at(extractor["class"])(**extractor["parameters"]))
    return processor, source["kwargs"]


def processed(processor: Any, kwargs: dict[str, Any], wave: NDArray[np.float32]) -> tuple[dict[str, Any], str]:
    """Arrays, by the name that the model has for them, and the text of a clip."""
    arrays, texts = processor._process_audio([wave], **kwargs)
    if getattr(processor, "audio_token", None) is not None and len(texts) != 1:
        raise ValueError(f"it writes {len(texts)} texts for one clip")
    unused = set(processor.unused_input_names)
    return {name: as_array(value) for name, value in arrays.items() if name not in unused}, "".join(texts)


@lru_cache(maxsize=1 << 12)
def _measured(modality: HFAudio, num_samples: int) -> _Measured:
    """A clip of so many samples, by silence of its length."""
    called = rebuilt(modality.processor)
    wave = np.zeros(num_samples, np.float32)
    arrays, text = processed(*called, wave)
    is_cut = False
    if num_samples > _SHORT_SECONDS * modality.sample_rate:
        tail = int(_TAIL_SECONDS * modality.sample_rate)
        wave[-tail:] = np.random.default_rng(0).normal(size=tail)
        other, _ = processed(*called, wave)
        is_cut = all(np.array_equal(value, other[name]) for name, value in arrays.items())
    shaped = {each: each.rows(arrays.get(each.name)) for each in modality.shapes}
    num_rows = next((len(rows) for each, rows in shaped.items() if each.is_array and each.per == "row"), 1)
    extras = {each.name: rows.copy() for each, rows in shaped.items() if not each.is_array}
    mark = modality.slot.mark
    return _Measured(num_rows, runs(text, mark) if mark else (), is_cut, extras)


def shapes_of(processor: Any, given: str, sample_rate: int) -> tuple[Shape, ...]:
    """What a processor returns, from silence of several lengths.

    Raises ValueError for what is no array of rows, and where JSON does not hold all that values depend on.
    """
    called = rebuilt(given)
    noise = np.random.default_rng(0).normal(scale=0.1, size=sample_rate).astype(np.float32)
    (own, own_text), (arrays, text) = (processed(each, called[1], noise) for each in (processor, called[0]))
    if (own_text, own.keys()) != (text, arrays.keys()) or any(
        not np.array_equal(own[each], arrays[each]) for each in own
    ):
        raise ValueError("built from its JSON it gives other values")
    runs = [processed(*called, np.zeros(int(seconds * sample_rate), np.float32))[0] for seconds in _TRIED_SECONDS]
    shapes: list[Shape] = []
    for name, first in runs[0].items():
        sides = [run[name].shape for run in runs]
        if first.ndim < 1 or len({len(side) for side in sides}) > 1 or first.dtype.kind not in "biuf":
            raise ValueError(f"{name} is no array of one shape: {sorted(set(sides))}")
        varying = [axis for axis in range(first.ndim) if len({side[axis] for side in sides}) > 1]
        if len(varying) > 1 or (varying != [0] and first.shape[0] != 1):
            raise ValueError(
                f"{name} has the shapes {sorted(set(sides))}, which follow a clip's length in several ways"
            )
        axis = varying[0] if varying else 0
        row = tuple(int(side) for at, side in enumerate(first.shape) if at not in (0, axis))
        shapes.append(Shape(name, row, str(first.dtype), "row" if varying else "part", axis))
    for run in runs:
        rows = {each.name: run[each.name].shape[each.axis] for each in shapes if each.is_array and each.per == "row"}
        if len(set(rows.values())) > 1:
            raise ValueError(f"arrays of one clip have different numbers of rows: {rows}")
    if not any(each.is_array for each in shapes):
        raise ValueError("it returns no array of floats")
    return tuple(shapes)


@lru_cache(maxsize=8)
def _shortest(modality: HFAudio) -> PartSize:
    for tenths in range(1, 300):
        with suppress(Exception):  # a processor may raise anything for a clip that is too short
            return modality._size(tenths * modality.sample_rate // 10)
    raise ValueError("its processor makes no token of a clip of 30 s")
