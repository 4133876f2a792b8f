"""A prepared data set, its state, and where a run continues from one: at its position, or, if other samples are usable,
at the next epoch.

    prepared data set, position --state_of--> State
    prepared data set, State --restore, if their fingerprints agree--> the data set that continues, position
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol

from orchdata.dataset.arguments import PreparedDataset
from orchdata.loaders.errors import StateError
from orchdata.loop.loop import Position
from orchdata.loop.state import WINDOWS, MixtureState, RowsDigest, State
from orchdata.notices import warn_user
from orchdata.order.merge import Stage
from orchdata.order.mixture import MixtureOrder, StretchStart
from orchdata.order.steps import Begin, Location, Steps, draw_of_cut
from orchdata.planning.windows import WindowBatches

SIZES = ("global_batch_size", "global_batch_tokens")  # which may differ where `allow` names them
WEIGHTS = "weights"  # of a mixture, which may too
SAMPLES = "samples"  # that are usable, which may too: the next epoch begins
_MOST_BYTES = 8192  # of a mixture's fingerprint; a larger one is stored as digests
_MEASURES = frozenset((*SIZES, "tokens_multiple_of"))
_BEGINS = {
    "tokens": "after {} tokens",
    "position": "after {} samples",
    "document": "at document {}",
    "token": "at token {}",
}
_OF_ROWS = ("num_samples", "excluded", "num_excluded")
_OF_RULES = ("rules_version",)


class UsableRows(Protocol):
    """The usable rows of a data set of shards, or of a source of a mixture: `SourceRows`."""

    @property
    def same(self) -> Hashable:
        """Equal for equal rows of one index."""

    @property
    def digest(self) -> RowsDigest:
        """What a state stores of the rows."""

    def change_since(self, then: RowsDigest) -> str:
        """Return how the rows differ from those of a state, in words; "" for equal ones."""


def state_of(prepared: PreparedDataset, position: Position) -> State:
    """Return the state of a data set at a position."""
    location = prepared.steps.location(position.epoch, position.step, position.draw)
    fingerprint, order, mixture = _bound(prepared), prepared.spec.plan.order, None
    if isinstance(order, MixtureOrder):
        if len(json.dumps(fingerprint)) > _MOST_BYTES:
            fingerprint = _digested(fingerprint)
        mixture = mixture_at(order, *location.to_begin(position.epoch), is_cut=bool(location.token))
    known: dict[Hashable, UsableRows] = {}  # equal rows of one index are hashed once, and are one object
    return State(
        position=position,
        fingerprint=fingerprint,
        location=location,
        rows=tuple(known.setdefault(source.same, source).digest for source in prepared.rows),
        mixture=mixture,
    )


def mixture_at(order: MixtureOrder, epoch: int, position: int, *, is_cut: bool = False) -> MixtureState:
    """Return what the sources have given and are due at a position of an epoch; `is_cut`: whether tokens of the sample
    before it are still to come.
    """
    progress, last = order.progress_at(epoch, position), None
    if is_cut:
        source, row, stream, number, *_ = order.samples(epoch, position - 1, position)
        assert number is not None
        tokens = order.before(epoch, position) - order.before(epoch, position - 1)
        last = int(source[0]), int(row[0]), int(stream[0]), int(number[0]), tokens
    now = StretchStart(progress, order.due(epoch, progress), last)
    return MixtureState(now, order.periods(epoch, progress), order.resumed_at(epoch, progress))


def restore(
    prepared: PreparedDataset, state: State, allow: Sequence[str], num_workers: int
) -> tuple[PreparedDataset, Position]:
    """Return the data set that continues from a state, and the position. A mixture continues from what the state says
    that its sources have given; if other weights are allowed, with its own weights from the state's position on.

    Args:
        allow: names of SIZES, WEIGHTS or SAMPLES, that may differ. After other sizes and weights, the rest of the epoch
            is cut again, from the state's position on; after other samples, the next epoch begins.
        num_workers: of this loader.

    Raises:
        StateError: with each difference, if the state belongs to another loader, and if it cannot be of this one.
    """
    position, order = state.position, prepared.spec.plan.order
    is_other_size, has_other_weights = _check_loader(state.fingerprint, _bound(prepared), allow)

    # With other samples the next epoch begins. An epoch of which nothing was delivered is not left out.
    if len(state.rows) != len(prepared.rows):
        counts = f"of {len(state.rows)} sources, and the loader has {len(prepared.rows)}"
        raise StateError(f"the state is damaged: its 'rows' are {counts}")
    words = [source.change_since(digest) for source, digest in zip(prepared.rows, state.rows, strict=True)]
    if changes := "; ".join(filter(None, words)):
        epoch, step = position.epoch, position.step
        begins = f"epoch {epoch + 1}" if step else f"epoch {epoch}, of which nothing was delivered,"
        if SAMPLES not in allow:
            raise StateError(
                f"{changes}. The rest of epoch {epoch} would be another one. load_state_dict(state, allow="
                f"({SAMPLES!r},)) begins {begins} with the samples that are usable now"
            )
        warn_user(f"{changes}: {begins} begins with the samples that are usable now")
        if isinstance(order, MixtureOrder):
            prepared = prepared.with_order(order.restaged(order.stages))
        return prepared, Position(epoch + 1 if step else epoch)

    # Else the run continues at the position, which must be the loader's too.
    if isinstance(order, MixtureOrder) and state.mixture is not None:
        continued = _continued(order, state.mixture, has_other_weights)
        prepared = prepared.with_order(continued)
    if position.workers and len(position.workers) != max(1, num_workers):
        count = len(position.workers)
        raise StateError(
            f"the state has the data set's state in each of {count} workers, and this loader has {num_workers}: "
            f"samples of such a data set belong to its workers, so pass num_workers={count}"
            f"{', or 0' if count == 1 else ''}"
        )
    if prepared.is_iterable and position.step and not position.workers:
        raise StateError("the state does not say how far each worker has iterated the data set")
    batches = prepared.spec.plan.batches
    if has_other_weights and isinstance(batches, WindowBatches):
        if state.mixture is None:
            raise StateError(
                "the state does not say what the sources of its windows have given: use the former weights"
            )
        return prepared, _in_windows(position, state.location, batches)
    if is_other_size or has_other_weights:
        return prepared, _cut_again(position, state.location, prepared.steps)
    _check_location(position, state.location, prepared)
    return prepared, position


def check_allowed(allow: Sequence[str]) -> None:
    """Raise ValueError for names that may never differ."""
    known = (*SIZES, WEIGHTS, SAMPLES)
    if isinstance(allow, str) or any(name not in known for name in allow):
        raise ValueError(f"allow must name entries of {', '.join(map(repr, known))}, which may differ; got {allow!r}")


def _continued(order: MixtureOrder, mixture: MixtureState, has_other_weights: bool) -> MixtureOrder:
    """Return the order that continues from a state, with its own weights from there on; equal ones change nothing."""
    now, periods, resumed = mixture
    position = now.progress.position - resumed.start.position

    # The last change of weights in the state leads to its position, with the stages of this loader.
    amount = now.progress.amount(order.by) + resumed.given_before[order.by == "tokens"]
    candidates = [(order.stages, resumed)]
    stage = next(stage for stage in reversed(order.stages) if stage.bound <= amount)
    if stage.periods == periods:
        # The same weights are set again: they have applied since the last change, whichever stages are listed before.
        same = (Stage(0, periods), *(stage for stage in order.stages if stage.bound > amount))
        candidates.append((same, resumed._replace(is_changed=resumed.is_changed or resumed.epoch > 0)))
    for stages, start in candidates:
        candidate = order.restaged(stages, start)
        try:
            progress = candidate.progress_at(resumed.epoch, position)
            if (progress, candidate.due(resumed.epoch, progress)) == now[:2]:
                return candidate
        except (IndexError, ValueError):
            continue

    # Else the former weights are not needed: the state has everything that depends on them.
    if not has_other_weights:
        raise StateError("the state is damaged: its mixture has given other amounts at this position than it says")
    begin = now if any(now.progress.counts) else None
    return order.restaged(order.stages, resumed._replace(stretch_start=begin, is_changed=True))


def _check_location(position: Position, location: Location, prepared: PreparedDataset) -> None:
    """Raise StateError if the loader has no such step, or at another position."""
    epoch, step, draw = position.epoch, position.step, position.draw
    try:
        num_steps = prepared.known_count(position)
        if num_steps is not None and step > num_steps:
            raise StateError(f"the state points at epoch {epoch}, step {step}; an epoch has {num_steps} steps")
        here = prepared.steps.location(epoch, step, draw)
    except (LookupError, TypeError, ValueError) as error:
        reason = f"the state's epoch was drawn from {draw!r:.80}, which is no draw of this loader's order"
        raise StateError(reason) from error
    for name, words in _BEGINS.items():
        there, now = getattr(location, name), getattr(here, name)
        if now is not None and there != now:
            where = words.format(there)
            raise StateError(f"step {step} of epoch {epoch} begins {where} in the state and {now} here")


def _in_windows(position: Position, location: Location, batches: WindowBatches) -> Position:
    """Return where windows continue after other weights. A step that begins with the rest of the epoch before belongs
    to that epoch if it has become longer.
    """
    if location.document is None or location.token is None:
        raise StateError("the state does not say which document its windows continue with")
    epoch = location.document["epoch"]
    step = batches.step_at(epoch, location.document["position"], location.token)
    if epoch == position.epoch and step != position.step:
        raise StateError(f"the state is damaged: step {position.step} begins where step {step} does")
    return Position(epoch, step) if epoch < position.epoch and step < batches.count(0, epoch) else position


def _cut_again(position: Position, location: Location, steps: Steps) -> Position:
    """Return the position with the rest of the epoch cut by this loader's size."""
    num_delivered = location.position
    if num_delivered is None:
        raise StateError(
            "the state does not say how many samples were delivered, which a loader of another global batch size "
            "continues from: only states of a ShardDataset, or of map-style data with a seed, do"
        )
    if not num_delivered:
        return Position(position.epoch)
    draw = draw_of_cut(Begin(position.step, num_delivered))
    if steps.location(position.epoch, position.step, draw).position is None:
        raise StateError("samples that torch draws continue with the global batch size that they were drawn with")
    return Position(position.epoch, position.step, draw)


