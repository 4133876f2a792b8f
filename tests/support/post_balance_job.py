"""Run by test_post_balance, once for each rank: iterates over post_balance; what it saw."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from rank_jobs import run_rank, store_on_rank_0

import orchdata as od
from orchdata.planning.balance import Balance
from orchdata.post_balancing.loader import STEPS_AHEAD, PostBalanced, post_balance
from orchdata.ranks.wire import describe

TIMEOUT_SECONDS = 180  # far more than a loaded machine takes to see that a rank has died
LONG_COUNTS = (70, 3, 64, 65), (2, 1, 64, 80), (0, 2, 64, 130)  # of each rank


class Drawn:
    """A loader with a state: gives the lists of `steps`, in turn."""

    def __init__(self, steps: list[list[dict[str, Any]]], fail_at: int | None = None) -> None:
        self.steps = steps
        self.fail_at = fail_at
        self.position = 0

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for position in range(self.position, len(self.steps)):
            if position == self.fail_at:
                raise OSError("the disk is gone")
            self.position = position + 1
            yield self.steps[position]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def make_sample(rank: int, step: int, index: int, cost: int) -> dict[str, Any]:
    """A sample whose content follows from its key, so that whoever gets it can check it."""
    key = f"{rank}-{step}-{index}"
    values = torch.arange(cost % 97, dtype=torch.bfloat16)
    pixels = np.full((3, index + 1), rank, np.uint8)
    return {"key": key, "cost": cost, "ids": values, "pixels": pixels, "raw": key.encode()}


def intact(sample: dict[str, Any]) -> bool:
    rank, step, index = map(int, sample["key"].split("-"))
    wanted = make_sample(rank, step, index, sample["cost"])
    return (
        torch.equal(sample["ids"], wanted["ids"])
        and sample["ids"].dtype == torch.bfloat16
        and np.array_equal(sample["pixels"], wanted["pixels"])
        and sample["raw"] == wanted["raw"]
    )


def make_steps(rank: int, num_steps: int, counts: tuple[int, ...] = (6,)) -> list[list[dict[str, Any]]]:
    """Lists of samples with a long tail, longer on higher ranks."""
    random = np.random.default_rng(rank)
    return [
        [
            make_sample(rank, step, index, int(random.integers(1, 100) * (rank + 1) ** 2))
            for index in range(counts[step % len(counts)])
        ]
        for step in range(num_steps)
    ]


def wrap(loader: Any, **options: Any) -> PostBalanced:
    options = {"timeout": TIMEOUT_SECONDS, "loss_tokens": lambda sample: sample["cost"], **options}
    return post_balance(loader, cost=lambda sample: sample["cost"], **options)


def seen_of(batches: Any) -> list[dict[str, Any]]:
    return [
        {
            "step": batch.step,
            "keys": [sample["key"] for sample in batch.samples],
            "costs": [sample["cost"] for sample in batch.samples],
            "intact": all(map(intact, batch.samples)),
            "loss_scale": batch.loss_scale,
            "hash": batch.plan.hash,
        }
        for batch in batches
    ]


def run_epochs(loader: Any, epochs: int = 1, **options: Any) -> dict[str, Any]:
    balanced = wrap(loader, **options)
    return {"epochs": [seen_of(balanced) for _ in range(epochs)], "stats": balanced.stats()}


def uneven(rank: int, size: int) -> dict[str, Any]:
    """Rank 0 has no sample from the start; the others have steps in growing number, some of them empty lists."""
    return run_epochs(Drawn(make_steps(rank, 3 * rank, (6, 0, 9))), epochs=2)


def long_lists(rank: int, size: int) -> dict[str, Any]:
    """More samples than ranks tell each other at once, on some ranks or all; and then few again."""
    return run_epochs(Drawn(make_steps(rank, 4, LONG_COUNTS[rank])))


def balances(rank: int, size: int) -> dict[str, Any]:
    rules: dict[str, Any] = {
        "none": "none",
        "global": "global",
        "grouped": Balance(scope="grouped", group_size=2),
        "grid": Balance(scope="grid", group_size=2),
    }
    return {name: run_epochs(Drawn(make_steps(rank, 3)), balance=rule) for name, rule in rules.items()}


def gain(rank: int, size: int) -> dict[str, Any]:
    """Loads 90 and 110 in step 0: moving can take 10 of 110 off, 9.1 %. Loads 10 and 110 in step 1: 45 %."""
    costs = [[30, 30, 30], [10]] if rank == 0 else [[30, 30, 30, 10, 10], [50, 50, 10]]
    steps = [[make_sample(rank, step, i, cost) for i, cost in enumerate(row)] for step, row in enumerate(costs)]
    return run_epochs(Drawn(steps), gain=0.2)


def failing_loader(rank: int, size: int) -> dict[str, Any]:
    return caught(wrap(Drawn(make_steps(rank, 8), fail_at=5 if rank == 1 else None)))


def wait_until_ahead(balanced: PostBalanced) -> None:
    """Train so long that the thread has made all the steps that it may, or has ended."""
    (prefetcher,) = balanced._running
    with prefetcher._changed:
        prefetcher._changed.wait_for(lambda: prefetcher._over or len(prefetcher._ready) == STEPS_AHEAD)


def wait_until_over(balanced: PostBalanced) -> None:
    """Train so long that the thread has ended."""
    (prefetcher,) = balanced._running
    with prefetcher._changed:
        prefetcher._changed.wait_for(lambda: prefetcher._over)


def caught(balanced: PostBalanced, train: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
    steps = []
    try:
        for batch in balanced:
            steps.append(batch.step)
            train(batch.step)
    except RuntimeError as error:
        return {
            "steps": steps,
            "error": str(error),
            "rank": getattr(error, "rank", None),
            "cause": type(error.__cause__).__name__,
        }
    return {"steps": steps, "error": None}


def dying_rank(rank: int, size: int) -> dict[str, Any]:
    """Ranks 2 and 3 have made another one before, which must not confuse who is missing here."""
    pair = dist.new_group([2, 3])
    if rank in (2, 3):
        wrap(Drawn([]), group=pair)
    balanced = wrap(Drawn(make_steps(rank, 50)))
    if rank == 1:
        for batch in balanced:
            if batch.step == 3:
                wait_until_ahead(balanced)
                os._exit(7)
    started = time.monotonic()
    # One rank is slow: its thread waits for room, not for the others, when the rank dies.
    found = caught(balanced, lambda step: wait_until_over(balanced) if (rank, step) == (0, 3) else None)
    return {**found, "seconds": time.monotonic() - started}


def dying_server(rank: int, size: int) -> dict[str, Any]:
    """The rank that serves the store dies in its loader, in post_balance's thread."""

    def lists() -> Iterator[list[dict[str, Any]]]:
        for step, samples in enumerate(make_steps(rank, 50)):
            if rank == 0 and step == 4:
                os._exit(7)
            yield samples

    started = time.monotonic()
    return {**caught(wrap(lists())), "seconds": time.monotonic() - started}


