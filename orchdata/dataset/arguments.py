"""The arguments of a DataLoader as one value: each field checks itself, `__post_init__` those that belong together."""

from __future__ import annotations

import itertools
import multiprocessing
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from multiprocessing.context import BaseContext
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, default_collate, default_convert

from orchdata.balancers.assignment import checked_count
from orchdata.balancers.costs.model import CostModel
from orchdata.batch.batch import ModelInputs
from orchdata.building.collate import StepInfo
from orchdata.building.step import BuildSpec, Content
from orchdata.delivery.policy import ErrorPolicy
from orchdata.engines.engine import DEFAULT_PREFETCH, OpensEngine, Workers
from orchdata.engines.warm import kernel_families
from orchdata.loaders.storage.files import Cache, cache_of_environment
from orchdata.order.order import SampleOrder, Shuffle
from orchdata.order.steps import Batches, GlobalBatches, is_stateful
from orchdata.planning.balance import Balance, Packed, Padded, as_balance, layout_of
from orchdata.planning.make_plan import PlanSpec, SampleCosts
from orchdata.ranks.parallel import DataParallel, Rank

if TYPE_CHECKING:
    from orchdata import CostModel

from orchdata.dataset.sharded import is_sharded

DEFAULT_THREADS: Final = 4
FAR_PREFETCH: Final = 4
"""With threads that read object storage: two steps wait for answers while two are built."""

IndexUse = Literal["build", "require"]
Quarantine = Iterable[tuple[str, str]] | str | PathLike[str]


class _NotGiven(int):
    """An integer that was not passed: it looks like any other, also in `help()`, and differs only by identity."""


DEFAULT_BATCH_SIZE: Final = _NotGiven(1)
_CUTTING: Final = ("cp", "sp", "context", "context_parallel")
"""Names of mesh dims over which every sequence is cut."""


class CollateWithStep(Protocol):
    """A function of the user's that makes a batch of samples, and has a parameter named `step`."""

    def __call__(self, samples: Any, /, *, step: StepInfo) -> Any: ...


CollateFn = Packed | Padded | ModelInputs | Callable[[Any], Any] | CollateWithStep
"""Makes a batch of a list of samples; with `batch_size=None` of one item."""


def _checked(check: Callable[[Any, str], Any]) -> Any:
    """A field of `Arguments`: `check(value, name)` returns its value, or raises."""
    return field(metadata={"check": check})


def _valid(is_valid: Callable[[Any], bool], what: str, error: type[Exception] = ValueError) -> Any:
    """A field of `Arguments` that is taken as it is, or refused."""

    def check(value: Any, name: str) -> Any:
        if not is_valid(value):
            raise error(f"{name} {what}, got {value!r:.80}")
        return value

    return _checked(check)


def _optional_count(value: Any, name: str, least: int = 1) -> int | None:
    return None if value is None else checked_count(value, name, least)


def _num_workers(value: Any, name: str) -> int:
    if isinstance(value, int) and value < 0:
        raise ValueError(
            f"num_workers option should be non-negative; use num_workers=0 to disable multiprocessing. "
            f"num_workers must be at least 0, got {value}"
        )
    return checked_count(value, name, 0)


def _context(value: Any, name: str) -> Any:
    known = multiprocessing.get_all_start_methods()
    if isinstance(value, str) and value not in known:
        raise ValueError(
            f"multiprocessing_context option should specify a valid start method in {known!r}, but got "
            f"multiprocessing_context={value!r}"
        )
    if not isinstance(value, str | BaseContext | None):
        raise TypeError(
            "multiprocessing_context option should be a valid context object or a string specifying the start method, "
            f"but got {name}={value}"
        )
    return value


