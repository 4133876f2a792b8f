"""ShardDataset as a sequence of samples, filtered and split; and data in other files through loaders and commands."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from PIL import Image
from shard_factory import SKIP_ANY
from tars import write_tar
from typer.testing import CliRunner

import orchdata as od
from orchdata.cli import app
from orchdata.loaders.errors import DataError, StateError


def image(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (28 * (1 + seed % 5), 56, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of 20 records: every third has an image, number 7 names one that is not there."""
    (tmp_path / "images").mkdir()
    for part in range(2):
        records: list[dict[str, Any]] = []
        for number in range(20):
            record: dict[str, Any] = {"id": f"{part}-{number:02d}", "text": "x" * (number + 1)}
            if number % 3 == 0:
                name = f"{part}/{number}.png"
                (tmp_path / "images" / name).parent.mkdir(exist_ok=True)
                (tmp_path / "images" / name).write_bytes(image(number))
                record["image"] = name
            records.append(record)
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def dataset_of(folder: Path, pattern: str = "*.jsonl") -> od.ShardDataset:
    return od.ShardDataset(str(folder / pattern), media_root=folder / "images")


def keys(dataset: od.ShardDataset) -> list[str]:
    return [dataset[i].key for i in range(len(dataset))]


ALL = [f"{part}-{number:02d}" for part in range(2) for number in range(20)]


def delivered(batches: Iterable[od.Batch]) -> list[str]:
    return sorted(key for batch in batches for _, key in batch.sample_ids)


def spoil(folder: Path) -> None:
    (folder / "images" / "1" / "6.png").unlink()


def test_keys_of_a_tar_end_at_the_last_dot(tmp_path: Path) -> None:
    members = [(f"22.0{n}.{e}", x) for n in (5, 6) for e, x in (("png", image(n)), ("txt", b"text %d" % n))]
    url = str(write_tar(tmp_path / "a.tar", members))
    at_first, at_last = od.ShardDataset(url), od.ShardDataset(url, key="last_dot")
    with pytest.raises(DataError, match=r"are texts of one sample.*, or pass ShardDataset\(key=\"last_dot\"\)"):
        od.DataLoader(at_first, batch_size=1)
    for workers in (0, 1):
        loader = od.DataLoader(at_last, batch_size=2, num_workers=workers, shuffle=False)
        assert [key for batch in loader for _, key in batch.sample_ids] == ["22.05", "22.06"]
    assert pickle.loads(pickle.dumps(at_last))[1].key == "22.06"
    assert at_first.index().fingerprint != at_last.index().fingerprint
    (tmp_path / "m.yaml").write_text(json.dumps({"sources": {"a": {"paths": url, "weight": 1, "key": "last_dot"}}}))
    for given in ([url, "--key", "last_dot"], [str(tmp_path / "m.yaml")]):
        assert "text 6" in CliRunner().invoke(app, ["show", *given]).stdout
    assert CliRunner().invoke(app, ["index", url]).exit_code == 1
    assert CliRunner().invoke(app, ["index", url, "--key", "last_dot"]).exit_code == 0
    with pytest.raises(ValueError, match="key is 'last_dot', or left out"):
        od.ShardDataset(url, key="dot")  # type: ignore[arg-type]


def test_samples_are_had_by_place_and_by_key(folder: Path) -> None:
    spoil(folder)
    dataset = dataset_of(folder)
    assert repr(dataset).endswith("not indexed yet)")
    assert len(dataset) == 39
    assert f"39 samples, {int(dataset.index().llm_tokens.sum()):,} tokens in 2 shards" in repr(dataset)
    assert keys(dataset) == [f"{p}-{i:02d}" for p in range(2) for i in range(20) if (p, i) != (1, 6)]
    assert dataset.find("1-07") == 26 and dataset[26].key == "1-07" and dataset[-13].key == "1-07"
    assert dataset.find("1-07", "1.jsonl") == 26 and dataset.find("1-07", "0.jsonl") is None
    assert dataset.find("1-06") is None and dataset.find("no-key") is None
    assert [part.modality for part in dataset[3].parts if hasattr(part, "modality")] == ["image"]
    for index in (39, -40):
        with pytest.raises(IndexError, match=f"sample {index} of 39 samples"):
            dataset[index]
    for wrong in ("1-07", 1.0, [3]):
        with pytest.raises(TypeError, match="takes one integer"):
            dataset[wrong]  # type: ignore[index]
    with pytest.raises(TypeError, match=r"find\('7'\)"):
        dataset.find(7)  # type: ignore[arg-type]
    assert len(list(dataset)) == 39
    (folder / "images" / "0" / "3.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"0\.jsonl: sample '0-03', field 'image.0': '0/3.png' was changed"):
        dataset[3]


def test_a_key_that_several_have_is_no_answer(folder: Path) -> None:
    (folder / "more").mkdir()
    (folder / "more" / "0.jsonl").write_text('{"id": "0-01", "text": "again"}\n')
    dataset = dataset_of(folder, "**/*.jsonl")
    with pytest.raises(ValueError, match="2 samples have the key '0-01'"):
        dataset.find("0-01")
    assert dataset.find("0-01", str(folder / "more" / "0.jsonl")) == 40


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("image_parts > 0", lambda number: number % 3 == 0),
        ("not (tokens < 5 or image_parts == 1)", lambda number: number % 3 and number >= 4),
        ("key in ('0-04', '1-05') or shard == 'other'", None),
        ("text_tokens * 2 - 1 >= tokens / 0.1 + -1", lambda number: False),
        ("bytes < 1024 * 1024 and text_tokens * 1_000_000_000 > 10_000_000_000", lambda number: number >= 10),
        ("(text_tokens + 16_777_216) * 1.5 == 25_165_825.5", lambda number: number == 0),  # not with 32 bits
        ("-text_tokens in (-1, -2) or -text_tokens > -1", lambda number: number < 2),
        (pc.field("text_tokens") <= 3, lambda number: number < 3),
    ],
)
def test_filters_choose_samples_by_columns_of_the_index(folder: Path, expression: Any, wanted: Any) -> None:
    dataset = dataset_of(folder)
    every = [(part, number) for part in range(2) for number in range(20)]
    kept = [f"{part}-{number:02d}" for part, number in every if wanted and wanted(number)]
    assert keys(dataset.filter(expression)) == (kept if wanted else ["0-04", "1-05"])
    assert len(dataset) == 40  # the other one is unchanged


