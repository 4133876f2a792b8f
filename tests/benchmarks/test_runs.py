"""Benchmarks at tiny sizes: all of each runs, and what it compares is right; nothing about time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from children import in_a_child
from ray_clusters import TestCluster

from benchmarks import (
    bins,
    clips,
    decode,
    images,
    index,
    index_text,
    parquet,
    pauses,
    pieces,
    post_balance,
    ray_engine,
    start,
)
from benchmarks.bins import BinsBench, of_a_buffer, of_a_knapsack, of_open_bins, tables
from benchmarks.decode import DecodeBench, Held
from benchmarks.images import CASES, ImagesBench, Pair, picture
from benchmarks.loading.corpus import Corpus
from benchmarks.loading.lanes import Lane
from benchmarks.memory import job as memory_job
from benchmarks.memory import run as memory_run
from benchmarks.profile_report.run import Case, take, tree_of
from benchmarks.remote import run as remote_run
from benchmarks.remote.job import measure as measure_remote
from benchmarks.remote.lanes import ALONE, NEAR, chosen_lanes
from orchdata.bench import WideTable, make_report, synthetic_index
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.hf.images import image_modality
from orchdata.loaders.recipe import AudioPreprocessor, ImagePreprocessor
from orchdata.loaders.text.preprocessor import FastTokenizer


def test_pieces_are_measured_alone() -> None:
    pytest.importorskip("tokenizers")
    undivided, indexed, piece, _ = pieces.run(pieces.PiecesBench(documents=2, tokens=3000, max_tokens=500, repeats=1))
    assert "3,000 tokens" in undivided.note
    assert indexed.note == "12 of 12 alone"
    assert len(piece.values) == 1


# What post_balance adds to a step, measured at a tiny size: all of it runs; no time is asserted.


@pytest.mark.slow
def test_bench_of_post_balance() -> None:
    small = post_balance.PostBalanceBench(
        ranks=(2,), samples_per_rank=6, image_bytes=2_000, words=5, steps=3, training_milliseconds=1.0, repeats=2
    )
    found = {result.name: result for result in post_balance.run(small)}
    assert len(found["2 ranks: post_balance adds to an empty step"].values) == 2
    assert found["2 ranks: to a training step"].note.startswith("a training step sleeps 1 ms; 2 ranks shared ")
    assert found["2 ranks: bytes moved"].median > 0
    assert 0 < found["2 ranks: samples moved"].median < 100
    assert found["2 ranks: samples moved"].note == "of 12 a step"  # 6 of each of 2 ranks
    assert 1.0 <= found["2 ranks: largest load / mean"].median < 1.5
    assert found["2 ranks: by phase, adds to that"].note == "48 parts a step of all ranks"  # 4 of each sample
    assert found["2 ranks: by phase, bytes moved"].median > 0
    with pytest.raises(ValueError, match="steps and repeats must be at least 1, got 0 and 10"):
        post_balance.run(post_balance.PostBalanceBench(steps=0))


# The benchmark of bins at tiny sizes: all of it runs, and what the other methods do is worked out by hand.


def test_every_method_packs_every_list(monkeypatch: pytest.MonkeyPatch) -> None:
    some = {name: bins.lists()[name] for name in ("captions", "documents")}
    monkeypatch.setattr(bins, "lists", lambda: some)
    mine, *asked, others = tables(BinsBench(samples=96, ranks=4, peers=True))
    assert isinstance(mine, WideTable) and isinstance(others, WideTable)
    assert [row[0] for row in mine.rows] == [row[0] for row in others.rows] == list(some)
    assert len(asked) == 4
    for _, fill, l2, bound, opened, *_, above, over_mean, _ in mine.rows:
        assert 0 < fill <= 1 and l2 <= bound <= opened
        assert above >= 0 and over_mean >= 1
    assert all(row[1] <= min(row[3::2]) for row in others.rows)


def test_the_other_methods_worked_out_by_hand() -> None:
    sizes = [5, 6, 4, 5, 10, 1]
    assert of_a_buffer(sizes, 10) == [2, 1, 1, 2, 0, 3]
    assert of_open_bins(sizes, 10) == [0, 1, 1, 0, 2, 3]
    assert of_a_knapsack(sizes, 10) == [0, 1, 1, 0, 2, 3]


# Benchmarks of starts at tiny sizes: they run, and nothing about time is asserted.


@pytest.mark.slow
def test_starting_a_loader() -> None:
    found = {
        result.name.strip(): result
        for result in start.run(start.StartBench(ranks=4, samples_per_rank=8, samples=2_000, repeats=1))
    }
    for size in ("32", "200", "2,000"):
        assert found[f"{size} samples: checksums verified, on the first start of a machine"].median > 0
        assert found[f"{size} samples: anonymous memory of that process"].median > 1.0
        assert found[f"{size} samples: resume after nine tenths of an epoch / at its start"].median > 0
    assert found["anonymous memory, 2,000 samples - 32"].demand == 200.0
    with pytest.raises(ValueError, match="4 ranks x 8 need 32 samples, got 31"):
        start.StartBench(ranks=4, samples_per_rank=8, samples=31)


@pytest.mark.slow
def test_measuring_parquet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "SMALL_FILES", 2)
    found = {result.name.strip(): result for result in parquet.run(parquet.ParquetBench(rows=30, repeats=1))}
    assert found["Parquet, a file of 30 rows, in a child process"].median > 0
    assert found["start of a child, with its first file"].median > 0


# The benchmark of reports at tiny sizes: it runs, and nothing about time is asserted.


@pytest.mark.slow
def test_a_process_profiles_an_index_and_a_mixture(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.index" for name in ("one", "two")]
    for seed, path in enumerate(paths):
        synthetic_index(path, 60, seed)
    page = tmp_path / "page.html"
    for case in (Case(None, paths[:1], None), Case(None, paths, page)):
        took = take(case, "2")
        assert took.cpu_seconds > 0 and took.imports_seconds > 0 and took.anonymous_bytes > 1e6
        assert page.exists() == (case.page is not None)
    with pytest.raises(RuntimeError, match="ended with 1"):
        take(Case(None, [tmp_path / "none.index"], None), "2")


def test_a_commit_is_a_package_of_its_own(tmp_path: Path) -> None:
    tree = tree_of("HEAD", tmp_path / "head")
    assert (tree / "orchdata" / "loaders" / "recipe.py").is_file()
    with pytest.raises(ValueError, match=r"commit 'nothing' cannot be read .* name another commit with --before"):
        tree_of("nothing", tmp_path / "nothing")


# What the benchmark of image processors compares are the same pixels, prepared in two ways.


@pytest.mark.parametrize("name", ["GLM-4V", "LLaVA-NeXT, defaults", "Gemma-4, its own class"])
def test_both_ways_give_the_same_pixels(name: str) -> None:
    kind, settings = CASES[name]
    processor = getattr(transformers, f"{kind}Pil")(**settings)
    modality = image_modality(processor, patch_size=14)
    assert modality.native or "its own class" in name
    ways = Pair(picture(200, 160, "BMP"), modality, processor).ways()
    ours, theirs = ways["ours"](), ways["theirs"]()
    values = theirs["pixel_values"].numpy()
    np.testing.assert_array_equal(ours["pixel_values"].reshape(values.shape), values)


@pytest.mark.slow
def test_a_run_reports_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "SIZES", ((60, 50),))
    monkeypatch.setattr(images, "CASES", {name: CASES[name] for name in ("GLM-4V", "PaliGemma")})
    for table in images.run(ImagesBench(repeats=1)):
        assert [row[0] for row in table.rows] == ["GLM-4V", "PaliGemma"]
        assert all(len(row) == 4 and row[3] > 0 for row in table.rows)


# The decoders that ours are compared to return the same tensors, but for the resizer's rounding.


def test_the_reference_gives_the_same_tensors():
    (sample, *_) = [each for each in decode.read_fields(DecodeBench(samples=8)) if "wav" in each]
    for draft in (False, True):
        image = Held.of(sample["jpg"], ImagePreprocessor(draft=draft, max_tokens=64))
        image.decode()
        ours = torch.from_numpy(image.out["patches"]).view(torch.bfloat16).float()
        theirs = decode.reference_patches(image, image.modality).float()
        assert (ours - theirs).abs().mean() < 0.02  # a level in a hundred of the range
    clip = Held.of(sample["wav"], AudioPreprocessor())
    clip.decode()
    np.testing.assert_allclose(clip.out["features"][:-3], decode.reference_mel(clip, clip.modality)[:-3], atol=1e-4)


@pytest.mark.slow
def test_a_run_reports_stages_and_ratios():
    images, clips, *ratios = decode.run(DecodeBench(samples=6, repeats=1))
    assert [row[0] for row in images.rows][:3] == ["JPEG to pixels", "resizing", "normalising and cutting"]
    assert clips.columns == ("stage", "WAV", "FLAC")
    assert len(ratios) == 8
    assert all(min(result.values) > 0 for result in ratios)


# `python -m benchmarks.index` at tiny sizes, and the data that benchmarks make up.


def test_the_corpus_is_a_dataset_of_what_it_says(tmp_path: Path) -> None:
    urls = Corpus(samples=20, shards=3, width=64, height=48, audio_seconds=0.2, variety=4).write(tmp_path)
    found = ShardDataset(urls).index()
    assert (found.num_samples, len(found.bad_rows())) == (20, 0)
    assert found.totals["modalities"]["image"]["samples"] == 20
    assert 10 <= found.totals["modalities"]["audio"]["samples"] < 20
    with pytest.raises(ValueError, match="shards must be from 1 to the 2 samples, got 3"):
        Corpus(samples=2, shards=3).write(tmp_path)


@pytest.mark.slow
def test_bench_index() -> None:
    config = index.IndexBench(samples=12, words=10, small_shards=3, repeats=2)
    report = make_report("python -m benchmarks.index", config, index.run(config))
    json.dumps(report.to_dict(), allow_nan=False)
    found = {result.name.strip(): result for result in report.results}
    assert found["walk shards and read media headers"].demand == 30_000.0
    assert found["costs under a recipe / the tokenizer alone"].median > 0
    assert found["index tars of one sample each"].demand == 1_000.0
    assert found["again, nothing changed"].median > 0


# `python -m benchmarks.memory` at tiny sizes: which process is the trainer, which a worker, and what they use.

MIB = 2**20
WORKER = "import sys; used = bytearray(b'x') * (int(sys.argv[1]) << 20); print(flush=True); sys.stdin.read()"


def job(tmp_path: Path, batches: int = 2) -> memory_job.MemoryJob:
    return memory_job.MemoryJob(sources=(), folder=tmp_path, batch_size=4, batches=batches, workers=1, seed=0)


def with_a_worker_of(mib: int, _: object) -> Generator[int]:
    """A loader with one worker process, which has allocated so much when the first batch comes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WORKER, str(mib)], **pipes) as worker:  # type: ignore[call-overload]
        worker.stdout.readline()
        yield 4
        yield 4
        worker.communicate()


