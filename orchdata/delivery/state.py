"""The state of a loader: where in which epoch it stands, and of what.

Small, JSON-safe, versioned and the same on every rank, so rank 0's loads everywhere. Version 1 told of a mixture all
stages instead of what its sources have given; `dataset/mixed.py` translates that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchdata.loaders.errors import StateError
from orchdata.order.mixture import weights_of
from orchdata.order.sampler import generator_state
from orchdata.order.steps import Begin, Epochs, Told, is_begin, told_begin

VERSION = 2
READ = (1, VERSION)
SIZES = ("global_batch_size", "global_batch_tokens")  # which may differ where `allow` names them
WEIGHTS = "weights"  # of a mixture, which may too
_MOST_BYTES = 8192  # of a fingerprint of a mixture; a larger one is told by digests
_MEASURES = frozenset((*SIZES, "tokens_multiple_of"))
_KINDS: dict[str, type[Any] | tuple[type[Any], ...]] = {
    **dict.fromkeys(("epoch", "step", "position", "tokens", "base_seed", "worker"), int),
    **dict.fromkeys(("fingerprint", "drawn"), Mapping),
    **dict.fromkeys(("left", "workers"), (list, tuple)),
}
_DRAWS: dict[str, type[Any]] = {"seed": int, "state": str, "cut": object}  # what an epoch may be drawn from
_LARGEST = 1 << 63

Held = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Position:
    """A place between two optimizer steps: the steps of `epoch` below `step` were delivered, but for those `left`.

    Attributes:
        told: what the samples of the epoch depend on beside its number (`Epochs.tell`), once that is known.
        base_seed: of the workers' random states, where this loader is alone.
        is_drawn: whether both are known, and what the epoch will be or is.
        left: steps that others have overtaken, where they come as they are ready.
        sampler: what it held of its own behind step `step - 1`, at an epoch's start behind the last one of that before.
        held: by worker, asks for what its data set held behind the last step that was delivered of it; None for
            one that nothing was delivered of.
        worker: of the step delivered last.
    """

    epoch: int = 0
    step: int = 0
    told: Told | None = None
    base_seed: int | None = None
    is_drawn: bool = False
    left: tuple[int, ...] = ()
    sampler: Any = None
    held: tuple[Held | None, ...] = ()
    worker: int = -1

    def __getstate__(self) -> dict[str, Any]:
        """For a copy: what the data sets hold now, in place of functions that ask the running workers for it."""
        held = tuple(None if ask is None else partial(_itself, deepcopy(ask())) for ask in self.held)
        return {**vars(self), "held": held}

    def following(self, *, held: bool) -> Position:
        """The start of the next epoch, from the end of this one; whether data sets go on with what they hold."""
        return Position(self.epoch + 1, sampler=self.sampler, held=self.held if held else ())


def dump_state(position: Position, fingerprint: Mapping[str, Any], epochs: Epochs) -> dict[str, Any]:
    """A state that shares nothing with the loader, for torch.distributed.checkpoint loads into what it is given. Raises
    what asking a data set of this process for its state does.
    """
    held = {
        "drawn": None if position.told is None else deepcopy(dict(position.told)),
        "base_seed": position.base_seed if position.is_drawn else None,
        "left": list(position.left) or None,
        "sampler": deepcopy(position.sampler),
        "workers": [None if ask is None else deepcopy(ask()) for ask in position.held] or None,
    }
    if position.held and position.step:
        held["worker"] = position.worker
    return {
        "version": VERSION,
        "epoch": position.epoch,
        "step": position.step,
        **epochs.place(position.epoch, position.step, position.told),
        **{name: value for name, value in held.items() if value is not None},
        "fingerprint": _small(fingerprint),
    }


def load_state(
    state: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    epochs: Epochs,
    allow: Sequence[str] = (),
    num_workers: int = 0,
    *,
    cut: bool = False,
    check: bool = True,
) -> Position:
    """The position of `state`. Raises StateError, naming each difference, if it belongs to something else.

    Args:
        epochs: of the loader that goes on; of a mixture, in the stages that the state tells.
        allow: names of SIZES, or WEIGHTS, that may differ: the rest of the epoch is then cut anew, from the state's
            place on.
        num_workers: of the loader.
        cut: whether the rest of the epoch is cut anew in any case.
        check: whether `epochs` find the steps before the state's place, which is then compared.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError("this is not a state of an orchdata DataLoader: it has no 'version'")
    if state["version"] not in READ or isinstance(state["version"], bool):
        known = " and ".join(map(str, READ))
        raise StateError(f"the state has version {state['version']}, this orchdata reads versions {known}")
    _check_kinds(state)
    theirs = _with_present_weights(state.get("fingerprint", {}))
    if _is_small(theirs):
        fingerprint = _digested(fingerprint)
    differences = _differences(_without_size(theirs), _without_size(fingerprint), "")
    other_size = _other_size(theirs, fingerprint)
    if other_size is not None and other_size[0] not in allow:
        differences.append(other_size[1])
    other_weights = bool(theirs.keys() & fingerprint.keys() & {WEIGHTS}) and theirs[WEIGHTS] != fingerprint[WEIGHTS]
    if other_weights and WEIGHTS not in allow:
        how = f"load_state_dict(state, allow=({WEIGHTS!r},)) goes on with the weights here"
        differences.append(f"weights are {theirs[WEIGHTS]} in the state and {fingerprint[WEIGHTS]} here ({how})")
    if differences:
        raise StateError("the state belongs to another loader: " + "; ".join(differences))
    position = _position(state, num_workers)
    if other_size is None:
        if check:
            _check_place(state, position, epochs)
        if not other_weights and not cut:
            return position
    return _cut_anew(state, position, epochs)


