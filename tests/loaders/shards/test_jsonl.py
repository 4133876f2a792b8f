"""Files of records with media in other files: published layouts, and records that must be refused."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from PIL import Image
from shard_factory import jpeg

from orchdata.loaders.errors import DataError, DecodeError, FieldError, StorageError, reason_kind
from orchdata.loaders.index.build import BuildProgress, build_index
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.limits import Limits
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.named_media import MediaFolder
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.shards.shard import Reading
from orchdata.loaders.storage.cache import CacheFolder

ASK, ANSWER = {"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "Noise."}
CHAT = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "Noise."}]


def photo(seed: int, height: int = 64) -> bytes:
    return jpeg(56, height, seed)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    (folder / "deep").mkdir(parents=True)
    for number in range(4):
        (folder / f"{number}.jpg").write_bytes(photo(number, 56 * (number + 1)))
    (folder / "deep" / "0.jpg").write_bytes(photo(9))
    return folder


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def reasons(index: Index) -> dict[str, tuple[str, str]]:
    failures = [index.failure(int(row)) for row in index.bad_rows()]
    return {failure.key: (failure.field, failure.reason) for failure in failures}


def stored(index: Index, row: int, recipe: Recipe | None = None) -> StoredSample:
    return StoredSample(index, OpenShards(limits=(recipe or Recipe()).limits, cache=CacheFolder()), row)


ENCODED = base64.b64encode(photo(1, 112)).decode()
SAID = {"type": "text", "text": "What is it?"}
BY_PATH, BY_URL = (
    {"type": "image", "image": "1.jpg"},
    {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{ENCODED}"}},
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "LLaVA": {"id": "a", "image": "1.jpg", "conversations": [ASK, ANSWER]},
    "LLaVA, several": {"image": ["1.jpg"], "conversations": [ASK, ANSWER]},
    "LLaMA-Factory": {"messages": CHAT, "images": ["1.jpg"]},
    "ms-swift, path": {"messages": CHAT, "images": [{"bytes": None, "path": "1.jpg"}]},
    "ms-swift, base64": {"messages": CHAT, "images": [ENCODED]},
    "data: in capitals": {"messages": CHAT, "images": [f"DATA:image/jpeg;BASE64,{ENCODED}"]},
    "Qwen": {"messages": [{"role": "user", "content": [BY_PATH, SAID]}, CHAT[1]]},
    "OpenAI": {"messages": [{"role": "user", "content": [BY_URL, SAID]}, CHAT[1]]},
    **{
        f"transformers, {key}": {
            "messages": [{"role": "user", "content": [{"type": "image", key: name}, SAID]}, CHAT[1]]
        }
        for key, name in (("path", "1.jpg"), ("url", "1.jpg"), ("base64", ENCODED))
    },
}


@pytest.mark.parametrize("form", ["jsonl", "json", "json, indented"])
def test_published_layouts_give_the_same_sample(tmp_path: Path, root: Path, form: str) -> None:
    records = list(LAYOUTS.values())
    path = tmp_path / f"train.{form[:5].rstrip(',')}"
    if form == "jsonl":
        write(path, records)
    else:
        path.write_text(json.dumps(records, indent=2 if "indented" in form else None))
    index = build_index([str(path)], Recipe(), reading=Reading(media_root=str(root)))
    assert reasons(index) == {}
    assert index.num_samples == len(records)
    # The question of LLaVA has one more newline.
    assert index.llm_tokens[2:].tolist() == [index.llm_tokens[2]] * (len(records) - 2)
    assert index.llm_tokens[:2].tolist() == [index.llm_tokens[2] + 1] * 2
    patches = [stored(index, row).decode(Recipe()).parts[1].patches for row in range(len(records))]
    assert all((each == patches[0]).all() for each in patches)
    assert index.key(0) == "a" and index.key(1) == "1"


def _media(index: Index, row: int) -> list[bytes | memoryview]:
    sample = stored(index, row)
    return list(sample.read(Recipe(), text=False).values())


@pytest.mark.parametrize("form", ["jsonl", "json", "csv"])
def test_media_are_found_without_the_text_in_records_of_any_length(tmp_path: Path, root: Path, form: str) -> None:
    records = [{"text": "ä\n" * 20_000 * number, "image": f"{number}.jpg"} for number in range(4)]
    path = tmp_path / f"a.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    elif form == "json":
        path.write_text(json.dumps(records, ensure_ascii=False))
    else:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "image"])
            writer.writeheader()
            writer.writerows(records)
    index = build_index([str(path)], Recipe(), reading=Reading(media_root=str(root)))
    assert reasons(index) == {}
    assert [bytes(_media(index, row)[0]) for row in range(4)] == [photo(n, 56 * (n + 1)) for n in range(4)]


def test_a_table_names_files_in_its_own_folder(root: Path) -> None:
    rows = [{"file_name": f"{number}.jpg", "text": f'a "{number}",\nline'} for number in range(3)]
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_json = build_index([str(root / "metadata.jsonl")], Recipe())
    said = [bytes(_media(of_json, 2)[0]), stored(of_json, 1).decode(Recipe()).parts[-1].token_ids.tolist()]
    (root / "metadata.jsonl").unlink()
    with open(root / "metadata.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["file_name", "text"])
        writer.writeheader()
        writer.writerows(rows)
    of_csv = build_index([str(root / "metadata.csv")], Recipe())
    for index in (of_json, of_csv):
        assert reasons(index) == {}
        assert [index.key(row) for row in range(3)] == ["0.jpg", "1.jpg", "2.jpg"]
    assert of_csv.llm_tokens.tolist() == of_json.llm_tokens.tolist()
    assert said == [bytes(_media(of_csv, 2)[0]), stored(of_csv, 1).decode(Recipe()).parts[-1].token_ids.tolist()]
    assert said[0] == photo(2, 168)


def test_names_of_files_in_another_form_of_unicode_are_found(tmp_path: Path) -> None:
    forms = ["caf\u00e9", "cafe\u0301"]
    for form, other in (forms, forms[::-1]):
        folder = tmp_path / str(len(form))
        folder.mkdir()
        (folder / f"{form}.jpg").write_bytes(photo(0, 56))
        (folder / "metadata.csv").write_text(f"file_name,text\n{other}.jpg,abc\n{other}s.jpg,abc\n")
        assert {*reasons(build_index([str(folder / "metadata.csv")], Recipe()))} == {f"{other}s.jpg"}


def test_a_row_of_a_table_ends_at_a_line_break_alone(tmp_path: Path) -> None:
    # Unicode line ends are allowed in cells without quotes.
    texts = ["line\u2028separated", "form\x0cfeed", "next\x85line", "a\x1cb", "a\x0bb", 'a quoted "\r\n" break\u2029']
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "id"), *((text, number) for number, text in enumerate(texts))])
    index = build_index([str(path)], Recipe())
    assert reasons(index) == {}
    for row, text in enumerate(texts):
        assert bytes(stored(index, row).decode(Recipe()).parts[-1].token_ids.tolist()).decode() == text


def test_absolute_paths_below_the_root(root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    records = [{"image": f"{folder}/deep/0.jpg", "text": "<image>"} for folder in (root, link)]
    records.append({"image": f"{root}/../x.jpg", "text": "<image>"})
    for given, good in ((root, 1), (link, 2)):  # a path through another link is not below it
        index = build_index(
            [write(tmp_path / f"{given.name}.jsonl", records)], Recipe(), reading=Reading(media_root=str(given))
        )
        assert index.num_rows - len(index.bad_rows()) == good
        assert "leads upwards" in index.failure(2).reason
        assert bytes(_media(index, 0)[0]) == (root / "deep" / "0.jpg").read_bytes()


def texts_of(index: Index) -> list[str]:
    assert not len(index.bad_rows()), reasons(index)
    parts = [stored(index, row).decode(Recipe()).parts[-1] for row in range(index.num_rows)]
    return [bytes(part.token_ids.tolist()).decode() for part in parts]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "txt"])
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_other_forms_of_records(tmp_path: Path, suffix: str, packed: str) -> None:
    texts = ["one", ' "two" is quoted', "three\u2028 "]
    written = {
        "jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts),
        "json": "".join(json.dumps({"text": text}) + "\n" for text in texts),
        "csv": 'text,id\none,1\n" ""two"" is quoted",2\nthree\u2028 ,3\n',
        "tsv": "text\tid\r\n" + "".join(f"{text}\t{number}\r\n" for number, text in enumerate(texts)),
        "txt": "\n".join((texts[0], "", *texts[1:])),
    }[suffix].encode()
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[packed]
    path = tmp_path / f"a.{suffix}{packed}"
    path.write_bytes(pack(written))
    index = build_index([str(path)], Recipe())
    assert texts_of(index) == texts
    again = build_index([str(path)], Recipe())  # from what is kept
    assert (again.build_id, again.fingerprint) == (index.build_id, index.fingerprint)
    path.write_bytes(pack(written.replace(b"one", b"One")))
    assert texts_of(build_index([str(path)], Recipe()))[0] == "One"


@pytest.mark.parametrize(
    ("suffix", "separator", "way_out"),
    [
        ("csv", ";", r"pandas.read_csv\(path, sep=';'\).to_csv\('new.csv', index=False\)$"),
        ("csv", "\t", "name the file .tsv$"),
        ("tsv", ",", "name the file .csv$"),
        ("tsv", ";", "pandas.read_csv"),
    ],
)
def test_cells_between_other_characters(tmp_path: Path, suffix: str, separator: str, way_out: str) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_text(f"id{separator}text\n1{separator}one\n2{separator}two, three\n")
    index = build_index([str(path)], Recipe())
    assert len(index.bad_rows()) == 2
    for _, reason in reasons(index).values():
        assert re.search(f"the header line looks separated by {re.escape(repr(separator))}.*{way_out}", reason)
        assert reason_kind(reason) == reason  # what to do stays


HOSTILE: dict[str, tuple[Any, str]] = {
    "upwards": ({"image": "deep/../../x.jpg"}, r"leads upwards"),
    "absolute": ({"image": "/etc/passwd"}, "absolute path"),
    "web": ({"image": "https://example.org/x.jpg"}, "nothing is downloaded"),
    "missing": ({"image": "nowhere.jpg"}, "no such file"),
    "link out": ({"image": "out.jpg"}, "leads out of media_root"),
    "loop": ({"image": "loop.jpg"}, "circle"),
    "pipe": ({"image": "pipe.jpg"}, "no regular file"),
    "device": ({"image": "deep"}, "no regular file"),
    "NUL": ({"image": "a\0.jpg"}, "NUL"),
    "not base64": ({"image": "data:image/jpeg;base64,@@@@"}, "not valid base64"),
    "any other key": (
        {"path": "photos/0.JPG", "caption": "a cat"},
        "'path' names 'photos/0.JPG', but this key is not read",
    ),
    "a flag": ({"image": True}, "the bool True, not a path"),
    "base64 of what is none": ({"image": base64.b64encode(b"<svg>" * 99_999).decode()}, "those of its media"),
    "not an image": ({"image": "text.jpg"}, "not an image"),
    "empty": ({"image": "empty.jpg"}, "empty"),
    "tags": ({"messages": [{"role": "user", "content": "Picture 1: <img>0.jpg</img>"}]}, "names a file in the text"),
    "two lists": ({"image": "0.jpg", "images": ["1.jpg"]}, "not the same"),
}


OF_THE_RECORD = {"tags", "two lists"}


def test_hostile_names_are_errors_of_their_sample(tmp_path: Path, root: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "secret.jpg").write_bytes(photo(1))
    (root / "out.jpg").symlink_to(tmp_path / "secret" / "secret.jpg")
    (root / "outside").symlink_to(tmp_path / "secret")
    (root / "inside.jpg").symlink_to("deep/0.jpg")
    (root / "loop.jpg").symlink_to("loop.jpg")
    os.mkfifo(root / "pipe.jpg")
    (root / "text.jpg").write_text("no image")
    (root / "empty.jpg").touch()
    records = [record | {"id": name, "text": "words"} for name, (record, _) in HOSTILE.items()]
    none = [{"id": f"none {value}", "image": value, "text": "words"} for value in (None, "", [], False, {"path": None})]
    url = write(tmp_path / "a.jsonl", [*records, *none, {"id": "good", "image": "inside.jpg", "text": "words"}])
    index = build_index([url], Recipe(), reading=Reading(media_root=str(root)))
    errors = reasons(index)
    assert errors.keys() == HOSTILE.keys()
    for name, (_, reason) in HOSTILE.items():
        field, said = errors[name]
        assert reason in said, name
        assert field == ("json" if name in OF_THE_RECORD else "image.0")
        assert len(said) < 300, name
    # A recipe without images has no use for them.
    assert (
        reasons(build_index([url], Recipe(image=None), reading=Reading(media_root=str(root)))).keys() == OF_THE_RECORD
    )


def test_a_device_is_looked_at_and_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "null.jpg").symlink_to("/dev/null")
    with pytest.raises(DecodeError, match="no regular file"), MediaFolder(str(folder)).open("null.jpg"):
        pass


BAD_LINES: dict[str, tuple[str, str]] = {
    "broken": ('{"text": ', "not valid JSON"),
    "deep": ("[" * 200_000, "recursion"),
    "twice": ('{"image": "0.jpg", "image": "1.jpg", "text": "a"}', "key comes twice"),
    "bytes": ("\udcff", "not valid UTF-8"),
    "types": ('{"messages": {"role": "user"}}', "not a list of turns"),
}


def test_bad_lines_are_errors_of_their_sample(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = ['\ufeff{"text": "first"}', "", *(line for line, _ in BAD_LINES.values()), '{"text": "last"}']
    path.write_bytes("\r\n".join(lines).encode("utf-8", "surrogateescape"))
    recipe = Recipe(limits=Limits(text_bytes=2000))
    index = build_index([str(path)], recipe)
    assert index.bad_rows().tolist() == list(range(1, len(BAD_LINES) + 1))
    for number, (name, (_, reason)) in enumerate(BAD_LINES.items(), 1):
        if name != "deep":  # which is above the limit too
            assert reason in reasons(index)[str(number)][1], name
    assert index.llm_tokens[[0, -1]].tolist() == [5, 4]
    deep = build_index([str(path)], Recipe())
    assert "recursion" in reasons(deep)["2"][1]


@pytest.mark.parametrize(
    ("content", "good", "reason"),
    [
        ('{"text":\n"a"}', 0, "not an array"),
        ('[{"text": "a"}, {"text": ', 1, "not valid JSON"),
        ('[{"text": "a"}, {"text": "b"}', 2, "has no end"),
        ('[{"text": "a"},,{"text": "b"}]', 1, "not valid JSON"),
        ('[{"text": "a"}]\n[{"text": "b"}]', 1, "one array per file"),
        ('[] {"text": "a"}', 0, "one array per file"),
        ("[" * 100_000, 0, "not valid JSON"),
        ("", 0, "not an array"),
        ('[{"text": "a"}] ' + " " * (3 << 20) + '{"text": "b"}', 1, "one array per file"),
    ],
)
def test_a_damaged_array_keeps_what_stands_before_the_damage(
    tmp_path: Path, content: str, good: int, reason: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    index = build_index([str(path)], Recipe())
    assert index.num_samples - index.bad_rows().size == good
    assert reason in index.failure(int(index.bad_rows()[-1])).reason
    assert index.shards[0].lost_bytes > 0


def test_arrays_are_read_in_pieces(tmp_path: Path) -> None:
    # Elements and characters cross the borders of the blocks in which a file is read.
    texts = [chr(233 + i % 5000) * (i * 37 % 5000) + "x" for i in range(900)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": text} for text in texts], ensure_ascii=False))
    assert path.stat().st_size > 3 << 20
    index = build_index([str(path)], Recipe())
    assert index.llm_tokens.tolist() == [len(text.encode()) for text in texts]


def _rewrite(path: Path) -> None:
    path.write_bytes(photo(1, 280))


def _touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def _swap(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_rewrite, "was changed"), (_touch, "was changed"), (Path.unlink, "no such file"), (_swap, "leads out")],
)
def test_what_was_changed_since_it_was_indexed_is_an_error_and_indexed_again(
    tmp_path: Path, root: Path, change: Callable[[Path], None], reason: str
) -> None:
    url = write(tmp_path / "a.jsonl", [{"image": "1.jpg", "text": "a"}, {"image": "2.jpg", "text": "b"}])
    index = build_index([url], Recipe(), reading=Reading(media_root=str(root)))
    change(root / "1.jpg")
    with pytest.raises((FieldError, DataError), match=reason):
        stored(index, 0).decode(Recipe())
    assert len(stored(index, 1).decode(Recipe()).parts) == 2
    scanned: list[bool] = []

    def note(progress: BuildProgress) -> None:
        scanned.append(progress.measured)

    again = build_index([url], Recipe(), reading=Reading(media_root=str(root)), progress=note)
    assert scanned == [True]
    assert again.bad_rows().tolist() == ([] if change in (_rewrite, _touch) else [0])
    build_index([url], Recipe(), reading=Reading(media_root=str(root)), progress=note)
    assert scanned == [True, False]  # nothing changed since


def test_a_folder_that_is_gone_says_nothing_of_its_files(tmp_path: Path, root: Path) -> None:
    url = write(tmp_path / "a.jsonl", [{"image": "1.jpg", "text": "a"}])
    root.rename(tmp_path / "unmounted")
    with pytest.raises(StorageError, match="media_root"):
        build_index([url], Recipe(), reading=Reading(media_root=str(root)), retry_seconds=0)


def test_ids_that_come_back_are_distinguished(tmp_path: Path) -> None:
    url = write(tmp_path / "a.jsonl", [{"id": 7, "text": "a"}, {"id": "7", "text": "b"}, {"id": "", "text": "c"}])
    index = build_index([url], Recipe())
    assert [index.key(row) for row in range(3)] == ["7", "7#1", "2"]
    url = write(tmp_path / "b.jsonl", [{"__key__": "7", "text": "a"}, {"__key__": "7", "text": "b"}])
    assert build_index([url], Recipe()).bad_rows().tolist() == [0, 1]


def test_media_fill_their_places_in_the_order_they_are_named(tmp_path: Path, root: Path) -> None:
    url = write(tmp_path / "a.jsonl", [{"text": "<image> and <image>", "images": ["3.jpg", "0.jpg"]}])
    index = build_index([url], Recipe(), reading=Reading(media_root=str(root)))
    assert [Image.open(io.BytesIO(bytes(data))).height for data in _media(index, 0)] == [4 * 56, 56]


def test_a_clip_under_a_key_for_files_is_an_error_and_addresses_titles_and_ids_are_not(tmp_path: Path) -> None:
    texts = [
        {"url": "https://a.org/b.jpg"},
        {"path": "https://a.org/b.jpg"},
        {"id": "c.jpg"},
        {"title": "Kitten.jpg"},
        {"file": "a.py"},
        {"tags": ["e.png"]},
        {"question": "What is f.png?"},
    ]
    records = [{"recording": "0.flac"}, *texts]
    url = write(
        tmp_path / "a.jsonl", [{"text": "words", "id": str(number)} | one for number, one in enumerate(records)]
    )
    field, reason = reasons(build_index([url], Recipe())).pop("0")
    assert field == "audio.0" and "call the key 'audio'" in reason
    assert [*reasons(build_index([url], Recipe()))] == ["0"]
