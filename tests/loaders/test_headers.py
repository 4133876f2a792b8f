"""Media headers equal what Pillow and soundfile say of the whole file."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image, ImageOps, PngImagePlugin

from orchdata.loaders.headers import HeaderError, MediaHeader, read_header
from orchdata.loaders.limits import Limits
from orchdata.loaders.modality import AUDIO, IMAGE
from orchdata.loaders.sound import open_sound

IMAGE_FOLDERS = ("images/exif-orientation-examples", "images/pillow", "images/raccoon", "images/scikit-image")
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif"}
AUDIO_SUFFIXES = {".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff"}


def header(kind: int, data: bytes, limits: Limits | None = None) -> MediaHeader:
    return read_header(kind, len(data), lambda count: data[:count], limits or Limits())


def displayed_size(data: bytes) -> tuple[int, int] | None:
    """Size after decoding and EXIF orientation, or None where Pillow cannot decode it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(data))
            image.load()
            return ImageOps.exif_transpose(image).size
        except Exception:
            return None


def decoded_frames(data: bytes) -> tuple[int, int] | None:
    try:
        with open_sound(data) as sound:
            frames = 0
            while got := len(sound.read(65536)):
                frames += got
            return frames, sound.samplerate
    except Exception:
        return None


@pytest.mark.parametrize("folder", IMAGE_FOLDERS)
def test_image_sizes_equal_pillows(fixtures_dir: Path, folder: str) -> None:
    compared = 0
    for path in sorted((fixtures_dir / folder).rglob("*")):
        if path.suffix.lower() not in IMAGE_SUFFIXES:
            continue
        data = path.read_bytes()
        expected = displayed_size(data)
        if expected is None:
            continue  # sound headers over damaged pixels: found when decoded
        found = header(IMAGE, data)
        assert (found.width, found.height) == expected, path
        compared += 1
    assert compared > 10


@pytest.mark.parametrize("folder", ["speech", "multimodal"])
def test_audio_lengths_equal_what_soundfile_decodes(fixtures_dir: Path, folder: str) -> None:
    compared = 0
    for path in sorted((fixtures_dir / folder).rglob("*")):
        if path.suffix.lower() not in AUDIO_SUFFIXES:
            continue
        data = path.read_bytes()
        found = header(AUDIO, data)
        assert (found.frames, found.rate) == decoded_frames(data), path
        compared += 1
    assert compared > 1


HOSTILE = """
import sys, resource
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
sys.path.insert(0, {tests!r})
from test_headers import *
warnings.simplefilter("error")
print(check_hostile(Path({folder!r}), {kind}))
"""


def check_hostile(folder: Path, kind: int) -> int:
    """Compare every file with the oracle; returns how many have a header."""
    found = 0
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        data = path.read_bytes()
        expected = decoded_frames(data) if kind == AUDIO else displayed_size(data)
        try:
            told = header(kind, data)
        except HeaderError as error:
            nothing_in_it = expected is None or (kind == AUDIO and expected[0] == 0)
            assert nothing_in_it or "above Limits" in str(error) or path.suffix in SKIPPED, (path, error)
            continue
        assert expected in (None, (told.frames, told.rate) if kind == AUDIO else (told.width, told.height)), path
        found += 1
    return found


SKIPPED = {
    ".psd",
    ".fli",
    ".ico",
    ".icns",
    ".tga",
    ".dcx",
    ".pcx",
    ".eps",
    ".xbm",
    ".xpm",
    ".msp",
    ".sgi",
    ".dds",
    ".ftex",
}


@pytest.mark.parametrize("folder", ["hostile/pillow", "hostile/minimp3-vectors", "hostile/tinytag"])
def test_hostile_files_are_errors_or_right(fixtures_dir: Path, folder: str) -> None:
    """In a process of limited memory; what has a header must have the right one, or fail to decode."""
    kind = IMAGE if folder == "hostile/pillow" else AUDIO
    script = HOSTILE.format(tests=str(Path(__file__).parent), folder=str(fixtures_dir / folder), kind=kind)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 5


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_sizes_are_as_displayed(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.new("RGB", (40, 20)), form, exif=exif)
    found = header(IMAGE, data)
    assert (found.width, found.height) == ((20, 40) if orientation >= 5 else (40, 20)) == displayed_size(data)


