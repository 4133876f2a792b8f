"""Media headers equal what Pillow and soundfile say of the whole file."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import soundfile
from PIL import Image, ImageOps, PngImagePlugin

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.audio import AudioPreprocessor
from orchdata.loaders.modalities.audio_decode import Sound, read_mono
from orchdata.loaders.modalities.image import ImagePreprocessor
from orchdata.loaders.modalities.modality import Modality, read_header

IMAGE, AUDIO = ImagePreprocessor, AudioPreprocessor


class Size(NamedTuple):
    width: int
    height: int


class Length(NamedTuple):
    frames: int
    rate: int


def header(kind: type[Modality], data: bytes, limits: Limits | None = None) -> Any:
    limits = limits or Limits()
    facts = read_header(kind, len(data), lambda count: data[:count], limits)
    kind().count_header(facts, limits)  # which holds it against the limits
    return (Size if kind is IMAGE else Length)(*facts)


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
        with Sound(data) as sound:
            frames = 0
            while got := len(sound.read(65536)):
                frames += got
            return frames, sound.samplerate
    except Exception:
        return None


HOSTILE = """
import sys, resource
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
sys.path.insert(0, {tests!r})
from test_headers import *
warnings.simplefilter("error")
print(check_hostile(Path({folder!r}), {kind}))
"""


def check_hostile(folder: Path, kind: type[Modality]) -> int:
    """Compare every file with the oracle; returns how many have a header."""
    count = 0
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        data = path.read_bytes()
        expected = decoded_frames(data) if kind == AUDIO else displayed_size(data)
        try:
            scanned = header(kind, data)
        except DecodeError as error:
            nothing_in_it = expected is None or (kind == AUDIO and expected[0] == 0)
            known = path.suffix in SKIPPED or path.name in CUT
            assert nothing_in_it or "above Limits" in str(error) or known, (path, error)
            continue
        assert expected in (
            None,
            (scanned.frames, scanned.rate) if kind == AUDIO else (scanned.width, scanned.height),
        ), path
        count += 1
    return count


SKIPPED = {*".psd .fli .ico .icns .tga .dcx .pcx .eps .xbm .xpm .msp .sgi .dds .ftex".split()}


@pytest.mark.slow_cases("pillow", "tinytag")
@pytest.mark.parametrize("folder", ["hostile/pillow", "hostile/minimp3-vectors", "hostile/tinytag"])
def test_hostile_files_are_errors_or_right(fixtures_dir: Path, folder: str) -> None:
    """In a process of limited memory; what has a header must have the right one, or fail to decode."""
    kind = IMAGE if folder == "hostile/pillow" else AUDIO
    script = HOSTILE.format(tests=str(Path(__file__).parent), folder=str(fixtures_dir / folder), kind=kind.__name__)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 5


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def test_orientation_in_xmp_and_in_text_chunks() -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    jpeg = encoded(Image.new("RGB", (40, 20)), "JPEG", xmp=xmp)
    text = PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", xmp.decode())
    png = encoded(Image.new("RGB", (40, 20)), "PNG", pnginfo=text)
    for data in (jpeg, png):
        size = header(IMAGE, data)
        assert (size.width, size.height) == displayed_size(data) == (20, 40)


def sound(form: str, subtype: str, frames: int = 5_000, rate: int = 16_000, channels: int = 1) -> bytes:
    out = io.BytesIO()
    wave = np.sin(np.arange(frames * channels).reshape(frames, channels) / 9) / 2
    soundfile.write(out, wave, rate, format=form, subtype=subtype)
    return out.getvalue()


KINDS = (
    "WAV PCM_16, WAV PCM_U8, WAV PCM_24, WAV FLOAT, WAV ULAW, WAV IMA_ADPCM, WAVEX PCM_16, RF64 PCM_16, FLAC PCM_16, "
    "OGG VORBIS, OGG OPUS, MP3 MPEG_LAYER_III, AIFF PCM_16, AU PCM_16"
)


@pytest.mark.parametrize("kind", KINDS.split(", "))
@pytest.mark.parametrize("channels", [1, 2])
def test_audio_of_every_kind(kind: str, channels: int) -> None:
    data = sound(*kind.split(), rate=16_000, channels=channels)
    length = header(AUDIO, data)
    assert (length.frames, length.rate) == decoded_frames(data)


def test_flac_without_a_total_is_counted() -> None:
    data = bytearray(sound("FLAC", "PCM_16"))
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    assert header(AUDIO, bytes(data)) == (5_000, 16_000)


# Of hostile: files that their authors cut for their test suite, or that are not read to their end. The first four have
# a variable bit rate and no tag: the decoder stops early.
CUT = {
    *"l3-test45.bit l3-he_mode.bit l3-nonstandard-compl-sideinfo-size.bit l3-nonstandard-he_44_48khz.bit".split(),
    *"id3_frames.mp3 detect_ogg_opus.x flac_application.flac variable-block.flac".split(),
    *"vbr_xing_header_2channel.mp3 vbri.mp3".split(),
}
WHOLE_OR_CUT = (
    "WAV PCM_16, WAV ULAW, WAV IMA_ADPCM, WAVEX PCM_16, RF64 PCM_16, W64 PCM_16, AIFF PCM_16, AIFF ULAW, AU PCM_16, "
    "CAF PCM_16, CAF ALAC_16, NIST PCM_16, SVX PCM_16, MP3 MPEG_LAYER_III, OGG VORBIS, OGG OPUS"
)


def noise(form: str, subtype: str, frames: int = 80_000) -> bytes:
    out = io.BytesIO()
    wave = np.random.default_rng(0).normal(size=frames) * 0.1 + np.sin(np.arange(frames) / 20) * 0.3
    soundfile.write(out, wave, 16_000, format=form, subtype=subtype)
    return out.getvalue()


@pytest.mark.parametrize("kind", WHOLE_OR_CUT.split(", "))
def test_a_cut_clip_is_refused_by_the_index_and_by_the_decoder(kind: str) -> None:
    data = noise(*kind.split())
    assert header(AUDIO, data).frames >= 80_000
    assert len(read_mono(data, Limits())[0]) >= 80_000
    for share in (0.05, 0.2, 0.5, 0.9):
        cut = data[: int(len(data) * share)]
        with pytest.raises(DecodeError, match=r"cut: |damaged audio|without a single frame"):
            header(AUDIO, cut)
        with pytest.raises(DecodeError, match=r"cut: |audio"):
            read_mono(cut, Limits())


@pytest.mark.parametrize("form", ["WAV", "AIFF", "AU", "W64", "RF64"])
def test_a_clip_may_lack_50_ms_or_1_percent(form: str) -> None:
    data = noise(form, "PCM_16")  # 5 s, 2 bytes a frame
    for milliseconds, passes in ((40, True), (60, False)):
        cut = data[: len(data) - 32 * milliseconds]
        if passes:
            assert header(AUDIO, cut).frames == 80_000 - 16 * milliseconds
        else:
            with pytest.raises(DecodeError, match=r"cut: 4\.940 of 5\.000 s of sound are there, 99% of"):
                header(AUDIO, cut)


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 0x80000000, 0xFFFFFFFF - 36])
def test_a_wav_written_to_a_pipe_declares_nothing(size: int) -> None:
    data = bytearray(noise("WAV", "PCM_16", 8_000))
    at = data.index(b"data") + 4
    data[at : at + 4] = size.to_bytes(4, "little")
    data[4:8] = min(0xFFFFFFFF, size + at).to_bytes(4, "little")
    assert header(AUDIO, bytes(data)) == (8_000, 16_000)
    assert len(read_mono(bytes(data), Limits())[0]) == 8_000


def ogg_pages(data: bytes) -> list[bytes]:
    pages = []
    while data:
        end = 27 + data[26] + sum(data[27 : 27 + data[26]])
        pages.append(data[:end])
        data = data[end:]
    return pages


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_an_ogg_that_ends_with_a_whole_page_passes_and_joined_ones_do_not(subtype: str) -> None:
    data = noise("OGG", subtype)
    pages = ogg_pages(data)
    whole = [end for end in range(4, len(pages)) if pages[end - 1][26 + pages[end - 1][26]] != 255]
    refused = 0
    for end in range(4, len(pages)):
        captured = b"".join(pages[:end])
        if end in whole:  # as of a stream that was piped and stopped: no flag says that more followed
            assert 0 < header(AUDIO, captured).frames < 80_000
        else:
            refused += 1
            with pytest.raises(DecodeError, match="it ends inside an Ogg packet"):
                header(AUDIO, captured)
    assert header(AUDIO, data + bytes(100)).frames == 80_000
    assert header(AUDIO, data + b"OggS\0\0").frames == 80_000
    with pytest.raises(DecodeError, match="it ends inside an Ogg page"):
        header(AUDIO, b"".join(pages[:5]) + b"OggS\0\0")
    with pytest.raises(DecodeError, match="several Ogg streams after one another"):
        header(AUDIO, data + data)
    assert whole or refused


def test_an_mp3_without_a_tag_cannot_be_known_to_be_cut() -> None:
    data = mp3(5)
    tag = data.index(b"Info") if b"Info" in data[:200] else data.index(b"Xing")
    untagged = data[:tag] + b"none" + data[tag + 4 :]
    assert header(AUDIO, untagged[: len(data) // 2]).frames < 80_000 * 2 // 3
    with pytest.raises(DecodeError, match="cut: "):
        header(AUDIO, data[: len(data) // 2])


def test_a_flac_header_alone_is_refused() -> None:
    """A header of 42 bytes that tells 100 hours must not have memory taken for them."""
    head = bytearray(noise("FLAC", "PCM_16")[:42])
    head[21] = head[21] & 0xF0 | 4  # 1 << 34 frames
    with pytest.raises(DecodeError, match="cannot hold"):
        header(AUDIO, bytes(head) + bytes(1_000))


def mp3(seconds: float, mode: str = "CONSTANT") -> bytes:
    out = io.BytesIO()
    wave = np.random.default_rng(0).normal(0, 0.2, int(seconds * 16_000)).astype(np.float32)
    wave[len(wave) // 4 :] *= 1e-3  # the first frames take more bits than the others
    soundfile.write(out, wave, 16_000, "MPEG_LAYER_III", format="MP3", compression_level=0.5, bitrate_mode=mode)
    return out.getvalue()


def test_a_vbr_mp3_without_a_tag_is_refused_where_the_decoder_stops_early() -> None:
    whole = mp3(4, "VARIABLE")
    assert header(AUDIO, whole).frames == 4 * 16_000
    untagged = whole[whole.index(b"\xff\xf3", 4) :]  # without the first frame, which holds the tag
    with pytest.raises(DecodeError, match=r"VBR MP3 without a Xing tag: the decoder may stop before .* ffmpeg -i"):
        header(AUDIO, untagged)
    with pytest.raises(DecodeError, match="VBR MP3 without a Xing tag"):
        read_mono(untagged, Limits())


def test_consecutive_mp3s_are_an_error_and_tags_are_not() -> None:
    first, second = mp3(2), mp3(3)
    for joined in (first + second, first + b"ID3\x04\0\0\0\0\0\x0a" + bytes(10) + second):
        with pytest.raises(DecodeError, match="several MP3 streams after one another"):
            header(AUDIO, joined)
        with pytest.raises(DecodeError, match="several MP3 streams after one another"):
            read_mono(joined, Limits())
    tagged = first + b"APETAGEX" + bytes(400) + b"TAG" + bytes(125)
    assert header(AUDIO, tagged).frames == 2 * 16_000
    assert len(read_mono(tagged, Limits())[0]) == 2 * 16_000


def test_a_flac_followed_by_a_tag_is_read_to_the_length_in_its_header() -> None:
    data = noise("FLAC", "PCM_16")
    frames = header(AUDIO, data).frames
    for tail in (b"TAG" + bytes(125), b"TAG" + b"\xff" * 125):
        assert header(AUDIO, data + tail).frames == frames
        assert len(read_mono(data + tail, Limits())[0]) == frames
    with pytest.raises(DecodeError):
        read_mono(data[: len(data) * 3 // 4] + bytes(200), Limits())


def test_no_function_of_pythons_is_called_out_of_libsndfile() -> None:
    clip = sound("FLAC", "PCM_16", 40_000)  # what a signal raised there would be forgotten, and the clip have a gap
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        with soundfile.SoundFile(io.BytesIO(clip)) as opened:
            opened.read()
        by_way_of_python, called = called, []
        read_mono(clip, Limits())
    finally:
        sys.setprofile(None)
    assert "vio_read" in by_way_of_python
    assert "close" in called and not [name for name in called if name.startswith("vio")]
