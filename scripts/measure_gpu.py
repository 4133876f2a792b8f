"""`python scripts/measure_gpu.py --ranks 8 64 --out gpu.json`: planned against measured step times, on one GPU.

    made-up sequences --forward and backward, timed--> fit_phase_cost --> CostModel, in seconds
    synthetic index --make_plan: none, llm_only, joint, per_phase--> every rank's microbatch, run in turn --> makespan

Four lanes share out the same samples: dealt out in turn, balanced by the LLM's cost alone, by both phases with samples
whole, and phase by phase with images encoded on any rank. All cost models come from the fit. Ranks wait for each other
after each phase, so a step takes the sum over phases of the largest time over ranks; the largest sum over phases of any
rank, where they wait at the end only, is reported too.

`--tiny` runs the same with small models, on any machine; its times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from numpy.typing import NDArray
from phase_models import HAS_VARLEN, PhaseModel
from rich.console import Console

from examples.model import Sizes
from orchdata.balancers import CostModel, fit_phase_cost
from orchdata.bench import WideTable, machine, synthetic_index
from orchdata.dataset.indexed import IndexCosts
from orchdata.loaders.index.index import Index
from orchdata.order.order import Order, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance
from orchdata.planning.plan import Plan, PlanSpec, make_plan

PHASES = ("image", "llm")
KINDS = ("positions", "predicted", "measured")
SIZES = {
    "image": Sizes(hidden=1280, layers=32, ffn=5120, num_heads=20),
    "llm": Sizes(hidden=2048, layers=28, ffn=8192, num_heads=16),
}
VOCAB, TINY_VOCAB = 32_768, 128
TINY_SIZES = {phase: Sizes(hidden=32, layers=2, ffn=64, num_heads=2) for phase in PHASES}
TINY_DEFAULTS = {
    "ranks": [2, 4],
    "steps": [2, 1],
    "samples": 2_000,
    "samples_per_rank": 4,
    "longest_image": 2_048,
    "longest_llm": 1_024,
    "num_lengths": 3,
    "fit_repeats": 1,
}
NOT_MEASURED = (
    "Ranks run in turn on one device: no exchange of features, reduction of gradients, optimizer step or data loading."
    " A rank without images runs no encoder."
)

Cells: TypeAlias = Mapping[str, NDArray[np.float64]]
"""Phase -> a number for each rank and microbatch, (num_ranks, num_microbatches)."""


Models: TypeAlias = Mapping[str, PhaseModel]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Data:
    """Samples that exist as lengths only.

    Attributes:
        order: of the samples without audio and within the limits.
        lengths: phase -> positions of each sequence, int64.
        per_sample: phase -> positions of a sample, on average.
    """

    index: Index
    order: Order
    lengths: Mapping[str, NDArray[np.int64]]
    per_sample: Mapping[str, float]

    @classmethod
    def made_up(cls, path: Path, options: argparse.Namespace) -> Data:
        index = synthetic_index(path, options.samples, options.seed)
        source, rows = IndexCosts(index), np.arange(options.samples)
        patches, tokens, audio = (source.positions(phase, rows) for phase in ("image", "llm", "audio"))
        kept = (audio == 0) & (patches <= options.longest_image) & (tokens <= options.longest_llm)
        images = source.parts("image", rows[kept]).positions
        return cls(
            index=index,
            order=Order(len(rows), shuffle=Shuffle(), seed=options.seed, excluded=np.flatnonzero(~kept)),
            lengths={"image": images, "llm": tokens[kept]},
            per_sample={"image": float(patches[kept].mean()), "llm": float(tokens[kept].mean())},
        )

    def describe(self) -> dict[str, Any]:
        quantiles = (0, 25, 50, 75, 90, 99, 100)
        return {
            "mixture": "synthetic_index without audio: about half the samples have 1 to 6 images, all have text",
            "samples": self.order.num_samples,
            "positions_per_sample": dict(self.per_sample),
            "positions_per_sequence_percentiles": list(quantiles),
            "positions_per_sequence": {
                p: np.percentile(found, quantiles).tolist() for p, found in self.lengths.items()
            },
        }


def calibrate(models: Models, data: Data, options: argparse.Namespace) -> tuple[CostModel, dict[str, Any]]:
    """Fit each phase to packs of one length, of half and of one and a half times a rank's usual positions."""
    packs: list[tuple[str, list[int]]] = []
    for phase in PHASES:
        low, high = np.percentile(data.lengths[phase], (2, 100))
        for length in np.unique(np.geomspace(low, high, options.num_lengths).round().astype(int)).tolist():
            for share in (0.5, 1.5):
                positions = share * options.samples_per_rank * data.per_sample[phase]
                packs.append((phase, [length] * max(1, round(positions / length))))
    seconds: list[list[float]] = [[] for _ in packs]
    for turn in range(1 + options.fit_repeats):
        progress(f"calibration, round {turn} of {options.fit_repeats}: {len(packs)} packs")
        for place in range(len(packs))[:: -1 if turn % 2 else 1]:
            phase, lengths = packs[place]
            took = models[phase].seconds(lengths)
            if turn:  # The first round warms up.
                seconds[place].append(took)
    costs, report = {}, {}
    for phase in PHASES:
        mine = [(lengths, times) for (name, lengths), times in zip(packs, seconds, strict=True) if name == phase]
        fit = fit_phase_cost([lengths for lengths, _ in mine], [statistics.median(times) for _, times in mine])
        costs[phase] = fit.cost
        report[phase] = {
            "seconds_per_sequence": asdict(fit.cost),
            "residual": fit.residual,
            "worst_residual": fit.worst_residual,
            "measurements": [
                {"length": pack[0], "sequences": len(pack), "seconds": times, "fit": len(pack) * fit.cost.at(pack[0])}
                for pack, times in mine
            ],
        }
    return CostModel(**costs), report


