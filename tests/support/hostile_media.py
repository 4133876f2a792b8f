"""Samples that claim, nest, repeat or hide more than they hold: images, audio, texts, chats and names of members."""

# ruff: noqa: E731 - small makers of bytes are next to the one line that takes them
from __future__ import annotations

import gzip
import io
import json
import struct
import zlib
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import PIL
import soundfile
from hostile import ARRIVES, EITHER, FAILS, MIB, HostileSample, next_to, zeros
from PIL import Image
from shard_factory import chat, jpeg, png

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
    out = io.BytesIO()
    Image.new("RGB", (4000, 4000)).save(out, "JPEG", progressive=True)
    whole = out.getvalue()
    last = whole.rindex(b"\xff\xda")
    return whole[:last] + whole[last:-2] * scans + b"\xff\xd9"


def image_samples() -> Iterator[HostileSample]:
    one = next_to(b"an image")
    heavy = partial(one, heavy=True)
    yield HostileSample(
        "2,000 bare PNG headers in one sample",
        FAILS,
        lambda: {f"{n}.png": bare_png() for n in range(2000)} | {"txt": b"<image>" * 2000},
    )
    for number in range(30):
        yield one(f"a bare PNG header, {number}", FAILS, "png", bare_png)
    bomb = lambda: b"icc\0\0" + zeros(300 * MIB)
    yield heavy("PNG with an ICC profile of 300 MiB", EITHER, "png", lambda: png_with(png_chunk(b"iCCP", bomb())))
    yield heavy("PNG with a zTXt of 300 MiB", EITHER, "png", lambda: png_with(png_chunk(b"zTXt", bomb())))
    itxt = lambda: png_chunk(b"iTXt", b"Comment\0\1\0\0\0" + zeros(300 * MIB))
    yield heavy("PNG with an iTXt of 300 MiB", EITHER, "png", lambda: png_with(itxt()))
    many = lambda: png_with(*[png_chunk(b"tEXt", b"k\0v")] * 50_000)
    yield one("PNG with 50,000 text chunks", EITHER, "png", many)
    yield heavy("PNG of 10,000 x 10,000 black pixels", EITHER, "png", lambda: solid_png(10_000, 10_000))
    yield heavy(
        "PNG of 13,000 x 13,000, 16 bits RGBA", EITHER, "png", lambda: solid_png(13_000, 13_000, depth=16, colour=6)
    )
    yield heavy("PNG of 100,000,000 x 1", EITHER, "png", lambda: solid_png(100_000_000, 1, colour=0))
    yield heavy("PNG of 1 x 1,000,000", EITHER, "png", lambda: solid_png(1, 1_000_000, colour=0))
    yield one("PNG of 2^31 - 1 squared", FAILS, "png", lambda: bare_png(2**31 - 1, 2**31 - 1), "pixels")
    yield one("PNG of no width", FAILS, "png", lambda: bare_png(0, 10))
    yield one("PNG chunk of 2 GiB", FAILS, "png", lambda: png_header(50, 50) + struct.pack(">I", 2**31 - 1) + b"IDAT")
    gif = lambda size: b"GIF89a" + struct.pack("<HHBBB", size, size, 0, 0, 0)
    frame = b",\0\0\0\0\1\0\1\0\0\2\2D\1\0;"
    yield one("GIF of 65,535 x 65,535", FAILS, "gif", lambda: gif(65_535) + frame, "pixels")
    yield heavy("GIF of 13,000 x 13,000 and one pixel", EITHER, "gif", lambda: gif(13_000) + frame)
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
    yield heavy("JPEG of 500 scans", EITHER, "jpg", lambda: scans_jpeg(500))
    app = b"\xff\xe1\xff\xff" + b"Exif\0\0" + bytes(65_527)
    yield heavy("JPEG after 500 EXIF blocks", EITHER, "jpg", lambda: jpeg(40, 40)[:2] + app * 500 + jpeg(40, 40)[2:])
    yield heavy("JPEG that is only fill bytes", FAILS, "jpg", lambda: b"\xff\xd8" + b"\xff" * MIB)
    yield one(
        "EPS that would run a program", FAILS, "png", lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    )
    yield one("SVG", FAILS, "png", lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>')


def bare_flac(samples: int = 16_000 * 3600 * 2) -> bytes:
    """42 bytes: a stream header that claims two hours, and no frame."""
    packed = 16_000 << 44 | 0 << 41 | 15 << 36 | samples
    return b"fLaC\x80\0\0\x22" + struct.pack(">HH", 4096, 4096) + bytes(6) + packed.to_bytes(8, "big") + bytes(16)


def wav_header(data_bytes: int, *, rate: int = 16_000, channels: int = 1) -> bytes:
    block = 2 * channels & 0xFFFF
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * block & 0xFFFFFFFF, block, 16)
    size = min(36 + data_bytes, 0xFFFFFFFF)
    return b"RIFF" + struct.pack("<I", size) + b"WAVEfmt \x10\0\0\0" + form + b"data" + struct.pack("<I", data_bytes)


