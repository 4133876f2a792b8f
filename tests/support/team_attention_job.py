"""Run by test_team_attention, one process a rank: gradients of models that attend in teams, against one process."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from rank_jobs import made_on_rank_0, message, run_rank
from teams_job import loader
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import orchdata as od
from orchdata.ranks.team_attention import attend_over

SEQUENCES = {  # by number of ranks: (size, first rank, lengths) of each team; rank 2 has none of its own
    2: [(2, 0, [37, 20]), (1, 0, [5])],
    4: [(4, 0, [37, 20]), (2, 0, [14]), (2, 2, [9, 6]), (1, 0, [5]), (1, 1, [3, 4]), (1, 3, [8])],
    8: [(8, 0, [37, 20]), (4, 0, [14]), (4, 4, [21]), (2, 0, [9, 6]), (2, 6, [11]), (1, 1, [3, 4]), (1, 7, [8])],
}
VOCAB = 260
PIECE = 3
"""A slice is a multiple of so many tokens."""


def ids_of(length: int) -> Tensor:
    return torch.randint(1, 50, (length,), generator=torch.Generator().manual_seed(length))


def microbatch(rank: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor, tuple[od.Team, ...]]:
    """Tokens, positions, labels that were shifted before they were cut, and teams of a rank."""
    columns: list[list[Tensor]] = [[], [], []]
    teams, stop = [], 0
    for size, first, lengths in SEQUENCES[num_ranks]:
        if not first <= rank < first + size:
            continue
        padding = -sum(lengths) % (size * PIECE)
        whole = [*map(ids_of, lengths)] + [torch.zeros(padding, dtype=torch.int64)] * bool(padding)
        labels = [F.pad(ids[1:], (0, 1), value=-100) for ids in whole]
        labels = labels[: len(lengths)] + [torch.full((padding,), -100)] * bool(padding)
        for column, values in zip(columns, (whole, [torch.arange(len(ids)) for ids in whole], labels), strict=True):
            column.append(torch.cat(values).chunk(size)[rank - first])
        rows = slice(stop, stop := stop + len(columns[0][-1]))
        borders = torch.tensor([0, *map(len, whole)]).cumsum(0).int()
        ranks = tuple(range(first, first + size))
        samples, valid = slice(0, 0), torch.ones(len(lengths), dtype=torch.bool)
        teams.append(
            od.Team(
                size=size, place=rank - first, ranks=ranks, rows=rows, cu_seqlens=borders, samples=samples, valid=valid
            )
        )
    ids, positions, labels = (torch.cat(each) for each in columns)
    return ids, positions, labels, tuple(teams)


def eager(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """One sequence, (T, heads, head_dim), by the definition."""
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[2] ** -0.5
    back = torch.arange(len(query))[:, None] - torch.arange(len(query))
    seen = (back >= 0) & ((back <= window) | (window < 0))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)


@dataclass(frozen=True)
class Case:
    heads: int = 8
    kv_heads: int = 8
    value_dim: int = 6
    window: int = -1
    wrapper: str = ""
    checkpointed: str = ""


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.heads = case, (case.heads, case.kv_heads, case.kv_heads)
        widths = [count * dim for count, dim in zip(self.heads, (6, 6, case.value_dim), strict=True)]
        self.mix, self.out = (
            nn.ModuleList(nn.Linear(16, each) for each in widths),
            nn.Linear(case.heads * case.value_dim, 16),
        )

    def inner(self, x: Tensor, attend: Any, teams: Any) -> Tensor:
        query, key, value = (mix(x).unflatten(-1, (count, -1)) for mix, count in zip(self.mix, self.heads, strict=True))
        options = {"window_size": (self.case.window, 0)} if self.case.window >= 0 else {}
        mixed = (
            eager(query, key, value, self.case.window)
            if attend is None
            else attend(query, key, value, teams, **options)
        )
        return torch.tanh(x + self.out(mixed.flatten(1)))

    def forward(self, x: Tensor, attend: Any, teams: Any) -> Tensor:
        if not self.case.checkpointed or attend is None:
            return self.inner(x, attend, teams)
        return checkpoint(self.inner, x, attend, teams, use_reentrant=self.case.checkpointed == "reentrant")


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.blocks = nn.ModuleList(Block(case) for _ in range(2))
        self.double()

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor, attend: Any, teams: Any) -> Tensor:
        x = self.embed(ids) + torch.sin(positions[:, None] / torch.arange(1.0, 17.0, dtype=torch.float64))
        for block in self.blocks:
            x = block(x, attend, teams)
        return F.cross_entropy(self.head(x), labels, ignore_index=-100, reduction="sum")


def gradients(model: nn.Module) -> Tensor:
    whole = (each.grad.full_tensor() if hasattr(each.grad, "full_tensor") else each.grad for each in model.parameters())
    return torch.cat([each.flatten() for each in whole])


def whole(case: Case, num_ranks: int, accumulate: int) -> Tensor:
    alone = Model(case)
    for _, _, lengths in SEQUENCES[num_ranks]:
        for ids in map(ids_of, lengths):
            labels = F.pad(ids[1:], (0, 1), value=-100)
            (accumulate * alone(ids, torch.arange(len(ids)), labels, None, None)).backward()
    return gradients(alone)


def distance(case: Case, attend: Any, accumulate: int = 2) -> float:
    """How far gradients of all ranks are from those of one that has all sequences, over the largest."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Model(case)
    wrapped: nn.Module = DistributedDataParallel(model) if case.wrapper == "ddp" else model
    if case.wrapper == "fsdp2":
        for module in (*model.blocks, model):
            fully_shard(module)
    for _ in range(accumulate):
        *tensors, teams = microbatch(rank, size)
        wrapped(*tensors, attend, teams).backward()
    found = gradients(model) * (size if case.wrapper else 1)
    if not case.wrapper:
        dist.all_reduce(found)
    wanted = made_on_rank_0(found, whole, case, size, accumulate)
    return float((found - wanted).abs().max() / wanted.abs().max())


