"""`orchdata synth`: same description, same bytes; what is asked for is what is written; errors name the field."""

from __future__ import annotations

import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_expander

from orchdata import bench
from orchdata.bench import Report, Result, make_report
from orchdata.cli.machine import PlanBench, ThroughputBench
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.text.preprocessor import TextPreprocessor
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
    without_places = [
        [{name: each[name] for name in each if name == "__key__" or not name.startswith("__")} for each in samples]
        for samples in (short, long[:6])
    ]
    assert without_places[0] == without_places[1]


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
        ({"kinds": {"a": {"audio": {"hertz": 1}}}}, "kinds.a.audio has unknown field 'hertz'; known are count"),
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


# Benchmarks at tiny sizes: they run, their numbers are what they say, and nothing about time is asserted.


@dataclass(frozen=True)
class Settings:
    seed: int = 3
    folder: Path | None = Path("somewhere")


def test_a_result_has_median_quartiles_and_verdict() -> None:
    result = Result(name="x", unit="ms", values=(4.0, 1.0, 2.0, 3.0, 100.0), demand=3.0)
    assert (result.median, result.spread, result.met) == (3.0, (2.0, 4.0), True)
    assert Result(name="x", unit="x", values=(1.2,), demand=1.3, better="high").met is False
    assert Result(name="x", unit="x", values=(1.0, 2.0)).met is None
    assert Result(name="x", unit="x", values=(1.0, 2.0)).spread == (1.0, 2.0)


def test_a_report_is_json_lines_and_a_table() -> None:
    results = [Result(name="x", unit="ms", values=(2.0,), demand=1.0), Result(name="y", unit="x", values=(2.0,))]
    report = make_report("orchdata bench x", Settings(), results)
    assert not report.met
    assert json.loads(json.dumps(report.to_dict()))["config"] == {"seed": 3, "folder": "somewhere"}
    with pytest.raises(TypeError, match="config must be a dataclass instance"):
        make_report("x", {"seed": 3}, results)


def test_a_report_shows_no_secrets_of_urls() -> None:
    config = ThroughputBench(paths=("https://me:hidden@host/a.tar?signature=hidden", "b.tar"))
    text = json.dumps(make_report("orchdata bench throughput", config, []).to_dict())
    assert "https://host/a.tar?..." in text
    assert "b.tar" in text
    assert "hidden" not in text


def by_name(report: Report) -> dict[str, Result]:
    assert len({result.name for result in report.results}) == len(report.results)
    assert all(np.isfinite(result.values).all() for result in report.results)
    json.dumps(report.to_dict(), allow_nan=False)
    return {result.name.strip(): result for result in report.results}


def test_bench_plan() -> None:
    config = PlanBench(ranks=4, samples_per_rank=8, samples=2_000, repeats=2)
    found = by_name(make_report("orchdata bench plan", config, bench.run_plan(config)))
    assert len(found["plan one step"].values) == 2
    assert found["plan one step"].demand == 20.0
    assert 1.0 <= found["sum over phases of the largest load / lower bound"].median < 2.0
    with pytest.raises(ValueError, match="4 ranks x 8 need 32 samples, got 31"):
        bench.run_plan(PlanBench(ranks=4, samples_per_rank=8, samples=31))


@pytest.mark.parametrize("num_samples", [5, 12])
def test_throughput_of_a_data_set_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_samples: int
) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": "word " * (number % 7 + 1)}) + "\n" for number in range(num_samples)))
    config = ThroughputBench(paths=(str(path),), batch_size=2, workers=1, repeats=1, consumer_ms=1)
    recipe = Recipe(text=TextPreprocessor(max_tokens=30))
    if num_samples < 6:
        with pytest.raises(ValueError, match="batches of 2 need 6 samples, got 5"):
            bench.run_throughput(config, recipe)
        return
    report = make_report("orchdata bench throughput", config, bench.run_throughput(config, recipe))
    assert list(by_name(report)) == ["bare threads", "threads", "processes"]
    rows = report.tables[0].rows
    assert all(isinstance(row[-1], float) and row[-1] >= 1 for row in rows[1:])  # ms of work


def test_throughput_of_a_made_up_data_set_leaves_the_users_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bench, "_compared", lambda config, dataset: [dataset.index().num_rows])
    assert bench.run_throughput(ThroughputBench(samples=8, folder=str(tmp_path / "data"))) == [8]
    assert not (tmp_path / "cache").exists()
    assert os.environ["ORCHDATA_CACHE"] == str(tmp_path / "cache")
