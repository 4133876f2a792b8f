"""Warming: the kernels that a loader's steps call, compiled or loaded before the first step is waited for.

    a fresh machine --Warming: child processes, a family of kernels each, while shards are indexed--> kept on disk
    kept on disk ----warm: made-up steps, 0.2 s---------------------------------------------------------> loaded

numba compiles one kernel at a time in a process, so that only processes compile beside each other. What is compiled is
kept beside the source (or in NUMBA_CACHE_DIR, or the user's cache folder), by the source file, the types of arguments,
the CPU and numba's version: once a machine or image, for all processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.limited_process import die_with_parent
from orchdata.native.jit import load_numba, sources_stamp
from orchdata.progress import progress_bar

if TYPE_CHECKING:
    from orchdata.building.spec import BuildSpec
    from orchdata.planning.balance import Balance
    from orchdata.planning.make_plan import PlanSpec

Ints = NDArray[np.int64]

_COMPILING = "compiling kernels, once on this machine"
_PATIENCE_SECONDS = 600.0
_COSTS = np.tile(np.array([9, 7, 5, 4, 3, 2, 2, 1]), 4)
_RANKS, _CAP = 4, 24


class _Family(NamedTuple):
    """Kernels that one process compiles, one after another.

    Attributes:
        head: "module:name" of one that takes long, by which we tell whether they are kept.
        call: calls all that plans and batches call of them.
    """

    head: str
    call: Callable[[], object]


def kernel_families(
    balance: Balance, num_ranks: int, *, phases: Sequence[str], padded: bool, in_shards: bool, fixed: bool = False
) -> list[str]:
    """Names of the families that a loader's steps call, those first that take longest.

    Args:
        phases: that are balanced.
        padded: whether LLM batches are padded to their longest sample.
        in_shards: whether we decode.
        fixed: whether LLM batches are padded to a length.
    """
    balanced = num_ranks > 1 and balance.scope != "none"
    wanted = {
        "phases": balanced and len(phases) > 1,
        "moves": balanced and (balance.assignment == "per_phase" or balance.scope in ("grouped", "grid")),
        "packed": balanced,
        "bins": fixed and balance.scope != "none",
        "microbatches": bool(balance.caps) or fixed,
        "padded": padded,
        "pipeline": balance.num_stages is not None,
        "patches": in_shards and len(phases) > 1,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


class Warming:
    """A loader's kernels: from now on, child processes compile what this machine does not have; `finish` loads them.

    Of several processes that want a family, as the ranks of a node, one compiles it and the others wait. Children end
    with the loader, and with this process whatever ends it.
    """

    def __init__(self, families: Sequence[str]) -> None:
        missing = [name for name in families if not _is_kept(name)]
        beside = min(len(missing), len(os.sched_getaffinity(0)))
        self._children: list[subprocess.Popen[bytes]] = []
        self._is_done = False
        for number in range(beside):
            command = [sys.executable, "-P", "-m", "orchdata.engines.warm", *missing[number::beside]]
            with contextlib.suppress(OSError):  # then this process compiles them, when it needs them
                self._children.append(
                    subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                    )
                )
        self._end = weakref.finalize(self, _end, self._children)

    def wait(self) -> None:
        """Until all is compiled, with a word on the terminal."""
        if self._children:
            with progress_bar(_COMPILING) as progress:
                for done, child in enumerate(self._children):
                    progress(done, len(self._children))
                    with contextlib.suppress(subprocess.TimeoutExpired):  # then this process compiles what is missing
                        child.wait(_PATIENCE_SECONDS)
        self._end()

    def finish(self, spec: BuildSpec) -> None:
        """`wait`, then load them into this process; once. What fails here fails again in the step that needs it."""
        if not self._is_done:
            self.wait()
            with contextlib.suppress(Exception):
                warm(spec)
            self._is_done = True


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        with child:  # waits for its end, and closes its pipe
            child.kill()


def warm(spec: BuildSpec) -> None:
    """Load every kernel that steps of `spec` call, or compile it, in this thread. Leaves no thread behind."""
    from orchdata.building.spec import SampleContent, ShardContent

    load_numba()
    _warm_plans(spec.plan)
    if isinstance(spec.content, (ShardContent, SampleContent)):
        modalities = spec.content.shards.recipe.modalities.values()
        _patches({array.dtype for modality in modalities for array in modality.arrays().values()})


def _warm_plans(spec: PlanSpec) -> None:
    """The real costs of a sample, and the plan of made-up ones: small enough to take some milliseconds, of several
    microbatches where there are caps.
    """
    from orchdata.order.order import Order, Shuffle
    from orchdata.order.steps import GlobalBatches, StepTask
    from orchdata.planning.make_plan import make_plan

    samples = Order(len(_COSTS), shuffle=Shuffle(), seed=0)
    if spec.order.num_samples:
        first = np.zeros(1, np.int64)
        for phase in spec.costs.phases:
            spec.costs.costs(phase, first)
            spec.costs.positions(phase, first)
            if spec.balance.assignment == "per_phase" and phase != "llm":
                spec.costs.parts(phase, first)
    num_ranks = min(spec.num_ranks, _RANKS)
    balance = _balance_of_made_up(spec.balance, num_ranks)
    costs = _MadeUp(spec.costs.phases, spec.costs.balanced, spec.costs.padded)
    made_up = replace(
        spec,
        costs=costs,
        order=samples,
        batches=GlobalBatches(size=len(_COSTS)),
        balance=balance,
        num_ranks=num_ranks,
        ranks_per_node=None if spec.ranks_per_node is None else max(1, num_ranks // 2),
    )
    plan = make_plan(made_up, StepTask(0, 0))
    if spec.balance.scope == "grid" or spec.ranks_per_node is not None:
        _names()  # small plans leave no ranks to name anew
    if spec.balance.scope == "grid" or spec.balance.caps:
        _phases()  # nor samples that fit nowhere near, and all within caps
    if spec.balance.num_stages is not None:
        plan.pipeline_order(0, spec.balance.num_stages)
    for phase in plan.phases:
        plan.loads(phase)
        plan.loads_unbalanced(phase)
        plan.lower_bound(phase)


def _balance_of_made_up(balance: Balance, num_ranks: int) -> Balance:
    return replace(
        balance,
        max_tokens=dict.fromkeys(balance.caps, _CAP) or None,
        max_samples=None if balance.max_samples is None else len(_COSTS),
        group_size=None if balance.group_size is None else max(1, num_ranks // 2),
        oversize="own",
    )


@dataclass(frozen=True)
class _MadeUp:
    """Costs of made-up samples, each of one part in every phase."""

    phases: tuple[str, ...]
    balanced: tuple[str, ...]
    padded: Any

    def costs(self, phase: str, row: Ints) -> Ints:
        return np.roll(_COSTS, self.phases.index(phase))[row]

    def positions(self, phase: str, row: Ints) -> Ints:
        return self.costs(phase, row)

    def loss_tokens(self, row: Ints) -> Ints:
        return row

    def parts(self, phase: str, row: Ints) -> Any:
        from orchdata.planning.parts import Parts

        costs = self.costs(phase, row)
        nobody = np.full(len(row), -1, np.int32)
        return Parts(sample=np.arange(len(row)), part=row, positions=costs, tokens=costs, costs=costs, rank=nobody)


def _phases() -> None:
    from orchdata.balancers import balance_phases

    costs = {"encoder": _COSTS, "llm": _COSTS[::-1].copy()}
    balance_phases(costs, _RANKS)
    balance_phases(costs, _RANKS, sizes=_COSTS, max_size=40)


def _moves() -> None:
    from orchdata.balancers import balance_from, balance_grid, balance_grouped

    owner = np.arange(len(_COSTS), dtype=np.int32) % _RANKS
    costs = {"encoder": _COSTS, "llm": _COSTS[::-1].copy()}
    balance_from(_COSTS, owner, _RANKS, sizes=_COSTS, ranks_per_node=2)
    for way in (balance_grid, balance_grouped):
        way(_COSTS, owner, _RANKS, 2)
        way(costs, owner, _RANKS, 2)
    _names()


def _names() -> None:
    from orchdata.balancers import place_on_nodes
    from orchdata.native.move.minimal_move import relabel

    place_on_nodes(np.eye(_RANKS, dtype=np.int64), 2)
    owner = np.arange(len(_COSTS), dtype=np.int32) % _RANKS
    relabel(_COSTS, owner, owner.copy(), _RANKS)


def _packed() -> None:
    from orchdata.balancers import balance

    balance(_COSTS, _RANKS)
    balance(_COSTS, _RANKS, equal_count=True)


def _microbatches() -> None:
    from orchdata.balancers import pack_micro_steps, split_microbatches

    rank = np.arange(len(_COSTS), dtype=np.int32) % _RANKS
    for in_step in (False, True):
        split_microbatches(_COSTS, rank, _RANKS, max_size=_CAP, oversize="own", in_step=in_step)
    pack_micro_steps(_COSTS, 160, 2, np.stack([_COSTS, _COSTS], axis=1), num_ranks=_RANKS)


def _bins() -> None:
    from orchdata.balancers import pack_bins

    pack_bins(_COSTS, 12, None, np.stack([_COSTS, _COSTS], axis=1), num_ranks=_RANKS)


def _padded() -> None:
    from orchdata.balancers import PhaseCost, balance_padded

    balance_padded(_COSTS, _RANKS, PhaseCost(1.0))


def _pipeline() -> None:
    from orchdata.balancers import order_microbatches

    order_microbatches(np.ones((2, 4)), np.ones((2, 4)))


def _patches(dtypes: set[str] = frozenset({"bfloat16", "float32", "uint8"})) -> None:  # type: ignore[assignment]
    from orchdata.native.patchify import channel_table, patchify

    for dtype in sorted(dtypes & {"bfloat16", "float32", "uint8"}):
        table = channel_table((0.5,) * 3, (0.5,) * 3, dtype)
        patchify(np.zeros((2, 2, 3), np.uint8), 1, 2, table, np.empty((4, 3), table.dtype))


FAMILIES: Final = {
    "phases": _Family("assign.joint:solve_joint", _phases),
    "moves": _Family("move.minimal_move:solve_from", _moves),
    "packed": _Family("assign.packed:solve", _packed),
    "microbatches": _Family("microbatches.microbatch:split", _microbatches),
    "bins": _Family("bins.pack:pack", _bins),
    "padded": _Family("assign.padded:solve_padded", _padded),
    "pipeline": _Family("microbatches.pipeline_search:search", _pipeline),
    "patches": _Family("patchify:_patchify", _patches),
}


def _is_kept(family: str) -> bool:
    """Whether its head was compiled since any kernel's source was written, by the index that numba keeps of it."""
    head = _head(family)
    # Where numba keeps it by default is known without numba, which this process may not need otherwise.
    beside = Path(head.py_func.__code__.co_filename).parent / "__pycache__"
    if "NUMBA_CACHE_DIR" not in os.environ and os.access(beside, os.W_OK) and _is_in(beside, head):
        return True
    folder = _cache_folder(head)
    return folder is None or _is_in(folder, head)  # where nothing is kept, no process can compile for another