def _check_loader(theirs: Mapping[str, Any], ours: Mapping[str, Any], allow: Sequence[str]) -> tuple[bool, bool]:
    """Raise StateError if another loader wrote a state: its fingerprint may differ only in what `allow` names. Return
    whether the size of a step and the weights are others.
    """
    stored = theirs.get("mixture")
    if isinstance(stored, Mapping) and "digests" in stored and "mixture" in ours:
        ours = _digested(ours)
    both = WEIGHTS in theirs and WEIGHTS in ours
    there, here = ({**each, WEIGHTS: _shown_weights(each.get(WEIGHTS))} for each in (theirs, ours))
    has_windows = WINDOWS in ours or WINDOWS in theirs
    apart = ({WEIGHTS} if both else set()) | (set() if has_windows else _MEASURES)
    differences = _differences(_without(there, apart), _without(here, apart), "")
    other_size = None if has_windows else _other_size(theirs, ours)
    # Windows of all epochs follow each other, so sizes may not differ.
    if has_windows and differences and any(theirs.get(name) != ours.get(name) for name in (*SIZES, WINDOWS)):
        differences.append(
            "where a step of Packed(concatenate=True) begins depends on all steps before it, so allow= cannot change "
            "that: use the former arguments, or begin an epoch with the new ones by set_epoch()"
        )
    if other_size is not None and other_size[0] not in allow:
        differences.append(other_size[1])
    other_weights = both and theirs[WEIGHTS] != ours[WEIGHTS]
    if other_weights and WEIGHTS not in allow:
        how = f"load_state_dict(state, allow=({WEIGHTS!r},)) continues with the weights here"
        differences.append(f"weights are {there[WEIGHTS]} in the state and {here[WEIGHTS]} here ({how})")
    if differences:
        raise StateError("the state belongs to another loader: " + "; ".join(differences))
    return other_size is not None, other_weights


