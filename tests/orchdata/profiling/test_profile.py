"""Profiles: counts against what was written, imbalance against what can be worked out by hand."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from shard_factory import chat, jpeg, write_shard

import orchdata as od
from orchdata.bench import synthetic_index
from orchdata.cli.command import profile_table
from orchdata.loaders.errors import DataError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.index.table import sum_totals
from orchdata.profiling.content import PERCENTILES, chosen_totals, count_reasons
from orchdata.profiling.planned import SCOPES
from orchdata.profiling.profile import Profile, profile
from orchdata.profiling.summary import LABELS, left_out_words

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

RECIPE = od.Recipe(image=od.ImagePreprocessor(patch_size=14, merge=2, min_tokens=1, max_tokens=64))


@pytest.fixture
def small(tmp_path: Path) -> Index:
    """Three texts of 10 bytes, one image of 112 x 112 with a text of 2 bytes, one image that is none."""
    samples = [{"__key__": f"text{number}", "txt": b"0123456789"} for number in range(3)]
    samples += [{"__key__": "image", "jpg": jpeg(112, 112), "txt": b"ok"}]
    samples += [{"__key__": "broken", "jpg": b"this is no image", "txt": b"ok"}]
    path = write_shard(tmp_path / "small.tar", samples)
    return build_index([str(path)], RECIPE)


def test_counts_are_those_of_the_usable_samples(small: Index) -> None:
    result = profile(small, ranks=(1,), batch_size=1)
    assert (result.samples, result.bad, result.shards) == (4, 1, 1)
    assert result.bytes == 3 * 10 + len(jpeg(112, 112)) + 2
    assert (result.modalities["text"].samples, result.modalities["text"].tokens) == (4, 3 * 10 + 2)
    # 112 / 14 = 8 patches a side; merged 2 x 2: 16 tokens.
    image = result.modalities["image"]
    assert (image.samples, image.share, image.parts, image.tokens) == (1, 1 / 4, 1, 16)
    assert result.phases["image"].positions == 64
    assert result.phases["llm"].positions == 3 * 10 + 2 + 16
    assert "audio" not in result.phases
    assert result.phases["image"].percentiles == dict.fromkeys(PERCENTILES, 64)
    assert result.phases["llm"].percentiles["min"] == 10
    assert result.phases["llm"].percentiles["max"] == 18
    assert result.bad_by_reason == {"not an image: starts with '...'": 1}


def test_what_chosen_samples_hold_adds_up_to_what_all_do(small: Index) -> None:
    """Of one index, and of it joined with itself."""
    rows = np.arange(small.num_samples)
    for index in (small, JoinedIndex([small, small])):
        odd = np.flatnonzero(np.arange(index.num_samples) % 2)
        even = np.setdiff1d(np.arange(index.num_samples), odd)
        halves = sum_totals([chosen_totals(index, odd), chosen_totals(index, even)])
        assert halves["bytes"] == index.totals["bytes"]
        assert halves["loss_tokens"] == index.totals["loss_tokens"]
        for name, figures in halves["modalities"].items():
            assert figures.items() <= index.totals["modalities"][name].items()
    image = int(np.flatnonzero(np.diff(small.part_offsets))[0])
    chosen = chosen_totals(small, np.delete(rows, image))
    assert chosen["modalities"]["image"] == {"samples": 1, "parts": 1, "tokens": 16}


def test_reasons_that_differ_in_names_and_numbers_are_of_one_kind() -> None:
    reasons = ["3 images but 2 placeholders", "7 images but 1 placeholders", "no field 'a', 'b'", "no field 'c'"]
    reasons += ["not valid UTF-8: invalid byte at byte 7", "not valid UTF-8: invalid byte at byte 31"]
    counts = count_reasons(DataError("s.tar", "k", "f", reason) for reason in reasons)
    kinds = ("N images but N placeholders", "no field '...'", "not valid UTF-8: invalid byte at byte N")
    assert counts == dict.fromkeys(kinds, 2)


def test_imbalance_of_one_global_batch_worked_out_by_hand(tmp_path: Path) -> None:
    # Lengths 30, 10, 10, 10 on 2 ranks, in any order: distributed in turn, one rank has 30 + 10 and the other 20, so
    # of 40 ranks wait 10; balanced, 30 and 10 + 10 + 10. Four ranks have less than a step: all of it is planned.
    index = build_index([write_texts(tmp_path / "texts.tar", [30, 10, 10, 10])], RECIPE)
    scale, short = profile(index, ranks=(2, 4), batch_size=2, steps=1, most_steps=1).scales
    assert (scale.steps, scale.less_than_a_step, short.less_than_a_step) == (1, False, True)
    assert (scale.samples, short.samples, short.global_batch_size) == (4, 4, 8)
    assert scale.settings["none"].waiting == scale.settings["none"].phases["llm"] == pytest.approx(10 / 40)
    assert scale.settings["joint"].waiting == 0.0
    assert short.settings["joint"].waiting == pytest.approx(1 / 2)  # 30, 10, 10, 10
    in_tokens = profile(index, ranks=(4,), batch_tokens=20, steps=1, most_steps=1).scales[0]
    assert in_tokens.less_than_a_step
    assert in_tokens.settings["joint"].waiting == pytest.approx(1 / 2)


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return synthetic_index(tmp_path_factory.mktemp("omni") / "omni.index", 20_000, seed=3)


COST = od.CostModel(
    image=od.TransformerCost(hidden=1280, layers=32, ffn=5120),
    audio=od.TransformerCost(hidden=1280, layers=32, ffn=5120),
    llm=od.TransformerCost(hidden=4096, layers=32, ffn=11008),
)


def test_without_a_cost_model_every_phase_costs_its_positions(omni: Index) -> None:
    result = profile(omni, ranks=(8,), batch_size=16, steps=2, most_steps=4)
    assert not result.has_cost_model
    assert result.balanced_phases == tuple(result.phases) == ("image", "audio", "llm")
    same = od.CostModel(image=od.PhaseCost(1.0), audio=od.PhaseCost(1.0), llm=od.PhaseCost(1.0))
    assert result.scales == profile(omni, cost=same, ranks=(8,), batch_size=16, steps=2, most_steps=4).scales


@pytest.mark.parametrize("arguments", [{"batch_tokens": 0}, {"ranks": (0,)}, {"steps": 0}])
def test_numbers_below_one_are_refused(omni: Index, arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} must be at least 1"):
        profile(omni, **arguments)  # type: ignore[arg-type]


def test_a_dataset_without_a_usable_sample_is_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "bad.tar", [{"__key__": "broken", "jpg": b"this is no image"}])
    with pytest.raises(ValueError, match="none of the 1 samples is usable"):
        profile(build_index([str(path)], RECIPE))


def write_texts(path: Path, lengths: list[int]) -> str:
    return write_shard(path, [{"__key__": str(number), "txt": b"x" * length} for number, length in enumerate(lengths)])


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """8,000 samples in 16 shards: two for each of 8 groups."""
    return synthetic_index(tmp_path_factory.mktemp("sharded") / "sharded.index", 8_000, seed=3, num_shards=16)


@pytest.mark.slow
def test_a_wider_scope_is_more_even_and_a_narrower_one_nearer(sharded: Index) -> None:
    scale = profile(sharded, ranks=(64,), batch_size=16, streams=8).scales[0]
    assert (scale.groups, scale.streams) == (8, 8)
    assert tuple(scale.scopes) == SCOPES == ("none", "grouped", "grid", "global")
    none, grouped, grid, everywhere = (scale.settings[name].waiting for name in ("none", "grouped", "grid", "joint"))
    assert none > grouped > grid >= everywhere * 0.999
    assert 1.0 <= scale.scopes["grouped"].groups_per_shard <= 1.1
    assert scale.scopes["global"].groups_per_shard > 7.9


def test_phases_apart_beat_the_bound_of_whole_samples(tmp_path: Path) -> None:
    """One album holds most of a rank's images: whole it sets the pace, in parts it does not."""
    samples = [{"__key__": f"{n}", "jpg": jpeg(64, 64), "txt": b"one"} for n in range(15)]
    album = {f"{n}.jpg": jpeg(64, 64) for n in range(20)} | {"json": chat("<image>" * 20, "twenty")}
    shard = write_shard(tmp_path / "a.tar", [*samples, {"__key__": "album", **album}])
    index = build_index([shard], RECIPE)
    cost = od.CostModel(image=od.PhaseCost(10.0), llm=od.PhaseCost(1.0))
    (scale,) = profile(index, cost=cost, ranks=(4,), batch_size=4).scales
    whole, apart = scale.settings["joint"], scale.settings["per_phase"]
    assert whole.phases["image"] > 0.4
    assert apart.phases["image"] < 0.05


