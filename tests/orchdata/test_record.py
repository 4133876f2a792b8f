"""`Recipe.record` and `columns=`: layouts of public data sets, delivered as the same data under known layouts."""

from __future__ import annotations

import csv
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from chat_templates import QWEN3, trained
from jinja_chats import recipe_of
from shard_factory import audio, jpeg, write_shard
from typer.testing import CliRunner
from video_clips import clip

import orchdata as od
from orchdata.cli import app
from orchdata.loaders.errors import DataError
from orchdata.loaders.samples.sample import TextPart

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

LIMITS = od.ImagePreprocessor(patch_size=8, merge=2, min_tokens=1, max_tokens=12, dtype="float32")


def recipe(record: Any = None, record_id: str | None = None, **more: Any) -> od.Recipe:
    return od.Recipe(image=LIMITS, audio=od.AudioPreprocessor(num_mels=16), record=record, record_id=record_id, **more)


def finevision(record: dict[str, Any]) -> Any:
    turns = [{"role": role, "content": pair[role]} for pair in record["texts"] for role in ("user", "assistant")]
    turns[0]["content"] = "<image>" * len(record["images"]) + turns[0]["content"]
    return {"messages": turns}


def vqa(record: dict[str, Any]) -> Any:
    return [
        {"role": "user", "content": [record["image"], {"type": "text", "text": record["question"]}]},
        {"role": "assistant", "content": record["answers"][0]["answer"]},
    ]


def last_image_first(record: dict[str, Any]) -> Any:
    items = [{"type": "image", "image": image} for image in record["images"][::-1]]
    turn = {"role": "user", "content": [*items, {"type": "text", "text": "What?"}]}
    return {"messages": [turn, {"role": "assistant", "content": "Two."}]}


def without_types(record: dict[str, Any]) -> Any:
    items = [{"image": image} for image in record["images"][::-1]]
    turn = {"role": "user", "content": [*items, {"text": "What?"}]}
    return {"messages": [turn, {"role": "assistant", "content": "Two."}], "n": np.int64(3), "x": np.float32(1)}


IMAGES = [jpeg(40 + 8 * seed, 56, seed) for seed in range(6)]


def parquet(path: Path, rows: list[dict[str, Any]], **types: Any) -> str:
    schema = pa.schema(list(types.items())) if types else None
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return str(path)


def arrow(path: Path, rows: list[dict[str, Any]]) -> str:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return str(path)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def kind(part: Any) -> str:
    return str(getattr(part, "modality", "text"))


def parts(dataset: od.ShardDataset) -> list[list[Any]]:
    """For each sample: (token ids, loss mask) of text, pixels or waves of media."""
    return [
        [
            (part.token_ids.tolist(), part.loss.tolist())
            if kind(part) == "text"
            else {name: torch.as_tensor(array).tolist() for name, array in part.arrays.items()}
            for part in sample.parts
        ]
        for sample in (dataset[number] for number in range(len(dataset)))
    ]


def cell(data: bytes) -> dict[str, Any]:
    return {"bytes": data, "path": None}


@pytest.mark.slow_cases("parquet")
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_finevision(tmp_path: Path, kind: str) -> None:
    pairs = [[{"user": f"What is {n}?", "assistant": f"It is {n}."}] * (1 + n % 2) for n in range(4)]
    rows = [{"images": [cell(IMAGES[n]), cell(IMAGES[n + 1])], "texts": pairs[n], "score": n} for n in range(4)]
    write = {"parquet": parquet, "arrow": arrow}[kind]
    made = od.ShardDataset(write(tmp_path / f"fv.{kind}", rows), recipe(finevision))

    plain = []
    for n in range(4):
        turns = [{"role": role, "content": pair[role]} for pair in pairs[n] for role in ("user", "assistant")]
        turns[0]["content"] = "<image><image>" + turns[0]["content"]
        chat = json.dumps(turns).encode()
        plain.append({"__key__": str(n), "0.jpg": IMAGES[n], "1.jpg": IMAGES[n + 1], "json": chat})
    same = od.ShardDataset(write_shard(tmp_path / "same.tar", plain), recipe())
    assert len(made) == 4 and parts(made) == parts(same)

    batches = [
        [batch.model_inputs()["input_ids"].tolist() for batch in od.DataLoader(each, batch_size=2)]
        for each in (made, same)
    ]
    assert batches[0] == batches[1]


