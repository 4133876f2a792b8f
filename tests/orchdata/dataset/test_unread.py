"""Warnings of what samples have and the model does not get: a training on less than the user thinks is never silent."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shard_factory import RECIPE, jpeg, write_shard

import orchdata as od


def warned(shards: str, recipe: od.Recipe, **options: Any) -> list[str]:
    """Return the warnings of a loader over shards that is made and iterated."""
    return warned_of(od.ShardDataset(shards, recipe=recipe), **options)


def warned_of(dataset: od.ShardDataset | od.Mixture, **options: Any) -> list[str]:
    """Return the warnings of a loader that is made and iterated."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in od.DataLoader(dataset, batch_size=2, **options):
            pass
    return [str(one.message) for one in caught]


@pytest.fixture
def pictures(tmp_path: Path) -> str:
    samples = [{"__key__": f"{number}", "0.jpg": jpeg(40, 30), "txt": b"a cat"} for number in range(4)]
    return write_shard(tmp_path / "a.tar", samples)


@pytest.mark.parametrize("recipe", [od.Recipe(image=None), od.Recipe(image=None, audio=None)])
def test_images_under_a_recipe_without_images_are_one_warning(pictures: str, recipe: od.Recipe) -> None:
    (message,) = warned(pictures, recipe)
    assert "the model gets the text without them: image (4)" in message
    assert "od.hf.recipe(processor)" in message


def test_what_is_read_is_no_warning(pictures: str) -> None:
    assert warned(pictures, RECIPE) == []


def records(folder: Path, *rows: dict[str, Any], **options: Any) -> od.ShardDataset:
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = od.Recipe(text=od.TextPreprocessor(**options))
    return od.ShardDataset(str(folder / "a.jsonl"), recipe=recipe)


def test_words_of_records_next_to_their_text_are_one_warning(tmp_path: Path) -> None:
    """As `question` where columns= makes the answer the text."""
    rows = [{"text": "four", "question": "what is 2 + 2?"}, {"caption": "five", "question": "and 2 + 3?"}]
    (message,) = warned_of(records(tmp_path, *rows))
    assert "text that is not read, and that the model does not learn: 'question' (2)" in message


def test_words_of_records_that_are_read_are_no_warning(tmp_path: Path) -> None:
    alpaca = {"instruction": "Add.", "output": "4", "text": "### Instruction: Add.\n### Response: 4"}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    chat = {"messages": turns, "text": "hi ho", "answer": "ho ho"}
    assert warned_of(records(tmp_path, alpaca, chat, {"text": "abc", "title": "b", "question_id": "q1"})) == []
    assert warned_of(records(tmp_path, {"text": "abc", "question": "why?"}, fields=("question",))) == []


def test_data_without_a_token_to_learn_are_one_warning(tmp_path: Path) -> None:
    shards = write_shard(tmp_path / "a.tar", [{"__key__": "0", "jpg": jpeg(40, 30), "cls": b"3"}])
    (message,) = warned(shards, RECIPE)
    assert "no sample has a token to learn" in message


@pytest.fixture
def halves(tmp_path: Path) -> od.ShardDataset:
    """Four samples of images alone, then four with a text."""
    samples = [{"__key__": f"{number}", "jpg": jpeg(40, 30)} for number in range(8)]
    texts = [sample | {"txt": b"a cat on a mat"} for sample in samples[4:]]
    return od.ShardDataset(write_shard(tmp_path / "halves.tar", [*samples[:4], *texts]), recipe=RECIPE)


def test_chosen_samples_without_a_token_to_learn_are_one_warning(halves: od.ShardDataset) -> None:
    (message,) = warned_of(halves)
    assert "4 of 8 samples have no token to learn: they take time in steps, and dataset.filter(" in message
    (message,) = warned_of(halves.filter("loss_tokens == 0"))
    assert "no sample has a token to learn among those that the data set chooses" in message
    assert warned_of(halves.filter("loss_tokens > 0")) == []
    assert len(warned_of(halves.take(4))) == 1
    (message,) = warned_of(halves.take(5))
    assert "4 of 5 samples have no token to learn among those that the data set chooses" in message


def test_each_source_of_a_mixture_without_a_token_to_learn_is_one_warning(halves: od.ShardDataset) -> None:
    dumb, halves = halves.filter("loss_tokens == 0"), halves.filter("loss_tokens > 0")
    sources = {"texts": od.Source(halves, weight=0.5), "dumb": od.Source(dumb, weight=0.3)}
    (message,) = warned_of(od.Mixture(sources))
    assert "no sample of source 'dumb' has a token to learn among those that its data set chooses" in message
    assert "gives no loss in any step" in message
    assert warned_of(od.Mixture(sources), collate_fn=len) == []
    assert warned_of(od.Mixture({name: od.Source(halves, weight=0.5) for name in ("one", "two")})) == []


def test_images_alone_are_fine_where_the_user_s_function_or_a_kept_field_is_learned(tmp_path: Path) -> None:
    shards = write_shard(tmp_path / "a.tar", [{"__key__": "0", "jpg": jpeg(40, 30), "cls": b"3"}])
    assert warned(shards, RECIPE, collate_fn=len) == []
    assert warned(shards, od.Recipe(image=RECIPE.image, keep=("cls",))) == []


def test_images_of_records_and_of_tables_are_warned_of_too(tmp_path: Path) -> None:
    (tmp_path / "0.jpg").write_bytes(jpeg(40, 30))
    (tmp_path / "a.jsonl").write_text('{"image": "0.jpg", "text": "a cat"}\n')
    dataset = od.ShardDataset(tmp_path / "a.jsonl", recipe=od.Recipe(image=None), media_root=tmp_path)
    with pytest.warns(UserWarning, match=r"the model gets the text without them: image \(1\)"):
        od.DataLoader(dataset, batch_size=1)
    pq.write_table(
        pa.table({"image": [{"bytes": jpeg(40, 30), "path": None}], "text": ["a cat"]}), tmp_path / "a.parquet"
    )
    with pytest.warns(UserWarning, match=r"the model gets the text without them: image \(1\)"):
        od.DataLoader(od.ShardDataset(tmp_path / "a.parquet", recipe=od.Recipe(image=None)), batch_size=1)
