"""Audio bytes -> log-mel frames or samples, written into the batch's memory.

    bytes --soundfile--> mono float32 --resampling--> the recipe's rate --fit--> the indexed length --mel--> out

Features are Whisper's: power spectrogram (Hann window), Slaney mel bands, log10 above 1e-10, cut 8 below the highest
value, (x + 4) / 4, each window by itself: the operations of Hugging Face's WhisperFeatureExtractor in the same order.
On many processors values are equal to the bit; with other vector units, sums over other numbers of frames may differ
within the bound in docs/reliability.md. The silence after a clip is not computed frame by frame.

torch runs operations on `torch.get_num_threads()` CPU threads, in every thread that decodes: with several of these,
each first calls `torch_threads.use_one_thread`.
"""

from __future__ import annotations

import io
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.failures import as_failure
from orchdata.loaders.first_calls import settle_first_calls
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.checks import check_seconds
from orchdata.loaders.modalities.cut_audio import TOLERANCE_SECONDS, TOLERANCE_SHARE, Payload, cut_reason, sound_chunk
from orchdata.loaders.resampling import resample
from orchdata.loaders.scratch import Scratch
from orchdata.native.decoding import split_complex

if TYPE_CHECKING:
    import torch

    from orchdata.loaders.modalities.audio import AudioPreprocessor

_LOUDEST: Final = 1e15
"""Samples are within +-1; the power of samples above this is not finite in float32."""
_BLOCK_FRAMES: Final = 1 << 16
_LEAST_FRAMES: Final = 1 << 10
# Longer clips are processed in pieces of this number of spectrogram frames.
_MEL_FRAMES: Final = 1 << 15
_MOST_LANES: Final = 64

Wave = NDArray[np.float32]
_padded, _parts, _bands = Scratch(), Scratch(), Scratch()


def decode_audio(
    data: bytes | memoryview, pre: AudioPreprocessor, limits: Limits, out: NDArray[Any], num_samples: int
) -> None:
    """Decode one clip into its features.

    Args:
        out: (rows, *pre.row_shape), fully overwritten: float32 or uint16 (bfloat16 bits), according to `pre.dtype`.
        num_samples: the clip's length at `pre.sample_rate` in the index; the clip is cut or padded with zeros to it if
            the difference is within 1 % or 50 ms.

    Raises:
        DecodeError: not audio, damaged, above a limit, or of another length than the index says.
    """
    num_rows = sum(pre.window_size(stop - start).rows for start, stop in pre.windows(num_samples))
    expected = (num_rows, *pre.row_shape)
    if out.shape != expected:
        raise ValueError(f"out is {out.shape}, should be {expected} for {num_samples} samples")
    write_features(decode_wave(data, pre.sample_rate, num_samples, limits), pre, out)


def write_features(wave: Wave, pre: AudioPreprocessor, out: NDArray[Any]) -> None:
    """Write the features of a clip at `pre.sample_rate`, window by window, into `out`, see `decode_audio`."""
    row = 0
    for start, stop in pre.windows(len(wave)):
        num_rows = pre.window_size(stop - start).rows
        target = out[row] if pre.fill == "window" else out[row : row + num_rows]
        write = _write_log_mel if pre.features == "log_mel" else _write_wave
        write(wave[start:stop], pre, target)
        row += num_rows


def decode_wave(data: bytes | memoryview, sample_rate: int, num_samples: int, limits: Limits) -> Wave:
    """Return a clip as mono samples (num_samples,) at `sample_rate` Hz. Raises DecodeError, as `decode_audio`."""
    wave, rate = read_mono(data, limits)
    return fit(resample(wave, rate, sample_rate), num_samples, sample_rate)