def test_function_chooses_and_orders_media(tmp_path: Path) -> None:
    rows = [{"images": [cell(IMAGES[0]), cell(IMAGES[1])]}]
    url = parquet(tmp_path / "a.parquet", rows)

    def chosen_image(record: dict[str, Any]) -> Any:
        return {"text": "<image> one", "images": [record["images"][1]]}

    functions = (last_image_first, chosen_image, without_types)
    backwards, one, untyped = (od.ShardDataset(url, recipe(each))[0] for each in functions)
    tar = [{"__key__": "a", "0.jpg": IMAGES[1], "1.jpg": IMAGES[0], "txt": b"<image><image>"}]
    swapped = od.ShardDataset(write_shard(tmp_path / "a.tar", tar), recipe())[0]

    def images(sample: od.Sample) -> list[Any]:
        return [part.tensor().tolist() for part in sample.parts if kind(part) == "image"]

    assert images(backwards) == images(swapped) == images(untyped)
    assert images(one) == images(swapped)[:1]


def test_none_leaves_a_sample_out_in_every_container(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "score": n % 4} for n in range(8)]

    def good_only(record: dict[str, Any]) -> Any:
        return record["text"] if int(record["score"]) > 2 else None

    urls = [parquet(tmp_path / "a.parquet", rows), arrow(tmp_path / "b.arrow", rows), jsonl(tmp_path / "c.jsonl", rows)]
    for url in urls:
        dataset = od.ShardDataset(url, recipe(good_only))
        assert len(dataset) == 2 and dataset.index().totals["ignored_fields"]["*"] == 6, url
        assert dataset.index().totals["bad"] == 0
    assert len(od.ShardDataset(table(tmp_path / "d.csv", rows), recipe(good_only))) == 2

    def nothing(record: dict[str, Any]) -> Any:
        return None if record["score"] < 9 else record["text"]

    some = od.ShardDataset([urls[0], jsonl(tmp_path / "e.jsonl", [{"text": "x", "score": 9}])], recipe(nothing))
    assert len(some) == 1


def test_nulls_and_numbers_of_columns_reach_the_function(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def note(record: dict[str, Any]) -> Any:
        seen.append(record)
        return str(record["n"])

    rows = [
        {"n": 1, "x": 2.5, "flag": True, "names": ["a", "b"], "caption": "c", "image": cell(IMAGES[0]), "images": []},
        {"n": 2, "x": None, "flag": None, "names": None, "caption": None, "image": None, "images": None},
    ]
    types = {
        "n": pa.int64(),
        "x": pa.float64(),
        "flag": pa.bool_(),
        "names": pa.list_(pa.string()),
        "caption": pa.string(),
        "image": pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        "images": pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    }
    url = parquet(tmp_path / "a.parquet", rows, **types)
    dataset = od.ShardDataset(url, recipe(note, "note"))
    assert dataset.index().totals["bad"] in (0, 1)  # an image without a placeholder comes first
    first, second = seen[0], seen[-1]
    assert first["image"] == od.Media("image", 0)
    assert {name: value for name, value in first.items() if name != "image"} == {
        "n": 1,
        "x": 2.5,
        "flag": True,
        "names": ["a", "b"],
        "caption": "c",
        "images": [],
    }
    assert second == {"n": 2, "x": None, "flag": None, "names": None, "caption": None, "image": None, "images": None}


def table(path: Path, rows: list[dict[str, Any]]) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def members(path: Path, rows: list[dict[str, Any]]) -> str:
    samples = [{name: str(value).encode() for name, value in row.items()} for row in rows]
    return write_shard(path, [{"__key__": str(n), **sample} for n, sample in enumerate(samples)])


WRITERS = {"csv": table, "tar": members, "jsonl": jsonl, "parquet": parquet, "arrow": arrow}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "tar"])
@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"text": "words"}, r"The other way round: columns=\{'words': 'text'\}"),
        ({"wordz": "text"}, "columns renames 'wordz', and no sample has a field of this name"),
        ({"words": "caption"}, "'words' the name 'caption', and the data already have a field of this name"),
    ],
)
def test_columns_that_the_data_do_not_have(tmp_path: Path, suffix: str, columns: dict[str, str], reason: str) -> None:
    url = WRITERS[suffix](tmp_path / f"a.{suffix}", [{"words": "a", "caption": "b"}])
    for _ in range(2):  # the second build takes facts from the cache
        with pytest.raises(ValueError, match=reason):
            od.ShardDataset(url, recipe(), columns=columns).index()