def failures_in_turn(rank: int, size: int) -> dict[str, Any]:
    """Each rank in turn cannot take what it gets, in a new post_balance of the same ranks; in the end no rank can."""
    found = []
    for failing in (*range(size), None):
        dist.barrier()
        balanced = wrap(Drawn(make_steps(rank, 2)))
        if failing in (rank, None):
            balanced._rank_group.exchange = refuse  # type: ignore[method-assign]
        found.append(caught(balanced))
    return {"found": found}


def refuse(*arguments: Any) -> Any:
    raise MemoryError("no room for samples")


def one_leaves(rank: int, size: int) -> dict[str, Any]:
    balanced = wrap(Drawn(make_steps(rank, 50)))
    if rank != 1:
        return caught(balanced)
    for batch in balanced:
        if batch.step == 2:
            break
    return {"threads": threads()}


def all_leave(rank: int, size: int) -> dict[str, Any]:
    """Every rank breaks, and the next epoch begins at the first step."""
    balanced = wrap(Drawn(make_steps(rank, 50)))
    for batch in balanced:
        if batch.step == 2:
            break
    after_break = threads()
    balanced._loader.position = 0
    iterator = iter(balanced)
    first = next(iterator).step
    balanced.close()
    after_close = threads()
    del iterator
    balanced._loader.position = 0
    iterator = iter(balanced)
    again = next(iterator).step
    del iterator
    return {"first": [first, again], "threads": [after_break, after_close, threads()]}


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("orchdata")]


