"""The arguments of a DataLoader, checked, and the value that is built from them for any data set: a PreparedDataset."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Final, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.balancers.checks import checked_count
from orchdata.batch.batch import ModelInputs
from orchdata.building.spec import BuildSpec, Content
from orchdata.dataset.resume.mixture import dump_mixture
from orchdata.dataset.resume.rows import SourceRows, bound, dump_rows
from orchdata.delivery.policy import ErrorPolicy
from orchdata.loaders.errors import DataError
from orchdata.loaders.storage.node.cache import Cache
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import SampleOrder, Shuffle
from orchdata.order.steps import Batches, GlobalBatches, Steps, StreamSteps, Sums, TokenBatches
from orchdata.planning.balance import Balance, as_balance
from orchdata.planning.layout import Packed, Padded, fixed_length, layout_of
from orchdata.planning.make_plan import PlanSpec, SampleCosts
from orchdata.planning.windows import WindowBatches
from orchdata.ranks.parallel import DataParallel, Rank

IndexUse = Literal["build", "require"]
Quarantine = Iterable[tuple[str, str]] | str | PathLike[str]


class _NotGiven(int):
    """An integer that was not passed: it looks like any other, also in `help()`, and differs only by identity."""


DEFAULT_BATCH_SIZE: Final = _NotGiven(1)
_CUTTING: Final = ("cp", "sp", "context", "context_parallel")
"""Names of mesh dims over which every sequence is cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBudgets:
    """`global_batch_tokens`, checked. It becomes a `TokenBatches` once the order is known."""

    budgets: tuple[tuple[int, int], ...]
    drop_last: bool

    @property
    def smallest(self) -> int:
        """The most tokens that a sample may have."""
        return min(tokens for _, tokens in self.budgets)

    def describe(self) -> dict[str, Any]:
        """Return the argument of a DataLoader that it was built from."""
        return {"global_batch_tokens": self.budgets}

    def over(self, sums: Sums) -> TokenBatches:
        return TokenBatches(sums=sums, budgets=self.budgets, drop_last=self.drop_last)


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The arguments of a DataLoader that concern its steps, checked.

    Attributes:
        seed: seed of the loader's own order.
        listed: rows of shards in the user's own order, int64 (num_samples,).
        index: what several ranks do if there is no index.
        drawn: whether torch's generator, or `generator`, shuffles map-style data: `shuffle=True` and no seed.
        by_torch: whether torch's own loader reads the data set.
        accumulate: micro-steps of every step; 1: as many as caps need.
        timeout: seconds to wait for a step; 0 for no limit.
        cache: where a node keeps copies of shards of object storage.
    """

    rank: Rank
    batches: GlobalBatches | TokenBudgets
    shuffle: Shuffle | None
    listed: NDArray[np.int64] | None
    seed: int
    drawn: bool
    generator: torch.Generator | None
    balance: Balance
    policy: ErrorPolicy
    collate_fn: Packed | Padded | ModelInputs | Callable[..., Any] | None
    index: IndexUse
    batched: bool
    cost: Any
    by_torch: bool
    accumulate: int = 1
    timeout: float = 0.0
    cache: Cache | None = None

    @property
    def sample_batches(self) -> GlobalBatches:
        """Batches in samples. Raises ValueError for steps measured in tokens."""
        if isinstance(self.batches, GlobalBatches):
            return self.batches
        raise ValueError(
            "global_batch_tokens counts LLM tokens, which must be in an index before anything is loaded, and this data "
            "set has no index: pass batch_size or global_batch_size, or use an od.ShardDataset"
        )

    def build_spec(self, costs: SampleCosts, order: SampleOrder, batches: Batches, content: Content) -> BuildSpec:
        plan = PlanSpec(
            costs=costs,
            order=order,
            batches=batches,
            balance=self.balance,
            num_ranks=self.rank.size,
            ranks_per_node=self._ranks_per_node,
            accumulate=self.accumulate,
            num_peers=self.rank.num_peers,
        )
        return BuildSpec(plan=plan, rank=self.rank.rank, content=content, peer=self.rank.peer)

    @property
    def _ranks_per_node(self) -> int | None:
        """Ranks per node, only for plans that depend on it: ranks on nodes of different sizes need not agree on it."""
        node = self.rank.ranks_per_node
        if self.balance.assignment != "per_phase" or node is None or self.rank.size % node:
            return None
        return node


@dataclass(frozen=True, kw_only=True)
class PreparedDataset:
    """A data set, ready to be planned and read.

    Attributes:
        spec: everything on which a step depends, except its task.
        fingerprint: what the loaders of all ranks must agree with, JSON-safe.
        rows: of shards, the usable rows of the data set, or of each source, which bind states to it.
        failures: samples known to be bad before anything is decoded; the order does not contain them.
        num_indexed: samples of the data set, including bad ones.
        num_lost: estimated samples of damaged shards that are not even indexed.
        none_chosen: the `filter`, `split` and others that choose no sample; empty if they choose any.
        on_first_step: called when the first step was delivered; None: nothing is to be done.
        torch_steps: the steps of an epoch, if they are not those of the plan.
        sampler, batch_sampler, collate_fn: the defaults that torch's loader has; None for our own order or layout.
    """

    spec: BuildSpec
    fingerprint: Mapping[str, Any]
    failures: Sequence[DataError]
    num_indexed: int
    torch_steps: Steps | None = None
    rows: tuple[SourceRows, ...] = ()
    num_lost: int = 0
    none_chosen: str = ""
    on_first_step: Callable[[], None] | None = None
    sampler: Any = None
    batch_sampler: Any = None
    collate_fn: Any = None

    @property
    def steps(self) -> Steps:
        """The steps of each epoch."""
        return self.torch_steps or self.spec.plan.steps

    @property
    def is_iterable(self) -> bool:
        """Whether the data set can only be iterated."""
        return isinstance(self.steps, StreamSteps)

    @property
    def num_samples(self) -> int:
        """Usable samples of the data set."""
        return self.spec.plan.order.num_samples

    @property
    def has_windows(self) -> bool:
        """Whether steps are windows of concatenated documents."""
        return isinstance(self.spec.plan.batches, WindowBatches)

    @property
    def bound_fingerprint(self) -> Mapping[str, Any]:
        """What a state must agree with, besides the `rows` of shards."""
        return bound(self.fingerprint) if self.rows else self.fingerprint

    def with_order(self, order: MixtureOrder) -> PreparedDataset:
        """Return the same mixture with another order."""
        batches = self.spec.plan.batches
        if isinstance(batches, TokenBatches):
            batches = replace(batches, sums=order)
        spec = replace(self.spec, plan=replace(self.spec.plan, order=order, batches=batches))
        return replace(self, spec=spec)

    def state_of_order(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a state with this position stores of samples and their order, besides the fingerprint."""
        if not self.rows:
            return {}
        order, found = self.spec.plan.order, dump_rows(self.rows)
        if isinstance(order, MixtureOrder) and not self.has_windows:
            found |= dump_mixture(order, state["epoch"], state["position"])
        return found


