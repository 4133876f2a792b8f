"""Run by test_teams: a rank whose loader shares long texts with others, in teams."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digests import digest
from rank_jobs import made_on_rank_0, run_rank
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import orchdata as od
from orchdata.building.pages import Pages
from orchdata.loaders.errors import FieldError

RECIPE = od.Recipe(image=None, audio=None, keep=("n",))
SIZE = 12


def loader(texts: str, dp: Any, cut: Any = "trainer", **options: Any) -> od.DataLoader:
    """Steps of 12 texts, some longer than a rank's share. Two sources have the same ones but the longest."""
    data = od.ShardDataset(texts, RECIPE)
    mixture = od.Mixture({"one": od.Source(data), "two": od.Source(data.filter("tokens < 1900"))}, stop="all")
    cost = od.CostModel(llm=od.PhaseCost(1.0, 0.01))
    balance = od.Balance(teams=od.Teams(largest=8, cut=cut))
    given = {"global_batch_size": SIZE, "cost": cost, "balance": balance, "num_threads": 0} | options
    return od.DataLoader(mixture, dp=dp, **given)


class Model(torch.nn.Module):
    """One layer of causal attention, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = torch.nn.Embedding(260, 8), torch.nn.Linear(8, 24), torch.nn.Linear(8, 260)
        self.double()

    def loss(self, batch: od.Batch, everywhere: bool) -> Tensor:
        """Summed: a member counts the labels of its own part of the positions, or, as a control, all."""
        total = torch.zeros((), dtype=torch.float64)
        parts = {at: team for team in batch.teams for at in range(team.samples.start, team.samples.stop)}
        for at, where in enumerate(batch.samples):
            query, key, value = self.mix(self.embed(batch.llm.input_ids[where]))[None].chunk(3, -1)
            logits = self.head(F.scaled_dot_product_attention(query, key, value, is_causal=True)[0])
            labels, length = batch.llm.labels[where].clone(), where.stop - where.start
            if at in parts and not everywhere:
                size, place = parts[at].size, parts[at].place
                labels[: length * place // size] = labels[length * (place + 1) // size :] = -100
            total = total + F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
        return total * batch.loss_scale

    def trained(self, batch: od.Batch, everywhere: bool) -> Tensor:
        """Loss and gradients."""
        self.zero_grad()
        loss = self.loss(batch, everywhere)
        loss.backward()
        gradients = [each.grad.flatten() for each in self.parameters() if each.grad is not None]
        return torch.cat([loss.detach()[None], *gradients])


def distances(texts: str) -> dict[str, float]:
    """How far loss and gradients of steps are from those of one rank with all samples, over the largest."""
    model, worst = Model(), {"apart": 0.0, "control": 0.0}
    place = dist.get_rank(), dist.get_world_size()
    for ours, whole in zip(loader(texts, place), loader(texts, (0, 1)), strict=True):
        found = {name: model.trained(ours, name == "control") for name in worst}
        wanted = made_on_rank_0(found["apart"], model.trained, whole, True)
        for name, got in found.items():
            dist.all_reduce(got)
            worst[name] = max(worst[name], float((got / place[1] - wanted).abs().max() / wanted.abs().max()))
    return worst


def failing(texts: str, dp: Any, rank: int, most: int | None = None, cut: str = "trainer") -> dict[str, Any]:
    """The first step that shares: a shared text fails on all members but the first, and a whole text on its rank."""
    given, write = loader(texts, dp, cut, on_error=od.ErrorPolicy("skip", max_failures=most)), Pages.write
    plan = next(plan for step in range(len(given)) if (plan := given.plan_at(0, step)).teams is not None)
    shared, whole = int(plan.team_size.argmax()), int(plan.team_size.argmin())

    def broken(pages: Pages, number: int, sample: Any, payloads: Any) -> None:
        if sample.row == plan.row[whole] or (sample.row == plan.row[shared] and rank > plan.rank[shared]):
            raise FieldError("text", "broken here")
        write(pages, number, sample, payloads)

    Pages.write = broken  # type: ignore[method-assign]
    try:
        batch = next(islice(given, plan.step, None))
    except (RuntimeError, od.TooManyFailures) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        Pages.write = write  # type: ignore[method-assign]
    is_blank: list[Callable[[int, slice], bool]] = [
        lambda _, where: not batch.llm.input_ids[where].any(),
        lambda _, where: bool((batch.llm.any_labels[where] == -100).all()),
        lambda number, _: batch.fields["n"][number] is None,
    ]
    places = plan.places(rank, 0).tolist()
    where = {at: where for at, where in enumerate(batch.samples) if where.stop > where.start}  # a slice may have none
    return {
        "places": places,
        "blank": [[places[at] for at, each in where.items() if is_so(at, each)] for is_so in is_blank],
        "failed": [shared, whole],
        "first": plan.rank[[shared, whole]].tolist(),
        "invalid": sum(int((~team.valid).sum()) for team in batch.teams if team.size > 1),
        "count": given.stats()["failures"]["count"],
        "samples": given.stats()["samples"] / (plan.step + 1),
        "digest": digest(batch),
    }


def work(texts: str) -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {
        **distances(texts),
        "failing": failing(texts, None, rank),
        "slices failing": failing(texts, None, rank, cut="loader"),
        "none allowed": failing(texts, None, rank, 0),
    }
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for replicate in ("read", "broadcast"):
            dp = od.DataParallel(mesh, dims=("dp",), replicate=replicate)  # type: ignore[arg-type]
            for cut in ("trainer", "loader"):
                bad = failing(texts, dp, mesh.get_local_rank("dp"), cut=cut)
                seen = [bad["digest"], bad["blank"], *(digest(batch) for batch in loader(texts, dp, cut))]
                found[replicate] = found.get(replicate, []) + seen
    return found


if __name__ == "__main__":
    run_rank(work)
