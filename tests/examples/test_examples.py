"""The programs in examples/: losses of the plain loop, and killed they go on elsewhere with the same samples."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from delivered_once import Row, read_rows, tar_keys, wrong_deliveries
from example_job import NAMES
from rank_jobs import FSDP2_RUNS, run_ranks
from ray_clusters import TestCluster

import orchdata as od
from orchdata.synth import synthesize

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in ("common", "model"))
PROGRAM = Path(__file__).parents[1] / "support" / "run_program.py"
JOB = Path(__file__).parents[1] / "support" / "example_job.py"
NEEDS = {
    "hf_trainer": ("transformers", "accelerate"),
    "accelerate_loop": ("accelerate",),
    "lightning_trainer": ("lightning",),
    "deepspeed_zero": ("deepspeed",),
}
STEPS, SIZE, MAX_TOKENS = 6, 8, 1500
DIES_AT, SAVED = 5, 4

pytestmark = [pytest.mark.usefixtures("same_cache"), pytest.mark.slow]


class Step(NamedTuple):
    loss: float
    keys: list[tuple[str, str]]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("omni")
    synthesize("omni", folder, samples=40)
    return folder


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def needs(name: str) -> None:
    """Skip if what the example is about is not installed."""
    for package in NEEDS.get(name, ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed, which examples/{name}.py is about")
    if name in ("fsdp2", "hsdp_tp") and not FSDP2_RUNS:
        pytest.skip(f"FSDP2 of torch {torch.__version__} does not run on a CPU")


_plain: dict[str, list[Step]] = {}


def plain_loop(name: str, shards: Path) -> list[Step]:
    """A model of the example, trained by the plainest loop, in this process."""
    kind = name if name == "hf_trainer" else "common"
    if kind not in _plain:
        _plain[kind] = list(_trained(kind, shards))
    return _plain[kind]


def _trained(kind: str, shards: Path) -> Iterator[Step]:
    common, module = import_module("common"), import_module(kind)
    args = SimpleNamespace(shards=[str(shards / "*.tar")], global_batch_size=SIZE, max_tokens=MAX_TOKENS)
    model = module.make_model()
    loader = module.make_loader(args, model.config) if kind == "hf_trainer" else make_loader(args, common)
    optimizer = common.make_optimizer(model)
    step, loss, keys = 0, 0.0, []
    while step < STEPS:
        for batch in loader:
            outputs = model(**batch.model_inputs())
            scaled = outputs.loss if kind == "hf_trainer" else outputs.loss_sum * batch.loss_scale
            scaled.backward()
            loss += scaled.item()
            keys += [(Path(shard).name, key) for shard, key in batch.sample_ids]
            if batch.is_last_microbatch:
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                yield Step(loss, sorted(keys))
                loss, keys = 0.0, []
            if step == STEPS:
                break


def make_loader(args: SimpleNamespace, common: Any) -> od.DataLoader:
    return od.DataLoader(
        od.ShardDataset(args.shards, recipe=common.RECIPE),
        global_batch_size=args.global_batch_size,
        shuffle=True,
        drop_last=True,
        cost=common.COST,
        balance=od.Balance(max_tokens=args.max_tokens),
    )


def run(name: str, num_ranks: int, folder: Path, shards: Path, *more: object, dies_at: int = 0) -> dict[int, Step]:
    """The steps that the example took, over all ranks."""
    record, logs = folder / f"record-{num_ranks}", folder / f"logs-{num_ranks}"
    logs.mkdir(parents=True)
    sizes = ("--steps", STEPS, "--global-batch-size", SIZE, "--max-tokens", MAX_TOKENS, "--save-every", 2)
    run_ranks(
        str(JOB),
        *(name, dies_at, shards / "*.tar", *sizes, "--checkpoints", folder / "kept", "--record", record, *more),
        num_ranks=num_ranks,
        folder=logs,
        environment={"TORCHELASTIC_RUN_ID": "examples", "DS_ACCELERATOR": "cpu"},
        lost=range(num_ranks) if dies_at else (),
    )
    return recorded(record)


def recorded(folder: Path) -> dict[int, Step]:
    lines = [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]
    keys: dict[int, set[tuple[str, str]]] = {}
    for line in lines:
        keys.setdefault(line["step"], set()).update((shard, key) for shard, key in line["keys"])
    return {line["step"]: Step(line["loss"], sorted(keys[line["step"]])) for line in lines}


def rows_of(folder: Path, epoch_steps: int, *, peers: bool) -> list[Row]:
    """What each rank wrote, in epochs and steps of them; of peers, which have the same samples, the first."""
    rows, seen = [], set()
    for rank, path in enumerate(sorted(folder.iterdir())):
        for line in read_rows([path]):
            epoch, step = divmod(line["step"] - 1, epoch_steps)
            if not peers or (delivery := (line["step"], str(line["keys"]))) not in seen:
                rows.append({"rank": rank, "epoch": epoch, "step": step, "keys": line["keys"]})
                seen.add(delivery if peers else "")
    return rows


def keys_of(name: str, shards: Path) -> list[tuple[str, str]]:
    """(shard, key) of the samples that an example trains on: hf_trainer leaves out chats with sound."""
    paths = sorted(shards.glob("*.tar"))
    keys = [(Path(path).name, key) for path, key in tar_keys(paths)]
    if name != "hf_trainer":
        return keys
    suffixes: dict[tuple[str, str], set[str]] = {}
    for path in paths:
        with tarfile.open(path) as archive:
            for member in archive.getnames():
                suffixes.setdefault((path.name, member.partition(".")[0]), set()).add(Path(member).suffix)
    return [key for key in keys if not ({".flac", ".wav"} & suffixes[key] and ".json" in suffixes[key])]


def check_keys(name: str, folder: Path, shards: Path, *ranks: int) -> None:
    """Over a run that was killed and the one after it, the first epoch is each sample of the shards once."""
    keys = keys_of(name, shards)
    epoch_steps, dropped = divmod(len(keys), SIZE)
    runs = [rows_of(folder / f"record-{number}", epoch_steps, peers=name == "hsdp_tp") for number in ranks]
    assert wrong_deliveries(runs, keys, epochs=1, dropped=dropped) == []


def check(found: dict[int, Step], expected: list[Step], steps: range) -> None:
    """The same samples, each once, and the same losses."""
    assert sorted(found.keys()) == list(steps)
    for step in steps:
        assert found[step].keys == expected[step - 1].keys, f"step {step}"
    theirs = [expected[step - 1].loss for step in steps]
    assert [found[step].loss for step in steps] == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("examples")
def test_killed_on_two_ranks_it_goes_on_with_one_as_the_plain_loop(name: str, shards: Path, tmp_path: Path) -> None:
    needs(name)
    expected = plain_loop(name, shards)
    assert len({step.loss for step in expected}) == STEPS and len(expected[0].keys) == SIZE
    killed = run(name, 2, tmp_path, shards, dies_at=DIES_AT)
    check({number: step for number, step in killed.items() if number < DIES_AT}, expected, range(1, DIES_AT))
    other = (4, "--tp", 2) if name == "hsdp_tp" else (1,)
    check(run(name, other[0], tmp_path, shards, *other[1:]), expected, range(SAVED + 1, STEPS + 1))
    check_keys(name, tmp_path, shards, 2, other[0])


@pytest.mark.usefixtures("examples")
def test_a_resumed_step_that_is_another_is_seen(shards: Path) -> None:
    """The control: what `check` compares differs from step to step."""
    expected = plain_loop("ddp", shards)
    with pytest.raises(AssertionError):
        check({1: expected[1]}, expected, range(1, 2))
    with pytest.raises(AssertionError):
        check({1: Step(expected[0].loss * 1.001, expected[0].keys)}, expected, range(1, 2))


LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    "accelerate": [sys.executable, "-m", "accelerate.commands.accelerate_cli"],
    "python": [sys.executable],
}
"""What the commands of docstrings start with -> the same in this environment."""


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in PROGRAMS
        if name not in ("ray_train", "finetune_a_vlm")  # they have tests of their own
    ],
)
def test_an_example_runs_as_its_docstring_says_from_any_folder(name: str, shards: Path, tmp_path: Path) -> None:
    needs(name)
    (tmp_path / "omni").symlink_to(shards)
    path = EXAMPLES / f"{name}.py"
    (line,) = re.findall(rf"^(.*) examples/{name}\.py (.*)$", ast.get_docstring(ast.parse(path.read_text())), re.M)
    launcher, *options = shlex.split(line[0])
    more = [] if name == "webdataset_pipeline" else ["--steps", "2", "--global-batch-size", "8"]
    done = subprocess.run(
        [*LAUNCHERS[launcher], *options, str(PROGRAM), str(path), *shlex.split(line[1]), *more],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.findall(r"^.*\bstep\W+\d", done.stdout, re.M), done.stdout[-3000:] + done.stderr[-3000:]
    if "--checkpoints" in line[1]:
        assert [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]


def test_a_webdataset_pipeline_is_balanced_between_ranks(tmp_path: Path) -> None:
    synthesize("omni", tmp_path / "omni", samples=48)
    run_ranks(str(JOB), "webdataset_pipeline", 0, tmp_path / "omni" / "*.tar", num_ranks=2, folder=tmp_path)
    lines = [line for path in tmp_path.iterdir() if path.is_file() for line in path.read_text().splitlines()]
    steps = [json.loads(line) for line in lines if line.startswith('{"step"')]
    keys = [key for step in steps for key in step["keys"]]
    assert sorted(keys) == sorted({key for _, key in tar_keys(sorted((tmp_path / "omni").glob("*.tar")))})
    assert len(keys) == 48 and {step["step"] for step in steps} == set(range(len(steps) // 2))
    by_step = [[step["tokens"] for step in steps if step["step"] == number] for number in range(len(steps) // 2)]
    assert sum(map(max, by_step)) < 1.15 * sum(map(sum, by_step)) / 2


def run_ray_train(cluster: TestCluster, shards: Path, folder: Path, steps: int, workers: int, *more: object) -> None:
    options = ("--steps", steps, "--global-batch-size", SIZE, "--max-tokens", MAX_TOKENS, "--save-every", 2, *more)
    places = ("--checkpoints", folder / "kept", "--record", folder / f"record-{workers}", "--workers", workers)
    done = subprocess.run(
        [sys.executable, EXAMPLES / "ray_train.py", shards / "*.tar", *map(str, (*options, *places))],
        env=os.environ | {"RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("examples")
def test_ray_train_resumes_on_one_worker_and_on_three(ray_cluster: TestCluster, shards: Path, tmp_path: Path) -> None:
    expected = plain_loop("ddp", shards)
    run_ray_train(ray_cluster, shards, tmp_path / "first", SAVED, 2, "--actors", 1)
    check(recorded(tmp_path / "first" / "record-2"), expected, range(1, SAVED + 1))
    for workers in (1, 3):
        folder = tmp_path / f"again-{workers}"
        shutil.copytree(tmp_path / "first" / "kept", folder / "kept")
        run_ray_train(ray_cluster, shards, folder, STEPS, workers)
        check(recorded(folder / f"record-{workers}"), expected, range(SAVED + 1, STEPS + 1))
