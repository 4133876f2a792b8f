"""Warming: after it a step loads and compiles nothing; children compile missing kernels, and end with their parent."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm_job
from shard_factory import RECIPE, omni_shards

import orchdata as od
from orchdata.dataset.indexed import IndexCosts
from orchdata.engines import warm
from orchdata.engines.warm import Warming
from orchdata.finalizers import wait_for_finalizers


def reports(folder: Path, *names: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, warm_job.__file__, folder, *names], check=True, capture_output=True, text=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(folder: Path, *names: str) -> None:
    checked = reports(folder, *names)
    assert [report["balance"] for report in checked] == list(names)
    for report in checked:
        assert report["loaded"] == [], report["balance"]
        assert report["several"] == [], report["balance"]
        assert report["shared"] or report["balance"] != "teams, caps"
        assert int(str(report["kernels"])) > 4  # else nothing was checked


@pytest.mark.slow
def test_after_warming_a_step_loads_no_kernel_and_none_has_two_signatures(tmp_path: Path) -> None:
    check(tmp_path, "per phase, caps", "grid", "accumulated")


@pytest.mark.slow
def test_the_same_of_every_way_to_balance(tmp_path: Path) -> None:
    check(tmp_path, *warm_job.BALANCES)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no kernel were stored."""
    monkeypatch.setattr(warm, "_is_stored", lambda head: False)


@pytest.mark.usefixtures("absent")
def test_children_compile_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    warming = Warming(["padded", "pipeline"])
    children = list(warming._children)
    assert children
    warming.wait()
    assert [child.returncode for child in children] == [0] * len(children)
    monkeypatch.undo()
    assert not Warming(["padded", "pipeline"])._children


@pytest.mark.usefixtures("absent")
def test_children_end_with_the_loader_and_with_its_process() -> None:
    folder = warm._cache_folder(warm._head("pipeline"))
    assert folder is not None
    with (folder / "search.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # children wait for the process that compiles it
        warming, other = Warming(["pipeline"]), Warming(["pipeline"])
        (child,), (orphan,) = warming._children, other._children
        assert orphan.stdin is not None
        orphan.stdin.close()  # as the end of this process does
        assert orphan.wait(60) in (0, -signal.SIGKILL)  # 0: before it was armed
        assert child.poll() is None
        del warming
        gc.collect()
        wait_for_finalizers()
        assert child.returncode is not None


def test_a_step_is_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    counted = IndexCosts.loss_tokens
    monkeypatch.setattr(IndexCosts, "loss_tokens", lambda self, row: planned.append(len(row)) or counted(self, row))
    dataset = od.ShardDataset(omni_shards(tmp_path, shards=1, samples=12), recipe=RECIPE)
    dataset.index()
    loader = od.DataLoader(dataset, batch_size=2, dp=(0, 2))
    assert sum(1 for _ in loader) == len(planned) == len(loader) == 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_runs_after_the_command_compile_none(tmp_path: Path) -> None:
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels"), "ORCHDATA_CACHE": str(tmp_path / "cache")}

    def run(*command: str) -> str:
        return subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout

    def stored() -> set[str]:
        return {path.name for path in (tmp_path / "kernels").rglob("*.nbc")}

    assert set(json.loads(run(sys.executable, "-m", "orchdata.cli", "warm", "--json"))) == {"folders", "seconds"}
    before = stored()
    assert any("solve_joint" in name for name in before)
    omni_shards(tmp_path, shards=2, samples=24)
    check = "import sys, orchdata as od; d = od.ShardDataset(sys.argv[1:]); d.index(); print(len(list(od.DataLoader("
    run(sys.executable, "-c", f"{check}d, batch_size=2, shuffle=True, dp=(0, 2)))))", *map(str, tmp_path.glob("*.tar")))
    assert stored() == before


@pytest.mark.usefixtures("absent")
def test_a_loader_and_a_profile_say_at_once_that_kernels_are_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 16)
    with monkeypatch.context() as patched:
        patched.setattr(Warming, "wait", lambda warming: None)
        od.profile(od.ShardDataset(str(tmp_path / "a.jsonl")), ranks=(2,), batch_size=2)
    assert "compiling kernels, once on this machine: about " in capsys.readouterr().err
    warming = Warming(["padded"])
    assert capsys.readouterr().err.startswith("compiling kernels, once on this machine: about 30 s (`orchdata warm`")
    warming.wait()
    monkeypatch.undo()
    Warming(["padded"])
    assert not capsys.readouterr().err
