"""The arguments of a DataLoader as one value, checked, and the data set that it prepares of them."""

from __future__ import annotations

import itertools
import multiprocessing
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from multiprocessing.context import BaseContext
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, default_collate, default_convert
from typing_extensions import TypeIs

from orchdata.balancers.assignment import checked_count
from orchdata.balancers.costs.model import CostModel
from orchdata.batch.batch import ModelInputs
from orchdata.building.collate import StepInfo
from orchdata.building.step import BuildSpec, Content
from orchdata.delivery.policy import ErrorPolicy
from orchdata.engines.engine import DEFAULT_PREFETCH, OpensEngine, Workers
from orchdata.engines.warm import kernel_families
from orchdata.loaders.errors import DataError
from orchdata.loaders.storage.files import Cache, cache_of_environment
from orchdata.loop.loop import Position
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import SampleOrder, Shuffle
from orchdata.order.steps import Batches, GlobalBatches, Steps, StreamSteps, TokenBatches, is_stateful
from orchdata.planning.balance import Balance, Packed, Padded, as_balance, layout_of
from orchdata.planning.parts import SampleCosts
from orchdata.planning.plan import PlanSpec
from orchdata.planning.windows import WindowBatches
from orchdata.ranks.parallel import DataParallel, Rank

if TYPE_CHECKING:
    from orchdata import Mixture, ShardDataset
    from orchdata.dataset.prepared import UsableRows

IndexUse = Literal["build", "require"]
Quarantine = Iterable[tuple[str, str]] | str | PathLike[str]


class _NotGiven(int):
    """An integer that was not passed: it looks like any other, also in `help()`, and differs only by identity."""


DEFAULT_BATCH_SIZE: Final = _NotGiven(1)


class CollateWithStep(Protocol):
    """A function of the user's that makes a batch of samples, and has a parameter named `step`."""

    def __call__(self, samples: Any, /, *, step: StepInfo) -> Any: ...


CollateFn = Packed | Padded | ModelInputs | Callable[[Any], Any] | CollateWithStep
"""Makes a batch of a list of samples; with `batch_size=None` of one item."""


def is_sharded(data: object) -> TypeIs[ShardDataset | Mixture]:
    """Return whether samples are in shards, with an index. The data set brings what lists, measures and indexes shards:
    a loader imports none of it.
    """
    return hasattr(type(data), "orchdata_preloads")