CASES = {
    "plain": Case(),
    "padded heads, repeated keys": Case(heads=7, kv_heads=1),
    "keys of several heads, other values": Case(heads=8, kv_heads=2, value_dim=3),
    "window": Case(window=5),
    "checkpointed": Case(checkpointed="yes"),
    "checkpointed, reentrant": Case(checkpointed="reentrant", wrapper="ddp"),
    "fsdp2": Case(wrapper="fsdp2", checkpointed="yes"),
}


def controls(attend: od.TeamAttention) -> dict[str, float]:
    """The same with a fault."""

    def broken(fault: Any) -> Any:
        def swap(pieces: Tensor, size: int) -> Tensor:
            return fault(attend._swap(pieces, size))

        def call(query: Tensor, key: Tensor, value: Tensor, teams: Any, **options: Any) -> Tensor:
            return attend_over(teams, query, key, value, attend.kernel, swap, **options)

        return call

    def slices(query: Tensor, key: Tensor, value: Tensor, teams: Any) -> Tensor:
        return attend(query, key, value, [replace(each, cu_seqlens=cut(each)) for each in teams])

    def cut(team: od.Team) -> Tensor:
        return torch.arange(0, int(team.cu_seqlens[-1]) + 1, team.rows.stop - team.rows.start).int()

    def windowless(*given: Any, window_size: Any) -> Tensor:
        return attend(*given)

    return {
        "a member left out": distance(Case(), broken(lambda pieces: torch.cat([pieces[:-1], 0 * pieces[-1:]]))),
        "two members swapped": distance(Case(), broken(lambda pieces: pieces[[1, 0, *range(2, len(pieces))]])),
        "borders of slices": distance(Case(), slices),
        "a window ignored": distance(Case(window=5), windowless),
    }


