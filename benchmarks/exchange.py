"""`python -m benchmarks.exchange`: features between ranks, against a plain all-to-all and against all-gather-and-drop.

    the same rows, the same ranks --exchange-----------------> bytes/s, forward and backward
                                  --all_to_all_single--------> bytes/s: rows already grouped, left as they come
                                  --all_gather, index_select-> bytes/s: everything everywhere, the rest dropped

On four ranks also as two with two peers each: exchange and gather, against all_to_all_single and all_gather of as many
rows.

All run in turn in every rank of one gloo job; a repeat takes as long as its slowest rank.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.command import run_command
from benchmarks.launch import end_with_parent, leave, torchrun
from orchdata.balancers.assignment import checked_count
from orchdata.bench import Result
from orchdata.planning.route import Route, grouped_route, make_route
from orchdata.ranks.exchange import exchange
from orchdata.ranks.parallel import DataParallel

PEERS = 2
Seconds = dict[str, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeBench:
    """What to measure.

    Attributes:
        ranks: numbers of gloo ranks, each a job of its own.
        parts_per_rank: images that a rank encodes, on average.
        tokens: median of a part's merged tokens; they are lognormal, with a sigma of 0.8.
        hidden: width of a row, in bfloat16.
        repeats: of each, in turn, after three rounds that do not count.
        seed: of sizes and assignments.
    """

    ranks: tuple[int, ...] = (2, 4)
    parts_per_rank: int = 32
    tokens: int = 128
    hidden: int = 1_280
    repeats: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("parts_per_rank", "tokens", "hidden", "repeats"):
            checked_count(getattr(self, name), name)
        checked_count(self.seed, "seed", 0)


def run(config: ExchangeBench) -> list[Result]:
    """Measure; raises LaunchError where a rank fails."""
    return [result for num_ranks in config.ranks for result in _results(config, num_ranks)]


def _results(config: ExchangeBench, num_ranks: int) -> list[Result]:
    seconds: Seconds = run_job("benchmarks.exchange", config, num_ranks)
    moved = int(_tokens(config, num_ranks).sum()) * config.hidden * 2
    size = f"{moved / num_ranks / 2**20:.0f} MiB a rank"
    paired = "peers" in seconds

    def ratio(name: str, of: str, to: str, demand: float | None, note: str) -> Result:
        values = tuple(slow / fast for slow, fast in zip(seconds[to], seconds[of], strict=True))
        return Result(
            name=f"{num_ranks} ranks: {name}", unit="x", values=values, demand=demand, better="high", note=note
        )

    def rate(name: str, of: str, note: str = "") -> Result:
        values = tuple(moved / value / 1e9 for value in seconds[of])
        return Result(name=f"  {name}", unit="GB/s", values=values, better="high", note=note)

    return [
        ratio("exchange / all_to_all_single", "grouped", "plain", 0.9, f"the same bytes, {size}; parts kept grouped"),
        ratio("  with parts in canonical order", "canonical", "plain", None, "rows are copied on both sides"),
        ratio(
            "exchange / all-gather-and-drop",
            "grouped",
            "gathered",
            2.0 if num_ranks >= 4 else None,
            "parts kept grouped",
        ),
        ratio("  with parts in canonical order", "canonical", "gathered", 2.0 if num_ranks >= 4 else None, ""),
        *(
            [ratio("exchange, two peers / the same plainly", "peers", "plain_peers", 0.9, "and all_gather")]
            if paired
            else []
        ),
        rate("exchange, grouped", "grouped", "rows of all ranks"),
        rate("exchange, canonical order", "canonical"),
        rate("its backward", "backward"),
        *([rate("exchange, two peers", "peers"), rate("its backward", "peers_backward")] if paired else []),
        rate("all_to_all_single", "plain"),
        rate("all-gather-and-drop", "gathered"),
    ]


def run_job(module: str, config: Any, num_ranks: int) -> dict[str, Any]:
    """Run `module` on ranks, each with the configuration and a path to write to, and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        with (Path(folder) / "log").open("w+b") as log:
            torchrun(
                ["-m", module, json.dumps(asdict(config)), str(result)],
                num_ranks=num_ranks,
                environment={},
                log=log,
            )
        answer: dict[str, Any] = json.loads(result.read_text())
        return answer


def main(settings: str, result: str) -> None:
    """One rank."""
    end_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = ExchangeBench(**json.loads(settings))
    seconds = _in_turn(_functions(config), config.repeats)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(seconds))
    leave()


def _functions(config: ExchangeBench) -> dict[str, Callable[[], object]]:
    """What to run in turn; `backward` belongs to the exchange before it and is timed alone."""
    tokens = _tokens(config, dist.get_world_size())
    canonical, grouped = (_route(config, tokens, grouped=grouped) for grouped in (False, True))
    rows = torch.zeros((grouped.num_rows_in, config.hidden), dtype=torch.bfloat16).normal_()
    features = rows.clone().requires_grad_()
    forward: list[Tensor] = [exchange(features, canonical, requires_grad=True)]
    gradient = torch.ones_like(forward[0])
    send, receive = grouped.send_rows.tolist(), grouped.receive_rows.tolist()
    padded, wanted = _gathered_rows(config, tokens)

    def plain() -> None:
        dist.all_to_all_single(rows.new_empty((sum(receive), config.hidden)), rows, receive, send)

    def gathered() -> Tensor:
        everything = rows.new_empty((dist.get_world_size() * padded, config.hidden))
        own = rows.new_empty((padded, config.hidden))
        own[: len(rows)] = rows
        dist.all_gather_into_tensor(everything, own)
        return everything.index_select(0, wanted)

    return {
        **(_with_peers(config, tokens) if dist.get_world_size() >= 2 * PEERS else {}),
        "plain": plain,
        "grouped": lambda: exchange(features, grouped, requires_grad=True),
        "canonical": lambda: exchange(features, canonical, requires_grad=True),
        "backward": lambda: torch.autograd.grad(forward[0], features, gradient, retain_graph=True),
        "gathered": gathered,
    }


