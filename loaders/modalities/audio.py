"""Audio clips: how they become log-mel frames, as a value.

    (frames, rate) -> samples -> tokens -> mel frames -> positions

All counts follow from headers, in integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.checks import above_seconds, check_at_least_one, check_choice
from orchdata.loaders.modalities.modality import ArraySpec, Header, Heads, Modality, PartSize

_WAVE_BYTES: Final = 4


@dataclass(frozen=True, kw_only=True)
class AudioPreprocessor(Modality):
    """Audio as mono log-mel frames, a whole number of tokens a clip.

    With n samples at `sample_rate`: tokens = max(1, ceil(n * tokens_per_second / sample_rate)); a token is
    sample_rate / (tokens_per_second * hop_length) mel frames, and `conv_stride` mel frames become one position of
    the encoder. Both divisions must be exact.

    Attributes:
        sample_rate: Hz; clips of other rates are resampled.
        num_mels: mel bands.
        hop_length, n_fft: step and length of the analysis window, in samples.
        conv_stride: mel frames per position entering attention.
        tokens_per_second: LLM tokens per second of audio.
        dtype: what features are stored as.
    """

    fields = tuple("wav wave flac mp3 mp2 ogg oga opus aif aiff aifc au snd caf w64 rf64".split())
    words = ("audio", "audio_url", "input_audio")
    plural = "audio clips"
    column_words = frozenset("audio audios speech sound sounds clip clips recording waveform".split())
    hf_feature = "Audio"
    num_facts = 2
    num_extents = 2

    sample_rate: int = 16_000
    num_mels: int = 128
    hop_length: int = 160
    conv_stride: int = 2
    tokens_per_second: int = 25
    n_fft: int = 400
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        for name in ("sample_rate", "num_mels", "hop_length", "conv_stride", "tokens_per_second", "n_fft"):
            check_at_least_one("AudioPreprocessor", name, getattr(self, name))
        check_choice("AudioPreprocessor", "dtype", self.dtype, ("float32", "bfloat16"))
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

    def num_samples(self, frames: int, rate: int) -> int:
        """Samples at `sample_rate` of a clip of `frames` at `rate` Hz."""
        return -(-frames * self.sample_rate // rate)

    def num_tokens(self, num_samples: int) -> int:
        """LLM tokens of a clip of `num_samples` at `sample_rate`."""
        return max(1, -(-num_samples * self.tokens_per_second // self.sample_rate))

    def mel_frames(self, num_samples: int) -> int:
        """Mel frames of a clip of `num_samples` at `sample_rate`."""
        return self.num_tokens(num_samples) * self.mel_frames_per_token

    def arrays(self) -> Mapping[str, ArraySpec]:
        return {"features": ArraySpec((self.num_mels,), self.dtype)}

    @staticmethod
    def scan(heads: Heads) -> None:
        from orchdata.native.scan.media import scan_audio

        scan_audio(*heads)

    @classmethod
    def probe(cls, data: bytes, limits: Limits) -> Header:
        """(frames of a channel, rate in Hz)."""
        from orchdata.loaders.modalities.audio_header import probe_audio

        return probe_audio(data, limits)

    def count_header(self, header: Header, limits: Limits) -> PartSize:
        frames, rate = header
        reason = above_seconds(frames, rate, limits)
        if reason is not None:
            raise DecodeError(reason)
        if frames < 1 or rate < 1:
            raise DecodeError(f"no audio: its header says {frames} frames at {rate} Hz")
        num_samples = self.num_samples(frames, rate)
        mel_frames = self.mel_frames(num_samples)
        positions = mel_frames // self.conv_stride
        return PartSize(positions, self.num_tokens(num_samples), mel_frames, (num_samples, mel_frames))

    @classmethod
    def knows(cls, head: bytes) -> bool:
        named = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"FORM", b".snd", b"RF64", b"riff", b"caff")
        return head.startswith(named) or head[:2] in (b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")

    def decode_into(
        self, data: bytes | memoryview, size: PartSize, out: Mapping[str, NDArray[Any]], limits: Limits
    ) -> None:
        from orchdata.loaders.modalities.audio_decode import decode_audio

        decode_audio(data, self, limits, out["features"], size.extent[0])

    def dummy(self) -> PartSize:
        mel_frames = self.mel_frames(1)
        return PartSize(mel_frames // self.conv_stride, 1, mel_frames, (0, mel_frames))

    def decoding_bytes(self, parts: Sequence[tuple[Header, PartSize]]) -> int:
        """Waves of all clips, as stored and resampled."""
        return _WAVE_BYTES * sum([frames + size.extent[0] for (frames, _), size in parts])
