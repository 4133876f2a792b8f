"""What a notebook shows: short, safe and quick, without reading, building or raising; and a real kernel."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from shard_factory import RECIPE, jpeg, omni_shards, write_shard

import orchdata as od
from orchdata.loaders.html.notebook import MOST_BYTES, never_raises


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def look(value: Any) -> Tags:
    """The view of a value: safe, small, and in a style that is its own."""
    html = value._repr_html_()
    assert isinstance(html, str)
    assert 0 < len(html.encode()) < MOST_BYTES
    page = Tags(html)
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
    assert "24, 0 of them bad" in look(dataset.filter("tokens > 3")).text


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
    assert [view.sample.key for view in shown.views] == ["<i>1", "<i>2"]
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


def test_a_view_never_raises_and_is_never_endless() -> None:
    class Broken:
        @never_raises
        def _repr_html_(self) -> str:
            raise ValueError("now")

        def __repr__(self) -> str:
            return "<b>Broken"

    class Endless(Broken):
        @never_raises
        def _repr_html_(self) -> str:
            return "x" * (MOST_BYTES + 1)

    for value in (Broken(), Endless()):
        assert value._repr_html_() == "<pre><bdi>&lt;b&gt;Broken</bdi></pre>"


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
