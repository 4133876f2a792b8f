"""Comparing the loaders of all ranks, and the step at which each begins an iteration.

A loader that was given a group is compared by a collective when it is made. Without one (dp=None), only some ranks may
make it: each rank posts its description, and reads nothing before its first step. In both cases each rank posts where
an iteration begins, and compares that before the first step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from orchdata.ranks.agreement import account, check_accounts, failure_account, find_difference, make_alike, name_ranks
from orchdata.ranks.gathering import gather
from orchdata.ranks.parallel import Rank, group_timeout
from orchdata.ranks.posting import JobStore, Round, job_store, name_job

T = TypeVar("T")
Late = Callable[[str, str], str]
Check = Callable[[Mapping[int, Mapping[str, Any]]], None]

LATE_SECONDS = 10.0  # A warning names ranks that are missing after this time: ranks start at about the same time.
_LATER_SECONDS = 60.0  # The same for later iterations: rank 0 may be writing a checkpoint.
_LOOK_SECONDS = 1.0  # Between checks for ranks that had not begun at the first step.
_LEAVE_SECONDS = 2.0  # Rank 0, which may serve the store, waits this long for others to see that all are equal.
_SHOWN_RANKS = 8


class Agreement:
    """Makes a loader, and compares it with those of the other ranks."""

    def __init__(self, rank: Rank) -> None:
        self._groups = rank.groups
        self._compared: Comparison | None = None
        self._has_described = False
        if not rank.groups and rank.dp_groups and rank.size > 1:
            self._compared = _comparison(rank.dp_groups[0], range(rank.size), "world")

    def make(self, make: Callable[[], T], describe: Callable[[T], Mapping[str, Any]]) -> T:
        """Return what `make` returns. If groups were given, raises as `make_alike`; else the first step does."""
        if self._groups:
            self._has_described = True
            made, ranks = make_alike(make, describe, self._groups)
            scope = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
            self._compared = _comparison(self._groups[0], ranks, scope) if len(ranks) > 1 else None
            if self._compared is not None:
                self._compared.enter()
            return made
        made = make()
        if self._compared is not None:
            self._compared.describe(account(describe(made)))
            self._has_described = True
        return made

    def fail(self, error: Exception) -> None:
        """Tell the other ranks why this one made no loader, unless they have its description."""
        if self._has_described:
            return
        self._has_described = True
        with contextlib.suppress(RuntimeError):  # of lost ranks: this rank raises `error`
            if self._groups:
                gather(failure_account(error), self._groups)
            elif self._compared is not None:
                self._compared.describe(failure_account(error))

    @contextlib.contextmanager
    def telling_others(self) -> Iterator[None]:
        """Run a block, and report an exception in it, after which there is no loader, to the other ranks."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    @property
    def reaches_all(self) -> bool:
        """Whether ranks can send each other anything."""
        return bool(self._groups) or self._compared is not None

    def begin(self, epoch: int, step: int, failed: Beginning | None = None) -> Beginning:
        """Begin an iteration at a step; the result is compared before each of its steps.

        Args:
            failed: of the iteration that this one continues: for the other ranks, which had no error, both are one.
        """
        if failed is not None and not failed.refused:
            return failed
        return Beginning(self._compared, {"epoch": epoch, "step": step}, self._groups)


def _comparison(group: Any, ranks: Sequence[int], scope: str) -> Comparison | None:
    store = job_store()
    if store is None:
        return None
    numbers = _numbers.setdefault(dist.group.WORLD, {}).setdefault(scope, Numbers())
    return Comparison(JobStore(store, group_timeout(group).total_seconds()), dist.get_rank(), ranks, scope, numbers)


@dataclass
class Numbers:
    """The number of loaders of a scope that this rank has made in a job, and the job's name in its store.

    A store may outlive a process group, as torchrun's does: its old entries must not be mistaken for new ones.
    """

    job: str = ""
    made: int = 0


_numbers: WeakKeyDictionary[Any, dict[str, Numbers]] = WeakKeyDictionary()