@pytest.mark.parametrize("suffix", WRITERS)
def test_columns_change_places(tmp_path: Path, suffix: str) -> None:
    url = WRITERS[suffix](tmp_path / f"a.{suffix}", [{"text": "one", "caption": "two"}])
    swapped = od.ShardDataset(url, recipe(), columns={"text": "caption", "caption": "text"})
    assert bytes(swapped[0].parts[0].token_ids.tolist()) == b"two"  # type: ignore[union-attr]
    assert bytes(od.ShardDataset(url, recipe())[0].parts[0].token_ids.tolist()) == b"one"  # type: ignore[union-attr]


def test_columns_must_be_a_mapping_to_different_names(tmp_path: Path) -> None:
    url = jsonl(tmp_path / "a.jsonl", [{"a": "x", "b": "y"}])
    with pytest.raises(ValueError, match="columns gives 'a' and 'b' the same new name 'text'"):
        od.ShardDataset(url, columns={"a": "text", "b": "text"})
    with pytest.raises(TypeError, match="columns is a dict of old name -> new name"):
        od.ShardDataset(url, columns=["a"])  # type: ignore[arg-type]


def fails_for_one(record: dict[str, Any]) -> Any:
    return {"text": record["text"][0] + "..."} if record["text"] else {"text": record["missing"]}


@pytest.mark.parametrize("write", [parquet, jsonl])
def test_exception_is_the_failure_of_one_sample(tmp_path: Path, write: Any) -> None:
    suffix = write.__name__
    url = write(tmp_path / f"a.{suffix}", [{"text": f"t{n}" if n != 5 else ""} for n in range(9)])
    dataset = od.ShardDataset(url, recipe(fails_for_one))
    assert len(dataset) == 8
    with pytest.raises(DataError, match=r"Recipe.record: fails_for_one, line \d+: KeyError: 'missing'"):
        od.DataLoader(dataset, batch_size=2)


def returns(value: Any) -> Any:
    return lambda record: value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "returned an int: return a string, a list of turns, a dict"),
        ({"text": {1: 2}}, "a key that is no string"),
        ({"nothing": "here"}, "neither a text nor a chat|its words are under"),
        ({"text": "<image>", "images": [od.Media("images", 7)]}, "the sample does not have; its fields: 'jpg'"),
        ({"text": "a", "other": od.Media("jpg", 0)}, "media can be items of a turn's content"),
        ({"text": "<image><image>", "images": [od.Media("jpg", 0)] * 2}, "refers to one image twice"),
        ({"text": "<image>"}, "2 images but 1 <image> placeholders"),
        ({"text": "<image>" * 3}, "Recipe.record must leave the placeholder out where a sample has no image"),
        ({"text": "a", "images": [True]}, "'images' has True: return references"),
        ({"text": "a", "images": [[od.Media("jpg", 0)]]}, "alone or in one list"),
        ([{"role": "user", "content": [None, "a"]}], "is None: leave the item out of a sample without such media"),
    ],
)
def test_what_a_function_must_not_return(tmp_path: Path, value: Any, reason: str) -> None:
    url = write_shard(tmp_path / "a.tar", [{"__key__": "a", "0.jpg": IMAGES[0], "1.jpg": IMAGES[1]}])
    index = od.ShardDataset(url, recipe(returns(value), "value")).index()
    assert index.totals["bad"] == 1
    assert re.search(reason, index.failure(0).reason), index.failure(0).reason


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, record: dict[str, Any]) -> Any:
        self.calls += 1
        return f"call {self.calls}"


def changes(record: dict[str, Any]) -> Any:
    record["text"] = record["text"].upper()
    return record


@pytest.mark.parametrize("write", [parquet, jsonl])
def test_function_that_is_not_deterministic_or_changes_its_record(tmp_path: Path, write: Any) -> None:
    url = write(tmp_path / f"a.{write.__name__}", [{"text": "a"}, {"text": "b"}])
    with pytest.raises(od.FunctionError, match="returns something else when it is called again"):
        od.ShardDataset(url, recipe(Counter(), "counter")).index()
    with pytest.raises(od.FunctionError, match="changes the record that it gets: return a new one"):
        od.ShardDataset(url, recipe(changes)).index()


