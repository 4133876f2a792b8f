"""`python -m benchmarks.resume` at tiny sizes: what it says of a loader that resumes, and of one that does not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.resume import ours
from benchmarks.resume.data import KINDS, make_data
from benchmarks.resume.job import RunError, train
from benchmarks.resume.rank import RankJob, Task
from benchmarks.resume.run import ResumeBench, compare_outcomes, run
from benchmarks.throughput.records import PeersJob

STEPS, STOP, SIZE = 4, 2, 4


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeersJob:
    job = make_data("text", 24, shards=2, seed=0, batch_size=SIZE, workers=1, folder=tmp_path / "text")
    monkeypatch.setenv("ORCHDATA_CACHE", str(job.cache))
    return job


def task(text: PeersJob, folder: Path, first: int, last: int, *, saved: str = "", save: str = "") -> Task:
    return Task(
        data={"text": text},
        open=ours.threads,
        first=first,
        last=last,
        saved=folder / saved if saved else None,
        save=folder / save if save else None,
        out=folder / "out",
    )


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(text: PeersJob, tmp_path: Path) -> None:
    whole = train(task(text, tmp_path, 0, STEPS), "text", text)
    train(task(text, tmp_path, 0, STOP, save="saved"), "text", text)
    resumed = train(task(text, tmp_path, STOP, STEPS, saved="saved"), "text", text)
    assert compare_outcomes(whole, resumed, STOP) == (0, 0)
    assert [len(keys) for keys in whole.keys] == [SIZE] * STEPS
    # The control: the loader's state is one step old, and the weights are not.
    train(task(text, tmp_path, 0, STOP - 1, save="earlier"), "text", text)
    shutil.copy(tmp_path / "earlier" / "text" / "loader-0.pt", tmp_path / "saved" / "text" / "loader-0.pt")
    late = train(task(text, tmp_path, STOP, STEPS, saved="saved"), "text", text)
    difference, strays = compare_outcomes(whole, late, STOP)
    assert difference > 1e-4 and strays == (STEPS - STOP) * SIZE


@pytest.mark.usefixtures("one_rank")
def test_a_loader_that_refuses_is_said_on_all_ranks(text: PeersJob, tmp_path: Path) -> None:
    def refuse(job: RankJob) -> ours.Ours:
        raise ValueError(f"no state for rank {job.rank}")

    with pytest.raises(RunError, match="ValueError: no state for rank 0"):
        train(replace(task(text, tmp_path, 0, 1), open=refuse), "text", text)


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_data_are_read_whole_by_other_loaders(kind: str, tmp_path: Path) -> None:
    job = make_data(kind, 4, shards=2, seed=0, batch_size=2, workers=1, folder=tmp_path)
    modalities = {part.modality for part in job.decoder(job.records[0]).parts if hasattr(part, "modality")}
    assert modalities == {"images": {"image"}, "video": {"video"}}.get(kind, set())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_trains_on_more_and_fewer_ranks() -> None:
    resumed, settings = run(ResumeBench(peers="none", kinds="text", samples=16, steps=2))
    lanes = ["orchdata, threads", "orchdata, processes"]
    assert [row[:2] for row in resumed.rows] == [(name, f"2 -> {ranks}") for name in lanes for ranks in (2, 1, 4)]
    assert [row[0] for row in settings.rows] == lanes
    assert all(float(str(cell)) < 1e-5 for *_, cell in resumed.rows)  # a number alone: no sample differs
