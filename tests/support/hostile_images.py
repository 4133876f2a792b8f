"""Images that claim more pixels, chunks, tags or scans than they hold."""

# ruff: noqa: E731 - small makers of bytes are next to the one line that takes them
from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator

import PIL
from hostile import EITHER, FAILS, MIB, HostileSample, next_to, zeros
from shard_factory import jpeg, png

PILLOW_COUNTS = int(PIL.__version__.split(".")[0]) >= 13
"""Before 13 Pillow reads what the tags of a TIFF say without a bound, opens a WebP of any size, and takes a JPEG of too
many pixels for no image.
"""


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int, *, depth: int = 8, colour: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header)


def bare_png(width: int = 10_000, height: int = 10_000) -> bytes:
    return png_header(width, height) + png_chunk(b"IEND", b"")


def solid_png(width: int, height: int, *, depth: int = 8, colour: int = 2) -> bytes:
    """All of its pixels, black, in a thousandth of their bytes."""
    channels = {0: 1, 2: 3, 6: 4}[colour]
    row = 1 + width * channels * depth // 8
    stream = zlib.compressobj(1)
    block = bytes(row)
    data = b"".join([*(stream.compress(block) for _ in range(height)), stream.flush()])
    return png_header(width, height, depth=depth, colour=colour) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")


def png_with(*chunks: bytes) -> bytes:
    whole = png(40, 40)
    return whole[:33] + b"".join(chunks) + whole[33:]


def tiff(entries: list[tuple[int, int, int, int]], *, tags: int | None = None, next_ifd: int = 0) -> bytes:
    """A little-endian TIFF of one directory: (tag, type, count, value) each."""
    count = len(entries) if tags is None else tags
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, count) + body + struct.pack("<I", next_ifd)


def plain_tiff(width: int, height: int, **changed: tuple[int, int]) -> bytes:
    """One strip of nothing; `changed` gives (count, value) of a field."""
    fields = {"width": (256, 4), "height": (257, 4), "bits": (258, 3), "compression": (259, 3), "photometric": (262, 3)}
    fields |= {"strips": (273, 4), "samples": (277, 3), "rows": (278, 4), "sizes": (279, 4)}
    values = {"width": (1, width), "height": (1, height), "bits": (1, 8), "compression": (1, 1), "photometric": (1, 1)}
    values |= {"strips": (1, 8), "samples": (1, 1), "rows": (1, height), "sizes": (1, 64)} | changed
    return tiff([(*fields[name], *values[name]) for name in fields])


