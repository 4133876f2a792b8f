"""Audio files -> their length from soundfile, for files that the scan of plain headers cannot handle; cut ones fail.

Imported late: it loads libsndfile.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import soundfile

from orchdata.loaders.environment import way_out
from orchdata.loaders.errors import DecodeError, PackageError, pass_broken_package
from orchdata.loaders.failures import as_failure
from orchdata.loaders.interrupts import interrupts_deferred
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.checks import starts_with
from orchdata.loaders.modalities.cut_audio import cut_reason, read_mp3, unclosed_wav, walk_mp3
from orchdata.loaders.modalities.modality import Header
from orchdata.loaders.modalities.video.containers import BOXES, EBML

if TYPE_CHECKING:
    from orchdata.loaders.modalities.video.file import SoundTrack

_BLOCK_FRAMES = 1 << 16
_MOST_FLAC_FRAMES = 65535 / 10
"""In a byte: the largest block takes 10 bytes at least."""


UNKNOWN_FRAMES = 1 << 48
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
        if _looks_like_audio(data):
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


def _looks_like_audio(data: bytes) -> bool:
    return data.startswith((b"RIFF", b"fLaC", b"OggS", b"ID3", b"FORM", b".snd", b"caff", b"RF64")) or (
        len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0
    )
