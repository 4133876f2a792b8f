"""Audio clips: how they become log-mel frames or samples, as a value.

    (frames, rate) -> samples -> windows -> tokens -> mel frames -> positions

All counts follow from headers, in integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.checks import check_at_least_one, check_choice, check_seconds
from orchdata.loaders.modalities.modality import ArraySpec, Header, Heads, Modality, PartSize
from orchdata.loaders.modalities.video.containers import TRACK_FIELDS

_WAVE_BYTES: Final = 4


class Clips(Modality):
    """Sound files: their names, signatures and sizes. A header is (frames of a channel, rate in Hz).

    Attributes:
        tracks: whether the sound track of a video clip is a part too.
    """

    fields = tuple("wav wave flac mp3 mp2 ogg oga opus aif aiff aifc au snd caf w64 rf64".split())
    words = ("audio", "audio_url", "input_audio")
    plural = "audio clips"
    column_words = frozenset("audio audios speech sound sounds clip clips recording waveform".split())
    hf_feature = "Audio"
    num_facts = 2

    tracks = False

    @property
    def embedded_in(self) -> tuple[str, ...]:  # type: ignore[override] # constant for each value
        return TRACK_FIELDS if self.tracks else ()

    def parameters(self) -> dict[str, Any]:
        """Without `tracks` if it is False."""
        return {name: value for name, value in super().parameters().items() if name != "tracks" or value}

    def required_modules(self) -> tuple[str, ...]:
        tracks = ("av", "orchdata.loaders.modalities.video.file") if self.tracks else ()
        return ("soundfile", "orchdata.loaders.modalities.audio_decode", *tracks)

    @staticmethod
    def scan(heads: Heads) -> None:
        from orchdata.native.scan.media import scan_audio

        scan_audio(*heads)

    @classmethod
    def probe(cls, data: bytes, limits: Limits) -> Header:
        """(frames of a channel, rate in Hz)."""
        from orchdata.loaders.modalities.audio_header import probe_audio

        return probe_audio(data, limits)

    @staticmethod
    def seconds(header: Header) -> float:
        frames, rate = header[:2]
        return frames / max(1, rate)

    @classmethod
    def matches_magic(cls, head: bytes) -> bool:
        named = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"FORM", b".snd", b"RF64", b"riff", b"caff")
        return head.startswith(named) or head[:2] in (b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")

    @staticmethod
    def checked_header(header: Header, limits: Limits) -> tuple[int, int]:
        """Return (frames of a channel, rate in Hz) of a clip that may be decoded. Raises DecodeError for others."""
        frames, rate = header
        check_seconds(frames, rate, limits)
        if frames < 1 or rate < 1:
            raise DecodeError(f"no audio: its header says {frames} frames at {rate} Hz")
        return frames, rate

    def decoding_bytes(self, parts: Sequence[tuple[Header, PartSize]]) -> int:
        """Waves of all clips, as stored and resampled; the first number of an extent is the length of the latter."""
        return _WAVE_BYTES * sum([frames + size.extent[0] for (frames, _), size in parts])


class WindowSize(NamedTuple):
    """Sizes for the sound of one window at most: rows of its arrays, rows that are filled by the clip's own frames or
    samples, positions and tokens.
    """

    rows: int
    filled: int
    positions: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class AudioPreprocessor(Clips):
    """Audio as mono log-mel frames, as in Whisper, or as the samples themselves.

    A token is sample_rate / (tokens_per_second * hop_length) frames, and `conv_stride` frames become one position of
    the encoder; both divisions must be exact.

    Attributes:
        sample_rate: Hz; clips of other rates are resampled.
        num_mels: mel bands.
        hop_length, n_fft: step and length of the analysis window, in samples; for a waveform, step and receptive field
            of the encoder's convolutions (wav2vec 2.0: 320 and 400).
        conv_stride: frames per position entering attention.
        tokens_per_second: LLM tokens per second of audio.
        features: "log_mel"; "waveform", with samples as rows; "normalized_waveform", of mean 0 and variance 1 over
            each clip or window.
        fill: silence after a clip. "token": up to whole tokens: max(1, ceil(n * tokens_per_second / sample_rate)) for n
            samples. "none": no silence; an incomplete last token is dropped, as in Qwen2-Audio and Qwen2.5-Omni.
            "window": up to the whole window; all its positions count, rows of its arrays are windows, tokens are those
            of "none".
        window_seconds: the longest clip that the encoder takes; None for no limit.
        long_clips: longer clips are "error"s of their sample; "cut" drops the rest; "split" makes several windows of a
            clip, one after the other in one part.
        dtype: dtype of the stored features.
        tracks: whether the first sound track of a video clip (MP4, MOV, WebM, Matroska) is a part too, from the clip's
            start on, called "0.mp4 (audio)". Needs PyAV, the extra `video`.
    """

    num_extents = 2
    no_counts = frozenset("dtype".split())

    sample_rate: int = 16_000
    num_mels: int = 128
    hop_length: int = 160
    conv_stride: int = 2
    tokens_per_second: int = 25
    n_fft: int = 400
    features: Literal["log_mel", "waveform", "normalized_waveform"] = "log_mel"
    fill: Literal["token", "none", "window"] = "token"
    window_seconds: int | None = None
    long_clips: Literal["error", "cut", "split"] = "error"
    dtype: Literal["float32", "bfloat16"] = "float32"
    tracks: bool = False

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name in ("sample_rate", "num_mels", "hop_length", "conv_stride", "tokens_per_second", "n_fft"):
            check_at_least_one(owner, name, getattr(self, name))
        check_choice(owner, "dtype", self.dtype, ("float32", "bfloat16"))
        check_choice(owner, "features", self.features, ("log_mel", "waveform", "normalized_waveform"))
        check_choice(owner, "fill", self.fill, ("token", "none", "window"))
        check_choice(owner, "tracks", self.tracks, (False, True))
        check_choice(owner, "long_clips", self.long_clips, ("error", "cut", "split"))
        if self.window_seconds is not None:
            check_at_least_one(owner, "window_seconds", self.window_seconds)
        elif self.fill == "window" or self.long_clips != "error":
            raise ValueError(f"fill={self.fill!r} and long_clips={self.long_clips!r} need window_seconds, such as 30")
        if self.sample_rate % (self.tokens_per_second * self.hop_length):
            raise ValueError(
                f"a token must be a whole number of mel frames: sample_rate={self.sample_rate} is not divisible by "
                f"tokens_per_second={self.tokens_per_second} * hop_length={self.hop_length}"
            )
        if self.mel_frames_per_token % self.conv_stride:
            raise ValueError(
                f"a token must be a whole number of positions: its {self.mel_frames_per_token} mel frames are not "
                f"divisible by conv_stride={self.conv_stride}"
            )

    @property
    def mel_frames_per_token(self) -> int:
        return self.sample_rate // (self.tokens_per_second * self.hop_length)

    @property
    def window_samples(self) -> int | None:
        return None if self.window_seconds is None else self.window_seconds * self.sample_rate

    def num_samples(self, frames: int, rate: int) -> int:
        """Samples at `sample_rate` of a clip of `frames` at `rate` Hz."""
        return -(-frames * self.sample_rate // rate)

    def num_tokens(self, num_samples: int) -> int:
        """LLM tokens of a clip of `num_samples` at `sample_rate`."""
        return sum(self.window_size(stop - start).tokens for start, stop in self.windows(num_samples))

    def mel_frames(self, num_samples: int) -> int:
        """Mel frames of a clip of `num_samples` at `sample_rate`, without the silence after it under "window"."""
        return sum(self.window_size(stop - start).filled for start, stop in self.windows(num_samples))

    def windows(self, num_samples: int) -> Iterator[tuple[int, int]]:
        """Yield start and end of a clip's windows, in samples, without a last one that is too short for a token."""
        longest = self.window_samples
        if longest is None or num_samples <= longest:
            yield 0, num_samples
            return
        yield 0, longest
        if self.long_clips == "split":
            for start in range(longest, num_samples, longest):
                stop = min(start + longest, num_samples)
                if self.window_size(stop - start).tokens:
                    yield start, stop

    def window_size(self, num_samples: int) -> WindowSize:
        """Return the sizes for this number of samples, one window at most."""
        is_mel = self.features == "log_mel"
        if self.fill == "token":
            tokens = max(1, -(-num_samples * self.tokens_per_second // self.sample_rate))
            frames = tokens * self.mel_frames_per_token
            rows = frames if is_mel else frames * self.hop_length + max(0, self.n_fft - self.hop_length)
            return WindowSize(rows, rows, frames // self.conv_stride, tokens)
        frames, positions = self._frames(num_samples)
        tokens = positions // (self.mel_frames_per_token // self.conv_stride)
        filled = frames if is_mel else num_samples
        if self.window_samples is not None and self.fill == "window":
            return WindowSize(1, filled, self._frames(self.window_samples)[1], tokens)
        return WindowSize(filled, filled, positions, tokens)

    def _frames(self, num_samples: int) -> tuple[int, int]:
        """Return frames, and positions computed from them."""
        if self.features == "log_mel":
            frames = -(-num_samples // self.hop_length)
        else:
            frames = max(0, (num_samples - self.n_fft) // self.hop_length + 1)
        return frames, -(-frames // self.conv_stride)

    def arrays(self) -> Mapping[str, ArraySpec]:
        return {"features": ArraySpec(self.row_shape, self.dtype)}

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row of `features`: a frame, a sample, or a window of them."""
        row = (self.num_mels,) if self.features == "log_mel" else ()
        if self.fill != "window" or self.window_samples is None:
            return row
        return (self.window_samples // (self.hop_length if row else 1), *row)

    def count_header(self, header: Header, limits: Limits) -> PartSize:
        frames, rate = self.checked_header(header, limits)
        num_samples, longest = self.num_samples(frames, rate), self.window_samples
        if longest is not None and num_samples > longest and self.long_clips == "error":
            split = 'long_clips="split" makes several windows of it, "cut"' if self.places else 'long_clips="cut"'
            raise DecodeError(
                f"audio of {frames / rate:.3f} s, above window_seconds={self.window_seconds}: {split} keeps the first "
                f"{self.window_seconds} s of such clips"
            )
        sizes = [self._sized(window) for window in self.windows(num_samples)]
        rows, filled, positions, tokens = sizes[0] if len(sizes) == 1 else map(sum, zip(*sizes, strict=True))
        if self.places and not tokens:
            raise DecodeError(f"audio of {frames / rate:.3f} s is too short for a token: leave it out of the data")
        return PartSize(positions, tokens, rows, (num_samples, filled))

    def _sized(self, window: tuple[int, int]) -> WindowSize:
        return self.window_size(window[1] - window[0])

    def decode_into(
        self, data: bytes | memoryview, size: PartSize, out: Mapping[str, NDArray[Any]], limits: Limits
    ) -> None:
        from orchdata.loaders.modalities.audio_decode import decode_audio

        decode_audio(data, self, limits, out["features"], size.extent[0])

    def to_file(
        self, data: bytes | memoryview, size: PartSize, arrays: Mapping[str, NDArray[Any]], limits: Limits
    ) -> tuple[str, bytes]:
        """The input of the features: one channel at `sample_rate`, windows not yet filled up."""
        from orchdata.loaders.modalities.audio_decode import wav_of

        return "wav", wav_of(data, self.sample_rate, size.extent[0], limits)

    def extras(self, sizes: Sequence[PartSize]) -> Mapping[str, NDArray[Any]]:
        """If clips have windows, `window_lengths`, int64 (num_windows,): rows of each window without the silence after
        the clip; under fill="window", frames or samples.
        """
        return {} if self.window_seconds is None else {"window_lengths": self.window_lengths(sizes)}

    def window_lengths(self, sizes: Sequence[PartSize]) -> NDArray[np.int64]:
        """Filled length of each window of these parts, int64 (num_windows,)."""
        windows = [window for size in sizes for window in self.windows(size.extent[0])]
        return np.array([self._sized(window).filled for window in windows], np.int64)

    def dummy(self) -> PartSize:
        return self._shortest(1)

    def padding(self, positions: int) -> PartSize | None:
        """One clip; None if clips have windows."""
        least = self.dummy()
        if self.window_seconds is not None or positions % least.positions:
            return None
        return self._shortest(positions // least.positions)

    def _shortest(self, tokens: int) -> PartSize:
        """Return the shortest clip with this number of tokens, one window at most."""
        per_token = self.mel_frames_per_token
        if self.fill == "token":
            num_samples = (tokens - 1) * per_token * self.hop_length + 1
        else:  # one sample more than all positions but the last need
            frames = (tokens * per_token // self.conv_stride - 1) * self.conv_stride
            num_samples = frames * self.hop_length + (1 if self.features == "log_mel" else self.n_fft)
        rows, filled, positions, tokens = self.window_size(num_samples)
        return PartSize(positions, tokens, rows, (num_samples, filled))
