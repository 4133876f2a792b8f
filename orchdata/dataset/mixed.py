"""A mixture, prepared: its sources' indexes as one, their orders as one, and how one goes on with other weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.mixed_state import ToldPlace, read_place
from orchdata.dataset.mixture import Leaf, Mixture
from orchdata.dataset.options import PreparedDataset
from orchdata.loaders.errors import StateError
from orchdata.loaders.index.index import Index, content_fingerprint
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.recipe import Recipe
from orchdata.loop.position import Position
from orchdata.loop.state import has_weights, is_of_mixture, load_state
from orchdata.order.before_debts import OrderBeforeDebts
from orchdata.order.merge import MixedSource, Reached, Stage
from orchdata.order.mixture import MixtureOrder, joined_stages
from orchdata.order.order import Order, Shuffle
from orchdata.order.token_sums import TokenSums
from orchdata.planning.costs import IndexTokens

Ints = NDArray[np.int64]

_CHUNK_ROWS = 1 << 20


def joined_index(mixture: Mixture, indexes: Sequence[Index]) -> JoinedIndex:
    """Indexes of a mixture's leaves as one; one file is mapped once. Raises as `check_alike`."""
    check_alike([(leaf.name, leaf.dataset.recipe) for leaf in mixture.leaves])
    by_path: dict[Path, Index] = {}
    return JoinedIndex([by_path.setdefault(index.path, index) for index in indexes])


def check_alike(recipes: Sequence[tuple[str, Recipe]]) -> None:
    """Raise ValueError where two sources' samples could not be in one batch."""
    (first, one), *others = recipes
    wanted = _of_tensors(one)
    for name, other in others:
        for what, value in _of_tensors(other).items():
            if value != wanted.get(what) or wanted.keys() != _of_tensors(other).keys():
                here, there = wanted.get(what), value
                raise ValueError(
                    f"sources {first!r} and {name!r} differ in {what}, {here!r} and {there!r}: their samples are in "
                    "one batch, so it must be the same in both recipes; templates, placeholders, text fields "
                    "and limits on the tokens of a part may differ"
                )


def _of_tensors(recipe: Recipe) -> dict[str, Any]:
    """All of a recipe that its samples' tensors show, by name."""
    found: dict[str, Any] = {
        "modalities": list(recipe.modalities),
        "text.id": recipe.text.id,
        "limits": recipe.describe()["limits"],
    }
    for name, modality in recipe.modalities.items():
        parameters = modality.describe()
        found |= {
            f"{name}.{field}": value
            for field, value in _plain(parameters).items()
            if field not in modality.may_differ_in_mixture
        }
        found[f"{name}.arrays"] = {array: str(spec) for array, spec in modality.arrays().items()}
        found[f"ids of {name}"] = list(recipe.slots[name]._replace(mark=None))
    return found


def _plain(described: Mapping[str, Any]) -> dict[str, Any]:
    """A description's fields, whatever is inside which."""
    found: dict[str, Any] = {}
    for field, value in described.items():
        found |= _plain(value) if isinstance(value, Mapping) else {field: value}
    return found