class Arguments:
    """The arguments of a `DataLoader`, by name, checked and with defaults filled in: its docstring documents them. One
    without a line here is taken as it is, and checked by who uses it.

    Attributes:
        rank: of `dp`.
        reaches_all: whether ranks can send each other anything.
        batch_size: None also where another size is given.
    """

    rank: Rank
    reaches_all: bool
    dataset: Any
    batch_size: int | None
    shuffle: bool | Shuffle | NDArray[np.int64] | None
    sampler: Any
    batch_sampler: Any
    num_workers: int
    collate_fn: CollateFn | None
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: str | BaseContext | None
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    in_order: bool
    num_threads: int
    worker_memory: int | None
    global_batch_size: int | None
    global_batch_tokens: tuple[tuple[int, int], ...] | None
    accumulate: int
    seed: int | None
    cost: CostModel | Callable[[Any], int] | Sequence[int] | None
    cost_id: str | None
    balance: Balance
    dp: Any
    on_error: ErrorPolicy
    quarantine: Quarantine | None
    index: IndexUse
    cache: Cache | None
    engine: OpensEngine | None

    def __init__(self, **given: Any) -> None:
        # Each argument alone, then what depends on the kind of data and on the ranks.
        vars(self).update(given)
        vars(self).update({name: check(given[name], name) for name, check in _CHECKS.items()})
        if self.num_threads is None:
            self.num_threads = 4 if self.in_shards else 0
        if self.cache is None and self.in_shards:
            self.cache = cache_of_environment()
        self.balance = as_balance(self.balance, equal_count=not self.in_shards)
        scope, per_node = self.balance.scope, self.rank.ranks_per_node
        if scope in ("grouped", "grid") and self.balance.group_size is None:  # groups are nodes
            if per_node is None:
                raise ValueError(
                    f"balance={scope!r} needs a group size: od.Balance(scope={scope!r}, group_size=...), "
                    "od.DataParallel(mesh, ranks_per_node=...), or LOCAL_WORLD_SIZE, which torchrun sets"
                )
            self.balance = replace(self.balance, group_size=per_node)
        if isinstance(self.collate_fn, ModelInputs) and self.balance.teams is not None:
            self.collate_fn = self.collate_fn.in_slices()
        self._check_workers()
        if self.in_shards:
            called: Any = getattr(self.collate_fn, "func", self.collate_fn)  # of functools.partial
            if called is default_collate or called is default_convert:
                raise TypeError(
                    f"collate_fn={called.__name__} takes tensors, and samples of shards are od.Sample objects: leave "
                    "collate_fn out, pass od.Padded(), or a function of yours that takes a list of od.Sample"
                )
            sampled = self.sampler is not None or self.batch_sampler is not None
            refused = {
                _COST_ID: self.cost_id is not None,
                f"a {type(self.dataset).__name__} has its own order: use shuffle= in place of a sampler": sampled,
                f"cost for a ShardDataset is an od.CostModel, got {type(self.cost).__name__}: od.hf.cost(model) of a "
                "Hugging Face model, or od.CostModel(llm=od.TransformerCost(...)); functions are for map-style data": (
                    not isinstance(self.cost, CostModel | None)
                ),
            }
            _refuse(refused)
        else:
            self._check_items()  # as torch: orders are refused together before their values are
        self.shuffle = _shuffle(self.shuffle, "shuffle")
        self._check_sizes()
        if self.seed is not None and self.generator is not None:
            raise ValueError("seed and generator both given: the seed comes from one of them")
        if self.rank.num_peers > 1 and self.balance.assignment != "per_phase":
            raise ValueError(
                f"DataParallel.encoder_dims shares parts of samples among {self.rank.num_peers} peers, and "
                f"Balance.assignment={self.balance.assignment!r} encodes whole samples on their rank: use "
                "assignment='per_phase' with an od.ShardDataset, or leave encoder_dims out"
            )
        check_teams(self.balance, self.collate_fn, self.dp, self.accumulate)

    @cached_property
    def in_shards(self) -> bool:
        """Whether samples are in shards, with an index."""
        return is_sharded(self.dataset)

    @property
    def is_iterable(self) -> bool:
        """Whether the data set can only be iterated."""
        return isinstance(self.dataset, IterableDataset)

    @cached_property
    def by_torch(self) -> bool:
        """Whether torch's own loader reads the data set: no step is planned, and none built on other machines."""
        is_ours = self.in_shards or self.cost is not None or self.engine is not None or self.rank.check_plan_every
        return self.is_iterable or not (is_ours or self.on_error.action == "skip")

    @property
    def batches(self) -> GlobalBatches:
        """The global batches in samples; with a batch sampler, each is one of its batches."""
        size = self.global_batch_size or (self.batch_size or 1) * self.rank.size * self.accumulate
        return GlobalBatches(size=1 if self.batch_sampler is not None else size, drop_last=self.drop_last)

    @property
    def batched(self) -> bool:
        """Whether samples are taken in batches, and not one by one."""
        return (self.batch_size, self.batch_sampler, self.global_batch_size) != (None, None, None)

    @property
    def shuffled(self) -> Shuffle | None:
        """How the loader's own order is shuffled; None if it is not."""
        if isinstance(self.shuffle, Shuffle):
            return self.shuffle
        return None if isinstance(self.shuffle, np.ndarray) or not self.shuffle else Shuffle()

    @property
    def order_seed(self) -> int:
        """The seed of the loader's own order."""
        return operator.index(self.seed or 0) if self.generator is None else int(self.generator.initial_seed())

    @property
    def families(self) -> list[str]:
        """The kernels that steps need, as far as phases are known before the data set is read."""
        layout = layout_of(self.collate_fn) or Packed()
        phases: tuple[str, ...] = ("llm",)
        if isinstance(self.cost, CostModel):
            phases = self.cost.phases
        elif self.in_shards:
            phases = (*self.dataset.leaves[0].dataset.recipe.modalities, "llm")
        return kernel_families(
            self.balance,
            self.rank.size * self.rank.num_peers,
            phases=phases,
            padded=isinstance(layout, Padded),
            fixed=layout.length is not None and not layout.concatenate,
            accumulates=self.accumulate > 1,
        )

    @cached_property
    def context(self) -> BaseContext | None:
        """What starts worker processes, if there are any. For data that may not pickle it is torch's."""
        given = self.multiprocessing_context
        if not self.num_workers or self.engine is not None:
            return None
        if given is None and self.in_shards and "forkserver" in multiprocessing.get_all_start_methods():
            given = "forkserver"
        return given if isinstance(given, BaseContext) else multiprocessing.get_context(given)

    def workers(self, *, reads_far: bool = False) -> Workers:
        """Return who builds steps. A map-style data set may not be safe to use from several threads, and its randomness
        follows `torch.manual_seed` in one thread only: it has none unless `num_threads` is given.
        """
        given = {each.name: vars(self)[each.name] for each in fields(Workers) if each.name in vars(self)}
        # With threads that read object storage two steps wait for answers while two are built.
        given["prefetch_factor"] = self.prefetch_factor or (
            4 if reads_far and not self.num_workers else DEFAULT_PREFETCH
        )
        given |= {"multiprocessing_context": self.context, "in_turn": not self.in_shards}
        return Workers(**given, num_ranks=self.rank.size * self.rank.num_peers)

    def build_spec(
        self, costs: SampleCosts, order: SampleOrder, batches: Batches, content: Content, **planned: Any
    ) -> BuildSpec:
        """Return all that plans and batches depend on. `planned` is of the plan, where it differs from what is here."""
        # Only plans per phase depend on nodes: other ranks, on nodes of different sizes, need not agree on them.
        rank, node = self.rank, self.rank.ranks_per_node if self.balance.assignment == "per_phase" else None
        whole = node if node and rank.size % node == 0 else None
        own: dict[str, Any] = {"balance": self.balance, "accumulate": self.accumulate, "ranks_per_node": whole}
        plan = PlanSpec(
            costs=costs, order=order, batches=batches, num_ranks=rank.size, num_peers=rank.num_peers, **own | planned
        )
        return BuildSpec(plan=plan, rank=rank.rank, content=content, peer=rank.peer)

    def _check_workers(self) -> None:
        """Raise ValueError for arguments of workers that would have no effect, as torch does, and where the state of a
        data set would be lost.
        """
        here, fork = not self.num_workers, ["multiprocessing_context"]
        for_processes = [*fork, "engine", "worker_memory", *(["worker_init_fn"] if self.num_threads else [])]
        elsewhere = fork if self.engine is not None else []
        unused = {
            "multi-process loading (num_workers > 0), but got 0: pass num_workers": for_processes if here else [],
            "threads or workers, and this loader builds each batch when it is requested: pass num_workers": (
                ["timeout", "prefetch_factor", "persistent_workers"] if here and not self.num_threads else []
            ),
            "steps that this library builds, as with cost= or on_error='skip', and here torch's own DataLoader reads "
            "the data: pass num_workers": ["num_threads", "worker_memory"] if self.by_torch else [],
            "worker processes of this machine, and engine= has others: leave engine out": elsewhere,
        }
        for what, names in unused.items():
            if given := [name for name in names if getattr(self, name)]:
                raise ValueError(f"{', '.join(given)} is for {what}, or leave it out")
        is_shared = self.rank.size * self.rank.num_peers > 1 and self.engine is None
        if not (self.by_torch or self.in_shards or is_shared) and is_stateful(self.dataset):
            raise ValueError(
                f"{type(self.dataset).__name__} has a state of its own (state_dict), which is stored where torch's own "
                "DataLoader reads the data: leave out cost=, on_error='skip' and engine=, or make the data set a "
                "function of the index"
            )

    def _check_items(self) -> None:
        """Raise ValueError or TypeError for arguments that data of torch's do not have, or that exclude each other."""
        if layout_of(self.collate_fn) is not None or isinstance(self.cost, CostModel):
            raise TypeError(
                "Packed, Padded and CostModel are for a ShardDataset; a map-style data set has its own samples"
            )
        is_listed, has_sampler = isinstance(self.shuffle, np.ndarray), self.sampler is not None
        is_shuffled = not is_listed and bool(self.shuffle)
        # A caller who copies torch's default passes batch_size=1.
        has_others = self.batch_size != DEFAULT_BATCH_SIZE or is_shuffled or has_sampler or self.drop_last
        of_shards = {
            "cache=": self.cache,
            "an array as shuffle= (for other data use sampler=)": is_listed,
            "quarantine=": self.quarantine is not None,
            "global_batch_tokens=": self.global_batch_tokens,
            "ErrorPolicy.blank": self.on_error.blank,
            "Balance.teams": self.balance.teams,
            "Balance.max_tokens": self.balance.caps,
        }
        of_index = "is for an od.ShardDataset, whose index names its samples and their lengths: leave it out"
        refused: dict[str, Any] = {
            _COST_ID: self.cost_id is not None and (self.is_iterable or not callable(self.cost)),
            **{f"{name} {of_index}": is_given for name, is_given in of_shards.items()},
        }
        if self.is_iterable:
            given = {
                "shuffle": self.shuffle if is_shuffled else None,
                "sampler": self.sampler,
                "batch_sampler": self.batch_sampler,
                "cost": self.cost,
                "engine": self.engine,
            }
            unexpected = "DataLoader with IterableDataset: expected unspecified {0} option, but got {0}={1}"
            refused |= {unexpected.format(name, value): value is not None for name, value in given.items()} | {
                f"{type(self.dataset).__name__} is an IterableDataset, and this loader's samples are shared by "
                f"{self.rank.size} ranks: an IterableDataset cannot be split over ranks automatically. For shards, use "
                "od.ShardDataset, which is balanced and resumable. For another data set that splits itself by rank, "
                "create a loader for this rank only, with dp=(0, 1); od.post_balance(loader) balances what each rank's "
                "own loader yields": self.rank.size > 1,
                "on_error='skip' continues with the next sample, and an IterableDataset that raised has none: skip in "
                "its __iter__": self.on_error.action == "skip",
            }
        refused |= {
            "sampler option is mutually exclusive with shuffle": has_sampler and is_shuffled,
            "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last": (
                self.batch_sampler is not None and has_others
            ),
            "batch_size=None option disables auto-batching and is mutually exclusive with drop_last: there is no "
            "remainder to drop": self.batch_size is None and self.drop_last,
        }
        _refuse(refused)
        refuse_parts(self.balance, "the items of a map-style data set are whole")

    def _check_sizes(self) -> None:
        """Raise ValueError for several sizes, and for shards without a size; `batch_size` is None where another size is
        given.
        """
        tokens, has_sampler = self.global_batch_tokens, self.batch_sampler is not None
        others = [name for name in ("global_batch_size", "global_batch_tokens") if getattr(self, name) is not None]
        has_size = self.batch_size is not None and self.batch_size is not DEFAULT_BATCH_SIZE
        given = [*(["batch_size"] if has_size else []), *others]
        refused = {
            f"accumulate={self.accumulate} cuts steps of as many samples of an od.ShardDataset into microbatches: "
            "leave it out. With global_batch_tokens cap Balance(max_tokens=...); for other data, step the optimizer "
            f"after each {self.accumulate} batches, with the losses divided by their number, as with torch's loader": (
                self.accumulate > 1 and (tokens is not None or not self.in_shards)
            ),
            f"batch_sampler sets the batch sizes: leave {', '.join(others)} out": has_sampler and others,
            f"{' and '.join(given)} are given: pass exactly one": not has_sampler and len(given) > 1,
            "batch_size=None takes a map-style data set's samples one by one; steps of a ShardDataset have sizes: pass "
            "batch_size=1, or global_batch_size": self.batch_size is None and not others and self.in_shards,
        }
        _refuse(refused)
        if has_sampler or others:
            self.batch_size = None


