"""A step of a run as samples to show: the arguments that a state contains, and the samples of a rank in a plan.

state --> arguments of a DataLoader; plan, rank --> groups of samples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchdata.balancers import CostModel
from orchdata.building.assembler import pass_of
from orchdata.building.spec import BuildSpec, IndexedShards, SampleContent, ShardContent
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.loaders.errors import StateError
from orchdata.loaders.generators import Pass
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.shards.open import by_identity
from orchdata.loop.state import SIZES, WINDOWS
from orchdata.order.order import Shuffle
from orchdata.planning.costs import IndexCosts
from orchdata.planning.plan import Plan
from orchdata.planning.windows import WindowBatches
from orchdata.showing.shown import ShownGroup, shown_rows

_WHOLE = (
    "orchdata show shows whole samples, and this loader has windows of concatenated documents, "
    "od.Packed(concatenate=True): its step_at gives any step, and batch.token_ranges says what each window has"
)


def shards_of(dataset: ShardDataset | Mixture, index: Index) -> IndexedShards:
    """Return the shards of a data set, to read rows of its index."""
    recipes = (
        (dataset.recipe,)
        if isinstance(dataset, ShardDataset)
        else tuple(leaf.dataset.recipe for leaf in dataset.leaves)
    )
    return IndexedShards(
        index=index,
        build_id=index.build_id,
        recipe=recipes[0],
        of_sources=recipes if isinstance(dataset, Mixture) else (),
        containers=by_identity(dataset.containers),
        files=dataset.files,
    )


def shards_and_model(spec: BuildSpec) -> tuple[IndexedShards, CostModel | None]:
    """Return the shards of a loader, and its cost model. Raises ValueError if it does not read shards."""
    if not isinstance(spec.content, ShardContent | SampleContent):
        raise ValueError("orchdata show reads shards, and this DataLoader reads none: call its step_at for any step")
    if isinstance(spec.plan.batches, WindowBatches):
        raise ValueError(_WHOLE)
    model = spec.plan.costs.model if isinstance(spec.plan.costs, IndexCosts) else None
    return spec.content.shards, model


def source_names(dataset: ShardDataset | Mixture, index: Index, rows: Sequence[int]) -> list[str]:
    """Return the name of each row's source in a mixture; "" without a mixture."""
    if not (isinstance(dataset, Mixture) and isinstance(index, JoinedIndex)):
        return [""] * len(rows)
    return [dataset.leaves[index.source_of(row)].name for row in rows]


def arguments_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the DataLoader of shards that a state contains: size of steps, and order.

    The seed of a mixture only if decoding draws: else each source has its own. Raises StateError for any other state.
    """
    fingerprint = state.get("fingerprint")
    orders = _orders(fingerprint) if isinstance(fingerprint, Mapping) else []
    if not orders:
        raise StateError("this is not a state of a DataLoader of shards: it does not have their order")
    assert isinstance(fingerprint, Mapping)
    if WINDOWS in fingerprint:
        raise StateError(_WHOLE)
    arguments: dict[str, Any] = {name: fingerprint[name] for name in SIZES if name in fingerprint}
    size = fingerprint.get("global_batch_tokens")
    if isinstance(size, list):
        arguments["global_batch_tokens"] = [tuple(bound) for bound in size]
    if "shuffle" not in orders[0]:
        raise StateError("the run has its own order, shuffle=array: pass it to a DataLoader, and call its step_at")
    shuffle = orders[0]["shuffle"]
    try:
        arguments["shuffle"] = False if shuffle is None else Shuffle(**shuffle)
    except TypeError:
        raise StateError(f"the state is damaged: its 'shuffle' is {shuffle!r}"[:200]) from None
    for seeded in (fingerprint.get("draws"), fingerprint.get("order")):
        if isinstance(seeded, Mapping) and seeded.get("seed") is not None:
            arguments["seed"] = seeded["seed"]
    return arguments


def multiple_of_state(state: Mapping[str, Any]) -> int:
    """Return the `multiple_of` of the layout if steps measured in tokens depend on it; else 1."""
    multiple_of = state["fingerprint"].get("tokens_multiple_of", 1)
    if type(multiple_of) is not int or not 1 <= multiple_of < 1 << 31:
        raise StateError(f"the state is damaged: its 'tokens_multiple_of' is {multiple_of!r}"[:200])
    return multiple_of


def _orders(fingerprint: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    mixture = fingerprint.get("mixture")
    if isinstance(mixture, Mapping) and "shuffle" in mixture:
        return [mixture]
    if isinstance(mixture, Mapping) and isinstance(mixture.get("sources"), Mapping):
        return [each for each in mixture["sources"].values() if isinstance(each, Mapping)]
    order = fingerprint.get("order")
    return [order] if isinstance(order, Mapping) and "recipe" in fingerprint else []


def passes_of_rank(shards: IndexedShards, plan: Plan, rank: int) -> list[Pass]:
    """Return the passes of a rank's samples in a step, in the sequence of `shown_step`."""
    microbatches = (plan.places(rank, microbatch) for microbatch in range(plan.num_microbatches))
    return [pass_of(plan, at, shards.seed) for indices in microbatches for at in indices.tolist()]


def shown_step(shards: IndexedShards, plan: Plan, rank: int, model: CostModel | None = None) -> list[ShownGroup]:
    """Return what a rank gets in a step, by microbatch: samples, and for each phase its cost and the largest cost."""
    groups = []
    for microbatch in range(plan.num_microbatches):
        indices = plan.places(rank, microbatch)
        cells = {phase: plan.cells(phase)[:, microbatch] for phase in plan.phases}
        about = {
            "epoch": plan.epoch,
            "step": plan.step,
            "rank": rank,
            "ranks": plan.num_ranks,
            "microbatch": microbatch,
            "microbatches": plan.num_microbatches,
            "cost": {phase: int(costs[rank]) for phase, costs in cells.items()},
            "largest_cost": {phase: int(costs.max()) for phase, costs in cells.items()},
        }
        sources = [plan.sources[number] if plan.sources else "" for number in plan.source[indices].tolist()]
        passes = [pass_of(plan, at, shards.seed) for at in indices.tolist()]
        samples = shown_rows(shards, plan.row[indices].tolist(), model, sources, passes)
        groups.append(ShownGroup(about=about, samples=samples))
    return groups
