"""Golden cases of plans, batches, floats, fingerprints and counts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from golden_data import RECIPES, GoldenData, Numbers, draw
from golden_states import RAMP, REPEAT, STAGES, Make, chosen, items, many_sources, mixed, names, nested, shards

import orchdata as od
from orchdata.balancers import balance, balance_padded

COST = od.CostModel(
    image=od.TransformerCost(hidden=1280, layers=32, ffn=5120),
    audio=od.TransformerCost(hidden=1024, layers=24, ffn=4096),
    llm=od.TransformerCost(hidden=3584, layers=28, ffn=18944),
)
COLUMNS = ("llm_tokens", "loss_tokens", "part_tokens", "part_positions", "part_rows", "part_modality")
_IN_LLM = ("input_ids", "position_ids", "labels", "cu_seqlens", "lengths", "attention_mask", "restart_position_ids")
_IN_MEDIA = ("cu_seqlens", "mask", "token_places", "valid")


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """Plans of a loader."""

    make: Make  # makes the loader
    ranks: tuple[int, ...] = (1, 5, 8)  # each number of ranks that is planned for
    steps: tuple[tuple[int, int], ...] = ((0, 0), (3, 1))  # (epoch, step) of each plan

    def stored(self, data: GoldenData) -> dict[str, str]:
        """The hash of each plan, and its number of microbatches."""
        found = {}
        for ranks in self.ranks:
            loader = self.make(data, dp=(0, ranks))
            for epoch, step in self.steps:
                plan = loader.plan_at(epoch, step)
                found[f"{ranks} ranks, {epoch}.{step}"] = f"{plan.hash}, microbatches: {plan.num_microbatches}"
        return found


@dataclass(frozen=True, kw_only=True)
class BatchCase:
    """Microbatches of a loader."""

    make: Make  # makes the loader
    ranks: int = 1  # of the job
    step: int = 1  # of epoch 1
    options: Mapping[str, Any] = field(default_factory=dict)  # of the loader, besides those of `make`

    def stored(self, data: GoldenData) -> dict[str, Any]:
        """By rank, what each of its microbatches has."""
        loader = self.make(data, dp=(0, self.ranks))
        return {
            f"rank {rank}": [_described(batch) for batch in loader.step_at(1, self.step, rank=rank)]
            for rank in range(self.ranks)
        }


def balanced(**balance: Any) -> Make:
    """Loaders over shards with costs of three phases, 24 samples a step."""
    return costed(balance=od.Balance(**balance))


def costed(**options: Any) -> Make:
    return shards(**{"global_batch_size": 24, "cost": COST} | options)


def _described(batch: od.Batch) -> dict[str, Any]:
    found: dict[str, Any] = {"samples": " ".join(names(batch))}
    found["loss tokens"] = f"{batch.loss_tokens} of {batch.global_loss_tokens}"
    found |= {name: _digest(tensor) for name, tensor in _integers(batch)}
    return found


def _integers(batch: od.Batch) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a batch that integers decide, by name."""
    yield "text.input_ids", batch.text.input_ids
    yield "text.cu_seqlens", batch.text.cu_seqlens
    for name in _IN_LLM:
        yield f"llm.{name}", getattr(batch.llm, name)
    for modality, media in batch.media.items():
        for name in _IN_MEDIA:
            yield f"{modality}.{name}", getattr(media, name)
        for name, tensor in media.arrays.items():
            if not tensor.dtype.is_floating_point:
                yield f"{modality}.{name}", tensor
    for modality in batch.media:
        yield f"llm.media_positions.{modality}", batch.llm.media_positions[modality]
        if modality in batch.llm.media_owners:
            yield f"llm.media_owners.{modality}", batch.llm.media_owners[modality]
    if batch.sources is not None:
        yield "sources", batch.sources


def _digest(tensor: torch.Tensor | None) -> str | None:
    """Type, shape and a hash of the elements."""
    if tensor is None:
        return None
    array = tensor.contiguous().numpy()
    found = hashlib.blake2b(array.astype(array.dtype.newbyteorder("<")).tobytes(), digest_size=8).hexdigest()
    return f"{array.dtype} {tuple(array.shape)} {found}"


