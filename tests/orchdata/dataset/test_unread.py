"""Warnings of what samples have and the model does not get: a training on less than the user thinks is never silent."""

from __future__ import annotations

import json
import re
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shard_factory import RECIPE, jpeg, write_shard
from tars import wav
from typer.testing import CliRunner

import orchdata as od
from orchdata.cli import app
from orchdata.dataset.advice import unread_of, warn_of_unread
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples import compose
from orchdata.loaders.text.messages import HARMLESS
from orchdata.loaders.unread_names import SHARD_NAMES, UnreadNames, above, names_of_record

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content if m.content is string else m.content[0].text }}"
    "{{ m.time }}{{ m.name }}</s>\n{% endfor %}"
)


def run_cli(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments])


CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "Hi", "weight": 0}], "time": 3},
    {"role": "assistant", "content": "ho", "weight": 1, "name": "assistant", "meta": {"x": 1}},
]


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
    assert "with the samples that have them: 'jpg' (4)" in message
    assert "'jpg' is of a modality that the recipe lacks: image= of od.Recipe, or od.hf.recipe(processor)" in message


def test_what_is_read_is_no_warning(pictures: str) -> None:
    assert warned(pictures, RECIPE) == []


def names_of(dataset: od.ShardDataset) -> dict[str, int]:
    return dict(dataset.index().totals["unread"]["names"])


def records(folder: Path, *rows: dict[str, Any], **options: Any) -> od.ShardDataset:
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = od.Recipe(text=od.TextPreprocessor(**options))
    return od.ShardDataset(str(folder / "a.jsonl"), recipe=recipe)


NOTHING: dict[str, Any] = {"n": None, "e": "", "l": [], "d": {}}


