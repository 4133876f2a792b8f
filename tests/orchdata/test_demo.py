"""`orchdata demo`, made short: it runs end to end, its numbers are consistent, and no file or process is left."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from orchdata.demo import COST, RECIPE, DemoConfig, DemoReport, _summary, render, run_demo
from orchdata.loaders.index.build import build_index
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.profiling.profile import profile
from orchdata.synth import synthesize

SHORT = DemoConfig(samples=48, steps=4, block_steps=2, warmup_steps=1, batch_size=4)


def test_a_lane_is_summarised_over_its_measured_steps() -> None:
    # seconds of the step, until the gradients were ready, of CPU until then; loss: of two ranks and two steps after one
    warmup = (100.0, 100.0, 100.0, 1.0)
    before = np.array([[warmup, (5, 4, 2, 0.5), (5, 3, 1.5, 2)], [warmup, (5, 2, 1, 0.5), (5, 3, 1.5, 2)]])
    after = before * [0.5, 1, 1, 1]
    after[1, 2, 3] = 1  # of a loss of 4
    lane: Any = SimpleNamespace(imbalances=[{"llm": 9.0}, {"llm": 1.5}, {"llm": 1.25}])
    found = _summary({"unbalanced": before, "balanced": after}, {"unbalanced": lane, "balanced": lane}, 1)
    assert (found["speedup"], found["loss_difference"]) == (2, 0.25)
    result = found["lanes"]["unbalanced"]
    assert result["step_ms"] == 5_000
    assert result["waiting_ms"] == 500  # one rank of two waits 2 s in one step of two
    assert result["waiting_share"] == pytest.approx(0.1)  # 0.5 s of 5
    assert result["compute_imbalance"] == result["cpu_imbalance"] == pytest.approx(7 / 6)  # (4 + 3) / (3 + 3)
    assert result["planned_imbalance"] == {"llm": 1.375}


def test_too_few_samples_for_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="samples must be at least ranks x batch_size, 16"):
        DemoConfig(samples=15, batch_size=8)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoReport, list[tuple[str, int, int]], Path]:
    """A short demo, the progress that it reported, and its folder for temporary files."""
    folder = tmp_path_factory.mktemp("demo")
    progress: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("ORCHDATA_CACHE", str(folder / "user-cache"))
        html = tmp_path_factory.mktemp("report") / "demo.html"
        report = run_demo(SHORT, html=html, progress=lambda *step: progress.append(step))
    assert report.profile.summary[0] in html.read_text()
    return report, progress, folder


@pytest.mark.slow
def test_the_demo_trains_both_lanes_alike(finished: tuple[DemoReport, Any, Any]) -> None:
    report = finished[0]
    assert set(report.lanes) == {"unbalanced", "balanced"}
    assert report.loss_difference < 1e-3  # float32, other order of summation
    for lane in report.lanes.values():
        assert lane["step_ms"] > 0
        assert 0 <= lane["waiting_share"] < 1
        assert set(lane["planned_imbalance"]) == {"image", "audio", "llm", "step"}
    planned = {name: lane["planned_imbalance"]["step"] for name, lane in report.lanes.items()}
    assert planned["balanced"] < planned["unbalanced"]


@pytest.mark.slow
def test_the_demo_leaves_no_file(finished: tuple[Any, Any, Path]) -> None:
    # multiprocessing has a folder for its fork server, which goes with this process.
    assert [path.name for path in finished[2].iterdir() if not path.name.startswith("pymp-")] == []


@pytest.mark.slow
def test_the_report_is_json_and_a_table(finished: tuple[DemoReport, Any, Any]) -> None:
    report = finished[0]
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["config"]["ranks"] == 2
    assert content["dataset"]["samples"] == 48
    assert "CPU" in content["measured"]
    console = Console(width=120, file=io.StringIO())
    console.print(render(report))
    text = console.file.getvalue()
    assert "step time, median (ms)" in text
    assert "not a prediction for your GPUs" in " ".join(text.split())


@pytest.mark.slow
def test_balancing_takes_more_than_half_of_the_imbalance_of_every_phase(tmp_path: Path) -> None:
    config = DemoConfig()
    shards = synthesize("demo", tmp_path / "shards", samples=32 * config.batch_size)
    index = build_index([str(path) for path in shards.paths], RECIPE, cache=CacheFolder(tmp_path / "cache"))

    def gains(ranks: int, batch_size: int) -> list[bool]:
        """For each phase, whether ranks wait less than half as long in it."""
        (scale,) = profile(index, cost=COST, ranks=(ranks,), batch_size=batch_size, seed=config.seed).scales
        unbalanced, balanced = (scale.settings[name].phases for name in ("none", "joint"))
        return [balanced[phase] < unbalanced[phase] / 2 for phase in balanced]

    assert gains(config.ranks, config.batch_size) == [True] * 3
    assert gains(8, config.batch_size) == [True] * 3
    assert not all(gains(8, 1))  # one sample a rank: nothing to share out


def stat_of(pid: int) -> list[str]:
    """State, parent and so on of a process, from /proc; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def children_of(pid: int) -> list[int]:
    everyone = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    direct = [other for other in everyone if stat_of(other)[1:2] == [str(pid)]]
    return direct + [grandchild for child in direct for grandchild in children_of(child)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ranks end with their parent by prctl, which is Linux's")
def test_no_process_outlives_the_demo(tmp_path: Path) -> None:
    runner = tmp_path / "runner.py"
    runner.write_text(
        "from orchdata.demo import DemoConfig, run_demo\n"
        "if __name__ == '__main__':\n"
        "    run_demo(DemoConfig(samples=32, steps=10_000, warmup_steps=1, block_steps=1, batch_size=2),\n"
        "             progress=lambda what, done, total: done > 1 and what == 'training' and print('up', flush=True))"
    )
    process = subprocess.Popen([sys.executable, str(runner)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        others = children_of(process.pid)
        assert len(others) >= 2  # the ranks
        process.kill()
        process.stdout.read()
    # Whoever is left would train on beyond this test's limit.
    while any(stat_of(pid)[:1] not in ([], ["Z"]) for pid in others):
        time.sleep(0.1)
