"""Mutated files, in limited children: `make fuzz ARGS="--count 100000 --seed 0"`.

Each case is indexed and, where the index takes it, decoded in an epoch under on_error="skip". It must be refused with
shard and reason, or arrive with the counts that the index has, held against what Pillow and soundfile find by
themselves. A crash, a hang or memory past the limits ends one child; what it ran is halved until one case is found, and
operations that do not matter are left out of it. Findings are files in a folder of their own, with the line that makes
them again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hostile import tar_of
from limited_runs import Runner, start_runners
from mutators import Operation, mutated, operations
from seed_files import MEMBER_KINDS, SHARD_KINDS, VIDEO_KINDS, seed_files

KINDS = MEMBER_KINDS + VIDEO_KINDS + SHARD_KINDS
CPU_SECONDS, WALL_SECONDS = 60, 300.0
PEAK_BYTES = 3 << 30
"""More than what all children share and a sample's limit of memory come to is a finding."""


@dataclass(frozen=True)
class Case:
    """One mutated file."""

    kind: str
    number: int
    done: tuple[Operation, ...]

    @classmethod
    def drawn(cls, kind: str, number: int, seed: int) -> Case:
        return cls(kind, number, tuple(operations(kind, number, seed)))

    def data(self) -> bytes:
        return mutated(self.kind, seed_files(self.kind), self.number, self.done)


@dataclass
class Figures:
    """What became of the cases of one kind."""

    cases: int = 0
    samples: int = 0
    delivered: int = 0
    failed: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    findings: list[str] = field(default_factory=list)


class Fuzzer:
    """Runs cases in batches."""

    def __init__(self, runner: Runner, folder: Path, seed: int, *, misbehave: str = "") -> None:
        self._runner = runner
        self._folder = folder
        self._seed = seed
        self._misbehave = misbehave
        self.figures: dict[str, Figures] = {}

    def run(self, kind: str, start: int, stop: int) -> None:
        """Cases of one kind, by number."""
        cases = [Case.drawn(kind, number, self._seed) for number in range(start, stop)]
        figures = self.figures.setdefault(kind, Figures())
        started = time.monotonic()
        for case, what in self._found(cases, figures):
            figures.findings.append(self._report(case, what))
        figures.cases += len(cases)
        figures.seconds += time.monotonic() - started

    def _found(self, cases: Sequence[Case], figures: Figures) -> Iterator[tuple[Case, str]]:
        answer = self._answer(cases)
        figures.peak_bytes = max(figures.peak_bytes, answer["peak_bytes"])
        what = wrong_with(answer)
        if not what:
            figures.samples += answer["samples"]
            figures.delivered += len(answer["delivered"])
            figures.failed += len(answer["failures"])
        elif len(cases) > 1:
            half = len(cases) // 2
            yield from self._found(cases[:half], figures)
            yield from self._found(cases[half:], figures)
        else:
            yield cases[0], what

    def _answer(self, cases: Sequence[Case]) -> dict[str, Any]:
        folder = self._folder / "running"
        folder.mkdir()
        try:
            shards = write_cases(cases, folder)
            limits: dict[str, Any] = {"cpu_seconds": CPU_SECONDS, "wall_seconds": WALL_SECONDS}
            video = cases[0].kind in VIDEO_KINDS
            return self._runner.run(shards, **limits, misbehave=self._misbehave, compare=True, video=video)
        finally:
            shutil.rmtree(folder)

    def _report(self, case: Case, what: str) -> str:
        """Leave out what does not matter, and save the rest."""
        for place in reversed(range(len(case.done))):
            less = Case(case.kind, case.number, case.done[:place] + case.done[place + 1 :])
            if less.done and (still := wrong_with(self._answer([less]))):
                case, what = less, still
        path = self._folder / f"finding-{self._seed}-{case.number}.{case.kind}"
        path.write_bytes(case.data())
        again = f"--seed {self._seed} --kinds {case.kind} --start {case.number} --count 1"
        return f"{again}: {what[:600]} ({len(case.done)} operations, saved as {path})"


def write_cases(cases: Sequence[Case], folder: Path) -> list[str]:
    """Cases as shards: members of one tar, each together with a text, or each a shard."""
    kind = cases[0].kind
    if kind in SHARD_KINDS:
        paths = [folder / f"{case.number:08d}.{kind}" for case in cases]
        for path, case in zip(paths, cases, strict=True):
            path.write_bytes(case.data())
        return [str(path) for path in paths]
    members: dict[str, bytes] = {}
    for case in cases:
        members[f"{case.number:08d}.{kind}"] = case.data()
        if kind == "json" and b"image" in seed_files(kind)[case.number % len(seed_files(kind))]:
            members[f"{case.number:08d}.jpg"] = seed_files("jpg")[0]
        if kind not in ("json", "txt"):
            members[f"{case.number:08d}.txt"] = b"a text"
    path = folder / "cases.tar"
    path.write_bytes(tar_of(members))
    return [str(path)]


def wrong_with(answer: dict[str, Any]) -> str:
    """What must not be, in a child's answer."""
    if answer["end"] != "done":
        return f"{answer['end']} after {answer['seconds']} s, peak {answer['peak_bytes'] >> 20} MiB: {answer['text']}"
    if answer["peak_bytes"] > PEAK_BYTES:
        return f"takes {answer['peak_bytes'] >> 20} MiB"
    delivered, failures = answer["delivered"], answer["failures"]
    if len(delivered) + len(failures) != answer["samples"]:
        return f"{answer['samples']} samples, {len(delivered)} delivered, {len(failures)} failed"
    for shard, _, _, reason in failures:
        if not shard or not reason:
            return "failed without shard or reason"
        if "cannot be measured: " in reason or "cannot be scanned: " in reason or "cannot be decoded: " in reason:
            return f"refused by an unexpected exception: {reason}"
    return "; ".join(answer["different"][:3])


def fuzz(fuzzer: Fuzzer, kinds: Sequence[str], start: int, count: int, batch: int, tell: Callable[[str], None]) -> None:
    """`count` cases in all, evenly over the kinds, in turn, so that an early end leaves all kinds with as many."""
    each = -(-count // len(kinds))
    for first in range(start, start + each, batch):
        for kind in kinds:
            before = len(fuzzer.figures.get(kind, Figures()).findings)
            fuzzer.run(kind, first, min(first + batch, start + each))
            for finding in fuzzer.figures[kind].findings[before:]:
                tell(f"{kind}: {finding}")


def report(figures: dict[str, Figures]) -> str:
    """A line of JSON for each kind."""
    return "\n".join(
        json.dumps({"kind": kind} | asdict(of) | {"findings": len(of.findings)}) for kind, of in figures.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=16_000, help="cases in all, evenly over the kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--batch", type=int, default=400, help="cases of a child")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="orchdata-fuzz-"))
    (runner,) = start_runners(folder / "runner")
    fuzzer = Fuzzer(runner, folder, given.seed)
    ends = time.monotonic() + 60 * given.minutes
    try:
        for start in range(0, -(-given.count // len(given.kinds)), given.batch):
            if time.monotonic() > ends:
                break
            count = len(given.kinds) * min(given.batch, -(-given.count // len(given.kinds)) - start)
            fuzz(fuzzer, given.kinds, given.start + start, count, given.batch, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        pass
    finally:
        runner.close()
    print(report(fuzzer.figures))
    found = any(of.findings for of in fuzzer.figures.values())
    print(f"findings in {folder}" if found else "no findings")
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
