"""The functions of docs/layouts.md, as they stand there, on small data with the schemas of public data sets."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shard_factory import RECIPE, jpeg

import orchdata as od

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"
BLOCKS = re.findall(r"```python\n(def .*?)```", PAGE.read_text(), re.DOTALL)
IMAGES = [jpeg(40, 48, seed) for seed in range(3)]
CELLS: list[dict[str, Any]] = [{"bytes": data, "path": None} for data in IMAGES]


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The functions of the page, in a module with source text."""
    path = tmp_path_factory.mktemp("layouts") / "layouts_page.py"
    path.write_text("\n\n".join(BLOCKS))
    spec = importlib.util.spec_from_file_location("layouts_page", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recipe(function: Callable[[dict[str, Any]], Any]) -> od.Recipe:
    return od.Recipe(image=RECIPE.image, audio=RECIPE.audio, record=function)


def text_of(sample: od.Sample) -> str:
    """The sample's text, with <image> and <audio> for media."""
    pieces = []
    for part in sample.parts:
        name = getattr(part, "modality", "text")
        ids = part.token_ids.tolist() if name == "text" else []  # type: ignore[union-attr]
        pieces.append(bytes(each for each in ids if each < 256).decode() if name == "text" else f"<{name}>")
    return "".join(pieces)


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


TABLES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "finevision": (
        [
            {"images": CELLS[:2], "texts": [{"user": "Q1", "assistant": "A1"}, {"user": "Q2", "assistant": "A2"}]},
            {"images": [], "texts": [{"user": "Q3", "assistant": "A3"}]},
        ],
        ["<image><image>Q1A1Q2A2", "Q3A3"],
    ),
    "vqav2": (
        [
            {
                "question_type": "is the",
                "multiple_choice_answer": "yes",
                "answers": [{"answer": "yes", "answer_confidence": "yes", "answer_id": 1}],
                "image_id": 7,
                "image": CELLS[0],
                "question": "Is it?",
            }
        ],
        ["<image>Is it?yes"],
    ),
    "chartqa": (
        [{"image": CELLS[1], "query": "How many?", "label": ["14"], "human_or_machine": 0}],
        ["<image>How many?14"],
    ),
    "obelics": (
        [{"images": [None, CELLS[0], None, CELLS[1]], "texts": ["One. ", None, "Two. ", None], "metadata": "{}"}],
        ["One. <image>Two. <image>"],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_layout_of_a_table(tmp_path: Path, functions: Any, name: str) -> None:
    rows, texts = TABLES[name]
    dataset = od.ShardDataset(parquet(tmp_path / "a.parquet", rows), recipe(getattr(functions, name)))
    assert [_spoken(text_of(dataset[number])) for number in range(len(dataset))] == texts
    assert dataset.index().totals["bad"] == 0


@pytest.mark.parametrize("name", ["mmc4", "question_answer", "alpaca"])
def test_layout_of_records(tmp_path: Path, functions: Any, name: str) -> None:
    for number, data in enumerate(IMAGES):
        (tmp_path / f"{number}.jpg").write_bytes(data)
    rows, texts = {
        "mmc4": (
            [
                {
                    "text_list": ["One.", "Two.", "Three."],
                    "image_info": [
                        {"image_name": "1.jpg", "matched_text_index": 2, "matched_sim": 0.3},
                        {"image_name": "0.jpg", "matched_text_index": 0, "matched_sim": 0.2},
                    ],
                }
            ],
            ["<image>One. Two. <image>Three."],
        ),
        "question_answer": ([{"question": "Who?", "answer": "Me.", "image_path": "2.jpg"}], ["<image>Who?Me."]),
        "alpaca": (
            [{"instruction": "Add.", "input": "1 1", "output": "2"}, {"instruction": "Sing.", "output": "La."}],
            ["Add.\n1 12", "Sing.La."],
        ),
    }[name]
    (url := tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = od.ShardDataset(url, recipe(getattr(functions, name)), media_root=tmp_path)
    assert [_spoken(text_of(dataset[number])) for number in range(len(dataset))] == texts
    assert dataset.index().totals["bad"] == 0


def _spoken(text: str) -> str:
    """The text without what the default template writes around turns."""
    return re.sub(r"<\|im_start\|>\w+\n|<\|im_end\|>\n?", "", text)