def test_filters_add_up_and_leave_bad_samples_out(folder: Path) -> None:
    spoil(folder)
    dataset = dataset_of(folder).filter("not bad").filter("image_parts > 0").filter("text_tokens > 10")
    assert keys(dataset) == ["0-12", "0-15", "0-18", "1-12", "1-15", "1-18"]
    loader = od.DataLoader(dataset, batch_size=2, dp=(0, 1))  # on_error="raise" has nothing to refuse
    assert delivered(loader) == keys(dataset)
    with pytest.raises(DataError, match="1-06"):
        od.DataLoader(dataset_of(folder).filter("image_parts >= 0"), batch_size=2, dp=(0, 1))


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("image_tokens <", "not an expression"),
        ("__import__('os').system('true')", "not understood"),
        ("[tokens for tokens in key]", "not understood"),
        ("(" * 5000 + "tokens" + ")" * 5000, "characters|not an expression"),
        ("key in ('a', 1)", "not understood"),
        ("tokens < 99999999999999999999", "64-bit integers"),
        ("key in ('\\ud800',)", "is not valid Unicode"),
    ],
)
def test_what_is_no_filter_is_refused_at_once(folder: Path, expression: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dataset_of(folder).filter(expression)


def test_long_lists_of_values_are_distinguished(folder: Path) -> None:
    # pyarrow shows only the beginning and the end of such a list.
    names = [f"{part}-{number:02d}" for part in range(2) for number in range(20)]
    one, other = (pc.field("key").isin(some) for some in (names, [*names[:19], "no-key", *names[20:]]))
    assert str(one) == str(other)
    dataset = dataset_of(folder)
    loader = od.DataLoader(dataset.filter(one), batch_size=2, dp=(0, 1))
    with pytest.raises(od.StateError, match="digest"):
        od.DataLoader(dataset.filter(other), batch_size=2, dp=(0, 1)).load_state_dict(loader.state_dict())
    loader.load_state_dict(od.DataLoader(dataset.filter(one), batch_size=2, dp=(0, 1)).state_dict())
    assert dataset.filter(one).selections == dataset.filter(one).selections != dataset.filter(other).selections


def test_a_split_goes_by_key_in_any_files(folder: Path) -> None:
    dataset = dataset_of(folder)
    train, test = dataset.split("train", 0.7), dataset.split("test", 0.7)
    assert 20 <= len(train) <= 36
    assert sorted(keys(train) + keys(test)) == keys(dataset)
    lines = [line for part in (1, 0) for line in (folder / f"{part}.jsonl").read_text().splitlines()]
    (folder / "moved").mkdir()
    (folder / "moved" / "all.jsonl").write_text("\n".join(reversed(lines)))
    moved = od.ShardDataset(folder / "moved" / "all.jsonl", media_root=folder / "images")
    assert set(keys(moved.split("test", 0.7))) == set(keys(test))
    assert keys(dataset.split("test", 0.7, seed=1)) != keys(test)
    with pytest.raises(TypeError):
        dataset.split("test", 0.7, seed=1.5)  # type: ignore[arg-type]
    again = train.split("test", 0.5, seed=1)
    assert 0 < len(again) < len(train) and set(keys(again)) < set(keys(train))
    for part, fraction in (("validation", 0.5), ("train", 1.0), ("train", 0.0)):
        with pytest.raises(ValueError, match="split"):
            dataset.split(part, fraction)  # type: ignore[arg-type]


def test_what_was_chosen_is_part_of_the_state(folder: Path) -> None:
    dataset = dataset_of(folder)
    state = od.DataLoader(dataset.filter("tokens > 3"), batch_size=2, dp=(0, 1)).state_dict()
    assert json.loads(json.dumps(state))["fingerprint"]["selection"] == [{"filter": "tokens > 3"}]
    od.DataLoader(dataset.filter("tokens > 3"), batch_size=2, dp=(0, 1)).load_state_dict(state)
    for other in (dataset.filter("tokens > 2"), dataset, dataset[1:11], dataset.select(range(0, 20, 2))):
        with pytest.raises(StateError, match="selection"):
            od.DataLoader(other, batch_size=2, dp=(0, 1)).load_state_dict(state)
    od.DataLoader(dataset.take(10), batch_size=2).load_state_dict(
        od.DataLoader(dataset[:10], batch_size=2).state_dict()
    )


def test_a_file_that_goes_missing_while_training_is_skipped_and_counted(folder: Path) -> None:
    dataset = dataset_of(folder)
    loader = od.DataLoader(dataset, batch_size=5, dp=(0, 1), on_error=SKIP_ANY, num_threads=0)
    spoil(folder)
    wanted = [key for key in ALL if key != "1-06"]
    assert delivered(loader) == wanted
    failures = loader.stats()["failures"]
    assert failures["count"] == 1 and "'1/6.png': no such file" in str(failures)


def test_slices_and_numbers_count_as_the_data_set_does(folder: Path) -> None:
    dataset = dataset_of(folder)
    every = keys(dataset)
    assert keys(dataset[5:9]) == every[5:9] and keys(dataset[-3:]) == every[-3:]
    assert keys(dataset[1::4]) == every[1::4] and keys(dataset.take(7)) == every[:7]
    assert keys(dataset.take(1000)) == every
    assert keys(dataset.select([0, 8, 39])) == [every[0], every[8], every[39]]
    assert keys(dataset.select(np.arange(3, 9, 2))) == every[3:9:2]
    with pytest.raises(ValueError, match="at least 1"):
        dataset.take(0)
    with pytest.raises(ValueError, match="ascending"):
        dataset[::-1]
    train = dataset.split("train", 0.5)
    assert keys(train[3:6].filter("text_tokens > 0")[1:]) == keys(train)[4:6]
    chunks = list(od.DataLoader(dataset[10:14], batch_size=2))
    assert [key for batch in chunks for _, key in batch.sample_ids] == every[10:14]


def test_bad_samples_of_a_slice_are_reported_and_others_are_not(folder: Path) -> None:
    (folder / "images" / "0" / "6.png").unlink()
    dataset = dataset_of(folder)
    assert len(dataset) == 39
    od.DataLoader(dataset[:6])
    with pytest.raises(DataError, match="6.png"):
        od.DataLoader(dataset[:7])
    od.DataLoader(dataset.select([0, 1, 7]))
    assert keys(dataset[5:7]) == ["0-05", "0-07"]


@pytest.mark.parametrize(
    ("numbers", "error", "reason"),
    [
        ([3, 1], ValueError, "ascending numbers, each once"),
        ([0, 40], IndexError, "sample 40 of 40 samples does not exist"),
        ([0.5], TypeError, "a list or array of integers"),
        (np.ones(40, np.bool_), TypeError, r"of a mask, numpy.flatnonzero\(mask\)"),
    ],
)
def test_numbers_that_select_refuses(folder: Path, numbers: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        dataset_of(folder).select(numbers)


def test_torchs_wrappers_of_shards_are_refused(folder: Path) -> None:
    dataset = dataset_of(folder)
    first, _ = torch.utils.data.random_split(dataset, [10, 30])
    with pytest.raises(TypeError, match=r"dataset.take\(1000\), dataset.select"):
        od.DataLoader(first)
    with pytest.raises(TypeError, match="od.Mixture"):
        od.DataLoader(torch.utils.data.ConcatDataset([dataset, dataset]))
    od.DataLoader(torch.utils.data.Subset(list(range(4)), [1, 2]))


def test_bad_samples_that_are_left_out_are_one_warning(folder: Path) -> None:
    dataset = od.ShardDataset(str(folder / "*.jsonl"))  # media_root is forgotten
    with pytest.warns(UserWarning, match=r"14 of 40 samples are left out .* 14 x .* pass media_root=") as caught:
        loader = od.DataLoader(dataset, on_error=SKIP_ANY)
    assert len(caught) == 1 and len(loader) == 26
    with pytest.raises(od.TooManyFailures, match=r"14 of 40 .* allows 0 \(1 %\): 14 x .* pass media_root="):
        od.DataLoader(dataset, on_error="skip")
    result = CliRunner().invoke(app, ["index", str(folder / "0.jsonl"), "--json"])
    assert result.exit_code == 3
    (folder / "none.jsonl").write_text('{"image": "a.png", "text": "x"}\n')
    assert CliRunner().invoke(app, ["index", str(folder / "none.jsonl")]).exit_code == 1