def sound(
    format_: str, subtype: str | None = None, *, seconds: float = 10.0, rate: int = 16_000, wave: Any = None
) -> bytes:
    wave = np.sin(np.arange(round(seconds * rate)) * 0.05).astype(np.float32) / 3 if wave is None else wave
    out = io.BytesIO()
    soundfile.write(out, wave, rate, format=format_, subtype=subtype)
    return out.getvalue()


@cache
def silence(seconds: int) -> bytes:
    """FLAC of nothing: hours in some hundred kilobytes."""
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", 16_000, 1, format="FLAC") as file:
        block = np.zeros(16_000 * 60, np.int16)
        for _ in range(seconds // 60):
            file.write(block)
    return out.getvalue()


def audio_samples() -> Iterator[HostileSample]:
    one = next_to(b"a clip")
    heavy = partial(one, heavy=True)
    yield HostileSample(
        "40 bare FLAC headers in one sample",
        FAILS,
        lambda: {f"{n}.flac": bare_flac() for n in range(40)} | {"txt": b"<audio>" * 40},
    )
    yield one("a bare FLAC header", FAILS, "flac", bare_flac)
    yield one("a FLAC header of 2^36 - 1 samples", FAILS, "flac", lambda: bare_flac(2**36 - 1))
    yield one("a FLAC header without a length", FAILS, "flac", lambda: bare_flac(0))
    formats = {"wav": "WAV", "aiff": "AIFF", "au": "AU", "w64": "W64", "flac": "FLAC", "ogg": "OGG", "caf": "CAF"}
    for suffix, format_ in formats.items():
        cut = lambda format_=format_: (whole := sound(format_))[: len(whole) // 5]
        yield one(f"ten seconds of {format_} cut to a fifth", FAILS, suffix, cut)
        yield one(f"{format_} cut inside its header", FAILS, suffix, lambda format_=format_: sound(format_)[:20])
    mp3 = lambda: sound("MP3")
    yield one("MP3 cut to a fifth", EITHER, "mp3", lambda: (whole := mp3())[: len(whole) // 5])
    yield one("an ID3 tag that claims 256 MiB", FAILS, "mp3", lambda: b"ID3\4\0\0\x7f\x7f\x7f\x7f" + bytes(100))
    yield one("200,000 ID3 tags before the MP3", EITHER, "mp3", lambda: b"ID3\4\0\0\0\0\0\0" * 200_000 + mp3())
    xing = lambda: (whole := mp3())[:4] + bytes(17) + b"Xing\0\0\0\3\xff\xff\xff\xff\xff\xff\xff\xff" + whole[41:]
    yield one("an MP3 that counts 2^32 - 1 frames", EITHER, "mp3", xing)
    yield one("MP3 of sync words alone", FAILS, "mp3", lambda: b"\xff\xfb" * MIB)
    yield one("WAV that claims an hour and holds nothing", FAILS, "wav", lambda: wav_header(115_200_000))
    piped = lambda: wav_header(0xFFFFFFFF) + bytes(32_000)
    yield one("WAV of a pipe, without sizes", ARRIVES, "wav", piped)
    yield one("WAV of 65,535 channels", FAILS, "wav", lambda: wav_header(1 << 20, channels=65_535) + bytes(1 << 20))
    yield one("WAV at no rate", FAILS, "wav", lambda: wav_header(32_000, rate=0) + bytes(32_000))
    yield one("WAV at 2^31 Hz", EITHER, "wav", lambda: wav_header(32_000, rate=2**31 - 1) + bytes(32_000))
    # 21 KB that become 172,800,000 samples at 16 kHz.
    slow = lambda: wav_header(21_600, rate=1) + bytes(21_600)
    yield heavy("WAV at 1 Hz, three hours", EITHER, "wav", slow)
    yield one("WAV at 44,099 Hz", ARRIVES, "wav", lambda: wav_header(88_198, rate=44_099) + bytes(88_198))
    chunks = lambda: b"RIFF\xff\xff\xff\x7fWAVE" + b"junk\0\0\0\0" * 100_000
    yield one("WAV of 100,000 empty chunks", FAILS, "wav", chunks)
    yield one(
        "WAV with a chunk of 4 GiB before its data", FAILS, "wav", lambda: b"RIFF\0\0\0\0WAVEjunk\xff\xff\xff\xff"
    )
    nan = lambda: sound("WAV", "FLOAT", wave=np.full(16_000, np.nan, np.float32))
    yield one("WAV of NaN", FAILS, "wav", nan, "NaN")
    late = lambda: (whole := bytearray(sound("OGG")))[:6] + b"\xff" * 7 + b"\x7f" + whole[14:]
    yield one("OGG whose first page is its last sample", EITHER, "ogg", lambda: bytes(late()))
    yield one("OGG with a last page at 2^62", EITHER, "ogg", lambda: last_page(sound("OGG"), 2**62))
    yield one("OGG with a last page at 2^40", FAILS, "ogg", lambda: last_page(sound("OGG"), 2**40), "audio_seconds")
    yield one("OGG of 10 s with a last page at 50", FAILS, "ogg", lambda: last_page(sound("OGG"), 50 * 16_000))
    yield one("OGG of page headers alone", FAILS, "ogg", lambda: (b"OggS" + bytes(23)) * 10_000)
    several = partial(HostileSample, fate=FAILS, reason="Limits.sample_decoded_bytes", heavy=True)
    clips = lambda suffix, clip: {f"{n}.{suffix}": clip for n in range(8)} | {"txt": b"<audio>" * 8}
    yield several("eight times three hours at 1 Hz in one sample", fields=lambda: clips("wav", slow()))
    yield several("eight times three hours of silence in one sample", fields=lambda: clips("flac", silence(10_800)))


def last_page(ogg: bytes, position: int) -> bytes:
    """An Ogg stream whose last page says that it ends at another sample; its checksum is right."""
    at = ogg.rindex(b"OggS") + 6
    return mend_ogg(ogg[:at] + struct.pack("<q", position) + ogg[at + 8 :])


def mend_ogg(data: bytes) -> bytes:
    """Right checksums of all pages that can be found."""
    out, place = bytearray(data), data.find(b"OggS")
    while 0 <= place <= len(data) - 27:
        table = data[place + 27 : place + 27 + data[place + 26]]
        end = place + 27 + len(table) + sum(table)
        page = bytearray(data[place:end])
        page[22:26] = bytes(4)
        crc = 0
        for byte in page:
            crc = (crc << 8 & 0xFFFFFFFF) ^ _OGG_CRC[crc >> 24 ^ byte]
        out[place + 22 : place + 26] = struct.pack("<I", crc)
        place = data.find(b"OggS", max(end, place + 1))
    return bytes(out)


def _ogg_entry(value: int) -> int:
    crc = value << 24
    for _ in range(8):
        crc = (crc << 1 ^ 0x04C11DB7 if crc & 0x80000000 else crc << 1) & 0xFFFFFFFF
    return crc


_OGG_CRC = [_ogg_entry(value) for value in range(256)]


def text_samples() -> Iterator[HostileSample]:
    one = next_to(None)
    heavy = partial(one, heavy=True)
    yield heavy("a gzip bomb of 1 GiB", FAILS, "txt.gz", lambda: zeros(1 << 30, wbits=31), "Limits.text_bytes")
    yield one("100,000 empty gzip members", FAILS, "txt.gz", lambda: gzip.compress(b"", mtime=0) * 100_000)
    yield one("a cut gzip", FAILS, "txt.gz", lambda: gzip.compress(b"text" * 1000)[:-9])
    yield one("gzip of gzip", FAILS, "txt.gz", lambda: gzip.compress(gzip.compress(b"text", mtime=0)))
    yield one("text of 16 MiB and a byte", FAILS, "txt", lambda: b"x" * (16 * MIB + 1), "Limits.text_bytes")
    yield heavy("two million placeholders", FAILS, "txt", lambda: b"<image>" * 2_000_000)
    yield one("text that is not UTF-8", FAILS, "txt", lambda: b"\xff\xfe\x00\xd8" * 10)
    yield one("empty text", FAILS, "txt", lambda: b"")
    yield one("a byte order mark alone", FAILS, "txt", lambda: b"\xef\xbb\xbf")
    yield one("zero bytes", EITHER, "txt", lambda: bytes(1000))
    turns = lambda **turn: json.dumps([turn, {"role": "assistant", "content": "answer"}]).encode()
    yield one("an item whose type is a list", FAILS, "json", lambda: turns(role="user", content=[{"type": ["text"]}]))
    yield one("an item whose type is a dict", FAILS, "json", lambda: turns(role="user", content=[{"type": {}}]))
    yield one("an item whose type is null", FAILS, "json", lambda: turns(role="user", content=[{"type": None}]))
    yield one(
        "a text item without text", FAILS, "json", lambda: turns(role="user", content=[{"type": "text", "text": 5}])
    )
    yield one("items that are lists", FAILS, "json", lambda: turns(role="user", content=[["text"]]))
    yield one("content that is a number", FAILS, "json", lambda: turns(role="user", content=5))
    yield one("content that is a dict", FAILS, "json", lambda: turns(role="user", content={"type": "text"}))
    yield one("a role that is a list", FAILS, "json", lambda: turns(role=["user"], content="hi"))
    yield one("a role that is a dict", FAILS, "json", lambda: turns(role={}, content="hi"))
    yield one("a role that is null", FAILS, "json", lambda: turns(role=None, content="hi"))
    yield one("turns that are lists", FAILS, "json", lambda: b"[[1], [2]]")
    yield one("turns that are null", FAILS, "json", lambda: b'{"messages": [null, null]}')
    yield one("messages that are a dict", FAILS, "json", lambda: b'{"messages": {"role": "user"}}')
    yield one("messages that are a number", FAILS, "json", lambda: b'{"messages": 7}')
    yield one("from and value that are lists", FAILS, "json", lambda: b'{"conversations": [{"from": [], "value": []}]}')
    yield one("JSON nested 100,000 deep", FAILS, "json", lambda: b"[" * 100_000 + b"]" * 100_000)
    yield one("dicts nested 100,000 deep", FAILS, "json", lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
    deep = lambda: b'{"messages":[{"role":"user","content":' + b'[{"text":' * 3000 + b'"x"' + b"}]" * 3000 + b"}]}"
    yield one("content nested 3,000 deep", FAILS, "json", deep)
    number = lambda: b'[{"role": "user", "content": "hi", "id": ' + b"1" * 5000 + b"}]"
    yield one("JSON with a number of 5,000 digits", EITHER, "json", number)
    yield one(
        "JSON with 1e999999 and NaN",
        EITHER,
        "json",
        lambda: b'[{"role": "user", "content": "a", "x": [1e999999, NaN]}]',
    )
    yield one("a lone surrogate", FAILS, "json", lambda: b'[{"role": "user", "content": "\\ud800"}]')
    yield one("a lone surrogate in a role", FAILS, "json", lambda: b'[{"role": "\\udfff", "content": "a"}]')
    yield one("JSON as UTF-16", EITHER, "json", lambda: chat("a", "b").decode().encode("utf-16"))
    yield one("JSON that is a number", FAILS, "json", lambda: b"1")
    yield one("JSON that is null", FAILS, "json", lambda: b"null")
    yield one("JSON that is empty", FAILS, "json", lambda: b"")
    yield one("JSON of no turns", FAILS, "json", lambda: b"[]")
    yield heavy(
        "200,000 turns", EITHER, "json", lambda: json.dumps([{"role": "user", "content": "a"}] * 200_000).encode()
    )
    yield heavy(
        "a role of 10 MiB", EITHER, "json", lambda: json.dumps([{"role": "u" * 10 * MIB, "content": "a"}]).encode()
    )
    yield heavy(
        "jsonl of 100,000 lines", EITHER, "jsonl", lambda: chat("a", "b") + b"\n" + (chat("a", "b") + b"\n") * 100_000
    )
    null_calls = [{"role": "user", "content": "call"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]
    yield one("an answer of tool calls alone", FAILS, "json", lambda: json.dumps(null_calls).encode())


def named_samples() -> Iterator[HostileSample]:
    def one(name: str, fate: str, member: str) -> HostileSample:
        return HostileSample(name, fate, lambda: {member: jpeg(40, 40), "txt": b"text"})

    yield one("a field of 5,000 digits", EITHER, "1" * 5000 + ".jpg")
    yield one("a field of 5,000 dots", EITHER, "." * 5000 + "jpg")
    yield one("a field of 60,000 letters", EITHER, "x" * 60_000 + ".jpg")
    yield one("a field of Arabic digits", EITHER, "٣٤.jpg")
    yield one("a field with a superscript", EITHER, "²³.jpg")
    yield one("a field of spaces", EITHER, "   .jpg")
    keys = {
        "a key of 60,000 letters": "k" * 60_000,
        "a key that leads out": "../../../../etc/passwd",
        "an absolute key": "/etc/passwd",
        "a key with a newline": "new\nline",
        "a key with an escape": "\x1b[31mred",
        "a key that is not UTF-8": "caf\udce9",
        "an empty key": "",
        "a key of 2,000 folders": "d/" * 2000 + "k",
    }
    for name, key in keys.items():
        yield HostileSample(name, EITHER, lambda: {"txt": b"text"}, key=key)


def hostile_samples() -> list[HostileSample]:
    """All of them: the corpus grows by what is found."""
    return [*image_samples(), *audio_samples(), *text_samples(), *named_samples()]