def specs_of(cost: CostModel, data: Data, options: argparse.Namespace, num_ranks: int) -> dict[str, PlanSpec]:
    """The lanes, all over the same samples."""
    caps: dict[str, Any] = {
        "max_tokens": {"llm": options.max_tokens, "image": options.max_patches},
        "oversize": "own",
    }
    lanes = {
        "none": (Balance(scope="none", **caps), cost),
        "llm_only": (Balance(**caps), CostModel(llm=cost.costs[cost.phases.index("llm")])),
        "joint": (Balance(**caps), cost),
        "per_phase": (Balance(assignment="per_phase", **caps), cost),
    }
    return {
        lane: PlanSpec(
            costs=IndexCosts(data.index, model),
            order=data.order,
            batches=GlobalBatches(size=num_ranks * options.samples_per_rank, drop_last=True),
            balance=balance,
            num_ranks=num_ranks,
        )
        for lane, (balance, model) in lanes.items()
    }


def sequences(plan: Plan, index: Index, phase: str, rank: int, microbatch: int) -> list[int]:
    """Positions of each sequence that a rank runs in a phase of a microbatch."""
    if phase in plan.parts:
        return plan.parts[phase].positions[plan.encoded(phase, rank, microbatch)].tolist()
    mine = plan.places(rank, microbatch)
    if phase == "llm":
        return plan.llm_positions[mine].tolist()
    return IndexCosts(index).parts(phase, plan.row[mine]).positions.tolist()


def measure_step(
    models: Models, data: Data, cost: CostModel, plans: Mapping[str, Plan], repeats: int
) -> dict[str, dict[str, Cells]]:
    """Run all microbatches of a step: lane -> "positions", "predicted" and "measured" cells.

    Lanes take turns rank by rank, so that a clock that drifts changes them alike.
    """
    found = {
        lane: {kind: {phase: np.zeros((plan.num_ranks, plan.num_microbatches)) for phase in PHASES} for kind in KINDS}
        for lane, plan in plans.items()
    }
    num_ranks = plans["none"].num_ranks
    for phase in PHASES:
        every = (
            sequences(plan, data.index, phase, rank, microbatch)
            for plan in plans.values()
            for rank, microbatch in np.ndindex(num_ranks, plan.num_microbatches)
        )
        models[phase].seconds(max(every, key=sum))  # So that no measured pass has to get memory from the driver.
    for rank in range(num_ranks):
        progress(f"{num_ranks} ranks, step {plans['none'].step}: rank {rank}")
        for lane in list(plans)[:: -1 if rank % 2 else 1]:
            cells = found[lane]
            for microbatch, phase in itertools.product(range(plans[lane].num_microbatches), PHASES):
                lengths = sequences(plans[lane], data.index, phase, rank, microbatch)
                costs = cost.sequence_costs(phase, np.array(lengths, np.int64))
                times = [models[phase].seconds(lengths) for _ in range(repeats)]
                cells["positions"][phase][rank, microbatch] = sum(lengths)
                cells["predicted"][phase][rank, microbatch] = math.ldexp(int(costs.sum()), -cost.exponent)
                cells["measured"][phase][rank, microbatch] = statistics.median(times)
    return found