def refusals(texts: str) -> dict[str, Any]:
    """What a call that must be refused says."""
    ours, size = loader(texts, None), dist.get_world_size()

    q = torch.zeros(3, size + 1, 2)
    found: dict[str, Any] = {
        "heads": message(lambda: od.TeamAttention(ours)(q, q, q, microbatch(dist.get_rank(), size)[3])),
        "no teams": message(lambda: od.TeamAttention(ours)(q, q, q, ())),
        "a loader without teams": message(lambda: od.TeamAttention(loader(texts, None, balance="global"))),
        "(rank, size)": message(lambda: od.TeamAttention(loader(texts, (0, size)))),
    }
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        found["pipeline"] = message(lambda: od.TeamAttention(loader(texts, mesh)))
        with_tp = loader(texts, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
        few = dist.new_group([0, 1])
        found["groups of some"] = message(lambda: od.TeamAttention(with_tp))
        if few != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(few)
        found["over tp"] = dist.get_process_group_ranks(od.TeamAttention(with_tp).group(2))
    return found


def trained(model: nn.Module, batch: od.Batch) -> Tensor:
    model(**batch.model_inputs()).loss.backward()
    return gradients(model)


def hugging_face(texts: str, way: str) -> dict[str, Any]:
    """Steps of a Llama whose loader cuts sequences, in two microbatches, against one rank that has them whole."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    inputs = od.hf.Inputs(config, padded=False, probe=False)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    if way:
        model.activation_checkpointing_enable()
    alone, worst, sizes = copy.deepcopy(model), 0.0, set()
    ours = loader(texts, None, "loader", collate_fn=inputs, accumulate=2)
    whole = loader(texts, (0, 1), collate_fn=inputs, balance="global")
    refused = message(lambda: next(iter(ours)).model_inputs())
    od.hf.share_attention(model, ours)
    for module in (*model.model.layers, model) if way == "fsdp2" else ():
        fully_shard(module)
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    ours.set_epoch(0)
    for shared, (one,) in zip(ours.steps(), whole.steps(), strict=True):
        for batch in shared:
            sizes |= {team.size for team in batch.teams}
            wrapped(**batch.model_inputs()).loss.backward()
        found = gradients(model)
        if not way:
            dist.all_reduce(found)
            found /= dist.get_world_size()
        wanted = made_on_rank_0(found, trained, alone, one)
        worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
        model.zero_grad()
        alone.zero_grad()
    own = one.model_inputs()
    assert torch.equal(model(**own).loss, alone(**own).loss)  # without teams it is the model's own attention
    return {"distance": worst, "sizes": sorted(sizes), "refused": refused}


def train(model: Model, ours: od.DataLoader, attend: Any) -> Iterator[tuple[Any, ...]]:
    """Steps of an epoch; without `attend` those of one rank, sequence by sequence. Number, samples with the tokens of
    each that are here, labels that count, and sizes of teams."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in ours.steps():
        optimizer.zero_grad()
        for batch in step:
            llm, inputs = batch.llm, []
            if attend is None:
                for where in batch.samples:
                    labels = F.pad(llm.labels[where][1:], (0, 1), value=-100)
                    inputs.append((llm.input_ids[where], llm.position_ids[where], labels))
            else:
                inputs.append((llm.input_ids, llm.position_ids, llm.shift_labels))
            for each in inputs:
                (model(*each, attend, batch.teams) * batch.loss_scale).backward()
        for parameter in model.parameters() if attend is not None else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        ranges = [batch.token_ranges or [(0, each.stop - each.start) for each in batch.samples] for batch in step]
        samples = [
            (source, *key, *tokens)
            for batch, tokens_of in zip(step, ranges, strict=True)
            for source, key, tokens in zip(batch.sources.tolist(), batch.sample_ids, tokens_of, strict=True)
        ]
        sizes = {team.size for batch in step for team in batch.teams}
        yield step[0].step, samples, sum(batch.loss_tokens for batch in step), sorted(sizes)


def packed_chats(chats: str) -> dict[str, Any]:
    """Distance of the gradients of each step of an epoch in two microbatches, and the part of tokens with a label."""
    model, alone, worst, found, counts = Model(Case()), Model(Case()), 0.0, set(), [0, 0]
    ours = loader(chats, None, "loader", accumulate=2, shuffle=True)
    whole = loader(chats, (0, 1), balance="global", shuffle=True)
    shared, one = train(model, ours, od.TeamAttention(ours)), train(alone, whole, None)
    for (_, _, _, sizes), (_, samples, labels, _) in zip(shared, one, strict=True):
        wanted = gradients(alone)
        worst = max(worst, float((gradients(model) - wanted).abs().max() / wanted.abs().max()))
        found |= set(sizes)
        counts = [counts[0] + labels, counts[1] + sum(stop - first for *_, first, stop in samples)]
    return {"distance": worst, "sizes": sorted(found), "learned": counts[0] / counts[1]}


def broken_run(chats: str, folder: str, way: str) -> dict[str, Any]:
    model, ours = Model(Case()), loader(chats, None, "loader", accumulate=2, shuffle=True)
    attend, path, rows = od.TeamAttention(ours), Path(folder) / "state.pt", []
    if way == "resumed":
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        ours.load_state_dict(saved["loader"])
    for row in train(model, ours, attend):
        rows.append(row)
        if way == "killed":
            if len(rows) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(rows))
            dist.barrier()
            if dist.get_rank() == 0:
                torch.save({"model": model.state_dict(), "loader": ours.state_dict()}, path)
    return {"rows": rows, "weights": torch.cat([each.flatten() for each in model.parameters()]).tolist()}


def forgotten(texts: str) -> str:
    """What the loader of a plain model that does not attend in teams says."""
    given = iter(loader(texts, None, "loader"))
    next(given).model_inputs()
    return message(lambda: next(given))


def work(texts: str, chats: str) -> dict[str, Any]:
    attend = od.TeamAttention(loader(texts, None))
    found: dict[str, Any] = {name: distance(case, attend) for name, case in CASES.items()}
    for way in ("", "fsdp2", "ddp"):
        found[f"Llama {way}"] = hugging_face(texts, way)
    found["chats"] = packed_chats(chats)
    return found | {"controls": controls(attend), "refusals": refusals(texts), "forgotten": forgotten(texts)}


if __name__ == "__main__":
    run_rank(lambda *given: (broken_run if len(given) == 3 else work)(*given))
