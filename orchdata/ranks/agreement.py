"""Agreement: every rank plans alone; this checks that all plan the same, and names the ranks that do not.

    loader made       its description, by argument: with a group at once; with dp=None, where only some ranks may make
                      it, at the first step
    iteration begun   its epoch and step, before its first step
    every N steps     the hash of the plan, by a collective (`check_plan_every`)

For the first two each rank posts a JSON value in the store of the job. Two counters show whether all values are equal,
for any number of ranks; values are read only for an error or a warning, which name ranks that differ or have not
posted. Nothing that a rank sends is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from orchdata.ranks.gathering import gather
from orchdata.ranks.parallel import Rank, group_timeout
from orchdata.ranks.store import JobStore, job_store

T = TypeVar("T")
Value = Mapping[str, Any]
ByRank = Mapping[int, Value]

DATA = "data"  # the entry of the content of a map-style data set
LATE_SECONDS = 10.0  # A warning names ranks that are missing after this time: ranks start at about the same time.
_LATER_SECONDS = 60.0  # The same when a loader is made, and later: rank 0 may be indexing, or writing a checkpoint.
_LEAVE_SECONDS = 2.0  # Rank 0, which may serve the store, waits this long for others to see that all are equal.
_SHOWN_RANKS = 8
_SHOWN_CHARACTERS = 200  # Of a longer value ranks compare a digest.
_FAILURE = "failure"
_STARTS = ("epoch", "step")
_ALONE = "a loader of one rank alone is made with dp=(0, 1)"
_ADVICE = f"all make the same ones in the same order; {_ALONE}"


class Agreement:
    """Makes a loader, and compares it with those of the other ranks.

    Attributes:
        compared: what ranks send each other; None if they cannot.
    """

    def __init__(self, rank: Rank) -> None:
        self.compared = _comparison(rank)
        self._at_once = bool(rank.groups)

    def make(self, make: Callable[[], T], describe: Callable[[T], Value]) -> T:
        """Return what `make` returns. If it differs from the other ranks', this or the first step raises.

        Args:
            describe: returns a JSON-safe description of it; nested mappings are compared entry by entry.

        Raises as `Beginning.agree` (loop/planned.py).
        """
        made = make()
        if self.compared is not None:
            self.compared.made = self.compared.post(account(describe(made)))
            if self._at_once:
                self.compared.made.wait(_LATER_SECONDS)
        return made

    @contextlib.contextmanager
    def telling_others(self) -> Iterator[None]:
        """Run a block, and report an exception in it, after which there is no loader, to the other ranks, unless they
        have its description.
        """
        try:
            yield
        except Exception as error:
            if self.compared is not None and self.compared.made is None:
                with contextlib.suppress(RuntimeError):  # of the store: this rank raises `error`
                    self.compared.post(failure_account(error))
            raise

    @property
    def reaches_all(self) -> bool:
        """Whether ranks can send each other anything."""
        return self.compared is not None


@dataclass
class Comparison:
    """A loader and those of the other ranks with the same number.

    Args:
        rank: this one, of `ranks`.
        scope: of loaders that are numbered together on each rank.

    Attributes:
        made: the post of the loader's description, the first one.
    """

    job: JobStore
    rank: int
    ranks: Sequence[int]
    scope: str
    number: int
    made: Post | None = None
    num_posts: int = 0

    def post(self, value: Value, shared: Value | None = None) -> Post:
        """Post the loader's next value, and on the first rank what it shares with the others."""
        self.num_posts += 1
        return Post(self, self.num_posts, value, shared)

    def wait(self, begun: Post) -> None:
        """Wait until all ranks have made equal loaders, and begun an iteration as this one. Raises as `Post.wait`."""
        if self.made is not None:
            self.made.wait(LATE_SECONDS)
        begun.wait(LATE_SECONDS if begun.number == 2 else _LATER_SECONDS)


def _comparison(rank: Rank) -> Comparison | None:
    """Return the comparison of the loader that this rank makes now; None without others, or without a store."""
    store = job_store() if len(rank.ranks) > 1 else None
    if store is None:
        return None
    job = JobStore(store, group_timeout((rank.groups or rank.dp_groups)[0]).total_seconds())
    scope = _digest(json.dumps(rank.ranks)) if rank.groups else "world"
    numbers, own = _numbers.setdefault(dist.group.WORLD, {}), dist.get_rank()
    if scope not in numbers:  # a store may outlive a process group: its old entries are not those of this one
        numbers[scope] = job.ask(lambda store: int(store.add(f"{scope}/jobs/{own}", 1))), 0
    number_of_job, number = numbers[scope]
    numbers[scope] = number_of_job, number + 1
    return Comparison(job, own, rank.ranks, f"{scope}/{number_of_job}", number + 1)