def measure_ranks(
    models: Models, data: Data, cost: CostModel, options: argparse.Namespace, num_ranks: int, num_steps: int
) -> dict[str, Any]:
    """All lanes at one number of ranks."""
    specs = specs_of(cost, data, options, num_ranks)
    steps = []
    for step in range(num_steps):
        plans = {lane: make_plan(spec, StepTask(0, step)) for lane, spec in specs.items()}
        steps.append(measure_step(models, data, cost, plans, options.repeats))
    lanes = {lane: summarize([step[lane] for step in steps]) for lane in specs}
    for lane, kind in itertools.product(lanes.values(), ("measured", "predicted")):
        lane[f"gain_{kind}"] = sum(lanes["none"][f"{kind}_seconds"]) / sum(lane[f"{kind}_seconds"])
    return {"ranks": num_ranks, "steps": num_steps, "lanes": lanes}


def makespan(cells: Cells) -> float:
    """Seconds of a step in which ranks wait for each other after each phase of each microbatch."""
    return float(sum(cell.max(axis=0).sum() for cell in cells.values()))


def rank_seconds(cells: Cells) -> NDArray[np.float64]:
    """Seconds that each rank computes in a step."""
    seconds: NDArray[np.float64] = np.hstack(list(cells.values())).sum(axis=1)
    return seconds


def summarize(steps: Sequence[Mapping[str, Cells]]) -> dict[str, Any]:
    """A lane: seconds of each step, how well they were predicted, and the cells themselves.

    `cell_error` is the root mean square of predicted - measured over cells, as a share of the mean.
    """
    found: dict[str, Any] = {}
    for kind in ("measured", "predicted"):
        found[f"{kind}_seconds"] = [makespan(step[kind]) for step in steps]
        found[f"{kind}_seconds_waiting_at_end"] = [float(rank_seconds(step[kind]).max()) for step in steps]
        found[f"{kind}_mean_seconds"] = [float(rank_seconds(step[kind]).mean()) for step in steps]
    found["predicted_over_measured"] = sum(found["predicted_seconds"]) / sum(found["measured_seconds"])
    found["max_over_mean"], found["cell_error"] = dict.fromkeys(PHASES), dict.fromkeys(PHASES)
    for phase in PHASES:
        loads = np.array([step["measured"][phase].sum(axis=1) for step in steps])
        predicted, measured = (np.concatenate([step[kind][phase].ravel() for step in steps]) for kind in KINDS[1:])
        if measured.any():
            found["max_over_mean"][phase] = float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())
            found["cell_error"][phase] = float(np.sqrt(np.square(predicted - measured).mean()) / measured.mean())
    found["cells"] = [
        {kind: {phase: cell.tolist() for phase, cell in cells.items()} for kind, cells in step.items()}
        for step in steps
    ]
    return found


def table(entry: Mapping[str, Any]) -> WideTable:
    """The lanes at one number of ranks, for people."""
    rows = []
    for name, lane in entry["lanes"].items():
        seconds = [statistics.mean(lane[f"{kind}_seconds"]) for kind in ("measured", "predicted")]
        ratios = [lane[ratio] for ratio in ("predicted_over_measured", "gain_measured", "gain_predicted")]
        rows.append((name, *seconds, *ratios, *(lane["max_over_mean"][phase] for phase in PHASES)))
    return WideTable(
        title=f"{entry['ranks']} ranks, mean of {entry['steps']} steps; ranks wait after each phase",
        columns=("lane", "s", "planned s", "ratio", "gain", "planned gain", "image", "llm"),
        rows=tuple(rows),
        note="ratio: planned over measured; gain: over none; image, llm: largest over mean measured time of ranks",
    )


