"""Audio files -> their length, for files that the scan of plain headers cannot handle, and their mono samples.

    bytes --soundfile--> mono float32 --resampling--> the recipe's rate --fit--> the indexed length

Cut ones fail: libsndfile shortens such a clip silently, so what a file declares is compared with what it contains. Read
are the sizes of RIFF (WAV), RF64, W64, AIFF, AIFC, AU and SPHERE, the pages of Ogg, and an MP3's Xing, Info or VBRI
tag. Programs that write to a pipe leave placeholders for sizes: those declare nothing. Imported late: it loads
libsndfile.
"""

from __future__ import annotations

import io
import os
import re
import struct
import weakref
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from math import ceil, pi, prod
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import soundfile
from numpy.typing import NDArray

from orchdata.loaders.environment import way_out
from orchdata.loaders.errors import DecodeError, PackageError, as_failure, pass_broken_package
from orchdata.loaders.first_calls import settle_first_calls
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.modality import TOLERANCE_SECONDS, TOLERANCE_SHARE, Header, check_seconds, starts_with
from orchdata.loaders.modalities.video.containers import BOXES, EBML

if TYPE_CHECKING:
    import torch

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

_MOST_CHUNKS: Final = 10_000
_MP3_SEARCH_BYTES: Final = 4096
_ID3V1_BYTES: Final = 128
_KBITS: Final = (
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
)
_SEVERAL: Final = "after one another, of which only the first would be read: join or split them"

Payload = bytes | memoryview
_Order: TypeAlias = Literal["little", "big"]


class Sound(soundfile.SoundFile):  # type: ignore[misc]
    """A SoundFile over bytes that is only read forward. Raises soundfile.LibsndfileError. soundfile seeks after each
    read, which fails if the header contains no length (a FLAC streamed out) or a wrong one. libsndfile reads a memory
    file directly, not bytes through Python callbacks: an exception of a signal handler in a function that C calls would
    be lost there, and the clip would have a gap.
    """

    _close_memory: Callable[[], object] = staticmethod(lambda: None)  # if an interrupt came before it was opened

    def __init__(self, data: bytes | memoryview) -> None:
        memory = os.memfd_create("orchdata-audio", os.MFD_CLOEXEC)
        self._close_memory = weakref.finalize(self, os.close, memory)
        with open(memory, "wb", closefd=False) as file:
            file.write(data)
            file.seek(0)
        super().__init__(memory, closefd=False)

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        file, self._file = getattr(self, "_file", None), None  # first: after an interrupt it is not closed twice
        if file is not None:
            soundfile._snd.sf_close(file)
        self._close_memory()


