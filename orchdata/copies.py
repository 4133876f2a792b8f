"""Copies of a loader, and its text: from its arguments and its position.

copy.deepcopy, pickle --> the arguments and the position --> another loader, in which nothing runs yet
"""

from __future__ import annotations

import copy
import inspect
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchdata.dataset.sharded import is_mixture, is_sharded
from orchdata.loop.position import Progress

_MOST_CHARACTERS = 200


def changed_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that differ from the function's defaults, by name."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    return {name: value for name, value in arguments.items() if name != "self" and value is not defaults[name]}


@dataclass(frozen=True, kw_only=True)
class LoaderSnapshot:
    """The position of a loader, and its rank.

    Attributes:
        rank: number of its data-parallel rank, and the number of ranks.
        progress: its position.
        later_seeds: source of the seeds of persistent workers.
        samplers: attributes `sampler` and `batch_sampler`, which the user may have changed or replaced; empty if the
            loader does not draw from them.
        state: state of the loader, if its order may have changed since it was created; else None.
        attributes: attributes that the user, or a subclass, added.
    """

    rank: tuple[int, int]
    progress: Progress
    later_seeds: Any
    samplers: Mapping[str, Any]
    state: Mapping[str, Any] | None
    attributes: Mapping[str, Any]


def take_snapshot(loader: Any) -> LoaderSnapshot:
    """Raises TypeError for a loader over a process group, and for an argument that can be read only once."""
    rank, given = loader._runtime.rank, loader._given
    consumed = [name for name, value in given.items() if isinstance(value, Iterator)]
    if consumed:
        raise TypeError(
            f"a DataLoader with an iterator for {consumed[0]}= cannot be copied or pickled, because the copy would get "
            "only the rest of the iterator: give a list, or an iterable that begins again at each iter()"
        )
    if not isinstance(given.get("dp"), tuple | None):
        raise TypeError(
            "a DataLoader over a process group or mesh cannot be copied or pickled, because the group belongs to its "
            "process: create the loader again on each rank, or give it dp=(rank, size)"
        )
    return LoaderSnapshot(
        rank=(rank.rank, rank.size),
        progress=copy.deepcopy(loader._progress),
        later_seeds=copy.deepcopy(loader._runtime.seeds.later),
        samplers={name: vars(loader)[name] for name in ("sampler", "batch_sampler") if loader._runtime.follows},
        state=loader.state_dict() if is_mixture(loader.dataset) else None,
        attributes={name: value for name, value in vars(loader).items() if name not in loader._own_names},
    )


def restore_snapshot(loader: Any, snapshot: LoaderSnapshot) -> None:
    """Move a new loader with the same arguments to the position of the copied one.

    Raises ValueError in a process of another rank: it would get the samples of the copied rank, or all of them.
    """
    runtime = loader._runtime
    rank = runtime.rank.rank, runtime.rank.size
    if rank != snapshot.rank:
        raise ValueError(
            f"this DataLoader was copied on rank {snapshot.rank[0]} of {snapshot.rank[1]}, and this process is rank "
            f"{rank[0]} of {rank[1]}: create the loader here, or create the copied one with dp=(rank, size)"
        )
    if snapshot.state is not None:
        runtime.load_state(snapshot.state, (), loader.num_workers)
    vars(loader._progress).update(vars(snapshot.progress))
    vars(loader).update(snapshot.samplers)
    vars(loader).update(snapshot.attributes)
    runtime.seeds.later = snapshot.later_seeds


def loader_text(loader: Any) -> str:
    """Return one line: the arguments that differ from the defaults, the rank, and the position."""
    (_, data), *arguments, (_, rank), (_, position) = facts_of(loader)
    shown = [data, *(f"{name}={value}" for name, value in arguments)]
    return f"{type(loader).__name__}({', '.join(shown)}; {rank}; {position})"


def facts_of(loader: Any) -> list[tuple[str, str]]:
    """Return the data, the arguments that differ from the defaults, the rank, and the position, each with its name."""
    given, rank, position = loader._given, loader._runtime.rank, loader._progress.position
    shown = [(name, _shown(value)) for name, value in given.items() if name not in ("dataset", "dp")]
    if not {"batch_size", "global_batch_size", "global_batch_tokens", "batch_sampler"} & given.keys():
        shown.insert(0, ("batch_size", str(loader.batch_size)))
    where = f"epoch {position.epoch}, step {position.step}"
    return [
        *(("data", _shown_dataset(loader.dataset)), *shown),
        *(("rank", f"rank {rank.rank} of {rank.size}"), ("position", where)),
    ]


def _shown_dataset(dataset: Any) -> str:
    if is_sharded(dataset):
        return repr(dataset)
    name = type(dataset).__name__
    try:
        return f"{name} of {len(dataset):,}" if isinstance(dataset, Sized) else name
    except Exception:  # noqa: BLE001 - the user's own __len__, which may work later
        return name


def _shown(value: Any) -> str:
    """Return any value as one line, without the address in a default repr."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    if " object at 0x" in repr(value):
        return type(value).__name__
    return reprlib.repr(value) if isinstance(value, list | tuple | dict | set | str) else _cut(repr(value))


def _cut(text: str) -> str:
    """Return a text that is too long up to a comma, so that no number is shown in part."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    begin = text[:_MOST_CHARACTERS]
    return f"{begin.rpartition(', ')[0] or begin}, ..."