def is_of_mixture(state: Any, fingerprint: Mapping[str, Any]) -> bool:
    """Whether a state is of the mixture of a fingerprint, whatever its weights are."""
    theirs = state.get("fingerprint") if isinstance(state, Mapping) else None
    if not isinstance(theirs, Mapping) or state.get("version") not in READ:
        return False
    ours = _digested(fingerprint) if _is_small(theirs) else fingerprint
    return bool(theirs.get("mixture") == ours["mixture"])


def has_weights(state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> bool:
    """Whether a state of a mixture has the weights of a fingerprint."""
    return bool(_with_present_weights(state["fingerprint"]).get(WEIGHTS) == fingerprint[WEIGHTS])


def _with_present_weights(fingerprint: Any) -> Any:
    """A fingerprint with its weights as they are told now: of version 1 it has all stages."""
    if not (isinstance(fingerprint, Mapping) and isinstance(fingerprint.get(WEIGHTS), list)):
        return fingerprint
    return {**fingerprint, WEIGHTS: weights_of(fingerprint[WEIGHTS])}


def _small(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint as a state holds it: of a mixture of many sources by digests."""
    if "mixture" in fingerprint and len(json.dumps(fingerprint)) > _MOST_BYTES:
        return _digested(fingerprint)
    return deepcopy(dict(fingerprint))


def _is_small(fingerprint: Any) -> bool:
    mixture = fingerprint.get("mixture") if isinstance(fingerprint, Mapping) else None
    return isinstance(mixture, Mapping) and mixture.get("digests") is True


def _digested(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint of a mixture with a digest for each source's order and recipe; its shuffle, which is of all
    sources, stays readable.
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
    """Raise ValueError for what may never differ."""
    known = (*SIZES, WEIGHTS)
    if isinstance(allow, str) or any(name not in known for name in allow):
        raise ValueError(f"allow names what of a state may differ, of {', '.join(map(repr, known))}; got {allow!r}")


def _check_kinds(state: Mapping[str, Any]) -> None:
    """Raise StateError for what no state holds."""
    for name, kind in _KINDS.items():
        value = state.get(name)
        if name not in state or (value is None and name == "drawn"):
            continue
        if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and abs(value) >= _LARGEST):
            raise StateError(f"the state is damaged: its {name!r} is {value!r}"[:200])


def _position(state: Mapping[str, Any], num_workers: int) -> Position:
    epoch, step, drawn = state.get("epoch"), state.get("step"), state.get("drawn")
    if not (isinstance(epoch, int) and epoch >= 0 and isinstance(step, int) and step >= 0):
        raise StateError(f"the state points at epoch {epoch!r}, step {step!r}")
    told = {} if drawn is None else {name: drawn[name] for name in _DRAWS if name in drawn}
    if drawn is not None and not (told and all(isinstance(each, _DRAWS[name]) for name, each in told.items())):
        raise StateError(f"the state says that its epoch was drawn from {drawn!r}, which is no draw")
    _check_draw(told)
    if drawn is not None and "cut" in drawn and not is_begin(drawn["cut"]):
        raise StateError(f"the state says that its epoch was cut anew from {drawn['cut']!r}, which is no cut")
    workers = state.get("workers", [])
    if workers and len(workers) != max(1, num_workers):
        raise StateError(
            f"the state holds what the data set of each of {len(workers)} workers held, and this loader has "
            f"{num_workers}: samples of such a data set are its workers', so give num_workers={len(workers)}"
            f"{', or 0' if len(workers) == 1 else ''}"
        )
    base_seed, left = state.get("base_seed"), tuple(state.get("left", ()))
    if not all(isinstance(each, int) and 0 <= each < step for each in left):
        raise StateError(f"the state says that steps {list(left)} are left of {step}")
    return Position(
        epoch,
        step,
        drawn,
        base_seed=base_seed,
        is_drawn=base_seed is not None,
        left=left,
        sampler=state.get("sampler"),
        held=tuple(None if each is None else partial(_itself, each) for each in workers),
        worker=state.get("worker", -1),
    )


def _check_draw(told: Mapping[str, Any]) -> None:
    """Raise StateError for what no generator starts from."""
    seed = told.get("seed", 0)
    if isinstance(seed, bool) or not -_LARGEST <= seed < 2 * _LARGEST:
        raise StateError(f"the state says that its epoch was drawn from the seed {seed!r:.40}, which is none")
    if "state" in told:
        try:
            generator_state(told["state"])
        except ValueError as error:
            reason = f"the state says that its epoch was drawn from no state of a generator: {error}"
            raise StateError(reason) from error


def _itself(held: dict[str, Any]) -> dict[str, Any]:
    return deepcopy(held)  # the data set may go on in it


def _check_place(state: Mapping[str, Any], position: Position, epochs: Epochs) -> None:
    """Raise StateError where the loader has no such step, or has it elsewhere."""
    epoch, step, told = position.epoch, position.step, position.told
    try:
        num_steps = known_count(epochs, epoch, told)
        here = {} if num_steps is not None and step > num_steps else epochs.place(epoch, step, told)
    except (LookupError, ValueError) as error:
        reason = f"the state says that its epoch was drawn from {told!r}, which is no draw of this loader's order"
        raise StateError(reason) from error
    if num_steps is not None and step > num_steps:
        raise StateError(f"the state points at epoch {epoch}, step {step}; an epoch has {num_steps} steps")
    for name, unit in (("tokens", "tokens"), ("position", "samples")):
        if name in here and state.get(name, here[name]) != here[name]:
            raise StateError(
                f"step {step} of epoch {epoch} begins behind {state[name]} {unit} in the state and {here[name]} here"
            )


def _cut_anew(state: Mapping[str, Any], position: Position, epochs: Epochs) -> Position:
    place = state.get("position")
    if not isinstance(place, int) or place < 0:
        raise StateError(
            "the state does not say how many samples were delivered, which a loader of another global batch size goes "
            "on from: only orders of our own tell, as those of a ShardDataset, or of map-style data with a seed"
        )
    if not place:
        return Position(position.epoch)
    told = told_begin(Begin(position.step, place))
    if "position" not in epochs.place(position.epoch, position.step, told):
        raise StateError("samples that torch draws go on with the global batch size that they were drawn with")
    return Position(position.epoch, position.step, told)


def known_count(epochs: Epochs, epoch: int, told: Told | None) -> int | None:
    """Optimizer steps of an epoch; None where nobody knows before the end."""
    try:
        return epochs.count(epoch, told)
    except (TypeError, NotImplementedError):
        return None


def _without_size(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    both = WEIGHTS in fingerprint
    return {
        name: value for name, value in fingerprint.items() if name not in _MEASURES and not (both and name == WEIGHTS)
    }


def _other_size(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[str, str] | None:
    """Where steps are of another size: the name of ours, and what differs in words."""
    there, here = ({name: each[name] for name in _MEASURES & each.keys()} for each in (theirs, ours))
    if there == here:
        return None
    name = next(name for name in SIZES if name in here)
    how = f"load_state_dict(state, allow=({name!r},)) cuts what is left of the epoch anew"
    if there.keys() == here.keys() == {name}:
        return name, f"{name} is {there[name]} in the state and {here[name]} here ({how})"
    told = [", ".join(f"{key}={size[key]}" for key in sorted(size)) for size in (there, here)]
    return name, f"a step has {told[0]} in the state and {told[1]} here ({how})"


def _differences(theirs: Any, ours: Any, path: str) -> list[str]:
    """What differs, in words."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        names = [*ours, *(name for name in theirs if name not in ours)]
        return [
            found
            for name in names
            for found in _differences(theirs.get(name), ours.get(name), f"{path}.{name}" if path else str(name))
        ]
    if theirs == ours:
        return []
    words = f"{path} is {theirs!r} in the state and {ours!r} here"
    if path == "order.format":
        words += (
            " (orders are made in another way since: finish the epoch with the orchdata that began it, or begin one)"
        )
    return [words]