def resume(rank: int, size: int) -> dict[str, Any]:
    """The state after 3 steps, taken while others are prefetched; rank 0 has only two steps of its own."""
    steps = make_steps(rank, 2 if rank == 0 else 7)
    whole = seen_of(wrap(Drawn(steps)))
    balanced = wrap(Drawn(steps))
    before, states = [], [balanced.state_dict()]
    for batch in balanced:
        before += seen_of([batch])
        wait_until_ahead(balanced)
        states.append(balanced.state_dict())
        if batch.step == 2:
            break
    again = wrap(Drawn(steps))
    again.load_state_dict(json.loads(json.dumps(states[-1])))
    after = seen_of(again)
    return {"whole": whole, "resumed": before + after, "states": states, "end": again.state_dict()}


def unlike(rank: int, size: int) -> dict[str, Any]:
    try:
        wrap(Drawn([]), gain=0.02 if rank == 0 else 0.5)
    except ValueError as error:
        return {"error": str(error)}
    return {"error": None}


def forked(rank: int, size: int) -> dict[str, Any]:
    """A forked process drops what it has of the ranks' connections; those go on."""
    balanced = [wrap(Drawn(make_steps(rank, 2)))]
    child = os.fork()
    if not child:
        signal.alarm(60)
        balanced.clear()
        gc.collect()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"code": code, "steps": len(seen_of(balanced[0]))}


# --- per phase


def make_album(rank: int, step: int, index: int) -> dict[str, Any]:
    """Text, images as tensors and clips as dicts of bytes, each with a name; in step 1 no rank has clips."""
    random = np.random.default_rng([rank, step, index])
    key = f"{rank}-{step}-{index}"
    images = [torch.from_numpy(random.random((height, 3))) for height in random.integers(1, 40, random.integers(4))]
    clips = [{"raw": random.bytes(int(length)), "at": [0.5]} for length in random.integers(1, 90, random.integers(3))]
    album = {"key": key, "text": torch.arange(int(random.integers(1, 90)))}
    album["image"] = [[f"image {key} {number}", image] for number, image in enumerate(images)]
    album["audio"] = [[f"audio {key} {number}", clip] for number, clip in enumerate(clips if step != 1 else [])]
    return album


def make_albums(rank: int) -> list[list[dict[str, Any]]]:
    """Lists of albums; rank 0 has none in step 0, so others tell it the names of phases."""
    return [[make_album(rank, step, index) for index in range(0 if rank == step == 0 else 6)] for step in range(4)]


def cut_album(album: dict[str, Any]) -> tuple[Any, dict[str, list[od.Part]]]:
    images = [od.Part(image, cost=len(image[1]), rows=len(image[1])) for image in album["image"]]
    clips = [od.Part(clip, cost=len(clip[1]["raw"]), rows=2) for clip in album["audio"]]
    return {"key": album["key"], "text": album["text"]}, {"image": images, "audio": clips}


def cost_of_album(album: dict[str, Any]) -> dict[str, int]:
    encoders = {phase: sum(part.cost for part in own) for phase, own in cut_album(album)[1].items()}
    return encoders | {"llm": len(album["text"])}


def by_phase(rank: int, **options: Any) -> PostBalanced:
    options = {"balance": Balance(assignment="per_phase"), "gain": 0, "timeout": TIMEOUT_SECONDS, **options}
    return post_balance(make_albums(rank), cost=cost_of_album, parts=cut_album, **options)


