"""The README's and the docs' examples: Python compiles, names exist, links and make targets lead somewhere."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner
from webdataset import TarWriter

import orchdata
from orchdata.cli import app

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")]
PAGES += [page for folder in ("docs", "benchmarks") for page in sorted((REPOSITORY / folder).glob("*.md"))]


def _blocks(language: str) -> list[tuple[str, str]]:
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(page.name, block) for page in PAGES for block in pattern.findall(page.read_text())]


@pytest.mark.parametrize(("page", "block"), _blocks("python"))
def test_python_compiles_and_its_names_exist(page: str, block: str) -> None:
    tree = ast.parse(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "od":
            assert node.attr in (*orchdata.__all__, "hf", "torchtitan"), f"{page}: od.{node.attr}"
        for room in ("hf", "torchtitan"):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == f"od.{room}":
                assert node.attr in getattr(orchdata, room).__all__, f"{page}: od.{room}.{node.attr}"
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("orchdata"):
            module = __import__(str(node.module), fromlist=["_"])
            for alias in node.names:
                assert hasattr(module, alias.name), f"{page}: from {node.module} import {alias.name}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ("architecture.md", "CONTRIBUTING.md")])
def test_pages_use_public_names_alone(page: Path) -> None:
    for name in re.findall(r"(?:from |`|help\()(orchdata\.\w+[\w.]*)", page.read_text()):
        public = name.split(".")[1] in orchdata.__all__ and (
            name.count(".") == 1 or name.startswith("orchdata.balancers.")
        )
        assert public, f"{page.name}: {name}"


def _main_job() -> str:
    return next(block for page, block in _blocks("python") if page == "README.md" and "out.loss_sum" in block)


def _first_loop() -> str:
    return next(block for page, block in _blocks("python") if page == "README.md")


def _words_before_the_first_loop(text: str) -> int:
    """Words that a reader sees: not the addresses of links and pictures."""
    before = text.partition("```python")[0]
    return len(re.sub(r"\]\([^)]*\)", "]", before).split())


def test_the_first_loop_comes_after_200_words_at_most() -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert "for batch in loader:" in _first_loop()
    assert _words_before_the_first_loop(text) <= 200
    assert _words_before_the_first_loop("word " * 201 + text) > 200
    assert _words_before_the_first_loop("a [link](one two)\n```python\nx = 1\n```") == 2


def test_the_first_loop_trains_a_model_of_transformers_in_ten_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers
    from hf_families.families import FAMILIES

    # The model's own classes and processor, small and random in place of published weights.
    processor, model = FAMILIES["qwen2_5_vl"].build()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    asked = []

    def given(value: Any) -> Any:
        return lambda name: asked.append(name) or value

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", given(processor))
    monkeypatch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", given(model))
    (tmp_path / "photos").mkdir()
    with (tmp_path / "train.jsonl").open("w") as table:
        for number in range(20):
            pixels = np.random.default_rng(number).integers(0, 256, (56 + 8 * number, 80, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.jpg")
            asked_by = {"from": "human", "value": "<image>\nWhat is it?"}
            turns = [asked_by, {"from": "gpt", "value": f"picture {number}"}]
            table.write(json.dumps({"image": f"{number}.jpg", "conversations": turns}) + "\n")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(_first_loop(), names)
    assert asked == ["Qwen/Qwen2.5-VL-3B-Instruct"] * 2
    assert len(names["loader"]) == 2 and len(names["batch"].sample_ids) == 8  # drop_last leaves 4 of 20 out
    llm, tokenizer = names["batch"].llm, processor.tokenizer
    learned = tokenizer.decode(llm.labels[llm.labels != -100]).split("<|im_end|>")
    assert len(learned) == 9 and all(answer.strip().startswith("picture ") for answer in learned[:8])
    assert int((llm.input_ids == tokenizer.convert_tokens_to_ids("<|vision_start|>")).sum()) == 8
    moved = [name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])]
    assert any("visual" in name for name in moved) and any("language_model" in name for name in moved)

    statements = [node for node in ast.walk(ast.parse(_first_loop())) if isinstance(node, ast.stmt)]
    assert sum(not isinstance(node, ast.Import | ast.ImportFrom) for node in statements) <= 10


@pytest.mark.slow
def test_the_quickstart_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (REPOSITORY / "README.md").read_text().partition("## A model of your own\n")[2].partition("\n## ")[0]
    shell = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for line in "".join(shell).splitlines():
        command, *arguments = line.split()
        assert command == "orchdata"
        assert CliRunner().invoke(app, arguments).exit_code == 0, line
    (tmp_path / "train.py").write_text(program)
    done = subprocess.run([sys.executable, "-W", "error", "train.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 2 and losses[1] < losses[0] < 6


def test_no_line_asks_an_index_for_a_package_that_is_not_there() -> None:
    for page in PAGES:
        for line in re.findall(r"pip install .*orchdata.*", page.read_text()):
            assert "orchdata @ git+" in line or "] @ git+" in line, f"{page.name}: {line}"


def test_the_main_job_takes_ten_lines_of_training() -> None:
    statements = [node for node in ast.walk(ast.parse(_main_job())) if isinstance(node, ast.stmt)]
    assert len(statements) <= 10


def test_the_main_job_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    for number in range(128):
        with TarWriter(str(tmp_path / "data" / f"train-{number:06d}.tar"), encoder=False) as writer:
            writer.write({"__key__": f"{number}", "txt": b"word " * (1 + number % 7)})
    monkeypatch.chdir(tmp_path)
    weight = torch.nn.Parameter(torch.zeros(()))
    tokens = []

    def model(**inputs: Any) -> SimpleNamespace:
        assert {"image_patches", "audio_features"} <= set(inputs)  # dummies: the cost model has these phases
        tokens.append(int((inputs["labels"] != -100).sum()))
        return SimpleNamespace(loss_sum=weight * tokens[-1])

    exec(_main_job(), {"model": model, "optimizer": torch.optim.SGD([weight], lr=1.0)})
    assert len(tokens) == 128 // 8
    # Each step's loss is weight * tokens / tokens of the global batch: the gradient is 1.
    assert weight.item() == pytest.approx(-128 / 8)


def test_a_modality_of_ones_own_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    with TarWriter(str(tmp_path / "data" / "clouds.tar"), encoder=False) as writer:
        for number in range(16):
            saved = io.BytesIO()
            np.save(saved, np.full((20 + number, 3), number, np.float64))
            times, values = np.arange(5, dtype="<i8"), np.full((5, 2), number, "<f4")
            signal = np.array([5], "<u8").tobytes() + times.tobytes() + values.tobytes()
            sample = {"npy": saved.getvalue(), "track": signal, "txt": b"a <points> and <track>"}
            writer.write({"__key__": f"{number}", **sample})
    monkeypatch.chdir(tmp_path)
    clouds = []

    def encode(held: Any) -> torch.Tensor:
        if "points" in held.arrays:
            clouds.extend(held.points.split(held.cu_seqlens.diff().tolist()))
        return torch.ones(max(1, held.num_tokens), 4)

    def embed(input_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*input_ids.shape, 4)

    names: dict[str, Any] = {"encode": encode, "embed": embed, "__name__": "own"}
    blocks = [block for page, block in _blocks("python") if page == "modalities.md"]
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "modalities.md", "exec", dont_inherit=True), names)  # as it stands, without __future__
    assert sorted((len(cloud), int(cloud.mean())) for cloud in clouds) == [(20 + n, n) for n in range(16)]
    ids = names["batch"].llm.input_ids
    assert torch.equal(names["embeds"][:, 0] == 1, ids == 0)
    # The second one as well, under the last block's recipe.
    loader = orchdata.DataLoader(
        orchdata.ShardDataset("data/*.tar", recipe=names["recipe"]),
        batch_size=16,
        collate_fn=orchdata.Packed(positions="mrope"),
    )
    (batch,) = loader
    assert batch.media["tracks"].values.float().unique().tolist() == list(range(16))
    assert batch.media["tracks"].times.tolist() == [*range(5)] * 16
    assert int((batch.llm.input_ids == 300).sum()) == 3 * 16  # 5 values, a token for each 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_make_targets_that_are_named_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    peers = makefile.split("PEERS := ")[1].splitlines()[0].split()
    targets |= {f"peers-{peer}" for peer in (*peers, "NAME")}
    for page in PAGES:
        for target in re.findall(r"`make ([A-Za-z-]+)|^make ([A-Za-z-]+)", page.read_text(), re.MULTILINE):
            name = "".join(target)
            assert name in targets, f"{page.name}: make {name}"


def test_every_promise_names_a_test_that_exists() -> None:
    text = (REPOSITORY / "benchmarks" / "promises.md").read_text()
    path, named = "", 0
    for found in re.findall(r"`((?:\w+/)*\w+\.py)?(?:::(test_\w+))?`", text):
        path, name = found[0] or path, found[1]
        if not path:
            continue
        file = REPOSITORY / "tests" / path
        assert file.is_file(), path
        assert not name or f"def {name}(" in file.read_text(), f"{path}::{name}"
        named += 1
    assert named > 40
