"""What a notebook shows: short, safe and quick, without reading, building or raising; and a real kernel."""

from __future__ import annotations

import io
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import printed
import pytest
import soundfile
from PIL import Image
from printed import Page
from shard_factory import RECIPE, SKIP_ANY, audio, chat, jpeg, omni_samples, omni_shards, png, write_shard

import orchdata
import orchdata as od
from orchdata import views
from orchdata.showing import shown_rows
from orchdata.views import MOST_BYTES


def look(value: Any) -> Page:
    """The view of a value: safe, small, and in a style that is its own."""
    html = value._repr_html_()
    assert isinstance(html, str)
    assert 0 < len(html.encode()) < MOST_BYTES
    page = Page(html)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    style = html[html.index("<style>") + 7 : html.index("</style>")]
    assert all(rule.strip().startswith(".orchdata-view") for rule in style.split("}") if rule.strip())
    return page


@pytest.fixture
def dataset(tmp_path: Path) -> od.ShardDataset:
    return od.ShardDataset(omni_shards(tmp_path, shards=2, samples=12), recipe=RECIPE)


def test_a_data_set_is_not_indexed_to_be_shown(dataset: od.ShardDataset) -> None:
    assert "Not indexed yet" in look(dataset).text
    dataset.index()
    page = look(od.ShardDataset(dataset.urls, recipe=RECIPE))  # found, and not built
    assert "24, 0 of them bad" in page.text
    assert "image" in page.text


def test_the_figures_are_those_of_the_chosen_samples(dataset: od.ShardDataset) -> None:
    index = dataset.index()
    with_image = dataset.filter("image_tokens > 0")
    for chosen in (with_image, with_image.split("train", 0.5), dataset.take(5), dataset.select([1, 7]), dataset[3:9]):
        assert 0 < len(chosen) < 24
        found = re.match(r"ShardDataset\((\d+) samples, ([\d,]+) tokens", repr(chosen))
        assert found is not None
        text = look(chosen).text
        assert f"{found[1]} of 24 samples, {found[2]} tokens" in text
        assert f"{index.totals['modalities']['text']['tokens']:,}" not in text
    assert "image 100 %" in look(with_image).text
    assert "image 100 %" not in look(dataset).text


