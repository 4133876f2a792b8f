"""Trainers of other projects, each in an environment of its own: `make test-tools`.

The code of a tool in docs/trainers.md or docs/megatron_torchtitan.md trains a tiny model through the tool,
on one rank and on two. The same tool then trains it over torch's own loader, which is given the samples of each step
and reads them without the library.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import shared

from orchdata.synth import read_description, synthesize

REPOSITORY = Path(__file__).parents[2]
PROGRAM = REPOSITORY / "tests" / "support" / "run_program.py"
TOOLS = ("lightning", "megatron_core", "torchtitan", "trl")
TOLERANCE = 1e-5
WORDS = """
seed: 0
samples: 40
shards: 2
kinds:
  note: {weight: 1, words: {lognormal: [8, 0.6], min: 2, max: 40}}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    (folder / "words.yaml").write_text(WORDS)
    synthesize(read_description(folder / "words.yaml"), folder / "data")
    return folder / "data"


def python_of(tool: str) -> Path:
    """The tool's interpreter; skips where `make test-tools` could not install it."""
    environment = REPOSITORY / ".venv-tools" / tool
    if not (environment / ".installed").exists():
        pytest.skip(f"{tool} is not installed in {environment}: make test-tools")
    return environment / "bin" / "python"


def train(tool: str, way: str, num_ranks: int, folder: Path) -> list[tuple[float, list[str]]]:
    """Loss and keys of each step, over all ranks."""
    launcher = [python_of(tool), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    job = Path(__file__).parent / f"{tool}_job.py"
    done = subprocess.run(
        [*launcher, PROGRAM, job, way],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    ranks = [
        [json.loads(line) for line in (folder / f"{way}-{rank}.jsonl").read_text().splitlines()]
        for rank in range(num_ranks)
    ]
    steps = list(zip(*ranks, strict=True))
    assert len(steps) == shared.STEPS
    return [
        (sum(each["loss"] for each in step) / num_ranks, sorted(key for each in step for key in each["keys"]))
        for step in steps
    ]


@pytest.mark.tools
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.timeout(600)
def test_a_tool_trains_as_over_a_loader_of_torch(tool: str, num_ranks: int, data: Path, tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(data)
    ours = train(tool, "ours", num_ranks, tmp_path)
    keys = [step for _, step in ours]
    assert [len(set(step)) for step in keys] == [shared.SIZE] * shared.STEPS
    epoch = [key for step in keys for key in step]
    assert len(set(epoch)) == len(epoch) == 5 * shared.SIZE  # each sample once
    (tmp_path / "steps.json").write_text(json.dumps(keys))
    plain = train(tool, "plain", num_ranks, tmp_path)
    if tool != "trl":  # whose rows have no keys
        assert [step for _, step in plain] == keys
    losses, expected = [loss for loss, _ in ours], [loss for loss, _ in plain]
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    assert all(abs(a - b) > 10 * TOLERANCE for a, b in zip(losses, expected[1:], strict=False))  # other samples differ


@pytest.mark.parametrize("tool", TOOLS)
def test_the_code_of_a_page_is_at_most_fifteen_lines(tool: str) -> None:
    lines = [line for line in shared.page_code(tool).splitlines() if line.strip()]
    assert len(lines) <= 15
