"""Pillow and libsndfile that were built without a format: its files are not bad data."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import soundfile
from PIL import AvifImagePlugin, Image, WebPImagePlugin
from shard_factory import write_shard

import orchdata as od
from orchdata.loaders.errors import PackageError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities import image_decode
from orchdata.loaders.modalities.audio_decode import probe_audio, read_mono
from orchdata.loaders.modalities.image_decode import load_formats, load_rgb, probe_image
from orchdata.loaders.required import load_required

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
    monkeypatch.setattr(image_decode, "import_module", fail)
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