def _with_peers(config: ExchangeBench, tokens: np.ndarray) -> dict[str, Callable[[], object]]:
    num_ranks = dist.get_world_size() // PEERS
    mesh = init_device_mesh("cpu", (num_ranks, PEERS), mesh_dim_names=("dp", "tp"))
    dp = DataParallel(mesh, dims=("dp",), encoder_dims=("tp",))
    across, among = mesh.get_group("dp"), mesh.get_group("tp")
    rank, peer = dist.get_rank(across), dist.get_rank(among)
    encoder, home = _assignments(config, tokens)
    encoder_rank, encoder_peer, home = encoder // PEERS, encoder % PEERS, home // PEERS
    encoded = np.flatnonzero((encoder_rank == rank) & (encoder_peer == peer))
    encoded = encoded[np.argsort(home[encoded], kind="stable")]
    arriving = np.flatnonzero(home == rank)
    arriving = arriving[np.lexsort((encoder_rank[arriving], encoder_peer[arriving]))]
    route = grouped_route(
        rank,
        num_ranks,
        receivers=home[encoded],
        sent=tokens[encoded],
        senders=encoder_rank[arriving],
        received=tokens[arriving],
        peer=peer,
        num_peers=PEERS,
        arriving_peers=encoder_peer[arriving],
    )
    rows = torch.zeros((route.num_rows_in, config.hidden), dtype=torch.bfloat16).normal_()
    features = rows.clone().requires_grad_()
    result = exchange(features, route, group=dp, requires_grad=True)
    gradient = torch.ones_like(result)
    send, receive = route.send_rows.tolist(), route.receive_rows.tolist()
    share = rows.new_empty((-(-route.num_rows_out // PEERS), config.hidden))  # all_gather takes as many of each

    def plain() -> None:
        dist.all_to_all_single(rows.new_empty((sum(receive), config.hidden)), rows, receive, send, across)
        dist.all_gather_into_tensor(rows.new_empty((PEERS * len(share), config.hidden)), share, among)

    return {
        "plain_peers": plain,
        "peers": lambda: exchange(features, route, group=dp, requires_grad=True),
        "peers_backward": lambda: torch.autograd.grad(result, features, gradient, retain_graph=True),
    }


def _in_turn(functions: dict[str, Callable[[], object]], repeats: int) -> Seconds:
    """Seconds of each repeat on its slowest rank.

    Every round has another order, so that none gains by what ran before. One exchange takes milliseconds, as long as a
    busy machine's hiccup: a repeat is the mean of several, apart from the slow all-gather.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    warmup = 3
    shuffled = np.random.default_rng(0)  # the same on every rank
    gc.collect()
    gc.disable()
    for turn in range(warmup + repeats):
        for name in shuffled.permutation(list(functions)).tolist():
            dist.barrier()
            calls = 1 if name == "gathered" else 5
            started = time.perf_counter()
            for _ in range(calls):
                functions[name]()
            elapsed = torch.tensor((time.perf_counter() - started) / calls, dtype=torch.float64)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            if turn >= warmup:
                seconds[name].append(elapsed.item())
    return {name: tuple(values) for name, values in seconds.items()}


def _tokens(config: ExchangeBench, num_ranks: int) -> np.ndarray:
    """Merged tokens of each part of a global micro-step."""
    drawn = np.random.default_rng(config.seed).lognormal(np.log(config.tokens), 0.8, config.parts_per_rank * num_ranks)
    return np.maximum(1, drawn).astype(np.int64)


def _assignments(config: ExchangeBench, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encoder and llm rank of each part: the first balanced, the second a sample's, which knows nothing of it."""
    num_ranks = dist.get_world_size()
    encoder_rank = np.empty(len(tokens), np.int32)
    encoder_rank[np.argsort(-tokens, kind="stable")] = np.arange(len(tokens)) % num_ranks
    return encoder_rank, np.random.default_rng(config.seed + 1).permutation(np.arange(len(tokens)) % num_ranks)


def _route(config: ExchangeBench, tokens: np.ndarray, *, grouped: bool) -> Route:
    encoder_rank, llm_rank = _assignments(config, tokens)
    return make_route(
        dist.get_rank(),
        dist.get_world_size(),
        encoder_rank=encoder_rank,
        llm_rank=llm_rank,
        tokens=tokens,
        encoder_order=np.argsort(llm_rank, kind="stable") if grouped else None,
        llm_order=np.argsort(encoder_rank, kind="stable") if grouped else None,
    )


def _gathered_rows(config: ExchangeBench, tokens: np.ndarray) -> tuple[int, Tensor]:
    """Return the number of rows that every rank pads to, and the positions of this rank's rows among all of them."""
    encoder_rank, llm_rank = _assignments(config, tokens)
    parts_by_rank = [np.flatnonzero(encoder_rank == rank) for rank in range(dist.get_world_size())]
    padded = max(int(tokens[parts].sum()) for parts in parts_by_rank)
    starts = np.zeros(len(tokens), np.int64)
    for rank, parts in enumerate(parts_by_rank):
        starts[parts] = rank * padded + np.cumsum(tokens[parts]) - tokens[parts]
    mine = np.flatnonzero(llm_rank == dist.get_rank())
    spans = [np.arange(starts[part], starts[part] + tokens[part]) for part in mine]
    return padded, torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *spans]))


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        main(*sys.argv[1:])
    else:
        run_command("benchmarks.exchange", ExchangeBench, run)
