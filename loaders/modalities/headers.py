"""Media headers: first bytes of a member -> image size as displayed, or audio frames and rate, without decoding.

Plain JPEG, PNG, WAV and FLAC are read by kernels from as few bytes as they need. Anything else goes to Pillow or
soundfile with the whole member: a prefix gives them silently wrong lengths.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import NOT_DATA, pass_trouble
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.cut_audio import cut_reason, flac_reason, lacks, mp3_stream_bytes
from orchdata.loaders.modality import IMAGE
from orchdata.native.scan.media import FOUND, MORE, scan_media
from orchdata.native.scan.mp3 import count_mp3, scan_mp3

IMAGE_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Pillow's names of the formats that are read (JPEG includes MPO). Others run programs (EPS) or have no signature to
tell them by (TGA)."""

if TYPE_CHECKING:
    from orchdata.loaders.modalities.sound import Sound

_LONGEST_SIDE = 1 << 25
"""Pillow's resizing counts what it needs for a longer one in 32 bits, and then reports a lack of memory."""
_NO_LIMIT: Final = np.full(3, np.inf)
SECOND_LOOK_BYTES = 1 << 16
_BLOCK_FRAMES = 1 << 16
_ID3V1_BYTES = 128
_warnings_lock = threading.Lock()


class MediaHeader(NamedTuple):
    """What a header tells: pixels as displayed (after EXIF orientation), or frames per channel and rate in Hz."""

    width: int = 0
    height: int = 0
    frames: int = 0
    rate: int = 0


class HeaderError(Exception):
    """A member that is not what its name says; the message is the reason."""


def read_header(kind: int, size: int, read: Callable[[int], bytes], limits: Limits) -> MediaHeader:
    """The header of one image or audio member.

    Args:
        kind: IMAGE or AUDIO.
        size: bytes in the member.
        read: gives the first n bytes of the member.
        limits: on pixels and seconds.

    Raises:
        HeaderError: not a readable image or audio file, or above a limit.
    """
    if size == 0:
        raise HeaderError("empty: 0 bytes")
    data = read(min(size, SECOND_LOOK_BYTES))
    status, header = _scan_one(kind, size, data)
    if status != FOUND:
        if len(data) < size:
            data = read(size)
            if status == MORE:
                status, header = _scan_one(kind, size, data)
        if len(data) < size and status != FOUND:
            raise HeaderError(f"cut: {len(data)} of {size} bytes")
    if status != FOUND:
        header = _ask_pillow(data, limits) if kind == IMAGE else _ask_soundfile(data, limits)
    reason = above_limits(header, limits)
    if reason is not None:
        raise HeaderError(reason)
    return header


def above_limits(header: MediaHeader, limits: Limits) -> str | None:
    """Why a header is refused, or None."""
    pixels = header.width * header.height
    if pixels > limits.image_pixels:
        size = f"{header.width}x{header.height} = {pixels} pixels"
        return f"image of {size}, above Limits.image_pixels={limits.image_pixels}"
    if max(header.width, header.height) > _LONGEST_SIDE:
        return f"image of {header.width}x{header.height} pixels: no side above {_LONGEST_SIDE} can be resized"
    if header.rate and header.frames > limits.audio_seconds * header.rate:
        return f"audio of {header.frames / header.rate:.0f} s, above Limits.audio_seconds={limits.audio_seconds:g}"
    return None


def starts_with(data: bytes) -> str:
    """The first eight bytes, to show in an error: as text where they are printable."""
    head = data[:8]
    return repr(head.decode("ascii")) if head.isascii() and head.decode("ascii").isprintable() else repr(head)[1:]


def most_of(limits: Limits) -> NDArray[np.float64]:
    """What `above_limits` holds headers against, as `scan_media` takes it."""
    return np.array([limits.image_pixels, _LONGEST_SIDE, limits.audio_seconds], np.float64)


def _scan_one(kind: int, size: int, data: bytes) -> tuple[int, MediaHeader]:
    places, media = np.array([[0, len(data), size]], np.int64), np.zeros((1, 4), np.int64)
    status, kinds = np.zeros(1, np.uint8), np.array([kind], np.uint8)
    buffer: NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    scan_media(buffer, places, np.zeros(1, np.int64), kinds, _NO_LIMIT, media, status)
    return int(status[0]), MediaHeader(*media[0].tolist())


