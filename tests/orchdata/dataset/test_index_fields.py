"""Filters on the user's own columns, which the index keeps: the same values from every container, read once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from shard_factory import write_shard
from typer.testing import CliRunner

import orchdata as od
from orchdata.cli import app
from orchdata.loaders.index import fields
from orchdata.loaders.index.fields import fields_of

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

KEYS = [f"s{number}" for number in range(8)]
SCORES = [None if number == 3 else number / 2 for number in range(8)]
LANGUAGES = ["de", "en", None, "fr"] * 2
FIELDS = ("score", "lang")


def write_all(folder: Path) -> dict[str, str]:
    """The same eight samples in every container."""
    rows = [
        {"id": key, "text": f"text of {key}", "score": score, "lang": language}
        for key, score, language in zip(KEYS, SCORES, LANGUAGES, strict=True)
    ]
    table = pa.Table.from_pylist(rows)
    pq.write_table(
        table.set_column(3, "lang", table["lang"].dictionary_encode()), folder / "a.parquet", row_group_size=3
    )
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    cells = [[row["id"], row["text"], row["score"], row["lang"]] for row in rows]
    lines = [",".join("" if cell is None else str(cell) for cell in row) for row in cells]
    (folder / "a.csv").write_text("\n".join(["id,text,score,lang", *lines]) + "\n")
    members = [
        {"__key__": row["id"], "txt": row["text"].encode(), "json": json.dumps({"lang": row["lang"]}).encode()}
        | ({} if row["score"] is None else {"score": f"{row['score']}\n".encode()})
        for row in rows
    ]
    write_shard(folder / "a.tar", members)
    return {path.suffix[1:]: str(path) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_all(tmp_path_factory.mktemp("fields"))


def keys_of(dataset: od.ShardDataset) -> list[str]:
    return [dataset[number].key for number in range(len(dataset))]


def chosen(expression: str, own: Any) -> list[str]:
    """What Python says, with False for a comparison with None."""
    rows = zip(KEYS, SCORES, LANGUAGES, strict=True)
    return [key for key, score, language in rows if own(score, language)]


FILTERS = {
    "score > 2": lambda score, _: score is not None and score > 2,
    "not score > 2": lambda score, _: score is not None and not score > 2,
    "1 <= score < 3": lambda score, _: score is not None and 1 <= score < 3,
    "score is None": lambda score, _: score is None,
    "score is not None and lang != 'de'": lambda score, language: score is not None and language not in (None, "de"),
    "lang == 'de' or score == 1": lambda score, language: language == "de" or score == 1,
    "lang in ('de', 'fr')": lambda _, language: language in ("de", "fr"),
    "lang not in ('de', 'fr')": lambda _, language: language == "en",
    "not lang in ('de', 'fr')": lambda _, language: language == "en",
    "score * 2 == tokens - tokens + 4": lambda score, _: score == 2,
}


@pytest.mark.parametrize("container", ["parquet", "arrow", "jsonl", "csv", "tar"])
def test_every_container_gives_the_same_values(shards: dict[str, str], container: str) -> None:
    dataset = od.ShardDataset(shards[container], index_fields=FIELDS)
    own = fields_of(dataset.index().own)
    assert own == {"lang": {"type": "str", "nulls": 2}, "score": {"type": "float", "nulls": 1}}
    for expression, own in FILTERS.items():
        assert keys_of(dataset.filter(expression)) == chosen(expression, own), expression


def test_a_pyarrow_expression_and_other_selections_compose(shards: dict[str, str]) -> None:
    dataset = od.ShardDataset(list(shards.values()), index_fields=FIELDS)
    high = dataset.filter(pc.field("score") > 2)
    assert len(high) == 3 * len(shards) and len(high.filter("lang == 'en'")) == len(shards)
    assert len(high.split("train", 0.5)) + len(high.split("test", 0.5)) == len(high)
    assert keys_of(high.take(2)) == keys_of(high)[:2] == keys_of(high[:2]) == keys_of(high.select([0, 1]))


def test_nothing_is_tokenized_again_and_the_index_without_them_stays(shards: dict[str, str]) -> None:
    calls: list[str] = []

    def tokens(text: str) -> list[int]:
        calls.append(text)
        return [1] * len(text.split())

    recipe = od.Recipe(text=od.TextPreprocessor(tokens, id="counted"))
    plain = od.ShardDataset(list(shards.values()), recipe)
    index = plain.index()
    content = index.path.read_bytes()
    calls.clear()
    own = od.ShardDataset(list(shards.values()), recipe, index_fields=FIELDS)
    again = own.filter("score > 2").index()
    assert calls == [] and index.path.read_bytes() == content and plain.index().own is None
    assert (again.fingerprint, again.build_id) == (index.fingerprint, index.build_id) and again.path != index.path


def test_values_are_read_once(shards: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    paths = list(shards.values())
    expected = keys_of(od.ShardDataset(paths, index_fields=FIELDS).filter("score > 2"))
    other = od.ShardDataset(paths[::-1], index_fields=FIELDS).filter("score > 2")
    assert sorted(keys_of(other)) == sorted(expected)
    monkeypatch.setattr(fields, "_read", None)  # must not be called
    dataset = od.ShardDataset(paths, index_fields=FIELDS[::-1])
    assert keys_of(dataset.filter("score > 2")) == expected


def test_a_changed_shard_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    other = write_shard(tmp_path / "b.tar", [{"__key__": "o", "txt": b"x", "score": b"9"}])
    path.write_text('{"id": "a", "text": "x", "score": 3}\n')
    dataset = od.ShardDataset([path, other], index_fields=("score",)).filter("score > 2")
    assert keys_of(dataset) == ["a", "o"]
    path.write_text('{"id": "a", "text": "x", "score": 1}\n{"id": "b", "text": "y", "score": 5}\n')
    with pytest.warns(UserWarning, match="changed since the index was built"):
        assert keys_of(od.ShardDataset([path, other], index_fields=("score",)).filter("score > 2")) == ["b", "o"]


def test_a_mask_from_a_join_of_ones_own_chooses(tmp_path: Path) -> None:
    lines = [{"id": f"k{at}", "text": "x" * (40 if at % 3 else 4)} for at in range(12)]
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, mine in zip(paths, (lines[:5], lines[5:]), strict=True):
        path.write_text("".join(f"{json.dumps(row)}\n" for row in mine) + "{broken\n")
    recipe = od.Recipe(text=od.TextPreprocessor(max_tokens=16, overflow="split"))
    dataset = od.ShardDataset(paths, recipe).filter("key != 'k1'")
    table = dataset.keys()
    assert table["key"].to_pylist() == keys_of(dataset) == [f"k{at}" for at in range(12) if at != 1]
    assert table["shard"].to_pylist() == [str(paths[0])] * 4 + [str(paths[1])] * 7
    wanted = pa.table({"key": ["k7", "k2", "k1"], "score": [3, 1, 2]})
    mask = pc.greater(wanted["score"].take(pc.index_in(table["key"].cast("string"), wanted["key"])), 1)
    chosen = dataset.where(pc.fill_null(mask, False))
    assert keys_of(chosen) == ["k7"] == chosen.keys()["key"].to_pylist()
    every_second = np.arange(len(dataset)) % 2 == 0
    assert keys_of(dataset.where(every_second)) == keys_of(dataset)[::2]
    assert keys_of(dataset.where(every_second).where(np.arange(6) > 3)) == ["k9", "k11"]
    assert keys_of(dataset.where(~every_second).take(2)) == keys_of(dataset)[1:5:2]
    assert len(dataset.where(np.zeros(11, bool))) == 0
    for wrong in (every_second[1:], every_second.astype(int), [0, 3], mask.to_pylist()):
        with pytest.raises(ValueError, match="one boolean for each of the 11 samples"):
            dataset.where(wrong)
    state = od.DataLoader(dataset.where(every_second), batch_size=2).state_dict()
    od.DataLoader(
        od.ShardDataset(paths, recipe).filter("key != 'k1'").where(every_second), batch_size=2
    ).load_state_dict(state)
    with pytest.raises(od.StateError, match="selection"):
        od.DataLoader(dataset.where(~every_second), batch_size=2).load_state_dict(state)
    with paths[0].open("a") as file:
        file.write('{"id": "late", "text": "x"}\n')
    with pytest.warns(UserWarning, match="changed since"), pytest.raises(ValueError, match=r"of 11 samples.* 12 now"):
        len(od.ShardDataset(paths, recipe).filter("key != 'k1'")._with(dataset.where(every_second).selections[-1]))


def three(record: dict[str, Any]) -> dict[str, Any] | None:
    """Leave out every second sample."""
    return None if record["id"] in ("s0", "s2", "s4", "s6") else {"text": record["text"]}


@pytest.mark.parametrize("container", ["parquet", "jsonl"])
def test_samples_that_a_function_leaves_out_shift_nothing(shards: dict[str, str], container: str) -> None:
    dataset = od.ShardDataset(shards[container], od.Recipe(record=three), index_fields=FIELDS)
    assert keys_of(dataset) == ["s1", "s3", "s5", "s7"]
    assert keys_of(dataset.filter("score > 2")) == ["s5", "s7"]


def test_pieces_of_a_sample_have_its_values(tmp_path: Path) -> None:
    rows = [{"id": key, "text": "x" * 40, "score": score} for key, score in zip(KEYS, SCORES, strict=True)]
    rows[2]["text"] = rows[3]["text"] = "x"
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = od.Recipe(text=od.TextPreprocessor(max_tokens=16, overflow="split"))
    dataset = od.ShardDataset(tmp_path / "a.jsonl", recipe, index_fields=("score",)).filter("score > 2")
    assert keys_of(dataset) == ["s5", "s6", "s7"] and dataset.num_rows == 9


def test_bad_samples_and_shards_have_no_value(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "a", "text": "x", "score": 3}\n{broken\n{"id": "c", "score": 4}\n')
    (tmp_path / "b.parquet").write_bytes(b"no Parquet")
    dataset = od.ShardDataset([tmp_path / "a.jsonl", tmp_path / "b.parquet"], index_fields=("score",))
    assert dataset.index().own["score"].to_pylist() == [3, None, 4, None]
    assert keys_of(dataset.filter("score > 2")) == ["a"]


def test_new_names_of_columns_are_those_of_fields(shards: dict[str, str]) -> None:
    for container in ("parquet", "csv", "tar"):
        dataset = od.ShardDataset(shards[container], columns={"score": "rating"}, index_fields=("rating",))
        assert keys_of(dataset.filter("rating > 3")) == ["s7"]


def test_ranks_that_may_not_build_name_the_command(shards: dict[str, str]) -> None:
    od.ShardDataset(shards["csv"]).index()
    dataset = od.ShardDataset(shards["csv"], index_fields=("lang",))
    with pytest.raises(od.MissingIndexError, match=r"lacks index_fields=\('lang',\).*--index-field lang"):
        dataset.index(num_ranks=2)
    built = dataset.index(num_ranks=2, rank=1)  # together
    assert built.own.schema.names == ["lang"] == dataset.index(num_ranks=2).own.schema.names


def test_sources_of_a_mixture_have_fields_of_their_own(shards: dict[str, str]) -> None:
    scored = od.ShardDataset(shards["jsonl"], index_fields=("score",)).filter("score > 3")
    others = od.ShardDataset(shards["csv"], index_fields=("lang",)).filter("lang == 'fr'")
    mixture = od.Mixture({"scored": od.Source(scored), "others": od.Source(others)}, stop="all")
    ids = {key for batch in od.DataLoader(mixture, batch_size=2) for _, key in batch.sample_ids}
    assert ids == {"s7", "s3"}


@pytest.mark.parametrize(
    ("fields", "expression", "message"),
    [
        (("score",), "scor > 3", r"there is no column 'scor'; .*index_fields=\('scor',\).*the columns are .*, score$"),
        (("scor",), "scor > 3", "index_fields names 'scor', and no sample has a field of this name"),
        (("tokens",), "", r"every index has a column 'tokens' of its own.*columns=\{'tokens': 'my_name'\}"),
        (("my-score",), "", r"'my-score' is no name that a filter can have.*columns=\{'my-score'"),
        (("lang",), "lang > 3", "filter 'lang > 3': .*; the columns are"),
        (("score",), "score == None", "'None' is not understood.* is None"),
    ],
)
def test_misuse_names_the_way_out(
    shards: dict[str, str], fields: tuple[str, ...], expression: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        len(od.ShardDataset(shards["jsonl"], index_fields=fields).filter(expression))
    with pytest.raises(TypeError, match="index_fields is a tuple of names"):
        od.ShardDataset(shards["jsonl"], index_fields="score")


def test_values_that_are_not_kept_name_shard_key_and_field(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_shard(path, [{"__key__": "long", "txt": b"x", "note": b"y" * 2000}])
    with pytest.raises(ValueError, match=r"a\.tar: sample 'long': the member 'note' has 2000 bytes"):
        od.ShardDataset(path, index_fields=("note",)).index()
    raw = tmp_path / "raw.tar"
    write_shard(raw, [{"__key__": "raw", "txt": b"x", "score": b"3", "note": b"\xff"}])  # its score is not lost
    with pytest.raises(ValueError, match=r"raw\.tar: sample 'raw': the member 'note' is not valid UTF-8.* leave it"):
        od.ShardDataset(raw, index_fields=("score", "note")).index()
    one, other = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('{"text": "x", "score": 3}\n')
    other.write_text('{"text": "x", "score": "high"}\n')
    with pytest.raises(ValueError, match=r"'score' is int in .*one\.jsonl and str in .*two\.jsonl"):
        od.ShardDataset([one, other], index_fields=("score",)).index()


def test_the_command_line(shards: dict[str, str], tmp_path: Path) -> None:
    runner = CliRunner()
    given = [shards["jsonl"], shards["tar"], "--index-field", "score", "--index-field", "lang"]
    made = runner.invoke(app, ["index", *given, "--json"])
    assert json.loads(made.stdout)["index_fields"]["score"] == {"type": "float", "nulls": 2}
    assert "index field lang: str, 4 without a value" in runner.invoke(app, ["index", *given]).stdout
    profiled = runner.invoke(app, ["profile", *given, "--filter", "score > 2", "--ranks", "2", "--json"])
    assert json.loads(profiled.stdout)["samples"] == 6, profiled.output
    described = tmp_path / "mixture.yaml"
    source = {"paths": shards["jsonl"], "index_fields": ["score"], "filter": "score > 2"}
    described.write_text(json.dumps({"sources": {"one": source}}))
    profiled = runner.invoke(app, ["profile", str(described), "--ranks", "2", "--json"])
    assert json.loads(profiled.stdout)["samples"] == 3, profiled.output
    refused = runner.invoke(app, ["profile", str(described), "--index-field", "score"])
    assert refused.exit_code and "index_fields:" in refused.output