def wav_of(data: bytes | memoryview, sample_rate: int, num_samples: int, limits: Limits) -> bytes:
    """Return the input of a clip's features as a WAV of floats. Raises DecodeError, as `decode_audio`."""
    import soundfile

    file = io.BytesIO()
    wave = decode_wave(data, sample_rate, num_samples, limits)
    soundfile.write(file, wave, sample_rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


class PlainWav(NamedTuple):
    """The samples of a WAV as a view of the file, int16 (num_frames, num_channels), and their rate in Hz."""

    samples: NDArray[np.int16]
    rate: int


def plain_wav(data: Payload) -> PlainWav | None:
    """Return the samples of a plain 16-bit WAV, as most programs write it: its format first, then at most one chunk
    before the samples, then the samples to the end. None for any other, which libsndfile reads.
    """
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:16]) != b"WAVEfmt " or len(data) < 44:
        return None
    size, kind, channels, rate, _, frame_bytes, bits = struct.unpack_from("<IHHIIHH", data, 16)
    if (
        (size, kind, bits) != (16, 1, 16)
        or not 0 < channels <= 8
        or frame_bytes != 2 * channels
        or not 0 < rate < 1 << 31
    ):
        return None
    between = 0
    if bytes(data[36:40]) in (b"LIST", b"fact"):
        between = 8 + int.from_bytes(data[40:44], "little")
    size, start = sound_chunk(data, "little")
    if not size or start != 44 + between + (between & 1) or start + size != len(data) or size % frame_bytes:
        return None
    return PlainWav(np.frombuffer(data, "<i2", offset=start).reshape(-1, channels), rate)


@as_failure(DecodeError, "damaged audio")
def read_mono(data: bytes | memoryview, limits: Limits) -> tuple[Wave, int]:
    """Return the mean over channels, (num_frames,), and the rate in Hz. Raises DecodeError."""
    import soundfile

    from orchdata.loaders.modalities.audio_header import Sound, holds_tracks, open_track, refuse_unsupported

    if holds_tracks(data):
        with open_track(data, limits) as track:
            if not track.rate:
                raise DecodeError("no track of sound in it")
            return track.wave(), track.rate
    # Decode: plain WAVs are a view of the file.
    try:
        is_mp3, plain = False, plain_wav(data)
        if plain is not None:
            rate = plain.rate
            wave = _mean(plain.samples * np.float32(1 / 32768))
            check_seconds(len(wave), rate, limits)
        else:
            with Sound(data) as sound:
                rate = int(sound.samplerate)
                if rate < 1:
                    raise DecodeError(f"damaged audio: a rate of {rate} Hz")
                wave = _read_blocks(sound, rate, limits)
                is_mp3 = sound.format == "MP3"
        # A decoder may have stopped early.
        reason = cut_reason(data, len(wave), rate, is_mp3=is_mp3)
        if reason is not None:
            raise DecodeError(reason)
        return wave, rate
    except soundfile.LibsndfileError as error:
        refuse_unsupported(data)
        raise DecodeError(f"not readable audio: {error.error_string.strip()}") from None


def _read_blocks(sound: Any, rate: int, limits: Limits) -> Wave:
    """Read block by block, so that neither a header's length nor many channels decide how much memory is allocated."""
    longest = _BLOCK_FRAMES // max(1, sound.channels // 8)
    pieces: list[Wave] = []
    total = 0
    header_frames = int(sound.frames) if sound.format == "FLAC" else 0
    while True:
        block = np.empty((min(longest, max(int(sound.frames) - total, _LEAST_FRAMES)), sound.channels), np.float32)
        got = _read_block(sound, block, header_frames - total)
        if not len(got):
            break
        if not (got.max() < _LOUDEST and got.min() > -_LOUDEST):  # false for NaN too
            raise DecodeError("the audio holds NaN or infinite values, or values too large for a finite spectrum")
        pieces.append(_mean(got))
        total += len(got)
        check_seconds(total, rate, limits)
    if not total:
        raise DecodeError("the audio has no frames")
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _mean(samples: NDArray[np.float32]) -> Wave:
    """(num_frames, num_channels) -> (num_frames,)."""
    return samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1, dtype=np.float32)


def _read_block(sound: Any, block: NDArray[np.float32], left: int) -> NDArray[np.float32]:
    """Read the next frames. For a FLAC, `left` is the number of frames still expected from its header. An error after
    these is not in the sound: other programs append a tag there.
    """
    import soundfile

    if 0 < left < len(block):
        return np.asarray(sound.read(out=block[:left]))
    try:
        return np.asarray(sound.read(out=block))
    except soundfile.LibsndfileError:
        if left == 0 and sound.format == "FLAC":
            return block[:0]
        raise


def fit(wave: Wave, num_samples: int, rate: int) -> Wave:
    """Return `wave` cut or padded with zeros to `num_samples`. Raises DecodeError if the difference is too large."""
    difference = abs(len(wave) - num_samples)
    if difference > max(TOLERANCE_SHARE * num_samples, TOLERANCE_SECONDS * rate):
        raise DecodeError(
            f"decoded to {len(wave) / rate:.3f} s of audio, the index says {num_samples / rate:.3f} s: index again"
        )
    if len(wave) >= num_samples:
        return wave[:num_samples]
    return np.concatenate([wave, np.zeros(num_samples - len(wave), np.float32)])


