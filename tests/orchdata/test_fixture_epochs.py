"""The main job on real media: a data set written by webdataset's own writer from real photos, speech and text."""

from __future__ import annotations

import json
import warnings
from itertools import cycle, islice
from pathlib import Path

import pytest
import webdataset
from shard_factory import SKIP_ANY

import orchdata as od

RECIPE = od.Recipe(image=od.ImagePreprocessor(max_tokens=256))


@pytest.fixture(scope="module")
def shards(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    photos = sorted((fixtures_dir / "images/raccoon").rglob("*.jpg"))[:60]
    photos += sorted((fixtures_dir / "images/exif-orientation-examples").rglob("*.jpg"))[:8]
    speech = (
        sorted((fixtures_dir / "speech").rglob("*.wav"))[:20] + sorted((fixtures_dir / "speech").rglob("*.flac"))[:6]
    )
    questions = [json.loads(line) for line in (fixtures_dir / "text/gsm8k/test.jsonl").read_text().splitlines()[:120]]
    photo, clip = cycle(photos), cycle(speech)
    folder = tmp_path_factory.mktemp("real")
    urls = []
    for shard, start in enumerate(range(0, len(questions), 40)):
        urls.append(str(folder / f"real-{shard:03d}.tar"))
        with webdataset.TarWriter(urls[-1], encoder=False) as writer:
            for number, question in enumerate(questions[start : start + 40], start):
                sample: dict[str, object] = {"__key__": f"{shard}/{number:05d}"}
                media = number % 4
                marks = ""
                if media in (1, 3):
                    sample["0.jpg"], sample["1.jpg"] = (path.read_bytes() for path in islice(photo, 2))
                    marks += "<image><image>"
                if media in (2, 3):
                    path = next(clip)
                    sample[path.suffix[1:]] = path.read_bytes()
                    marks += "<audio>"
                turns = [
                    {"role": "user", "content": marks + question["question"]},
                    {"role": "assistant", "content": question["answer"]},
                ]
                sample["json"] = json.dumps(turns).encode()
                writer.write(sample)
    return urls


def epoch(urls: list[str], num_ranks: int) -> list[list[str]]:
    """Sorted keys of each global batch."""
    dataset = od.ShardDataset(urls, recipe=RECIPE)
    dataset.index()
    loaders = [
        od.DataLoader(dataset, global_batch_size=24, shuffle=True, dp=(rank, num_ranks), num_threads=2)
        for rank in range(num_ranks)
    ]
    steps = zip(*(loader.steps() for loader in loaders), strict=True)
    return [sorted(key for share in step for batch in share for _, key in batch.sample_ids) for step in steps]


def test_each_sample_once_and_the_same_batches_on_any_ranks(shards: list[str]) -> None:
    alone = epoch(shards, 1)
    keys = [key for step in alone for key in step]
    assert len(keys) == len(set(keys)) == 120  # 5 steps of 24: nothing to drop
    for num_ranks in (2, 3, 8):
        assert epoch(shards, num_ranks) == alone


def matching(fixtures_dir: Path, *patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in fixtures_dir.glob(pattern))


def test_every_fixture_shard_loads_or_says_why(fixtures_dir: Path) -> None:
    paths = matching(fixtures_dir, "wds/**/*.tar", "wds/**/*.tgz", "multimodal/**/*.parquet")
    assert len(paths) >= 9
    delivered: dict[str, int] = {}
    for path in paths:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the loader has no steps")  # of two shards nothing can be read
            warnings.filterwarnings("ignore", "no sample has a token to learn")  # some have images alone
            loader = od.DataLoader(od.ShardDataset(path), batch_size=4, on_error=SKIP_ANY, num_threads=2)
        count = sum(len(batch.sample_ids) for batch in loader)
        failures = loader.stats()["failures"]["samples"]
        for failure in failures:
            assert failure["shard"] == str(path) and failure["key"] and failure["reason"], failure
        assert count + len(failures) == loader.dataset.index().num_samples > 0
        delivered[path.name] = count
    assert delivered["image1.tar"] == 4
    assert delivered["compressed.tar"] == 3  # 0001.txt.gz to 0003.txt.gz
    assert delivered["demo-dataset-images-bytes.parquet"] == 0  # the texts have placeholders of another tool
    assert delivered["demo-dataset.parquet"] == 6
    assert delivered["mpdata.tar"] == delivered["tendata.tar"] == 0  # msgpack and tensors: nothing a recipe reads


def test_placeholders_of_another_tool_are_read_where_the_recipe_names_them(fixtures_dir: Path) -> None:
    (path,) = matching(fixtures_dir, "multimodal/**/demo-dataset-images-bytes.parquet")
    with pytest.raises(IndexError, match=r"TextPreprocessor\(image_placeholder='<__dj__image>'\) reads it"):
        od.ShardDataset(path)[0]
    recipe = od.Recipe(text=od.TextPreprocessor(image_placeholder="<__dj__image>"))
    kinds = [type(part).__name__ for part in od.ShardDataset(path, recipe=recipe)[0].parts]
    assert len(od.ShardDataset(path, recipe=recipe)) == 3 and kinds == ["MediaPart", "TextPart"]