def test_locality_worked_out_by_hand(tmp_path: Path) -> None:
    # Two groups of one rank, a stream each: one reads the first shard, the other one the second.
    shards = [write_texts(tmp_path / f"{number}.tar", [10] * 4) for number in range(2)]
    index = build_index(shards, RECIPE)
    near = profile(index, ranks=(2,), batch_size=2, group_size=1).scales[0]
    assert (near.groups, near.streams) == (2, 2)
    assert near.scopes["grouped"].groups_per_shard == 1.0
    # In one stream of 8 samples all are mixed: of a batch of 4 both groups get 2, from wherever they are.
    mixed = profile(index, ranks=(2,), batch_size=4, group_size=1, streams=1, steps=1, most_steps=1).scales[0]
    assert mixed.scopes["grouped"].groups_per_shard == 2.0
    # All ranks in one group: with any scope, it reads all.
    together = profile(index, ranks=(2,), batch_size=2).scales[0]
    assert together.groups == 1
    assert all(scope.groups_per_shard == 1.0 for scope in together.scopes.values())


def test_reads_by_range_are_those_of_plain_tars(tmp_path: Path) -> None:
    plain = build_index([write_texts(tmp_path / "a.tar", [10, 30])], RECIPE)
    result = profile(plain, ranks=(1,)).read_amplification
    assert result.by_range == 1.0  # one member a sample: nothing between
    assert result.whole_shards == (tmp_path / "a.tar").stat().st_size / 40
    pq.write_table(pa.table({"text": ["0123456789"]}), tmp_path / "a.parquet")
    mixed = profile(build_index([str(tmp_path / "a.parquet")], RECIPE), ranks=(1,)).read_amplification
    assert mixed.by_range is None
    (tmp_path / "a.jsonl").write_text('{"text": "0123456789"}\n')
    named = profile(build_index([str(tmp_path / "a.jsonl")], RECIPE), ranks=(1,)).read_amplification
    assert named.by_range is None and named.whole_shards is None  # the media of records are in other files


