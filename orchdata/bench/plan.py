"""`orchdata bench plan`: planning one step at scale.

synthetic index of 10 M rows --make_plan at 2,560 ranks x 16--> ms a step

The index is made up, without shards, of any size: nothing can be read through it. Its mix follows what omni models
train on: chat text, one or several images at native resolution, speech.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import CostModel, TransformerCost, balance_phases
from orchdata.bench.harness import PlanBench, Result, interleave, work_folder
from orchdata.dataset.index_costs import IndexCosts
from orchdata.loaders.index.index import Index, digest
from orchdata.loaders.index.index_file import merge_tables
from orchdata.loaders.index.table import Columns, TableSize, Totals, offsets_of, pack, summarize, views
from orchdata.loaders.modalities.builtin import KINDS, TEXT
from orchdata.loaders.shards.fields import RAW
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.order.order import Order, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance
from orchdata.planning.make_plan import PlanSpec, make_plan
from orchdata.planning.plan import Plan
from orchdata.planning.teams import Teams

ENCODER = TransformerCost(hidden=1280, layers=32, ffn=5120)
LLM = TransformerCost(hidden=4096, layers=32, ffn=14_336, heads=32, kv_heads=8, vocab=128_256, causal=True, gated=True)
OMNI_COST = CostModel(image=ENCODER, audio=ENCODER, llm=LLM)

MAX_IMAGES = 6
_MAX_TOKENS = 8_192
FIELDS = ("json", *(f"{number}.jpg" for number in range(MAX_IMAGES)), "flac")
_JSON, _FIRST_IMAGE, _FLAC = 0, 1, 1 + MAX_IMAGES

# Images and audio clips of a sample, and how often: text, one image, several images, speech, image and speech.
_MIX = ((0, 0, 0.38), (1, 0, 0.32), (3, 0, 0.10), (0, 1, 0.15), (1, 1, 0.05))


def run(config: PlanBench) -> list[Result]:
    """Measure; raises ValueError where the index is smaller than one global batch."""
    size = config.ranks * config.samples_per_rank
    if size > config.samples:
        raise ValueError(f"{config.ranks} ranks x {config.samples_per_rank} need {size} samples, got {config.samples}")
    with work_folder(config.folder) as folder:
        index = synthetic_index(folder / "index.index", config.samples, config.seed)
        return _planning(index, config)


def _planning(index: Index, config: PlanBench) -> list[Result]:
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
    digits = np.arange(start, stop)[:, None] // 10 ** np.arange(8, -1, -1) % 10
    columns.key_bytes[:] = (digits + ord("0")).ravel()
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