def test_memory_of_a_worker_is_its_own(tmp_path: Path) -> None:
    def check() -> None:
        loads = [partial(with_a_worker_of, 64), partial(with_a_worker_of, 1)]
        large, small = (memory_job.measure(load, job(tmp_path)) for load in loads)
        (large_worker,), (small_worker,) = large.workers, small.workers
        assert 62 * MIB < large_worker.own - small_worker.own < 66 * MIB
        assert abs(large.trainer.own - small.trainer.own) < 16 * MIB
        assert large.together.pss >= large.trainer.pss + large_worker.pss

    in_a_child(check)  # which has no other children, as a process of many tests may have


def test_a_loader_with_too_few_samples_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="8 samples came in place of 12"):
        memory_job.measure(partial(with_a_worker_of, 1), job(tmp_path, batches=3))


@pytest.mark.slow
def test_the_command_reads_mixtures() -> None:
    memory, settings = memory_run.run(memory_run.MemoryBench(sources="1,3", peers="none", batch_size=4, batches=3))
    lanes = ["orchdata, threads", "orchdata, processes", "orchdata, forked"]
    assert [row[:2] for row in memory.rows] == [(name, number) for number in ("1", "3") for name in lanes]
    assert [row[0] for row in settings.rows] == lanes
    for name, _, *figures in memory.rows:
        assert [cell is None for cell in figures] == [False, False, *[name == "orchdata, threads"] * 2, False]
        assert all(float(cell) > 1 for cell in figures if cell is not None)