def _is_in(folder: Path, head: Any) -> bool:
    source = Path(head.py_func.__code__.co_filename)
    written = max(changed for _, _, changed in sources_stamp())
    found = folder.glob(f"{source.stem}.{head.py_func.__name__}-*.nbi")
    return any(index.stat().st_mtime_ns >= written for index in found)


def _head(family: str) -> Any:
    module, _, name = FAMILIES[family].head.partition(":")
    return getattr(import_module(f"orchdata.native.{module}"), name)


def _cache_folder(kernel: Any) -> Path | None:
    stats = getattr(kernel, "stats", None)  # none under NUMBA_DISABLE_JIT
    return None if stats is None or stats.cache_path is None else Path(stats.cache_path)


@contextlib.contextmanager
def _taking_turns(family: str) -> Iterator[None]:
    """One process of a machine at a time; a lock that ends with whoever holds it."""
    head = _head(family)
    folder = _cache_folder(head)
    with contextlib.ExitStack() as held:
        if folder is not None:
            with contextlib.suppress(OSError):  # then all compile
                folder.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context((folder / f"{head.py_func.__name__}.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(names: Sequence[str]) -> None:
    """Compile these families, in a child of `Warming`, until its parent is gone."""
    die_with_parent(0)  # the parent keeps the other end of stdin open, and writes nothing
    for name in names:
        with _taking_turns(name):
            FAMILIES[name].call()


if __name__ == "__main__":
    main(sys.argv[1:])
