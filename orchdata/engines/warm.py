"""Warming: compiles or loads the kernels that a loader's steps call, in families, before the first step is waited for.

    a fresh machine --Warming: child processes, a family of kernels each, while shards are indexed--> stored on disk
    stored on disk ---warm: synthetic steps, 0.2 s------------------------------------------------------> loaded

numba compiles one kernel at a time in a process, so only processes compile in parallel. Compiled kernels are stored
next to the source (or in NUMBA_CACHE_DIR, or the user's cache folder), by source file, argument types, CPU and numba's
version: once per machine or image, for all processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from orchdata.finalizers import Ending
from orchdata.loaders.child_process import die_with_parent
from orchdata.native.jit import Ints, load_numba, sources_stamp
from orchdata.notices import in_words, progress_bar

if TYPE_CHECKING:
    from orchdata.building.step import BuildSpec
    from orchdata.planning.balance import Balance
    from orchdata.planning.plan import PlanSpec

_COMPILING = "compiling kernels, once on this machine"
_PATIENCE_SECONDS = 600.0
_FAMILY_SECONDS = 30.0  # on one core


class Warming:
    """A loader's kernels: child processes start to compile those that this machine lacks; `finish` loads all of them.

    If several processes need a family, as the ranks of a node do, one compiles it and the others wait. Children end
    with the loader, and with this process, however it ends.

    Attributes:
        is_over: whether no child runs any more.
    """

    def __init__(self, families: Sequence[str]) -> None:
        missing = [name for name in families if not _is_stored(name)]
        num_children = min(len(missing), len(os.sched_getaffinity(0)))
        self._children: list[subprocess.Popen[bytes]] = []
        self._is_done = False
        if missing and os.environ.get("LOCAL_RANK", "0") == "0":
            seconds = in_words(_FAMILY_SECONDS * -(-len(missing) // num_children))
            sys.stderr.write(f"{_COMPILING}: about {seconds} (`orchdata warm` does it ahead)\n")
            sys.stderr.flush()
        command = [sys.executable, "-P", "-m", "orchdata.engines.warm", *missing]
        streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        for _ in range(num_children):
            with contextlib.suppress(OSError):  # then this process compiles them, when it needs them
                self._children.append(subprocess.Popen(command, **streams))
        self._ending = Ending(self, partial(_end, self._children)) if self._children else None
        self.is_over = not self._children

    def wait(self) -> None:
        """Wait until all kernels are compiled, with a progress bar."""
        if self._children:
            with progress_bar(_COMPILING) as progress:
                for done, child in enumerate(self._children):
                    progress(done, len(self._children))
                    with contextlib.suppress(subprocess.TimeoutExpired):  # then this process compiles the missing ones
                        child.wait(_PATIENCE_SECONDS)
        _end(self._children)
        if self._ending is not None:
            self._ending.cancel()
        self.is_over = True

    def finish(self, spec: BuildSpec) -> None:
        """Wait, then load the kernels into this process, once. An error occurs again in the step that needs them."""
        if not self._is_done:
            self.wait()
            with contextlib.suppress(Exception):
                warm(spec)
            self._is_done = True


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    while children:
        with children.pop() as child:  # waits for its end, and closes its pipe
            child.kill()


def _is_stored(family: str) -> bool:
    """Return whether the family's head was compiled after the last change of any kernel's source, by numba's index."""
    head = _head(family)
    source, written = Path(head.py_func.__code__.co_filename), max(changed for _, _, changed in sources_stamp())

    def is_in(folder: Path) -> bool:
        indexes = folder.glob(f"{source.stem}.{head.py_func.__name__}-*.nbi")
        return any(index.stat().st_mtime_ns >= written for index in indexes)

    # This process may not need numba, which is imported only if the kernel is not where numba usually stores those of a
    # file, if it can write there. See UserProvidedCacheLocator and InTreeCacheLocator in numba.
    usual = source.parent / "__pycache__"
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        folder = os.path.dirname(os.path.abspath(source))
        # The hash names a folder, and protects nothing.
        hashed = hashlib.sha1(folder.encode(), usedforsecurity=False).hexdigest()
        usual = Path(chosen, f"{os.path.basename(folder)}_{hashed}")
    if os.access(usual, os.W_OK) and is_in(usual):
        return True
    found = _cache_folder(head)
    return found is None or is_in(found)  # without a folder no process can compile for another


