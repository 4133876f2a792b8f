"""Comparing the loaders of all ranks, and where each begins an iteration.

With a group of its own a loader is compared by a collective when it is made. With the job's ranks as they are, it may
have been made on some of them only: each rank posts its description, and reads nothing before its first step. Where an
iteration begins is posted in both cases, and compared before its first step.
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
Refuse = Callable[[Mapping[int, Mapping[str, Any]]], None]

LATE_SECONDS = 10.0  # After so long those who are missing are named; ranks start their loaders about together.
_BEHIND_SECONDS = 60.0  # The same where an iteration ended before: rank 0 may be writing a checkpoint.
_LOOK_SECONDS = 1.0  # Between looks for those who had not begun at the first step.
_LEAVE_SECONDS = 2.0  # Rank 0, which may serve the store, lets others see so long that all are alike.
_SHOWN_RANKS = 8


class Agreement:
    """One loader among those of the other ranks: makes it, and compares it."""

    def __init__(self, rank: Rank) -> None:
        self._groups = rank.groups
        self._compared: Comparison | None = None
        self._told = False
        if not rank.groups and rank.dp_groups and rank.size > 1:
            self._compared = _comparison(rank.dp_groups[0], range(rank.size), "world")

    def make(self, make: Callable[[], T], describe: Callable[[T], Mapping[str, Any]]) -> T:
        """What `make` returns. Where groups were given, raises as `make_alike`; else the first step does."""
        if self._groups:
            self._told = True
            made, ranks = make_alike(make, describe, self._groups)
            scope = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
            self._compared = _comparison(self._groups[0], ranks, scope) if len(ranks) > 1 else None
            if self._compared is not None:
                self._compared.enter()
            return made
        made = make()
        if self._compared is not None:
            self._compared.describe(account(describe(made)))
            self._told = True
        return made

    def fail(self, error: Exception) -> None:
        """Let the other ranks know why this one made no loader; nothing where they know what it made."""
        if self._told:
            return
        self._told = True
        with contextlib.suppress(RuntimeError):  # of lost ranks: `error` is what this rank raises
            if self._groups:
                gather(failure_account(error), self._groups)
            elif self._compared is not None:
                self._compared.describe(failure_account(error))

    @contextlib.contextmanager
    def telling_others(self) -> Iterator[None]:
        """A block whose exception, which makes no loader, is reported to the other ranks."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    @property
    def reaches_all(self) -> bool:
        """Whether ranks can tell each other anything."""
        return bool(self._groups) or self._compared is not None

    def begin(self, epoch: int, step: int, failed: Beginning | None = None) -> Beginning:
        """An iteration begins there; to be compared before each of its steps.

        Args:
            failed: of the iteration that it goes on with: for the other ranks, which had no error, it is the same one.
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
    """How many loaders of a scope this rank has made in a job, and the name of that job in its store.

    A store may outlive a process group, as torchrun's does: what was left in it must not be taken for what is said now.
    """

    job: str = ""
    made: int = 0


_numbers: WeakKeyDictionary[Any, dict[str, Numbers]] = WeakKeyDictionary()


class Comparison:
    """A loader's rounds in the store: its description, then the beginning of each iteration.

    Args:
        rank: this one, of `ranks`.
        scope: the loaders of a scope are numbered on each rank; those of one number are compared.
        numbers: of this rank in that scope.

    Attributes:
        iterations: begun on this rank.
        first: where the first of them begins, until all ranks have begun theirs.
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

    def describe(self, said: Mapping[str, Any]) -> None:
        self.enter()
        self._description = self.round("made", said)
        self.store.ask(self._description.post)

    def round(self, name: object, said: Mapping[str, Any]) -> Round:
        return Round(f"{self._scope}/{self._numbers.job}/{self._number}/{name}", self.rank, self.ranks, said)

    def check_description(self) -> None:
        """Wait until all ranks have made this loader. Raises as `check_accounts`, or RuntimeError for those missing."""
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
            refuse=lambda told: check_accounts(
                told,
                f"compared is {which} of each rank: all make the same ones in the same order, and a loader of one rank "
                "alone with dp=(0, 1)",
            ),
        )
        self._description = None

    def tell(self, iteration: int, said: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the first rank says in an iteration."""
        first, place = self.ranks[0], f"{self._scope}/{self._numbers.job}/{self._number}/told"
        key = f"{place}/{iteration}"
        if self.rank == first:
            self.store.ask(lambda store: store.set(key, json.dumps(said)))
            if iteration > 2:  # all have begun the last one, and read what the one before it was told
                self.store.ask(lambda store: store.delete_key(f"{place}/{iteration - 2}"))
            return said
        missing = (
            f"rank {first} has not begun to iterate a loader that shuffles by its torch generator and whose samples "
            f"are shared by {len(self.ranks)} ranks. With seed= no rank waits for another; a loader of one rank alone "
            "is made with dp=(0, 1)"
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
        told: dict[str, Any] = json.loads(self.store.ask(lambda store: store.get(key)))
        return told

    def wait(self, said: Round, *, late: Late, refuse: Refuse, late_seconds: float = 0, go_on: bool = False) -> bool:
        """Wait until all ranks have said the same; those missing are named by a warning on the way.

        Args:
            late: names of ranks, "has" or "have" -> what is missing, and the way out.
            refuse: what the ranks told -> an exception.
            late_seconds: before the warning; default LATE_SECONDS.
            go_on: return False after the warning, in place of waiting for the group's timeout.

        Raises RuntimeError with `late` at the timeout, and as `refuse`.
        """
        started, pause, warned = time.monotonic(), 0.002, False
        timeout, late_seconds = self.store.timeout, late_seconds or LATE_SECONDS
        while not self.agreed(said, refuse, patient=time.monotonic() - started < LATE_SECONDS):
            waited = time.monotonic() - started
            missing = "" if waited < min(timeout, late_seconds) else self._missing(said, late)
            if missing and waited >= timeout and not go_on:
                raise RuntimeError(f"{missing}. Waited {timeout:g} seconds, the timeout of the process group")
            if missing and not warned:
                warned = True
                then = "this rank goes on, and compares once they come" if go_on else f"waiting for {timeout:g} seconds"
                warnings.warn(f"{missing}. They may only be late. Meanwhile {then}", stacklevel=6)
                if go_on:
                    return False
            time.sleep(pause)
            pause = min(2 * pause, max(0.1, len(self.ranks) / 5000))  # one server answers all of them
        return True

    def agreed(self, said: Round, refuse: Refuse, *, patient: bool = False) -> bool:
        """Whether all ranks have said the same. Raises as `refuse` where some differ: with patience, once all are
        heard, so that all are named.
        """
        counts = self.store.ask(said.counts)
        if counts.alike >= len(self.ranks):
            self._leave(said)
            return True
        if counts.alike < counts.all and not (patient and counts.all < len(self.ranks)):
            refuse(self.store.ask(said.told))
        return False

    def _leave(self, said: Round) -> None:
        """Clear a round in which all said the same. What fails here changes nothing of that.

        The store may end with rank 0: it waits a little until the others have seen. All poll rather than block in the
        store, whose connection torch's own threads share.
        """
        until, pause = time.monotonic() + _LEAVE_SECONDS, 0.002
        with contextlib.suppress(RuntimeError):
            self.store.ask(said.clear, _LEAVE_SECONDS)
            while self.rank == 0 and self._lingers and not self.store.ask(said.seen_by_all, _LEAVE_SECONDS):
                if time.monotonic() >= until:
                    self._lingers = False  # some look late, or not again
                time.sleep(pause)
                pause = min(2 * pause, 0.1)

    def _missing(self, said: Round, late: Late) -> str:
        """Empty where they have come meanwhile."""
        silent = self.store.ask(lambda store: said.silent(store, _SHOWN_RANKS))
        counts = self.store.ask(said.counts)  # after: who has seen that all are alike deletes what it said
        number = len(self.ranks) - counts.all
        return late(name_ranks(silent[:number], number), "has" if number == 1 else "have") if number > 0 else ""


class Beginning:
    """Of one iteration of a loader: where it begins, which must be the same on all ranks.

    In the first iteration ranks that do not come are waited for a little: a loader may be made by all and iterated by
    some. Once all have begun one they must go on in step, or an epoch of one would be another's next.

    Attributes:
        step: where it began, on all ranks; who goes on with a failed one begins later.
        refused: ranks differ; who tries again begins anew.
    """

    def __init__(self, compared: Comparison | None, place: Mapping[str, int], groups: Sequence[Any] = ()) -> None:
        self.step = place["step"]
        self._groups = groups
        self._said: Mapping[str, Any] | None = None
        self._compared = compared
        self._place = place
        self._looked = 0.0
        self.refused = False
        self._done = compared is None
        if compared is None:
            return
        compared.iterations += 1
        self._iteration = compared.iterations
        # Even where others are not waited for: they may only be late, and will wait for this.
        self._posted = compared.round(f"begun/{self._iteration}", place)
        compared.store.ask(self._posted.post)
        if self._iteration == 1:
            compared.first = self._posted

    def compare(self) -> None:
        """Before each step; cheap once all are known to begin alike.

        Raises:
            ValueError: ranks differ in the loader, or in where they begin; names them, and both values.
            RuntimeError: a rank could not make the loader; or, at the process group's timeout, ranks are missing.
        """
        if self._done or self._compared is None:
            return
        try:
            self._compare(self._compared)
        except ValueError:
            self.refused = True
            raise

    def share(self, said: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return what the first of the ranks says, on all of them, once in the iteration. Called by every rank.

        Raises RuntimeError where that rank says nothing within the process group's timeout.
        """
        if self._said is None and said is not None:
            if self._compared is not None:
                self._said = self._compared.tell(self._iteration, said)
            else:
                self._said = next(iter(gather(said, self._groups).values()))
        return self._said

    def _compare(self, compared: Comparison) -> None:
        compared.check_description()
        if compared.first is not None and not self._all_have_begun(compared, compared.first):
            return
        compared.first = None
        if self._iteration > 1:
            compared.wait(self._posted, late=self._behind, refuse=_refuse, late_seconds=_BEHIND_SECONDS)
        self._done = True

    def _all_have_begun(self, compared: Comparison, first: Round) -> bool:
        """Waits in the first iteration's first step only; later looks now and then."""
        now, looked = time.monotonic(), self._looked
        if looked and now - looked < _LOOK_SECONDS:
            return False
        self._looked = now
        try:
            if self._iteration == 1 and not looked:
                return compared.wait(first, late=self._absent, refuse=_refuse, go_on=True)
            return compared.agreed(first, _refuse)
        except ValueError:
            compared.first = None  # the next iteration may begin alike
            raise

    def _absent(self, names: str, have: str) -> str:
        return (
            f"{names} {have} not begun to iterate a loader whose samples are shared by {self._shared}: nobody reads "
            "theirs. A loader of one rank alone is made with dp=(0, 1)"
        )

    def _behind(self, names: str, have: str) -> str:
        where = ", ".join(f"{name} {value}" for name, value in self._place.items())
        return (
            f"{names} {have} not begun iteration {self._iteration} of a loader whose samples are shared by "
            f"{self._shared}, and this rank has, at {where}: all iterate equally often, and a rank that takes batches "
            "for itself, as by next(iter(loader)), takes them from a loader of its own, made with dp=(0, 1)"
        )

    @property
    def _shared(self) -> str:
        return "this rank" if self._compared is None else f"{len(self._compared.ranks)} ranks"


def _refuse(told: Mapping[int, Mapping[str, Any]]) -> None:
    raise ValueError(
        f"all ranks of a loader must begin an iteration at the same place; {find_difference(told)} (give "
        "load_state_dict and set_epoch the same on every rank)"
    )
