"""The state of a loader: its position in which epoch, and the fingerprint of what it loads.

Small, JSON-safe, versioned, and the same on every rank: rank 0's loads everywhere. `dataset/resume/` compares what
samples are usable.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from orchdata.loaders.errors import StateError
from orchdata.loop.position import Position, stored
from orchdata.order.sampler import generator_state
from orchdata.order.steps import Begin, Draw, Steps, draw_of_cut, is_begin

VERSION = 1
SIZES = ("global_batch_size", "global_batch_tokens")  # which may differ where `allow` names them
WEIGHTS = "weights"  # of a mixture, which may too
SAMPLES = "samples"  # that are usable, which may too: the next epoch begins, see `dataset/resume`
WINDOWS = "windows"  # of concatenated documents: neither may differ, because windows of all epochs follow each other
_MOST_BYTES = 8192  # of a mixture's fingerprint; a larger one is stored as digests
_MEASURES = frozenset((*SIZES, "tokens_multiple_of"))
_KINDS: dict[str, type[Any] | tuple[type[Any], ...]] = {
    **dict.fromkeys(("epoch", "step", "position", "tokens", "token", "base_seed", "worker"), int),
    **dict.fromkeys(("fingerprint", "drawn", "document", "written_by"), Mapping),
    **dict.fromkeys(("left", "workers", "rows"), (list, tuple)),
}
_DRAWS: dict[str, type[Any]] = {"seed": int, "state": str, "cut": object}  # keys of a draw
_LARGEST = 1 << 63


def dump_state(position: Position, fingerprint: Mapping[str, Any], steps: Steps) -> dict[str, Any]:
    """Return a state that shares nothing with the loader: torch.distributed.checkpoint loads in place. Raises what
    `state_dict` of a data set in this process raises.
    """
    optional = {
        "drawn": None if position.draw is None else deepcopy(dict(position.draw)),
        "base_seed": position.base_seed if position.is_drawn else None,
        "left": list(position.left) or None,
        "sampler": deepcopy(position.sampler),
        "workers": [None if get is None else deepcopy(get()) for get in position.workers] or None,
    }
    if position.workers and position.step:
        optional["worker"] = position.worker
    return {
        "version": VERSION,
        "epoch": position.epoch,
        "step": position.step,
        **steps.location(position.epoch, position.step, position.draw),
        **{name: value for name, value in optional.items() if value is not None},
        "fingerprint": _small(fingerprint),
    }


def load_state(
    state: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    steps: Steps,
    allow: Sequence[str] = (),
    num_workers: int = 0,
    *,
    check: bool = True,
) -> Position:
    """Return the position of `state`. Raises StateError, with each difference, if it belongs to another loader.

    Args:
        steps: of this loader; of a mixture, in the stages that the state stores.
        allow: names of SIZES or WEIGHTS, that may differ: the rest of the epoch is then cut again, from the state's
            position on.
        num_workers: of this loader.
        check: whether `steps` can locate the state's step, to compare it with the state.
    """
    check_form(state)
    is_other_size, has_other_weights = check_loader(state, fingerprint, allow)
    position = _position(state, num_workers)
    if not is_other_size:
        if check:
            _check_location(state, position, steps)
        if not has_other_weights:
            return position
    return _cut_again(state, position, steps)


def check_loader(state: Mapping[str, Any], fingerprint: Mapping[str, Any], allow: Sequence[str]) -> tuple[bool, bool]:
    """Raise StateError if another loader wrote a state: it may differ from this one only in what `allow` names. Return
    whether the size of a step and the weights are others.
    """
    theirs = state.get("fingerprint", {})
    if _is_small(theirs):
        fingerprint = _digested(fingerprint)
    if WINDOWS in fingerprint or WINDOWS in theirs:
        differences, other_size, other_weights = _differences_of_windows(theirs, fingerprint), None, False
    else:
        differences = _differences(_without_size(theirs), _without_size(fingerprint), "")
        other_size = _other_size(theirs, fingerprint)
        other_weights = WEIGHTS in theirs and WEIGHTS in fingerprint and theirs[WEIGHTS] != fingerprint[WEIGHTS]
        if other_size is not None and other_size[0] not in allow:
            differences.append(other_size[1])
        if other_weights and WEIGHTS not in allow:
            how = f"load_state_dict(state, allow=({WEIGHTS!r},)) continues with the weights here"
            there, here = _shown_weights(theirs[WEIGHTS]), _shown_weights(fingerprint[WEIGHTS])
            differences.append(f"weights are {there} in the state and {here} here ({how})")
    if differences:
        raise StateError("the state belongs to another loader: " + "; ".join(differences))
    return other_size is not None, other_weights


def _differences_of_windows(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Return the differences if one of the loaders has windows of concatenated documents."""
    there, here = ({**each, WEIGHTS: _shown_weights(each.get(WEIGHTS))} for each in (theirs, ours))
    differences = _differences(there, here, "")
    if differences and any(theirs.get(name) != ours.get(name) for name in (*SIZES, WINDOWS, WEIGHTS)):
        differences.append(
            "where a step of Packed(concatenate=True) begins depends on all steps before it, so allow= cannot change "
            "that: use the former arguments, or begin an epoch with the new ones by set_epoch()"
        )
    return differences