def scans_jpeg(scans: int) -> bytes:
    """A progressive JPEG of 4,000 x 4,000 pixels whose last scan comes again and again: each costs a pass over it."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (4000, 4000)).save(out, "JPEG", progressive=True)
    whole = out.getvalue()
    last = whole.rindex(b"\xff\xda")
    return whole[:last] + whole[last:-2] * scans + b"\xff\xd9"


def image_samples() -> Iterator[HostileSample]:
    one = next_to(b"an image")
    yield HostileSample(
        "2,000 bare PNG headers in one sample",
        FAILS,
        lambda: {f"{n}.png": bare_png() for n in range(2000)} | {"txt": b"<image>" * 2000},
    )
    for number in range(30):
        yield one(f"a bare PNG header, {number}", FAILS, "png", bare_png)
    bomb = lambda: b"icc\0\0" + zeros(300 * MIB)
    yield one(
        "PNG with an ICC profile of 300 MiB", EITHER, "png", lambda: png_with(png_chunk(b"iCCP", bomb())), heavy=True
    )
    yield one("PNG with a zTXt of 300 MiB", EITHER, "png", lambda: png_with(png_chunk(b"zTXt", bomb())), heavy=True)
    itxt = lambda: png_chunk(b"iTXt", b"Comment\0\1\0\0\0" + zeros(300 * MIB))
    yield one("PNG with an iTXt of 300 MiB", EITHER, "png", lambda: png_with(itxt()), heavy=True)
    many = lambda: png_with(*[png_chunk(b"tEXt", b"k\0v")] * 50_000)
    yield one("PNG with 50,000 text chunks", EITHER, "png", many)
    yield one("PNG of 10,000 x 10,000 black pixels", EITHER, "png", lambda: solid_png(10_000, 10_000), heavy=True)
    yield one(
        "PNG of 13,000 x 13,000, 16 bits RGBA",
        EITHER,
        "png",
        lambda: solid_png(13_000, 13_000, depth=16, colour=6),
        heavy=True,
    )
    yield one("PNG of 100,000,000 x 1", EITHER, "png", lambda: solid_png(100_000_000, 1, colour=0), heavy=True)
    yield one("PNG of 1 x 1,000,000", EITHER, "png", lambda: solid_png(1, 1_000_000, colour=0), heavy=True)
    yield one("PNG of 2^31 - 1 squared", FAILS, "png", lambda: bare_png(2**31 - 1, 2**31 - 1), "pixels")
    yield one("PNG of no width", FAILS, "png", lambda: bare_png(0, 10))
    yield one("PNG chunk of 2 GiB", FAILS, "png", lambda: png_header(50, 50) + struct.pack(">I", 2**31 - 1) + b"IDAT")
    gif = lambda size: b"GIF89a" + struct.pack("<HHBBB", size, size, 0, 0, 0)
    frame = b",\0\0\0\0\1\0\1\0\0\2\2D\1\0;"
    yield one("GIF of 65,535 x 65,535", FAILS, "gif", lambda: gif(65_535) + frame, "pixels")
    yield one("GIF of 13,000 x 13,000 and one pixel", EITHER, "gif", lambda: gif(13_000) + frame, heavy=True)
    yield one(
        "GIF with frames beyond its canvas", EITHER, "gif", lambda: gif(10) + b",\0\0\0\0\xff\xff\xff\xff\0\2\2D\1\0;"
    )
    vp8x = b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0"
    yield one("WebP of 16,384 x 16,384", FAILS, "webp", lambda: vp8x + b"\xff\x3f\0\xff\x3f\0", "")
    bmp = lambda *size: b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, *size, 1, 24, 0, 0, 0, 0, 0, 0)
    yield one("BMP of 13,000 x 13,000 without pixels", FAILS, "bmp", lambda: bmp(13_000, 13_000))
    yield one("BMP of -2^31", FAILS, "bmp", lambda: bmp(-(2**31), -(2**31)))
    yield one("TIFF that counts 2^31 values", FAILS, "tif", lambda: plain_tiff(100, 100, bits=(2**31, 8)))
    yield one("TIFF of 2^31 strips", FAILS, "tif", lambda: plain_tiff(100, 100, strips=(2**31, 8)))
    yield one("TIFF of 65,535 tags that are not there", FAILS, "tif", lambda: tiff([(256, 4, 1, 9)], tags=65_535))
    same = [(40_000 + n, 7, MIB, 8) for n in range(10_000)]
    if PILLOW_COUNTS:
        yield one("TIFF of 10,000 tags of a MiB each", FAILS, "tif", lambda: tiff(same) + bytes(2 * MIB))
    yield one("TIFF whose next directory is itself", EITHER, "tif", lambda: tiff([(256, 4, 1, 9)], next_ifd=8))
    yield one("TIFF of 13,000 x 13,000 in one empty strip", FAILS, "tif", lambda: plain_tiff(13_000, 13_000))
    yield one("TIFF of 65,535 samples a pixel", FAILS, "tif", lambda: plain_tiff(2000, 2000, samples=(1, 65_535)))
    yield one("PPM of 13,000 x 13,000 without pixels", FAILS, "ppm", lambda: b"P6 13000 13000 255\n")
    yield one("PPM with a width of 5,000 digits", FAILS, "ppm", lambda: b"P6 " + b"1" * 5000 + b" 1 255\n")
    sof = lambda height, width: (
        b"\xff\xd8\xff\xc0\0\x11\x08" + struct.pack(">HH", height, width) + b"\3\1\x22\0\2\x11\1\3\x11\1"
    )
    yield one("JPEG of 13,000 x 13,000 without pixels", FAILS, "jpg", lambda: sof(13_000, 13_000) + b"\xff\xd9")
    too_large = "pixels" if PILLOW_COUNTS else ""
    yield one("JPEG of 65,535 x 65,535", FAILS, "jpg", lambda: sof(65_535, 65_535) + b"\xff\xd9", too_large)
    yield one("JPEG of 500 scans", EITHER, "jpg", lambda: scans_jpeg(500), heavy=True)
    app = b"\xff\xe1\xff\xff" + b"Exif\0\0" + bytes(65_527)
    yield one(
        "JPEG after 500 EXIF blocks",
        EITHER,
        "jpg",
        lambda: jpeg(40, 40)[:2] + app * 500 + jpeg(40, 40)[2:],
        heavy=True,
    )
    yield one("JPEG that is only fill bytes", FAILS, "jpg", lambda: b"\xff\xd8" + b"\xff" * MIB, heavy=True)
    yield one(
        "EPS that would run a program", FAILS, "png", lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    )
    yield one("SVG", FAILS, "png", lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>')