def test_figures_of_all_samples_are_named_as_such(dataset: od.ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset.index()
    chosen = dataset.filter("image_tokens > 0")
    assert "of all samples" not in look(chosen).text
    assert "there is no column 'nothing'" in look(dataset.filter("nothing > 0")).text
    monkeypatch.setattr("orchdata.views._MOST_SECONDS", -1)
    text = look(chosen).text
    assert "of all samples, and not only of the chosen ones, because counting the chosen ones takes long" in text
    assert "24, 0 of them bad" in text


def test_everything_that_a_user_holds_has_a_view(dataset: od.ShardDataset) -> None:
    dataset.index()
    loader = od.DataLoader(dataset, batch_size=4, shuffle=True, dp=(0, 2), seed=1)
    batch = next(iter(loader))
    assert f"{batch.loss_tokens:,} trained" in look(batch).text
    assert "rank 0 of 2" in look(loader).text
    plan = batch.plan
    assert plan.hash in look(plan).text
    assert look(plan).text.count("rank 1") == sum(bool(costs.any()) for costs in plan.costs.values())
    assert "trained" in look(dataset[0]).text
    mixture = od.Mixture({"<b>one": od.Source(dataset, weight=1), "two": od.Source(dataset, weight=1)})
    assert "<b>one" in look(mixture).text


def test_a_dummy_is_named_as_one(tmp_path: Path) -> None:
    samples = [{"__key__": str(number), "jpg": jpeg(56, 56), "txt": b"a"} for number in range(4)]
    samples.append({"__key__": "text", "txt": b"text alone"})
    dataset = od.ShardDataset(write_shard(tmp_path / "a.tar", samples), recipe=RECIPE)
    encoders = od.CostModel(**dict.fromkeys(("image", "audio", "llm"), od.PhaseCost(linear=1)))
    for assignment in ("joint", "per_phase"):
        (batch,) = od.DataLoader(
            dataset, batch_size=5, cost=encoders, balance=od.Balance(assignment=assignment), num_threads=0
        )
        text = look(batch).text
        assert "image4 items of " in text
        assert "audionone; a dummy, without which this rank would not run the encoder: features float32" in text
        assert "a dummy of audio, features float32" in repr(batch)
        assert "a dummy of image" not in repr(batch)
    (batch,) = od.DataLoader(dataset.take(1), batch_size=1, cost=encoders)
    assert "image1 item of " in look(batch).text


def test_a_mixture_shows_its_shares(dataset: od.ShardDataset) -> None:
    sources = {"web": od.Source(dataset, weight=3), "own": od.Source(dataset, weight=1, loss_weight=0.5)}
    text = look(od.Mixture(sources)).text
    assert "share of tokens" in text
    assert "own 25 %0.5ShardDataset" in text
    assert "web 75 %1ShardDataset" in text
    outer = od.Mixture({"in": od.Source(od.Mixture(sources)), "out": od.Source(dataset)}, by="samples")
    assert "in/web 38 %" in look(outer).text
    staged = {name: od.Source(dataset) for name in sources}
    stages = [(0, {"web": 1}), (1000, {"web": 1, "own": 1})]
    assert "own 0 %from 1,000 tokens: 50 %" in look(od.Mixture(staged, stages=stages)).text


def test_a_profile_shows_its_sentences(dataset: od.ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = od.CostModel(llm=od.PhaseCost(linear=1), image=od.PhaseCost(linear=1))
    profile = dataset.profile(cost=cost, ranks=(2, 4), batch_size=2)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = look(profile).text
    assert "Profile of 24 samples in 2 shards" in text
    assert all(sentence in text for sentence in profile.summary)
    assert "whole samples" in text
    assert repr(profile) == f"Profile(24 samples in 2 shards, planned for 2, 4 ranks: {profile.summary[0]})"


def test_a_plan_of_many_ranks_shows_percentiles(dataset: od.ShardDataset) -> None:
    dataset.index()
    plan = od.DataLoader(dataset, global_batch_size=12, dp=(0, 100), num_threads=0).plan_at(0, 0)
    text = look(plan).text
    assert "50 %" in text
    assert "rank 1" not in text
    axes = plan.plot()
    assert len(axes.patches) == 200


def test_shown_samples_have_text_and_pictures(tmp_path: Path) -> None:
    samples = [{"__key__": f"<i>{number}", "jpg": jpeg(40, 30), "txt": b"<script>x</script>"} for number in range(3)]
    dataset = od.ShardDataset(write_shard(tmp_path / "a.tar", samples), recipe=RECIPE)
    shown = dataset.show(["<i>1", -1])
    assert [sample["key"] for sample in shown.samples] == ["<i>1", "<i>2"]
    page = look(shown)
    assert page.text.count("<script>x</script>") == 2
    sources = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert len(sources) == 2
    assert all(str(source).startswith("data:image/jpeg;base64,") for source in sources)
    assert "<i>1: " in repr(shown)
    with pytest.raises(KeyError, match="no sample in these shards has the key 'gone'; keys here look like '<i>0', "):
        dataset.show("gone")
    with pytest.raises(KeyError, match="'<i>0' is left out by filter"):
        dataset.filter("key != '<i>0'").show("<i>0")
    with pytest.raises(IndexError, match="row 3 is none of the 3 rows"):
        dataset.show(3)


def test_a_view_never_raises_and_is_never_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        _repr_html_ = orchdata._html

        def __repr__(self) -> str:
            return "<b>Broken"

    def broken(value: Broken) -> str:
        raise ValueError("now")

    for view in (broken, lambda value: "x" * (MOST_BYTES + 1)):
        monkeypatch.setattr(views, "VIEWS", {Broken: view})
        assert Broken()._repr_html_() == "<pre><bdi>&lt;b&gt;Broken</bdi></pre>"


NOTEBOOK = """
import orchdata as od
from shard_factory import RECIPE
dataset = od.ShardDataset({urls!r}, recipe=RECIPE)
loader = od.DataLoader(dataset, batch_size=4, seed=1)
batch = next(iter(loader))
"""


@pytest.mark.slow
def test_a_real_kernel_shows_them(dataset: od.ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent / "support"))
    cells = [NOTEBOOK.format(urls=list(dataset.urls)), "dataset", "loader", "batch", "batch.plan", "dataset.show(0)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    for cell in notebook.cells[1:]:
        (output,) = [output for output in cell.outputs if output.output_type == "execute_result"]
        assert "orchdata-view" in output.data["text/html"]
    plain = notebook.cells[0]
    assert not [output for output in plain.outputs if output.output_type == "error"]


# What is shown is what the model gets: the very tokens of a batch, what of them is trained, and the pixels.


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
    (batch,) = od.DataLoader(od.ShardDataset(path, RECIPE), batch_size=3, on_error=SKIP_ANY, num_threads=0)
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
    mean, std = (np.array(each)[:, None] for each in (RECIPE.image.mean, RECIPE.image.std))
    patches = (values.reshape(-1, 3, 64) / 255 - mean) / std
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
    assert od.TextPreprocessor(lambda text: [len(text)], id="opaque").decode(ids) is None
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