def floats(data: GoldenData) -> dict[str, Any]:
    """Some numbers of each kind of features: no hash of them would be the same on all processors."""
    found: dict[str, Any] = {}
    for name, recipe in (("log-mel", "omni"), ("normalised samples", "omni, as waves")):
        (batch,) = shards(recipe, shuffle=False)(data).step_at(0, 0)
        features = batch.audio.arrays["features"]
        found[name] = features[: 4 if features.ndim > 1 and features.shape[1] > 1 else 40].tolist()
    (batch,) = shards("omni in float32", shuffle=False)(data).step_at(0, 0)
    found["normalised pixels"] = batch.image.patches[:3, :16].tolist()
    return found


def counts(data: GoldenData) -> dict[str, str]:
    """Columns of the indexes."""
    found = {}
    for recipe in ("omni", "chat", "text", "long", "records"):
        index = data.shards(recipe).index()
        for name in COLUMNS:
            found[f"{recipe}, {name}"] = str(_digest(torch.from_numpy(getattr(index, name).astype("int64"))))
    return found


def sizes(data: GoldenData) -> str:
    """Of pictures and clips as large as published ones."""
    image, audio, limits = od.ImagePreprocessor(), od.AudioPreprocessor(), od.Limits()
    found = [image.count_header((30 + draw(8, n) % 2970, 30 + draw(9, n) % 2970), limits) for n in range(500)]
    found += [audio.count_header((1 + draw(10, n) % 2_000_000, 44_100), limits) for n in range(500)]
    return hashlib.blake2b(repr(found).encode(), digest_size=8).hexdigest()


def assigned(data: GoldenData) -> dict[str, str]:
    """By the balancers alone, to many ranks."""
    costs = np.array([1 + draw(11, number) % 60_000 for number in range(16_384)])
    found = {}
    for count, ranks in ((512, 8), (4096, 64), (16_384, 512)):
        plain, square = balance(costs[:count], ranks), balance(costs[:count] ** 2, ranks, equal_count=True)
        padded = balance_padded(costs[:count], ranks, od.PhaseCost(linear=1.5, quadratic=1 / 3))
        for name, each in (("plain", plain), ("squares", square), ("padded", padded)):
            found[f"{name}, {ranks} ranks"] = str(_digest(torch.from_numpy(each.rank)))
    return found


def fingerprints(data: GoldenData) -> dict[str, Any]:
    """Of recipes, of indexes, and of data sets as states hold them."""
    found: dict[str, Any] = {f"recipe, {name}": recipe.fingerprint() for name, recipe in RECIPES.items()}
    found["recipe, the default one"] = od.Recipe().fingerprint()
    found |= {f"index, {name}": data.shards(name).index().fingerprint for name in RECIPES}
    found |= {
        f"data set, {name}": shards(name)(data).state_dict()["fingerprint"]["dataset"] for name in ("omni", "records")
    }
    found["data set, filter and split"] = chosen()(data).state_dict()["fingerprint"]["selection"]
    found["data set, map-style"] = items(lambda: Numbers(21), seed=1)(data).state_dict()["fingerprint"]
    return found


def _lengths(data: GoldenData, **more: Any) -> od.DataLoader:
    """Items whose costs alone are known: as many as many ranks need."""
    costs = [1 + draw(7, number) % 2000 for number in range(3000)]
    return od.DataLoader(Numbers(3000), **{"global_batch_size": 700, "shuffle": True, "seed": 2, "cost": costs} | more)