def test_recipe_with_a_function_is_a_value(tmp_path: Path) -> None:
    import copy
    import pickle

    one = recipe(finevision)
    assert one == recipe(finevision) and one.fingerprint() == pickle.loads(pickle.dumps(one)).fingerprint()
    assert copy.deepcopy(one) == one == replace(one)
    assert one.fingerprint() != recipe().fingerprint() != recipe(vqa).fingerprint()
    assert recipe(finevision, "x").fingerprint() == recipe(vqa, "x").fingerprint()
    with pytest.raises(ValueError, match="record_id belongs to a function"):
        recipe(None, "x")
    with pytest.raises(ValueError, match='Give record_id="..."'):
        recipe(lambda record: record)


def test_id_of_another_function_is_refused(tmp_path: Path) -> None:
    def first(record: dict[str, Any]) -> Any:
        return record["text"]

    def second(record: dict[str, Any]) -> Any:
        # Another text.
        return record["text"] + "!"

    url = jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    od.ShardDataset(url, recipe(first, "v1")).index()
    for use in (lambda each: each.index(), lambda each: each.index(rebuild=True), lambda each: od.DataLoader(each)):
        with pytest.raises(od.FunctionError, match="another record_id"):
            use(od.ShardDataset(url, recipe(second, "v1")))
    assert len(od.ShardDataset(url, recipe(second, "v2"))) == 1


def test_identity_of_the_data_has_the_columns(tmp_path: Path) -> None:
    url = jsonl(tmp_path / "a.jsonl", [{"text": "one", "caption": "two"}, {"text": "3", "caption": "4"}])
    swapped = {"text": "caption", "caption": "text"}
    loader, other = (od.DataLoader(od.ShardDataset(url, recipe(), columns=each)) for each in (None, swapped))
    state = loader.state_dict()
    with pytest.raises(od.StateError, match="the list of shards, .* or how columns=, key= or containers= .* differs"):
        other.load_state_dict(state)
    other.load_state_dict(other.state_dict())


def test_command_line_renames(tmp_path: Path) -> None:
    url = jsonl(tmp_path / "a.jsonl", [{"transcription": "one"}])
    result = CliRunner().invoke(app, ["index", url, "--column", "transcription=text", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["totals"]["bad"] == 0
    assert CliRunner().invoke(app, ["profile", url, "--column", "transcription=text"]).exit_code == 0
    wrong = CliRunner().invoke(app, ["index", url, "--column", "transcription"])
    assert wrong.exit_code != 0 and "takes OLD=NEW" in wrong.stderr


def asks_with_tools(record: dict[str, Any]) -> Any:
    user = {"role": "user", "content": [*record["jpg"], {"type": "text", "text": record["json"]["question"]}]}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    turns = [
        user,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    return {"messages": [*turns, {"role": "assistant", "content": record["json"]["answer"]}], "tools": [tool]}


def test_a_models_own_chat_template_renders_what_a_function_makes(tmp_path: Path) -> None:
    recipe = replace(recipe_of(QWEN3), record=asks_with_tools)
    assert recipe.record is not None and replace(recipe) == recipe
    record = json.dumps({"question": "Where?", "answer": "Here."}).encode()
    samples = [{"__key__": "a", "0.jpg": jpeg(56, 56), "1.jpg": jpeg(112, 56), "json": record}]
    sample = od.ShardDataset(write_shard(tmp_path / "a.tar", samples), recipe)[0]
    names = [kind(part) for part in sample.parts]
    texts = [part for part in sample.parts if isinstance(part, TextPart)]
    said, learned = (
        "".join(trained().decode(ids.tolist(), skip_special_tokens=False) for ids in each)
        for each in ([part.token_ids for part in texts], [part.token_ids[part.loss] for part in texts])
    )
    assert names[:3] == ["text", "image", "image"] and "# Tools" in said and "Where?" in said
    assert "<tool_call>" in learned and "Here." in learned and "rain" not in learned


def chooses_none(record: dict[str, Any]) -> Any:
    return {"text": "no image", "images": [image for image in record.get("images", record.get("jpg")) if image is None]}


def chooses_none_by_null(record: dict[str, Any]) -> Any:
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}], "image": None}


