"""Audio clips: how they become log-mel frames or samples, as a value.

    (frames, rate) -> samples -> windows -> tokens -> mel frames -> positions

All counts follow from headers, in integers. Features are Whisper's: power spectrogram (Hann window), Slaney mel bands,
log10 above 1e-10, cut 8 below the highest value, (x + 4) / 4, each window by itself: the operations of Hugging Face's
WhisperFeatureExtractor in the same order. On many processors values are equal to the bit; with other vector units, sums
over other numbers of frames may differ within the bound in docs/reliability.md. The silence after a clip is not
computed frame by frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.first_calls import settle_first_calls
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.modality import (
    ArraySpec,
    Header,
    Heads,
    Modality,
    PartSize,
    Scratch,
    check_at_least_one,
    check_choice,
    check_seconds,
)
from orchdata.loaders.modalities.video.containers import TRACK_FIELDS

if TYPE_CHECKING:
    import torch

_WAVE_BYTES: Final = 4
# Longer clips are processed in pieces of this number of spectrogram frames.
_MEL_FRAMES: Final = 1 << 15
_MOST_LANES: Final = 64

Wave = NDArray[np.float32]
_padded, _parts, _bands = Scratch(), Scratch(), Scratch()


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
        return ("soundfile", "orchdata.loaders.modalities.audio_decode", "orchdata.native.decoding", *tracks)

    def set_up_process(self) -> None:
        """Decide how to resample: torchaudio is not required, and takes long to import or to fail."""
        from orchdata.loaders.modalities.audio_decode import torchaudio_transforms

        torchaudio_transforms()

    def _set_up_counting(self) -> None:
        """Nothing: torchaudio imports torch, and lengths come from headers."""
        if type(self).set_up_process is not Clips.set_up_process:
            super()._set_up_counting()

    @staticmethod
    def scan(heads: Heads) -> None:
        from orchdata.native.scan import scan_audio

        scan_audio(*heads)

    @classmethod
    def probe(cls, data: bytes, limits: Limits) -> Header:
        """(frames of a channel, rate in Hz)."""
        from orchdata.loaders.modalities.audio_decode import probe_audio

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
    """Sizes for the sound of one window at most."""

    rows: int  # of its arrays
    filled: int  # of these, by the clip's own frames or samples
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
        check_choice(owner, "features", self.features, tuple(_FEATURES))
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
        kind = _FEATURES[self.features]
        if self.fill == "token":
            tokens = max(1, -(-num_samples * self.tokens_per_second // self.sample_rate))
            frames = tokens * self.mel_frames_per_token
            rows = frames * self.hop_length // kind.step(self) + max(0, kind.field(self) - self.hop_length)
            return WindowSize(rows, rows, frames // self.conv_stride, tokens)
        frames, positions = self._frames(num_samples)
        tokens = positions // (self.mel_frames_per_token // self.conv_stride)
        filled = -(-num_samples // kind.step(self))
        if self.window_samples is not None and self.fill == "window":
            return WindowSize(1, filled, self._frames(self.window_samples)[1], tokens)
        return WindowSize(filled, filled, positions, tokens)

    def _frames(self, num_samples: int) -> tuple[int, int]:
        """Return frames, and positions computed from them."""
        frames = max(0, (num_samples - _FEATURES[self.features].field(self)) // self.hop_length + 1)
        return frames, -(-frames // self.conv_stride)

    def arrays(self) -> Mapping[str, ArraySpec]:
        return {"features": ArraySpec(self.row_shape, self.dtype)}

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row of `features`: a frame, a sample, or a window of them."""
        kind = _FEATURES[self.features]
        if self.fill != "window" or self.window_samples is None:
            return kind.row(self)
        return (self.window_samples // kind.step(self), *kind.row(self))

    def count_header(self, header: Header, limits: Limits) -> PartSize:
        frames, rate = self.checked_header(header, limits)
        num_samples, longest = self.num_samples(frames, rate), self.window_samples
        if longest is not None and num_samples > longest and self.long_clips == "error":
            split = 'long_clips="split" makes several windows of it, "cut"' if self.places else 'long_clips="cut"'
            raise DecodeError(
                f"audio of {frames / rate:.3f} s, above window_seconds={self.window_seconds}: {split} keeps the first "
                f"{self.window_seconds} s of such clips"
            )
        sizes = [self.window_size(stop - start) for start, stop in self.windows(num_samples)]
        rows, filled, positions, tokens = sizes[0] if len(sizes) == 1 else map(sum, zip(*sizes, strict=True))
        if self.places and not tokens:
            raise DecodeError(f"audio of {frames / rate:.3f} s is too short for a token: leave it out of the data")
        return PartSize(positions, tokens, rows, (num_samples, filled))

    def decode_into(
        self, data: bytes | memoryview, size: PartSize, out: Mapping[str, NDArray[Any]], limits: Limits
    ) -> None:
        from orchdata.loaders.modalities.audio_decode import decode_wave

        write_features(decode_wave(data, self.sample_rate, size.extent[0], limits), self, out["features"])

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
        return np.array([self.window_size(stop - start).filled for start, stop in windows], np.int64)

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
            num_samples = frames * self.hop_length + _FEATURES[self.features].field(self)
        rows, filled, positions, tokens = self.window_size(num_samples)
        return PartSize(positions, tokens, rows, (num_samples, filled))


def write_features(wave: Wave, pre: AudioPreprocessor, out: NDArray[Any]) -> None:
    """Write the features of a clip at `pre.sample_rate`, window by window.

    Args:
        wave: float32 (num_samples,).
        out: (rows, *pre.row_shape), fully overwritten: float32 or uint16 (bfloat16 bits), according to `pre.dtype`.
    """
    import torch

    row = 0
    for start, stop in pre.windows(len(wave)):
        num_rows = pre.window_size(stop - start).rows
        target = torch.from_numpy(out[row] if pre.fill == "window" else out[row : row + num_rows])
        write = _FEATURES[pre.features].write
        write(wave[start:stop], pre, target.view(torch.bfloat16) if pre.dtype == "bfloat16" else target)
        row += num_rows
    assert row == len(out)


def _write_wave(wave: Wave, _pre: AudioPreprocessor, target: torch.Tensor) -> None:
    """Write the samples, followed by zeros."""
    import torch

    target[: len(wave)] = torch.from_numpy(wave)
    target[len(wave) :] = 0


def _write_log_mel(wave: Wave, pre: AudioPreprocessor, target: torch.Tensor) -> None:
    """Write log-mel frames of the clip and of the start of the silence after it. The silence ends with the recipe's
    window; there it is mirrored, as at the clip's start.
    """
    import torch

    num_samples = -(-(len(wave) + pre.n_fft) // pre.hop_length) * pre.hop_length
    if pre.window_samples is not None:
        num_samples = min(num_samples, pre.window_samples)
    half = pre.n_fft // 2
    padded = _padded.floats(num_samples + 2 * half)
    body = padded[half : half + num_samples]
    body[: len(wave)] = wave
    body[len(wave) :] = 0
    padded[:half], padded[half + num_samples :] = body[half:0:-1], body[-2 : -half - 2 : -1]
    with torch.no_grad():
        log = _mel_power(padded, pre, num_samples // pre.hop_length).clamp_(min=1e-10).log10_()
        mel = log.clamp_(min=float(log.max() - 8.0)).add_(4.0).div_(4.0)
        num_frames = min(len(target), mel.shape[1])
        target[:num_frames] = mel.T[:num_frames]
        target[num_frames:] = mel[:, -1]  # if there are more, the last frame is silence


def _mel_power(padded: Wave, pre: AudioPreprocessor, num_frames: int) -> torch.Tensor:
    """Return the mel power of the first frames, (num_mels, num_frames). Long clips are split, as spectra are large."""
    import torch

    from orchdata.native.decoding import split_complex

    window, filters = _mel(pre.num_mels, pre.n_fft, pre.sample_rate)
    mel = torch.from_numpy(_bands.floats(pre.num_mels, num_frames))
    for start in range(0, num_frames, _MEL_FRAMES):
        stop = min(start + _MEL_FRAMES, num_frames)
        piece = torch.from_numpy(padded[start * pre.hop_length : (stop - 1) * pre.hop_length + pre.n_fft])
        spectrum = torch.stft(piece, pre.n_fft, pre.hop_length, window=window, center=False, return_complex=True)
        # `spectrum.T.abs()`, three times as fast, mostly equal to the bit. torch handles a remainder that fills no
        # vector one by one, with other rounding in rare cases: do the same here.
        values = spectrum.T.contiguous()
        count = values.numel()
        real, imaginary = _parts.floats(2, count)
        split_complex(torch.view_as_real(values).view(-1).numpy(), real, imaginary)
        magnitudes, whole = torch.from_numpy(real), count - count % _MOST_LANES
        torch.hypot(magnitudes[:whole], torch.from_numpy(imaginary[:whole]), out=magnitudes[:whole])
        torch.abs(values.reshape(-1)[whole:], out=magnitudes[whole:])
        power = magnitudes.view(values.shape).pow_(2).T
        if stop - start == num_frames:
            torch.matmul(filters.T, power, out=mel)
        else:
            mel[:, start:stop] = filters.T @ power
    return mel


@lru_cache(maxsize=8)
def _mel(num_mels: int, n_fft: int, sample_rate: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the Hann window (n_fft,) and the mel bands (1 + n_fft // 2, num_mels). Any thread may read them."""
    import torch

    settle_first_calls()
    return torch.hann_window(n_fft), torch.from_numpy(mel_bands(num_mels, n_fft, sample_rate)).to(torch.float32)


def mel_bands(num_mels: int, n_fft: int, sample_rate: int) -> NDArray[np.float64]:
    """Return Slaney's mel bands, triangles of equal area up to half the rate: float64 (1 + n_fft // 2, num_mels), as
    from transformers.audio_utils.mel_filter_bank, within rounding of float64.
    """
    step = np.log(6.4) / 27.0  # linear below 1 kHz, which is 15 mel, logarithmic above
    top = sample_rate / 2
    top_mel = 15.0 + np.log(top / 1000.0) * (27.0 / np.log(6.4)) if top >= 1000.0 else 3.0 * top / 200.0
    mels = np.linspace(0.0, top_mel, num_mels + 2)
    hertz = np.where(mels >= 15.0, 1000.0 * np.exp(step * (mels - 15.0)), 200.0 * mels / 3.0)
    slopes = hertz[None] - np.linspace(0, sample_rate // 2, 1 + n_fft // 2)[:, None]
    widths = np.diff(hertz)
    bands = np.maximum(0.0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    scaled: NDArray[np.float64] = bands * (2.0 / (hertz[2:] - hertz[:-2]))
    return scaled


class _Features(NamedTuple):
    """A kind of features."""

    row: Callable[[AudioPreprocessor], tuple[int, ...]]  # shape
    step: Callable[[AudioPreprocessor], int]  # samples from one row to the next
    field: Callable[[AudioPreprocessor], int]  # samples that one frame needs
    write: Callable[[Wave, AudioPreprocessor, torch.Tensor], None]  # the samples of one window to its rows


_SAMPLES: Final = (lambda pre: (), lambda pre: 1, lambda pre: pre.n_fft)
_FEATURES: Final = {
    "log_mel": _Features(lambda pre: (pre.num_mels,), lambda pre: pre.hop_length, lambda pre: 1, _write_log_mel),
    "waveform": _Features(*_SAMPLES, _write_wave),
    # As Wav2Vec2FeatureExtractor.
    "normalized_waveform": _Features(
        *_SAMPLES, lambda wave, *to: _write_wave((wave - wave.mean()) / np.sqrt(wave.var() + 1e-7), *to)
    ),
}
