"""Images of every kind become the pixels Pillow would give, resized to the grid, or an error that says why."""

from __future__ import annotations

import dataclasses
import io
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from float_bounds import assert_pixels
from images import EXACT, LIMITS, RGB, encoded, jpeg, noise, photo, pixels_of
from PIL import AvifImagePlugin, Image, ImageOps, WebPImagePlugin
from shard_factory import write_shard

import orchdata as od
from orchdata.loaders.errors import DecodeError, PackageError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities import image_decode
from orchdata.loaders.modalities.audio_decode import probe_audio, read_mono
from orchdata.loaders.modalities.image import _LANCZOS_SINCE
from orchdata.loaders.modalities.image_decode import load_formats, load_rgb, probe_image
from orchdata.loaders.modalities.modality import PartSize, read_header
from orchdata.loaders.recipe import ImagePreprocessor, image_grid, load_required

pytestmark = pytest.mark.cpus

RGBA = Image.fromarray(noise(20, 30, 4))


def on_white(image: Image.Image) -> np.ndarray:
    """The twin of alpha compositing, in floats."""
    values = np.asarray(image.convert("RGBA")).astype(float)
    alpha = values[:, :, 3:] / 255
    return values[:, :, :3] * alpha + 255 * (1 - alpha)


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        (RGB, "PNG"),
        (RGB, "TIFF"),
        (RGB.convert("L"), "PNG"),
        (RGB.convert("1"), "PNG"),
        (RGB.convert("P"), "PNG"),
        (RGB.quantize(7), "GIF"),
        (RGB.convert("CMYK"), "TIFF"),
        (RGB.convert("YCbCr"), "TIFF"),
        (RGB, "JPEG"),
    ],
)
def test_modes_become_rgb_as_pillow_converts_them(image, kind):
    data = encoded(image, kind)
    try:
        expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    except OSError as error:
        if (image.mode, kind) != ("YCbCr", "TIFF"):
            raise
        pytest.skip(f"this Pillow writes no TIFF of YCbCr that it can read: {error}")
    np.testing.assert_array_equal(pixels_of(data, image.size), expected)


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_pixels_are_pillows(subsampling, progressive):
    data = encoded(photo(250, 131), "JPEG", subsampling=subsampling, progressive=progressive)
    expected = np.asarray(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(pixels_of(data, (250, 131)), expected)


@pytest.mark.parametrize(
    ("image", "kind", "options"),
    [
        (RGBA, "PNG", {}),
        (RGBA.convert("LA"), "PNG", {}),
        (RGBA, "WEBP", {"lossless": True, "exact": True}),
        (RGB.quantize(7), "PNG", {"transparency": 2}),
        (RGB.convert("P"), "PNG", {"transparency": bytes(range(256))}),
        (RGB, "PNG", {"transparency": RGB.getpixel((3, 3))}),
    ],
)
def test_transparency_shows_white(image, kind, options):
    data = encoded(image, kind, **options)
    stored = Image.open(io.BytesIO(data))
    assert stored.has_transparency_data
    np.testing.assert_allclose(pixels_of(data, image.size), on_white(stored), atol=1)


def test_sixteen_bits_keep_their_upper_byte():
    values = noise(20, 30, dtype=np.uint16)
    values[0, :4] = [0, 255, 256, 65535]
    for kind in ("PNG", "TIFF", "PPM"):
        got = pixels_of(encoded(Image.fromarray(values), kind), (30, 20))
        np.testing.assert_array_equal(got, np.repeat((values >> 8)[:, :, None], 3, axis=2))
        assert got[0, :4, 0].tolist() == [0, 0, 1, 255]


def test_float_images_are_fractions_or_bytes():
    fractions = np.linspace(0, 1, 600, dtype=np.float32).reshape(20, 30)
    for values in (fractions, fractions * 255):
        got = pixels_of(encoded(Image.fromarray(values), "TIFF"), (30, 20))
        np.testing.assert_array_equal(got[:, :, 0], np.rint(fractions * 255))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.full((4, 4), np.nan, np.float32), "NaN"),
        (np.full((4, 4), 300.0, np.float32), r"outside \[0, 255\]"),
        (np.full((4, 4), -0.5, np.float32), "grey values from -0.5"),
        (np.full((4, 4), 70_000, np.int32), r"outside \[0, 65535\]"),
    ],
)
def test_values_that_no_rule_maps_to_bytes_are_errors(values, reason):
    with pytest.raises(DecodeError, match=reason):
        pixels_of(encoded(Image.fromarray(values), "TIFF"), (4, 4))