def _ask_pillow(data: bytes, limits: Limits) -> MediaHeader:
    from PIL import ExifTags, Image, UnidentifiedImageError

    Image.init()  # `formats` names plugins, and only five are loaded unasked
    try:
        # Pillow warns of what it repairs (EXIF, TIFF tags) and of large images; the limit is ours. Filters are
        # process-wide: hold them shortly, one thread at a time, and for Pillow's own modules only.
        with _warnings_lock, warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL(\.|$)")
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                width, height = image.size
                if width * height > limits.image_pixels:
                    return MediaHeader(width=width, height=height)
                # Pillow turns TIFF sizes itself.
                orientation = 1 if image.format == "TIFF" else image.getexif().get(ExifTags.Base.Orientation, 1)
    except UnidentifiedImageError:
        raise HeaderError(f"not an image: starts with {starts_with(data)}") from None
    except Image.DecompressionBombError as error:
        raise HeaderError(f"too large an image: {error}; see PIL.Image.MAX_IMAGE_PIXELS") from None
    except NOT_DATA:
        raise
    except Exception as error:
        pass_trouble(error)
        raise HeaderError(f"damaged image: {_describe(error)}") from error
    if width < 1 or height < 1:
        raise HeaderError(f"image of {width}x{height} pixels")
    if orientation in (5, 6, 7, 8):
        width, height = height, width
    return MediaHeader(width=width, height=height)


def _ask_soundfile(data: bytes, limits: Limits) -> MediaHeader:
    import soundfile

    from orchdata.loaders.modalities.sound import UNKNOWN_FRAMES, open_sound

    try:
        with open_sound(data) as sound:
            rate = int(sound.samplerate)
            frames = int(sound.frames)
            if rate < 1:
                raise HeaderError(f"audio at {rate} Hz")
            is_mp3 = sound.format == "MP3"
            if is_mp3:
                frames = _mp3_frames(data, frames)
            if frames < 0 or frames >= UNKNOWN_FRAMES or (is_mp3 and frames == 0):
                frames = _count_frames(sound, int(limits.audio_seconds * rate))
    except (*NOT_DATA, HeaderError):
        raise
    except soundfile.LibsndfileError as error:
        if _looks_like_audio(data):
            raise HeaderError(f"damaged audio: {error.error_string.strip()}") from None
        raise HeaderError(f"not audio: starts with {starts_with(data)}") from None
    except Exception as error:
        pass_trouble(error)
        raise HeaderError(f"damaged audio: {_describe(error)}") from error
    if frames < 1:
        raise HeaderError("audio without a single frame")
    reason = cut_reason(data, frames, rate) or flac_reason(data, frames)
    if reason is None and is_mp3:
        reason = mp3_reason(data, frames, rate)
    if reason is not None:
        raise HeaderError(reason)
    return MediaHeader(frames=frames, rate=rate)


def _mp3_frames(data: bytes, told: int) -> int:
    """Frames of an MP3 that decoding gives, or -1 where only decoding can tell."""
    frames, samples, tagged = scan_mp3(np.frombuffer(data, np.uint8))
    if frames < 0:
        return -1
    # With a Xing/Info tag that fits, libsndfile knows the length less the encoder's delay. Without, it guesses by the
    # bit rate of the first frame, and stops there even where more follows.
    return told if tagged else min(told, int(frames * samples))


def mp3_reason(data: bytes | memoryview, frames: int, rate: int) -> str | None:
    """Why libsndfile does not deliver all of an MP3, or None.

    Args:
        data: the whole file.
        frames: that decoding gives, per channel; rate: in Hz.
    """
    end = mp3_stream_bytes(data)
    if end is None:
        count, samples = count_mp3(np.frombuffer(data, np.uint8))
        whole = int(count * samples)
        if lacks(frames, whole, rate):
            return (
                f"VBR MP3 without a Xing tag: the decoder stops at {frames / rate:.3f} of {whole / rate:.3f} s; remux "
                "it, for example ffmpeg -i in.mp3 -c copy out.mp3"
            )
        return None
    rest = bytes(data[end:])
    if len(rest) > _ID3V1_BYTES and lacks(frames, frames + _frames_of(rest), rate):
        return "several MP3 streams behind one another, of which only the first would be read: join or split them"
    return None


def _frames_of(data: bytes) -> int:
    """Frames of an MP3; 0 for anything else."""
    import soundfile

    from orchdata.loaders.modalities.sound import open_sound

    try:
        with open_sound(data) as sound:
            return int(sound.frames) if sound.format == "MP3" else 0
    except soundfile.LibsndfileError:
        return 0


def _count_frames(sound: Sound, limit: int) -> int:
    """Decode and count, up to just above `limit` frames."""
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


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:200] if text else type(error).__name__