def _shown_weights(described: Any) -> Any:
    """Return the weights of one stage as shares of 1, as a fingerprint has its periods; several stages as they are."""
    if not (isinstance(described, list) and len(described) == 1):
        return described
    rates = {name: 1 / period if period else 0.0 for name, period in described[0][1].items()}
    return {name: float(f"{rate / sum(rates.values()):.5g}") for name, rate in rates.items()}


def _bound(prepared: PreparedDataset) -> Mapping[str, Any]:
    """Return what a state must agree with: of shards without the usable rows, which its `rows` have, and the rules that
    judged them.
    """
    found = dict(prepared.fingerprint)
    if not prepared.rows:
        return found
    if "order" in found:
        return found | {"order": _without(found["order"], _OF_ROWS), "recipe": _without(found["recipe"], _OF_RULES)}
    mixture = {**found["mixture"]}
    mixture["sources"] = {name: _without(order, _OF_ROWS) for name, order in mixture["sources"].items()}
    sources = {name: {**each, "recipe": _without(each["recipe"], _OF_RULES)} for name, each in found["sources"].items()}
    return found | {"mixture": mixture, "sources": sources}


def _without(described: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in described.items() if name not in names}


def _digested(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fingerprint of a mixture with a digest for each source's order and recipe; the shuffle, which all
    sources share, stays readable.
    """
    mixture = dict(fingerprint["mixture"])
    orders = mixture["sources"]
    mixture |= {
        "digests": True,
        "shuffle": next(iter(orders.values()))["shuffle"],
        "sources": {name: _digest(order) for name, order in orders.items()},
    }
    sources = {
        name: {field: value if isinstance(value, float) else _digest(value) for field, value in source.items()}
        for name, source in fingerprint["sources"].items()
    }
    return {**fingerprint, "mixture": mixture, "sources": sources}


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _other_size(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[str, str] | None:
    """If steps have another size, return the name of ours, and the difference as text."""
    there, here = ({name: each[name] for name in _MEASURES & each.keys()} for each in (theirs, ours))
    if there == here:
        return None
    name = next(name for name in SIZES if name in here)
    how = f"load_state_dict(state, allow=({name!r},)) cuts what is left of the epoch again"
    if there.keys() == here.keys() == {name}:
        same = f"{name}={there[name]} goes on with the steps of the state"
        if name == "global_batch_size":
            same += ", on any number of ranks (batch_size counts for each rank)"
        return name, f"{name} is {there[name]} in the state and {here[name]} here: {same}; {how}"
    sizes = [", ".join(f"{key}={size[key]}" for key in sorted(size)) for size in (there, here)]
    return name, f"a step has {sizes[0]} in the state and {sizes[1]} here: {how}"


_WHAT = {
    "dataset": "the list of shards, their names, sizes or contents, or how columns=, key= or containers= read them,",
    "recipe": "the recipe",
    "rows": "the order of your own, shuffle=array,",
    "selection": "the choice of samples by filter, split, take or select",
}
_DIGEST = re.compile(r"[0-9a-f]{16,}")


def _differences(theirs: Any, ours: Any, path: str) -> list[str]:
    """Return the differences as text."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        names = [*ours, *(name for name in theirs if name not in ours)]
        return [
            difference
            for name in names
            for difference in _differences(theirs.get(name), ours.get(name), f"{path}.{name}" if path else str(name))
        ]
    if theirs == ours:
        return []
    # Digests say nothing to a reader.
    shown = [_DIGEST.sub("...", repr(value)) for value in (theirs, ours)]
    words = f"{path} is {shown[0]} in the state and {shown[1]} here"
    if any(isinstance(value, str) and _DIGEST.fullmatch(value) for value in (theirs, ours)):
        names = path.split(".")
        of = f" of source {names[names.index('sources') + 1]!r}" if "sources" in names[:-1] else ""
        words = f"{_WHAT.get(names[-1], path)}{of} differs: the state has another one"
    if path == "order.format":
        words += (
            " (the algorithm of orders has changed: finish the epoch with the orchdata that began it, or begin one)"
        )
    return [words]