def _write_wave(wave: Wave, pre: AudioPreprocessor, out: NDArray[Any]) -> None:
    """Write the samples, followed by zeros."""
    import torch

    if pre.features == "normalized_waveform":  # as Wav2Vec2FeatureExtractor
        wave = (wave - wave.mean()) / np.sqrt(wave.var() + 1e-7)
    target = _tensor(out, pre)
    target[: len(wave)] = torch.from_numpy(wave)
    target[len(wave) :] = 0


def _write_log_mel(wave: Wave, pre: AudioPreprocessor, out: NDArray[Any]) -> None:
    import torch

    with torch.no_grad():
        mel = log_mel(wave, pre)
        target, num_frames = _tensor(out, pre), min(len(out), mel.shape[1])
        target[:num_frames] = mel.T[:num_frames]
        target[num_frames:] = mel[:, -1]  # if there are more, the last frame is silence


def _tensor(out: NDArray[Any], pre: AudioPreprocessor) -> torch.Tensor:
    import torch

    target = torch.from_numpy(out)
    return target.view(torch.bfloat16) if pre.dtype == "bfloat16" else target


def log_mel(wave: Wave, pre: AudioPreprocessor) -> torch.Tensor:
    """Return log-mel frames (num_mels, num_frames) of a clip and the start of the silence after it. The silence ends
    with the recipe's window; there it is mirrored, as at the clip's start. The last frame is silence unless the window
    is full. The memory belongs to this thread; its next clip overwrites it.
    """
    num_samples = -(-(len(wave) + pre.n_fft) // pre.hop_length) * pre.hop_length
    if pre.window_samples is not None:
        num_samples = min(num_samples, pre.window_samples)
    half = pre.n_fft // 2
    padded = _padded.floats(num_samples + 2 * half)
    body = padded[half : half + num_samples]
    body[: len(wave)] = wave
    body[len(wave) :] = 0
    padded[:half], padded[half + num_samples :] = body[half:0:-1], body[-2 : -half - 2 : -1]
    log = _mel_power(padded, pre, num_samples // pre.hop_length).clamp_(min=1e-10).log10_()
    return log.clamp_(min=float(log.max() - 8.0)).add_(4.0).div_(4.0)


def _mel_power(padded: Wave, pre: AudioPreprocessor, num_frames: int) -> torch.Tensor:
    """Return the mel power of the first frames, (num_mels, num_frames). Long clips are split, as spectra are large."""
    import torch

    window, filters = _mel(pre.num_mels, pre.n_fft, pre.sample_rate)
    mel = torch.from_numpy(_bands.floats(pre.num_mels, num_frames))
    for start in range(0, num_frames, _MEL_FRAMES):
        stop = min(start + _MEL_FRAMES, num_frames)
        piece = torch.from_numpy(padded[start * pre.hop_length : (stop - 1) * pre.hop_length + pre.n_fft])
        spectrum = torch.stft(piece, pre.n_fft, pre.hop_length, window=window, center=False, return_complex=True)
        power = _magnitudes(spectrum.T).pow_(2).T
        if stop - start == num_frames:
            torch.matmul(filters.T, power, out=mel)
        else:
            mel[:, start:stop] = filters.T @ power
    return mel


def _magnitudes(spectrum: torch.Tensor) -> torch.Tensor:
    """Return `spectrum.abs()` of complex64 (num_frames, num_bins), three times as fast, mostly equal to the bit."""
    import torch

    values = torch.view_as_real(spectrum.contiguous()).view(-1)
    count = len(values) // 2
    real, imaginary = _parts.floats(2, count)
    split_complex(values.numpy(), real, imaginary)
    magnitudes = torch.from_numpy(real)
    # torch handles a remainder that fills no vector one by one, with other rounding in rare cases: do the same here.
    whole = count - count % _MOST_LANES
    torch.hypot(magnitudes[:whole], torch.from_numpy(imaginary[:whole]), out=magnitudes[:whole])
    torch.abs(spectrum.reshape(-1)[whole:], out=magnitudes[whole:])
    return magnitudes.view(spectrum.shape)


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