def test_what_gives_way_or_says_nothing_is_no_unread_field(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows = [
        {"text": "four", "question": "what is 2 + 2?", "label": False, "weight": 0, "image": False, **NOTHING},
        {"caption": "five", "meta": {"a": {"b": {"c": {"d": 1}}}}, "id": "1", "url": "https://a.b"},
        {"messages": turns, "text": "hi ho", "prompt": "hi", "many": {f"{at}": 1 for at in range(65)}},
    ]
    dataset = records(tmp_path, *rows)
    assert names_of(dataset) == {
        **dict.fromkeys(("question", "label", "weight", "url", "text", "prompt", "many"), 1),
        **dict.fromkeys(("meta", "meta.a", "meta.a.b", "meta.a.b.c"), 1),
    }
    (message,) = warned_of(dataset)
    said = "'label' (1), 'many' (1), 'meta' (1), 'prompt' (1), 'question' (1), 'text' (1), 'weight' (1). Recipe(keep"
    assert said in message
    assert names_of(records(tmp_path / "b", {"text": "abc", "question": "why?"}, fields=("question",))) == {"text": 1}
    assert warned_of(records(tmp_path / "c", *({"text": "abc", "id": each, "width": 3} for each in "ab"))) == []


def test_members_of_tars_are_named_without_numbers_and_their_json_by_its_keys(tmp_path: Path) -> None:
    sample = {"0.jpg": jpeg(40, 30), "txt": b"a", "0.sph": b"..", "1.sph": b"..", "a.npy": b".", "ts": b"..", "wv": b""}
    said = json.dumps({"start_sample": 3, "image": 7, "caption": "b", "objects": [{"bbox": [1]}, {"ref": "x"}]})
    samples = [{"__key__": f"{at}", **sample, "json": said.encode()} for at in range(2)]
    path = write_shard(tmp_path / "a.tar", samples)
    first = od.ShardDataset(path, recipe=RECIPE, index_fields=("ts",))
    names = ("sph", "a.npy", "start_sample", "image", "caption", "objects", "objects[].bbox", "objects[].ref")
    assert unread_of(first, first.index())["names"] == dict.fromkeys(names, 2)
    # Another recipe reads no JSON again, and counts the same.
    image = od.ImagePreprocessor(patch_size=14, merge=2, max_tokens=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "parse_json", None)
        assert names_of(od.ShardDataset(path, recipe=od.Recipe(image=image))) == dict.fromkeys((*names, "ts"), 2)
    # What is kept is read.
    counts = names_of(od.ShardDataset(path, recipe=od.Recipe(image=image, keep=("objects", "ts"))))
    assert counts == {name: 2 for name in names if not name.startswith("objects")}
    assert names_of(od.ShardDataset(path, recipe=od.Recipe(image=image, keep=("json", "ts")))) == {"sph": 2, "a.npy": 2}


def test_columns_are_counted_by_statistics_and_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {
        "text": ["a", "b", "c"],
        "labels": [[1, 2], None, []],
        "weight": [0.0, None, 0.5],
        "empty": pa.nulls(3, pa.int64()),
        "none": pa.nulls(3),
        "boxes": [[{"x": 1}], None, None],
        "response": ["a", "", None],
        "answer": [7, 10, None],
        "captions": [["a"], [], []],
        "id": [1, 2, 3],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    dataset = od.ShardDataset(tmp_path / "a.parquet", recipe=RECIPE)
    assert names_of(dataset) == {"labels": 3, "weight": 2, "boxes": 1, "response": 1, "answer": 2, "captions": 1}
    pq.write_table(pa.table(columns), tmp_path / "b.parquet", write_statistics=False)
    plain = od.ShardDataset(tmp_path / "b.parquet", recipe=RECIPE)
    assert names_of(plain) == names_of(dataset) | {"weight": 3, "boxes": 3, "empty": 3}


def test_what_ignore_names_is_not_said_and_changes_nothing_else(tmp_path: Path) -> None:
    rows = [{"text": "abc", "label": 1, "meta": {"a": 1}, "meta_too": 1}]
    records(tmp_path, *rows)
    path, quiet = tmp_path / "a.jsonl", ("label", "meta")
    loud, ignoring = od.ShardDataset(path), od.ShardDataset(path, ignore=quiet)
    assert "'label' (1), 'meta' (1), 'meta_too' (1)." in warned_of(loud)[0]
    assert "have them: 'meta_too' (1)." in warned_of(ignoring)[0]
    assert ignoring.index().fingerprint == loud.index().fingerprint and names_of(ignoring) == names_of(loud)
    with pytest.raises(TypeError, match="ignore is a tuple of names"):
        od.ShardDataset(path, ignore="label")


def test_sources_are_named_and_one_rank_speaks(tmp_path: Path) -> None:
    one, two = (records(tmp_path / name, {"text": "abc", name: 1}) for name in ("weight", "mask"))
    mixture = od.Mixture({"a": od.Source(one, weight=1), "b": od.Source(two, weight=1)})
    with warnings.catch_warnings(action="error"):
        warn_of_unread(one, one.index(), rank=1)
    assert "of source 'a' 'weight' (1); of source 'b' 'mask' (1)." in warned_of(mixture)[0]


def test_data_without_a_token_to_learn_are_one_warning(tmp_path: Path) -> None:
    shards = write_shard(tmp_path / "a.tar", [{"__key__": "0", "jpg": jpeg(40, 30), "cls": b"3"}])
    classes, message = warned(shards, RECIPE)
    assert "'cls' (1)" in classes and "no sample has a token to learn" in message


def test_images_alone_are_fine_where_the_user_s_function_or_a_kept_field_is_learned(tmp_path: Path) -> None:
    shards = write_shard(tmp_path / "a.tar", [{"__key__": "0", "jpg": jpeg(40, 30), "cls": b"3"}])
    assert not any("to learn" in message for message in warned(shards, RECIPE, collate_fn=len))
    assert warned(shards, od.Recipe(image=RECIPE.image, keep=("cls",))) == []


def test_what_stands_next_to_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(40, 30))
    more = {"bbox": [1, 2, 3, 4], "weight": 0, "caption": None}
    rows = [{"images": [{"path": "a.jpg", **more}], "text": "a cat"}, {"image": {"path": "a.jpg"}, "text": "a cat"}]
    rows.append({"video": {"frames": ["a.jpg"] * 2, "fps": 1, "weight": 0}, "text": "a cat"})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reads = od.Recipe(image=RECIPE.image, video=od.VideoPreprocessor(max_tokens=16, patch_size=14, merge=2))
    dataset = od.ShardDataset(tmp_path / "a.jsonl", recipe=reads, media_root=tmp_path)
    assert set(names_of(dataset)) == {"images[].bbox", "images[].weight", "video.weight"}
    structs = [[{"bytes": jpeg(40, 30), "bbox": [1, 2], "score": None}], [{"bytes": jpeg(40, 30), "bbox": [3, 4]}]]
    pq.write_table(pa.table({"images": structs, "text": ["a cat", "a dog"]}), tmp_path / "a.parquet")
    assert names_of(od.ShardDataset(tmp_path / "a.parquet", recipe=RECIPE)) == {"images[].bbox": 2}
    # Of two names in an item one is read.
    item = {"type": "image", "image": {"path": "a.jpg", "b": 0}, "data": "aGVs", "url": "b.jpg", "timestamps": "1-2"}
    turns = [{"role": "user", "content": [item]}, {"role": "assistant", "content": "a cat"}]
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    dataset = od.ShardDataset(tmp_path / "b.jsonl", recipe=RECIPE, media_root=tmp_path)
    assert set(names_of(dataset)) == {f"messages[].content[].{key}" for key in ("image.b", "data", "url", "timestamps")}


@pytest.mark.parametrize(("template", "read"), [(None, {}), (TEMPLATE, {"messages[].time"})])
def test_keys_of_turns_that_neither_the_library_nor_the_template_names(
    tmp_path: Path, template: Any, read: Any
) -> None:
    options = {} if template is None else {"template": od.ChatTemplate.from_jinja(template)}
    tools = [{"type": "function", "function": {"name": "f", "arguments": {"own": 1}}}] if template is None else None
    rows = [{"messages": CHAT, "loss_mask": [0, 1], "tools": [] if tools else None}]
    dataset = records(tmp_path, *rows, **options)
    of_turns = {"messages[].content[].weight", "messages[].time", "messages[].meta", "messages[].meta.x"} - {*read}
    assert names_of(dataset) == dict.fromkeys(("loss_mask", *of_turns), 1)
    (message,) = warned_of(dataset)
    assert "'messages[].meta' (1)" in message and "messages[].meta.x" not in message


def test_tools_in_a_member_of_their_own_are_read(tmp_path: Path) -> None:
    turns = json.dumps([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ho"}]).encode()
    members = {"messages.json": turns, "tools.json": b'[{"name": "f"}]', "meta.json": b'{"score": 1}'}
    shards = write_shard(tmp_path / "a.tar", [{"__key__": "0", **members}])
    text = od.TextPreprocessor(template=od.ChatTemplate.from_jinja("{{ tools }}" + TEMPLATE))
    assert names_of(od.ShardDataset(shards, recipe=od.Recipe(text=text))) == {"score": 1}


def test_the_table_has_all_names_and_the_exit_code_is_0(tmp_path: Path) -> None:
    records(tmp_path, {"text": "abc", "weight": 0, "meta": {"id": 1}, "id": "x", "url": "u"})
    path = str(tmp_path / "a.jsonl")
    printed = run_cli("index", path, "--ignore", "meta")
    assert printed.exit_code == 0 and all(f"1  {name}\n" in printed.stdout for name in ("meta", "meta.id", "url"))
    assert "'weight' (1). " in printed.stderr and "'meta'" not in printed.stderr
    names = {"weight": 1, "meta": 1, "meta.id": 1, "url": 1}
    assert json.loads(run_cli("index", path, "--json").stdout)["totals"]["unread"] == {"names": names, "others": 0}
    profiled = run_cli("profile", path, "--json", "--html", str(tmp_path / "a.html"))
    assert json.loads(profiled.stdout)["unread"] == names
    assert "<bdi>meta.id</bdi>" in (tmp_path / "a.html").read_text()


def test_an_edge_of_a_clip_in_a_form_that_is_not_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(wav(16_000, 16_000))
    row = {"audio": "a.wav", "text": "hello", "end": 1.0, "timestamp": 17}
    recipe = od.Recipe(image=None, audio=od.AudioPreprocessor())
    for number, (start, said) in enumerate(((0.0, set()), ("0.0s", {"start"}), ([0.0], {"start"}))):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(row | {"start": start}) + "\n")
        cells = {name: [value] for name, value in (row | {"start": start}).items()}
        pq.write_table(pa.table(cells | {"audio": [wav(16_000, 16_000)]}), path.with_suffix(".parquet"))
        for each in (path, path.with_suffix(".parquet")):
            dataset = od.ShardDataset(str(each), recipe=recipe, media_root=str(tmp_path))
            assert not dataset.index().totals["bad"] and set(names_of(dataset)) == {"timestamp", *said}


# Counts of unread names: bounded in number, exact for frequent ones.


RULES = Recipe().rules
LAYOUTS = Path(__file__).parents[3] / "docs" / "layouts.md"


def test_the_docs_list_the_names_of_which_the_warning_is_silent() -> None:
    listed = LAYOUTS.read_text().partition("compared whole:")[2].partition("###")[0]
    assert {*re.findall("`(.+?)`", listed)} == HARMLESS


@pytest.mark.slow
def test_frequent_names_are_counted_exactly_in_memory_that_does_not_grow_with_names() -> None:
    def peak(records: int) -> int:
        tracemalloc.start()
        unread = UnreadNames()
        for at in range(records):
            unread.add(
                names_of_record({f"own {at} {key}": 1 for key in range(100)} | {"w": 0}, None, RULES, "", (), ())
            )
        totals = unread.totals()
        assert len(totals["names"]) == SHARD_NAMES and totals["names"]["w"] == records
        assert totals["others"] + sum(totals["names"].values()) == 101 * records
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(900) < 1.1 * peak(300)  # each record has 100 names that come once


def test_hostile_names_are_short_and_printable() -> None:
    deep: object = 1
    for _ in range(5000):
        deep = {"a": [[deep]]}
    names = names_of_record({"\ud800\x1b[2J": {"\udcff" * 200: 1}, "k" * 9999: 1, "d": deep}, None, RULES, "", (), ())
    assert all(len(name) <= 80 and name.isprintable() for name in names) and json.dumps(names)
    assert sum(name.startswith("d") for name in names) == 3
    assert above("a[].b.c") == ["a", "a[]", "a[].b", "a[].b.c"]