def describe_device(device: torch.device, *, varlen: bool) -> dict[str, Any]:
    attention = "torch.nn.attention.varlen.varlen_attn" if varlen else "scaled_dot_product_attention of each sequence"
    if device.type != "cuda":
        return {"device": "cpu", "attention": attention}
    facts = torch.cuda.get_device_properties(device)
    memory = {"memory_gib": facts.total_memory / 2**30, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    return {"device": facts.name, "cuda": torch.version.cuda, "attention": attention, "device_memory": memory}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What is written, less the command."""
    start = time.perf_counter()
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    varlen = device.type == "cuda" and options.attention == "varlen"
    if varlen and not HAS_VARLEN:
        raise SystemExit(f"torch {torch.__version__} has no varlen_attn with window_size: use --attention sequences")
    models: dict[str, PhaseModel] = {}
    with device:
        for phase, sizes in (TINY_SIZES if options.tiny else SIZES).items():
            vocab = (TINY_VOCAB if options.tiny else VOCAB) if phase == "llm" else None
            models[phase] = PhaseModel(sizes, vocab, checkpointed=options.checkpoint, varlen=varlen).to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        data = Data.made_up(Path(folder) / "index.index", options)
        cost, fits = calibrate(models, data, options)
        steps = options.steps * len(options.ranks) if len(options.steps) == 1 else options.steps
        pairs = zip(options.ranks, steps, strict=True)
        plans = [measure_ranks(models, data, cost, options, ranks, count) for ranks, count in pairs]
    return {
        "arguments": {name: value for name, value in vars(options).items() if name != "out"},
        "machine": {**machine(), **describe_device(device, varlen=varlen)},
        "models": {
            phase: {
                **asdict(model.sizes),
                "vocab": model.vocab,
                "parameters": sum(p.numel() for p in model.parameters()),
            }
            for phase, model in models.items()
        },
        "dtype": str(dtype),
        "data": data.describe(),
        "not_measured": NOT_MEASURED,
        "fits": fits,
        "plans": plans,
        "seconds": time.perf_counter() - start,
    }


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write; default: none")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64], help="data-parallel ranks to plan for")
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 1], help="steps of each, or one number for all")
    parser.add_argument("--samples-per-rank", type=int, default=8, help="in a step")
    parser.add_argument("--samples", type=int, default=20_000, help="in the index, before any is left out")
    parser.add_argument("--longest-image", type=int, default=12_288, help="leave out samples of more patches")
    parser.add_argument("--longest-llm", type=int, default=8_192, help="leave out samples of more tokens")
    parser.add_argument("--max-patches", type=int, default=262_144, help="in a rank's microbatch")
    parser.add_argument("--max-tokens", type=int, default=49_152, help="in a rank's microbatch")
    parser.add_argument("--num-lengths", type=int, default=6, help="lengths that each phase is fitted to")
    parser.add_argument("--fit-repeats", type=int, default=3, help="measurements of each pack; the fit takes medians")
    parser.add_argument("--repeats", type=int, default=1, help="measurements of each microbatch; medians count")
    parser.add_argument("--attention", choices=("varlen", "sequences"), default="varlen", help="on a GPU")
    parser.add_argument("--no-checkpoint", dest="checkpoint", action="store_false", help="keep all activations")
    parser.add_argument("--seed", type=int, default=0, help="of samples and weights")
    parser.add_argument("--tiny", action="store_true", help="small models and few samples, also without a GPU")
    if parser.parse_args(arguments).tiny:
        parser.set_defaults(**TINY_DEFAULTS)
    options = parser.parse_args(arguments)
    if len(options.steps) not in (1, len(options.ranks)):
        parser.error(f"--steps takes 1 or {len(options.ranks)} numbers, as --ranks does, got {len(options.steps)}")
    return options


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    try:
        report = {"command": shlex.join(["python", "scripts/measure_gpu.py", *arguments]), **measure(options)}
    except torch.OutOfMemoryError as error:
        raise SystemExit(f"{error}\nLower --max-patches and --max-tokens: ranks then run more microbatches.") from error
    if options.out is not None:
        text = json.dumps(report, indent=1, allow_nan=False)
        # Innermost lists on one line each.
        options.out.write_text(re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n")
    for phase, fit in report["fits"].items():
        print(f"fit of {phase}: {fit['seconds_per_sequence']}, residual {fit['residual']:.1%}")
    console = Console()
    for entry in report["plans"]:
        console.print(table(entry).render())
    print(f"{report['machine']['device']}, {report['seconds']:.0f} s. {NOT_MEASURED}")


if __name__ == "__main__":
    main(sys.argv[1:])
