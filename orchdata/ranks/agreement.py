"""Agreement: every rank plans alone, and these collectives find out whether all plan the same.

At start descriptions are compared (data set, recipe, order, sizes, balance, cost model), on the way plan hashes. Each
function takes the process groups to gather over, one after another: the one of the data-parallel ranks, or those of a
mesh's dims, which together reach every rank. No group, no collective.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_dump = partial(json.dumps, sort_keys=True, default=str)
_FAILURE = "failure"
_SHOWN_RANKS = 8
_SHOWN_CHARACTERS = 200


def gather(value: Any, groups: Sequence[Any]) -> dict[int, Any]:
    """The `value` of every rank that `groups` reach, by global rank. A collective over each of them in turn."""
    held = {dist.get_rank() if groups else 0: value}
    for group in groups:
        by_rank: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(by_rank, held, group=group)
        held = {rank: told for part in by_rank for rank, told in part.items()}
    return dict(sorted(held.items()))


def make_alike(make: Callable[[], T], describe: Callable[[T], Mapping[str, Any]], groups: Sequence[Any]) -> T:
    """What `make` returns, where all ranks made the same.

    Args:
        describe: a JSON-safe account of what was made; nested mappings are compared entry by entry.

    Raises:
        ValueError: descriptions differ; names the ranks, and each entry with its values. The same on all ranks.
        RuntimeError: `make` failed on another rank; names it and its error.
    """
    if not groups:
        return make()
    try:
        made = make()
    except Exception as error:
        gather({_FAILURE: f"{type(error).__name__}: {error}"}, groups)  # or the others would wait for this rank
        raise
    told = gather(dict(_entries(describe(made))), groups)
    failed = {rank: entries[_FAILURE] for rank, entries in told.items() if _FAILURE in entries}
    if failed:
        said = "; ".join(f"rank {rank}: {failure}" for rank, failure in list(failed.items())[:_SHOWN_RANKS])
        raise RuntimeError(f"this loader needs all its ranks, and {len(failed)} could not make it: {said}")
    difference = find_difference(told)
    if difference:
        raise ValueError(f"all ranks of a loader must plan the same steps; {difference}")
    return made


def check_plans(epoch: int, step: int, plan_hash: str | None, groups: Sequence[Any]) -> None:
    """Compare the plan of the step that comes next; `plan_hash` is None at the end of an epoch.

    Raises RuntimeError on all ranks, naming those that differ, with the hashes.
    """
    told = gather({"epoch": epoch, "step": step, "plan": plan_hash}, groups)
    difference = find_difference(told)
    if difference:
        raise RuntimeError(f"ranks follow different plans at epoch {epoch}, step {step} of this rank; {difference}")


def find_difference(told: Mapping[int, Mapping[str, Any]]) -> str:
    """Which ranks differ from most, and in what; empty where none does. Without a majority all are named."""
    accounts = {rank: _dump(entries) for rank, entries in told.items()}
    (common, count), *others = Counter(accounts.values()).most_common()
    if not others:
        return ""
    if 2 * count > len(accounts):
        odd = [rank for rank, account in accounts.items() if account != common]
        head = f"{_name(odd)} {'differs' if len(odd) == 1 else 'differ'} from the others"
    else:
        head = f"{_name(list(accounts))} differ from each other"
    return f"{head}: " + "; ".join(_values(name, told) for name in _differing(told))


def _differing(told: Mapping[int, Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for entries in told.values() for name in entries)
    return [name for name in names if len({_shown(entries, name) for entries in told.values()}) > 1]


def _values(name: str, told: Mapping[int, Mapping[str, Any]]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, entries in told.items():
        ranks.setdefault(_shown(entries, name), []).append(rank)
    most_first = sorted(ranks.items(), key=lambda item: -len(item[1]))
    return f"{name} is " + ", ".join(f"{value[:_SHOWN_CHARACTERS]} on {_name(on)}" for value, on in most_first)


def _shown(entries: Mapping[str, Any], name: str) -> str:
    return _dump(entries[name]) if name in entries else "missing"


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN_RANKS])
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"


def _entries(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, by dotted path."""
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for name, inner in value.items():
        yield from _entries(inner, f"{path}.{name}" if path else str(name))