def _head(family: str) -> Any:
    module, _, name = FAMILIES[family].head.partition(":")
    return getattr(import_module(f"orchdata.native.{module}"), name)


def stored_in() -> list[str]:
    """Return the folders in which compiled kernels of the families are stored."""
    folders = {_cache_folder(_head(name)) for name in FAMILIES}
    return sorted(str(folder) for folder in folders if folder is not None)


def _cache_folder(kernel: Any) -> Path | None:
    stats = getattr(kernel, "stats", None)  # none under NUMBA_DISABLE_JIT
    return None if stats is None or stats.cache_path is None else Path(stats.cache_path)


def _compile(family: str, how: int) -> bool:
    """Compile in one process of a machine at a time, by a file lock, which ends with it. Return False where that is
    another, and `how` is not to wait.
    """
    head = _head(family)
    folder = _cache_folder(head)
    with contextlib.ExitStack() as locks:
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                fcntl.flock(locks.enter_context((folder / f"{head.py_func.__name__}.lock").open("w")), how)
        except BlockingIOError:
            return False
        except OSError:
            pass  # then all processes compile
        FAMILIES[family].call()
    return True


def main(names: Sequence[str]) -> None:
    """Compile these families, in a child of `Warming`, until its parent is gone: those first that no other does."""
    die_with_parent(0)  # the parent keeps the other end of stdin open, and writes nothing
    for name in [name for name in names if not _compile(name, fcntl.LOCK_EX | fcntl.LOCK_NB)]:
        _compile(name, fcntl.LOCK_EX)


_COSTS = np.tile(np.array([9, 7, 5, 4, 3, 2, 2, 1]), 4)
_RANKS, _CAP = 4, 24


class _Family(NamedTuple):
    """Kernels that one process compiles, one after another.

    Attributes:
        head: "module:name" of a slow one, which shows whether the family is stored on disk.
        call: calls all of them that plans and batches call.
    """

    head: str
    call: Callable[[], object]


