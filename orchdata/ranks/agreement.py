"""Agreement: every rank plans alone, and this finds out whether all plan the same, and names those that do not.

At start descriptions are compared (data set, recipe, order, sizes, balance, cost model), on the way plan hashes. The
collectives take the process groups to gather over, one after another: the one of the data-parallel ranks, or those of a
mesh's dims, which together reach every rank. Without a group see `comparing`.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from orchdata.ranks.gathering import gather

T = TypeVar("T")

_dump = partial(json.dumps, sort_keys=True)
DATA = "data"  # the entry of what a map-style data set holds
_FAILURE = "failure"
_EQUAL_DATA = "if these are equal data under other paths or fingerprints, dp=(rank, size) is not compared"
_SHOWN_RANKS = 8
_SHOWN_CHARACTERS = 200


def make_alike(
    make: Callable[[], T], describe: Callable[[T], Mapping[str, Any]], groups: Sequence[Any]
) -> tuple[T, list[int]]:
    """What `make` returns, where all ranks made the same, and the global numbers of these ranks.

    Args:
        describe: a JSON-safe account of what was made; nested mappings are compared entry by entry.

    Raises as `check_accounts`, the same on all ranks; and what `make` raises here.
    """
    try:
        made = make()
        described = account(describe(made))
    except Exception as error:
        gather(failure_account(error), groups)  # or the others would wait for this rank
        raise
    told = gather(described, groups)
    check_accounts(told)
    return made, list(told)


def account(described: Mapping[str, Any]) -> dict[str, Any]:
    """A description as entries by dotted path."""
    return dict(_entries(described))


def failure_account(error: Exception) -> dict[str, Any]:
    return {_FAILURE: f"{type(error).__name__}: {error}"}


def check_accounts(told: Mapping[int, Mapping[str, Any]], advice: str = "") -> None:
    """Compare what each rank made.

    Raises:
        ValueError: descriptions differ; names the ranks, and each entry with its values.
        RuntimeError: a rank could not make it; names it and its error.
    """
    failed = _failures(told)
    hint = f" ({advice})" if advice else ""
    if failed:
        count = sum(_FAILURE in entries for entries in told.values())
        raise RuntimeError(f"this loader needs all its ranks, and {count} could not make it: {failed}{hint}")
    difference = find_difference(told)
    if difference:
        if any(name.split(".")[0] == DATA for name in _differing(told)):
            hint = f" ({'; '.join(filter(None, [advice, _EQUAL_DATA]))})"
        raise ValueError(f"all ranks of a loader must plan the same steps; {difference}{hint}")


def check_plans(epoch: int, step: int, plan_hash: str | None, groups: Sequence[Any]) -> None:
    """Compare the plan of the step that is handed out next; `plan_hash` is None at the end of an epoch.

    Raises RuntimeError on all ranks, naming those that differ, with hashes, or those that failed, with errors.
    """
    told = gather({"epoch": epoch, "step": step, "plan": plan_hash}, groups)
    failed = _failures(told)
    if failed:
        raise RuntimeError(f"other ranks failed where plans are compared, at epoch {epoch}, step {step}: {failed}")
    difference = find_difference(told)
    if difference:
        raise RuntimeError(f"ranks follow different plans at epoch {epoch}, step {step} of this rank; {difference}")


def fail_check(error: Exception, groups: Sequence[Any]) -> None:
    """Take part in the others' `check_plans` with `error` in place of a plan: they raise too, and do not wait."""
    with contextlib.suppress(RuntimeError):  # of ranks that are lost: `error` is what this rank raises
        gather(failure_account(error), groups)


def _failures(told: Mapping[int, Mapping[str, Any]]) -> str:
    """Ranks that failed, the first of them, each with its error; empty where none did."""
    failed = [(rank, entries[_FAILURE]) for rank, entries in told.items() if _FAILURE in entries]
    return "; ".join(f"rank {rank}: {failure}" for rank, failure in failed[:_SHOWN_RANKS])


def find_difference(told: Mapping[int, Mapping[str, Any]]) -> str:
    """Which ranks differ from most, and in what; empty where none does. Without a majority all are named."""
    accounts = {rank: _dump(entries) for rank, entries in told.items()}
    (common, count), *others = Counter(accounts.values()).most_common()
    if not others:
        return ""
    if 2 * count > len(accounts):
        odd = [rank for rank, account in accounts.items() if account != common]
        head = f"{name_ranks(odd)} {'differs' if len(odd) == 1 else 'differ'} from the others"
    else:
        head = f"{name_ranks(list(accounts))} differ from each other"
    return f"{head}: " + "; ".join(_values(name, told) for name in _differing(told))


def _differing(told: Mapping[int, Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for entries in told.values() for name in entries)
    return [name for name in names if len({_shown(entries, name) for entries in told.values()}) > 1]


def _values(name: str, told: Mapping[int, Mapping[str, Any]]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, entries in told.items():
        ranks.setdefault(_shown(entries, name), []).append(rank)
    most_first = sorted(ranks.items(), key=lambda item: -len(item[1]))
    return f"{name} is " + ", ".join(f"{value[:_SHOWN_CHARACTERS]} on {name_ranks(on)}" for value, on in most_first)


def _shown(entries: Mapping[str, Any], name: str) -> str:
    return _dump(entries[name]) if name in entries else "missing"


def name_ranks(ranks: Sequence[int], count: int | None = None) -> str:
    """The first of `count` ranks (default: of `ranks`), as words."""
    shown = ranks[:_SHOWN_RANKS]
    count = len(ranks) if count is None else count
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    return f"rank{'s' if count > 1 else ''} {', '.join(map(str, shown))}{more}"


def _entries(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, by dotted path."""
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for name, inner in value.items():
        yield from _entries(inner, f"{path}.{name}" if path else str(name))
