"""Every benchmark: interleaved, repeated measurements -> results with their spread, and what they ran on; and those of
the command line, `orchdata bench plan` and `throughput`.

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import CostModel, TransformerCost, balance_phases
from orchdata.dataloader import DataLoader
from orchdata.dataset.indexed import IndexCosts
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.delivery.policy import ErrorPolicy
from orchdata.engines.engine import use_one_thread
from orchdata.loaders.generators import Pass
from orchdata.loaders.index.index import Index, views
from orchdata.loaders.index.index_file import merge_tables
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.index.table import Columns, TableSize, Totals, offsets_of, pack, summarize
from orchdata.loaders.modalities.builtin import KINDS, TEXT
from orchdata.loaders.recipe import Recipe, digest, load_required
from orchdata.loaders.samples.sample import decode_sample
from orchdata.loaders.shards.fields import RAW
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.remote.urls import without_secrets
from orchdata.order.order import Order, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance, Teams
from orchdata.planning.plan import Plan, PlanSpec, make_plan
from orchdata.synth import synthesize

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

Clock = Callable[[], float]


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
    """Name and numbers of each case, None where there is none; `unit` is "x" where the numbers are ratios."""

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
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: found for name in packages if (found := _version(name))},
    }


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


# `orchdata bench plan`: planning one step at scale: an index of 10 M rows --make_plan at 2,560 ranks x 16--> ms a step.
# The index is made up, without shards, of any size: nothing can be read through it. Its mix follows what omni models
# train on: chat text, one or several images at native resolution, speech.

ENCODER = TransformerCost(hidden=1280, layers=32, ffn=5120)
LLM = TransformerCost(hidden=4096, layers=32, ffn=14_336, heads=32, kv_heads=8, vocab=128_256, causal=True, gated=True)
OMNI_COST = CostModel(image=ENCODER, audio=ENCODER, llm=LLM)

MAX_IMAGES = 6
_MAX_TOKENS = 8_192
FIELDS = ("json", *(f"{number}.jpg" for number in range(MAX_IMAGES)), "flac")
_JSON, _FIRST_IMAGE, _FLAC = 0, 1, 1 + MAX_IMAGES

# Images and audio clips of a sample, and how often: text, one image, several images, speech, image and speech.
_MIX = ((0, 0, 0.38), (1, 0, 0.32), (3, 0, 0.10), (0, 1, 0.15), (1, 1, 0.05))


def run_plan(config: Any) -> list[Result]:
    """Measure; raises ValueError where the index is smaller than one global batch."""
    size = config.ranks * config.samples_per_rank
    if size > config.samples:
        raise ValueError(f"{config.ranks} ranks x {config.samples_per_rank} need {size} samples, got {config.samples}")
    with work_folder(config.folder) as folder:
        index = synthetic_index(folder / "index.index", config.samples, config.seed)
        return _planning(index, config)


def _planning(index: Index, config: Any) -> list[Result]:
    capped = Balance(max_tokens=_MAX_TOKENS, oversize="own")
    words = f"microbatches of {_MAX_TOKENS:,} tokens"
    specs = {
        name: PlanSpec(
            costs=IndexCosts(index, OMNI_COST),
            order=Order(index.num_rows, shuffle=Shuffle(), seed=config.seed, excluded=index.bad_rows()),
            batches=GlobalBatches(size=config.ranks * config.samples_per_rank, drop_last=True),
            balance=balance,
            num_ranks=config.ranks,
        )
        for name, balance in {
            "plan one step": Balance(),
            f"plan one step, {words}": capped,
            "plan one step per phase": Balance(assignment="per_phase"),
            f"plan one step per phase, {words}": replace(capped, assignment="per_phase"),
            "plan one step in a grid of 8 ranks a node": Balance(scope="grid", group_size=8),
        }.items()
    }
    one_phase, teams = IndexCosts(index, CostModel(llm=LLM)), Teams(largest=32, cut="trainer")
    for name, balance in {"": Balance(), f", {words}": capped}.items():
        specs[f"one phase{name}"] = replace(specs["plan one step"], costs=one_phase, balance=balance)
        shared = replace(balance, teams=teams)
        specs[f"one phase in teams{name}"] = replace(specs["plan one step"], costs=one_phase, balance=shared)
    demands = dict(zip(specs, (20.0, 60.0), strict=False))
    plain = specs["plan one step"]
    steps = np.random.default_rng(config.seed).integers(0, plain.num_steps, 1 + config.repeats).tolist()

    def planning(spec: PlanSpec) -> Callable[[], Plan]:
        turn = iter(steps)
        return lambda: make_plan(spec, StepTask(0, next(turn)))

    def look_up(step: int) -> dict[str, np.ndarray]:
        _, row = plain.order.rows(0, *plain.batches.bounds(step, plain.order.num_samples))
        costs = {phase: plain.costs.costs(phase, row) for phase in plain.costs.phases}
        plain.costs.positions("llm", row)
        plain.costs.loss_tokens(row)
        return costs

    turn, costs = iter(steps), look_up(steps[0])
    parts: dict[str, Callable[[], object]] = {
        "  of it: order and index lookups": lambda: look_up(next(turn)),
        "  of it: balancing": lambda: balance_phases(costs, config.ranks),
    }
    wall = interleave({**{name: planning(spec) for name, spec in specs.items()}, **parts}, repeats=config.repeats)
    cpu = interleave(
        {name: planning(spec) for name, spec in specs.items()}, repeats=config.repeats, clock=time.thread_time
    )
    plans = {name: make_plan(spec, StepTask(0, steps[0])) for name, spec in specs.items()}
    plan = plans["plan one step"]
    peaks = sum(int(plan.loads(phase).max()) for phase in plan.phases)
    dealt = sum(int(plan.loads_unbalanced(phase).max()) for phase in plan.phases)
    bounds = sum(plan.lower_bound(phase) for phase in plan.phases)
    # What teams add is of the same steps: 25 ms to 2,560 x 16 and 100 ms to 2,560 x 62, or half of the time and 25 ms.
    limits = {
        "": 25.0 if config.samples_per_rank <= 16 else 100.0,
        f", {words}": 25 + 500 * statistics.median(cpu[f"one phase, {words}"]),
    }
    added = {name: np.subtract(cpu[f"one phase in teams{name}"], cpu[f"one phase{name}"]).tolist() for name in limits}
    return [
        *(
            _milliseconds(f"CPU time that teams add to one phase{name}", tuple(added[name]), limit)
            for name, limit in limits.items()
        ),
        *(
            _milliseconds(
                name,
                wall[name],
                demands.get(name),
                f"CPU time {1e3 * statistics.median(cpu[name]):.3g} ms; with index lookups; {len(of.phases)} phases; "
                f"{of.num_microbatches} microbatches",
            )
            for name, of in plans.items()
        ),
        *(_milliseconds(name, wall[name]) for name in parts),
        Result(
            name="sum over phases of the largest load / lower bound",
            unit="x",
            values=(peaks / bounds,),
            note=f"without balancing {dealt / bounds:.2f} x",
        ),
    ]


def _milliseconds(name: str, seconds: tuple[float, ...], demand: float | None = None, note: str = "") -> Result:
    return Result(name=name, unit="ms", values=tuple(1e3 * value for value in seconds), demand=demand, note=note)


def synthetic_index(path: str | Path, num_samples: int, seed: int, *, num_shards: int | None = None) -> Index:
    """Write an index of `num_samples` made-up samples in `num_shards` equal shards (default one for 10,000), and open
    it.

    Text has a log-normal length (median 180 tokens), images a log-normal area (median 0.6 megapixels: 770 merged
    tokens) and aspect, audio 1 to 30 seconds with a few of up to ten minutes; patch 14, merge 2, 25 tokens a second.
    The same arguments give the same content. Memory is bounded by one shard.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    count = max(1, num_samples // 10_000) if num_shards is None else num_shards
    if not 1 <= count <= num_samples:
        raise ValueError(f"num_shards must be from 1 to num_samples ({num_samples}), got {count}")
    bounds = [number * num_samples // count for number in range(count + 1)]
    sources = [_Source.measured(seed, number, bounds[number], bounds[number + 1]) for number in range(count)]
    description = {"synthetic": {"seed": seed, "num_samples": num_samples}}
    shards = [source.shard for source in sources]
    fingerprint = digest(description)
    merge_tables(Path(path), shards, sources, fingerprint=fingerprint, modalities=KINDS, recipe=description)
    return Index(path)


@dataclass(frozen=True, slots=True)
class _Source:
    """One made-up shard: generated once for its size and totals, and again when its turn to be copied comes."""

    seed: int
    start: int
    shard: ShardInfo
    size: TableSize
    totals: Totals
    fields: Sequence[str] = FIELDS

    @classmethod
    def measured(cls, seed: int, number: int, start: int, stop: int) -> _Source:
        columns = _generate(seed, start, stop)
        size_bytes = int(columns.member_offset[-1] + columns.member_size[-1]) + 1024
        shard = ShardInfo(f"synthetic-{number:06d}.tar", size_bytes, digest([seed, start, stop]))
        return cls(seed, start, shard, columns.size, summarize(columns, KINDS, {}, unread={"names": {}, "others": 0}))

    def body(self) -> bytes:
        return pack(_generate(self.seed, self.start, self.start + self.size.rows))


def _generate(seed: int, start: int, stop: int) -> Columns:
    """Columns of the samples [start, stop)."""
    rng = np.random.default_rng([seed, start])
    n = stop - start
    kind = rng.choice(len(_MIX), n, p=[share for _, _, share in _MIX])
    images = np.array([count for count, _, _ in _MIX])[kind]
    images += (images > 1) * rng.integers(-1, MAX_IMAGES - 2, n)  # several: 2 to 6
    clips = np.array([count for _, count, _ in _MIX])[kind]
    text_tokens = np.clip(rng.lognormal(np.log(180), 1.1, n), 4, 16_000).astype(np.int64)

    # Parts and members in the same order: a sample's images, its audio, its JSON (a member only).
    part_offsets = offsets_of(images + clips)
    member_offsets = offsets_of(images + clips + 1)
    number_in_sample = np.arange(part_offsets[-1]) - np.repeat(part_offsets[:-1], images + clips)
    is_audio = number_in_sample >= np.repeat(images, images + clips)
    member_of_part = np.arange(part_offsets[-1]) + np.repeat(np.arange(n), images + clips)
    json_members = member_offsets[1:] - 1

    pixels = _images(rng, number_in_sample.size)
    sound = _audio(rng, number_in_sample.size)
    size = TableSize(
        rows=n,
        parts=number_in_sample.size,
        members=int(member_offsets[-1]),
        bad=0,
        key_bytes=9 * n,
        error_field_bytes=0,
        error_reason_bytes=0,
        extent_width=2,
        header_width=2,
    )
    columns = views(bytearray(size.num_bytes), size)  # of zeros
    columns.part_offsets[:], columns.member_offsets[:] = part_offsets, member_offsets
    columns.part_modality[:] = np.where(is_audio, KINDS.index("audio"), KINDS.index("image"))
    columns.part_member[:] = number_in_sample
    for name in ("positions", "tokens", "rows"):
        getattr(columns, f"part_{name}")[:] = np.where(is_audio, sound[name], pixels[name])
    columns.part_extent[:] = np.where(is_audio[:, None], sound["extent"], pixels["extent"])

    columns.member_kind[:] = TEXT
    columns.member_kind[member_of_part] = columns.part_modality
    columns.member_field[json_members] = _JSON
    columns.member_field[member_of_part] = np.where(is_audio, _FLAC, _FIRST_IMAGE + number_in_sample)
    columns.member_header[member_of_part] = np.where(is_audio[:, None], sound["header"], pixels["header"])
    columns.member_size[json_members] = text_tokens * 4 + 60
    columns.member_size[member_of_part] = np.where(is_audio, sound["size"], pixels["size"])
    stored = 512 + (columns.member_size + 511) // 512 * 512
    columns.member_offset[:] = np.cumsum(stored) - stored + 512

    media_tokens = np.diff(np.concatenate([[0], np.cumsum(columns.part_tokens, dtype=np.int64)])[part_offsets])
    columns.llm_tokens[:] = text_tokens + media_tokens
    columns.loss_tokens[:] = np.maximum(1, text_tokens * rng.uniform(0.3, 0.9, n))
    columns.key_offsets[:] = np.arange(n + 1) * 9
    decimals = np.arange(start, stop)[:, None] // 10 ** np.arange(8, -1, -1) % 10
    columns.key_bytes[:] = (decimals + ord("0")).ravel()
    columns.member_encoding[:] = RAW
    return columns


def _images(rng: np.random.Generator, count: int) -> dict[str, NDArray[np.int64]]:
    area = np.clip(rng.lognormal(np.log(600_000), 0.9, count), 3_200, 3_200_000)
    aspect = np.clip(rng.lognormal(0, 0.35, count), 0.25, 4)
    width, height = np.sqrt(area * aspect).astype(np.int64), np.sqrt(area / aspect).astype(np.int64)
    rows, cols = np.maximum(1, height // 28), np.maximum(1, width // 28)
    tokens = rows * cols
    sizes = {"header": _pairs(width, height), "size": width * height // 8}
    patches = tokens * 4
    return {"positions": patches, "tokens": tokens, "rows": patches, "extent": _pairs(rows * 2, cols * 2), **sizes}


def _audio(rng: np.random.Generator, count: int) -> dict[str, NDArray[np.int64]]:
    seconds = np.clip(rng.lognormal(np.log(9), 0.7, count), 1, 30)
    seconds = np.where(rng.random(count) < 0.02, rng.uniform(60, 600, count), seconds)
    frames = (seconds * 16_000).astype(np.int64)
    tokens = np.maximum(1, -(-frames // 640))
    sizes = {"header": _pairs(frames, np.full(count, 16_000)), "size": frames}
    mel_frames = tokens * 4
    extent = _pairs(frames, mel_frames)
    return {"positions": tokens * 2, "tokens": tokens, "rows": mel_frames, "extent": extent, **sizes}


def _pairs(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([first, second], axis=1)


# `orchdata bench throughput`: loading speed on this machine, of a made-up data set or of the user's.
#
#     shards --index--> rows --bare threads, each sample read, decoded and dropped--> samples/s
#                            --DataLoader with threads, with worker processes-------> samples/s, waits for batches
#
# They take turns, an epoch each, in this process; the first turn does not count.

BARE = "bare threads"


class Epoch(NamedTuple):
    """Figures of an epoch: samples a second after the first batch, and seconds: until the first batch, and of each
    other one that it was waited for, and that the consumer's work took.
    """

    rate: float
    first: float = 0.0
    waits: tuple[float, ...] = ()
    works: tuple[float, ...] = ()


def run_throughput(
    config: Any, recipe: Recipe | None = None, storage_options: Mapping[str, str] | None = None
) -> list[Result | WideTable]:
    """Measure; raises ValueError for fewer than three batches. `storage_options` are secret, and not of `config`."""
    with work_folder(config.folder) as folder:
        if config.paths:
            dataset = ShardDataset(
                list(config.paths), recipe, media_root=config.media_root, storage_options=storage_options
            )
            return _compared(config, dataset)
        paths = synthesize("omni", folder / "shards", samples=config.samples).paths
        before, os.environ["ORCHDATA_CACHE"] = os.environ.get("ORCHDATA_CACHE"), str(folder / "cache")
        try:
            return _compared(config, ShardDataset([str(path) for path in paths]))
        finally:
            del os.environ["ORCHDATA_CACHE"]
            if before is not None:
                os.environ["ORCHDATA_CACHE"] = before


def _compared(config: Any, dataset: ShardDataset) -> list[Result | WideTable]:
    index = dataset.index()
    good = np.setdiff1d(np.arange(index.num_rows), index.bad_rows(), assume_unique=True)
    rows = np.random.default_rng(config.seed).permutation(good)[: config.samples].tolist()
    if len(rows) < 3 * config.batch_size:
        raise ValueError(f"batches of {config.batch_size} need {3 * config.batch_size} samples, got {len(rows)}")
    ways: dict[str, Callable[[], Epoch]] = {
        BARE: partial(_bare, config, dataset, rows),
        "threads": partial(_loaded, config, dataset, len(rows), num_threads=config.workers),
        "processes": partial(_loaded, config, dataset, len(rows), num_workers=config.workers),
    }
    epochs: dict[str, list[Epoch]] = {name: [] for name in ways}
    for turn in range(1 + config.repeats):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            epoch = ways[name]()
            if turn:
                epochs[name].append(epoch)
    return _results(epochs)


def _bare(config: Any, dataset: ShardDataset, rows: Sequence[int]) -> Epoch:
    """No order, and no batches to pack: what reading and decoding allow."""
    index, recipe = dataset.index(), dataset.recipe
    load_required(recipe)
    shards = OpenShards(limits=recipe.limits, cache=CacheFolder(), files=dataset.files)

    def decode(row: int) -> None:
        sample = StoredSample(index, shards, row)
        payloads = sample.read(recipe)
        spans, generator_of = partial(sample.spans, recipe, payloads), partial(sample.generator, Pass())
        decode_sample(sample.members, payloads, index.sizes(sample.parts, recipe), recipe, spans, generator_of)

    with ThreadPoolExecutor(config.workers, initializer=use_one_thread) as pool:
        began = time.perf_counter()
        for _ in pool.map(decode, rows):
            pass
        return Epoch(len(rows) / (time.perf_counter() - began))


def _loaded(config: Any, dataset: ShardDataset, samples: int, *, num_workers: int = 0, num_threads: int = 1) -> Epoch:
    loader = DataLoader(
        dataset,
        batch_size=config.batch_size,
        shuffle=True,
        seed=config.seed,
        num_workers=num_workers,
        num_threads=num_threads,
        dp=(0, 1),
        on_error=ErrorPolicy("skip", max_failures=None),
    )
    waits, works, counts = [], [], []
    at = time.perf_counter()
    for batch in islice(loader, samples // config.batch_size):
        waits.append(time.perf_counter() - at)
        counts.append(len(batch.sample_ids))
        at, began = time.perf_counter(), time.thread_time()
        while time.thread_time() - began < config.consumer_ms / 1e3:
            pass
        works.append(time.perf_counter() - at)
        at = time.perf_counter()
    loader.close()
    return Epoch(sum(counts[1:]) / (sum(waits[1:]) + sum(works[1:])), waits[0], tuple(waits[1:]), tuple(works[1:]))


def _results(epochs: Mapping[str, Sequence[Epoch]]) -> list[Result | WideTable]:
    bare = [epoch.rate for epoch in epochs[BARE]]
    rows: list[tuple[str | float | None, ...]] = []
    for name, runs in epochs.items():
        rate = statistics.median(run.rate for run in runs)
        waits = 1e3 * np.concatenate([run.waits for run in runs])
        times: list[float | None] = [None] * 4
        if len(waits):
            works = 1e3 * np.concatenate([run.works for run in runs])
            first = statistics.median(run.first for run in runs)
            times = [first, float(np.median(waits)), float(np.quantile(waits, 0.99)), float(np.median(works))]
        rows.append((name, rate, rate / statistics.median(bare), *times))
    columns = ("", "samples/s", "of bare", "first batch s", "wait p50 ms", "wait p99 ms", "work ms")
    return [
        WideTable(title="one epoch", columns=columns, rows=tuple(rows)),
        *(
            Result(name=name, unit="samples/s", values=tuple(run.rate for run in runs), better="high")
            for name, runs in epochs.items()
        ),
    ]