def test_orientation_in_xmp_and_in_text_chunks() -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    jpeg = encoded(Image.new("RGB", (40, 20)), "JPEG", xmp=xmp)
    text = PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", xmp.decode())
    png = encoded(Image.new("RGB", (40, 20)), "PNG", pnginfo=text)
    for data in (jpeg, png):
        found = header(IMAGE, data)
        assert (found.width, found.height) == displayed_size(data) == (20, 40)


def test_a_size_that_lies_deep_is_found() -> None:
    """An ICC profile of 200 KB lies before the frame header."""
    data = encoded(Image.new("RGB", (40, 20)), "JPEG", icc_profile=bytes(200_000))
    assert header(IMAGE, data) == MediaHeader(width=40, height=20)


def sound(form: str, subtype: str, frames: int = 5_000, rate: int = 16_000, channels: int = 1) -> bytes:
    out = io.BytesIO()
    wave = np.sin(np.arange(frames * channels).reshape(frames, channels) / 9) / 2
    soundfile.write(out, wave, rate, format=form, subtype=subtype)
    return out.getvalue()


@pytest.mark.parametrize(
    ("form", "subtype"),
    [
        ("WAV", "PCM_16"),
        ("WAV", "PCM_U8"),
        ("WAV", "PCM_24"),
        ("WAV", "FLOAT"),
        ("WAV", "ULAW"),
        ("WAV", "IMA_ADPCM"),
        ("WAVEX", "PCM_16"),
        ("RF64", "PCM_16"),
        ("FLAC", "PCM_16"),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", "MPEG_LAYER_III"),
        ("AIFF", "PCM_16"),
        ("AU", "PCM_16"),
    ],
)
@pytest.mark.parametrize("channels", [1, 2])
def test_audio_of_every_kind(form: str, subtype: str, channels: int) -> None:
    data = sound(form, subtype, rate=16_000, channels=channels)
    found = header(AUDIO, data)
    assert (found.frames, found.rate) == decoded_frames(data)


def test_odd_wav_sizes_are_what_soundfile_makes_of_them() -> None:
    data = bytearray(sound("WAV", "PCM_16"))
    at = data.index(b"data") + 4
    for size in (0, 1_001, 4_000, 0x7FFFFFFF, 0xFFFFFFFF):
        changed = data.copy()
        changed[at : at + 4] = size.to_bytes(4, "little")
        expected = decoded_frames(bytes(changed))
        if expected is None or expected[0] == 0:
            with pytest.raises(HeaderError):
                header(AUDIO, bytes(changed))
        else:
            found = header(AUDIO, bytes(changed))
            assert (found.frames, found.rate) == expected, size


def test_flac_without_a_total_is_counted() -> None:
    data = bytearray(sound("FLAC", "PCM_16"))
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    assert header(AUDIO, bytes(data)) == MediaHeader(frames=5_000, rate=16_000)


def test_mp3_cut_in_a_frame_is_counted() -> None:
    data = sound("MP3", "MPEG_LAYER_III", frames=50_000)
    cut = data[: len(data) // 2]
    found = header(AUDIO, cut)
    assert (found.frames, found.rate) == decoded_frames(cut)


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (AUDIO, b"hello world, I am no audio", "not audio: starts with 'hello wo'"),
        (IMAGE, b"hello world, I am no image", "not an image: starts with 'hello wo'"),
        (IMAGE, b"\x00\x01", r"not an image: starts with '\\x00\\x01'"),
        (IMAGE, b"", "empty: 0 bytes"),
        (AUDIO, b"RIFF\x24\x00\x00\x00WAVE", "damaged audio: "),
        (IMAGE, b"\xff\xd8\xff\xe0", "not an image|damaged image"),
    ],
)
def test_what_is_no_media_says_so(kind: int, data: bytes, message: str) -> None:
    with pytest.raises(HeaderError, match=message):
        header(kind, data)


def test_limits_name_the_value_and_the_limit() -> None:
    png = encoded(Image.new("L", (100, 50)), "PNG")
    with pytest.raises(HeaderError, match=r"100x50 = 5000 pixels, above Limits\.image_pixels=4999"):
        header(IMAGE, png, Limits(image_pixels=4_999))
    for form, subtype in (("WAV", "PCM_16"), ("OGG", "VORBIS")):
        with pytest.raises(HeaderError, match=r"above Limits.audio_seconds=0\.5"):
            header(AUDIO, sound(form, subtype, frames=16_000), Limits(audio_seconds=0.5))