def kernel_families(
    balance: Balance,
    num_ranks: int,
    *,
    phases: Sequence[str],
    padded: bool,
    fixed: bool = False,
    accumulates: bool = False,
    decodes: bool = True,
) -> list[str]:
    """Return the names of the families that a loader's steps call, in the order of FAMILIES.

    Args:
        phases: the balanced ones.
        padded: whether LLM batches are padded to their longest sample.
        fixed: whether LLM batches are padded to a length.
        accumulates: whether steps have a given number of micro-steps.
        decodes: whether samples are decoded, too.
    """
    balanced = num_ranks > 1 and balance.scope != "none"
    wanted = {
        "teams": balanced and balance.teams is not None,
        "moves": balanced and (balance.assignment == "per_phase" or balance.scope in ("grouped", "grid")),
        "bins": fixed and balance.scope != "none",
        "pipeline": balance.num_stages is not None,
        "swaps": balanced and accumulates,
        "padded": padded,
        "patches": decodes and len(phases) > 1,
        "phases": balanced and len(phases) > 1,
        "packed": balanced,
        "microbatches": bool(balance.caps) or fixed or accumulates,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def warm(spec: BuildSpec) -> None:
    """Load every kernel that steps of `spec` call, or compile it, in this thread. No other thread remains."""
    load_numba()
    _warm_plans(spec.plan)
    if spec.shards is not None:
        modalities = spec.shards.recipe.modalities.values()
        _patches({array.dtype for modality in modalities for array in modality.arrays().values()})


def _warm_plans(spec: PlanSpec) -> None:
    """Compute the real costs of one sample, and plan synthetic samples: few enough to take some milliseconds, and in
    several microbatches if there are caps.
    """
    from orchdata.order.order import Order, Shuffle
    from orchdata.order.steps import GlobalBatches, StepTask
    from orchdata.planning.plan import make_plan

    samples = Order(len(_COSTS), shuffle=Shuffle(), seed=0)
    if spec.order.num_samples:
        first = np.zeros(1, np.int64)
        for phase in spec.costs.phases:
            spec.costs.costs(phase, first)
            spec.costs.positions(phase, first)
            if spec.balance.assignment == "per_phase" and phase != "llm":
                spec.costs.parts(phase, first)
    num_ranks = min(spec.num_ranks, _RANKS)
    balance = replace(
        spec.balance,
        max_tokens=dict.fromkeys(spec.balance.caps, _CAP) or None,
        max_samples=None if spec.balance.max_samples is None else len(_COSTS),
        group_size=None if spec.balance.group_size is None else max(1, num_ranks // 2),
        oversize="own",
    )
    if spec.accumulate > 1:  # Few ranks have more than a cap in a micro-step.
        balance = replace(balance, max_tokens=dict.fromkeys(balance.caps, int(_COSTS.sum())) or None)
    costs = _SyntheticCosts(spec.costs.phases, spec.costs.balanced, spec.costs.padded)
    synthetic = replace(
        spec,
        costs=costs,
        order=samples,
        batches=GlobalBatches(size=len(_COSTS)),
        balance=balance,
        num_ranks=num_ranks,
        accumulate=min(spec.accumulate, 2),
        ranks_per_node=None if spec.ranks_per_node is None else max(1, num_ranks // 2),
    )
    plan = make_plan(synthetic, StepTask(0, 0))
    # Small plans leave no ranks to renumber, nor samples that fit nowhere near, and all samples are within caps.
    if spec.balance.scope == "grid" or spec.ranks_per_node is not None:
        _renumber()
    if spec.balance.scope == "grid" or spec.balance.caps:
        _phases()
    if spec.balance.teams is not None:
        _teams()
    if spec.balance.num_stages is not None:
        plan.pipeline_order(0, spec.balance.num_stages)
    for phase in plan.phases:
        plan.loads(phase)
        plan.loads_unbalanced(phase)
        plan.lower_bound(phase)


@dataclass(frozen=True)
class _SyntheticCosts:
    """Costs of synthetic samples, each with one part in every phase."""

    phases: tuple[str, ...]
    balanced: tuple[str, ...]
    padded: Any
    exponent: ClassVar[int] = 0

    def costs(self, phase: str, row: Ints) -> Ints:
        return np.roll(_COSTS, self.phases.index(phase))[row]

    def positions(self, phase: str, row: Ints) -> Ints:
        return self.costs(phase, row)

    def loss_tokens(self, row: Ints) -> Ints:
        return row

    def parts(self, phase: str, row: Ints) -> Any:
        from orchdata.planning.parts import Parts

        costs = self.costs(phase, row)
        no_rank = np.full(len(row), -1, np.int32)
        return Parts(sample=np.arange(len(row)), part=row, positions=costs, tokens=costs, costs=costs, rank=no_rank)


def _phases() -> None:
    from orchdata.balancers.phases import balance_phases

    costs = {"encoder": _COSTS, "llm": _COSTS[::-1].copy()}
    balance_phases(costs, _RANKS)
    balance_phases(costs, _RANKS, sizes=_COSTS, max_size=40)


def _teams() -> None:
    """Share two long texts, next to samples of two phases, in each way."""
    from orchdata.planning.balance import Balance, Teams
    from orchdata.planning.sharing.shares import StepSamples
    from orchdata.planning.sharing.teams import share_in_teams

    is_long = np.arange(len(_COSTS)) % 16 == 0
    tokens, encoder = np.where(is_long, 90, _COSTS), np.where(is_long, 0, _COSTS)
    costs, owner = {"encoder": encoder, "llm": tokens}, np.zeros(len(_COSTS), np.int32)
    for balance in (Balance(), Balance(max_tokens=2 * _CAP), Balance(max_tokens=2 * _CAP, objective="sum")):
        step = StepSamples(costs, dict.fromkeys(balance.caps, tokens), tokens, _RANKS, balance, owner)
        for few in (step, step.take(np.arange(8))):  # So few are also searched.
            share_in_teams(few, Teams(largest=4, cut="trainer"), 0, 1, is_long[: few.num_samples])


def _moves() -> None:
    from orchdata.balancers.assignment import loads_by_rank_and_microbatch
    from orchdata.balancers.moves import balance_from, balance_grid, balance_grouped

    owner = np.arange(len(_COSTS), dtype=np.int32) % _RANKS
    loads_by_rank_and_microbatch(_COSTS, owner, owner, _RANKS, _RANKS)
    costs = {"encoder": _COSTS, "llm": _COSTS[::-1].copy()}
    balance_from(_COSTS, owner, _RANKS, sizes=_COSTS, ranks_per_node=2)
    for way in (balance_grid, balance_grouped):
        way(_COSTS, owner, _RANKS, 2)
        way(costs, owner, _RANKS, 2)
    _renumber()


def _renumber() -> None:
    from orchdata.balancers.placement import place_on_nodes
    from orchdata.native.minimal_move import relabel

    place_on_nodes(np.eye(_RANKS, dtype=np.int64), 2)
    owner = np.arange(len(_COSTS), dtype=np.int32) % _RANKS
    relabel(_COSTS, owner, owner.copy(), _RANKS)


def _packed() -> None:
    from orchdata.balancers.packed import balance

    balance(_COSTS, _RANKS)
    balance(_COSTS, _RANKS, equal_count=True)


def _microbatches() -> None:
    from orchdata.balancers.bins import LOOK_PAIRS, candidate_packings
    from orchdata.balancers.microbatches import split_microbatches
    from orchdata.native.microbatches.within_caps import looked_peaks

    rank = np.arange(len(_COSTS), dtype=np.int32) % _RANKS
    for in_step in (False, True):
        split_microbatches(_COSTS, rank, _RANKS, max_size=_CAP, oversize="own", in_step=in_step)
    both = np.stack([_COSTS, _COSTS], axis=1)
    next(candidate_packings(both, np.full(2, 160), 2, both, [(slice(None), _RANKS)], 1), None)
    looked_peaks(both, both, both, np.full(2, 160), np.zeros(len(both), np.int32), rank, 2, _RANKS, LOOK_PAIRS)


def _swaps() -> None:
    from orchdata.native.microbatches.microbatch import lower_all_peaks

    costs, ones = np.stack([_COSTS, _COSTS], axis=1), np.ones((len(_COSTS), 1), np.int64)
    rank, microbatch = np.arange(len(_COSTS), dtype=np.int32) % _RANKS, np.zeros(len(_COSTS), np.int32)
    group = np.zeros(_RANKS, np.int32)
    lower_all_peaks(costs, ones, ones[0] * len(_COSTS), group, 2, rank, microbatch, True, 1, np.empty(0, np.int32))


def _bins() -> None:
    from orchdata.balancers.bins import _items, pack_bins
    from orchdata.native.pack_bins import first_fit_bins

    first_fit_bins(_items(_COSTS, 12, None))
    pack_bins(_COSTS, 12, None, np.stack([_COSTS, _COSTS], axis=1), num_ranks=_RANKS)


def _padded() -> None:
    from orchdata.balancers.costs.phase import PhaseCost
    from orchdata.balancers.packed import balance_padded

    balance_padded(_COSTS, _RANKS, PhaseCost(1.0))


def _pipeline() -> None:
    from orchdata.balancers.microbatches import order_microbatches

    order_microbatches(np.ones((2, 4)), np.ones((2, 4)))


def _patches(dtypes: set[str] = frozenset({"bfloat16", "float32", "uint8"})) -> None:  # type: ignore[assignment]
    from orchdata.native.decoding import channel_table, patchify, split_complex

    split_complex(*(np.zeros(size, np.float32) for size in (2, 1, 1)))  # of clips
    for dtype in sorted(dtypes & {"bfloat16", "float32", "uint8"}):
        table = channel_table((0.5,) * 3, (0.5,) * 3, dtype)
        patchify(np.zeros((2, 2, 3), np.uint8), 1, 2, table, np.empty((4, 3), table.dtype))


FAMILIES: Final = {
    "teams": _Family("assign.teams:solve_teams", _teams),
    "moves": _Family("minimal_move:solve_from", _moves),
    "bins": _Family("pack_bins:pack", _bins),
    "pipeline": _Family("microbatches.pipeline:search", _pipeline),
    "swaps": _Family("microbatches.microbatch:lower_all_peaks", _swaps),
    "padded": _Family("assign.padded:solve_padded", _padded),
    "patches": _Family("decoding:_patchify", _patches),
    # Last: parts of teams, which are loaded by then.
    "phases": _Family("assign.phases:solve_joint", _phases),
    "packed": _Family("assign.packed:solve", _packed),
    "microbatches": _Family("microbatches.within_caps:looked_peaks", _microbatches),
}


if __name__ == "__main__":
    main(sys.argv[1:])
