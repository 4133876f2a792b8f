"""The program of `docs/finetune_a_vlm.md`: chats of LLaVA's form, killed on two ranks, and on one to its end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from delivered_once import read_rows
from PIL import Image
from rank_jobs import run_ranks

pytest.importorskip("transformers")

REPOSITORY = Path(__file__).parents[2]
JOB = REPOSITORY / "tests" / "support" / "example_job.py"
PAGE = REPOSITORY / "docs" / "finetune_a_vlm.md"
STEPS, SIZE, DIES_AT, SAVED = 6, 4, 5, 4

pytestmark = pytest.mark.usefixtures("same_cache")


def write_chats(folder: Path, first: int, count: int, name: str) -> None:
    """A JSON Lines file, and the pictures that it names in `images`."""
    (folder / "images").mkdir(exist_ok=True)
    with (folder / name).open("w") as file:
        for number in range(first, first + count):
            pixels = np.random.default_rng(number).integers(0, 256, (56 + 28 * (number % 3), 84, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"{number}.jpg")
            turns = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": f"It is {number}."}]
            file.write(json.dumps({"id": f"{number}", "image": f"{number}.jpg", "conversations": turns}) + "\n")


def run(
    folder: Path, kept: str, num_ranks: int, *more: object, dies_at: int = 0
) -> tuple[dict[int, tuple[float, list[str]]], str]:
    """Loss and keys of each step, and what was printed."""
    record, logs = folder / f"record-{kept}-{num_ranks}", folder / f"logs-{kept}-{num_ranks}"
    logs.mkdir()
    places = ("--media-root", folder / "images", "--held-out", folder / "held_out.jsonl")
    sizes = ("--steps", STEPS, "--global-batch-size", SIZE, "--max-tokens", 150, "--save-every", 2)
    run_ranks(
        str(JOB),
        *("finetune_a_vlm", dies_at, folder / "train.jsonl", *places, *sizes, *more),
        *("--checkpoints", folder / kept, "--record", record),
        num_ranks=num_ranks,
        folder=logs,
        lost=range(num_ranks) if dies_at else (),
    )
    steps: dict[int, tuple[float, list[str]]] = {}
    for line in read_rows(sorted(record.iterdir())):
        loss, keys = steps.get(line["step"], (line["loss"], []))
        steps[line["step"]] = loss, sorted([*keys, *(key for _, key in line["keys"])])
    return steps, "".join(path.read_text() for path in sorted(logs.iterdir()) if path.is_file())


@pytest.mark.slow
def test_killed_on_two_ranks_it_goes_on_with_one_and_answers(tmp_path: Path) -> None:
    write_chats(tmp_path, 0, 22, "train.jsonl")
    write_chats(tmp_path, 22, 5, "held_out.jsonl")
    ask = ("--ask", tmp_path / "images" / "0.jpg", "What is this?")
    whole, printed = run(tmp_path, "whole", 1, *ask)
    killed, _ = run(tmp_path, "kept", 2, dies_at=DIES_AT)
    again, printed_again = run(tmp_path, "kept", 1, *ask)
    assert list(whole) == [*range(1, STEPS + 1)] and list(again) == [*range(SAVED + 1, STEPS + 1)]
    for found in (killed, again):
        for step, (loss, keys) in found.items():
            assert keys == whole[step][1] and len(keys) == SIZE
            assert loss == pytest.approx(whole[step][0], rel=1e-4)
    assert whole[1][0] != pytest.approx(whole[2][0], rel=1e-4)  # the control
    first_epoch = [key for step in range(1, 6) for key in whole[step][1]]
    assert len(set(first_epoch)) == 20  # of 22: drop_last
    for pattern in (r"held out after step 6: loss (\d.*)", r"answer: (.*)"):
        (mine,), (theirs,) = re.findall(pattern, printed), re.findall(pattern, printed_again)
        assert mine == theirs


def test_the_page_shows_parts_of_the_program() -> None:
    program = (REPOSITORY / "examples" / "finetune_a_vlm.py").read_text()
    lines = {line.strip() for line in program.splitlines()}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        for line in filter(None, map(str.strip, block.splitlines())):
            assert line in lines, line
    assert len(PAGE.read_text().split()) <= 900
