"""Audio as a Hugging Face processor takes it: `audio_modality(processor)`.

    clip --decoded, mono, resampled to the extractor's rate--> wave --as the processor does it--> arrays, and text

Arrays carry the names that the model's `forward` has for them; extras follow from sizes alone.

| processor | array, and a row of it | extras |
| --- | --- | --- |
| Qwen2Audio | `input_features`: a window (num_mels, 3000) | `feature_attention_mask` int32 (num_windows, 3000) |
| Qwen2_5Omni | `input_features`: a frame of the clip (num_mels,) | `audio_feature_lengths` int64 (num_windows,) |
| Whisper | `input_features`: a window (num_mels, 3000) | |
| any other | what it returns for a clip, see `HFAudio` | the same, of integers and masks |

`tensor_axes` says how HF's own tensor of one clip comes from its rows: 0, rows are its first dimension (windows);
k > 0, `np.moveaxis(rows, 0, k - 1)[None]`, as Qwen2.5-Omni's (1, num_mels, num_frames) with 2.

`expand(size)` is a run of feature tokens for each window, or what the processor writes; Whisper's `places` is False:
its parts have no token, and the merged sequence is the decoder's text.

A rule of ours is used where it gives what the processor itself gives, tokens, text and values, on clips of several
lengths; else the processor runs, on silence of the clip's length to count, on the clip to decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from orchdata.hf.audio_processor import HFAudio, described, extractor_of, processed, rebuilt, shapes_of
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.audio import AudioPreprocessor, WindowSize
from orchdata.loaders.modalities.modality import ArraySpec, PartSize, Slot

LongClips = Literal["error", "cut", "split"]

# Our own rules: how far silence is appended to a clip, and whether its features have tokens in the text.
_RULES: Final[Mapping[str, Mapping[str, Any]]] = {
    "Qwen2AudioProcessor": {"fill": "window"},
    "Qwen2_5OmniProcessor": {"fill": "none"},
    "WhisperProcessor": {"fill": "window", "places": False},
}


@dataclass(frozen=True, kw_only=True)
class WhisperAudio(AudioPreprocessor):
    """Audio of models whose tower is Whisper's or made like it, computed by `AudioPreprocessor`.

    Attributes:
        slot: the processor's audio token.
        places: False for Whisper itself, whose decoder's text has no place for audio.
    """

    slot: Slot = Slot(mark="")
    places: bool = True

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
        from orchdata.loaders.modalities.audio_decode import decode_audio

        rows = out["input_features"]
        decode_audio(data, self, limits, rows.swapaxes(1, 2) if rows.ndim == 3 else rows, size.extent[0])


def audio_modality(processor: Any, *, long_clips: LongClips = "error") -> WhisperAudio | HFAudio:
    """How a Hugging Face processor takes audio.

    Args:
        processor: a ProcessorMixin with a feature extractor for audio.
        long_clips: clips above what it takes at once (30 s for Whisper and Qwen2-Audio, `chunk_length` of its feature
            extractor) are "error"s of their sample; "cut" keeps the beginning, as the processor itself does without a
            word; "split" makes several windows of them, which follow one another in one place of the text.

    Raises:
        TypeError: no processor of audio.
        ValueError: one that does not tell what stands in the text for a clip, or how large its arrays are, or that
            cannot do `long_clips`.
    """
    name = type(processor).__name__
    if extractor_of(processor) is None:
        raise TypeError(f"{name} has no feature extractor for audio: give it none, Recipe(audio=None)")
    if long_clips not in ("error", "cut", "split"):
        raise ValueError(f"long_clips must be 'error', 'cut' or 'split', got {long_clips!r}")
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
    except NotImplementedError as error:
        raise ValueError(
            f"{name} does not tell what stands in the text for a clip (replace_audio_token), as that of a later "
            "transformers may"
        ) from error
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
    from orchdata.loaders.modalities.audio_decode import write_features

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
    if token is None:
        return "", 0
    token, tokenizer = str(token), processor.tokenizer
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(
            f"{type(processor).__name__}.audio_token {token!r} is {len(ids)} tokens of its tokenizer: add it as one"
        )
    return token, int(ids[0])