@pytest.mark.parametrize("function", [chooses_none, chooses_none_by_null])
def test_no_media_are_chosen(tmp_path: Path, function: Any) -> None:
    rows = [{"images": [cell(IMAGES[0]), cell(IMAGES[1])]}]
    write_shard(tmp_path / "a.tar", [{"__key__": "k", "0.jpg": IMAGES[0], "1.jpg": IMAGES[1]}])
    for url in (parquet(tmp_path / "a.parquet", rows), str(tmp_path / "a.tar")):
        batch = next(iter(od.DataLoader(od.ShardDataset(url, recipe(function)), batch_size=1)))
        assert batch.image is None or not len(batch.image.patches)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"text": "x", "images": ["a.jpg", "b.jpg"]}, "the record names 2 .*, the sample holds 1"),
        ({"text": "x", "images": [{"bytes": None, "path": "a.jpg"}]}, "'images' has a dict"),
        ({"text": "x", "image": {"bytes": None, "path": "a.jpg"}}, "'image' has a dict"),
        ({"prompt": "a", "completion": "b"}, "model's own template"),
    ],
)
def test_media_that_a_record_names_are_not_lost(tmp_path: Path, made: Any, reason: str) -> None:
    url = parquet(tmp_path / "a.parquet", [{"picture": cell(IMAGES[0])}])
    with pytest.raises(DataError, match=reason):
        od.DataLoader(od.ShardDataset(url, recipe(lambda _: made, record_id=reason)))


def shown(record: dict[str, Any]) -> Any:
    return repr(record)


def text_of(url: str, made: od.Recipe, **more: Any) -> str:
    batch = next(iter(od.DataLoader(od.ShardDataset(url, made, **more), batch_size=1)))
    return bytes(token for token in batch.model_inputs()["input_ids"].flatten().tolist() if token < 256).decode()


