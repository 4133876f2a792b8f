"""`orchdata demo`: make a dataset, profile it, train a small multimodal LLM on it unbalanced and balanced, report.

    datasets/demo.yaml --synthesize--> shards --index--> profile
                           +--2 ranks: train_rank--> steps of both ways --> DemoReport

Everything lies in one temporary folder, the index included, and goes with it. On each rank, each *lane* has a loader, a
model and an optimizer; the models start equal, and both lanes see the same global batches. Blocks of steps alternate
between them, so that other work of the machine slows both. Every step starts at a barrier, with its batch at hand. A
rank computes until its last gradient is ready; what it then waits for the slowest is lost.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import orchdata as od
from orchdata.batch.tensors import IGNORE, merge_features
from orchdata.loaders.index.build import build_index
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.profiling.page import write_report
from orchdata.profiling.profile import Profile, profile
from orchdata.synth import SynthReport, read_description, synthesize

if TYPE_CHECKING:
    from rich.console import RenderableType

Progress = Callable[[str, int, int], None]

_SHOWN = 12  # samples in the report


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """How much the demo does: `steps` measured steps of each lane after `warmup_steps`, in blocks by turns, with
    `batch_size` samples per rank and step (a mean, once balanced). Ranks are processes of one CPU thread each.
    """

    samples: int = 1536
    ranks: int = 2
    steps: int = 48
    block_steps: int = 4
    warmup_steps: int = 2
    batch_size: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "ranks", "steps", "block_steps", "warmup_steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.samples < self.ranks * self.batch_size:
            raise ValueError(
                f"samples must be at least ranks x batch_size, {self.ranks * self.batch_size}, for one step; "
                f"got {self.samples}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    """The demo's result; `to_dict` is what `--json` prints.

    `lanes`, "unbalanced" and "balanced", over the measured steps: `step_ms` (median of the slowest rank's),
    `waiting_ms` (mean over steps and ranks until the slowest is ready) and `waiting_share` of the step,
    `compute_imbalance` (longest compute time over the mean) and `cpu_imbalance`, in CPU time, which other work does not
    lengthen, and `planned_imbalance`, phase -> max / mean over ranks by the cost model. `speedup` is of step times over
    the same global batches, `loss_difference` the largest of the two loss curves, relative.
    """

    config: DemoConfig
    cores: int
    parameters: int
    lanes: Mapping[str, Mapping[str, Any]]
    speedup: float
    loss_difference: float
    dataset: SynthReport
    profile: Profile

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe values, with a plain statement of what was measured."""
        own = {name: getattr(self, name) for name in self.__slots__}
        nested = {"dataset": self.dataset.to_dict(), "profile": self.profile.to_dict(), "config": asdict(self.config)}
        return {"measured": _what_was_measured(self)} | own | nested


def run_demo(
    config: DemoConfig | None = None, *, html: Path | None = None, progress: Progress | None = None
) -> DemoReport:
    """Run the whole demo, by default for about a minute on two cores; `html` is a file for the report of the data set.
    `progress` is called with what is being done, and how far it is: ("training", steps done, steps in all).
    """
    config = config if config is not None else DemoConfig()
    tell = progress if progress is not None else lambda what, done, total: None
    with tempfile.TemporaryDirectory(prefix="orchdata-demo-") as name:
        folder = Path(name)
        dataset = synthesize(
            {**read_description("demo"), "seed": config.seed},
            folder / "shards",
            samples=config.samples,
            progress=lambda done, total: tell("writing samples", done, total),
        )
        profiled = _profile(config, dataset, folder, html, tell)
        result = _train(config, dataset, folder, tell)
    return DemoReport(config=config, cores=len(os.sched_getaffinity(0)), dataset=dataset, profile=profiled, **result)


def _profile(config: DemoConfig, dataset: SynthReport, folder: Path, html: Path | None, tell: Progress) -> Profile:
    """Index the shards, which the ranks will need, profile them, and write the report."""
    paths = [str(path) for path in dataset.paths]
    index = build_index(
        paths,
        RECIPE,
        cache=CacheFolder(folder / "cache"),
        progress=lambda built: tell("indexing shards", built.done, built.total),
    )
    profiled = profile(index, cost=COST, ranks=(config.ranks, 8, 64), batch_size=config.batch_size, seed=config.seed)
    if html is not None:
        tell("writing the report", 0, 1)
        write_report(profiled, html, od.ShardDataset(paths, RECIPE), index, _SHOWN)
        tell("writing the report", 1, 1)
    return profiled


def _train(config: DemoConfig, dataset: SynthReport, folder: Path, tell: Progress) -> dict[str, Any]:
    """Train on all ranks, which end with this process; returns what rank 0 writes."""
    task = {
        **asdict(config),
        "folder": str(folder),
        "shards": [str(path) for path in dataset.paths],
        "global_batch_size": config.ranks * config.batch_size,
    }
    done = multiprocessing.get_context("spawn").Value("i", 0)
    ranks = spawn(train_rank, (task, done), nprocs=config.ranks, join=False, daemon=True)
    while not ranks.join(timeout=0.2):
        tell("training", done.value, config.warmup_steps + config.steps)
    tell("training", done.value, config.warmup_steps + config.steps)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def _what_was_measured(report: DemoReport) -> str:
    """A plain statement, with its limits."""
    config = report.config
    return (
        f"{config.ranks} ranks of one CPU thread each on this machine ({report.cores} cores), gloo, DDP; a model of "
        f"{report.parameters / 1e6:.1f} M parameters in float32; a synthetic dataset; {config.steps} steps of "
        f"{config.ranks * config.batch_size} samples each way after {config.warmup_steps} of warm-up, in blocks by "
        "turns, on the same global batches. Batches are loaded before each step and not part of its time. It shows "
        "what imbalance costs here and that balancing removes it; it is not a prediction for your GPUs: for your data "
        "and number of ranks, see `orchdata profile`"
    )


def render(report: DemoReport) -> RenderableType:
    """The report as a table for people."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    before, after = report.lanes["unbalanced"], report.lanes["balanced"]
    table = Table(title="Training, unbalanced and balanced", title_justify="left")
    table.add_column("")
    table.add_column("unbalanced", justify="right")
    table.add_column("balanced", justify="right")

    def add(label: str, form: str, name: str) -> None:
        table.add_row(label, form.format(before[name]), form.format(after[name]))

    add("step time, median (ms)", "{:.0f}", "step_ms")
    add("time a rank waits for the slowest (ms)", "{:.0f}", "waiting_ms")
    add("  share of the step lost to waiting", "{:.1%}", "waiting_share")
    add("compute imbalance, measured (max/mean)", "{:.3f}", "compute_imbalance")
    add("  in CPU time", "{:.3f}", "cpu_imbalance")
    for phase, value in before["planned_imbalance"].items():
        label = "all phases" if phase == "step" else f"{phase} phase"
        table.add_row(f"  {label}, by cost model", f"{value:.3f}", f"{after['planned_imbalance'][phase]:.3f}")
    verdict = (
        f"Balanced training is {report.speedup:.2f} times as fast over the same samples. "
        f"The loss curves differ by at most {report.loss_difference:.1e}, relative: float32 sums in another order."
    )
    return Group(table, Text(verdict, style="bold"), Text(f"Measured: {_what_was_measured(report)}.", style="dim"))


RECIPE: Final = od.Recipe(
    image=od.ImagePreprocessor(patch_size=14, merge=2, min_tokens=4, max_tokens=256, dtype="float32"),
    audio=od.AudioPreprocessor(num_mels=80),
)
_PATCH, _PATCHES, _STRIDE, _WINDOW, _FRAMES = 3 * 14 * 14, 4, 2, 2 * 80, 2  # of the recipe, and of a token
_ENCODER, _LLM, _LAYERS, _HEADS, _VOCABULARY, _PLACES = 64, 128, 3, 4, 260, 4096


def _encoder_cost(in_width: int) -> od.TransformerCost:
    sizes: dict[str, Any] = {"hidden": _ENCODER, "layers": _LAYERS, "ffn": 4 * _ENCODER}
    return od.TransformerCost(**sizes, stem_macs=in_width * _ENCODER, connector_macs=_ENCODER * _LLM)


COST: Final = od.CostModel(
    image=_encoder_cost(_PATCH),
    audio=_encoder_cost(_WINDOW),
    llm=od.TransformerCost(hidden=_LLM, layers=_LAYERS, ffn=4 * _LLM, vocab=_VOCABULARY, causal=True),
)
LANES: Final = {"unbalanced": od.Balance(scope="none"), "balanced": od.Balance(scope="global")}


class _Block(nn.Module):
    """Over packed sequences (num_positions, hidden), of which each attends to itself alone."""

    def __init__(self, hidden: int, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.ffn = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3, _HEADS, -1)).unbind(1)
        pieces = zip(*(each.transpose(0, 1)[None].split(lengths, dim=2) for each in heads), strict=True)
        mixed = [F.scaled_dot_product_attention(q, k, v, is_causal=self.causal) for q, k, v in pieces]
        x = x + self.out(torch.cat(mixed, dim=2)[0].transpose(0, 1).flatten(1))
        out: Tensor = x + self.ffn(self.between(x))
        return out


class _Encoder(nn.Module):
    """Rows (num_positions, in_width) to a row for each token, of `group` positions."""

    def __init__(self, in_width: int, group: int) -> None:
        super().__init__()
        self.group = group
        self.embed, self.project = nn.Linear(in_width, _ENCODER), nn.Linear(group * _ENCODER, _LLM)
        self.blocks = nn.ModuleList(_Block(_ENCODER, causal=False) for _ in range(_LAYERS))

    def forward(self, rows: Tensor, lengths: Sequence[int]) -> Tensor:
        x = self.embed(rows)
        for block in self.blocks:
            x = block(x, lengths)
        out: Tensor = self.project(x.unflatten(0, (-1, self.group)).flatten(1))
        return out


class _Model(nn.Module):
    """Image and audio encoder, and a causal LM: a batch's `model_inputs()` to its summed loss."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.audio = _Encoder(_PATCH, _PATCHES), _Encoder(_WINDOW, _FRAMES)
        self.embed, self.place = nn.Embedding(_VOCABULARY, _LLM), nn.Embedding(_PLACES, _LLM)
        self.blocks = nn.ModuleList(_Block(_LLM, causal=True) for _ in range(_LAYERS))
        self.head = nn.Linear(_LLM, _VOCABULARY)

    def forward(self, **batch: Any) -> Tensor:
        images = self.image(batch["image_patches"], batch["image_cu_seqlens"].diff().tolist())
        frames = batch["audio_features"].unflatten(0, (-1, _STRIDE)).flatten(1)
        clips = self.audio(frames, (batch["audio_cu_seqlens"].diff() // _STRIDE).tolist())
        x = self.embed(batch["input_ids"]) + self.place(batch["position_ids"] % _PLACES)
        x = merge_features(x, images, batch["image_positions"])
        x = merge_features(x, clips, batch["audio_positions"])
        for block in self.blocks:
            x = block(x, batch["cu_seqlens"].diff().tolist())
        targets = batch["labels"][1:]  # the first label of a sample is -100: none predicts the next sample
        asked = (targets != IGNORE).nonzero()[:, 0]
        return F.cross_entropy(self.head(x[:-1][asked]), targets[asked], reduction="sum")


class _Lane:
    """One way of sharing out the work. It reads when asked: threads of its own would take time from the ranks."""

    def __init__(self, task: Mapping[str, Any], balance: od.Balance) -> None:
        self._loader = od.DataLoader(
            od.ShardDataset(task["shards"], recipe=RECIPE),
            global_batch_size=task["global_batch_size"],
            shuffle=True,
            seed=task["seed"],
            drop_last=True,
            cost=COST,
            balance=balance,
            num_threads=0,
        )
        torch.manual_seed(task["seed"])
        self.model = DistributedDataParallel(_Model())
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._ready = 0.0, 0.0
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._tick)
        self.batches = chain.from_iterable(repeat(self._loader))  # epoch after epoch
        self.records: list[tuple[float, ...]] = []  # of each step: seconds, until ready, CPU until ready, loss
        self.imbalances: list[dict[str, float]] = []  # planned, largest over mean of the ranks

    def _tick(self, _: Tensor) -> None:
        self._ready = time.perf_counter(), time.process_time()

    def train(self, batch: od.Batch) -> None:
        dist.barrier()
        started, cpu = time.perf_counter(), time.process_time()
        loss = self.model(**batch.model_inputs())
        (loss * batch.loss_scale).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        ended, (ready, cpu_ready) = time.perf_counter(), self._ready
        mean_loss = loss.item() / max(1, batch.plan.loss_tokens)
        self.records.append((ended - started, ready - started, cpu_ready - cpu, mean_loss))
        loads = {phase: batch.plan.loads(phase) for phase in batch.plan.phases}
        loads["step"] = np.sum(list(loads.values()), axis=0)
        self.imbalances.append({name: float(load.max() / max(1, load.mean())) for name, load in loads.items()})


def train_rank(rank: int, task: Mapping[str, Any], steps_done: Any) -> None:
    """Train; rank 0 writes the result into the task's folder. `steps_done` counts for the parent."""
    folder = Path(task["folder"])
    os.environ |= {"ORCHDATA_CACHE": str(folder / "cache"), "GLOO_SOCKET_IFNAME": "lo", "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= task["ranks"]:
        os.sched_setaffinity(0, {cores[rank]})
    dist.init_process_group("gloo", f"file://{folder / 'ranks'}", rank=rank, world_size=task["ranks"])
    lanes = {name: _Lane(task, balance) for name, balance in LANES.items()}
    done = turn = 0
    while done < task["warmup_steps"] + task["steps"]:
        # Every second round runs backwards, so that no lane always follows the other.
        block = min(task["block_steps"] if done else task["warmup_steps"], task["warmup_steps"] + task["steps"] - done)
        for lane in list(lanes.values())[:: -1 if turn % 2 else 1]:
            for batch in [next(lane.batches) for _ in range(block)]:
                lane.train(batch)
        done, turn = done + block, turn + 1
        if rank == 0:
            steps_done.value = done
    gathered: list[Any] = [None] * task["ranks"]
    dist.all_gather_object(gathered, {name: lane.records for name, lane in lanes.items()})
    if rank == 0:
        records = {name: np.array([each[name] for each in gathered]) for name in lanes}
        parameters = sum(parameter.numel() for parameter in lanes["balanced"].model.parameters())
        result = {"parameters": parameters, **_summary(records, lanes, task["warmup_steps"])}
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # threads that gloo may still hold abort a process that ends the long way


def _summary(
    records: Mapping[str, NDArray[np.float64]], lanes: Mapping[str, _Lane], warmup_steps: int
) -> dict[str, Any]:
    """Records of each lane (num_ranks, num_steps, 4) to figures of its measured steps; a step ends with its slowest."""
    figures, steps = {}, {}
    for name, values in records.items():
        seconds, ready, cpu = np.moveaxis(values[:, warmup_steps:, :3], 2, 0)
        steps[name] = seconds.max(axis=0)
        waiting = ready.max(axis=0) - ready
        planned = lanes[name].imbalances[warmup_steps:]
        figures[name] = {
            "step_ms": 1e3 * float(np.median(steps[name])),
            "waiting_ms": 1e3 * float(waiting.mean()),
            "waiting_share": float(waiting.mean(axis=0).sum() / steps[name].sum()),
            "compute_imbalance": float(ready.max(axis=0).sum() / ready.mean(axis=0).sum()),
            "cpu_imbalance": float(cpu.max(axis=0).sum() / cpu.mean(axis=0).sum()),
            "planned_imbalance": {phase: float(np.mean([one[phase] for one in planned])) for phase in planned[0]},
        }
    before, after = (records[name][:, :, 3].sum(axis=0) for name in ("unbalanced", "balanced"))
    return {
        "lanes": figures,
        "speedup": float(steps["unbalanced"].sum() / steps["balanced"].sum()),
        "loss_difference": float(np.max(np.abs(before - after) / np.maximum(np.abs(before), 1e-12))),
    }
