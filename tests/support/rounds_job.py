"""Run by test_rounds: gradients of encoders that run once a round, against those of encoding every micro-step.

rounds_job.py SHARDS_GLOB CASES
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from padded_model import PaddedLM
from rank_jobs import FSDP2_RUNS, run_rank
from shard_factory import RECIPE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import orchdata as od
from examples.model import Block, ModelConfig, Sizes, fit_to_recipe, make_cost

SMALL = Sizes(hidden=16, layers=1, ffn=32, num_heads=2)
CONFIG = fit_to_recipe(ModelConfig(llm=SMALL, image=SMALL, audio=SMALL), RECIPE)
MAX_TOKENS, IMAGE_CAP = 480, 200  # of all ranks' microbatches
LAYOUTS = {
    "packed": od.Packed(),
    "padded": od.Padded(),
    "padded encoders": od.Padded(encoders="padded"),
    "to lengths": od.Packed(encoder_lengths={"image": (64, 512, 2048), "audio": (128, 512, 2048)}),
}


@dataclass(frozen=True)
class Case:
    """One way of training. `spoilt` is a control, which must not have the gradients of the others."""

    wrapper: str | None = None
    encode: str | int = "micro_step"
    layout: str = "packed"
    recompute: bool = False
    capped: bool = False  # images too
    spoilt: bool = False


CASES = {
    "two ddp": Case("two ddp", "step"),
    "two ddp, rounds of 2": Case("two ddp", 2, "padded", recompute=True),
    "one ddp": Case("one ddp", "step", "padded encoders"),
    "one ddp, rounds of 2": Case("one ddp", 2),
    "capped": Case(None, "step", capped=True),
    "to lengths": Case(None, "step", "to lengths"),
    "spoilt": Case(None, "step", spoilt=True),
}
if FSDP2_RUNS:
    CASES |= {
        "one fsdp2": Case("one fsdp2", "step"),
        "one fsdp2, recomputed": Case("one fsdp2", 2, recompute=True),
        "two fsdp2": Case("two fsdp2", 2),
    }


class Encoders(nn.Module):
    def __init__(self, model: PaddedLM) -> None:
        super().__init__()
        self.image, self.audio, self.config = model.image, model.audio, model.config

    def forward(self, name: str, media: Any) -> Tensor:
        inputs: dict[str, Any] = {f"{name}_{array}": tensor for array, tensor in media.arrays.items()}
        inputs[f"{name}_cu_seqlens"] = media.cu_seqlens
        if media.mask is not None:
            inputs |= {f"{name}_mask": media.mask, f"{name}_token_places": media.token_places}
        rows: Tensor = getattr(PaddedLM, f"_{name}_tokens")(self, torch.float64, inputs)
        return rows


class LM(nn.Module):
    """Each position is trained by itself."""

    def __init__(self, model: PaddedLM) -> None:
        super().__init__()
        self.embed, self.head = model.embed, model.head

    def forward(self, batch: od.Batch, features: dict[str, Tensor]) -> Tensor:
        logits = self.head(batch.merge(self.embed(batch.llm.input_ids), features).tanh().flatten(0, -2))
        of_media = logits[torch.cat([*batch.llm.media_positions.values()])]  # which have no labels
        return F.cross_entropy(logits, batch.llm.labels.flatten(), reduction="sum") + of_media.square().sum()


class Both(nn.Module):
    """Encoders and LLM in one module: one DDP, or one FSDP2 root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        model = PaddedLM(CONFIG).double()
        self.encoders, self.lm = Encoders(model), LM(model)

    def encode(self, name: str, media: Any) -> Tensor:
        rows: Tensor = self.encoders(name, media)
        return rows

    def forward(self, *inputs: Any) -> Tensor:
        result: Tensor = self.encode(*inputs) if isinstance(inputs[0], str) else self.lm(*inputs)
        return result