def test_two_fields_of_one_name_are_an_error(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", [{"__key__": "k", "txt": b"one", "txt.gz": gzip.compress(b"two")}])
    with pytest.raises(DataError, match=r"field 'txt.gz': Recipe.record gets this as 'txt', and 'txt' too"):
        od.DataLoader(od.ShardDataset(str(tmp_path / "a.tar"), recipe(shown)))


@pytest.mark.parametrize("write", [parquet, arrow])
@pytest.mark.parametrize("row", [{"x": ["w"], "x.words": "hello"}, {"images": [b"a", b"b"], "images.0": b"c"}])
def test_columns_with_fields_of_one_name(tmp_path: Path, write: Any, row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="have fields of the same name: rename one"):
        od.DataLoader(od.ShardDataset(write(tmp_path / f"a.{write.__name__}", [row]), recipe(shown)))


def test_media_root_without_media_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(IMAGES[0])
    (tmp_path / "a.csv").write_text("picture_of_it,caption\na,hello\n")
    with pytest.warns(UserWarning, match="no sample has media") as caught:
        assert text_of(str(tmp_path / "a.csv"), recipe(), media_root=tmp_path) == "hello"
    assert len(caught) == 1


async def awaited(record: dict[str, Any]) -> Any:
    return record["text"]


def yields(record: dict[str, Any]) -> Any:
    yield record["text"]


@pytest.mark.parametrize("function", [awaited, yields])
def test_a_function_must_return_its_result(function: Any) -> None:
    with pytest.raises(TypeError, match="`async` or `yield`"):
        recipe(function, "v1")


def reads_a_file(record: dict[str, Any]) -> Any:
    with open(record["file"]) as file:
        return file.read()


def test_trouble_in_a_function_names_it() -> None:
    with pytest.raises(ValueError, match='it uses open, .* Give record_id="..."'):
        recipe(reads_a_file)
    function = recipe(reads_a_file, "v1").record
    assert function is not None
    with pytest.raises(od.StorageError, match=r"Recipe.record: reads_a_file, line \d+: cannot be used: Input/output"):
        function({"file": "/proc/self/mem"})  # which the system refuses to read


@pytest.mark.parametrize("suffix", ["jsonl", "tar", "parquet", "arrow", "items"])
@pytest.mark.parametrize("name", ["audio", "video"])
def test_a_stretch_of_a_clip_is_not_the_whole_clip(tmp_path: Path, suffix: str, name: str) -> None:
    """The same clip of 3 seconds is a part of its file, and was cut from another file before."""
    field, data = ("wav", audio(3.0)) if name == "audio" else ("mp4", clip(frames=72, rate=24))
    (tmp_path / f"a.{field}").write_bytes(data)
    stretches = [{"start": 0.5, "end": 1.0}, {"start": 30.5, "end": 33.5}]
    if suffix == "tar":
        rows = [
            {"__key__": str(n), field: data, "json": json.dumps({"text": "said", **each}).encode()}
            for n, each in enumerate(stretches)
        ]
        url = write_shard(tmp_path / "a.tar", rows)
    elif suffix == "items":
        items = [[{"type": name, name: f"a.{field}", **each}, {"type": "text", "text": "q"}] for each in stretches]
        chats = [[{"role": "user", "content": each}, {"role": "assistant", "content": "a"}] for each in items]
        url = jsonl(tmp_path / "a.jsonl", [{"messages": chat} for chat in chats])
    else:
        content = f"a.{field}" if suffix == "jsonl" else data
        url = WRITERS[suffix](tmp_path / f"a.{suffix}", [{name: content, "text": "said", **each} for each in stretches])
    reads = recipe() if name == "audio" else recipe(video=od.VideoPreprocessor(max_tokens=16, patch_size=14, merge=2))
    index = od.ShardDataset(url, reads, media_root=tmp_path).index()
    assert index.bad_rows().tolist() == [0]
    assert "'start' is 0.5 and 'end' is 1.0, of a clip of 3 s, and clips are taken whole" in index.failure(0).reason


def test_a_stretch_inside_of_a_struct_is_refused(tmp_path: Path) -> None:
    said = [{"start": 0.5}, {"offset": 0.0, "duration": 1.0}, {"start": None}, {"duration": 1.0}]
    cells = [{"bytes": audio(3.0), "path": "a.wav", "end": None, **each} for each in said]
    pq.write_table(pa.table({"audio": cells, "text": ["said"] * len(cells)}), tmp_path / "a.parquet")
    index = od.ShardDataset(tmp_path / "a.parquet", recipe()).index()
    assert index.bad_rows().tolist() == [0, 1] and "has 'start' in its struct" in index.failure(0).reason


@pytest.mark.parametrize(
    ("stretch", "seconds"),
    [
        ({"start": 0.0, "end": 1.0}, 1),
        ({"begin": "0.5", "stop": "1.5"}, 1),
        ({"start_ms": 0, "end_ms": 1000}, 1),
        ({"segment": [0.0, 1.0]}, 1),
        ({"offset": 0.0, "duration": 1.0}, 1),
        ({"offset": 1.5}, 1),  # of the longer one, the end; the other one was cut before
        ({"start": "00:00:31.5", "end": "00:00:32,5"}, 1),
    ],
)
def test_a_clip_that_is_longer_than_its_stretch(tmp_path: Path, stretch: dict[str, Any], seconds: float) -> None:
    (tmp_path / "long.wav").write_bytes(audio(3.0))
    (tmp_path / "cut.wav").write_bytes(audio(seconds + 0.1))
    rows = [{"audio": f"{name}.wav", "text": "said", **stretch} for name in ("long", "cut")]
    index = od.ShardDataset(jsonl(tmp_path / "a.jsonl", rows), recipe(), media_root=tmp_path).index()
    assert index.bad_rows().tolist() == [0]
    assert re.search("of a clip of 3 s, and clips are taken whole: cut the file", index.failure(0).reason)


@pytest.mark.parametrize(
    "said",
    [
        {"start": 0, "end": 48_000},  # in samples
        {"start_sample": 0, "end_sample": 16_000, "start_frame": 0, "end_frame": 1, "start_char": 0, "end_char": 1},
        {"segments": [{"start": 0, "end": 1}], "timestamps": [[0, 1], [1, 2]]},
        {"duration": 1.0},  # without an offset it may be in any unit
        {"offset": 0.0, "duration": 3.0},
    ],
)
def test_numbers_that_name_no_stretch(tmp_path: Path, said: dict[str, Any]) -> None:
    (tmp_path / "a.wav").write_bytes(audio(3.0))
    rows = [{"audio": "a.wav", "text": "said", **said}]
    index = od.ShardDataset(jsonl(tmp_path / "a.jsonl", rows), recipe(), media_root=tmp_path).index()
    assert index.totals["bad"] == 0


@pytest.mark.parametrize("key", ["image2", "image_2", "image_2_path", "image1"])
def test_a_numbered_key_next_to_one_that_is_read(tmp_path: Path, key: str) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(32, 32))
    rows = [{"image": "a.jpg", key: "a.jpg", "text": "t"}, {"image": "a.jpg", f"{key}_mask": "a.jpg", "text": "t"}]
    index = od.ShardDataset(jsonl(tmp_path / "a.jsonl", rows), recipe(), media_root=tmp_path).index()
    assert index.bad_rows().tolist() == [0]
    assert f"'{key}' names 'a.jpg', but this key is not read" in index.failure(0).reason
    assert "one list, under 'images'" in index.failure(0).reason
