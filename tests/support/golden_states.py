"""Golden cases of states: where a run stood, the state it had there, and what it delivered after that.

The same loader that gave the state goes on and delivers what is stored. A test loads the stored state into a fresh
loader, which must deliver the same.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from golden_data import Counted, GoldenData, Held, Numbers, Plain, Upwards, Walks
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

import orchdata as od
from orchdata import notices
from orchdata.order.sampler import generator_state

END = "the epoch ends"
FORKED = {"multiprocessing_context": "fork"}  # starts in milliseconds; other ways import torch again

Make = Callable[..., od.DataLoader]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A loader that goes on from the state of another one, which had other arguments."""

    make: Make  # the first loader
    steps: int  # that it delivers
    allow: Sequence[str] = ()  # of `load_state_dict`


@dataclass(frozen=True, kw_only=True)
class StateCase:
    """A state of a loader."""

    make: Make  # makes the loader from the data; its keywords are further arguments of the loader
    steps: int | None  # delivered before the state is taken; None: all of the epoch, up to its end
    set_epoch: int = 0  # the epoch that the loader is put to before
    whole: int = 0  # epochs that it goes through before
    following: int = 4  # steps that are stored, those of later epochs among them
    since: Change | None = None  # the run that it goes on with
    put: Mapping[str, Any] | None = None  # replaces entries of the state

    def stored(self, data: GoldenData) -> dict[str, Any]:
        """The state, and what follows it."""
        torch.manual_seed(5)
        loader = self.make(data)
        if self.since is not None:
            first = self.since.make(data)
            with closing(delivered(first)) as steps:
                _skip(steps, self.since.steps)
            loader.load_state_dict(as_stored(first.state_dict()), allow=self.since.allow)
        if self.set_epoch:
            loader.set_epoch(self.set_epoch)
        with closing(delivered(loader)) as steps:
            for _ in range(self.whole):
                _skip(steps, None)
            _skip(steps, self.steps)
            state = as_stored(loader.state_dict())
            if self.put is not None:
                state |= self.put
                return {"state": state, "following": self.following_of(state, data)}
            return {"state": state, "following": list(islice(steps, self.following))}

    def following_of(self, state: Mapping[str, Any], data: GoldenData, **options: Any) -> list[str]:
        """What a fresh loader delivers after loading a state; what torch would draw by itself is something else."""
        torch.manual_seed(77)
        loader = self.make(data, **options)
        loader.load_state_dict(dict(state))
        same = comparable(as_stored(loader.state_dict()))
        assert same == comparable(state), "a loader tells the state that it has loaded"
        with closing(delivered(loader)) as steps:
            return list(islice(steps, self.following))


def as_stored(state: Any) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(state))