def _valid(is_valid: Callable[[Any], bool], what: str, error: type[Exception] = ValueError) -> Any:
    """A check of an argument that is taken as it is, or refused."""

    def check(value: Any, name: str) -> Any:
        if not is_valid(value):
            raise error(f"{name} {what}, got {value!r:.80}")
        return value

    return check


def _optional_count(value: Any, name: str, least: int = 1) -> int | None:
    return None if value is None else checked_count(value, name, least)


def _context(value: Any, name: str) -> Any:
    if isinstance(value, str) and value not in (methods := multiprocessing.get_all_start_methods()):
        raise ValueError(f"{name} option should specify a valid start method in {methods}, got {value!r}")
    if not isinstance(value, str | BaseContext | None):
        raise TypeError(f"{name} option should be a valid context or a start method, got {value!r:.80}")
    return value


def _num_workers(value: Any, name: str) -> int:
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{name} option should be non-negative, got {value}")  # torch's words
    return checked_count(value, name, 0)


def _shuffle(value: Any, name: str) -> Any:
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu" or len(np.unique(value)) != len(value):
            how = f"distinct rows, integers (num_samples,), got {value.dtype} {value.shape}"
            raise ValueError(f"shuffle= as an array has {how}; to repeat samples use od.Mixture(stop='repeat')")
        return value.astype(np.int64)
    # An option of a command line is often 0 or 1, which torch takes.
    is_switch = value is None or (isinstance(value, int | np.bool_) and value in (0, 1))
    if not is_switch and not isinstance(value, Shuffle):
        raise ValueError(f"{name} must be True, False, an od.Shuffle or an array of rows, got {value!r}")
    return value