def test_reads_of_parquet_are_the_column_chunks_of_a_row_group(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = [jpeg(28, 28, seed=number) + rng.bytes(3000) for number in range(96)]
    table = pa.table({"image": pa.array(images, pa.binary()), "text": [f"words {number}" for number in range(96)]})
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=48, **options)
    dataset = od.ShardDataset(tmp_path / "a.parquet")
    reads = profile(dataset.index(), dataset=dataset, ranks=(1,), batch_size=4).read_amplification
    assert reads.by_chunk is not None and 40 < reads.by_chunk < 60


def render(result: Profile) -> str:
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(profile_table(result))
    return console.export_text()


@pytest.mark.slow
def test_scopes_are_shown_where_there_are_groups(sharded: Index) -> None:
    assert "groups a shard" not in render(profile(sharded, ranks=(8,), steps=1, most_steps=1))
    result = profile(sharded, ranks=(8, 16), cost=COST)
    rendered = render(result)
    lines = [line.split() for line in rendered.splitlines()]
    for scope in SCOPES:
        assert ["16", "2", "of", "8", scope] in [line[:5] for line in lines]
    for name, its in result.scales[1].settings.items():
        shown = ["16", *LABELS[name].split(), f"{its.waiting:.1%}"]
        assert shown in [line[: len(shown)] for line in lines]
    assert all(f"- {sentence}" in rendered for sentence in result.summary)


def test_without_ranks_those_are_left_out_whose_step_would_have_more_than_the_data(tmp_path: Path) -> None:
    index = build_index([write_texts(tmp_path / "a.tar", list(range(1, 129)))], RECIPE)
    found = profile(index, batch_size=2)
    assert [scale.ranks for scale in found.scales] == [8, 64]
    assert found.ranks_left_out == (512, 2560)
    assert profile(index, batch_size=64).ranks_left_out == (64, 512, 2560)
    assert profile(index, batch_tokens=sum(range(1, 129)) // 64).ranks_left_out == (512, 2560)
    assert profile(index, ranks=(70,), batch_size=8).ranks_left_out == ()
    assert "Not planned: 512, 2,560 ranks" in left_out_words(found)
