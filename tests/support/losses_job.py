"""A rank that runs the code of docs/losses.md on balanced batches: are gradients those of one plain batch?"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_jobs import run_rank, run_ranks
from torch import Tensor

import orchdata as od

GLOBAL_BATCH_SIZE = 6
EXPERTS = 4
PAGE = Path(__file__).resolve().parents[2] / "docs" / "losses.md"
RECIPE = od.Recipe(image=None, audio=None, keep=("cls",))
WEIGHTS = {"first": 1.0, "second": 3.0}
SMALL = od.Balance(max_tokens=30)
TEAMS = {cut: od.Balance(teams=od.Teams(largest=2, cut=cut)) for cut in ("loader", "trainer")}

Loss = Callable[[od.Batch], Tensor]


def run(*shards: str, folder: Path) -> list[Any]:
    """What both ranks found, as `work` returns it."""
    return run_ranks(__file__, *shards, num_ranks=2, folder=folder)


class Model(torch.nn.Module):
    """States of tokens, and heads over them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(260, 8)
        self.head, self.vocabulary = torch.nn.Linear(8, 5), torch.nn.Linear(8, 260)
        self.one, self.other, self.router = (torch.nn.Linear(8, EXPERTS) for _ in range(3))
        self.double()

    def states(self, batch: od.Batch) -> Tensor:
        return self.embed(batch.llm.input_ids)

    def ends(self, batch: od.Batch) -> Tensor:
        ends = torch.tensor([where.stop - 1 for where in batch.samples], dtype=torch.long)
        return self.states(batch)[ends[batch.has_end]]

    def routed(self, batch: od.Batch) -> tuple[Tensor, Tensor]:
        states = self.states(batch)
        own = zip(batch.samples, (batch.is_counted | batch.has_slices).tolist(), strict=True)
        tokens = torch.cat([states[:0], *[states[where] for where, here in own if here]])
        probabilities = self.router(tokens).softmax(1)
        return probabilities, probabilities.topk(2).indices


def page() -> dict[str, Any]:
    """What the code of the page defines."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(block, names)
    return names


def token_losses(model: Model, batch: od.Batch) -> Tensor:
    return F.cross_entropy(model.vocabulary(model.states(batch)), batch.llm.next_labels, reduction="none")


def losses_of_page(model: Model) -> dict[str, Loss]:
    names = page()
    return {
        "class": lambda batch: names["class_loss"](model.states(batch), model.head, batch),
        "mean": lambda batch: names["mean_of_samples"](
            model.vocabulary(model.states(batch)), batch, lambda size: dist.group.WORLD
        ),
        "contrastive": lambda batch: names["contrastive_loss"](
            *(each(model.ends(batch)) for each in (model.one, model.other))
        ),
        "router": lambda batch: names["router_loss"](*model.routed(batch)),
        "tasks": lambda batch: names["task_loss"](token_losses(model, batch), WEIGHTS, batch),
    }


def of_samples(model: Model, batch: od.Batch, weight: Callable[[int, int], float]) -> Tensor:
    """The weighted sum of the samples' summed losses; a weight by number and count of labels."""
    losses, total = token_losses(model, batch), torch.zeros((), dtype=torch.float64)
    for number, (start, stop) in enumerate(pairwise(batch.llm.cu_seqlens.tolist())):
        count = int((batch.llm.labels[start:stop] != -100).sum())
        total = total + weight(number, count) * losses[start:stop].sum()
    return total


def plain_losses(model: Model) -> dict[str, Loss]:
    """The same over a batch that has the whole step."""

    def of_class(batch: od.Batch) -> Tensor:
        scores = model.head(model.states(batch)[batch.llm.cu_seqlens[1:].long() - 1])
        known = [(row, int(value)) for row, value in enumerate(batch.fields["cls"]) if value is not None]
        return -sum(scores[row].log_softmax(0)[label] for row, label in known) / len(batch.sample_ids)

    def contrastive(batch: od.Batch) -> Tensor:
        ends = model.states(batch)[batch.llm.cu_seqlens[1:].long() - 1]
        one, other = (F.normalize(each(ends), dim=1) for each in (model.one, model.other))
        scores = one @ other.T / 0.07
        return -(scores.log_softmax(1).diagonal().mean() + scores.log_softmax(0).diagonal().mean()) / 2

    def router(batch: od.Batch) -> Tensor:
        probabilities = model.router(model.states(batch)).softmax(1)
        share = torch.bincount(probabilities.topk(2).indices.flatten(), minlength=EXPERTS).double() / (
            2 * len(probabilities)
        )
        return EXPERTS * (share * probabilities.mean(0)).sum()

    def tasks(batch: od.Batch) -> Tensor:
        sources, names = batch.sources.tolist(), batch.plan.sources
        return of_samples(model, batch, lambda at, _: WEIGHTS[names[sources[at]]] / sources.count(sources[at]))

    def mean(batch: od.Batch) -> Tensor:
        return of_samples(model, batch, lambda _, count: 1 / count / len(batch.sample_ids))

    return {"class": of_class, "mean": mean, "contrastive": contrastive, "router": router, "tasks": tasks}


def gradient(model: Model, loss: Loss, batches: list[od.Batch]) -> Tensor:
    model.zero_grad()
    for batch in batches:
        loss(batch).backward()
    return torch.cat(
        [(torch.zeros_like(each) if each.grad is None else each.grad).flatten() for each in model.parameters()]
    )


def work(first: str, second: str) -> dict[str, Any]:
    """For each loss: the largest difference of a gradient over all steps, and the norm of the smallest gradient."""
    model = Model()
    ours, plain, found = losses_of_page(model), plain_losses(model), dict[str, Any]()
    data = [od.ShardDataset(path, recipe=RECIPE) for path in (first, second)]
    mixture = od.Mixture(dict(zip(WEIGHTS, map(od.Source, data), strict=True)), stop="first")
    for name, cut in product(ours, ("", *TEAMS)):
        whole = {"data": mixture if name == "tasks" else data[0], "global_batch_size": GLOBAL_BATCH_SIZE}
        balance = TEAMS[cut] if cut else od.Balance() if name in ("contrastive", "router") else SMALL
        options = {"balance": balance} | whole
        shared, alone = (
            od.DataLoader(options.pop("data"), **options),
            od.DataLoader(whole.pop("data"), dp=(0, 1), **whole),
        )
        worst, smallest, counts, tokens_in_teams = 0.0, float("inf"), [], 0
        for step, (batch,) in zip(shared.steps(), alone.steps(), strict=True):
            assert all(each.num_step_samples == len(batch.sample_ids) for each in (*step, batch))
            got, wanted = gradient(model, ours[name], step), gradient(model, plain[name], [batch])
            dist.all_reduce(got)
            worst = max(worst, float((got / dist.get_world_size() - wanted).abs().max()))
            smallest = min(smallest, float(wanted.norm()))
            counts.append([len(each.sample_ids) for each in step])
            tokens_in_teams += sum(team.cu_seqlens[-1] for each in step for team in each.teams if team.size > 1)
        assert (tokens_in_teams > 0) == bool(cut)
        found[name + cut] = {"worst": worst, "smallest": smallest, "counts": counts}
    return found


if __name__ == "__main__":
    run_rank(work)
