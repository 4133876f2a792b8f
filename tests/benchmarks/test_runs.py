"""Benchmarks at tiny sizes: all of each runs, and what it compares is right; nothing about time is asserted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from benchmarks import bins, decode, images, parquet, post_balance, start
from benchmarks.bins import BinsBench, of_a_buffer, of_a_knapsack, of_open_bins, tables
from benchmarks.decode import DecodeBench, Held
from benchmarks.images import CASES, ImagesBench, Pair, picture
from benchmarks.pieces import PiecesBench, run
from benchmarks.profile_report.run import Case, take, tree_of
from orchdata.bench import WideTable, synthetic_index
from orchdata.hf.images import image_modality
from orchdata.loaders.recipe import AudioPreprocessor, ImagePreprocessor


def test_pieces_are_measured_alone() -> None:
    pytest.importorskip("tokenizers")
    undivided, indexed, piece, _ = run(PiecesBench(documents=2, tokens=3000, max_tokens=500, repeats=1))
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
