"""`docs/errors.md` has the words of each refusal of the first hour, and each exception; calls raise them as written."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset, default_collate
from typer.testing import CliRunner
from webdataset import TarWriter

import orchdata as od
from orchdata.cli import app
from orchdata.ranks.agreement import check_accounts

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
SECTIONS = dict(re.findall(r"^### `(.*?)`\n\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the calls use, in the working folder."""
    for name in ("data", "photos"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.md").write_text("a note")
    picture = io.BytesIO()
    Image.new("RGB", (56, 56)).save(picture, "PNG")
    with TarWriter(str(tmp_path / "data" / "a.tar"), encoder=False) as writer:
        writer.write({"__key__": "text", "txt": b"some words"})
        writer.write({"__key__": "image", "txt": b"<image> of nothing", "png": picture.getvalue()})
        writer.write({"__key__": "long", "txt": b"x" * 3000})
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Items(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def dataset(**options: Any) -> od.ShardDataset:
    return od.ShardDataset("data/a.tar", **options)


def loader(data: Any = None, **options: Any) -> od.DataLoader:
    return od.DataLoader(dataset() if data is None else data, **{"batch_size": 3} | options)


def batch() -> od.Batch:
    (only,) = loader()
    return only  # type: ignore[no-any-return]


def forgets_to_return(record: Any) -> None:
    record["txt"].strip()


def media_elsewhere() -> None:
    records = [{"image": f"{number}.jpg", "text": "some words"} for number in range(10)]
    Path("named.jsonl").write_text("\n".join(map(json.dumps, records)))
    len(od.ShardDataset("named.jsonl", media_root="data"))


def no_steps() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the loader has no steps")
        loader(batch_size=50, drop_last=True)


def other_recipe_than_the_model_s() -> None:
    from transformers import Qwen2VLConfig

    loader(dataset(recipe=od.Recipe(audio=None)), collate_fn=od.hf.Inputs(Qwen2VLConfig()))


def script_without_a_guard() -> None:
    Path("script.py").write_text(
        "import orchdata as od\n"
        "list(od.DataLoader(list('abc'), cost=[1] * 3, num_workers=1, multiprocessing_context='forkserver'))\n"
    )
    ended = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=300)
    raise RuntimeError(ended.stderr[ended.stderr.rindex("RuntimeError: ") + len("RuntimeError: ") :])


# The message's first words -> the call.
REFUSALS: dict[str, Callable[[], Any]] = {
    "no file matches": lambda: len(od.ShardDataset("nowhere/*.tar")),
    "photos is a folder without metadata.jsonl or metadata.csv": lambda: len(od.ShardDataset("photos")),
    "data: media_root has none of the files": media_elsewhere,
    "notes.md: unknown kind of shard": lambda: len(od.ShardDataset("notes.md")),
    "DataLoader takes a data set, got the path": lambda: od.DataLoader("data/*.tar"),
    "Recipe.record returned None for all": lambda: loader(dataset(recipe=od.Recipe(record=forgets_to_return))),
    "filter 'score > 3': there is no column 'score'": lambda: len(dataset().filter("score > 3")),
    "str is no processor or tokenizer of transformers': pass the object": lambda: od.hf.recipe(
        "Qwen/Qwen2.5-VL-7B-Instruct"
    ),
    "a ShardDataset has its own order": lambda: loader(sampler=[2, 1, 0]),
    "collate_fn=default_collate takes tensors": lambda: loader(collate_fn=default_collate),
    "qwen2_vl looks for image where the token": other_recipe_than_the_model_s,
    "collate_fn is a lambda": lambda: next(iter(loader(collate_fn=lambda samples: len(samples), num_workers=1))),
    "a worker process runs the script": script_without_a_guard,
    "the loader has no steps": no_steps,
    "all ranks of a loader must plan the same steps": lambda: check_accounts({0: {"seed": 1}, 1: {"seed": 2}}),
    "data/a.tar: sample 'long' has 3000 llm positions": lambda: loader(balance=od.Balance(max_tokens=2048)),
    "Items is an IterableDataset, and this loader's samples are shared by 2 ranks": lambda: loader(Items(), dp=(0, 2)),
    "'DataLoader' object is not subscriptable": lambda: loader()[0],  # type: ignore[index]
    "a Batch is not a mapping": lambda: batch()["input_ids"],  # type: ignore[index]
    "Batch has no 'pixel_values'": lambda: batch().pixel_values,
    "the batch has image, but no features of it were given": lambda: batch().merge(
        torch.zeros(len(batch().llm.input_ids), 4), {}
    ),
}


def words_under_another_name() -> None:
    Path("other.jsonl").write_text(json.dumps({"prompt": "some words"}))
    loader(od.ShardDataset("other.jsonl"))


def replaced_shard() -> None:
    shutil.copy("data/a.tar", "replaced.tar")
    indexed = od.ShardDataset("replaced.tar")
    assert len(indexed) == 3
    Path("replaced.tar").unlink()
    Path("replaced.tar").mkdir()
    indexed[0]


def longer_shard() -> None:
    shutil.copy("data/a.tar", "longer.tar")
    begun = loader(od.ShardDataset("longer.tar"))
    with open("longer.tar", "ab") as file:
        file.write(bytes(512))
    list(begun)


def damaged_index() -> None:
    assert CliRunner().invoke(app, ["index", "data/a.tar", "--out", "a.index"]).exit_code == 0
    Path("a.index").write_bytes(bytes(Path("a.index").stat().st_size))
    dataset(index_file="a.index").index()


def lost_mount() -> None:
    shutil.copy("data/a.tar", "lost.tar")
    indexed = od.ShardDataset("lost.tar")
    assert len(indexed) == 3
    Path("lost.tar").unlink()
    indexed[0]


def missing_package() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "soundfile", None)
        len(dataset(recipe=od.Recipe(text=od.TextPreprocessor(max_tokens=5000))))


