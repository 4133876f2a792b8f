"""What is shown is what the model gets: the very tokens of a batch, what of them is trained, and the pixels."""

from __future__ import annotations

import io
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import printed
import pytest
import soundfile
from PIL import Image
from shard_factory import RECIPE, audio, chat, jpeg, omni_samples, png, write_shard

import orchdata as od
from orchdata.showing import shown_rows

TALK = [
    {"__key__": "talk", "json": chat("What is this? <image>", "A \U0001f600 cat.\x1b[31m"), "jpg": jpeg(64, 48)},
    {"__key__": "sound", "json": chat("<audio> Who speaks?", "Robert."), "wav": audio(0.5)},
    {"__key__": "plain", "txt": b"no media at all"},
    {"__key__": "broken", "jpg": b"none", "txt": b"x"},
]


@pytest.fixture
def talk(tmp_path: Path) -> str:
    return write_shard(tmp_path / "talk.tar", TALK)


run, run_json = partial(printed.run, "show"), partial(printed.run_json, "show")


def recipe_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The recipe of the factory, by a name that the command line takes."""
    (folder / "shown_recipe.py").write_text("from shard_factory import RECIPE as recipe\n")
    monkeypatch.chdir(folder)
    return "shown_recipe:recipe"


def test_spans_are_the_batchs_own_tokens(tmp_path: Path) -> None:
    dataset = od.ShardDataset(write_shard(tmp_path / "omni.tar", omni_samples(20)), RECIPE)
    shown = shown_rows(dataset, dataset.index(), range(20))
    (batch,) = od.DataLoader(dataset, batch_size=20, num_threads=0)
    bounds = batch.llm.cu_seqlens.tolist()
    numbers = {key: number for number, (_, key) in enumerate(batch.sample_ids)}
    kinds = set()
    for sample in shown:
        mine = slice(bounds[numbers[sample["key"]]], bounds[numbers[sample["key"]] + 1])
        ids, labels = batch.llm.input_ids[mine].tolist(), batch.llm.labels[mine]
        assert sum(span["tokens"] for span in sample["spans"]) == sample["tokens"] == len(ids)
        assert int((labels != -100).sum()) == sample["trained_tokens"]
        start = 0
        for span in sample["spans"]:
            here = ids[start : start + span["tokens"]]
            if "text" in span:
                assert span["text"] is not None
                assert list(span["text"].encode()) == here
                assert (labels[start : start + span["tokens"]] != -100).tolist() == [span["trained"]] * span["tokens"]
            else:
                assert here == [RECIPE.slots[span["modality"]].token_id] * span["tokens"]
                kinds.add(span["modality"])
            start += span["tokens"]
    assert kinds == {"image", "audio"}


def test_lines_for_people(talk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = recipe_file(tmp_path, monkeypatch)
    result = run(talk, "--recipe", name, "--key", "talk")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout, "no colour, and nothing of the data's own"
    lines = result.stdout.splitlines()
    kinds = [line.split()[0] for line in lines if re.match(r"(masked|trained|image) +\d+ ", line)]
    assert kinds == ["masked", "image", "masked", "trained"]
    assert any("A \U0001f600 cat.\\x1b[31m<|im_end|>" in line for line in lines)
    assert any("jpg" in line and "grid_hw" in line for line in lines)
    broken = run(talk, "--recipe", name, "--key", "broken")
    assert "sample 'broken', field 'jpg'" in broken.stdout
    long = write_shard(tmp_path / "long.tar", [{"__key__": "long", "txt": b"word " * 1000}])
    assert "4,399 characters" in run(long, "--key", "long").stdout
    assert run(long, "--key", "long", "--full").stdout.count("ord") == 1000


def test_what_fails_to_decode_is_not_shown_as_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = {**TALK[0], "__key__": "cut", "jpg": jpeg(64, 48)[:-200]}
    path = write_shard(tmp_path / "cut.tar", [TALK[0], cut, TALK[2]])
    (group,) = run_json(path, "--recipe", recipe_file(tmp_path, monkeypatch))["groups"]
    policy = od.ErrorPolicy("skip", max_failures=None)
    (batch,) = od.DataLoader(od.ShardDataset(path, RECIPE), batch_size=3, on_error=policy, num_threads=0)
    assert [each["key"] for each in group["samples"] if each["error"] is None] == [key for _, key in batch.sample_ids]
    (failed,) = [each for each in group["samples"] if each["error"] is not None]
    assert (failed["key"], failed["spans"]) == ("cut", [])
    assert "field 'jpg'" in failed["error"]


def test_names_of_the_data_are_shown_and_no_more(tmp_path: Path) -> None:
    keys = ["a/b", "a_b", "c\x1b[2J\u202e"]
    path = write_shard(tmp_path / "odd.tar", [{"__key__": key, "jpg": jpeg(32, 32)} for key in keys])
    lines = run(path).stdout
    assert "\x1b" not in lines and "\u202e" not in lines
    assert "c\\x1b[2J\\u202e" in lines
    files = run_json(path, "--save", tmp_path / "out")["files"]
    assert len(set(files)) == 3
    assert all(Path(file).parent == tmp_path / "out" / "odd.tar" and Path(file).is_file() for file in files)


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    keys = ["\u6f22" * 200, "k" * 300, "..", "../../up", "two\nlines"]
    rows = [{"id": key, "text": "x", "image": "i.png"} for key in keys]
    (tmp_path / "i.png").write_bytes(png(32, 32))
    path = tmp_path / "names.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, root = tmp_path / "out", ("--media-root", tmp_path)
    files = [file for key in keys for file in run_json(path, *root, "--key", key, "--save", out)["files"]]
    assert len(set(files)) == len(keys)
    assert all(Path(file).resolve().parent == out / "names.jsonl" and Path(file).is_file() for file in files)
    assert "two\\nlines in " in run(path, *root, "--key", "two\nlines").stdout


def test_fields_that_are_not_read_are_named(tmp_path: Path) -> None:
    samples = [{"__key__": f"{n}", "txt": b"<video> of a cat", "mp4": b"\0" * 9} for n in range(2)]
    path = write_shard(tmp_path / "videos.tar", samples)
    assert run(path).stdout.splitlines()[-1] == "fields of these shards that the recipe does not read: mp4 (2)"
    assert run_json(path)["ignored_fields"] == {"mp4": 2}
    plain = write_shard(tmp_path / "plain.tar", [{"__key__": "a", "txt": b"a"}])
    assert "does not read" not in run(plain).stdout


def test_media_are_written_as_the_model_gets_them(talk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = recipe_file(tmp_path, monkeypatch)
    out = tmp_path / "saved"
    files = run_json(talk, "--recipe", name, "--key", "talk", "--save", out)["files"]
    assert files == [str(out / "talk.tar" / "0-talk.0.png")]
    dataset = od.ShardDataset(talk, RECIPE)
    (part,) = [part for part in dataset[0].parts if hasattr(part, "patches")]
    with Image.open(files[0]) as image:
        height, width = (int(side) * 8 for side in part.grid_hw)
        assert image.size == (width, height)
        pixels = np.asarray(image)
    values = pixels.reshape(height // 16, 2, 8, width // 16, 2, 8, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    patches = (values.reshape(-1, 3, 64) / 255 - np.array(RECIPE.image.mean)[:, None]) / np.array(RECIPE.image.std)[
        :, None
    ]
    assert np.abs(patches.reshape(len(part.patches), -1) - part.patches).max() < 1e-5
    (clip,) = run_json(talk, "--recipe", name, "--key", "sound", "--save", out)["files"]
    wave, rate = soundfile.read(clip)
    assert (rate, len(wave)) == (16_000, 8_000)
    original, _ = soundfile.read(io.BytesIO(audio(0.5)))
    assert np.abs(wave - original).max() < 1e-6
    assert run_json(talk, "--recipe", name, "--key", "broken", "--save", out)["files"] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8"])
@pytest.mark.parametrize("times", [1, 2])
def test_patches_become_their_picture(dtype: Any, times: int) -> None:
    pre = od.ImagePreprocessor(patch_size=4, merge=2, dtype=dtype, temporal_patch_size=times, max_tokens=64)
    data = png(48, 40)
    size = pre.count(data, od.Limits())
    out = {"patches": np.empty((size.num_rows, pre.patch_dim), {"bfloat16": np.uint16}.get(dtype, dtype))}
    pre.decode_into(data, size, out, od.Limits())
    suffix, content = pre.to_file(data, size, out, od.Limits())
    assert suffix == "png"
    pixels = np.asarray(Image.open(io.BytesIO(content))).astype(int)
    with Image.open(io.BytesIO(data)) as image:
        original = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(pixels - original).max() <= (1 if dtype == "bfloat16" else 0)


def test_a_modality_of_ones_own_is_written_as_its_arrays(tmp_path: Path) -> None:
    from own_modalities import Points, Tracks

    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    size = od.PartSize(4, 1, 4)
    suffix, content = Points().to_file(b"", size, {"points": values}, od.Limits())
    assert suffix == "npz"
    assert np.array_equal(np.load(io.BytesIO(content))["points"], values)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)  # small whole numbers are exact in bfloat16
    arrays = {"values": bits, "times": np.arange(4)}
    printed = np.load(io.BytesIO(Tracks().to_file(b"", size, arrays, od.Limits())[1]))
    assert printed["values"].dtype == np.float32
    assert np.array_equal(printed["values"], values)
    assert np.array_equal(printed["times"], arrays["times"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--key", "talk", "--filter", "text_tokens < 4"), "'talk' is left out by filter"),
        (("--key", "no-key"), "keys here look like 'talk', 'sound', 'plain'"),
    ],
)
def test_what_makes_no_sense_is_one_line(talk: str, arguments: tuple[object, ...], reason: str) -> None:
    result = run(talk, *arguments)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert result.stderr.strip().startswith("orchdata: error: ")


def opaque(text: str) -> list[int]:
    return [len(word) for word in text.split()]


class Words:
    def __init__(self) -> None:
        self.known: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.known += [word for word in text.split() if word not in self.known]
        return [self.known.index(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.known[number] for number in ids)


def test_tokenizers_with_and_without_a_way_back() -> None:
    ids = np.array([1, 0, 1], np.int32)
    assert od.TextPreprocessor(opaque, id="opaque").decode(ids) is None
    words = Words()
    words.encode("a b")
    text = od.TextPreprocessor(words.encode, id="words")
    assert text.decode(ids) == "b a b"
    assert text.decode(np.array([7], np.int32)) is None
    assert od.TextPreprocessor().decode(np.array([104, 105, 256, 255], np.int32)) == "hi<256>\ufffd"


def test_a_shard_that_has_changed_is_an_error_and_no_samples(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.tar", [{"__key__": str(n), "txt": b"x" * 2000} for n in range(3)])
    dataset = od.ShardDataset(path, RECIPE)
    index = dataset.index()
    write_shard(tmp_path / "a.tar", [{"__key__": str(n), "txt": b"y"} for n in range(3)])
    with pytest.raises(od.StaleIndexError):
        shown_rows(dataset, index, [0])
    (sample,) = shown_rows(dataset, index, [0], keep_going=True)
    assert sample["error"] is not None and sample["spans"] == []
