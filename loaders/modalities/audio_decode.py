"""Audio files -> their length, for files that the scan of plain headers cannot handle, and their mono samples.

    bytes --soundfile--> mono float32 --resampling--> the recipe's rate --fit--> the indexed length

Cut ones fail. Imported late: it loads libsndfile.
"""

from __future__ import annotations

import io
import os
import struct
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import soundfile
from numpy.typing import NDArray

from orchdata.loaders.environment import way_out
from orchdata.loaders.errors import DecodeError, PackageError, pass_broken_package
from orchdata.loaders.failures import as_failure
from orchdata.loaders.interrupts import interrupts_deferred
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.checks import check_seconds, starts_with
from orchdata.loaders.modalities.cut_audio import (
    TOLERANCE_SECONDS,
    TOLERANCE_SHARE,
    Payload,
    cut_reason,
    read_mp3,
    sound_chunk,
    unclosed_wav,
    walk_mp3,
)
from orchdata.loaders.modalities.modality import Header
from orchdata.loaders.modalities.video.containers import BOXES, EBML
from orchdata.loaders.resampling import resample

if TYPE_CHECKING:
    from orchdata.loaders.modalities.video.file import SoundTrack

_LOUDEST: Final = 1e15
"""Samples are within +-1; the power of samples above this is not finite in float32."""
_LEAST_FRAMES: Final = 1 << 10
_AUDIO: Final = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"FORM", b".snd", b"caff", b"RF64")
_BLOCK_FRAMES: Final = 1 << 16
_MOST_FLAC_FRAMES: Final = 65535 / 10
"""In a byte: the largest block takes 10 bytes at least."""
UNKNOWN_FRAMES: Final = 1 << 48
"""libsndfile returns about 2**63 frames if the header contains no length (a FLAC that was streamed out)."""


class Sound(soundfile.SoundFile):  # type: ignore[misc]
    """A SoundFile over bytes that is only read forward. Raises soundfile.LibsndfileError.

    soundfile seeks after each read, which fails if the header contains no length (a FLAC streamed out) or a wrong one.
    libsndfile reads a memory file directly, not bytes through Python callbacks: an exception of a signal handler in a
    function that C calls would be lost there, and the clip would have a gap.
    """

    _close_memory: Callable[[], object] = staticmethod(lambda: None)  # if an interrupt came before it was opened

    def __init__(self, data: bytes | memoryview) -> None:
        memory = os.memfd_create("orchdata-audio", os.MFD_CLOEXEC)
        self._close_memory = weakref.finalize(self, os.close, memory)
        with open(memory, "wb", closefd=False) as file:
            file.write(data)
            start = unclosed_wav(data)
            if start:  # libsndfile would read a size of 0 as an empty clip
                file.seek(start - 4)
                file.write((len(data) - start).to_bytes(4, "little"))
            file.seek(0)
        super().__init__(memory, closefd=False)

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        with interrupts_deferred():  # an interrupt between its steps would close it twice
            super().close()
        self._close_memory()


@as_failure(DecodeError, "damaged audio")
def probe_audio(data: bytes, limits: Limits) -> Header:
    """Return (frames of a channel, rate in Hz), from soundfile. For a file with pictures, those of its sound track, or
    (0, 0) without one.

    Raises DecodeError.
    """
    # Read the length with PyAV, or with soundfile.
    if holds_tracks(data):
        with open_track(data, limits) as track:
            return track.frames, track.rate
    try:
        with Sound(data) as sound:
            rate = int(sound.samplerate)
            frames = int(sound.frames)
            if rate < 1:
                raise DecodeError(f"audio at {rate} Hz")
            is_mp3 = sound.format == "MP3"
            if is_mp3:
                frames = _mp3_frames(data, frames)
            if frames < 0 or frames >= UNKNOWN_FRAMES or (is_mp3 and frames == 0):
                frames = _count_frames(sound, int(limits.audio_seconds * rate))
    except soundfile.LibsndfileError as error:
        refuse_unsupported(data)
        if data.startswith(_AUDIO) or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0):
            raise DecodeError(f"damaged audio: {error.error_string.strip()}") from None
        raise DecodeError(f"not audio: starts with {starts_with(data)}") from None
    # Compare it with what the file declares.
    if frames < 1:
        raise DecodeError("audio without a single frame")
    if data[:4] == b"fLaC" and frames > len(data) * _MOST_FLAC_FRAMES:  # memory would be taken for them
        raise DecodeError(f"cut: {len(data)} bytes cannot hold the {frames} frames that its header tells")
    reason = cut_reason(data, frames, rate, is_mp3=is_mp3)
    if reason is not None:
        raise DecodeError(reason)
    return frames, rate


