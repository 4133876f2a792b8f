"""Run by test_parallel and test_world: loaders over meshes; what each rank saw."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from digests import digest
from map_dataset import Numbers
from rank_jobs import PATIENCE, message, run_rank, run_ranks
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import orchdata as od
from orchdata.planning.plan import Plan
from orchdata.ranks import agreement
from orchdata.ranks.parallel import DataParallel

RECIPE = od.Recipe(
    image=od.ImagePreprocessor(patch_size=14, merge=2, min_tokens=1, max_tokens=16),
    audio=od.AudioPreprocessor(num_mels=16, dtype="float32"),
)
GLOBAL_BATCH_SIZE = 8

Found = dict[str, Any]


def run_suite(suite: str, num_ranks: int, shards: Path, folder: Path, **options: Any) -> list[Found]:
    """What each rank found, by scenario; the cache is next to the shards. Options as in `run_ranks`."""
    environment = {"ORCHDATA_CACHE": str(shards / "cache")}
    return run_ranks(__file__, suite, shards, num_ranks=num_ranks, folder=folder, environment=environment, **options)


class FailsOnce(Numbers):
    """Samples in `broken` fail, and are mended by that."""

    broken: set[int]

    def __getitem__(self, place: int) -> Any:
        if place in self.broken:
            self.broken.remove(place)
            raise OSError("away for a moment")
        return super().__getitem__(place)


class Job:
    """The loaders of one rank."""

    def __init__(self, shards: Path) -> None:
        self.shards = shards
        self.rank = dist.get_rank()

    def loader(self, dp: Any, *, data: str = "good", **options: Any) -> od.DataLoader:
        options = {"global_batch_size": GLOBAL_BATCH_SIZE, "shuffle": True, "seed": 3, "num_threads": 2} | options
        return od.DataLoader(od.ShardDataset(self.shards / f"{data}.tar", recipe=RECIPE), dp=dp, **options)

    def mixed(self, dp: Any, **options: Any) -> od.DataLoader:
        """Token steps of the good samples twice, and their texts once more, drawn from streams."""
        good = od.ShardDataset(self.shards / "good.tar", recipe=RECIPE)
        texts = good.filter("image_parts == 0 and audio_parts == 0")
        sources = {"all": od.Source(good, loss_weight=0.5), "texts": od.Source(texts, weight=0.5)}
        mixture = od.Mixture(sources, stop="repeat", epoch_tokens=4000)
        sized = {"global_batch_size": None, "global_batch_tokens": 900, "shuffle": od.Shuffle(streams=2)}
        common = {"balance": od.Balance(scope="grid", group_size=1), "seed": 3, "num_threads": 2}
        return od.DataLoader(mixture, dp=dp, **(sized | common | options))

    def share(self) -> Found:
        """A mesh of 2 x 2."""
        by_dp = self.mesh("dp", "tp")
        by_tp = self.mesh("tp", "dp")
        both = self.mesh("dp_replicate", "dp_shard")
        read = DataParallel(by_dp, dims=("dp",), replicate="read", check_plan_every=2)
        broadcast = DataParallel(by_dp, dims=("dp",), replicate="broadcast", check_plan_every=2)
        microbatched = od.Balance(max_tokens=150, oversize="own")
        found: Found = {
            "read": seen(self.loader(read)),
            "broadcast": seen(self.loader(broadcast)),
            "tp first": seen(self.loader(by_tp)),
            "hsdp": seen(self.loader(DataParallel(both))),
            "microbatched": seen(self.loader(broadcast, balance=microbatched)),
            "one length": seen(self.loader(broadcast, collate_fn=od.Packed(length=600))),
            "skip": seen(self.loader(broadcast, data="bad", on_error=od.ErrorPolicy("skip", max_failures=None))),
            "raise": message(lambda: seen(self.loader(broadcast, data="bad"))),
            "collate": message(lambda: self.loader(broadcast, collate_fn=len)),
            "map broadcast": message(lambda: od.DataLoader(Numbers(8), dp=broadcast)),
            "map read": [batch["number"].tolist() for batch in od.DataLoader(Numbers(8), dp=read)],
        }
        found |= {f"mixture, {name}": seen(self.mixed(dp)) for name, dp in (("broadcast", broadcast), ("read", read))}
        apart_too = {"balance": od.Balance(assignment="per_phase", scope="grouped", group_size=1)}
        found["mixture, per phase"] = seen(self.mixed(broadcast, **apart_too))
        resumed = self.loader(broadcast)
        begun = [digest(batch) for batch in islice(resumed, 2)]  # left inside the epoch, steps under way
        resumed.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
        found["resumed"] = begun + [digest(batch) for batch in resumed]
        group = dist.new_group([0, 2])
        found["group"] = seen(self.loader(group)) if self.rank in (0, 2) else message(lambda: self.loader(group))
        return found | self.agree(both)

    def agree(self, both: DeviceMesh) -> Found:
        """The same mesh with ranks that differ."""
        often = DataParallel(both, check_plan_every=2)
        odd = self.rank == 2
        found: Found = {
            "seed": message(lambda: self.loader(both, seed=1 + odd)),
            "no index": message(
                lambda: self.loader(both, **({"data": "unindexed", "index": "require"} if odd else {}))
            ),
        }
        loader = self.loader(often)
        steps = iter(loader.steps())
        next(steps)
        with other_plans(odd):
            found["first step"] = message(lambda: next(iter(self.loader(often))))
            found["uncompared step"] = message(lambda: next(steps))
            found["compared step"] = message(lambda: next(steps))
        failing = od.DataLoader(FailsOnce(24), dp=often)
        failing.dataset.broken = set(range(8, 16)) if odd else set()  # steps 2, which is compared, and 3

        def rest() -> int:
            return sum(1 for _ in failing)

        found["fails at a compared step"] = message(rest)
        found["fails at another"] = message(rest) if odd else None
        found["left"] = rest()
        with other_plans(self.rank == 1):  # a receiver, and no rank compares
            unchecked = self.loader(DataParallel(self.mesh("dp", "tp"), dims=("dp",)))
            found["receiver"] = message(lambda: next(iter(unchecked)))
        return found

    def world(self) -> Found:
        """Two ranks and no group given: what differs is found at the first step."""
        odd = self.rank == 1

        def first(usual: dict[str, Any], differing: dict[str, Any] | None = None, data: Any = None) -> str | None:
            options = usual if differing is None or not odd else differing
            make = self.loader if data is None else partial(od.DataLoader, data)
            return message(lambda: next(iter(make(**{"dp": None} | options))))

        items = list(range(8))
        found: Found = {
            "alike": seen(self.loader(None)),
            "seed": first({"seed": 1}, {"seed": 2}),
            "no index": first({}, {"data": "unindexed", "index": "require"}),
            "argument": first({}, {"timeout": -1}),
            "collate": first({"collate_fn": len}, {"collate_fn": sum}),
            "same lambda": first({"collate_fn": lambda samples: len(samples)}),
            "subset": first({}, data=torch.utils.data.Subset(Numbers(20), list(range(self.rank, 20, 2)))),
            "equal subset": first({}, data=torch.utils.data.Subset(Numbers(20), list(range(0, 20, 2)))),
            "split list": first({}, data=items[self.rank :: 2]),
            "tuple": first({"seed": 1, "dp": (0, 1)}, {"seed": 2, "dp": (0, 1)}),
        }
        with patch.dict(os.environ, LOCAL_WORLD_SIZE="1" if odd else "2"):
            found["node"] = first({"balance": "grouped"})
        whole = self.loader(None)
        states = []
        for _ in whole:
            states.append(whole.state_dict())
        resumed = self.loader(None)
        resumed.load_state_dict(states[self.rank])
        found["state"] = message(lambda: next(iter(resumed)))
        resumed.load_state_dict(states[1])
        found["equal state"] = message(lambda: next(iter(resumed)))
        moved = self.loader(None)
        moved.set_epoch(int(odd))
        found["epoch"] = message(lambda: next(iter(moved)))
        grouped = self.loader(dist.group.WORLD)
        grouped.set_epoch(int(odd))
        found["epoch in a group"] = message(lambda: next(iter(grouped)))
        found["failures"] = self.without_pickle()
        found["alone"] = self.alone() if not odd else None  # from here on ranks have made other numbers of loaders
        self.another_job()
        found["another job"] = message(lambda: seen(self.loader(None, seed=self.rank and 0)))
        return found | {"fails once": [self.failing_once(place) for place in (0, 1)]}

    def failing_once(self, place: int) -> str | None:
        """Two epochs of samples one of which, of rank 0, fails at first."""
        loader = od.DataLoader(FailsOnce(6), batch_size=1)
        loader.dataset.broken = {2 * place} if self.rank == 0 else set()

        def epoch() -> int:
            return sum(1 for _ in loader)

        if self.rank == 0:
            assert message(epoch) is not None
            first = 3 - place - epoch()
        else:
            first = 3 - epoch()
        return message(epoch) or (f"{first} steps missing" if first else None)

    def another_job(self) -> None:
        dist.barrier()
        distributed_c10d._get_default_store().delete_key(f"cpu//0/{self.rank}")  # or gloo may connect to what was there
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", timeout=PATIENCE)  # over the store it was over

    def alone(self) -> Found:
        """A loader on one rank alone."""
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        usual, agreement.LATE_SECONDS = agreement.LATE_SECONDS, 0.1
        backend.options._timeout = timedelta(seconds=1)
        loader = self.loader(None)
        backend.options._timeout = PATIENCE
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            error = message(lambda: next(iter(loader)))
        agreement.LATE_SECONDS = usual
        own = seen(self.loader((0, 1)))
        return {"error": error, "warned": [str(warning.message) for warning in caught], "own": own["samples"]}

    def without_pickle(self) -> Found:
        """Failures of both ranks, gathered, and labels masked, where nothing can be unpickled."""

        def refuse(*arguments: Any, **options: Any) -> None:
            raise AssertionError("unpickled what a peer sent")

        for name in ("all_gather_object", "gather_object", "broadcast_object_list"):
            setattr(dist, name, refuse)
        dist.distributed_c10d._tensor_to_object = dist.distributed_c10d._unpickler = refuse
        apart = od.Balance(assignment="per_phase", max_tokens=150, oversize="own")
        loader = self.loader(None, data="bad", on_error=od.ErrorPolicy("skip", max_failures=None), balance=apart)
        own = seen(loader)["failures"]
        group = self.loader(
            dist.group.WORLD, data="bad", on_error=od.ErrorPolicy("skip", max_failures=None), balance=apart
        )
        seen(group)
        return {
            "own": own,
            "gathered": [list(failure.args)[1:3] for failure in loader.gather_failures()],
            "of group": [list(failure.args)[1:3] for failure in group.gather_failures(dist.group.WORLD)],
        }

    def stopped(self) -> Found:
        """Two peers: the reader stops after its first step, and the receiver ends within the loader's timeout."""
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        store = dist.distributed_c10d._get_default_store()
        dp = DataParallel(mesh, dims=("dp",))
        seen(self.loader(dp))  # what is compiled and loaded once takes its time without a limit
        steps = iter(self.loader(dp, timeout=8).steps())
        next(steps)
        if self.rank == 0:
            store.set("reader", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        reader = int(store.get("reader"))
        while Path(f"/proc/{reader}/stat").read_text().rpartition(") ")[2][0] != "T":
            time.sleep(0.01)
        return {"error": message(lambda: next(steps))}

    def mesh(self, *names: str) -> DeviceMesh:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def seen(loader: od.DataLoader) -> Found:
    """An epoch on this rank."""
    before = num_threads()
    steps, most = [], before
    for step in loader.steps():
        most = max(most, num_threads())
        steps.append(
            {
                "keys": [list(key) for batch in step for key in batch.sample_ids],
                "digests": [digest(batch) for batch in step],
                "plan": step[0].plan.hash,
                "sources": [number for batch in step if batch.sources is not None for number in batch.sources.tolist()],
                "passes": None if step[0].plan.passes is None else step[0].plan.passes.tolist(),
                "weight": step[0].global_loss_tokens,
            }
        )
    stats = loader.stats()
    return {
        "steps": steps,
        "len": len(loader),
        "state": loader.state_dict(),
        "samples": stats["samples"],
        "failures": stats["failures"]["count"],
        "phases": stats["phases"],
        "threads": most - before,
    }


def num_threads() -> int:
    """Threads of this process, but for the one that ends what was dropped."""
    return sum(each.name != "orchdata finalizers" for each in threading.enumerate())


@contextmanager
def other_plans(here: bool) -> Any:
    """As if this rank planned otherwise."""
    original = Plan.hash
    if here:
        Plan.hash = property(lambda plan: "of another plan")  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        Plan.hash = original  # type: ignore[misc]


if __name__ == "__main__":
    run_rank(lambda suite, shards: getattr(Job(Path(shards)), suite)())