@as_failure(DecodeError, "damaged audio")
def probe_audio(data: bytes, limits: Limits) -> Header:
    """Return (frames of a channel, rate in Hz), from soundfile. For a file with pictures, those of its sound track, or
    (0, 0) without one. Raises DecodeError.
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
                # Decode and count them, up to just above the limit.
                block = np.empty((_BLOCK_FRAMES // max(1, sound.channels // 8), sound.channels), np.float32)
                frames = 0
                while frames <= int(limits.audio_seconds * rate) and (got := len(sound.read(out=block))):
                    frames += got
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


Wave = NDArray[np.float32]


def decode_wave(data: bytes | memoryview, sample_rate: int, num_samples: int, limits: Limits) -> Wave:
    """Return a clip as mono samples (num_samples,) at `sample_rate` Hz. Raises DecodeError. It is cut or padded with
    zeros to the indexed length if the difference is within 1 % or 50 ms.
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
    write it: its format first, then other chunks, then the samples to the end. None for any other.
    """
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:16]) != b"WAVEfmt " or len(data) < 44:
        return None
    size, kind, channels, rate, _, frame_bytes, bits = struct.unpack_from("<IHHIIHH", data, 16)
    is_plain = (size, kind, bits, frame_bytes) == (16, 1, 16, 2 * channels)
    if not is_plain or not 0 < channels <= 8 or not 0 < rate < 1 << 31:
        return None
    size, start = sound_chunk(data, "little")
    if not size or start + size != len(data) or size % frame_bytes:
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
                rate, is_flac, is_mp3 = int(sound.samplerate), sound.format == "FLAC", sound.format == "MP3"
                # Block by block, so that neither a header's length nor many channels decide how much memory is taken.
                longest = _BLOCK_FRAMES // max(1, sound.channels // 8)
                pieces, total = list[Wave](), 0
                while True:
                    left = int(sound.frames) - total
                    frames = left if is_flac and left > 0 else max(left, _LEAST_FRAMES)
                    block = np.empty((min(longest, frames), sound.channels), np.float32)
                    try:
                        got = np.asarray(sound.read(out=block))
                    except soundfile.LibsndfileError:
                        if left or not is_flac:
                            raise
                        break  # after the frames that a FLAC's header tells: a tag, not sound
                    if not len(got):
                        break
                    if not (got.max() < _LOUDEST and got.min() > -_LOUDEST):  # false for NaN too
                        raise DecodeError("the audio holds NaN or infinite values, or values too large for a spectrum")
                    pieces.append(_mean(got))
                    total += len(got)
                    check_seconds(total, rate, limits)
                if not total:
                    raise DecodeError("the audio has no frames")
                wave = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        # A decoder may have stopped early.
        reason = cut_reason(data, len(wave), rate, is_mp3=is_mp3)
        if reason is not None:
            raise DecodeError(reason)
        return wave, rate
    except soundfile.LibsndfileError as error:
        refuse_unsupported(data)
        raise DecodeError(f"not readable audio: {error.error_string.strip()}") from None


def _mean(samples: NDArray[np.float32]) -> Wave:
    """(num_frames, num_channels) -> (num_frames,)."""
    return samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1, dtype=np.float32)


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


class Extent(NamedTuple):
    """The declared and the actual amount of sound in a file, both in the same unit: bytes, or frames."""

    declared: int
    present: int


def cut_reason(data: Payload, frames: int, rate: int, *, is_mp3: bool = False) -> str | None:
    """Return why a clip is not complete, or None; `frames` per channel are decoded of the whole file."""
    head = bytes(data[:16])
    other = _mp3(data, frames, rate) if is_mp3 else _container(head, data)
    extent = _ogg(bytes(data)) if head[:4] == b"OggS" and not is_mp3 else other
    if extent is None or isinstance(extent, str):
        return extent
    seconds = frames / rate
    declared_seconds = seconds * extent.declared / max(1, extent.present)
    if not _lacks(seconds, declared_seconds):
        return None
    share = max(0, extent.present) / extent.declared
    return f"cut: {seconds:.3f} of {declared_seconds:.3f} s of sound are there, {share:.0%} of what the header declares"


def _lacks(seconds: float, declared: float) -> bool:
    return declared - seconds > max(TOLERANCE_SECONDS, TOLERANCE_SHARE * declared)


def _container(head: bytes, data: Payload) -> Extent | None:
    magic = head[:4]
    if (is_long := magic in (b"RF64", b"BW64")) or magic in (b"RIFF", b"RIFX", b"FORM"):
        size, start = sound_chunk(data, "big" if magic in (b"RIFX", b"FORM") else "little")
        if is_long and size == 0xFFFFFFFF and bytes(data[12:16]) == b"ds64":
            size = int.from_bytes(data[28:36], "little")
        is_unknown = size in (0, 0xFFFFFFFF) or size >> 62 if is_long else _is_placeholder(size)
        return None if is_unknown else Extent(size, len(data) - start)
    if magic == b"riff":
        return _w64(data)
    if magic in (b".snd", b"dns."):
        order: _Order = "big" if magic == b".snd" else "little"
        start, size = int.from_bytes(head[4:8], order), int.from_bytes(head[8:12], order)
        return None if _is_placeholder(size) else Extent(size, len(data) - start)
    return _sphere(data) if head.startswith(b"NIST_1A") else None


def _w64(data: Payload) -> Extent | None:
    at = 40  # RIFF's GUID and size, WAVE's GUID, then chunks
    for _ in range(_MOST_CHUNKS):
        if at + 24 > len(data):
            break
        size = int.from_bytes(data[at + 16 : at + 24], "little")  # with its own 24 bytes
        if bytes(data[at : at + 4]) == b"data":
            return Extent(size - 24, len(data) - at - 24) if 24 < size < 1 << 62 else None
        at += max(24, (size + 7) & ~7)
    return None


def _is_placeholder(size: int) -> bool:
    """Whether a size is a placeholder for an unknown one: 0, or about the maximum of 31 or 32 bits."""
    return size == 0 or 0x7FFF0000 <= size <= 0x80000000 or size >= 0xFFFF0000


def sound_chunk(data: Payload, order: _Order) -> tuple[int, int]:
    """Return (declared bytes, start) of the sound chunk of a RIFF or IFF file; (0, 0) without such a chunk."""
    at = 12
    for _ in range(_MOST_CHUNKS):
        if at + 8 > len(data):
            break
        name, size = bytes(data[at : at + 4]), int.from_bytes(data[at + 4 : at + 8], order)
        if name in (b"data", b"BODY"):
            return size, at + 8
        if name == b"SSND":  # an offset and a block size come first
            return size if _is_placeholder(size) else size - 8, at + 16
        at += 8 + size + (size & 1)
    return 0, 0


def _sphere(data: Payload) -> Extent | None:
    head = bytes(data[:1024])
    values = dict(re.findall(rb"\n(sample_count|channel_count|sample_n_bytes) -(?:i|s\d+) (\d{1,12})(?=\n)", head))
    if re.search(rb"\nsample_coding -s\d+ (?:ulaw|alaw|mu-law)", head):
        values.setdefault(b"sample_n_bytes", b"1")
    start = re.match(rb"NIST_1A\n\s*(\d{1,6})\n", head)
    if start is None or len(values) < 3:
        return None
    return Extent(prod(map(int, values.values())), len(data) - int(start[1]))


def _ogg(data: bytes) -> Extent | str | None:
    """Return a reason if sound is certainly missing according to the pages, or the extent if the last page is cut."""
    at, granule = 0, 0
    open_streams: set[int] = set()
    sound_begun = unfinished = False
    while (at := data.find(b"OggS", at)) >= 0:
        segments = data[at + 26] if at + 26 < len(data) else 0
        header = at + 27 + segments
        end = header + sum(data[at + 27 : header])
        serial, flags = int.from_bytes(data[at + 14 : at + 18], "little"), data[at + 5] if at + 5 < len(data) else 0
        if at + 18 <= len(data) and (data[at + 4] or flags > 7 or (not flags & 2 and serial not in open_streams)):
            at += 4  # no page
            continue
        # The last page is cut.
        if at + 27 > len(data) or end > len(data):
            if not open_streams:
                break  # data after the end of the sound
            last = int.from_bytes(data[at + 6 : at + 14], "little")
            if flags & 4 and granule < last < 1 << 62:
                return Extent(last, granule)
            return "cut: it ends inside an Ogg page"
        # A page that begins a stream, or continues one.
        if flags & 2:
            if sound_begun:
                return f"several Ogg streams {_SEVERAL}"
            open_streams.add(serial)
        else:
            sound_begun = True
            unfinished = not flags & 4 and segments > 0 and data[header - 1] == 255
            position = int.from_bytes(data[at + 6 : at + 14], "little")
            granule = position if position < 1 << 62 else granule
        if flags & 4:
            open_streams.discard(serial)
        at = end
    return "cut: it ends inside an Ogg packet" if unfinished else None


class Mp3(NamedTuple):
    """What the first frame of an MP3 says."""

    at: int  # where it is
    samples: int  # in each frame
    tagged: int | None  # frames by its Xing, Info or VBRI tag, -1 if it does not say it; None for a frame of sound
    added: int  # samples that the encoder added at both ends, by a tag of LAME
    end: int  # of the stream, by the tag
    is_sure: bool  # the frames begin where they should, and need no earlier ones


def read_mp3(data: Payload) -> Mp3 | None:
    """Return what the first frame of an MP3 says; None without one."""
    start, end = 0, len(data)
    while bytes(data[start : start + 3]) == b"ID3" and start + 10 <= end:
        size = 0
        for byte in data[start + 6 : start + 10]:
            size = size << 7 | byte & 0x7F
        start += 10 + size + (10 if data[start + 5] & 0x10 else 0)
    window = bytes(data[start : start + _MP3_SEARCH_BYTES])
    for match in re.finditer(rb"(?s)\xff[\xe2-\xff]..", window):
        frame = _frame(int.from_bytes(match[0], "big"))
        if frame is None:
            continue
        at, (_, samples, mono) = start + match.start(), frame
        side = (17 if mono else 32) if samples == 1152 else (9 if mono else 17)

        def number(place: int, size: int = 4) -> int:
            return int.from_bytes(data[place : place + size], "big")

        # A frame of a tag: how many follow, and their bytes. LAME's fields follow those that the flags name.
        tag, vbri = at + 4 + side, at + 36
        if bytes(data[tag : tag + 4]) in (b"Xing", b"Info"):
            flags = number(tag + 4)
            has_frames, has_bytes = flags & 1, flags >> 1 & 1
            more = tag + 8 + 4 * has_frames
            delays = number(more + 4 * has_bytes + 100 * (flags >> 2 & 1) + 4 * (flags >> 3 & 1) + 21, 3)
            stated = number(more) if has_frames and has_bytes else 0
            tagged = number(tag + 8) if has_frames else -1
            added = (delays >> 12) + (delays & 0xFFF)
            return Mp3(at, samples, tagged, added, at + stated if stated else end, match.start() == 0)
        if bytes(data[vbri : vbri + 4]) == b"VBRI":
            return Mp3(at, samples, number(at + 50), 0, end, False)
        begin = number(at + (4 if data[at + 1] & 1 else 6), 2) >> (7 if samples == 1152 else 8)
        return Mp3(at, samples, None, 0, end, match.start() == 0 and begin == 0)
    return None


def walk_mp3(data: Payload, at: int) -> tuple[int, bool, bool]:
    """Return the number of frames from `at` on, whether they fill the file, and whether their bit rates differ."""
    count, end, first, bits = 0, len(data), None, set()
    if bytes(data[-_ID3V1_BYTES:][:3]) == b"TAG":
        end -= _ID3V1_BYTES
    while at + 4 <= end:
        (header,) = struct.unpack_from(">I", data, at)
        frame = _frame(header)
        kind = header >> 19, header >> 10 & 3, header >> 6 & 3 == 3
        first = kind if first is None else first
        if frame is None or kind != first or at + frame[0] > end:
            break
        count, at = count + 1, at + frame[0]
        bits.add(header >> 12 & 15)
    return count, at == end, len(bits) > 1


@lru_cache(1024)
def _frame(header: int) -> tuple[int, int, bool] | None:
    """Return (bytes, samples, whether it is mono) of a layer III frame; None if it is none."""
    version, kbits, rate = header >> 19 & 3, header >> 12 & 15, header >> 10 & 3
    if header >> 21 != 0x7FF or version == 1 or header >> 17 & 3 != 1 or kbits in (0, 15) or rate == 3:
        return None
    samples, hertz = (1152 if version == 3 else 576), (44100, 48000, 32000)[rate] >> (2, 0, 1, 0)[version]
    length = samples // 8 * _KBITS[version == 3][kbits] * 1000 // hertz + (header >> 9 & 1)
    return (length, samples, header >> 6 & 3 == 3) if length >= 40 else None


def _mp3(data: Payload, frames: int, rate: int) -> Extent | str | None:
    """Return what a tag declares, or a reason: several streams, or a variable bit rate that no tag tells."""
    mp3 = read_mp3(data)
    if mp3 is None:
        return None
    if mp3.tagged is None:
        count, is_whole, is_variable = walk_mp3(data, mp3.at)
        if _lacks(frames / rate, count * mp3.samples / rate) or (is_variable and not is_whole):
            return (
                "VBR MP3 without a Xing tag: the decoder may stop before its end; remux it, for example "
                "ffmpeg -i in.mp3 -c copy out.mp3"
            )
        return None
    rest = data[mp3.end :]
    if len(rest) > _ID3V1_BYTES and (other := read_mp3(rest)) is not None:
        count, _, _ = walk_mp3(rest, other.at)
        if count > 1 and _lacks(frames / rate, (frames + count * other.samples) / rate):
            return f"several MP3 streams {_SEVERAL}"
    # Encoders disagree whether the tag's own frame counts.
    return Extent((mp3.tagged - 1) * mp3.samples - mp3.added, frames) if mp3.tagged > 0 else None


# Resampling: band-limited interpolation (J. O. Smith, Digital Audio Resampling,
# https://ccrma.stanford.edu/~jos/resample/) with a Hann window. It repeats torchaudio's `transforms.Resample` with
# default arguments, operation by operation, and gives the same values to the bit (`_get_sinc_resample_kernel` and
# `_apply_sinc_resample_kernel`, BSD 2-Clause, https://github.com/pytorch/audio). torchaudio is not needed: its wheels
# are for one torch and one CUDA.

# The filter: zero crossings on each side, and its cutoff as a share of the lower rate's band.
_CROSSINGS: Final = 6
_ROLLOFF: Final = 0.99

# Maximum size of a kernel: odd rates (44,099 Hz) would need gigabytes.
_KERNEL_VALUES: Final = 1 << 22
# Longer waves are resampled in pieces of this number of input frames: the convolution unfolds its input.
_PIECE_FRAMES: Final = 1 << 21


def resample(wave: Wave, rate: int, new_rate: int) -> Wave:
    """Return `wave` (num_frames,) at `new_rate` Hz."""
    ratio = kernel_ratio(rate, new_rate)
    new, orig = ratio.numerator, ratio.denominator
    if new == orig:  # or the rates differ by less than the rounding of the ratio
        return wave
    import torch
    from torch.nn.functional import conv1d, pad

    kernels, width = _kernels(orig, new), half_width(ratio)
    context, block = ceil(width / orig) * orig, ceil(_PIECE_FRAMES / orig) * orig
    pieces: list[Wave] = []
    with torch.no_grad():
        for start in range(0, len(wave), block):
            given = wave[max(0, start - context) : start + block + context]
            padded = pad(torch.from_numpy(given)[None, None], (width, width + orig))
            resampled = conv1d(padded, kernels, stride=orig).transpose(1, 2).reshape(-1).numpy()
            skip = min(start, context) // orig * new
            # The length is rounded to float32, as in torchaudio.
            length = ceil(float(np.float32(new * len(given) / orig)))
            stop = skip + block // orig * new if start + block < len(wave) else length
            pieces.append(resampled[skip:stop])
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def kernel_ratio(rate: int, new_rate: int) -> Fraction:
    """Return new_rate / rate, rounded by less than 0.03 % to a simpler fraction if its kernel would be too large."""
    exact = ratio = Fraction(new_rate, rate)
    largest = max(exact.numerator, exact.denominator)
    while min(ratio.numerator, ratio.denominator) > 1:
        # The kernel has one filter per new frame of a period, over its original frames and both half widths.
        if ratio.numerator * (ratio.denominator + 2 * half_width(ratio)) <= _KERNEL_VALUES:
            break
        largest = largest * 3 // 4
        ratio = exact.limit_denominator(largest) if exact < 1 else 1 / (1 / exact).limit_denominator(largest)
    return ratio


def half_width(ratio: Fraction) -> int:
    """Original frames that the filter covers on each side."""
    return ceil(_CROSSINGS * ratio.denominator / (min(ratio.denominator, ratio.numerator) * _ROLLOFF))


@lru_cache(maxsize=32)
def _kernels(orig: int, new: int) -> torch.Tensor:
    """Return the filters (new, 1, orig + 2 * width) of these rates, which have no common divisor: `orig` frames become
    `new`. Any thread may read them.
    """
    import torch

    settle_first_calls()
    base, width = min(orig, new) * _ROLLOFF, half_width(Fraction(new, orig))
    frames = torch.arange(-width, width + orig, dtype=torch.float64, device="cpu")[None, None] / orig
    # The phases are rounded to float32 before they are added, as in torchaudio.
    phases = torch.arange(0, -new, -1, device="cpu")[:, None, None].to(torch.float32) / new
    t = ((phases + frames) * base).clamp_(-_CROSSINGS, _CROSSINGS)
    window = torch.cos(t * pi / _CROSSINGS / 2) ** 2
    t *= pi
    kernels = torch.where(t == 0, torch.ones_like(t), t.sin() / t)
    return (kernels * (window * (base / orig))).to(torch.float32)