def refuse_unsupported(data: bytes | memoryview) -> None:
    """Raise PackageError for sound of a format that the installed libsndfile was built without."""
    head = bytes(data[:4])
    is_mp3 = head[:3] == b"ID3" or (head[:1] == b"\xff" and head[1:2] >= b"\xe0")
    name = "MP3" if is_mp3 else {b"fLaC": "FLAC", b"OggS": "OGG"}.get(head)
    if name is not None and name not in soundfile.available_formats():
        reason = f"its libsndfile {soundfile.__libsndfile_version__} reads no {name}"
        raise PackageError("soundfile", reason, way_out("soundfile"), "an audio clip")


def holds_tracks(data: bytes | memoryview) -> bool:
    """Whether bytes are a file that may contain sound as well as pictures."""
    head = bytes(data[:12])
    return head.startswith(EBML) or head[4:8] in BOXES


def open_track(data: bytes | memoryview, limits: Limits) -> SoundTrack:
    """Return the sound track of a file with pictures, a context manager. DecodeError; PackageError without PyAV."""
    try:
        from orchdata.loaders.modalities.video.file import SoundTrack
    except Exception as error:
        pass_broken_package(error, "the sound of a file with pictures")
        raise
    return SoundTrack(data, limits)


def _mp3_frames(data: bytes, header_frames: int) -> int:
    """Return the number of frames that decoding an MP3 gives, or -1 if only decoding can find it."""
    mp3 = read_mp3(data)
    if mp3 is None or not mp3.is_sure:
        return -1
    count, is_whole, _ = walk_mp3(data, mp3.at)
    # With a Xing/Info tag that fits, libsndfile knows the length without the encoder's delay. Without one, it guesses
    # from the bit rate of the first frame, and stops there even if more follows.
    if not is_whole or mp3.tagged not in (None, count - 1):
        return -1
    return min(header_frames, count * mp3.samples) if mp3.tagged is None else header_frames


def _count_frames(sound: Sound, limit: int) -> int:
    """Decode and count frames, up to just above `limit`."""
    block = np.empty((_BLOCK_FRAMES // max(1, sound.channels // 8), sound.channels), np.float32)
    count = 0
    while count <= limit:
        got = len(sound.read(out=block))
        count += got
        if got == 0:
            break
    return count


Wave = NDArray[np.float32]


def decode_wave(data: bytes | memoryview, sample_rate: int, num_samples: int, limits: Limits) -> Wave:
    """Return a clip as mono samples (num_samples,) at `sample_rate` Hz. Raises DecodeError.

    It is cut or padded with zeros to the indexed length if the difference is within 1 % or 50 ms.
    """
    wave, rate = read_mono(data, limits)
    return fit(resample(wave, rate, sample_rate), num_samples, sample_rate)


def wav_of(data: bytes | memoryview, sample_rate: int, num_samples: int, limits: Limits) -> bytes:
    """Return the input of a clip's features as a WAV of floats. Raises DecodeError."""
    file = io.BytesIO()
    wave = decode_wave(data, sample_rate, num_samples, limits)
    soundfile.write(file, wave, sample_rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


def plain_wav(data: Payload) -> tuple[NDArray[np.int16], int] | None:
    """Return the samples of a plain 16-bit WAV, int16 (num_frames, num_channels), and their rate in Hz. Most programs
    write it: its format first, then at most one chunk, then the samples to the end. None for any other.
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
    return np.frombuffer(data, "<i2", offset=start).reshape(-1, channels), rate


@as_failure(DecodeError, "damaged audio")
def read_mono(data: bytes | memoryview, limits: Limits) -> tuple[Wave, int]:
    """Return the mean over channels, (num_frames,), and the rate in Hz. Raises DecodeError."""
    if holds_tracks(data):
        with open_track(data, limits) as track:
            if not track.rate:
                raise DecodeError("no track of sound in it")
            return track.wave(), track.rate
    # Decode: plain WAVs are a view of the file.
    try:
        is_mp3, plain = False, plain_wav(data)
        if plain is not None:
            samples, rate = plain
            wave = _mean(samples * np.float32(1 / 32768))
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
    """Read the next frames; `left` are still expected by a FLAC's header. An error after these is a tag, not sound."""
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