# Process group -> scope -> its number among the groups that one store serves, and the number of loaders made in it.
_numbers: WeakKeyDictionary[Any, dict[str, tuple[int, int]]] = WeakKeyDictionary()


class Post:
    """One value from each rank, posted when this is made.

        of/RANK       the rank's value                  all      the number of ranks that have posted
        with/DIGEST   the number of ranks with it       seen     of those that have seen that all are equal
        shared        what the first rank shares

    Attributes:
        number: among the posts of the loader.
        shared: of the first rank, once all have posted.
    """

    def __init__(self, compared: Comparison, number: int, value: Value, shared: Value | None) -> None:
        self.number = number
        self.shared = shared
        self._compared = compared
        self._ask = compared.job.ask
        self._start = ", ".join(f"{name} {value[name]}" for name in _STARTS if name in value)
        self._is_equal = False
        self._folder = f"{compared.scope}/{compared.number}/{number}"
        text = json.dumps(value, sort_keys=True)
        self._own, self._alike = self._key(f"of/{compared.rank}"), self._key(f"with/{_digest(text)}")
        self._all, self._seen, self._shares = self._key("all"), self._key("seen"), self._key("shared")

        def post(store: Any) -> None:  # the counters come last: what is counted can be read
            if shared is not None and compared.rank == compared.ranks[0]:
                store.set(self._shares, json.dumps(shared))
            store.set(self._own, text)
            store.add(self._alike, 1)
            store.add(self._all, 1)

        self._ask(post)

    def wait(self, late_seconds: float) -> None:
        """Wait until all ranks have posted the same; a warning names those that are missing after some seconds.

        Raises as `check_accounts`, or RuntimeError for ranks that are missing at the timeout.
        """
        started, pause, warned = time.monotonic(), 0.002, False
        num_ranks, timeout = len(self._compared.ranks), self._compared.job.timeout
        while not self._is_equal:
            waited = time.monotonic() - started
            # Fewer alike than posts are a difference: posts between the two reads only make more alike.
            posted, alike = self._ask(lambda store: (int(store.add(self._all, 0)), int(store.add(self._alike, 0))))
            if alike >= num_ranks:
                self._leave()
                return
            if alike < posted and (posted == num_ranks or waited >= LATE_SECONDS):  # by then all can be named
                check_accounts(
                    self._values(), f"compared is loader number {self._compared.number} of each rank: {_ADVICE}"
                )
            missing = self._missing() if waited >= min(timeout, late_seconds) else ""
            if missing and waited >= timeout:
                raise RuntimeError(f"{missing}. Waited {timeout:g} seconds, the timeout of the process group")
            if missing and not warned:
                warned = True
                warnings.warn(f"{missing}. They may only be late. This rank waits {timeout:g} seconds", stacklevel=6)
            time.sleep(pause)
            pause = min(2 * pause, max(0.1, num_ranks / 5000))  # one server answers all of them

    def _leave(self) -> None:
        """Read what is shared, and delete this rank's value; the last rank deletes the rest.

        The store may end with rank 0: it waits a little until the others have seen that all are equal, and they ignore
        errors. All poll, and do not block in the store: torch's own threads use the same connection.
        """
        if self.shared is not None:
            self.shared = json.loads(self._ask(lambda store: store.get(self._shares)))
        self._is_equal = True

        def delete(store: Any) -> None:
            store.delete_key(self._own)
            if int(store.add(self._seen, 1)) >= len(self._compared.ranks):
                for key in (self._alike, self._shares, self._seen, self._all):
                    store.delete_key(key)

        until = time.monotonic() + _LEAVE_SECONDS
        with contextlib.suppress(RuntimeError):
            self._ask(delete, _LEAVE_SECONDS)
            while self._compared.rank == 0 and time.monotonic() < until and self._ask(self._is_unseen, _LEAVE_SECONDS):
                time.sleep(0.01)

    def _is_unseen(self, store: Any) -> bool:
        return bool(store.check([self._all]))

    def _values(self) -> dict[int, dict[str, Any]]:
        """Return the values of the ranks that have posted."""

        def read(store: Any) -> dict[int, dict[str, Any]]:
            keys = {rank: self._key(f"of/{rank}") for rank in self._compared.ranks}
            return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}

        return self._ask(read)

    def _missing(self) -> str:
        """Return the ranks that have not posted, and the way out, as text; empty if all have."""
        values, num_ranks = self._values(), len(self._compared.ranks)
        silent = [rank for rank in self._compared.ranks if rank not in values]
        # Counted last: a rank that has seen that all are equal deletes its value.
        if self._ask(lambda store: int(store.add(self._all, 0))) >= num_ranks:
            return ""
        names = f"{name_ranks(silent)} {'has' if len(silent) == 1 else 'have'}"
        if not self._start:
            return (
                f"{names} made no such loader: this is loader number {self._compared.number} of rank "
                f"{self._compared.rank}, its samples are shared by {num_ranks} ranks, and each of them must make it; "
                f"{_ALONE}"
            )
        return (
            f"{names} not begun iteration {self.number - 1} of a loader that is shared by {num_ranks} ranks, and this "
            f"rank has, at {self._start}: all must iterate equally often; a rank that takes batches for itself, as by "
            "next(iter(loader)), needs a loader of its own, made with dp=(0, 1)"
        )

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}"