def per_phase(rank: int, size: int) -> list[dict[str, Any]]:
    """What this rank got; its features are a number for each part's name, in all of its rows."""
    found = []
    for batch in by_phase(rank):
        albums = {album["key"]: album for other in range(size) for album in make_albums(other)[batch.step]}
        wanted = {part[0]: part[1] for album in albums.values() for part in album["image"] + album["audio"]}
        intact = all(torch.equal(rest["text"], albums[rest["key"]]["text"]) for rest in batch.samples)
        came = True
        for phase, own in batch.parts.items():
            for name, part in own:
                intact &= torch.equal(part, wanted[name]) if phase == "image" else part == wanted[name]
            rows = [(name, len(part) if phase == "image" else 2) for name, part in own] or [("dummy", 1)]
            features = torch.cat([torch.full((num_rows,), crc32(name.encode())) for name, num_rows in rows])
            features = od.exchange(features, batch.routes[phase], requires_grad=False)
            names = [
                (f"{phase} {batch.samples[sample]['key']} {number}", num_rows)
                for sample, number, num_rows in batch.arriving[phase].tolist()
            ]
            came &= features.tolist() == [crc32(name.encode()) for name, num_rows in names for _ in range(num_rows)]
        whole = sum(describe(album).num_bytes for album in albums.values()) + 64 * len(wanted)
        found.append(
            {
                "keys": [rest["key"] for rest in batch.samples],
                "parts": {phase: [name for name, _ in own] for phase, own in batch.parts.items()},
                "intact": intact,
                "came": came,
                "hash": batch.plan.hash,
                "bytes": [int(batch.plan.sizes.sum()), whole],
                "wanted": [sorted(albums), sorted(wanted)],
            }
        )
    return found


def gradients(rank: int, size: int) -> dict[str, float]:
    """The largest difference of the encoder's gradient from that of one rank, over the largest gradient; and the same
    where features are taken to arrive in the order of samples.
    """
    encoder = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()

    def loss_of(album: dict[str, Any], number: int, features: torch.Tensor) -> torch.Tensor:
        return (features.sum(dim=0) * (number + 1)).tanh().sum() * len(album["text"])

    def gradient_of(losses: list[torch.Tensor]) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), encoder)
        return gradient

    averaged: dict[bool, torch.Tensor] = {}
    for in_order in (True, False):
        losses = []
        for batch in by_phase(rank):
            images = [image for _, image in batch.parts["image"]] or [torch.zeros(1, 3, dtype=torch.float64)]
            rows = od.exchange(torch.cat(images) @ encoder, batch.routes["image"], requires_grad=True)
            came = batch.arriving["image"]
            names = came.tolist() if in_order else sorted(came.tolist())
            for (sample, number, _), own in zip(names, rows.split(came[:, 2].tolist()), strict=True):
                losses.append(loss_of(batch.samples[sample], number, own) * batch.loss_scale)
            losses.append(rows[:0].sum())
        averaged[in_order] = gradient_of(losses)
        dist.all_reduce(averaged[in_order])
        averaged[in_order] /= size
    alone = []
    for step in range(4):
        albums = [album for other in range(size) for album in make_albums(other)[step]]
        for album in albums:
            alone += [
                loss_of(album, number, image @ encoder) / len(albums)
                for number, (_, image) in enumerate(album["image"])
            ]
    wanted = gradient_of(alone)
    return {
        name: float((averaged[in_order] - wanted).abs().max() / wanted.abs().max())
        for name, in_order in (("arriving", True), ("sorted", False))
    }


def main(scenario: str) -> dict[str, Any]:
    found: dict[str, Any] = globals()[scenario](dist.get_rank(), dist.get_world_size())
    return found


if __name__ == "__main__":
    run_rank(
        main,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
        store=store_on_rank_0 if sys.argv[1] == "dying_server" else None,
    )