def comparable(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state without the release that wrote it, and whose generator, if it tells one, is uncompressed: zlib's text may
    differ from release to release.
    """
    drawn = state.get("drawn") or {}
    found = {name: value for name, value in state.items() if name != "written_by"}
    if "state" not in drawn:
        return found
    return {**found, "drawn": {**drawn, "state": generator_state(drawn["state"]).tolist()}}


def delivered(loader: od.DataLoader) -> Iterator[str]:
    """Each step of this and the next epochs as text, and `END` where one ends."""
    while True:
        for step in loader.steps():
            yield _shown(step)
        yield END


def _skip(steps: Iterator[str], count: int | None) -> None:
    """So many steps, or those of an epoch with its end."""
    if count is None:
        assert END in steps  # takes them up to there
    else:
        assert len(list(islice(steps, count))) == count


def _shown(step: Sequence[Any]) -> str:
    if not isinstance(step[0], od.Batch):
        return " | ".join(map(str, step))
    plan = step[0].plan
    return f"{plan.epoch}.{plan.step}: " + " | ".join(" ".join(names(batch)) for batch in step)


def names(batch: od.Batch) -> Iterable[str]:
    """Of its samples: file, key and piece, and in a mixture the source."""
    sources = (
        [""] * len(batch.sample_ids) if batch.sources is None else [f"{batch.plan.sources[n]}:" for n in batch.sources]
    )
    for source, (shard, key), piece in zip(sources, batch.sample_ids, batch.pieces, strict=True):
        yield f"{source}{PurePath(shard).stem}/{key}" + (f"#{piece}" if piece else "")


def shards(name: str = "omni", **options: Any) -> Make:
    """Loaders over shards, inline."""
    common = {"batch_size": 5, "shuffle": True, "seed": 7, "num_threads": 0} | options
    if common.keys() & {"global_batch_size", "global_batch_tokens"}:
        del common["batch_size"]
    return lambda data, **more: od.DataLoader(data.shards(name), **common | more)


def chosen(**options: Any) -> Make:
    """Loaders over a part of the shards."""

    def make(data: GoldenData, **more: Any) -> od.DataLoader:
        dataset = data.shards("omni").filter("tokens > 80").split("train", 0.7, seed=3)
        return od.DataLoader(dataset, **{"batch_size": 5, "shuffle": True, "num_threads": 0} | options | more)

    return make


def mixed(weights: Sequence[float] = (5, 3, 1), *, loader: Mapping[str, Any] | None = None, **options: Any) -> Make:
    """Loaders over a mixture of three."""
    common = {"global_batch_tokens": 900, "shuffle": True, "seed": 7, "num_threads": 0} | dict(loader or {})
    return lambda data, **more: od.DataLoader(mixture(data, weights, **options), **common | more)


def mixture(data: GoldenData, weights: Sequence[float] = (5, 3, 1), **options: Any) -> od.Mixture:
    given = [None] * 3 if "stages" in options else weights
    sources = {
        name: od.Source(data.shards(name), weight=weight)
        for name, weight in zip(("omni", "chat", "text"), given, strict=True)
    }
    return od.Mixture(sources, **options)


def nested(data: GoldenData, **more: Any) -> od.DataLoader:
    inner = od.Mixture(
        {"chat": od.Source(data.shards("chat")), "text": od.Source(data.shards("text"), loss_weight=0.5)}
    )
    outer = od.Mixture({"omni": od.Source(data.shards("omni"), weight=2), "words": od.Source(inner)}, stop="all")
    return od.DataLoader(outer, **{"batch_size": 6, "shuffle": True, "num_threads": 0} | more)


def twice(data: GoldenData, **more: Any) -> od.DataLoader:
    """The same samples under two names, next to others."""
    sources = {
        "once": od.Source(data.shards("omni")),
        "again": od.Source(data.shards("omni"), weight=2),
        "text": od.Source(data.shards("text")),
    }
    return od.DataLoader(
        od.Mixture(sources, stop="all"), **{"global_batch_tokens": 900, "shuffle": True, "num_threads": 0} | more
    )


def windows(*names: str, **options: Any) -> Make:
    """Loaders of windows of concatenated documents, of one data set or a mixture."""
    layout = {"collate_fn": od.Packed(length=64, concatenate=True), "global_batch_size": 3, "shuffle": True}

    def make(data: GoldenData, **more: Any) -> od.DataLoader:
        found = [data.shards(name) for name in names]
        mixed = {"stop": "repeat", "epoch_tokens": 1500}
        sources = {name: od.Source(each) for name, each in zip(names, found, strict=True)}
        dataset = found[0] if len(found) == 1 else od.Mixture(sources, **mixed)  # type: ignore[arg-type]
        warned = set(notices._warned)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of split texts
            loader = od.DataLoader(dataset, **{**layout, "seed": 7, "num_threads": 0} | options | more)
        notices._warned.intersection_update(warned)  # for tests that expect the warning
        return loader

    return make


def first_samples(data: GoldenData, **more: Any) -> od.DataLoader:
    dataset = data.shards("omni").take(23)
    return od.DataLoader(dataset, **{"batch_size": 5, "shuffle": True, "num_threads": 0} | more)


def many_sources(data: GoldenData, **more: Any) -> od.DataLoader:
    """So many that their state holds digests."""
    sources = {
        f"source-{n:02d}": od.Source(data.shards(("omni", "chat", "text")[n % 3]), weight=n + 1) for n in range(10)
    }
    dataset = od.Mixture(sources, stop="repeat", epoch_tokens=4000)
    return od.DataLoader(dataset, **{"global_batch_tokens": 800, "shuffle": True, "num_threads": 0} | more)


def items(dataset: Callable[[], Any], own: Callable[[Any], Mapping[str, Any]] | None = None, **options: Any) -> Make:
    """Loaders over torch data sets, whose batches are lists; `own` makes what each loader has for itself."""
    common: dict[str, Any] = {"batch_size": 4, "collate_fn": list} | options
    if common.get("num_workers"):
        common |= FORKED

    def make(data: GoldenData, **more: Any) -> od.DataLoader:
        made = dataset()
        found = common | (dict(own(made)) if own is not None else {}) | more
        if "batch_sampler" in found:
            del found["batch_size"]
        return od.DataLoader(made, **found)

    return make


STAGES = [
    (0, {"omni": 5, "chat": 3, "text": 1}),
    (1500, {"omni": 1, "chat": 3, "text": 2}),
    (4000, {"chat": 3, "text": 1}),
]
REPEAT = {"stop": "repeat", "epoch_tokens": 5000}
RAMP = {"global_batch_tokens": [(0, 400), (2000, 800), (5000, 1200)]}
SPLIT = {"streams": 2, "window": 1}


def _of_generator(dataset: Any) -> dict[str, Any]:
    return {"batch_sampler": BatchSampler(RandomSampler(dataset, generator=_generator()), 3, drop_last=True)}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def _numbers() -> Numbers:
    return Numbers(21)


def _counted() -> Counted:
    return Counted(21)


STATES: dict[str, StateCase] = {
    "shards, before the first step": StateCase(make=shards(), steps=0),
    "shards, in an epoch": StateCase(make=shards(), steps=5, following=6),
    "shards, after the last step": StateCase(make=shards(), steps=8),
    "shards, between epochs": StateCase(make=shards(), steps=None),
    "shards, in their order, drop_last": StateCase(make=shards(shuffle=False, drop_last=True), steps=5),
    "shards, streams": StateCase(make=shards(shuffle=od.Shuffle(**SPLIT)), steps=3),
    "shards, an order of one's own": StateCase(make=shards(shuffle=np.arange(34, 0, -3)), steps=1),
    "shards, filter and split": StateCase(make=chosen(), steps=2),
    "shards, split texts": StateCase(make=shards("long"), steps=2),
    "shards, parquet": StateCase(make=shards("parquet", batch_size=3), steps=2),
    "shards, arrow": StateCase(make=shards("arrow", batch_size=3), steps=2),
    "shards, a container of the user's": StateCase(make=shards("notes", batch_size=3), steps=2),
    "shards, the first samples": StateCase(make=first_samples, steps=2),
    "shards, microbatches by count": StateCase(make=shards(batch_size=2, accumulate=3), steps=2),
    "windows, in an epoch": StateCase(make=windows("plain"), steps=2),
    "windows, of split texts": StateCase(make=windows("long"), steps=1),
    "shards, rank 1 of 3": StateCase(make=shards(global_batch_size=8, dp=(1, 3)), steps=2),
    "shards, microbatches": StateCase(make=shards(balance=od.Balance(max_tokens=400)), steps=2),
    "shards, another size since": StateCase(
        make=shards(batch_size=3),
        steps=2,
        since=Change(make=shards(), steps=4, allow=("global_batch_size",)),
    ),
    "shards, worker processes": StateCase(make=shards(num_workers=2, num_threads=1, **FORKED), steps=4),
    "token steps, in an epoch": StateCase(make=shards(global_batch_tokens=700), steps=3),
    "token steps, between epochs": StateCase(make=shards(global_batch_tokens=700), steps=None),
    "token steps, a ramp": StateCase(make=shards(**RAMP), steps=6),
    "token steps, another size since": StateCase(
        make=shards(global_batch_tokens=900),
        steps=2,
        since=Change(make=shards(global_batch_tokens=500), steps=4, allow=("global_batch_tokens",)),
    ),
    "token steps, since steps of samples": StateCase(
        make=shards(global_batch_tokens=900),
        steps=1,
        since=Change(make=shards(), steps=4, allow=("global_batch_tokens",)),
    ),
    "mixture, in an epoch": StateCase(make=mixed(), steps=2),
    "mixture, all": StateCase(make=mixed(stop="all"), steps=4),
    "mixture, between epochs": StateCase(make=mixed(stop="all"), steps=None),
    "mixture, repeat": StateCase(make=mixed(**REPEAT), steps=3),
    "mixture, by samples": StateCase(
        make=mixed(
            by="samples", stop="repeat", epoch_samples=60, loader={"global_batch_tokens": None, "batch_size": 6}
        ),
        steps=4,
    ),
    "mixture, stages": StateCase(make=mixed(stages=STAGES, **REPEAT), steps=4),
    "mixture, other weights since": StateCase(
        make=mixed((1, 8, 1), **REPEAT),
        steps=2,
        since=Change(make=mixed(**REPEAT), steps=2, allow=("weights",)),
    ),
    "mixture, rank 1 of 2": StateCase(make=mixed(loader={"dp": (1, 2)}, **REPEAT), steps=3),
    "mixture, a ramp": StateCase(make=mixed(loader=RAMP, **REPEAT), steps=3, set_epoch=1),
    "mixture, a source twice": StateCase(make=twice, steps=3),
    "mixture, windows": StateCase(make=windows("plain", "long"), steps=3),
    "mixture, nested": StateCase(make=nested, steps=5),
    "mixture, many sources": StateCase(make=many_sources, steps=2),
    "map-style, with a seed": StateCase(make=items(_numbers, shuffle=True, seed=3), steps=2),
    "map-style, with a seed, rank 1 of 2": StateCase(make=items(_numbers, shuffle=True, seed=3, dp=(1, 2)), steps=1),
    "map-style, costs": StateCase(
        make=items(_numbers, shuffle=True, seed=3, cost=[1 + n % 5 for n in range(21)], dp=(0, 2)), steps=1
    ),
    "map-style, shuffled by torch": StateCase(make=items(_numbers, shuffle=True), steps=2),
    "map-style, shuffled by torch between epochs": StateCase(make=items(_numbers, shuffle=True), steps=None, whole=1),
    "map-style, worker processes": StateCase(make=items(_numbers, shuffle=True, num_workers=2), steps=2),
    "map-style, kept worker processes between epochs": StateCase(
        make=items(_numbers, shuffle=True, num_workers=2, persistent_workers=True), steps=None
    ),
    "map-style, no batches": StateCase(make=items(_numbers, batch_size=None, shuffle=True, collate_fn=None), steps=9),
    "map-style, steps that were overtaken": StateCase(
        make=items(_numbers, num_workers=1, in_order=False), steps=3, put={"left": [0, 2]}
    ),
    "sampler, with replacement": StateCase(
        make=items(_numbers, lambda dataset: {"sampler": RandomSampler(dataset, replacement=True)}),
        steps=2,
        following=4,
    ),
    "sampler, distributed": StateCase(
        make=items(_numbers, lambda dataset: {"sampler": DistributedSampler(dataset, 2, 1, seed=3)}, dp=(1, 2)),
        steps=1,
        following=2,
    ),
    "sampler, with a state": StateCase(
        make=items(_numbers, lambda dataset: {"sampler": Upwards()}, batch_size=2), steps=2
    ),
    "sampler, with a state between epochs": StateCase(
        make=items(_numbers, lambda dataset: {"sampler": Upwards()}, batch_size=2), steps=None
    ),
    "batch sampler, torch's": StateCase(make=items(_numbers, _of_generator), steps=2, following=5),
    "batch sampler, torch's over one with a state": StateCase(
        make=items(_numbers, lambda dataset: {"batch_sampler": BatchSampler(Upwards(), 2, drop_last=False)}), steps=3
    ),
    "data set with a state": StateCase(make=items(_counted, shuffle=True), steps=2),
    "data set with a state, 2 workers": StateCase(
        make=items(_counted, shuffle=True, num_workers=2), steps=3, following=3
    ),
    "data set with a state, between epochs": StateCase(make=items(_counted, seed=1, shuffle=True), steps=None),
}
for _name, _kind in (("iterable", Plain), ("iterable with a state", Held)):
    for _workers in (0, 2):
        STATES[f"{_name}, {_workers} workers"] = StateCase(
            make=items(_kind, num_workers=_workers, batch_size=2), steps=3, following=6
        )
STATES |= {
    "iterable, between epochs": StateCase(make=items(Plain), steps=None),
    "iterable, no batches": StateCase(make=items(Plain, batch_size=None, collate_fn=None), steps=4),
    "iterable with a state, between epochs": StateCase(make=items(Held), steps=None),
    "iterable whose iterator has a state, 2 workers": StateCase(
        make=items(Walks, batch_size=2, num_workers=2), steps=3
    ),
}
