"""Run by test_rounds: gradients of encoders that run once a round, against those of encoding every micro-step."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from doc_pages import recipe_of
from padded_model import PaddedLM
from rank_jobs import FSDP2_RUNS, run_rank
from shard_factory import RECIPE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import orchdata as od
from examples.model import Block, ModelConfig, ModelOutput, Sizes, fit_to_recipe, make_cost

SMALL = Sizes(hidden=16, layers=1, ffn=32, num_heads=2)
CONFIG = fit_to_recipe(ModelConfig(llm=SMALL, image=SMALL, audio=SMALL), RECIPE)
MAX_TOKENS, IMAGE_CAP = 400, 200  # of all ranks' microbatches
LAYOUTS = {
    "packed": od.Packed(),
    "padded": od.Padded(),
    "padded encoders": od.Padded(encoders="padded"),
    "to lengths": od.Packed(encoder_lengths={"image": (64, 512, 2048), "audio": (128, 512, 2048)}),
}


@dataclass(frozen=True)
class Case:
    """One way of training. `spoilt`: a micro-step's gradients are "lost", or a round's come "twice"."""

    wrapper: str | None = None
    encode: str | int = "micro_step"
    layout: str = "packed"
    recompute: bool = False
    capped: bool = False  # images too
    spoilt: str = ""


CASES = {
    "two ddp": Case("two DDP", "step"),
    "two ddp, rounds of 2": Case("two DDP", 2, "padded", recompute=True),
    "one ddp": Case("one DDP", "step", "padded encoders"),
    "one ddp, rounds of 2": Case("one DDP", 2),
    "capped": Case(None, "step", capped=True),
    "to lengths": Case(None, "step", "to lengths"),
    "lost": Case(None, "step", spoilt="lost"),
    "twice": Case(None, "step", spoilt="twice"),
}
if FSDP2_RUNS:
    CASES |= {
        "one fsdp2": Case("one FSDP2 root", "step"),
        "one fsdp2, recomputed": Case("one FSDP2 root", 2, recompute=True),
        "two fsdp2": Case("two FSDP2 roots", 2),
    }


class Part(nn.Module):
    @property
    def blocks(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, Block)]


class Encoders(Part):
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


class LM(Part):
    """Each position is trained by itself."""

    def __init__(self, model: PaddedLM) -> None:
        super().__init__()
        self.embed, self.head = model.embed, model.head

    def forward(self, batch: od.Batch, features: dict[str, Tensor]) -> ModelOutput:
        logits = self.head(batch.merge(self.embed(batch.llm.input_ids), features).tanh().flatten(0, -2))
        of_media = logits[torch.cat([*batch.llm.media_positions.values()])]  # which have no labels
        loss = F.cross_entropy(logits, batch.llm.labels.flatten(), reduction="sum") + of_media.square().sum()
        return ModelOutput(loss, 0)


class Both(Part):
    """Encoders and LLM in one module: one DDP, or one FSDP2 root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        model = PaddedLM(CONFIG).double()
        self.encoders, self.lm = Encoders(model), LM(model)

    def encode(self, name: str, media: Any) -> Tensor:
        rows: Tensor = self.encoders(name, media)
        return rows

    def forward(self, *inputs: Any) -> Any:
        return self.encode(*inputs) if isinstance(inputs[0], str) else self.lm(*inputs)


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
    names: dict[str, Any] = {"both": both, "encoders": both.encoders, "model": both.lm, "nullcontext": nullcontext}
    names |= {"encode": both.encoders, "no_sync": nullcontext, "options": {}, "dp_group": None, "dataset": None}
    if case.wrapper is not None:
        names["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
        exec(recipe_of("encoders_apart.md", f"# {case.wrapper}\n"), names)
    wrapped = dict(names)

    def encode(name: str, media: Any) -> Any:
        calls.append(name)
        rows = wrapped["encode"](name, media)
        if case.spoilt == "twice":
            rows.register_hook(lambda gradient: 2 * gradient)
        return rows

    def model(batch: od.Batch, features: dict[str, Tensor]) -> Any:
        if case.spoilt == "lost" and batch.microbatch == 1:
            features = {name: each.detach() for name, each in features.items()}
        return wrapped["model"](batch, features)

    def steps() -> Iterator[Any]:
        for step in make_loader(shards, case).steps():
            calls.clear()
            yield step
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

    ours = SimpleNamespace(exchange=od.exchange, Balance=od.Balance)
    ours.DataLoader = lambda *_, **__: SimpleNamespace(steps=steps)
    ours.rounds = partial(od.rounds, recompute=case.recompute)
    exec(recipe_of("encoders_apart.md", "**options"), names | {"od": ours, "encode": encode, "model": model})
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
            (both.lm(batch, features).loss_sum * batch.loss_scale).backward()
        found.append(dict(gradients(both, case)))
    return found


def distance(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> float:
    """The largest difference of a gradient over the largest gradient of its step, the worst of all steps."""
    return max(
        max(float((one[name] - other[name]).abs().max()) for name in other)
        / max(float(each.abs().max()) for each in other.values())
        for one, other in zip(first, second, strict=True)
    )


def clipped(folder: str) -> dict[str, Any]:
    """How far parts on two meshes, and a plain one, are from one process: clipped, and saved and loaded."""
    size, found = dist.get_world_size(), {}
    meshes = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    for norm_type, width in ((float("inf"), 8), (2.0, 6)):  # 6: a rank of 4 has no row
        torch.manual_seed(0)
        whole = nn.ModuleDict({name: nn.Linear(width, width) for name in ("encoders", "model", "plain")}).double()
        parts = copy.deepcopy(whole)
        for name, mesh in zip(("encoders", "model"), meshes, strict=True):
            fully_shard(parts[name], mesh=mesh)
        inputs = torch.randn(5, width, dtype=torch.float64)
        for each in (whole, parts):
            for name in each:
                each[name](inputs).square().sum().backward()
        one_mesh = torch.nn.utils.get_total_norm([each.grad for each in whole["model"].parameters()], norm_type)
        expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0, norm_type)
        norm = od.clip_grad_norm_(parts.parameters(), 1.0, norm_type)
        pairs = zip(parts.parameters(), whole.parameters(), strict=True)
        off = max(float((full(own.grad) - each.grad).abs().max()) for own, each in pairs)
        found[f"norm {norm_type}"] = {"off": max(off, abs(float(norm / expected) - 1)), "one": float(one_mesh / norm)}

    names = {"torch": torch, "od": od, "folder": folder, "resumes": False, **parts}
    exec(recipe_of("encoders_apart.md", "od.clip_grad_norm_"), names)
    names["optimizer"] = optimizer = torch.optim.AdamW(names["parts"].parameters())
    optimizer.step()
    exec(recipe_of("encoders_apart.md", "dcp.save"), names)
    saved = [full(each).clone() for each in names["parts"].parameters()]

    def moved() -> float:
        now = map(full, names["parts"].parameters())
        return max(float((each - before).abs().max()) for each, before in zip(now, saved, strict=True))

    optimizer.step()
    optimizer.zero_grad()
    found["moved"], names["optimizer"] = moved(), torch.optim.AdamW(names["parts"].parameters())
    exec(recipe_of("encoders_apart.md", "dcp.save"), names | {"resumes": True})
    return found | {"left": moved(), "steps": [float(each["step"]) for each in names["optimizer"].state.values()]}


def full(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    return whole


def main(shards: str, cases: str, folder: str) -> dict[str, Any]:
    trained = {name: train(shards, CASES[name]) for name in json.loads(cases)}
    references = {layout: reference(shards, layout) for layout in dict.fromkeys(CASES[name].layout for name in trained)}
    return {"clipped": clipped(folder) if FSDP2_RUNS else None} | {
        name: {
            "off": distance(found, references[CASES[name].layout]),
            "steps": counts,
        }
        for name, (found, counts) in trained.items()
    }


if __name__ == "__main__":
    run_rank(main)