class Comparison:
    """A loader's rounds in the store: its description, then the beginning of each iteration.

    Args:
        rank: this one, of `ranks`.
        scope: the loaders of a scope are numbered on each rank; those with the same number are compared.
        numbers: of this rank in that scope.

    Attributes:
        iterations: the number begun on this rank.
        first: the round of the first one, until all ranks have begun theirs.
    """

    def __init__(self, store: JobStore, rank: int, ranks: Sequence[int], scope: str, numbers: Numbers) -> None:
        self.store = store
        self.rank = rank
        self.ranks = ranks
        self.iterations = 0
        self.first: Round | None = None
        self._scope = scope
        self._numbers = numbers
        self._number = 0
        self._description: Round | None = None
        self._lingers = True

    def enter(self) -> None:
        """Take this rank's next number."""
        if not self._numbers.job:
            self._numbers.job = self.store.ask(lambda store: name_job(store, f"{self._scope}/jobs/{self.rank}"))
        self._numbers.made += 1
        self._number = self._numbers.made

    def describe(self, value: Mapping[str, Any]) -> None:
        self.enter()
        self._description = self.round("made", value)
        self.store.ask(self._description.post)

    def round(self, name: object, value: Mapping[str, Any]) -> Round:
        return Round(f"{self._scope}/{self._numbers.job}/{self._number}/{name}", self.rank, self.ranks, value)

    def check_description(self) -> None:
        """Wait until all ranks have made this loader. Raises as `check_accounts`, or RuntimeError for missing ranks."""
        if self._description is None:
            return
        which = f"loader number {self._number} with dp=None"
        self.wait(
            self._description,
            late=lambda names, have: (
                f"{names} {have} made no such loader: this is {which} of rank {self.rank}, its samples are shared by "
                f"all {len(self.ranks)} ranks, and each of them must make it; a loader of one rank alone is made with "
                "dp=(0, 1)"
            ),
            check=lambda by_rank: check_accounts(
                by_rank,
                f"compared is {which} of each rank: all make the same ones in the same order, and a loader of one rank "
                "alone with dp=(0, 1)",
            ),
        )
        self._description = None

    def share(self, iteration: int, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the first rank's value in an iteration."""
        first, folder = self.ranks[0], f"{self._scope}/{self._numbers.job}/{self._number}/shared"
        key = f"{folder}/{iteration}"

        # The first rank stores its value.
        if self.rank == first:
            self.store.ask(lambda store: store.set(key, json.dumps(value)))
            if iteration > 2:  # all ranks have begun the last iteration, so they have read the value before it
                self.store.ask(lambda store: store.delete_key(f"{folder}/{iteration - 2}"))
            return value

        # The others wait for it.
        missing = (
            f"rank {first} has not begun to iterate a loader that shuffles by its torch generator and is shared by "
            f"{len(self.ranks)} ranks. With seed= no rank waits for another; a loader of one rank alone is made with "
            "dp=(0, 1)"
        )
        started, pause, warned = time.monotonic(), 0.002, False
        while not self.store.ask(lambda store: store.check([key])):
            waited = time.monotonic() - started
            if waited > self.store.timeout:
                raise RuntimeError(
                    f"{missing}. Waited {self.store.timeout:g} seconds, the timeout of the process group"
                )
            if waited > LATE_SECONDS and not warned:
                warned = True
                warnings.warn(f"{missing}. Waiting for {self.store.timeout:g} seconds", stacklevel=6)
            time.sleep(pause)
            pause = min(2 * pause, max(0.1, len(self.ranks) / 5000))
        shared: dict[str, Any] = json.loads(self.store.ask(lambda store: store.get(key)))
        return shared

    def wait(
        self, posted: Round, *, late: Late, check: Check, late_seconds: float = 0, is_optional: bool = False
    ) -> bool:
        """Wait until all ranks have posted the same; a warning names missing ranks.

        Args:
            late: names of ranks, "has" or "have" -> what is missing, and the way out.
            check: values by rank -> raises an exception that names the difference.
            late_seconds: before the warning; default LATE_SECONDS.
            is_optional: return False after the warning, and do not wait until the group's timeout.

        Raises RuntimeError with `late` at the timeout, and as `check`.
        """
        started, pause, warned = time.monotonic(), 0.002, False
        timeout, late_seconds = self.store.timeout, late_seconds or LATE_SECONDS
        while not self.agreed(posted, check, patient=time.monotonic() - started < LATE_SECONDS):
            waited = time.monotonic() - started
            missing = "" if waited < min(timeout, late_seconds) else self._missing(posted, late)
            if missing and waited >= timeout and not is_optional:
                raise RuntimeError(f"{missing}. Waited {timeout:g} seconds, the timeout of the process group")
            if missing and not warned:
                warned = True
                then = f"This rank {'continues, and compares later' if is_optional else f'waits {timeout:g} seconds'}"
                warnings.warn(f"{missing}. They may only be late. {then}", stacklevel=6)
                if is_optional:
                    return False
            time.sleep(pause)
            pause = min(2 * pause, max(0.1, len(self.ranks) / 5000))  # one server answers all of them
        return True

    def agreed(self, posted: Round, check: Check, *, patient: bool = False) -> bool:
        """Return whether all ranks have posted the same. Raises as `check` if some differ; `patient`: only
        after all have posted, so that all are named.
        """
        counts = self.store.ask(posted.counts)
        if counts.alike >= len(self.ranks):
            self._leave(posted)
            return True
        if counts.alike < counts.all and not (patient and counts.all < len(self.ranks)):
            check(self.store.ask(posted.values))
        return False

    def _leave(self, posted: Round) -> None:
        """Clear a round in which all ranks posted the same. Errors here are ignored.

        The store may end with rank 0: it waits a little until the others have seen the result. All ranks poll, and do
        not block in the store: torch's own threads use the same connection.
        """
        until, pause = time.monotonic() + _LEAVE_SECONDS, 0.002
        with contextlib.suppress(RuntimeError):
            self.store.ask(posted.clear, _LEAVE_SECONDS)
            while self.rank == 0 and self._lingers and not self.store.ask(posted.seen_by_all, _LEAVE_SECONDS):
                if time.monotonic() >= until:
                    self._lingers = False  # some ranks look late, or never
                time.sleep(pause)
                pause = min(2 * pause, 0.1)

    def _missing(self, posted: Round, late: Late) -> str:
        """Return `late` for the missing ranks; empty if they have posted meanwhile."""
        silent = self.store.ask(lambda store: posted.silent(store, _SHOWN_RANKS))
        counts = self.store.ask(posted.counts)  # counted last: a rank that has seen that all are equal deletes its post
        number = len(self.ranks) - counts.all
        return late(name_ranks(silent[:number], number), "has" if number == 1 else "have") if number > 0 else ""


class Beginning:
    """The step at which an iteration of a loader begins, which must be the same on all ranks.

    In the first iteration a rank waits only a little for missing ranks: all may make a loader and only some iterate it.
    Once all have begun one, they must stay in step, or one rank's epoch would be another's next.

    Attributes:
        step: at which it began on all ranks; a rank that continues a failed iteration begins at a later one.
        refused: whether ranks differ; the next try then is a new iteration.
    """

    def __init__(self, compared: Comparison | None, start: Mapping[str, int], groups: Sequence[Any] = ()) -> None:
        self.step = start["step"]
        self._groups = groups
        self._shared: Mapping[str, Any] | None = None
        self._compared = compared
        self._start = start
        self._looked = 0.0
        self.refused = False
        self._done = compared is None
        if compared is None:
            return
        compared.iterations += 1
        self._iteration = compared.iterations
        # Posted even if this rank does not wait for others: they may only be late, and will wait for this.
        self._posted = compared.round(f"begun/{self._iteration}", start)
        compared.store.ask(self._posted.post)
        if self._iteration == 1:
            compared.first = self._posted

    def compare(self) -> None:
        """Compare before each step; cheap once all are known to be equal.

        Raises:
            ValueError: ranks differ in the loader, or in where they begin; names them, and both values.
            RuntimeError: a rank could not make the loader; or ranks are missing at the process group's timeout.
        """
        if self._done or self._compared is None:
            return
        try:
            self._compare(self._compared)
        except ValueError:
            self.refused = True
            raise

    def share(self, value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the first rank's value on all ranks, once in the iteration. Every rank must call it.

        Raises RuntimeError if that rank does not call it within the process group's timeout.
        """
        if self._shared is None and value is not None:
            if self._compared is not None:
                self._shared = self._compared.share(self._iteration, value)
            else:
                self._shared = next(iter(gather(value, self._groups).values()))
        return self._shared

    def _compare(self, compared: Comparison) -> None:
        compared.check_description()
        if compared.first is not None and not self._all_have_begun(compared, compared.first):
            return
        compared.first = None
        if self._iteration > 1:
            compared.wait(self._posted, late=self._lagging, check=_check_starts, late_seconds=_LATER_SECONDS)
        self._done = True

    def _all_have_begun(self, compared: Comparison, first: Round) -> bool:
        """Return whether all have begun. Waits in the first iteration's first step only; later checks now and then."""
        now, looked = time.monotonic(), self._looked
        if looked and now - looked < _LOOK_SECONDS:
            return False
        self._looked = now
        try:
            if self._iteration == 1 and not looked:
                return compared.wait(first, late=self._not_begun, check=_check_starts, is_optional=True)
            return compared.agreed(first, _check_starts)
        except ValueError:
            compared.first = None  # the next iteration may begin equally
            raise

    def _not_begun(self, names: str, have: str) -> str:
        return (
            f"{names} {have} not begun to iterate a loader that is shared by {self._sharing_ranks}: their samples are "
            "not read. A loader of one rank alone is made with dp=(0, 1)"
        )

    def _lagging(self, names: str, have: str) -> str:
        where = ", ".join(f"{name} {value}" for name, value in self._start.items())
        return (
            f"{names} {have} not begun iteration {self._iteration} of a loader that is shared by "
            f"{self._sharing_ranks}, and this rank has, at {where}: all must iterate equally often; a rank that takes "
            "batches for itself, as by next(iter(loader)), needs a loader of its own, made with dp=(0, 1)"
        )

    @property
    def _sharing_ranks(self) -> str:
        return "this rank" if self._compared is None else f"{len(self._compared.ranks)} ranks"


def _check_starts(by_rank: Mapping[int, Mapping[str, Any]]) -> None:
    raise ValueError(
        f"all ranks of a loader must begin an iteration at the same step; {find_difference(by_rank)} (pass "
        "load_state_dict and set_epoch the same on every rank)"
    )
