"""Processes that profile, in turn: CPU time, peak of anonymous memory, bytes of the page."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from orchdata.bench import Result, WideTable, synthetic_index, work_folder

_REPOSITORY = Path(__file__).resolve().parents[2]
_ONE = Path(__file__).with_name("one.py")
_MAPPED = ("loaders", "balancers", "native")
"""Folders next to `orchdata` that are packages of it."""
_WARM_SAMPLES = 60_000
_EVERY_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileReportBench:
    """What to measure.

    Attributes:
        before: commit whose profile is measured too.
        samples: rows of the index.
        sources: of the mixture.
        source_samples: rows of each source.
        ranks: numbers of ranks to profile the index for.
        mixture_ranks: those of the mixture.
        repeats: rounds of the index; the mixture is profiled once.
        seed: of the indexes.
        folder: where to write the indexes (about 170 bytes a row) and pages; by default a temporary folder.
    """

    before: str = "9ce302c3"
    samples: int = 10_000_000
    sources: int = 1_000
    source_samples: int = 1_000
    ranks: str = "8,64,512,2560"
    mixture_ranks: str = "8,64"
    repeats: int = 3
    seed: int = 0
    folder: str = ""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if self.sources < 2:
            raise ValueError(f"sources must be at least 2, got {self.sources}")


class Took(NamedTuple):
    """What one process took: CPU seconds without imports, those of its imports, and anonymous memory at the peak."""

    cpu_seconds: float
    imports_seconds: float
    anonymous_bytes: int


class Case(NamedTuple):
    """A process to run: folder of the package, empty for the installed one; indexes; page to write, if any."""

    tree: Path | None
    paths: Sequence[Path]
    page: Path | None


def run(config: ProfileReportBench) -> list[Result | WideTable]:
    """Measure."""
    with work_folder(config.folder or None) as folder:
        tree = tree_of(config.before, folder / "before")
        few, whole = folder / "few.index", folder / "whole.index"
        synthetic_index(few, min(config.samples, _WARM_SAMPLES), config.seed)
        synthetic_index(whole, config.samples, config.seed)
        parts = [folder / f"corpus-{number:04d}.index" for number in range(config.sources)]
        for number, path in enumerate(parts):
            synthetic_index(path, config.source_samples, config.seed + 1 + number)
        page, mixed = folder / "page.html", folder / "mixture.html"
        cases = {
            "before": Case(tree, [whole], None),
            "now": Case(None, [whole], page),
            "mixture": Case(None, parts, mixed),
        }
        # A run that does not count compiles the kernels, of each commit.
        for case in (cases["before"], cases["now"]):
            take(case._replace(paths=[few]), config.ranks)
        took: dict[str, list[Took]] = {"before": [], "now": []}
        for turn in range(config.repeats):
            for name in ("before", "now") if turn % 2 == 0 else ("now", "before"):
                took[name].append(take(cases[name], config.ranks))
        took["mixture"] = [take(cases["mixture"], config.mixture_ranks)]
        sizes = page.stat().st_size, mixed.stat().st_size
    return results(config, took, *sizes)


def results(config: ProfileReportBench, took: dict[str, list[Took]], page: int, mixed: int) -> list[Result | WideTable]:
    """Name what was measured."""
    before, now, mixture = took["before"], took["now"], took["mixture"]
    pairs = list(zip(before, now, strict=True))
    imports = max(each.imports_seconds for each in (*before, *now))
    sources = f"mixture of {config.sources:,} sources of {config.source_samples:,} samples"

    def cpu(name: str, of: list[Took], note: str = "") -> Result:
        return Result(name=name, unit="s", values=tuple(each.cpu_seconds for each in of), note=note)

    def memory(name: str, of: list[Took]) -> Result:
        return Result(name=name, unit="MB", values=tuple(each.anonymous_bytes / 1e6 for each in of))

    return [
        cpu(
            "CPU time of the profile before", before, f"commit {config.before}; imports take up to {imports:.2g} s more"
        ),
        cpu("CPU time of profile and page", now),
        Result(
            name="CPU time of profile and page over that of the profile before",
            unit="x",
            values=tuple(later.cpu_seconds / earlier.cpu_seconds for earlier, later in pairs),
            demand=3.0,
        ),
        memory("peak of anonymous memory before", before),
        memory("peak of anonymous memory, profile and page", now),
        Result(
            name="peak of anonymous memory, more than before",
            unit="MB",
            values=tuple((later.anonymous_bytes - earlier.anonymous_bytes) / 1e6 for earlier, later in pairs),
            demand=150.0,
        ),
        Result(name="page without samples", unit="MB", values=(page / 1e6,), demand=1.0),
        cpu(f"CPU time of profile and page, {sources}", mixture),
        memory(f"peak of anonymous memory, {sources}", mixture),
        Result(name=f"page without samples, {sources}", unit="MB", values=(mixed / 1e6,), demand=1.0),
        table_of(config, took, page, mixed),
    ]


def table_of(config: ProfileReportBench, took: dict[str, list[Took]], page: int, mixed: int) -> WideTable:
    """Return medians side by side."""
    seconds = {name: statistics.median(each.cpu_seconds for each in of) for name, of in took.items()}
    megabytes = {name: statistics.median(each.anonymous_bytes / 1e6 for each in of) for name, of in took.items()}
    of_index = f"{config.samples:,} samples, {_spaced(config.ranks)} ranks"
    each = f"{config.source_samples:,} samples each, {_spaced(config.mixture_ranks)} ranks"
    of_mixture = f"a mixture of {config.sources:,} sources, {each}"
    rows = (
        (f"profile before the report, of {of_index}", seconds["before"], megabytes["before"], None),
        (f"profile and page, of {of_index}", seconds["now"], megabytes["now"], page / 1e6),
        (f"profile and page, of {of_mixture}", seconds["mixture"], megabytes["mixture"], mixed / 1e6),
    )
    columns = ("what", "CPU time, s", "anonymous memory at the peak, MB", "page without samples, MB")
    return WideTable(title="Reports", columns=columns, rows=rows)


def _spaced(ranks: str) -> str:
    return ranks.replace(",", ", ")


def tree_of(commit: str, target: Path) -> Path:
    """Write the files of a commit, as a package that is imported from there.

    Raises ValueError if the repository has no such commit.
    """
    archive = subprocess.run(
        ["git", "-C", str(_REPOSITORY), "archive", "--format=tar", commit], capture_output=True, check=False
    )
    if archive.returncode:
        raise ValueError(
            f"commit {commit!r} cannot be read from {_REPOSITORY}: {archive.stderr.decode(errors='replace').strip()}; "
            "run this in a checkout with its history, or name another commit with --before"
        )
    target.mkdir()
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
    for link in (target / "orchdata" / folder for folder in _MAPPED):
        if not link.is_symlink():  # older commits have none
            link.symlink_to(Path("..") / link.name)
    return target


def take(case: Case, ranks: str) -> Took:
    """Run a process, and watch its memory."""
    command = [sys.executable, "-P", str(_ONE), ranks, str(case.page or "-"), *map(str, case.paths)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if case.tree is not None:
        environment["PYTHONPATH"] = str(case.tree)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, _anonymous_bytes(process.pid))
            time.sleep(_EVERY_SECONDS)
        assert process.stdout is not None
        printed = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ended with {process.returncode}; its error is above")
    report = json.loads(printed)
    return Took(report["profile_seconds"] + report["page_seconds"], report["imports_seconds"], peak)


def _anonymous_bytes(pid: int) -> int:
    """Return RssAnon of a process; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:")), 0)
