"""Numbers of tokens that the data declare, in place of a tokenizer while indexing."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hf_processors import tokenizer
from shard_factory import chat, jpeg, write_shard

import orchdata as od
from orchdata.loaders.index.first.look import first_look

WORDS = [f"some words {'more ' * (n % 7)}" for n in range(30)]


class Words:
    """A tokenizer with one token a word, that counts its calls."""

    def __init__(self, more: int = 0) -> None:
        self.more = more
        self.calls = 0

    def __call__(self, text: str) -> list[int]:
        self.calls += 1
        return [1] * (len(text.split()) + self.more)


def records(path: Path, counts: list[Any], texts: list[str] = WORDS) -> str:
    lines = [json.dumps({"text": text, "num_tokens": count}) for text, count in zip(texts, counts, strict=True)]
    path.write_text("\n".join(lines))
    return str(path)


def right(texts: list[str] = WORDS) -> list[int]:
    return [len(text.split()) for text in texts]


def counted(words: Any, **options: Any) -> od.Recipe:
    return od.Recipe(text=od.TextPreprocessor(words, id="words", count_field="num_tokens", **options))


def parquet(path: Path) -> str:
    pq.write_table(pa.table({"text": WORDS, "num_tokens": right()}), path)
    return str(path)


def tar(path: Path) -> str:
    pairs = enumerate(zip(WORDS, right(), strict=True))
    return write_shard(
        path,
        [{"__key__": f"{n:03}", "txt": text.encode(), "num_tokens": str(count).encode()} for n, (text, count) in pairs],
    )


def in_json(path: Path) -> str:
    pairs = enumerate(zip(WORDS, right(), strict=True))
    return write_shard(
        path,
        [
            {"__key__": f"{n:03}", "json": json.dumps({"text": text, "num_tokens": count}).encode()}
            for n, (text, count) in pairs
        ],
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: records(folder / "a.jsonl", right()),
        lambda folder: parquet(folder / "a.parquet"),
        lambda folder: tar(folder / "a.tar"),
        lambda folder: in_json(folder / "a.tar"),
    ],
    ids=["jsonl", "parquet", "tar", "json in a tar"],
)
def test_nothing_is_tokenized_while_indexing(tmp_path: Path, make: Any) -> None:
    path, words = make(tmp_path), Words()
    index = od.ShardDataset(path, recipe=counted(words)).index()
    assert not words.calls and not index.totals["bad"] and "num_tokens" not in index.totals["ignored_fields"]
    other = od.ShardDataset(path, recipe=od.Recipe(text=od.TextPreprocessor(words, id="words"))).index()
    assert words.calls
    for name in ("llm_tokens", "loss_tokens"):
        assert getattr(index, name).tolist() == getattr(other, name).tolist()
    loader = od.DataLoader(od.ShardDataset(path, recipe=counted(words)), batch_size=4)
    assert sum(len(batch.sample_ids) for batch in loader) == len(WORDS)


def test_a_table_of_texts_declares_counts(tmp_path: Path) -> None:
    """Each cell of a CSV file is a text."""
    path = tmp_path / "a.csv"
    rows = [("text", "num_tokens"), *zip(WORDS, right(), strict=True)]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)
    words = Words()
    index = od.ShardDataset(str(path), recipe=counted(words)).index()
    assert index.llm_tokens.tolist() == right() and not words.calls


def test_the_first_samples_and_a_first_look_read_declared_counts(tmp_path: Path) -> None:
    """A column of numbers is only read where something asks for it."""
    path, words = parquet(tmp_path / "a.parquet"), Words()
    dataset = od.ShardDataset(path, recipe=counted(words))
    looked = first_look([path], dataset.recipe, 5)
    assert looked.measured == 5 and not looked.failures
    first = dataset.take(5).index()
    assert first.num_rows == 5 and first.llm_tokens.tolist() == right()[:5] and not words.calls


@pytest.mark.parametrize(
    ("special", "more"),
    [({}, 0), ({"bos_token_id": 5}, 1), ({"eos_token_id": 5}, 1), ({"bos_token_id": 5, "eos_token_id": 6}, 2)],
)
@pytest.mark.parametrize("text", ["<image> a picture", "a picture <image>", "a <image> picture <image>", "a picture"])
@pytest.mark.parametrize("around", [{}, {"image_start_id": 7, "image_end_id": 8}])
def test_special_tokens_and_media(
    tmp_path: Path, special: dict[str, Any], more: int, text: str, around: dict[str, Any]
) -> None:
    """Declared: text tokens with special ones. The loss follows for plain text."""
    images = text.count("<image>")
    declared = len(text.replace("<image>", "").split()) + more + images * len(around)
    members = {f"{n}.jpg": jpeg(56, 56) for n in range(images)}
    one = {"__key__": "a", **members, "txt": text.encode(), "num_tokens": str(declared).encode()}
    path = write_shard(tmp_path / "a.tar", [one])
    options = {**special, **around}
    index = od.ShardDataset(path, recipe=counted(Words(), **options)).index()
    other = od.Recipe(text=od.TextPreprocessor(Words(), id="words", **options))
    expected = od.ShardDataset(path, recipe=other).index()
    assert not index.totals["bad"]
    assert index.llm_tokens.tolist() == expected.llm_tokens.tolist()
    assert index.loss_tokens.tolist() == expected.loss_tokens.tolist()


def test_a_fast_tokenizer_with_tokens_around_each_text(tmp_path: Path) -> None:
    fast = od.TextPreprocessor(tokenizer())
    counts = [len(fast.encode(text)) for text in WORDS]
    path = records(tmp_path / "a.jsonl", counts)
    recipe = od.Recipe(text=od.TextPreprocessor(tokenizer(), count_field="num_tokens"))
    loader = od.DataLoader(od.ShardDataset(path, recipe=recipe), batch_size=4)
    assert sum(len(batch.sample_ids) for batch in loader) == len(WORDS)


def test_chats_declare_their_loss(tmp_path: Path) -> None:
    plain = od.Recipe(text=od.TextPreprocessor(Words(), id="words"))
    path = tmp_path / "a.tar"
    chats = [chat("what is it", f"it is {word}") for word in WORDS]
    write_shard(path, [{"__key__": f"{n:03}", "json": each} for n, each in enumerate(chats)])
    known = od.ShardDataset(str(path), recipe=plain).index()
    llm, loss = known.llm_tokens.tolist(), known.loss_tokens.tolist()
    members = [
        {"__key__": f"{n:03}", "json": each, "num_tokens": b"%d" % llm[n], "num_loss": b"%d" % loss[n]}
        for n, each in enumerate(chats)
    ]
    write_shard(path, members)
    words = Words()
    recipe = counted(words, loss_count_field="num_loss")
    dataset = od.ShardDataset(str(path), recipe=recipe)
    assert dataset.index().loss_tokens.tolist() == loss and not words.calls
    assert len(list(od.DataLoader(dataset, batch_size=10))) == 3
    refused = od.ShardDataset(str(path), recipe=counted(words)).index()
    assert refused.totals["bad"] == len(WORDS) and "loss_count_field" in refused.failure(0).reason


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (-1, "declares -1 tokens: write a whole number"),
        (None, "declares None tokens"),
        (3.5, "declares 3.5 tokens"),
        (3.0, "declares 3.0 tokens"),
        ("-3", "declares '-3' tokens"),
        ("3.0", "declares '3.0' tokens"),
        ("٣", "declares '٣' tokens"),
        ("", "declares '' tokens"),
        (True, "declares True tokens"),
        (1 << 40, "tokens: write a whole number from 0 to"),
        ([3], r"declares \[3\] tokens"),
    ],
)
def test_a_bad_count_is_a_failure_of_its_sample(tmp_path: Path, value: Any, reason: str) -> None:
    path = records(tmp_path / "a.jsonl", [value, *right()[1:]])
    index = od.ShardDataset(path, recipe=counted(Words())).index()
    assert index.bad_rows().tolist() == [0]
    with pytest.raises(od.DataError, match=reason):
        raise index.failure(0)


def test_a_missing_count_names_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "some words"}\n{"text": "some words", "num_tokens": 2}\n')
    index = od.ShardDataset(str(path), recipe=counted(Words())).index()
    assert index.bad_rows().tolist() == [0] and "leave count_field out" in index.failure(0).reason


def test_a_wrong_tokenizer_is_one_error(tmp_path: Path) -> None:
    path = records(tmp_path / "a.jsonl", right())
    dataset = od.ShardDataset(path, recipe=counted(Words(more=1)))
    for policy in ("raise", "skip"):
        with pytest.raises(
            ValueError, match="30 of 30 samples declare other counts .* declares 2 text tokens, the tokenizer"
        ):
            od.DataLoader(dataset, batch_size=4, on_error=policy)


def test_a_wrong_count_is_a_failure_of_its_sample_with_both_numbers(tmp_path: Path) -> None:
    path = records(tmp_path / "a.jsonl", [right()[0] + 3, *right()[1:]])
    dataset = od.ShardDataset(path, recipe=counted(Words()))
    with pytest.raises(od.DataError, match="declares 5 text tokens, the tokenizer gives 2"):
        list(od.DataLoader(dataset, batch_size=4))
    skipping = od.DataLoader(dataset, batch_size=4, on_error=od.ErrorPolicy("skip", max_failures=2))
    assert sum(len(batch.sample_ids) for batch in skipping) == len(WORDS) - 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"overflow": "truncate", "max_tokens": 10}, "cuts between tokens, which count_field does not tell"),
        ({"overflow": "split", "max_tokens": 10}, "cuts between tokens"),
        ({"count_field": ""}, "must be the name of a field"),
        ({"count_field": 3}, "must be the name of a field"),
        ({"count_field": None, "loss_count_field": "loss"}, "loss_count_field needs count_field"),
    ],
)
def test_arguments_that_contradict(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        od.TextPreprocessor(**{"count_field": "n"} | options)


def test_windows_of_declared_counts(tmp_path: Path) -> None:
    path, words = records(tmp_path / "a.jsonl", right()), Words()
    dataset = od.ShardDataset(path, recipe=counted(words))
    layout = od.Packed(length=16, concatenate=True)
    batches = list(od.DataLoader(dataset, batch_size=1, collate_fn=layout, drop_last=True))
    assert all(batch.llm.input_ids.numel() == 16 for batch in batches) and len(batches) == sum(right()) // 16
