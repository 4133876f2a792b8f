"""The core of every benchmark: interleaved, repeated measurements -> results with their spread, and what they ran on.

What is compared runs in turn within one process, so that a busy machine slows all of it alike; medians are reported
with their quartiles, and every report carries its command, configuration and machine.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from orchdata.loaders.storage.remote.urls import without_secrets

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

Clock = Callable[[], float]
_Repeats = Annotated[int, typer.Option(help="Times to measure each thing.")]
_Seed = Annotated[int, typer.Option(help="Seed of the data.")]
_Folder = Annotated[str | None, typer.Option(help="Where to write the data; default: a temporary folder.")]


@dataclass(frozen=True, kw_only=True)
class PlanBench:
    """What `orchdata bench plan` measures: `repeats` steps, all different. Its index takes about 170 bytes a sample."""

    ranks: Annotated[int, typer.Option(help="Simulated data-parallel ranks.")] = 2_560
    samples_per_rank: Annotated[int, typer.Option(help="Samples per rank and step.")] = 16
    samples: Annotated[int, typer.Option(help="Samples of the index.")] = 10_000_000
    repeats: _Repeats = 30
    seed: _Seed = 0
    folder: _Folder = None


@dataclass(frozen=True, kw_only=True)
class ThroughputBench:
    """What `orchdata bench throughput` measures."""

    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATHS]...", help="Your shards: files, globs or braces; default: a made-up data set."),
    ] = None
    recipe: Annotated[str | None, typer.Option(metavar="MODULE:NAME", help="An od.Recipe; default: od.Recipe().")] = (
        None
    )
    media_root: Annotated[
        str | None, typer.Option(help="Folder below which the files lie that records of JSON name.")
    ] = None
    samples: Annotated[int, typer.Option(help="Of the made-up data set; of yours, at most, at random.")] = 800
    consumer_ms: Annotated[float, typer.Option(help="CPU time of pure Python that is run for each batch.")] = 0.0
    batch_size: Annotated[int, typer.Option(help="Samples of a batch.")] = 16
    workers: Annotated[int, typer.Option(help="Threads, or worker processes.")] = 2
    repeats: _Repeats = 3
    seed: _Seed = 0
    folder: _Folder = None

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "workers", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.paths and (self.recipe or self.media_root):
            raise ValueError("recipe and media_root are of a data set of yours: give its paths too")


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One line of a report: a value for each repeat, in the order they were taken, and the median that is demanded."""

    name: str
    unit: str
    values: tuple[float, ...]
    demand: float | None = None
    better: Literal["low", "high"] = "low"
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """Lower and upper quartile; the extremes where there are fewer than four values."""
        if len(self.values) < 4:
            return min(self.values), max(self.values)
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the demand; None where there is none."""
        if self.demand is None:
            return None
        return self.median <= self.demand if self.better == "low" else self.median >= self.demand

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        low, high = self.spread
        return {
            **asdict(self),
            "values": list(self.values),
            "median": self.median,
            "spread": [low, high],
            "met": self.met,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class WideTable:
    """Many numbers of many cases side by side: name and numbers of each case, None where there is none.

    The title has their units where the columns do not say; `unit` is "x" where the numbers are ratios.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]
    unit: str = ""
    note: str = ""

    def render(self) -> Table:
        """A table for people."""
        from rich.table import Table

        table = Table(title=self.title, caption=self.note or None, title_justify="left", caption_justify="left")
        for number, heading in enumerate(self.columns):
            table.add_column(heading, justify="right" if number else "left", no_wrap=not number)
        for row in self.rows:
            table.add_row(
                *("-" if cell is None else cell if isinstance(cell, str) else digits(cell, self.unit) for cell in row)
            )
        return table


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All results of one benchmark, with what is needed to repeat it: the command as typed, its configuration and the
    machine. Tables are shown before results.
    """

    command: str
    config: Mapping[str, Any]
    results: Sequence[Result]
    tables: Sequence[WideTable] = ()
    machine: Mapping[str, Any] = field(default_factory=lambda: machine())

    @property
    def met(self) -> bool:
        """Whether no demand was missed."""
        return all(result.met is not False for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "command": self.command,
            "config": dict(self.config),
            "machine": dict(self.machine),
            "met": self.met,
            "results": [result.to_dict() for result in self.results],
            "tables": [asdict(table) for table in self.tables],
        }

    def render(self) -> Group:
        """Tables for people: the last has the results, with the settings and the machine."""
        from rich.console import Group
        from rich.table import Table

        settings = ", ".join(f"{name}={value}" for name, value in self.config.items() if value is not None)
        of = self.machine
        packages = ", ".join(f"{name} {version}" for name, version in of["packages"].items())
        ran_on = f"{of['cpu']}, {of['cores']} cores, load {of['load']}, {of['memory_gib']} GiB; Python {of['python']}"
        table = Table(title=f"{self.command}: {settings}", caption=f"{ran_on}, {packages}", title_justify="left")
        table.add_column("measured")
        for heading in ("median", "quartiles", "demand"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("note")
        for result in self.results:
            low, high, median = (digits(each, result.unit) for each in (*result.spread, result.median))
            demand = ""
            if result.demand is not None:
                sign = "<=" if result.better == "low" else ">="
                demand = f"{sign} {digits(result.demand, result.unit)}: {'met' if result.met else 'MISSED'}"
            spread = f"{low} - {high}" if len(result.values) > 1 else ""
            table.add_row(result.name, f"{median} {result.unit}", spread, demand, result.note)
        return Group(*(each.render() for each in self.tables), table)


def make_report(command: str, config: Any, results_and_tables: Sequence[Result | WideTable]) -> Report:
    """Build the report of a run under a configuration dataclass. Queries and passwords of URLs are left out."""
    if not is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"config must be a dataclass instance, got {config!r}")
    settings = {name: _shown(value) for name, value in asdict(config).items()}
    results = tuple(entry for entry in results_and_tables if isinstance(entry, Result))
    tables = tuple(entry for entry in results_and_tables if isinstance(entry, WideTable))
    return Report(command=command, config=settings, results=results, tables=tables)


def _shown(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_shown, value))
    return without_secrets(str(value)) if isinstance(value, str | Path) else value


@contextmanager
def work_folder(folder: str | None) -> Iterator[Path]:
    """A temporary folder in `folder`, which is made where it is not there."""
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="orchdata-bench-", dir=folder) as name:
        yield Path(name)


def interleave(
    functions: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warmup: int = 1,
    clock: Clock = time.perf_counter,
) -> dict[str, tuple[float, ...]]:
    """Seconds that each function takes, run in turn `repeats` times after `warmup` rounds that do not count.

    Every second round runs backwards, so that none always follows the same other. Garbage is collected between calls
    and not during them.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}")
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # What is there already need not be looked through again and again.
    try:
        for turn in range(warmup + repeats):
            names = list(functions) if turn % 2 == 0 else list(functions)[::-1]
            for name in names:
                gc.collect()
                gc.disable()
                started = clock()
                functions[name]()
                elapsed = clock() - started
                if enabled:
                    gc.enable()
                if turn >= warmup:
                    seconds[name].append(elapsed)
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
    return {name: tuple(values) for name, values in seconds.items()}


def machine() -> dict[str, Any]:
    """The machine and the versions that numbers depend on, JSON-safe."""
    packages = ("numpy", "numba", "torch", "pyarrow", "pillow", "simplejpeg", "webdataset", "tokenizers")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version for name in packages if (version := _version(name))},
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def digits(value: float, unit: str = "") -> str:
    """Three significant digits, thousands in full; ratios close to 1 with as many decimals as tell them from it."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.5g}" if unit == "x" and 0.9 < value < 1.1 else f"{value:.3g}"