def batch_sizes(
    batch_size: int | None,
    global_batch_size: int | None,
    global_batch_tokens: int | Sequence[tuple[int, int]] | None,
    *,
    num_ranks: int,
    in_shards: bool,
    has_batch_sampler: bool,
    drop_last: bool,
    accumulate: int = 1,
) -> tuple[int | None, GlobalBatches | TokenBudgets]:
    """Return the samples per rank and micro-step, None if another size was given, and the global batches. With a batch
    sampler, each global batch is one of its batches.

    Raises ValueError for several sizes, for one outside its range, and for shards without a size.
    """
    accumulate = checked_count(accumulate, "accumulate")
    if accumulate > 1 and not in_shards:
        raise ValueError(
            f"accumulate={accumulate} cuts steps of an od.ShardDataset into microbatches; other data give one result "
            f"of collate_fn per step: leave it out, and step the optimizer after each {accumulate} batches, with the "
            "losses divided by their number, as with torch's loader"
        )
    if accumulate > 1 and global_batch_tokens is not None:
        raise ValueError(
            f"accumulate={accumulate} cuts steps of as many samples, and steps of global_batch_tokens have different "
            "numbers: give batch_size or global_batch_size, or leave accumulate out and cap Balance(max_tokens=...)"
        )
    own = None if batch_size is DEFAULT_BATCH_SIZE else batch_size
    sizes = {"batch_size": own, "global_batch_size": global_batch_size, "global_batch_tokens": global_batch_tokens}
    given = {name: size for name, size in sizes.items() if size is not None}
    if has_batch_sampler:
        for name in ("global_batch_size", "global_batch_tokens"):
            if name in given:
                raise ValueError(f"batch_sampler sets the batch sizes: leave {name} out")
        return None, GlobalBatches(size=1, drop_last=drop_last)
    if len(given) > 1:
        words = " and ".join(f"{name}={size}" for name, size in given.items())
        raise ValueError(f"{words} {'both' if len(given) == 2 else 'all'} given: pass exactly one")
    if global_batch_tokens is not None:
        return None, TokenBudgets(budgets=_checked_budgets(global_batch_tokens), drop_last=drop_last)
    if global_batch_size is not None:
        size = checked_count(global_batch_size, "global_batch_size")
        return None, GlobalBatches(size=size, drop_last=drop_last)
    if batch_size is None:
        if in_shards:
            raise ValueError(
                "batch_size=None takes a map-style data set's samples one by one; steps of a ShardDataset have sizes: "
                "pass batch_size=1, or global_batch_size"
            )
        return None, GlobalBatches(size=num_ranks, drop_last=drop_last)
    batch_size = checked_count(batch_size, "batch_size")
    return batch_size, GlobalBatches(size=batch_size * num_ranks * accumulate, drop_last=drop_last)


