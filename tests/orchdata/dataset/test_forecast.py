"""How long an index takes is said once, from bytes, and not of short ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shard_factory import omni_shards

import orchdata as od
from orchdata.dataset.indexed import forecast as forecasts
from orchdata.dataset.indexed.forecast import Forecast
from orchdata.loaders.index.building.crew import BuildProgress
from orchdata.loaders.slow import here


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def done(url: str, *, measured: bool = True) -> BuildProgress:
    return BuildProgress(url=url, measured=measured, samples=1, bad=0, done=1, total=1)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A small one, one of ten times as many bytes, and eight small ones."""
    paths = [tmp_path / f"{number}.tar" for number in range(10)]
    for path in paths:
        path.write_bytes(bytes(10_000 if path == paths[1] else 1000))
    return [str(path) for path in paths]


def test_the_time_that_is_left_follows_from_bytes(files: list[str]) -> None:
    clock = Clock()
    forecast = Forecast(files, "advice", clock=clock)
    assert forecast.seconds_left() is None
    forecast.shard_done(done(files[0]))
    clock.now = 1.9
    assert forecast.seconds_left() is None
    clock.now = 2.0
    assert forecast.seconds_left() == pytest.approx(18 * 2)
    with here().at(files[1]):
        here().fraction = 0.5
        assert forecast.seconds_left() == pytest.approx(2 * 13 / 6)


def test_kept_shards_take_no_time(files: list[str]) -> None:
    clock = Clock()
    forecast = Forecast(files, "advice", clock=clock, processes=2)
    for url in files[1:9]:
        forecast.shard_done(done(url, measured=False))
    clock.now = 100.0
    assert forecast.seconds_left() is None
    forecast.shard_done(done(files[0]))
    clock.now = 104.0
    assert forecast.seconds_left() == pytest.approx(4 / 2)


def test_it_is_said_once_and_only_if_it_is_long(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    forecast = Forecast(files, "some advice", clock=clock)
    forecast.shard_done(done(files[0]))
    clock.now = 2.0
    forecast.look()
    forecast.look()
    assert capsys.readouterr().err == "indexing 10 shards takes about 36 s more: some advice\n"
    forecast = Forecast(files, "some advice", clock=clock)
    forecast.shard_done(done(files[1]))
    clock.now = 4.0
    forecast.look()
    assert capsys.readouterr().err == ""


def test_of_a_shard_that_waits_nothing_is_said(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    forecast = Forecast(files[:1], "some advice", clock=clock)
    with here().at(files[0]):
        here().fraction = 0.001
        forecast.look()
        for clock.now in (1.5, 2.0, 4.0):
            forecast.look()
    with here().at(files[0]):  # tried again, and no further than before
        here().fraction = 0.001
        clock.now = 4.5
        forecast.look()
        assert capsys.readouterr().err == ""
        here().fraction = 0.2
        clock.now = 5.0
        forecast.look()
    assert capsys.readouterr().err == "indexing 1 shard takes about 20 s more: some advice\n"


def test_a_loader_says_how_to_make_it_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Forecast, "seconds_left", lambda self: 720.0)
    urls: Any = omni_shards(tmp_path, shards=2, samples=5)
    od.DataLoader(od.ShardDataset(urls), batch_size=2)
    said = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("indexing 2 shards takes about 12 min")
    ]
    assert len(said) == 1 and f"`orchdata index {urls[0]} {urls[1]}`" in said[0] and "--limit 1000" in said[0]
    assert forecasts.SHORT_SECONDS == 10