def mixture_order(
    mixture: Mixture, index: JoinedIndex, excluded: Ints, *, shuffle: Shuffle | None, seed: int, multiple_of: int
) -> MixtureOrder:
    """The order of a mixture's samples.

    Args:
        excluded: rows of all sources, ascending.
        seed: each source is shuffled by one that it gives with the source's name.

    Raises:
        ValueError: a source without a usable sample, or weights too far apart.
    """
    sources, largest = [], 1
    bounds = np.searchsorted(excluded, index.first_rows)
    for number, (leaf, own) in enumerate(zip(mixture.leaves, index.indexes, strict=True)):
        first = int(index.first_rows[number])
        left_out = excluded[bounds[number] : bounds[number + 1]] - first
        order = Order(
            own.num_rows,
            shuffle=shuffle,
            seed=_seed_of(seed, leaf.name),
            excluded=left_out,
            source=number,
        )
        if not order.num_samples:
            raise ValueError(f"source {leaf.name!r} has no usable sample: leave it out of the mixture")
        counts = IndexTokens(own, multiple_of)
        sums = TokenSums(order, counts)
        sources.append(MixedSource(leaf.name, order, counts, sums, first, float(leaf.loss_weight)))
        most = max(1, int(own.totals["max_llm_tokens"]))
        largest = max(largest, -(-most // multiple_of) * multiple_of)
    size = mixture.epoch_size
    if size is not None and size[0] == "tokens" and size[1] < largest:
        largest = max(_longest(source) for source in sources)  # without those that are left out
    if size is not None and size[0] == "tokens" and size[1] < largest:
        raise ValueError(f"epoch_tokens={size[1]} is less than one sample has, {largest}: raise it")
    return MixtureOrder(sources, mixture.quantised(), by=mixture.by, stop=mixture.stop, epoch_size=size)


def _longest(source: MixedSource) -> int:
    """Tokens of the longest sample that comes."""
    size, most = source.order.num_samples, 0
    for start in range(0, size, _CHUNK_ROWS):
        _, rows = source.order.located(np.arange(start, min(start + _CHUNK_ROWS, size)))
        most = max(most, int(source.counts(rows).max()))
    return most


def _seed_of(seed: int, name: str) -> int:
    """Another seed for each source, whatever the others are: two may have the same shards."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def mixture_fingerprint(leaves: Sequence[Leaf], index: JoinedIndex, order: MixtureOrder) -> dict[str, Any]:
    """What a state must agree with: "weights" may be allowed to differ."""
    return {
        "mixture": order.describe(),
        "sources": {
            leaf.name: {
                "dataset": content_fingerprint(own.shards, ""),
                "recipe": leaf.dataset.recipe.describe(),
                "loss_weight": float(leaf.loss_weight),
                **({"selection": [each.describe() for each in chosen]} if (chosen := leaf.dataset.selections) else {}),
            }
            for leaf, own in zip(leaves, index.indexes, strict=True)
        },
        "weights": order.told_weights(),
    }


def restore(
    prepared: PreparedDataset, state: Mapping[str, Any], allow: Sequence[str], num_workers: int
) -> tuple[PreparedDataset, Position]:
    """What goes on from a state, and where. A mixture goes on from what the state says that its sources have given;
    where other weights are allowed, with its own from the state's place on.

    Raises:
        StateError: as `load_state`, and where the state says of the mixture what cannot be.
    """
    order = prepared.spec.plan.order
    if not isinstance(order, MixtureOrder):
        return prepared, load_state(state, prepared.fingerprint, prepared.steps, allow, num_workers)
    if not is_of_mixture(state, prepared.fingerprint):  # refused there, by name
        return prepared, load_state(state, prepared.fingerprint, prepared.steps, allow, num_workers)
    if "given" in state:
        return _restore_given(prepared, order, state, allow, num_workers)
    raw = _read_stages(state.get("stages"), order)
    stages = joined_stages(raw)
    if len(stages) > 1:
        return _translate(prepared, OrderBeforeDebts.of(order, raw), state, allow, num_workers)
    begun = prepared if stages == order.stages else prepared.with_order(order.restaged(stages))
    position = load_state(state, prepared.fingerprint, begun.steps, allow, num_workers)
    if has_weights(state, prepared.fingerprint):
        return begun, position
    there = begun.spec.plan.order
    assert isinstance(there, MixtureOrder)
    epoch, place = position.epoch, there.place(position.epoch, _place_of(state, there))
    now = Reached(place, there.due(epoch, place))
    told = ToldPlace(now, there.periods(epoch, place), there.resumed_at(epoch, place))
    return _with_weights(prepared, order, told, state), position


def _restore_given(
    prepared: PreparedDataset, order: MixtureOrder, state: Mapping[str, Any], allow: Sequence[str], num_workers: int
) -> tuple[PreparedDataset, Position]:
    """From a state that says what each source has given."""
    told = read_place(state["given"], order, _epoch_of(state))
    if has_weights(state, prepared.fingerprint):
        found = _going_on(order, told, state)
        if found is None:
            raise StateError("the state is damaged: its mixture had not given there what it says")
        begun = prepared.with_order(found)
        return begun, load_state(state, prepared.fingerprint, begun.steps, allow, num_workers)
    # All that is needed of the weights before is what the state tells.
    changed = told.resumed._replace(reached=told.now, is_changed=True)
    there = prepared.with_order(order.restaged(order.stages, changed if any(told.now.place.counts) else told.resumed))
    position = load_state(state, prepared.fingerprint, there.steps, allow, num_workers, check=False)
    return _with_weights(prepared, order, told, state), position


def _with_weights(
    prepared: PreparedDataset, order: MixtureOrder, told: ToldPlace, state: Mapping[str, Any]
) -> PreparedDataset:
    """With weights that may be others from the state's place on; weights that are set again change nothing."""
    found = _going_on(order, told, state)
    if found is None:
        is_inside = any(told.now.place.counts)
        resumed = told.resumed._replace(reached=told.now if is_inside else None, is_changed=True)
        found = order.restaged(order.stages, resumed)
    return prepared.with_order(found)


def _going_on(order: MixtureOrder, told: ToldPlace, state: Mapping[str, Any]) -> MixtureOrder | None:
    """The order that goes on from the last change that a state tells of; None where the stages lead elsewhere."""
    position, amount = state.get("position"), told.now.place.amount(order.by) + told.resumed.begun[order.by == "tokens"]
    if type(position) is not int or position < 0:
        return None
    candidates = [(order.stages, told.resumed)]
    now = next(stage for stage in reversed(order.stages) if stage.bound <= amount)
    if now.periods == told.periods:
        # Weights that are set again: they have held since the last change, whatever the stages say of before.
        held = (Stage(0, now.periods), *(stage for stage in order.stages if stage.bound > amount))
        is_changed = told.resumed.is_changed or told.resumed.epoch > 0
        candidates.append((held, told.resumed._replace(is_changed=is_changed)))
    for stages, resumed in candidates:
        candidate = order.restaged(stages, resumed)
        try:
            place = candidate.place(told.resumed.epoch, position)
            if place == told.now.place and candidate.due(told.resumed.epoch, place) == told.now.due:
                return candidate
        except (IndexError, ValueError):
            continue
    return None


def _translate(
    prepared: PreparedDataset,
    before: OrderBeforeDebts,
    state: Mapping[str, Any],
    allow: Sequence[str],
    num_workers: int,
) -> tuple[PreparedDataset, Position]:
    """From a state of the rule before: what each source has given is found by that rule, and the run goes on from
    there with the weights here.
    """
    order = prepared.spec.plan.order
    assert isinstance(order, MixtureOrder)
    there = prepared.with_order(before)
    position = load_state(state, prepared.fingerprint, there.steps, allow, num_workers, cut=True)
    resumed = before.translated(position.epoch, _place_of(state, before))
    return prepared.with_order(order.restaged(order.stages, resumed)), position


def _epoch_of(state: Mapping[str, Any]) -> int:
    epoch = state.get("epoch")
    if type(epoch) is not int or epoch < 0:
        raise StateError(f"the state points at epoch {epoch!r}, step {state.get('step')!r}")
    return epoch


def _place_of(state: Mapping[str, Any], order: MixtureOrder) -> int:
    """The position of a state in its epoch. Raises StateError where the epoch has none such."""
    position, length = state.get("position"), order.length(_epoch_of(state))
    if type(position) is not int or not 0 <= position <= length:
        raise StateError(f"the state points at position {position!r} of an epoch of {length} samples")
    return position


def _read_stages(told: Any, order: MixtureOrder) -> tuple[Stage, ...]:
    """The stages of `MixtureOrder.told_stages`. Raises StateError."""
    names = [source.name for source in order.sources]
    stages: list[Stage] = []
    for stage in told if isinstance(told, list | tuple) else ():
        if not (isinstance(stage, list | tuple) and len(stage) == 2 and isinstance(stage[1], Mapping)):
            break
        bound, periods = stage[0], [stage[1].get(name) for name in names]
        ints = [bound, *periods]
        if any(type(value) is not int or not 0 <= value <= 1 << 62 for value in ints) or not any(periods):
            break
        if bound != 0 if not stages else bound <= stages[-1].bound:
            break
        stages.append(Stage(bound, tuple(int(period or 0) for period in periods)))
    else:
        if stages:
            return tuple(stages)
    raise StateError(f"the state says that its mixture had the stages {told!r}, which are none")
