"""What of a damaged image is refused, and that nothing of it is passed off as grey."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from images import jpeg, pixels_of
from PIL import AvifImagePlugin, Image, WebPImagePlugin
from shard_factory import write_shard

import orchdata as od
from orchdata.loaders.errors import DecodeError, PackageError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.audio_decode import probe_audio, read_mono
from orchdata.loaders.modalities.image_decode import load_formats, load_rgb, probe_image
from orchdata.loaders.modalities.modality import read_header
from orchdata.loaders.recipe import ImagePreprocessor, image_grid, load_required


def grey_middle(data: bytes) -> bytes:
    """Damage that Pillow passes off as grey: a stretch of the scan is lost."""
    middle = len(data) // 2
    return data[:middle] + b"\xff\xd9" + data[-2:]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 0x55 for byte in data[middle : middle + 400]) + data[middle + 400 :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[: len(data) // 2], "Premature end"),
        (lambda data: data[:100], "damaged"),
        (lambda data: data[:3], "damaged"),
        (grey_middle, "damaged JPEG"),
        (flipped, "damaged JPEG"),
        (lambda data: b"", "empty: 0 bytes"),
        (lambda data: b"<html>not found</html>", "not an image: starts with '<html>no'"),
        (lambda data: b"%!PS-Adobe-3.0 EPSF-3.0\n", "not an image"),  # Pillow would run a program for it
    ],
)
def test_damage_is_an_error_and_never_grey(damage, reason):
    with pytest.raises(DecodeError, match=reason):
        pixels_of(damage(jpeg()), (320, 240))


def test_zeros_before_the_end_marker_do_not_matter():
    clean = jpeg()
    assert np.array_equal(pixels_of(clean[:-2] + bytes(9) + clean[-2:], (320, 240)), pixels_of(clean, (320, 240)))
    with pytest.raises(DecodeError, match="extraneous bytes"):
        pixels_of(clean[:-2] + b"abc" * 10 + clean[-2:], (320, 240))


def test_flaws_before_the_scan_do_not_matter():
    clean = jpeg()
    expected = pixels_of(clean, (320, 240))
    junk = clean[:20] + b"\x00\x01junk" + clean[20:]  # after the JFIF segment
    profile = clean[:2] + b"\xff\xe2" + struct.pack(">H", 2 + 14) + b"ICC_PROFILE\0\x09\x02" + clean[2:]
    for flawed in (junk, profile):
        np.testing.assert_array_equal(pixels_of(flawed, (320, 240)), expected)
        with pytest.raises(DecodeError, match="damaged JPEG"):  # but damage after them does
            pixels_of(flipped(flawed), (320, 240))


CUT_CASES = {
    "JPEG": ("JPEG", {}),
    "progressive JPEG": ("JPEG", {"progressive": True}),
    "PNG": ("PNG", {}),
    "WebP": ("WEBP", {}),
    "lossless WebP": ("WEBP", {"lossless": True}),
    "GIF": ("GIF", {}),
    "TIFF": ("TIFF", {}),
    "TIFF, LZW": ("TIFF", {"compression": "tiff_lzw"}),
    "TIFF, deflate": ("TIFF", {"compression": "tiff_adobe_deflate"}),
    "TIFF, JPEG": ("TIFF", {"compression": "jpeg"}),
    "BMP": ("BMP", {}),
    "PPM": ("PPM", {}),
    "JPEG 2000": ("JPEG2000", {}),
    "AVIF": ("AVIF", {}),
}


# Formats without a checksum or marks in their data: zeros decode to something.
BLIND = {"WebP", "lossless WebP", "TIFF", "TIFF, JPEG", "BMP", "PPM", "JPEG 2000", "AVIF"}


def photo_bytes(name: str) -> bytes:
    y, x = np.mgrid[:240, :320]
    pixels = np.stack([x % 256, y % 256, (x + y) % 256], -1).astype(np.uint8)
    pixels ^= np.random.default_rng(0).integers(0, 32, pixels.shape, np.uint8)
    form, options = CUT_CASES[name]
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form, **options)
    return out.getvalue()


def indexed_and_decoded(data: bytes, pre: ImagePreprocessor) -> np.ndarray:
    header = read_header(ImagePreprocessor, len(data), lambda count: data[:count], Limits())
    return pre._pixels(data, Limits(), image_grid(*header, pre)).copy()


@pytest.mark.filterwarnings("ignore:Truncated File Read")
@pytest.mark.parametrize("name", CUT_CASES)
@pytest.mark.parametrize("tokens", [256, 4])  # as it is, and scaled down while decoding
def test_a_cut_image_is_refused_or_whole(name: str, tokens: int) -> None:
    data, pre = photo_bytes(name), ImagePreprocessor(max_tokens=tokens, min_tokens=1)
    whole = indexed_and_decoded(data, pre)
    for share in (0.2, 0.5, 0.95):
        try:
            decoded = indexed_and_decoded(data[: int(len(data) * share)], pre)
        except DecodeError:
            continue
        np.testing.assert_array_equal(decoded, whole)


@pytest.mark.parametrize("name", sorted(CUT_CASES.keys() - BLIND))
def test_a_stretch_of_zeros_is_refused_where_the_format_tells(name: str) -> None:
    data = bytearray(photo_bytes(name))
    start = len(data) // 3
    data[start : start + len(data) // 10] = bytes(len(data) // 10)
    with pytest.raises((DecodeError, DecodeError)):
        indexed_and_decoded(bytes(data), ImagePreprocessor())


# Pillow and libsndfile that were built without a format: its files are not bad data.


LIMITS = Limits()
AVIF = b"\0\0\0\x20ftypavif" + bytes(100)
HEADS = {"MP3": b"ID3\x04", "FLAC": b"fLaC", "OGG": b"OggS"}


def image(kind: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (32, 24), (9, 8, 7)).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize("read", [probe_image, load_rgb])
def test_a_pillow_without_webp_is_no_damage(monkeypatch: pytest.MonkeyPatch, read: Any) -> None:
    data = image("WEBP")
    read(data, LIMITS)
    monkeypatch.setattr(WebPImagePlugin, "SUPPORTED", False)
    with pytest.raises(PackageError, match=r"'PIL', which an image needs, cannot be used \(.*WEBP.*pip install"):
        read(data, LIMITS)


def test_a_reader_that_pillow_failed_to_import_is_an_error_before_the_first_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"{name}: libwebp.so.7: cannot open shared object file")

    assert "WEBP" in load_formats()
    monkeypatch.delitem(Image.OPEN, "WEBP")
    monkeypatch.setattr("orchdata.loaders.modalities.image_decode.import_module", fail)
    with pytest.raises(PackageError, match=r"'PIL', which the recipe's image needs, .*libwebp\.so\.7"):
        load_required(od.Recipe())


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("read", [probe_audio, read_mono])
def test_a_libsndfile_without_a_format_is_no_damage(monkeypatch: pytest.MonkeyPatch, read: Any, name: str) -> None:
    data = HEADS[name] + b"\xee" * 2000
    with pytest.raises(Exception, match="audio"):  # damaged, where the format is known
        read(data, LIMITS)
    left = {each: "" for each in soundfile.available_formats() if each != name}
    monkeypatch.setattr(soundfile, "available_formats", lambda: left)
    with pytest.raises(PackageError, match=f"reads no {name}"):
        read(data, LIMITS)


def test_an_index_build_ends_and_keeps_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = write_shard(tmp_path / "a.tar", [{"__key__": "a", "avif": image("AVIF")}])
    with monkeypatch.context() as patch:
        patch.setattr(AvifImagePlugin, "SUPPORTED", False)
        with pytest.raises(PackageError, match="AVIF"):
            build_index([shard], od.Recipe(), retry_seconds=0)
    assert not len(build_index([shard], od.Recipe()).bad_rows())
