"""`orchdata synth`: same description, same bytes; what is asked for is what is written; errors name the field."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_expander

from orchdata.synth import make_sample, read_description, synthesize


def describe(**changes: Any) -> dict[str, Any]:
    base = {"seed": 3, "samples": 12, "shards": 2, "kinds": {"plain": {"words": 5}}}
    return base | changes


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """All samples of all shards in order, grouped by webdataset's own reader."""
    samples: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.tar")):
        with path.open("rb") as stream:
            samples += group_by_keys(tar_file_expander([{"url": path.name, "stream": stream}]))
    return samples


def fields_of(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample without where it was read from."""
    return {name: value for name, value in sample.items() if name == "__key__" or not name.startswith("__")}


def test_every_shipped_description_is_valid() -> None:
    for path in (Path(__file__).parents[2] / "datasets").glob("*.yaml"):
        read_description(path)


def test_same_description_same_bytes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        synthesize("omni", tmp_path / name, samples=16)
    first, second = (sorted((tmp_path / name).glob("*.tar")) for name in ("first", "second"))
    assert len(first) == 4
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_a_shorter_dataset_is_a_prefix_of_a_longer_one(tmp_path: Path) -> None:
    synthesize("omni", tmp_path / "short", samples=6)
    synthesize("omni", tmp_path / "long", samples=14)
    short, long = (read_samples(tmp_path / name) for name in ("short", "long"))
    assert [fields_of(sample) for sample in short] == [fields_of(sample) for sample in long[:6]]


def test_the_report_counts_what_was_written(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = synthesize("omni", tmp_path, samples=40, progress=lambda done, total: calls.append((done, total)))
    samples = read_samples(tmp_path)
    assert report.samples == len(samples) == 40
    assert calls == [(done, 40) for done in range(1, 41)]
    assert sum(report.kinds.values()) == 40

    pixels, seconds, images, clips = 0, 0.0, 0, 0
    for sample in samples:
        for field, data in sample.items():
            if field.split(".")[-1] in ("jpg", "png"):
                width, height = Image.open(io.BytesIO(data)).size
                pixels, images = pixels + width * height, images + 1
            elif field.split(".")[-1] in ("flac", "wav"):
                seconds, clips = seconds + soundfile.info(io.BytesIO(data)).duration, clips + 1
    assert (report.images, report.image_pixels, report.audio_clips) == (images, pixels, clips)
    assert report.audio_seconds == pytest.approx(seconds, abs=1e-3 * clips)
    assert report.payload_bytes == sum(
        len(data) for sample in samples for field, data in sample.items() if not field.startswith("__")
    )
    json.dumps(report.to_dict())


def test_chats_have_a_placeholder_for_every_medium() -> None:
    kind = {"style": "chat", "words": 20, "turns": 2, "image": {"count": 3, "width": 32}, "audio": {"seconds": 0.1}}
    _, fields, _ = make_sample(read_description(describe(kinds={"chat": kind})), 0)
    assert sorted(fields) == ["0.jpg", "1.jpg", "2.jpg", "flac", "json"]
    chat = json.loads(fields["json"])
    assert [turn["role"] for turn in chat] == ["user", "assistant"] * 2
    text = " ".join(turn["content"] for turn in chat)
    assert (text.count("<image>"), text.count("<audio>")) == (3, 1)
    assert sum(len(turn["content"].split()) for turn in chat if turn["role"] == "assistant") == 20


def test_sizes_rates_and_formats_are_as_described() -> None:
    kind = {
        "words": 3,
        "image": {"width": 100, "aspect": 2, "formats": "png"},
        "audio": {"seconds": 0.5, "rates": 22050, "formats": "wav"},
    }
    _, fields, _ = make_sample(read_description(describe(kinds={"one": kind})), 0)
    image, sound = Image.open(io.BytesIO(fields["png"])), soundfile.info(io.BytesIO(fields["wav"]))
    assert (image.format, image.size) == ("PNG", (100, 50))
    assert (sound.format, sound.samplerate, sound.frames) == ("WAV", 22050, 11025)
    assert len(fields["txt"].split()) == 3


def test_jpegs_weigh_about_what_photographs_do() -> None:
    kind = {"words": 1, "image": {"width": 640}}
    description = read_description(describe(kinds={"one": kind}))
    bits = []
    for index in range(5):
        _, fields, counts = make_sample(description, index)
        bits.append(8 * len(fields["jpg"]) / counts["image_pixels"])
    assert 0.8 < np.mean(bits) < 4  # bits per pixel


def test_other_shards_in_the_folder_are_not_mixed_in(tmp_path: Path) -> None:
    synthesize(describe(shards=3), tmp_path)
    synthesize(describe(shards=3), tmp_path)  # the same names are replaced
    with pytest.raises(FileExistsError, match=r"shard-000002\.tar"):
        synthesize(describe(shards=2), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sed": 1}, "unknown field 'sed'"),
        ({"seed": -1}, "seed, samples, shards must be integers of 0 or more"),
        ({"samples": 2.5}, "must be integers"),
        ({"shards": 13}, "shards must be from 1 to the 12 samples, got 13"),
        ({"kinds": {}}, "kinds must name at least one"),
        ({"kinds": {"a": {"style": "poem"}}}, "kinds.a.style must be text or chat"),
        ({"kinds": {"a": {"words": "many"}}}, "kinds.a.words must be a number or one of"),
        ({"kinds": {"a": {"words": {"uniform": [3]}}}}, "kinds.a.words must be a number or one of"),
        ({"kinds": {"a": {"words": {"normal": [1, 2]}}}}, "kinds.a.words must be a number or one of"),
        ({"kinds": {"a": {"audio": {"seconds": {"choice": {"1": 1}}}}}}, "audio.seconds must be a number"),
        ({"kinds": {"a": {"image": {"formats": {"gif": 1}}}}}, "kinds.a.image.formats must be of jpg, png"),
        (
            {"kinds": {"a": {"audio": {"hertz": 1}}}},
            "kinds.a.audio has unknown field 'hertz'; known are count, seconds",
        ),
        ({"kinds": {"a": {"image": 3}}}, "kinds.a.image must be a mapping"),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_description(describe(**changes))


def test_errors_in_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("kinds: {a: {weight: much}}")
    with pytest.raises(ValueError, match="mine.yaml: kinds.a.weight must be a number"):
        read_description(path)
    path.write_text("kinds: [}")
    with pytest.raises(ValueError, match=r"mine\.yaml: not readable as YAML"):
        read_description(path)
    with pytest.raises(FileNotFoundError):
        read_description(tmp_path / "absent.yaml")


def test_a_number_of_samples_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        synthesize("omni", tmp_path, samples=0)
