"""A slice of the fuzzing that `make fuzz` does, and that what it looks for would be found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz import KINDS, Fuzzer, fuzz, wrong_with
from limited_runs import Runner, start_runners
from recounted import _audio, _image, _video
from shard_factory import audio, jpeg
from video_clips import clip


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    (runner,) = start_runners(tmp_path_factory.mktemp("runner"))
    yield runner
    runner.close()


def run(fuzzer: Fuzzer, kinds: tuple[str, ...], each: int, start: int = 0) -> list[str]:
    findings: list[str] = []
    fuzz(fuzzer, kinds, start, each * len(kinds), each, findings.append)
    return findings


@pytest.mark.slow
def test_mutated_files_are_refused_or_counted_right(runner: Runner, tmp_path: Path) -> None:
    fuzzer = Fuzzer(runner, tmp_path, 0)
    each = 1
    assert run(fuzzer, KINDS, each) == []
    assert sum(of.delivered for of in fuzzer.figures.values()) > each
    assert sum(of.failed for of in fuzzer.figures.values()) > 4


@pytest.mark.slow
def test_a_child_that_ends_is_a_finding_of_each_case_and_minimised(runner: Runner, tmp_path: Path) -> None:
    fuzzer = Fuzzer(runner, tmp_path, 0, misbehave="abort")
    findings = run(fuzzer, ("txt",), 2)
    assert len(findings) == 2 and all("SIGABRT" in found and "(1 operations" in found for found in findings)
    assert "--seed 0 --kinds txt --start 1 --count 1" in findings[1]
    assert (tmp_path / "finding-0-1.txt").exists()


def test_what_is_wrong_is_said() -> None:
    fine = {"end": "done", "peak_bytes": 0, "delivered": [["s", "a"]], "failures": [["s", "b", "jpg", "cut"]]}
    fine |= {"samples": 2, "different": []}
    assert wrong_with(fine) == ""
    assert "3 samples, 1 delivered, 1 failed" in wrong_with(fine | {"samples": 3})
    assert "without shard or reason" in wrong_with(fine | {"failures": [["s", "b", "jpg", ""]]})
    assert "unexpected exception" in wrong_with(fine | {"failures": [["s", "b", "", "cannot be decoded: KeyError: 1"]]})
    assert "takes" in wrong_with(fine | {"peak_bytes": 64 << 30})
    assert wrong_with(fine | {"different": ["a: 3 tokens, the index has 4"]})


def test_other_counts_than_the_index_has_are_reported() -> None:
    assert _image(jpeg(40, 30), (40, 30)) == ""
    assert "Pillow finds (40, 30)" in _image(jpeg(40, 30), (30, 40))
    assert "Pillow raises" in _image(b"none", (30, 40))
    assert _audio(audio(0.5), (8000, 16_000)) == _audio(audio(0.5), (8500, 16_000)) == ""
    shown = clip("h264", frames=8)
    assert _video(shown, (64, 48, 8, 1, 3)) == ""
    assert "PyAV shows 8 frames" in _video(shown, (64, 48, 7, 7, 24)) and _video(shown, (48, 64, 8, 1, 3))
    assert "soundfile finds 8000 frames" in _audio(audio(0.5), (9000, 16_000))