# `python -m benchmarks.remote` at tiny sizes: all loaders deliver the samples of two epochs, and the server counts.


@pytest.mark.parametrize(
    ("counts", "delivered"),
    [((2, 2, 2, 2), 8), ((4, 4, 4), 12), ((2, 2, 2, 2, 2, 2), 2)],
    ids=["few", "many", "second"],
)
def test_an_epoch_of_another_size_is_an_error(
    counts: tuple[int, ...], delivered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", "")
    job: Any = SimpleNamespace(cache="", samples=range(10))
    with pytest.raises(RuntimeError, match=f"an epoch delivered {delivered} of 10 samples"):
        measure_remote(Lane("torch", lambda _: iter(counts)), job, 2)


@pytest.mark.slow
def test_every_loader_delivers_two_epochs_from_the_bucket() -> None:
    config = remote_run.RemotePeersBench(samples=16, batch_size=2, workers=1, repeats=1, index_shards=1, latency_ms=1.0)
    report = make_report("python -m benchmarks.remote", config, remote_run.run(config))
    shown = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    speeds, reads = ({row[0]: row[1:] for row in table["rows"]} for table in shown["tables"][:2])
    lanes = chosen_lanes("all")
    there = [name for name, lane in lanes.items() if not lane.absent]
    assert list(speeds) == there
    assert list(reads) == [name for name in there if NEAR not in name]
    # One range a sample, and the headers between its members: both epochs.
    assert reads[ALONE][:2] == [1.0, 1.0]
    assert 1.0 < reads[ALONE][2] < 1.1
    # Whole tars through pipes: 8 of them for 16 samples.
    assert reads["webdataset"][:2] == [0.5, 0.5]
    for name in ("orchdata, threads", "orchdata, processes"):
        assert 0.5 < reads[name][0] <= 1.2
        assert 1.0 <= reads[name][2] < 1.1
    assert {"indexing / fetching the tars whole"} < {result["name"] for result in shown["results"]}


# Benchmarks at tiny sizes measure all of their lanes.


@pytest.mark.slow
def test_ray(ray_cluster: TestCluster) -> None:
    results = ray_engine.run(ray_engine.RayBench(batches=4, mebibytes=1, samples=24, repeats=1))
    assert len(results) == 5 and all(min(each.values) > 0 for each in results)
    assert [each.demand for each in results if each.demand] == [300, 4, 0.75]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_ways_of_indexing_texts() -> None:
    pytest.importorskip("tokenizers")
    results = index_text.run(index_text.IndexTextBench(shards=2, texts=5, words=30, repeats=1))
    assert [len(each.values) for each in results] == [1] * 5
    assert results[0].note == "1.00 times as fast (1.00 to 1.00)"


@pytest.mark.slow
def test_pauses_here_and_in_another_process() -> None:
    pytest.importorskip("tokenizers")
    encode = FastTokenizer.encode
    results = pauses.run(pauses.PausesBench(documents=2, tokens=3000, repeats=1))
    assert len(results) == 3 and all(min(each.values) > 0 for each in results)
    assert all("in another process" in each.note for each in results)
    assert FastTokenizer.encode is encode


@pytest.mark.slow
def test_decoders_of_clips_return_the_same_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    small = clips.ClipBench(seconds=1, fps=10, width=64, height=48, pictures=4, repeats=1)
    (table,) = clips.run(small)
    assert [row[0] for row in table.rows][:3] == ["mp4", "webm", "gif"] and len(table.rows) == 5
    assert all(row[number] > 0 for row in table.rows for number in range(1, 7))
    monkeypatch.setattr("benchmarks.clips._all", lambda *_: np.zeros((4, 48, 64, 3), np.uint8))
    with pytest.raises(ValueError, match="all shows other pictures"):
        clips.run(small)
