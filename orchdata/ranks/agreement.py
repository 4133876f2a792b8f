"""Agreement: every rank plans alone; this checks that all plan the same, and names the ranks that do not.

At the start ranks compare descriptions (data set, recipe, order, sizes, balance, cost model), later plan hashes. The
collectives gather over process groups, one after another: the group of the data-parallel ranks, or those of a mesh's
dims, which together reach every rank. Without a group see `comparing`.
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
DATA = "data"  # the entry of the content of a map-style data set
_FAILURE = "failure"
_EQUAL_DATA = "if these are equal data under other paths or fingerprints, dp=(rank, size) is not compared"
_SHOWN_RANKS = 8
_SHOWN_CHARACTERS = 200


def make_alike(
    make: Callable[[], T], describe: Callable[[T], Mapping[str, Any]], groups: Sequence[Any]
) -> tuple[T, list[int]]:
    """Return what `make` returns, if all ranks made the same, and the global numbers of these ranks.

    Args:
        describe: returns a JSON-safe description of it; nested mappings are compared entry by entry.

    Raises as `check_accounts`, the same on all ranks; and what `make` raises here.
    """
    try:
        made = make()
        described = account(describe(made))
    except Exception as error:
        gather(failure_account(error), groups)  # or the others would wait for this rank
        raise
    by_rank = gather(described, groups)
    check_accounts(by_rank)
    return made, list(by_rank)


def account(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a description by dotted path."""
    return dict(_entries(described))


def failure_account(error: Exception) -> dict[str, Any]:
    return {_FAILURE: f"{type(error).__name__}: {error}"}


def check_accounts(by_rank: Mapping[int, Mapping[str, Any]], advice: str = "") -> None:
    """Compare the descriptions of all ranks, or their failures.

    Raises:
        ValueError: descriptions differ; names the ranks, and each entry with its values.
        RuntimeError: a rank could not make it; names it and its error.
    """
    failed = _failures(by_rank)
    hint = f" ({advice})" if advice else ""
    if failed:
        count = sum(_FAILURE in entries for entries in by_rank.values())
        raise RuntimeError(f"this loader needs all its ranks, and {count} could not make it: {failed}{hint}")
    difference = find_difference(by_rank)
    if difference:
        if any(name.split(".")[0] == DATA for name in _differing(by_rank)):
            hint = f" ({'; '.join(filter(None, [advice, _EQUAL_DATA]))})"
        raise ValueError(f"all ranks of a loader must plan the same steps; {difference}{hint}")


def check_plans(epoch: int, step: int, plan_hash: str | None, groups: Sequence[Any]) -> None:
    """Compare the plan of the step that is delivered next; `plan_hash` is None at the end of an epoch.

    Raises RuntimeError on all ranks: it names those that differ, with hashes, or those that failed, with errors.
    """
    by_rank = gather({"epoch": epoch, "step": step, "plan": plan_hash}, groups)
    failed = _failures(by_rank)
    if failed:
        raise RuntimeError(f"other ranks failed where plans are compared, at epoch {epoch}, step {step}: {failed}")
    difference = find_difference(by_rank)
    if difference:
        raise RuntimeError(f"ranks follow different plans at epoch {epoch}, step {step} of this rank; {difference}")


def fail_check(error: Exception, groups: Sequence[Any]) -> None:
    """Take part in the others' `check_plans` with `error` in place of a plan, so that they raise and do not wait."""
    with contextlib.suppress(RuntimeError):  # of lost ranks: this rank raises `error`
        gather(failure_account(error), groups)


def _failures(by_rank: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the first ranks that failed, each with its error, as text; empty if none did."""
    failed = [(rank, entries[_FAILURE]) for rank, entries in by_rank.items() if _FAILURE in entries]
    return "; ".join(f"rank {rank}: {failure}" for rank, failure in failed[:_SHOWN_RANKS])


def find_difference(by_rank: Mapping[int, Mapping[str, Any]]) -> str:
    """Return which ranks differ from the majority, and in what; "" if none. Without a majority all are named."""
    accounts = {rank: _dump(entries) for rank, entries in by_rank.items()}
    (common, count), *others = Counter(accounts.values()).most_common()
    if not others:
        return ""
    if 2 * count > len(accounts):
        odd = [rank for rank, account in accounts.items() if account != common]
        head = f"{name_ranks(odd)} {'differs' if len(odd) == 1 else 'differ'} from the others"
    else:
        head = f"{name_ranks(list(accounts))} differ from each other"
    return f"{head}: " + "; ".join(_values(name, by_rank) for name in _differing(by_rank))


def _differing(by_rank: Mapping[int, Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for entries in by_rank.values() for name in entries)
    return [name for name in names if len({_shown(entries, name) for entries in by_rank.values()}) > 1]


def _values(name: str, by_rank: Mapping[int, Mapping[str, Any]]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, entries in by_rank.items():
        ranks.setdefault(_shown(entries, name), []).append(rank)
    most_first = sorted(ranks.items(), key=lambda item: -len(item[1]))
    return f"{name} is " + ", ".join(f"{value[:_SHOWN_CHARACTERS]} on {name_ranks(on)}" for value, on in most_first)


def _shown(entries: Mapping[str, Any], name: str) -> str:
    return _dump(entries[name]) if name in entries else "missing"


def name_ranks(ranks: Sequence[int], count: int | None = None) -> str:
    """Return the first of `count` ranks (default: of `ranks`), as text."""
    shown = ranks[:_SHOWN_RANKS]
    count = len(ranks) if count is None else count
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    return f"rank{'s' if count > 1 else ''} {', '.join(map(str, shown))}{more}"


def _entries(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings, by dotted path."""
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for name, inner in value.items():
        yield from _entries(inner, f"{path}.{name}" if path else str(name))