def checked_index(use: IndexUse) -> IndexUse:
    """Check the `index=` argument of a DataLoader."""
    if use not in get_args(IndexUse):
        raise ValueError(f"index must be one of {', '.join(map(repr, get_args(IndexUse)))}, got {use!r}")
    return use


def _checked_budgets(given: int | Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return `global_batch_tokens` as (training tokens before, tokens of a step) pairs."""
    if not isinstance(given, (list, tuple)):
        return ((0, checked_count(cast("int", given), "global_batch_tokens")),)
    how = "a list of (training tokens from which it applies, tokens of a step), ascending from 0"
    if not given or any(not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in given):
        raise ValueError(f"global_batch_tokens is a number or {how}, got {given!r}")
    budgets = tuple(
        (checked_count(bound, "a bound of global_batch_tokens", 0), checked_count(tokens, "global_batch_tokens"))
        for bound, tokens in given
    )
    bounds = [bound for bound, _ in budgets]
    if bounds[0] != 0 or any(later <= bound for bound, later in itertools.pairwise(bounds)):
        raise ValueError(f"global_batch_tokens is {how}; its bounds are {bounds}")
    return budgets


def check_functions(**functions: Any) -> None:
    """Raise TypeError for an argument that is neither callable nor a layout; a layout's class is callable."""
    for name, given in functions.items():
        known = given is None or layout_of(given) is not None or callable(given)
        if isinstance(given, type) and (given in (Packed, Padded) or hasattr(given, "layout")):
            raise TypeError(f"{name} got the class {given.__name__}: create one, as in {given.__name__}(...)")
        if not known:
            raise TypeError(f"{name} must be callable, got {given!r}")


def chosen_seed(seed: int | None, generator: torch.Generator | None) -> int:
    """Return the seed of the loader's own order."""
    if generator is None:
        if isinstance(seed, bool) or not (seed is None or hasattr(seed, "__index__")):
            raise ValueError(f"seed must be an integer, got {seed!r}")
        return 0 if seed is None else operator.index(seed)
    if seed is not None:
        raise ValueError("seed and generator both given: the seed comes from one of them")
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {generator!r}")
    return int(generator.initial_seed())


def listed_rows(shuffle: Any, *, in_shards: bool) -> NDArray[np.int64] | None:
    """Return `shuffle=` if it is an array of rows, else None. Raises ValueError for an array without distinct rows."""
    if not isinstance(shuffle, np.ndarray):
        return None
    if not in_shards:
        raise ValueError("shuffle= takes an array of rows for an od.ShardDataset; for map-style data use sampler=")
    if shuffle.ndim != 1 or shuffle.dtype.kind not in "iu" or len(np.unique(shuffle)) != len(shuffle):
        raise ValueError(
            f"shuffle= as an array has distinct rows, integers (num_samples,), got {shuffle.dtype} {shuffle.shape}; "
            "to repeat samples use od.Mixture(stop='repeat')"
        )
    return shuffle.astype(np.int64)


def as_shuffle(shuffle: bool | Shuffle | NDArray[Any] | None) -> Shuffle | None:
    """Return the `shuffle=` argument of a DataLoader; None for the user's own order, see `listed_rows`."""
    if isinstance(shuffle, Shuffle):
        return shuffle
    if isinstance(shuffle, np.ndarray):
        return None
    # An option of a command line is often 0 or 1, which torch takes.
    if shuffle is not None and not (isinstance(shuffle, int | np.bool_) and shuffle in (0, 1)):
        raise ValueError(f"shuffle must be True, False, an od.Shuffle or an array of rows, got {shuffle!r}")
    return Shuffle() if shuffle else None


def rank_balance(balance: str | Balance, rank: Rank, *, equal_count: bool) -> Balance:
    """Return the `balance=` argument of a DataLoader; groups are nodes if their size is not given."""
    given = as_balance(balance, equal_count=equal_count)
    if given.scope not in ("grouped", "grid") or given.group_size is not None:
        return given
    if rank.ranks_per_node is None:
        raise ValueError(
            f"balance={given.scope!r} needs a group size: od.Balance(scope={given.scope!r}, group_size=...),"
            " od.DataParallel(mesh, ranks_per_node=...), or LOCAL_WORLD_SIZE, which torchrun sets"
        )
    return replace(given, group_size=rank.ranks_per_node)


def refuse_parts(balance: Balance, reason: str) -> None:
    """Raise ValueError if parts of samples are to be assigned, and only whole samples can be."""
    if balance.assignment == "per_phase":
        raise ValueError(
            f"Balance.assignment='per_phase' gives ranks parts of samples, but {reason}: it needs an od.ShardDataset "
            "with od.Packed or od.Padded; use assignment='joint'"
        )


def check_peers(balance: Balance, rank: Rank) -> None:
    """Raise ValueError if peers are to share parts, and each rank encodes its whole samples."""
    if rank.num_peers > 1 and balance.assignment != "per_phase":
        raise ValueError(
            f"DataParallel.encoder_dims shares parts of samples among {rank.num_peers} peers, and Balance.assignment="
            f"{balance.assignment!r} encodes whole samples on their rank: use od.Balance(assignment='per_phase') with "
            "an od.ShardDataset and od.Packed or od.Padded, or leave encoder_dims out"
        )


def check_teams(
    balance: Balance, collate_fn: object, in_shards: bool = True, dp: Any = None, accumulate: int = 1
) -> None:
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
        "data without an index, whose lengths are not known: use an od.ShardDataset": not in_shards,
        "padded rows, which are whole: use od.Packed(), or od.hf.Inputs without padded=": isinstance(layout, Padded),
        "od.Packed(length=...), with or without concatenate=True, where no sample is longer than a microbatch: leave "
        "length out, and cap microbatches by Balance(max_tokens=...)": layout is not None and fixed_length(layout),
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
    for what, is_given in refused.items():
        if is_given:
            raise ValueError(f"Balance.teams does not work with {what}; or leave teams out")