def _shuffle(value: Any, name: str) -> Any:
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu" or len(np.unique(value)) != len(value):
            raise ValueError(
                f"shuffle= as an array has distinct rows, integers (num_samples,), got {value.dtype} {value.shape}; "
                "to repeat samples use od.Mixture(stop='repeat')"
            )
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
    how = "a list of (training tokens from which it applies, tokens of a step), ascending from 0"
    if not value or any(not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in value):
        raise ValueError(f"{name} is a number or {how}, got {value!r}")
    budgets = tuple(
        (checked_count(bound, f"a bound of {name}", 0), checked_count(tokens, name)) for bound, tokens in value
    )
    bounds = [bound for bound, _ in budgets]
    if bounds[0] != 0 or any(later <= bound for bound, later in itertools.pairwise(bounds)):
        raise ValueError(f"{name} is {how}; its bounds are {bounds}")
    return budgets


@dataclass(frozen=True, kw_only=True, eq=False)
class Arguments:
    """The arguments of a `DataLoader`, by name, checked and with defaults filled in: its docstring documents them.

    Attributes:
        rank: of `dp`.
        reaches_all: whether ranks can send each other anything.
        batch_size: None also where another size is given.
    """

    rank: Rank
    reaches_all: bool
    dataset: Any
    batch_size: int | None = _checked(
        lambda value, name: value if value is DEFAULT_BATCH_SIZE else _optional_count(value, name)
    )
    shuffle: bool | Shuffle | NDArray[np.int64] | None = _checked(_shuffle)
    sampler: Any
    batch_sampler: Any
    num_workers: int = _checked(_num_workers)
    collate_fn: CollateFn | None = _checked(_function)
    pin_memory: bool
    drop_last: bool
    timeout: float = _valid(
        lambda value: not isinstance(value, bool) and hasattr(value, "__float__") and value >= 0,
        "is a number of seconds, 0 for no limit: timeout option should be non-negative",
    )
    worker_init_fn: Callable[[int], None] | None = _checked(_function)
    multiprocessing_context: str | BaseContext | None = _checked(_context)
    generator: torch.Generator | None = _valid(
        lambda value: isinstance(value, torch.Generator | None), "must be a torch.Generator", TypeError
    )
    prefetch_factor: int | None = _checked(_optional_count)
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool
    num_threads: int = _checked(partial(_optional_count, least=0))
    worker_memory: int | None = _checked(_optional_count)
    global_batch_size: int | None = _checked(_optional_count)
    global_batch_tokens: tuple[tuple[int, int], ...] | None = _checked(_token_budgets)
    accumulate: int = _checked(checked_count)
    seed: int | None = _valid(
        lambda value: value is None or (hasattr(value, "__index__") and not isinstance(value, bool)),
        "must be an integer",
    )
    cost: CostModel | Callable[[Any], int] | Sequence[int] | None
    cost_id: str | None = _valid(
        lambda value: value is None or (isinstance(value, str) and value != ""),
        "must be a string that is not empty",
        TypeError,
    )
    balance: Balance
    dp: Any
    on_error: ErrorPolicy = _checked(lambda value, _: value if isinstance(value, ErrorPolicy) else ErrorPolicy(value))
    quarantine: Quarantine | None
    index: IndexUse = _valid(
        lambda value: value in get_args(IndexUse), f"must be one of {', '.join(map(repr, get_args(IndexUse)))}"
    )
    cache: Cache | None = _valid(
        lambda value: isinstance(value, Cache | None), "must be an od.Cache(folder, max_bytes=...)"
    )
    engine: OpensEngine | None = _valid(
        lambda value: value is None or (callable(getattr(value, "open", None)) and not isinstance(value, type)),
        "is a value with a method open(spec, workers), such as od.RayEngine()",
        TypeError,
    )

    def __post_init__(self) -> None:
        # Each field alone, then what depends on the kind of data and on the ranks.
        checked = {each.name: each.metadata.get("check") for each in fields(self)}
        if not self.in_shards:  # torch refuses orders together before it looks at their values
            checked["shuffle"] = None
        vars(self).update({name: check(getattr(self, name), name) for name, check in checked.items() if check})
        if self.num_threads is None:
            vars(self)["num_threads"] = DEFAULT_THREADS if self.in_shards else 0
        balance = as_balance(self.balance, equal_count=not self.in_shards)
        if balance.scope in ("grouped", "grid") and balance.group_size is None:  # groups are nodes
            if self.rank.ranks_per_node is None:
                raise ValueError(
                    f"balance={balance.scope!r} needs a group size: od.Balance(scope={balance.scope!r}, group_size=...)"
                    ", od.DataParallel(mesh, ranks_per_node=...), or LOCAL_WORLD_SIZE, which torchrun sets"
                )
            balance = replace(balance, group_size=self.rank.ranks_per_node)
        vars(self)["balance"] = balance
        if isinstance(self.collate_fn, ModelInputs) and self.balance.teams is not None:
            vars(self)["collate_fn"] = self.collate_fn.in_slices()
        self._check_workers()
        if self.in_shards:
            self._check_shards()
        else:
            self._check_items()
            vars(self)["shuffle"] = _shuffle(self.shuffle, "shuffle")
        self._check_sizes()
        if self.seed is not None and self.generator is not None:
            raise ValueError("seed and generator both given: the seed comes from one of them")
        if self.rank.num_peers > 1 and balance.assignment != "per_phase":
            raise ValueError(
                f"DataParallel.encoder_dims shares parts of samples among {self.rank.num_peers} peers, and "
                f"Balance.assignment={balance.assignment!r} encodes whole samples on their rank: use od.Balance("
                "assignment='per_phase') with an od.ShardDataset and od.Packed or od.Padded, or leave encoder_dims out"
            )
        check_teams(self.balance, self.collate_fn, self.dp, self.accumulate)
        if self.in_shards and self.cache is None:
            vars(self)["cache"] = cache_of_environment()

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
        """The global batches in samples; with a batch sampler, each is one of its batches. Raises ValueError for steps
        measured in tokens.
        """
        if self.global_batch_tokens is not None:
            raise ValueError(
                "global_batch_tokens counts LLM tokens, which must be in an index before anything is loaded, and this "
                "data set has no index: pass batch_size or global_batch_size, or use an od.ShardDataset"
            )
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
        layout = layout_of(self.collate_fn)
        phases: tuple[str, ...] = ("llm",)
        if isinstance(self.cost, CostModel):
            phases = self.cost.phases
        elif is_sharded(self.dataset):
            first = self.dataset.leaves[0].dataset
            phases = (*first.recipe.modalities, "llm")
        return kernel_families(
            self.balance,
            self.rank.size * self.rank.num_peers,
            phases=phases,
            padded=isinstance(layout, Padded),
            fixed=getattr(layout, "length", None) is not None and not getattr(layout, "concatenate", False),
            accumulates=self.accumulate > 1,
        )

    @cached_property
    def context(self) -> BaseContext | None:
        """What starts worker processes, if there are any. For data that may not pickle it is torch's."""
        given = self.multiprocessing_context
        if not self.num_workers or self.engine is not None:
            return None
        if given is None:
            has_server = self.in_shards and "forkserver" in multiprocessing.get_all_start_methods()
            given = "forkserver" if has_server else multiprocessing.get_start_method()
        return given if isinstance(given, BaseContext) else multiprocessing.get_context(given)

    def workers(self, *, reads_far: bool = False) -> Workers:
        """Return who builds steps. A map-style data set may not be safe to use from several threads, and its randomness
        follows `torch.manual_seed` in one thread only: it has none unless `num_threads` is given.
        """
        is_far = reads_far and not self.num_workers
        given = {each.name: vars(self)[each.name] for each in fields(Workers) if each.name in vars(self)}
        return Workers(
            **given
            | {
                "prefetch_factor": self.prefetch_factor or (FAR_PREFETCH if is_far else DEFAULT_PREFETCH),
                "multiprocessing_context": self.context,
                "in_turn": not self.in_shards,
                "num_ranks": self.rank.size * self.rank.num_peers,
            }
        )

    def read_by(self, files: Any) -> Any:
        """Return the `Files` of a data set as this loader reads them."""
        return files.limited(float(self.timeout)).cached(self.cache)

    def build_spec(
        self,
        costs: SampleCosts,
        order: SampleOrder,
        batches: Batches,
        content: Content,
        *,
        balance: Balance | None = None,
        accumulate: int | None = None,
    ) -> BuildSpec:
        """Return all that plans and batches depend on: `balance` and `accumulate` as they are here, or as given."""
        # Only plans per phase depend on nodes: other ranks, on nodes of different sizes, need not agree on them.
        node = self.rank.ranks_per_node
        if self.balance.assignment != "per_phase" or node is None or self.rank.size % node:
            node = None
        plan = PlanSpec(
            costs=costs,
            order=order,
            batches=batches,
            balance=balance or self.balance,
            num_ranks=self.rank.size,
            ranks_per_node=node,
            accumulate=accumulate or self.accumulate,
            num_peers=self.rank.num_peers,
        )
        return BuildSpec(plan=plan, rank=self.rank.rank, content=content, peer=self.rank.peer)

    def _check_workers(self) -> None:
        """Raise ValueError for arguments of workers that would have no effect, as torch does."""
        for_ours = [name for name in ("num_threads", "worker_memory") if getattr(self, name)]
        ahead = [name for name in ("timeout", "prefetch_factor", "persistent_workers") if getattr(self, name)]
        is_shared = self.rank.size * self.rank.num_peers > 1 and self.engine is None
        has_state = not (self.by_torch or self.in_shards or is_shared) and is_stateful(self.dataset)
        has_context, is_here = self.multiprocessing_context is not None, not self.num_workers
        refused = {
            "multiprocessing_context can only be used with multi-process loading (num_workers > 0), but got num_workers"
            f"={self.num_workers}: leave it out, or pass num_workers": has_context and is_here,
            f"{', '.join(for_ours)} is for steps that this library builds, and torch's own DataLoader reads an "
            "IterableDataset, and map-style data without costs: leave it out (num_workers=4 reads in four processes). "
            "With cost= or on_error='skip' this library builds the steps of map-style data": self.by_torch and for_ours,
            f"{type(self.dataset).__name__} has a state of its own (state_dict), which is stored where torch's own "
            "DataLoader reads the data: leave out cost=, on_error='skip' and engine=, or make the data set a function "
            "of the index": has_state,
            "engine= builds steps in workers, and num_workers is 0: pass num_workers=, their number "
            "for each rank, or leave engine out to build steps in this process": self.engine is not None and is_here,
            "multiprocessing_context is for worker processes of this machine: leave it out, or engine": (
                self.engine is not None and has_context
            ),
            "worker_memory is for worker processes: leave it out, or pass num_workers": is_here and self.worker_memory,
            "worker_init_fn is for worker processes, and this loader builds with threads of the training process: it "
            "would seed the training process's random state. Leave it out, or pass num_workers": (
                is_here and self.num_threads and self.worker_init_fn is not None
            ),
            f"{', '.join(ahead)} needs threads or workers, and this loader builds each batch when it is requested: "
            "leave it out, or pass num_workers": is_here and not self.num_threads and ahead,
        }
        _refuse(refused)

    def _check_shards(self) -> None:
        """Raise ValueError or TypeError for arguments that data in shards do not have."""
        called: Any = self.collate_fn.func if isinstance(self.collate_fn, partial) else self.collate_fn
        if called is default_collate or called is default_convert:
            raise TypeError(
                f"collate_fn={called.__name__} takes tensors, and samples of shards are od.Sample objects of any "
                "length: leave collate_fn out for packed batches, pass od.Padded() for padded ones, or a function of "
                "yours that takes a list of od.Sample"
            )
        refused = {
            _COST_ID: self.cost_id is not None,
            f"a {type(self.dataset).__name__} has its own order: use shuffle= in place of a sampler": (
                self.sampler is not None or self.batch_sampler is not None
            ),
            f"cost for a ShardDataset is an od.CostModel, got {type(self.cost).__name__}: od.hf.cost(model) of a "
            "Hugging Face model, or od.CostModel(llm=od.TransformerCost(...)); functions are for map-style data": (
                not isinstance(self.cost, CostModel | None)
            ),
        }
        _refuse(refused)

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
            }
            unexpected = "DataLoader with IterableDataset: expected unspecified {0} option, but got {0}={1}"
            refused |= {unexpected.format(name, value): value is not None for name, value in given.items()} | {
                "engine= builds steps that are planned, and an IterableDataset is read by torch's own workers: leave "
                "engine out, or give the data as shards or as a map-style data set": self.engine is not None,
                f"{type(self.dataset).__name__} is an IterableDataset, and this loader's samples are shared by "
                f"{self.rank.size} ranks: an IterableDataset cannot be split over ranks automatically. For shards, use "
                "od.ShardDataset, which is balanced and resumable. For another data set that splits itself by rank, "
                "create a loader for this rank only, with dp=(0, 1); od.post_balance(loader) balances what each rank's "
                "own loader yields": self.rank.size > 1,
                "cost balances samples over ranks; an IterableDataset is read by one: leave it out": (
                    self.cost is not None
                ),
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
        sizes = {
            "batch_size": None if self.batch_size is DEFAULT_BATCH_SIZE else self.batch_size,
            "global_batch_size": self.global_batch_size,
            "global_batch_tokens": tokens[0][1] if tokens is not None and len(tokens) == 1 else tokens,
        }
        given = {name: size for name, size in sizes.items() if size is not None}
        others = [name for name in given if name != "batch_size"]
        words = " and ".join(f"{name}={size}" for name, size in given.items())
        refused = {
            f"accumulate={self.accumulate} cuts steps of an od.ShardDataset into microbatches; other data give one "
            f"result of collate_fn per step: leave it out, and step the optimizer after each {self.accumulate} "
            "batches, with the losses divided by their number, as with torch's loader": (
                self.accumulate > 1 and not self.in_shards
            ),
            f"accumulate={self.accumulate} cuts steps of as many samples, and steps of global_batch_tokens have "
            "different numbers: give batch_size or global_batch_size, or leave accumulate out and cap "
            "Balance(max_tokens=...)": self.accumulate > 1 and tokens is not None,
            f"batch_sampler sets the batch sizes: leave {', '.join(others)} out": has_sampler and others,
            f"{words} {'both' if len(given) == 2 else 'all'} given: pass exactly one": (
                not has_sampler and len(given) > 1
            ),
            "batch_size=None takes a map-style data set's samples one by one; steps of a ShardDataset have sizes: pass "
            "batch_size=1, or global_batch_size": self.batch_size is None and not others and self.in_shards,
        }
        _refuse(refused)
        if has_sampler or others:
            vars(self)["batch_size"] = None


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
    cut = [name for dim, name in dims if name in _CUTTING and mesh.size(dim) > 1]
    refused = {
        "DataParallel.encoder_dims, whose peers get the features of whole samples: leave encoder_dims out": (
            isinstance(dp, DataParallel) and dp.encoder_dims
        ),
        "rows of od.Padded, which are whole: use od.Packed(), or od.hf.Inputs without padded=": isinstance(
            layout, Padded
        ),
        "od.Packed(length=...), with or without concatenate=True, where no sample is longer than a microbatch: leave "
        "length out, and cap microbatches by Balance(max_tokens=...)": layout is not None and layout.length,
        'od.hf.Inputs and cut="trainer", with which each member would train the whole sequence: leave cut out, or use '
        "od.Packed(), and a trainer that cuts sequences, as by od.megatron_packed": (
            isinstance(collate_fn, ModelInputs) and balance.teams.cut == "trainer"
        ),
        "a collate_fn of yours, which does not know them: use od.Packed(), and change its batches in the loop": (
            layout is None and collate_fn is not None
        ),
        "Teams(mixed=False) and accumulate=, whose micro-steps have no room for one size: cap microbatches by "
        "Balance(max_tokens=...)": accumulate > 1 and not balance.teams.mixed,
        f"a mesh that cuts every sequence over its dim {', '.join(cut)}: make these ranks data-parallel, and teams "
        "take their place": cut,
    }
    _refuse({f"Balance.teams does not work with {what}; or leave teams out": given for what, given in refused.items()})