class TwiceShard(od.Shard):
    def facts(self) -> pa.Table:
        return pa.table({"key": ["a", "b", "a"], "field": ["txt"] * 3})

    def read(self, rows: Sequence[int]) -> list[bytes]:
        return [b"some words" for _ in rows]


class Twice(od.Container):
    """One key for two samples."""

    def claims(self, path: str) -> bool:
        return path.endswith(".md")

    def open(self, source: od.ShardSource) -> TwiceShard:
        return TwiceShard()


def changing_function() -> None:
    seen: list[Any] = []

    def numbered(record: Any) -> str:
        seen.append(record)
        return f"record {len(seen)}"

    len(dataset(recipe=od.Recipe(record=numbered, record_id="numbered")))


def failing_loader() -> None:
    def loads() -> Iterator[list[int]]:
        yield [1, 2]
        raise OSError("the mount is gone")

    list(od.post_balance(loads(), cost=lambda sample: sample))


# Exception -> words that its section has, and a call that raises it with these words.
EXCEPTIONS: dict[str, tuple[str, Callable[[], Any]]] = {
    "OrchdataError": ("", words_under_another_name),
    "DataError": ("its words are under 'prompt', which no rule reads", words_under_another_name),
    "ShardError": ("cannot be opened", replaced_shard),
    "StaleIndexError": ("when it was indexed", longer_shard),
    "MissingIndexError": ("no index for this shard under this recipe", lambda: loader(dp=(0, 2))),
    "DamagedIndexError": ("it does not begin like such a file", damaged_index),
    "StorageError": ("cannot be opened: No such file or directory", lost_mount),
    "PackageError": ("the package 'soundfile'", missing_package),
    "StateError": (
        "the state belongs to another loader",
        lambda: loader(seed=1, shuffle=True).load_state_dict(loader(seed=2, shuffle=True).state_dict()),
    ),
    "TooManyFailures": (
        "samples cannot be used, the policy allows",
        lambda: loader(dataset(recipe=od.Recipe(text=od.TextPreprocessor(max_tokens=2))), on_error="skip"),
    ),
    "ContainerError": ("samples 0 and 2 both have the key", lambda: od.check_container(Twice(), "notes.md")),
    "FunctionError": ("returns something else when it is called again", changing_function),
    "StepError": ("rank 0 failed at step", failing_loader),
}


def test_the_page_has_these_and_no_others() -> None:
    assert len(REFUSALS) >= 20
    assert list(SECTIONS) == [*REFUSALS, *(f"od.{name}" for name in EXCEPTIONS)]
    public = {name for name in od.__all__ if _is_exception(getattr(od, name, None))}
    assert public == set(EXCEPTIONS)


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def test_each_section_says_what_it_means_and_what_to_do() -> None:
    for heading, section in SECTIONS.items():
        meaning, _, remedy = section.partition("\n\nWhat to do: ")
        assert len(meaning.split()) > 3 and len(remedy.split()) > 3, heading


@pytest.mark.slow_cases("a worker process runs the script")
@pytest.mark.parametrize(("words", "call"), REFUSALS.items(), ids=list(REFUSALS))
def test_a_refusal_begins_with_the_words_of_its_heading(folder: Path, words: str, call: Callable[[], Any]) -> None:
    kinds = (ValueError, TypeError, AttributeError, OSError, RuntimeError, UserWarning, od.StorageError)
    with pytest.raises(kinds) as raised:
        call()
    assert str(raised.value).replace(f"{folder}/", "").startswith(words)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("name", "words", "call"), [(name, *each) for name, each in EXCEPTIONS.items()])
def test_an_exception_has_the_words_of_its_section(name: str, words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(getattr(od, name)) as raised:
        call()
    assert words in str(raised.value)
    assert words in SECTIONS[f"od.{name}"]