def is_alike(state: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Return whether a state is of shards, and of as many sources with the same names, as a fingerprint of shards."""
    theirs = state.get("fingerprint")
    if not isinstance(theirs, Mapping) or ("mixture" in theirs) != ("mixture" in ours):
        return False
    if "mixture" not in ours:
        return isinstance(theirs.get("order"), Mapping)
    mixture, named = theirs["mixture"], theirs.get("sources")
    orders = mixture.get("sources") if isinstance(mixture, Mapping) else None
    if not isinstance(orders, Mapping) or not isinstance(named, Mapping):
        return False
    return bool(orders.keys() == named.keys() == ours["sources"].keys())


def is_of_mixture(state: Any, fingerprint: Mapping[str, Any]) -> bool:
    """Return whether a state is of the mixture of a fingerprint, with any weights."""
    theirs = state.get("fingerprint") if isinstance(state, Mapping) else None
    if not isinstance(theirs, Mapping) or state.get("version") != VERSION:
        return False
    ours = _digested(fingerprint) if _is_small(theirs) else fingerprint
    return bool(theirs.get("mixture") == ours["mixture"])


def has_weights(state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> bool:
    """Return whether a state of a mixture has the weights of a fingerprint."""
    return bool(state["fingerprint"].get(WEIGHTS) == fingerprint[WEIGHTS])


def _shown_weights(described: Any) -> Any:
    """Return the weights of one stage as shares of 1, as a fingerprint has its periods; several stages as they are."""
    if not (isinstance(described, list) and len(described) == 1):
        return described
    rates = {name: 1 / period if period else 0.0 for name, period in described[0][1].items()}
    return {name: float(f"{rate / sum(rates.values()):.5g}") for name, rate in rates.items()}


def _small(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fingerprint as a state stores it: with digests for a mixture of many sources."""
    if "mixture" in fingerprint and len(json.dumps(fingerprint)) > _MOST_BYTES:
        return _digested(fingerprint)
    return deepcopy(dict(fingerprint))


def _is_small(fingerprint: Any) -> bool:
    mixture = fingerprint.get("mixture") if isinstance(fingerprint, Mapping) else None
    return isinstance(mixture, Mapping) and mixture.get("digests") is True


def _digested(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fingerprint of a mixture with a digest for each source's order and recipe; the shuffle, which all
    sources share, stays readable.
    """
    mixture = dict(fingerprint["mixture"])
    orders = mixture["sources"]
    mixture |= {
        "digests": True,
        "shuffle": deepcopy(next(iter(orders.values()))["shuffle"]),
        "sources": {name: _digest(order) for name, order in orders.items()},
    }
    sources = {
        name: {field: value if isinstance(value, float) else _digest(value) for field, value in source.items()}
        for name, source in fingerprint["sources"].items()
    }
    return {**deepcopy(dict(fingerprint)), "mixture": mixture, "sources": sources}


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def check_allowed(allow: Sequence[str]) -> None:
    """Raise ValueError for names that may never differ."""
    known = (*SIZES, WEIGHTS, SAMPLES)
    if isinstance(allow, str) or any(name not in known for name in allow):
        raise ValueError(f"allow must name entries of {', '.join(map(repr, known))}, which may differ; got {allow!r}")


def check_form(state: Any) -> None:
    """Raise StateError for what is no state, a version that is not known, and values of wrong types."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError("this is not a state of an orchdata DataLoader: it has no 'version'")
    if state["version"] != VERSION or isinstance(state["version"], bool):
        by = state.get("written_by")
        by = f" was written by orchdata {by['orchdata']} and" if isinstance(by, Mapping) and "orchdata" in by else ""
        raise StateError(
            f"the state{by} has version {state['version']}, this orchdata reads version {VERSION}: continue with that "
            "release or a later one"
        )
    for name, kind in _KINDS.items():
        value = state.get(name)
        if name not in state or (value is None and name == "drawn"):
            continue
        if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and abs(value) >= _LARGEST):
            raise StateError(f"the state is damaged: its {name!r} is {value!r}"[:200])


def place_of(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return the epoch and the step of a state. Raises StateError for what are none."""
    epoch, step = state.get("epoch"), state.get("step")
    if not (isinstance(epoch, int) and epoch >= 0 and isinstance(step, int) and step >= 0):
        raise StateError(f"the state points at epoch {epoch!r}, step {step!r}")
    return epoch, step


def _position(state: Mapping[str, Any], num_workers: int) -> Position:
    (epoch, step), draw = place_of(state), state.get("drawn")
    _check_draw(draw)
    workers = state.get("workers", [])
    if workers and len(workers) != max(1, num_workers):
        raise StateError(
            f"the state has the data set's state in each of {len(workers)} workers, and this loader has {num_workers}: "
            f"samples of such a data set belong to its workers, so pass num_workers={len(workers)}"
            f"{', or 0' if len(workers) == 1 else ''}"
        )
    base_seed, left = state.get("base_seed"), tuple(state.get("left", ()))
    if not all(isinstance(each, int) and 0 <= each < step for each in left):
        raise StateError(f"the state is damaged: steps {list(left)} cannot be left of {step}")
    return Position(
        epoch,
        step,
        draw,
        base_seed=base_seed,
        is_drawn=base_seed is not None,
        left=left,
        sampler=state.get("sampler"),
        workers=tuple(None if each is None else stored(each) for each in workers),
        worker=state.get("worker", -1),
    )


def _check_draw(draw: Mapping[str, Any] | None) -> None:
    """Raise StateError for a draw that no epoch can have."""
    if draw is None:
        return
    known = {name: draw[name] for name in _DRAWS if name in draw}
    if not (known and all(isinstance(each, _DRAWS[name]) for name, each in known.items())):
        raise StateError(f"the state is damaged: its epoch was drawn from {draw!r}, which is no draw")
    seed = known.get("seed", 0)
    if isinstance(seed, bool) or not -_LARGEST <= seed < 2 * _LARGEST:
        raise StateError(f"the state is damaged: its epoch was drawn from {seed!r:.40}, which is no valid seed")
    if "state" in known:
        try:
            generator_state(known["state"])
        except ValueError as error:
            reason = f"the state is damaged: its epoch was drawn from no state of a generator: {error}"
            raise StateError(reason) from error
    if "cut" in known and not is_begin(known["cut"]):
        raise StateError(f"the state is damaged: invalid 'cut' value {known['cut']!r:.80}, which is no cut of an epoch")


def _check_location(state: Mapping[str, Any], position: Position, steps: Steps) -> None:
    """Raise StateError if the loader has no such step, or at another position."""
    epoch, step, draw = position.epoch, position.step, position.draw
    try:
        num_steps = known_count(steps, epoch, draw)
        here = {} if num_steps is not None and step > num_steps else steps.location(epoch, step, draw)
    except (LookupError, ValueError) as error:
        reason = f"the state's epoch was drawn from {draw!r}, which is no draw of this loader's order"
        raise StateError(reason) from error
    if num_steps is not None and step > num_steps:
        raise StateError(f"the state points at epoch {epoch}, step {step}; an epoch has {num_steps} steps")
    for name, unit in (("tokens", "tokens"), ("position", "samples")):
        if name in here and state.get(name, here[name]) != here[name]:
            raise StateError(
                f"step {step} of epoch {epoch} begins after {state[name]} {unit} in the state and {here[name]} here"
            )
    for name in ("document", "token"):
        if name in here and state.get(name) != here[name]:
            raise StateError(
                f"step {step} of epoch {epoch} begins at {name} {state.get(name)} in the state and {here[name]} here"
            )


def _cut_again(state: Mapping[str, Any], position: Position, steps: Steps) -> Position:
    """Return the position with the rest of the epoch cut by this loader's size."""
    num_delivered = state.get("position")
    if not isinstance(num_delivered, int) or num_delivered < 0:
        raise StateError(
            "the state does not say how many samples were delivered, which a loader of another global batch size "
            "continues from: only states of a ShardDataset, or of map-style data with a seed, do"
        )
    if not num_delivered:
        return Position(position.epoch)
    draw = draw_of_cut(Begin(position.step, num_delivered))
    if "position" not in steps.location(position.epoch, position.step, draw):
        raise StateError("samples that torch draws continue with the global batch size that they were drawn with")
    return Position(position.epoch, position.step, draw)


def known_count(steps: Steps, epoch: int, draw: Draw | None) -> int | None:
    """Return the number of optimizer steps of an epoch; None if it is known only at the end."""
    try:
        return steps.count(epoch, draw)
    except (TypeError, NotImplementedError):
        return None


def _without_size(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    both = WEIGHTS in fingerprint
    return {
        name: value for name, value in fingerprint.items() if name not in _MEASURES and not (both and name == WEIGHTS)
    }


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


def _of(path: str) -> str:
    """Return the name of the source in the path of a difference."""
    names = path.split(".")
    return f" of source {names[names.index('sources') + 1]!r}" if "sources" in names[:-1] else ""


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _shown(value: Any) -> str:
    """Return a value for messages, without its digests."""
    return _DIGEST.sub("...", repr(value))


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
    words = f"{path} is {_shown(theirs)} in the state and {_shown(ours)} here"
    if _is_digest(theirs) or _is_digest(ours):
        words = f"{_WHAT.get(path.rpartition('.')[2], path)}{_of(path)} differs: the state has another one"
    if path == "order.format":
        words += (
            " (the algorithm of orders has changed: finish the epoch with the orchdata that began it, or begin one)"
        )
    return [words]