PLANS: dict[str, PlanCase] = {
    "none": PlanCase(make=balanced(scope="none")),
    "global": PlanCase(make=balanced()),
    "global, sum": PlanCase(make=balanced(objective="sum")),
    "global, no cost model": PlanCase(make=costed(cost=None)),
    "global, effort 0": PlanCase(make=balanced(effort=0)),
    "grouped": PlanCase(make=balanced(scope="grouped", group_size=2), ranks=(2, 4, 8)),
    "grouped, streams": PlanCase(
        make=costed(balance=od.Balance(scope="grouped", group_size=2), shuffle=od.Shuffle(streams=4)), ranks=(8,)
    ),
    "grid": PlanCase(make=balanced(scope="grid", group_size=2), ranks=(2, 4, 8)),
    "equal counts": PlanCase(make=balanced(equal_count=True)),
    "most samples": PlanCase(make=balanced(max_samples=5), ranks=(5, 8)),
    "microbatches": PlanCase(make=balanced(max_tokens=400)),
    "microbatches, sum": PlanCase(make=balanced(max_tokens=400, objective="sum")),
    "microbatches, own": PlanCase(make=balanced(max_tokens=150, oversize="own")),
    "microbatches, drop": PlanCase(make=balanced(max_tokens=150, oversize="drop"), steps=((0, 0), (3, 0))),
    "microbatches, of images too": PlanCase(make=balanced(max_tokens={"llm": 500, "image": 128})),
    "microbatches, 1f1b": PlanCase(make=balanced(max_tokens=400, order="1f1b", num_stages=4)),
    "per phase": PlanCase(make=balanced(assignment="per_phase")),
    "per phase, microbatches": PlanCase(make=balanced(assignment="per_phase", max_tokens=400)),
    "per phase, grid": PlanCase(make=balanced(assignment="per_phase", scope="grid", group_size=2), ranks=(4, 8)),
    "packed, aligned": PlanCase(make=costed(collate_fn=od.Packed(multiple_of=16))),
    "padded": PlanCase(make=costed(collate_fn=od.Padded(multiple_of=8))),
    "padded, microbatches": PlanCase(
        make=costed(collate_fn=od.Padded(multiple_of=8), balance=od.Balance(max_tokens=600))
    ),
    "one length": PlanCase(make=costed(collate_fn=od.Packed(length=512))),
    "one length, encoders too": PlanCase(
        make=costed(collate_fn=od.Packed(length=512, encoder_lengths={"image": (64, 1024)}))
    ),
    "drop_last": PlanCase(make=costed(drop_last=True, global_batch_size=17)),
    "token steps": PlanCase(make=costed(global_batch_size=None, global_batch_tokens=1500)),
    "token steps, microbatches": PlanCase(
        make=costed(global_batch_size=None, global_batch_tokens=1500, balance=od.Balance(max_tokens=300))
    ),
    "token steps, a ramp": PlanCase(make=shards(**RAMP)),
    "mixture": PlanCase(make=mixed(**REPEAT)),
    "mixture, stages": PlanCase(make=mixed(stages=STAGES, **REPEAT)),
    "mixture, all": PlanCase(make=mixed(stop="all"), ranks=(1, 8)),
    "mixture, nested": PlanCase(make=nested, ranks=(1, 3)),
    "mixture, many sources": PlanCase(make=many_sources, ranks=(1, 3)),
    "split texts": PlanCase(make=shards("long"), ranks=(1, 2)),
    "filter and split": PlanCase(make=chosen(), ranks=(1, 2)),
    "map-style": PlanCase(make=_lengths, ranks=(1, 8, 64)),
    "map-style, no costs": PlanCase(make=items(lambda: Numbers(21), seed=3, shuffle=True), ranks=(1, 2)),
}
BATCHES: dict[str, BatchCase] = {
    "packed": BatchCase(make=costed(), ranks=2),
    "packed, mrope": BatchCase(make=costed(collate_fn=od.Packed(positions="mrope"))),
    "packed, aligned": BatchCase(make=costed(collate_fn=od.Packed(multiple_of=16))),
    "packed, one length": BatchCase(
        make=costed(collate_fn=od.Packed(length=512, encoder_lengths={"image": (64, 1024)})), ranks=2
    ),
    "packed, no item": BatchCase(make=costed(global_batch_size=3), ranks=4),
    "packed, no item, zero": BatchCase(make=costed(global_batch_size=3, collate_fn=od.Packed(empty="zero")), ranks=4),
    "packed, text alone": BatchCase(make=shards("long")),
    "packed, records": BatchCase(make=shards("records")),
    "padded": BatchCase(make=costed(collate_fn=od.Padded(multiple_of=8)), ranks=2),
    "padded, encoders too": BatchCase(make=costed(collate_fn=od.Padded(encoders="padded", positions="mrope")), ranks=2),
    "microbatches": BatchCase(make=balanced(max_tokens=600), ranks=2),
    "per phase": BatchCase(make=balanced(assignment="per_phase"), ranks=2),
    "per phase, microbatches": BatchCase(make=balanced(assignment="per_phase", max_tokens=600), ranks=2),
    "mixture": BatchCase(make=mixed(**REPEAT)),
    "mixture, loss weights": BatchCase(make=nested),
}
