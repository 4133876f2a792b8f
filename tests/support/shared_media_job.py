"""Run by test_shared_media: gradients where ranks share samples with media, against one rank that has all samples."""

from __future__ import annotations

from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hf_families.families import FAMILIES
from hf_families.reference import float64, in_float64
from padded_model import PaddedLM
from rank_jobs import made_on_rank_0, run_rank
from rounds_job import CONFIG, RECIPE, Encoders
from team_attention_job import Block
from team_attention_job import Case as Heads
from torch import Tensor, nn

import orchdata as od
from orchdata.building.pages import Pages
from orchdata.loaders.errors import FieldError

COST = od.CostModel(llm=od.PhaseCost(1.0, 0.01), image=od.PhaseCost(1.0), audio=od.PhaseCost(1.0))
TEAMS = od.Teams(largest=4, gain=0.0)


def loader(shard: str, teams: Any = TEAMS, balance: Any = None, **options: Any) -> od.DataLoader:
    """Steps of 5 samples, a long one among them."""
    given = od.Balance(assignment="per_phase", teams=teams, **(balance or {}))
    common = {"global_batch_size": 5, "cost": COST, "num_threads": 0, "collate_fn": od.Packed(multiple_of=4)}
    common |= {"balance": given, "on_error": od.ErrorPolicy("skip", max_failures=None)}
    return od.DataLoader(od.ShardDataset(shard, RECIPE), **common | options)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoders, self.embed, self.head = Encoders(PaddedLM(CONFIG)), nn.Embedding(512, 16), nn.Linear(16, 512)
        self.blocks = nn.ModuleList(Block(Heads()) for _ in range(2))
        self.double()

    def loss(self, batch: od.Batch, features: Any, attend: Any) -> Tensor:
        """Summed. Without `attend` a member, which has whole sequences, counts the labels of its own part."""
        llm = batch.llm
        x = batch.merge(self.embed(llm.input_ids % 512), features)
        x = x + torch.sin(llm.position_ids[:, None] / torch.arange(1.0, 17.0, dtype=torch.float64))
        if attend is not None:
            return self.blocks_loss(x, llm.shift_labels, attend, batch.teams)
        total, of = x.sum() * 0, {at: team for team in batch.teams for at in range(*team.samples.indices(99))}
        for at, where in enumerate(batch.samples):
            labels, length = F.pad(llm.labels[where][1:], (0, 1), value=-100), where.stop - where.start
            if team := of.get(at):
                labels[: length * team.place // team.size] = labels[length * (team.place + 1) // team.size :] = -100
            total = total + self.blocks_loss(x[where], labels, None, None)
        return total

    def blocks_loss(self, x: Tensor, labels: Any, attend: Any, teams: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, attend, teams)
        return F.cross_entropy(self.head(x), labels.where(labels < 0, labels % 512), reduction="sum")


def gradient(model: nn.Module, summed: bool = False) -> Tensor:
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
    found = torch.cat([each.flatten() for each in gradients])
    if summed:
        dist.all_reduce(found)
    model.zero_grad()
    return found


def alone(model: Model, batch: od.Batch) -> Tensor:
    features = {name: model.encoders(name, media) for name, media in batch.media.items()}
    rows_in = {name: rows[: batch.route(name).num_rows_in] for name, rows in features.items()}
    model.loss(batch, rows_in, None).backward()
    return gradient(model)


def case(shard: str, teams: od.Teams = TEAMS, spoilt: bool = False, **balance: Any) -> dict[str, Any]:
    """How far gradients of steps are from those of one rank, over the largest; how many samples and parts were cut."""
    model, rank, found = Model(), dist.get_rank(), {"distance": 0.0, "shared": 0, "torn": 0, "rounds": 0}
    ours, whole = loader(shard, teams, balance), loader(shard, dp=(0, 1), balance=None, teams=None)
    attend = od.TeamAttention(ours) if teams.cut == "loader" else None
    for step, (one,) in islice(zip(ours.steps(), whole.steps(), strict=True), 1 if spoilt else None):
        found["rounds"] += step[0].plan.rounds is not None
        for held in od.rounds(step, model.encoders):
            for batch in held:
                ways = {name: (rows, batch.route(name)) for name, rows in held.features(batch).items()}
                features = {name: od.exchange(*way, requires_grad=True) for name, way in ways.items()}
                if spoilt and rank == 1:
                    features = {name: rows.roll(1, 0) for name, rows in features.items()}
                plan, here = batch.plan, len(features["image"])
                parts = plan.arriving("image", rank, batch.microbatch)
                found["shared"] += int((plan.team_size[plan.parts["image"].sample[parts]] > 1).sum())
                found["torn"] += 0 < here < int(plan.parts["image"].tokens[parts].sum())
                model.loss(batch, features, attend).backward()
            held.backward()
        ours_now = gradient(model, summed=True)
        wanted = made_on_rank_0(ours_now, alone, model, one)
        found["distance"] = max(found["distance"], float((ours_now - wanted).abs().max() / wanted.abs().max()))
    return found


def failing(shard: str) -> dict[str, Any]:
    """The text of each shared sample with images fails on its last member."""
    write, rank, labels, placed = Pages.write, dist.get_rank(), [], []

    def is_hit(plan: od.Plan, at: int) -> bool:
        return bool(plan.team_size[at] > 1 and at in plan.parts["image"].sample)

    def broken(pages: Pages, number: int, sample: Any, payloads: Any) -> None:
        plan, at = pages._share.plan, int(pages._samples[number])
        if is_hit(plan, at) and rank == plan.rank[at] + plan.team_size[at] - 1:
            raise FieldError("text", "broken here")
        write(pages, number, sample, payloads)

    ours, texts = loader(shard), 0
    with patch.object(Pages, "write", broken):
        for batch in ours:
            places = zip(batch.plan.places(rank, batch.microbatch).tolist(), batch.samples, strict=True)
            texts += sum(is_hit(batch.plan, at) for at in range(len(batch.plan.row)))
            hit = [where for at, where in places if is_hit(batch.plan, at)]
            labels += [int((batch.llm.shift_labels[where] >= 0).sum()) for where in hit]
            route = batch.route("image")
            arrived = od.exchange(torch.ones(route.num_rows_in), route, requires_grad=False)
            placed.append(len(arrived) == len(batch.llm.media_positions["image"]))
    return {"labels": labels, "placed": all(placed), "texts": texts, "count": ours.stats()["failures"]["count"]}


def hugging_face(*shards: str) -> dict[str, Any]:
    """An epoch of a Qwen2.5-VL, through its own attention and mrope."""
    processor, model = FAMILIES["qwen2_5_vl"].build()
    data, inputs = od.ShardDataset(list(shards), od.hf.recipe(processor)), od.hf.Inputs(model.config, padded=False)
    common = {"global_batch_size": 3, "collate_fn": inputs, "cost": od.hf.cost(model.config), "num_threads": 0}
    ours = od.DataLoader(data, balance=od.Balance(assignment="per_phase", teams=TEAMS), **common)
    shared = 0

    def whole() -> Tensor:
        for one in od.DataLoader(data, dp=(0, 1), **common):
            od.hf.loss(model(**in_float64(one).model_inputs()), one).backward()
        return gradient(model)

    with float64():
        wanted = made_on_rank_0(gradient(model), whole)
        od.hf.share_attention(model, ours)
        for batch in map(in_float64, ours):
            features = od.hf.encode(model, batch)
            od.hf.loss(model(**batch.model_inputs(), mm_encoder_outputs=features), batch).backward()
            shared += int((batch.plan.team_size[batch.plan.parts["image"].sample] > 1).sum())
        found = gradient(model, summed=True) / dist.get_world_size()
    return {"distance": float((found - wanted).abs().max() / wanted.abs().max()), "shared": shared}


def work(shard: str, *family: str) -> dict[str, Any]:
    cap = 520 // dist.get_world_size()
    return {
        "loader": case(shard),
        "rounds": case(shard, max_tokens=cap, oversize="own", encode="step"),
        "trainer": case(shard, od.Teams(largest=4, gain=0.0, cut="trainer")),
        "spoilt": case(shard, spoilt=True),
        "failing": failing(shard),
        "hugging face": hugging_face(*family),
    }


if __name__ == "__main__":
    run_rank(work)
