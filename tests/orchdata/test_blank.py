"""`ErrorPolicy(blank=...)`: a sample is delivered like one that fails to decode, and is never read; all else stays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_factory import RECIPE, jpeg, omni_shards, write_shard

import orchdata as od

POISON = ("omni-000001.tar", "s1-0006")  # a picture and a text
PIECES = ("long.tar", "b")
FORKED = {"num_workers": 1, "num_threads": 1, "multiprocessing_context": "fork"}

pytestmark = pytest.mark.usefixtures("same_cache")


@pytest.fixture(autouse=True)
def own_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests elsewhere that expect one."""
    monkeypatch.setattr("orchdata.notices._warned", set())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> od.ShardDataset:
    """Its picture cannot be decoded, which only decoding shows."""
    folder = tmp_path_factory.mktemp("omni")
    omni_shards(folder, shards=3, samples=10)
    samples: list[dict[str, Any]] = [
        {"__key__": f"s1-{n:04d}", "jpg": jpeg(80, 60 + n, n), "txt": b"word " * (n + 1)} for n in range(10)
    ]
    cut = jpeg(300, 200, 9)
    samples[6]["jpg"] = cut[: len(cut) // 2]
    write_shard(folder / "omni-000001.tar", samples)
    dataset = od.ShardDataset(str(folder / "*.tar"), recipe=RECIPE)
    dataset.index()
    return dataset


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    long = [{"__key__": key, "txt": f"{key} ".encode() * 40} for key in "abcd"]
    write_shard(folder / "long.tar", long)
    return folder


def loaders(dataset: Any, ranks: int = 1, blank: Any = (POISON,), action: str = "raise", **options: Any) -> list[Any]:
    policy = od.ErrorPolicy(action, max_failures=0, blank=blank)  # type: ignore[arg-type]
    common = {"global_batch_size": 7, "num_threads": 0, "shuffle": True, "seed": 3} | options
    return [od.DataLoader(dataset, dp=(rank, ranks), on_error=policy, **common) for rank in range(ranks)]


def keys_of(steps: Sequence[Any]) -> list[str]:
    return [key for shares in steps for share in shares for batch in share for _, key in batch.sample_ids]


def steps_of(ours: Sequence[Any]) -> list[Any]:
    return list(zip(*(loader.steps() for loader in ours), strict=True))


def pieces_of(batch: od.Batch, column: torch.Tensor) -> list[torch.Tensor]:
    """What a packed column has of each sample, without what follows them."""
    lengths = [stop - first for first, stop in batch.token_ranges] or batch.llm.cu_seqlens.diff().tolist()
    return list(column[: sum(lengths)].split(lengths))[: len(batch.sample_ids)]


def samples_of(batch: od.Batch) -> list[str]:
    return [key for _, key in batch.sample_ids]


@pytest.mark.parametrize("options", [{}, {"num_threads": 2}, FORKED], ids=["inline", "threads", "process"])
@pytest.mark.parametrize("layout", [None, od.Padded(), "function"], ids=["packed", "padded", "function"])
def test_all_but_the_sample_comes_as_planned(dataset: od.ShardDataset, layout: Any, options: dict[str, Any]) -> None:
    collate = {"function": lambda samples: [sample.key for sample in samples], None: od.Packed()}.get(layout, layout)
    for ranks, action in ((1, "raise"), (2, "skip")):
        ours = loaders(dataset, ranks, action=action, collate_fn=collate, **options)
        whole = loaders(dataset, ranks, (), collate_fn=collate)
        assert {each.plan_at(0, 2).hash for each in (*ours, *whole)} == {ours[0].plan_at(0, 2).hash}
        steps = steps_of(ours)
        if layout == "function":
            keys = [key for shares in steps for share in shares for batch in share for key in batch]
        else:
            keys = keys_of(steps)
        index = dataset.index()
        assert sorted(keys) == sorted(index.key(row) for row in range(30) if index.key(row) != POISON[1])
        if layout is None:
            tokens = sum(batch.loss_tokens for shares in steps for share in shares for batch in share)
            planned = sum(shares[0][0].global_loss_tokens for shares in steps)
            (row,) = index.find_all(*POISON)
            assert planned - tokens == int(index.loss_tokens[row]) > 0, "it stays in the denominator"
        found = [each.stats()["failures"] for each in ours]
        assert sum(each["blank"] for each in found) == 1 and all(each["count"] == 0 for each in found)
        assert not any(each["samples"] or each["by_reason"] for each in found)


def test_without_the_list_it_fails(dataset: od.ShardDataset) -> None:
    (loader,) = loaders(dataset, blank=())
    with pytest.raises(od.DataError, match="'s1-0006', field 'jpg'"):
        list(loader)
    (again,) = loaders(dataset)
    step = next(n for n in range(len(again)) if dataset.index().find_all(*POISON)[0] in again.plan_at(0, n).row)
    assert POISON[1] not in keys_of([[again.step_at(0, step)]])
    with pytest.raises(od.DataError, match="'s1-0006', field 'jpg'"):
        loader.step_at(0, step)


def test_it_is_never_read(dataset: od.ShardDataset) -> None:
    def used(*left_out: tuple[str, str], **options: Any) -> int:
        (loader,) = loaders(dataset, shuffle=False, global_batch_size=1, **options)
        list(loader)
        return int(loader.stats()["reads"]["used_bytes"])

    assert used() == used(blank=(), quarantine=[POISON])
    assert used(blank=[POISON, ("omni-000000.tar", "s0-0001")]) < used()


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_where_ranks_encode_for_each_other_each_masks_from_the_list(dataset: od.ShardDataset, action: str) -> None:
    options = {"balance": od.Balance(assignment="per_phase"), "global_batch_size": 10}
    ours = loaders(dataset, 2, (POISON, ("omni-000001.tar", "s1-0003")), action=action, **options)
    blank = {POISON[1], "s1-0003"}
    kept: list[str] = []
    invalid = 0
    for step in range(len(ours[0])):
        for loader in ours:
            for batch in loader.step_at(0, step):
                invalid += int((~batch.media["image"].valid).sum())
                for key, labels in zip(samples_of(batch), pieces_of(batch, batch.llm.labels), strict=True):
                    assert bool((labels == -100).all()) == (key in blank)
                    kept.append(key)
    assert len(kept) == 30 and invalid == 2, "the plan stays, and nothing of their parts is decoded"


def test_all_pieces_and_windows_of_a_key_are_blank(texts: Path) -> None:
    text = od.TextPreprocessor(max_tokens=30, overflow="split")
    split = od.ShardDataset(str(texts / "long.tar"), od.Recipe(image=None, audio=None, text=text))
    (whole,), (ours,) = loaders(split, blank=()), loaders(split, blank=[PIECES])
    pieces = keys_of(steps_of([whole]))
    assert pieces.count("b") > 1
    assert sorted(keys_of(steps_of([ours]))) == sorted(key for key in pieces if key != "b")
    assert ours.stats()["failures"]["blank"] == pieces.count("b")

    plain = od.ShardDataset(str(texts / "long.tar"), od.Recipe(image=None, audio=None))
    layout = {"collate_fn": od.Packed(length=16, concatenate=True), "global_batch_size": 2}
    (whole,), (ours,) = loaders(plain, blank=(), **layout), loaders(plain, blank=[PIECES], **layout)
    came = 0
    for one, other in zip(whole.steps(), ours.steps(), strict=True):
        for before, after in zip(one, other, strict=True):
            columns = (after.llm.input_ids, after.llm.labels, before.llm.input_ids)
            pieces_of_all = zip(samples_of(before), *(pieces_of(before, each) for each in columns), strict=True)
            for key, ids, labels, as_before in pieces_of_all:
                came += key == "b"
                if key == "b":
                    assert not ids.any() and bool((labels == -100).all())
                else:
                    assert torch.equal(ids, as_before)
    assert came > 1 and ours.stats()["failures"] == whole.stats()["failures"] | {"blank": came}


def test_in_a_mixture_a_name_has_its_source(dataset: od.ShardDataset) -> None:
    mixture = od.Mixture({"one": od.Source(dataset.take(15)), "two": od.Source(dataset)}, stop="all", by="samples")
    (ours,) = loaders(mixture, blank=[("two", "omni-000000.tar", "s0-0002"), ("two", *POISON)])
    keys = keys_of(steps_of([ours]))
    assert (keys.count("s0-0002"), keys.count("s0-0003"), keys.count(POISON[1])) == (1, 2, 0)
    with pytest.raises(ValueError, match=r"is \(source, shard, key\) of a mixture of one, two, got \('omni-000001"):
        loaders(mixture)
    with pytest.raises(ValueError, match="sample 'none' of shard 'omni-000000.tar', which source 'one' does not have"):
        loaders(mixture, blank=[("one", "omni-000000.tar", "none")])


def test_a_file_names_them_and_the_list_may_change_at_any_resume(dataset: od.ShardDataset, tmp_path: Path) -> None:
    path = tmp_path / "blank.jsonl"
    path.write_text(json.dumps({"shard": POISON[0], "key": POISON[1], "reason": "NaN"}) + "\n")
    assert od.ErrorPolicy(blank=path).blank == od.ErrorPolicy(blank=str(path)).blank == (POISON,)
    path.write_text('{"source": "web", "shard": "a", "key": "b"}\n')
    assert od.ErrorPolicy(blank=path).blank == (("web", "a", "b"),)
    path.write_text('{"source": 3, "shard": "a", "key": "b"}\n')
    with pytest.raises(ValueError, match=r"list of samples .*line 1"):
        od.ErrorPolicy(blank=path)

    (first,) = loaders(dataset, blank=[POISON, ("omni-000000.tar", "s0-0000")])
    came = [*zip(range(2), first.steps(), strict=False)]
    keys = keys_of([[step] for _, step in came])
    state = first.state_dict()
    ours = loaders(dataset, 2, blank=[POISON, ("omni-000002.tar", "s2-0000")])
    for loader in ours:
        loader.load_state_dict(json.loads(json.dumps(state)))
    rest = keys_of(steps_of(ours))
    left_out = {POISON[1], *({"s0-0000"} - {*rest}), *({"s2-0000"} - {*keys})}
    index = dataset.index()
    assert sorted([*keys, *rest]) == sorted({index.key(row) for row in range(30)} - left_out)


@pytest.mark.parametrize(
    ("blank", "error", "words"),
    [
        (
            [("omni-000001.tar", "none")],
            ValueError,
            "sample 'none' of shard 'omni-000001.tar', which the data set does",
        ),
        ([("one", *POISON)], ValueError, r"is \(shard, key\) pairs of a data set, got \('one'"),
        ([("a",)], ValueError, r"blank is \(shard, key\) pairs"),
        ([("a", 1)], ValueError, r"blank is \(shard, key\) pairs"),
        (5, TypeError, r"blank is \(shard, key\) pairs"),
    ],
)
def test_what_names_no_sample_is_an_error(
    blank: Any, error: type[Exception], words: str, dataset: od.ShardDataset
) -> None:
    with pytest.raises(error, match=words):
        loaders(dataset, blank=blank)


def test_data_that_are_not_in_shards_have_no_names() -> None:
    with pytest.raises(ValueError, match="blank is for an od.ShardDataset"):
        loaders([1, 2, 3], global_batch_size=1)