def test_cmyk_and_ycck_fixtures(fixtures_dir: Path):
    checked = 0
    for path in sorted((fixtures_dir / "images/pillow").rglob("*.jpg")):
        with Image.open(path) as image:
            if image.mode == "CMYK":
                np.testing.assert_array_equal(
                    pixels_of(path.read_bytes(), image.size), np.asarray(image.convert("RGB"))
                )
                checked += 1
    assert checked


def resized_by(resizer: str, upright: Image.Image, target: tuple[int, int], resample: str = "bicubic") -> np.ndarray:
    """What a resizer is named for: Pillow's own resize, or torchvision's of a tensor of bytes. Floats where torchvision
    goes through them, before they are rounded.
    """
    if resizer == "pillow":
        return np.asarray(upright.resize(target, Image.Resampling[resample.upper()]))
    tensor = torch.from_numpy(np.array(upright)).permute(2, 0, 1).contiguous()[None]
    if resample == "bilinear" and not image_decode._has_bilinear_bytes():
        tensor = tensor.float()
    resized = torch.nn.functional.interpolate(tensor, target[::-1], mode=resample, align_corners=False, antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


@pytest.mark.slow_cases("pillow")
@pytest.mark.parametrize("resizer", ["pillow", "torchvision"])
def test_every_exif_orientation_is_turned_upright_and_then_resized(fixtures_dir: Path, resizer: str):
    paths = sorted((fixtures_dir / "images/exif-orientation-examples").rglob("*.jpg"))
    pre = ImagePreprocessor(min_tokens=4, max_tokens=256, resizer=resizer)
    orientations = set()
    for path in paths:
        stored = Image.open(io.BytesIO(path.read_bytes()))
        orientations.add(stored.getexif().get(0x0112, 1))
        upright = ImageOps.exif_transpose(stored)
        grid = image_grid(*upright.size, pre)
        got = pre._pixels(path.read_bytes(), LIMITS, grid)[:, :, :3]
        np.testing.assert_array_equal(got, resized_by(resizer, upright, (grid[1] * 14, grid[0] * 14)), path.name)
    assert orientations >= set(range(1, 9))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_orientation_in_other_formats(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(RGB, kind, exif=exif.tobytes(), **({"lossless": True} if kind == "WEBP" else {}))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(pixels_of(data, upright.size), np.asarray(upright.convert("RGB")))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_is_taken(kind):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    data = encoded(
        frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
    )
    assert pixels_of(data, (8, 8))[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("resample", ["bicubic", "bilinear", "lanczos"])
@pytest.mark.parametrize("resizer", ["pillow", "torchvision"])
def test_resizers_are_those_they_are_named_for(resizer: str, resample: str):
    if (resizer, resample) == ("torchvision", "lanczos") and tuple(
        map(int, torch.__version__.split(".")[:2])
    ) < _LANCZOS_SINCE:
        with pytest.raises(ValueError, match=r"'lanczos' needs torch 2.12 or resizer='pillow'"):
            ImagePreprocessor(resizer=resizer, resample=resample)
        return
    pre = ImagePreprocessor(max_tokens=64, resizer=resizer, resample=resample)
    for size in ((300, 200), (1000, 90), (31, 400), (20, 20)):
        image = photo(*size)
        grid = image_grid(*size, pre)
        expected = resized_by(resizer, image, (grid[1] * 14, grid[0] * 14), resample)
        for kind in ("PNG", "BMP"):
            assert_pixels(pixels_of(encoded(image, kind), size, pre), expected)


def test_bilinear_without_a_kernel_for_bytes_goes_through_floats(monkeypatch: pytest.MonkeyPatch):
    # As torchvision on processors without AVX2.
    monkeypatch.setattr(image_decode, "_has_bilinear_bytes", lambda: False)
    image = photo(300, 200)
    tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
    expected = torch.nn.functional.interpolate(tensor, (70, 90), mode="bilinear", antialias=True)
    got = image_decode.resized(np.asarray(image), (90, 70), "torchvision", "bilinear")
    assert_pixels(got, expected[0].permute(1, 2, 0).numpy())
    with pytest.raises(AssertionError):
        assert_pixels(got ^ 1, expected[0].permute(1, 2, 0).numpy())


def test_jpegs_are_decoded_in_full_unless_drafts_are_asked_for():
    image = photo(1600, 1200)
    data = encoded(image, "JPEG", quality=95)
    exact, draft = (ImagePreprocessor(max_tokens=64, resizer="pillow", draft=draft) for draft in (False, True))
    got = pixels_of(data, image.size, exact)  # 9 x 6 tokens: 252 x 168 pixels, so a draft is 1/4 of the size
    whole = Image.open(io.BytesIO(data)).resize((got.shape[1], got.shape[0]), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(got, np.asarray(whole))
    difference = np.abs(pixels_of(data, image.size, draft).astype(int) - got)
    assert 0 < difference.mean() < 1.5


def test_alpha_is_shown_on_white_or_dropped():
    data = encoded(RGBA, "PNG")
    assert ImagePreprocessor().alpha == "white"
    dropped = pixels_of(data, RGBA.size, dataclasses.replace(EXACT, alpha="drop"))
    np.testing.assert_array_equal(dropped, np.asarray(RGBA)[:, :, :3])
    assert not np.array_equal(dropped, pixels_of(data, RGBA.size))


def sides(count: int) -> list[tuple[int, int]]:
    """Sizes (width, height) of every kind: squares, near-squares, flat and tiny ones."""
    rng = np.random.default_rng(0)
    any_of = np.exp(rng.uniform(0, np.log(9000), (count, 2))).astype(int)
    near = rng.integers(1, 4000, count)[:, None] + rng.integers(0, 2, (count, 2))
    return [*map(tuple, any_of.tolist()), *map(tuple, near.tolist()), *[(side, side) for side in range(1, 4000)]]


@pytest.mark.parametrize(("patch", "least", "most"), [(14, 3136, 1003520), (16, 65536, 16777216), (14, 784, 12845056)])
def test_the_rule_of_qwen_is_hugging_faces(patch: int, least: int, most: int):
    theirs = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl").smart_resize
    pre = ImagePreprocessor(patch_size=patch, rule="qwen2_vl", min_pixels=least, max_pixels=most)
    own = ImagePreprocessor(
        patch_size=patch, min_tokens=max(1, least // (2 * patch) ** 2), max_tokens=most // (2 * patch) ** 2
    )
    refused = differing = 0
    for width, height in sides(2000):
        try:
            high, wide = theirs(height, width, 2 * patch, least, most)
        except ValueError:
            refused += 1
            with pytest.raises(DecodeError, match="none above 200"):
                pre.count_header((width, height), Limits(image_pixels=10**9))
            continue
        assert image_grid(width, height, pre) == (high // patch, wide // patch), (width, height)
        differing += image_grid(width, height, own) != (high // patch, wide // patch)
    assert refused and differing  # the sizes tell the rules apart


def test_another_size_than_indexed_is_an_error():
    with pytest.raises(DecodeError, match="decoded to 30 x 20 pixels, 20 x 30 patches; the index says 30 x 20"):
        EXACT._pixels(encoded(RGB, "PNG"), LIMITS, (30, 20))


def test_threads_do_not_meet_in_scratch_memory():
    pre = ImagePreprocessor(max_tokens=64, resizer="torchvision")
    images = [encoded(photo(300 + 40 * number, 200), "JPEG") for number in range(8)]
    grids = [image_grid(300 + 40 * number, 200, pre) for number in range(8)]

    def decode(number: int) -> bytes:
        out = np.empty((grids[number][0] * grids[number][1], pre.patch_dim), np.uint16)
        pre.decode_into(images[number], PartSize(0, 0, extent=grids[number]), {"patches": out}, LIMITS)
        return out.tobytes()

    alone = [decode(number) for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(decode, [*range(8)] * 12)) == alone * 12


# What of a damaged image is refused, and that nothing of it is passed off as grey.


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
