"""Audio that claims more than it holds, or becomes more than it is."""

# ruff: noqa: E731 - small makers of bytes are next to the one line that takes them
from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import soundfile
from hostile import ARRIVES, EITHER, FAILS, MIB, HostileSample, next_to


def bare_flac(samples: int = 16_000 * 3600 * 2, rate: int = 16_000) -> bytes:
    """42 bytes: a stream header that claims two hours, and no frame."""
    packed = rate << 44 | 0 << 41 | 15 << 36 | samples
    return b"fLaC\x80\0\0\x22" + struct.pack(">HH", 4096, 4096) + bytes(6) + packed.to_bytes(8, "big") + bytes(16)


def wav_header(data_bytes: int, *, rate: int = 16_000, channels: int = 1, bits: int = 16) -> bytes:
    block = channels * bits // 8 & 0xFFFF
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * block & 0xFFFFFFFF, block, bits)
    size = min(36 + data_bytes, 0xFFFFFFFF)
    return b"RIFF" + struct.pack("<I", size) + b"WAVEfmt \x10\0\0\0" + form + b"data" + struct.pack("<I", data_bytes)


def sound(format_: str, subtype: str | None = None, *, seconds: float = 10.0, rate: int = 16_000) -> bytes:
    wave = np.sin(np.arange(round(seconds * rate)) * 0.05).astype(np.float32) / 3
    out = io.BytesIO()
    soundfile.write(out, wave, rate, format=format_, subtype=subtype)
    return out.getvalue()


@cache
def silence(seconds: int, rate: int = 16_000) -> bytes:
    """FLAC of nothing: hours in some hundred kilobytes."""
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", rate, 1, format="FLAC") as file:
        block = np.zeros(rate * 60, np.int16)
        for _ in range(seconds // 60):
            file.write(block)
    return out.getvalue()


def audio_samples() -> Iterator[HostileSample]:
    one = next_to(b"a clip")
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
    yield one("WAV at 1 Hz, three hours", EITHER, "wav", slow, heavy=True)
    yield one("WAV at 44,099 Hz", ARRIVES, "wav", lambda: wav_header(88_198, rate=44_099) + bytes(88_198))
    chunks = lambda: b"RIFF\xff\xff\xff\x7fWAVE" + b"junk\0\0\0\0" * 100_000
    yield one("WAV of 100,000 empty chunks", FAILS, "wav", chunks)
    yield one(
        "WAV with a chunk of 4 GiB before its data", FAILS, "wav", lambda: b"RIFF\0\0\0\0WAVEjunk\xff\xff\xff\xff"
    )
    nan = lambda: audio_of(np.full(16_000, np.nan, np.float32))
    yield one("WAV of NaN", FAILS, "wav", nan, "NaN")
    late = lambda: (whole := bytearray(sound("OGG")))[:6] + b"\xff" * 7 + b"\x7f" + whole[14:]
    yield one("OGG whose first page is its last sample", EITHER, "ogg", lambda: bytes(late()))
    yield one("OGG with a last page at 2^62", EITHER, "ogg", lambda: last_page(sound("OGG"), 2**62))
    yield one("OGG with a last page at 2^40", FAILS, "ogg", lambda: last_page(sound("OGG"), 2**40), "audio_seconds")
    yield one("OGG of 10 s with a last page at 50", FAILS, "ogg", lambda: last_page(sound("OGG"), 50 * 16_000))
    yield one("OGG of page headers alone", FAILS, "ogg", lambda: (b"OggS" + bytes(23)) * 10_000)
    yield HostileSample(
        "eight times three hours at 1 Hz in one sample",
        FAILS,
        lambda: {f"{n}.wav": slow() for n in range(8)} | {"txt": b"<audio>" * 8},
        "Limits.sample_decoded_bytes",
        heavy=True,
    )
    yield HostileSample(
        "eight times three hours of silence in one sample",
        FAILS,
        lambda: {f"{n}.flac": silence(10_800) for n in range(8)} | {"txt": b"<audio>" * 8},
        "Limits.sample_decoded_bytes",
        heavy=True,
    )


def audio_of(wave: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, wave, 16_000, format="WAV", subtype="FLOAT")
    return out.getvalue()


def last_page(ogg: bytes, position: int) -> bytes:
    """An Ogg stream whose last page says that it ends at another sample; its checksum is right."""
    start = ogg.rindex(b"OggS")
    page = bytearray(ogg[start:])
    page[6:14] = struct.pack("<q", position)
    page[22:26] = bytes(4)
    crc = 0
    for byte in page:
        crc ^= byte << 24
        for _ in range(8):
            crc = (crc << 1 ^ 0x04C11DB7 if crc & 0x80000000 else crc << 1) & 0xFFFFFFFF
    page[22:26] = struct.pack("<I", crc)
    return ogg[:start] + bytes(page)