def _function(value: Any, name: str) -> Any:
    """A function, or a layout; a layout's class is callable."""
    if isinstance(value, type) and (value in (Packed, Padded) or hasattr(value, "layout")):
        raise TypeError(f"{name} got the class {value.__name__}: create one, as in {value.__name__}(...)")
    if value is not None and layout_of(value) is None and not callable(value):
        raise TypeError(f"{name} must be callable, got {value!r}")
    return value


def _token_budgets(value: Any, name: str) -> tuple[tuple[int, int], ...] | None:
    """Return pairs (training tokens before, tokens of a step)."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        return ((0, checked_count(value, name)),)
    pairs = value if all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in value) else []
    budgets = tuple((checked_count(bound, name, 0), checked_count(tokens, name)) for bound, tokens in pairs)
    bounds = [bound for bound, _ in budgets]
    if bounds[:1] != [0] or any(later <= bound for bound, later in itertools.pairwise(bounds)):
        how = "a list of (training tokens from which it applies, tokens of a step), ascending from 0"
        raise ValueError(f"{name} is a number or {how}, got {value!r}")
    return budgets


_CHECKS: Final[dict[str, Callable[[Any, str], Any]]] = {
    "batch_size": lambda value, name: value if value is DEFAULT_BATCH_SIZE else _optional_count(value, name),
    "num_workers": _num_workers,
    "collate_fn": _function,
    "timeout": _valid(
        lambda value: not isinstance(value, bool) and hasattr(value, "__float__") and value >= 0,
        "is a number of seconds, 0 for no limit: timeout option should be non-negative",
    ),
    "worker_init_fn": _function,
    "multiprocessing_context": _context,
    "generator": _valid(
        lambda value: isinstance(value, torch.Generator | None), "must be a torch.Generator", TypeError
    ),
    "prefetch_factor": _optional_count,
    "num_threads": partial(_optional_count, least=0),
    "worker_memory": _optional_count,
    "global_batch_size": _optional_count,
    "global_batch_tokens": _token_budgets,
    "accumulate": checked_count,
    "seed": _valid(
        lambda value: value is None or (hasattr(value, "__index__") and not isinstance(value, bool)),
        "must be an integer",
    ),
    "cost_id": _valid(
        lambda value: value is None or (isinstance(value, str) and value != ""),
        "must be a string that is not empty",
        TypeError,
    ),
    "on_error": lambda value, _: value if isinstance(value, ErrorPolicy) else ErrorPolicy(value),
    "index": _valid(
        lambda value: value in get_args(IndexUse), f"must be one of {', '.join(map(repr, get_args(IndexUse)))}"
    ),
    "cache": _valid(lambda value: isinstance(value, Cache | None), "must be an od.Cache(folder, max_bytes=...)"),
    "engine": _valid(
        lambda value: value is None or (callable(getattr(value, "open", None)) and not isinstance(value, type)),
        "is a value with a method open(spec, workers), such as od.RayEngine()",
        TypeError,
    ),
}
_COST_ID: Final = "cost_id names the costs of a map-style data set that a function given as cost= computes"


def _refuse(refused: Mapping[str, Any]) -> None:
    """Raise ValueError with the first message whose condition holds."""
    for message, holds in refused.items():
        if holds:
            raise ValueError(message)


def refuse_parts(balance: Balance, reason: str) -> None:
    """Raise ValueError if parts of samples are to be assigned, and only whole samples can be."""
    if balance.assignment == "per_phase":
        raise ValueError(
            f"Balance.assignment='per_phase' gives ranks parts of samples, but {reason}: it needs an od.ShardDataset "
            "with od.Packed or od.Padded; use assignment='joint'"
        )


def check_teams(balance: Balance, collate_fn: object, dp: Any = None, accumulate: int = 1) -> None:
    """Raise ValueError, with what to do instead, for arguments of a loader under which no team can share a sequence."""
    if balance.teams is None:
        return
    layout, mesh = layout_of(collate_fn), dp.mesh if isinstance(dp, DataParallel) else dp
    dims = enumerate(getattr(mesh, "mesh_dim_names", None) or ())
    cutting = ("cp", "sp", "context", "context_parallel")  # dims over which every sequence is cut
    cut = [name for dim, name in dims if name in cutting and mesh.size(dim) > 1]
    is_packed = collate_fn is None or (isinstance(layout, Packed) and not layout.length)
    sliced = isinstance(collate_fn, ModelInputs) and balance.teams.cut == "trainer"
    refused = {
        "DataParallel.encoder_dims, whose peers get the features of whole samples": (
            isinstance(dp, DataParallel) and dp.encoder_dims
        ),
        "rows of od.Padded, and what a collate_fn of yours makes, which are of whole samples, nor where od.Packed("
        "length=..., concatenate=...) has none above a microbatch: use od.Packed(), leave length out": not is_packed,
        'od.hf.Inputs and cut="trainer", with which each member would train the whole sequence: leave cut out': sliced,
        "Teams(mixed=False) and accumulate=, whose micro-steps have no room for one size: cap microbatches by "
        "Balance(max_tokens=...)": accumulate > 1 and not balance.teams.mixed,
        f"a mesh that cuts every sequence over its dim {', '.join(cut)}: make these ranks data-parallel": cut,
    }
    _refuse({f"Balance.teams does not work with {what}; or leave teams out": given for what, given in refused.items()})


@dataclass(frozen=True, kw_only=True)
class PreparedDataset:
    """A data set, ready to be planned and read."""

    spec: BuildSpec
    fingerprint: Mapping[str, Any]  # what the loaders of all ranks must agree with, JSON-safe
    failures: Sequence[DataError]  # samples known to be bad before anything is decoded: the order does not contain them
    num_indexed: int  # samples, with bad ones
    torch_steps: Steps | None = None  # of an epoch, if they are not those of the plan
    rows: tuple[UsableRows, ...] = ()  # of shards: of the data set, or of each source, which bind states to it
    of_processor: tuple[str, ...] = ()  # names that the recipe has from a Hugging Face processor
    filler: Callable[..., Any] | None = None  # opens what fills the loader's cache, as `filler_of`
    num_lost: int = 0  # estimated samples of damaged shards that are not even indexed
    none_chosen: str = ""  # the `filter`, `split` and others that choose no sample; empty if they choose any
    on_first_step: Callable[[], None] | None = None  # called when the first step was delivered
    sampler: Any = None  # these three: the defaults that torch's loader has; None for our own order or layout
    batch_sampler: Any = None
    collate_fn: Any = None

    @property
    def steps(self) -> Steps:
        """The steps of each epoch."""
        return self.torch_steps or self.spec.plan.steps

    def known_count(self, position: Position) -> int | None:
        """Return the optimizer steps of its epoch; None if they are known only at its end."""
        try:
            return self.steps.count(position.epoch, position.draw)
        except (TypeError, NotImplementedError):
            return None

    @property
    def is_iterable(self) -> bool:
        """Whether the data set can only be iterated."""
        return isinstance(self.steps, StreamSteps)

    @property
    def num_samples(self) -> int:
        """Usable samples of the data set."""
        return self.spec.plan.order.num_samples

    def with_order(self, order: MixtureOrder) -> PreparedDataset:
        """Return the same mixture with another order."""
        batches = self.spec.plan.batches
        if isinstance(batches, TokenBatches):
            batches = replace(batches, sums=order)
        elif isinstance(batches, WindowBatches):
            batches = replace(batches, order=order, sums=order)
        spec = replace(self.spec, plan=replace(self.spec.plan, order=order, batches=batches))
        return replace(self, spec=spec)
