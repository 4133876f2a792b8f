"""What a notebook shows: short, safe and quick, without reading, building or raising; and a real kernel."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from printed import Page
from shard_factory import RECIPE, jpeg, omni_shards, write_shard

import orchdata
import orchdata as od
from orchdata import views
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