def check_plans(epoch: int, step: int, plan_hash: str | None, groups: Sequence[Any]) -> None:
    """Compare the plan of the step that is delivered next; `plan_hash` is None at the end of an epoch.

    The collective gathers over process groups, one after another: the group of the data-parallel ranks, or those of a
    mesh's dims, which together reach every rank.

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


def account(described: Any, path: str = "") -> dict[str, Any]:
    """Return the entries of a description by dotted path; a digest for a long one."""
    if isinstance(described, Mapping) and described:
        parts = (account(inner, f"{path}.{name}" if path else str(name)) for name, inner in described.items())
        return {name: value for part in parts for name, value in part.items()}
    text = json.dumps(described, sort_keys=True)
    return {path: described if len(text) <= _SHOWN_CHARACTERS else f"{len(text)} characters, {_digest(text)}"}


def failure_account(error: Exception) -> dict[str, Any]:
    return {_FAILURE: f"{type(error).__name__}: {error}"}


def check_accounts(by_rank: ByRank, advice: str = "") -> None:
    """Compare the descriptions of all ranks, or their failures.

    Raises:
        ValueError: descriptions differ; names the ranks, and each entry with its values.
        RuntimeError: a rank could not make it; names it and its error.
    """
    failed = _failures(by_rank)
    if failed:
        count = sum(_FAILURE in entries for entries in by_rank.values())
        raise RuntimeError(f"this loader needs all its ranks, and {count} could not make it: {failed} ({advice})")
    difference, names = find_difference(by_rank), _differing(by_rank)
    if names.keys() & {*_STARTS}:
        raise ValueError(
            f"all ranks of a loader must begin an iteration at the same step; {difference} (pass load_state_dict and "
            "set_epoch the same on every rank)"
        )
    if difference:
        equal = "if these are equal data under other paths or fingerprints, dp=(rank, size) is not compared"
        hints = [advice, equal if any(name.split(".")[0] == DATA for name in names) else ""]
        hint = f" ({'; '.join(filter(None, hints))})" if any(hints) else ""
        raise ValueError(f"all ranks of a loader must plan the same steps; {difference}{hint}")


def _failures(by_rank: ByRank) -> str:
    """Return the first ranks that failed, each with its error, as text; empty if none did."""
    failed = [(rank, entries[_FAILURE]) for rank, entries in by_rank.items() if _FAILURE in entries]
    return "; ".join(f"rank {rank}: {failure}" for rank, failure in failed[:_SHOWN_RANKS])


def find_difference(by_rank: ByRank) -> str:
    """Return which ranks differ from the majority, and in what; "" if none. Without a majority all are named."""
    accounts = {rank: json.dumps(entries, sort_keys=True) for rank, entries in by_rank.items()}
    (common, count), *others = Counter(accounts.values()).most_common()
    if not others:
        return ""
    odd = [rank for rank, entries in accounts.items() if entries != common]
    head = f"{name_ranks(odd)} {'differs' if len(odd) == 1 else 'differ'} from the others"
    if 2 * count <= len(accounts):
        head = f"{name_ranks(list(accounts))} differ from each other"
    values = [
        f"{name} is " + ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items())
        for name, by_value in _differing(by_rank).items()
    ]
    return f"{head}: {'; '.join(values)}"


def _differing(by_rank: ByRank) -> dict[str, dict[str, list[int]]]:
    """Return the entries that differ: name -> value -> its ranks, the most common value first."""
    found: dict[str, dict[str, list[int]]] = {}
    for name in dict.fromkeys(name for entries in by_rank.values() for name in entries):
        ranks: dict[str, list[int]] = {}
        for rank, entries in by_rank.items():
            value = json.dumps(entries[name], sort_keys=True) if name in entries else "missing"
            ranks.setdefault(value, []).append(rank)
        if len(ranks) > 1:
            found[name] = dict(sorted(ranks.items(), key=lambda item: -len(item[1])))
    return found


def name_ranks(ranks: Sequence[int]) -> str:
    shown = ranks[:_SHOWN_RANKS]
    more = f" and {len(ranks) - len(shown)} more" if len(ranks) > len(shown) else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, shown))}{more}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