def wrap(case: Case, both: Both) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return what encodes, what trains, the context of its micro-steps but the last, and options of `od.rounds`."""
    if case.wrapper == "two ddp":
        encoders, lm = DistributedDataParallel(both.encoders), DistributedDataParallel(both.lm)
        return encoders, lm, lm.no_sync, {"no_sync": encoders.no_sync}
    if case.wrapper == "one ddp":
        ddp = DistributedDataParallel(both)
        return ddp, ddp, ddp.no_sync, {"no_sync": ddp.no_sync, "shared": True}
    if case.wrapper is not None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        roots = [both] if case.wrapper == "one fsdp2" else [both.encoders, both.lm]
        for module in [*(module for module in both.modules() if isinstance(module, Block)), *roots]:
            fully_shard(module, mesh=mesh)
    if case.wrapper == "one fsdp2":
        register_fsdp_forward_method(both, "encode")
        return both.encode, both, nullcontext, {}
    return both.encoders, both.lm, nullcontext, {}


def make_loader(shards: str, case: Case) -> od.DataLoader:
    caps = {"llm": MAX_TOKENS, "image": IMAGE_CAP} if case.capped else {"llm": MAX_TOKENS}
    balance = od.Balance(
        assignment="per_phase",
        max_tokens={name: cap // dist.get_world_size() for name, cap in caps.items()},
        oversize="drop" if case.layout == "to lengths" else "own",
        encode=case.encode,  # type: ignore[arg-type]
    )
    return od.DataLoader(
        od.ShardDataset(shards, recipe=RECIPE),
        global_batch_size=12,
        collate_fn=LAYOUTS[case.layout],
        cost=make_cost(CONFIG),
        balance=balance,
        num_threads=0,
        on_error=od.ErrorPolicy("skip", max_failures=None),
    )


def gradients(both: Both, case: Case) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in both.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
        if case.wrapper is None:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        yield name, grad
        parameter.grad = None


def train(shards: str, case: Case) -> tuple[list[dict[str, Tensor]], list[dict[str, Any]]]:
    """The gradient of each step, and how often encoders ran in it."""
    both, found, counts, calls = Both(), [], [], []
    run, lm, no_sync, options = wrap(case, both)

    def encode(name: str, media: Any) -> Any:
        calls.append(name)
        return run(name, media)

    for step in make_loader(shards, case).steps():
        calls.clear()
        for group in od.rounds(step, encode, recompute=case.recompute, **options):
            for batch in group:
                rows = dict(group.features(batch))
                if case.spoilt and batch.microbatch == 1:
                    rows = {name: each.detach() for name, each in rows.items()}
                features = {
                    name: od.exchange(each, batch.route(name), requires_grad=True) for name, each in rows.items()
                }
                with nullcontext() if batch.is_last_microbatch else no_sync():
                    (lm(batch, features) * batch.loss_scale).backward()
            group.backward()
        found.append(dict(gradients(both, case)))
        plan = step[0].plan
        counts.append(
            {
                "calls": list(calls),
                "rounds": plan.round_of(len(step) - 1) + 1,
                "micro_steps": len(step),
                "parts": {name: len(parts) for name, parts in plan.parts.items()},
                "failed": sum(int((~media.valid).sum()) for batch in step for media in batch.media.values()),
            }
        )
    return found, counts


def reference(shards: str, layout: str) -> list[dict[str, Tensor]]:
    """Without rounds, leaves and wrappers: the encoders are in the graph of each micro-step."""
    case, found = Case(layout=layout), []
    both = Both()
    for step in make_loader(shards, case).steps():
        for batch in step:
            features = {}
            for name, media in batch.media.items():
                rows = both.encode(name, media)[: batch.route(name).num_rows_in or None]
                features[name] = od.exchange(rows, batch.route(name), requires_grad=True)
            (both.lm(batch, features) * batch.loss_scale).backward()
        found.append(dict(gradients(both, case)))
    return found


def distance(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> float:
    """The largest difference of a gradient over the largest gradient of its step, the worst of all steps."""
    return max(
        max(float((one[name] - other[name]).abs().max()) for name in other)
        / max(float(each.abs().max()) for each in other.values())
        for one, other in zip(first, second, strict=True)
    )


def main(shards: str, cases: str) -> dict[str, Any]:
    trained = {name: train(shards, CASES[name]) for name in json.loads(cases)}
    references = {layout: reference(shards, layout) for layout in dict.fromkeys(CASES[name].layout for name in trained)}
    return {
        name: {
            "off": distance(found, references[CASES[name].layout]),
            "steps": counts,
        }
        for name, (found, counts) in trained.items()
    }


if __name__ == "__main__":
    run_rank(main)
