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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from threading import Thread
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from orchdata.ranks.parallel import Rank, group_timeout, served_devices
from orchdata.ranks.wire import WireError

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
_ADVICE = "all ranks make the same loaders, and iterate them equally often; one for a rank alone is made with dp=(0, 1)"

# Process group -> scope -> its number among the groups that one store serves, and the number of loaders made in it.
_numbers: WeakKeyDictionary[Any, dict[str, tuple[int, int]]] = WeakKeyDictionary()


class JobStore:
    """The store of the job, with a prefix for our keys. Raises RuntimeError if it has ended or does not answer."""

    def __init__(self, store: Any, timeout: float) -> None:
        self._store = distributed_c10d.PrefixStore("orchdata", store)
        self.timeout = timeout

    def ask(self, call: Callable[[Any], T], seconds: float | None = None) -> T:
        """Return `call(store)`, with a timeout: a store with a server that hangs takes no timeout, and no Ctrl-C."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call(self._store))
            except BaseException as error:  # noqa: BLE001 - it is passed on
                answer.set_exception(error)

        limit = self.timeout if seconds is None else seconds
        Thread(target=run, daemon=True, name="orchdata-store").start()
        try:
            return answer.result(limit)
        except FutureTimeout:
            reason = f"does not answer within {limit:g} seconds"
        except RuntimeError as error:
            reason = f"cannot be reached: {error}"
        raise RuntimeError(
            f"ranks are compared through the store of the job, which {reason}; rank 0 or the launcher serves it: check "
            "there whether it ended or stopped"
        )


def job_store() -> Any:
    """Return the store that init_process_group was given or created; None if the backend has none (MPI, fake)."""
    return None if distributed_c10d.get_backend() in ("fake", "mpi") else distributed_c10d._get_default_store()


class Agreement:
    """Makes a loader, and compares it with the other ranks' loaders of the same number. `made` is the post of the
    loader's description, the first of `num_posts`.
    """

    def __init__(self, rank: Rank) -> None:
        self._at_once = bool(rank.groups)
        self._ranks: Sequence[int] = rank.ranks
        self._job: JobStore | None = None
        self.made: _Post | None = None
        self.num_posts = 0
        store = job_store() if len(rank.ranks) > 1 else None
        if store is None:
            return
        self._job = JobStore(store, group_timeout((rank.groups or rank.dp_groups)[0]).total_seconds())
        self._rank = dist.get_rank()
        scope = _digest(json.dumps(rank.ranks)) if rank.groups else "world"
        numbers = _numbers.setdefault(dist.group.WORLD, {})
        if scope not in numbers:  # a store may outlive a process group: its old entries are not those of this one
            numbers[scope] = self._job.ask(lambda store: int(store.add(f"{scope}/jobs/{self._rank}", 1))), 0
        job, number = numbers[scope]
        numbers[scope] = job, number + 1
        self._folder = f"{scope}/{job}/{number + 1}"

    def make(self, make: Callable[[], T], describe: Callable[[T], Value]) -> T:
        """Return what `make` returns. If its JSON-safe description differs from the other ranks', this or the first
        step raises as `Beginning.agree`.
        """
        made = make()
        if self._job is not None:
            self.made = self.post(account(describe(made)))
            if self._at_once:
                self.made.wait(_LATER_SECONDS)
        return made

    @contextlib.contextmanager
    def telling_others(self) -> Iterator[None]:
        """Run a block, and report an exception in it, after which there is no loader, to the other ranks, unless they
        have its description.
        """
        try:
            yield
        except Exception as error:
            if self._job is not None and self.made is None:
                with contextlib.suppress(RuntimeError):  # of the store: this rank raises `error`
                    self.post(_failure(error))
            raise

    @property
    def reaches_all(self) -> bool:
        """Whether ranks can send each other anything."""
        return self._job is not None

    def begin(self, epoch: int, step: int, failed: Beginning | None = None) -> Beginning:
        """Begin an iteration at a step, or go on with the one that `failed` here: for other ranks, without an error,
        both are one.
        """
        return Beginning(self, epoch, step) if failed is None or failed.refused else failed

    def post(self, value: Value, shared: Value | None = None) -> _Post:
        """Post the loader's next value, and on the first rank what it shares with the others."""
        assert self._job is not None
        self.num_posts += 1
        return _Post(self._job, self._rank, self._ranks, f"{self._folder}/{self.num_posts}", value, shared)


class Beginning:
    """The step at which an iteration of a loader begins, which must be the same on all ranks: they must iterate equally
    often, or one rank's epoch would be another's next. A rank that continues a failed iteration begins at a later one.
    If ranks differ (`refused`), the next try is a new iteration.
    """

    def __init__(self, agreement: Agreement, epoch: int, step: int) -> None:
        self.step = step
        self.refused = False
        self._agreement = agreement
        self._start = {"epoch": epoch, "step": step}
        self._post: _Post | None = None
        self._agreed: list[Value | None] = []

    def agree(self, draw: Callable[[], Value | None]) -> Value | None:
        """Return what `draw` returned on the first rank, once all are known to be equal; once in an iteration. Raises
        ValueError, which names ranks that differ and both values; RuntimeError for a rank that could not make the
        loader, or is missing at the process group's timeout.
        """
        if not self._agreed and not self._agreement.reaches_all:
            self._agreed = [draw()]
        if not self._agreed:
            if self._post is None:
                self._post = self._agreement.post(self._start, draw())
            try:
                for post in filter(None, (self._agreement.made, self._post)):
                    post.wait(LATE_SECONDS if self._agreement.num_posts == 2 else _LATER_SECONDS)
            except ValueError:
                self.refused = True
                raise
            self._agreed = [self._post.shared]
        return self._agreed[0]


class _Post:
    """One value from each rank, posted when this is made, in SCOPE/JOB/number of the loader/number of its post.

    of/RANK       the rank's value                  all      the number of ranks that have posted
    with/DIGEST   the number of ranks with it       seen     of those that have seen that all are equal
    shared        what the first rank shares
    """

    def __init__(
        self, job: JobStore, rank: int, ranks: Sequence[int], folder: str, value: Value, shared: Value | None
    ) -> None:
        self.shared = shared
        self._ask, self._timeout, self._rank = job.ask, job.timeout, rank
        self._is_equal = False
        text = json.dumps(value, sort_keys=True)
        self._keys = {each: f"{folder}/of/{each}" for each in ranks}
        self._alike, self._all = f"{folder}/with/{_digest(text)}", f"{folder}/all"
        self._seen, self._shares = f"{folder}/seen", f"{folder}/shared"
        *_, loader, number = folder.split("/")
        begun = f"begun iteration {int(number) - 1} of loader {loader}, at epoch {{epoch}}, step {{step}}"
        self._what = begun.format(**value) if "epoch" in value else f"made loader {loader}"
        self._advice = f"compared is loader {loader} of each rank: {_ADVICE}"

        def post(store: Any) -> None:  # the counters come last: what is counted can be read
            if shared is not None and rank == ranks[0]:
                store.set(self._shares, json.dumps(shared))
            store.set(self._keys[rank], text)
            store.add(self._alike, 1)
            store.add(self._all, 1)

        self._ask(post)

    def wait(self, late_seconds: float) -> None:
        """Wait until all ranks have posted the same; a warning names those that are missing after some seconds. Raises
        as `check_accounts`, or RuntimeError for ranks that are missing at the timeout.
        """
        started, pause, warned = time.monotonic(), 0.002, False
        num_ranks, timeout = len(self._keys), self._timeout
        while not self._is_equal:
            waited = time.monotonic() - started
            # Fewer alike than posts are a difference: posts between the two reads only make more alike.
            posted, alike = self._ask(lambda store: (int(store.add(self._all, 0)), int(store.add(self._alike, 0))))
            if alike >= num_ranks:
                self._leave()
                return
            if alike < posted and (posted == num_ranks or waited >= LATE_SECONDS):  # by then all can be named
                check_accounts(self._values(), self._advice)
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

        The store may end with rank 0, which waits a little until the others have seen that all are equal; they ignore
        errors. All poll, and do not block in the store: torch's own threads use the same connection.
        """
        if self.shared is not None:
            self.shared = json.loads(self._ask(lambda store: store.get(self._shares)))
        self._is_equal = True

        def delete(store: Any) -> None:
            store.delete_key(self._keys[self._rank])
            if int(store.add(self._seen, 1)) >= len(self._keys):
                for key in (self._alike, self._shares, self._seen, self._all):
                    store.delete_key(key)

        until = time.monotonic() + _LEAVE_SECONDS
        with contextlib.suppress(RuntimeError):
            self._ask(delete, _LEAVE_SECONDS)
            while self._rank == 0 and time.monotonic() < until:
                if not self._ask(lambda store: store.check([self._all]), _LEAVE_SECONDS):
                    break
                time.sleep(0.01)

    def _values(self) -> dict[int, dict[str, Any]]:
        """Return the values of the ranks that have posted."""
        return self._ask(
            lambda store: {rank: json.loads(store.get(key)) for rank, key in self._keys.items() if store.check([key])}
        )

    def _missing(self) -> str:
        """Return the ranks that have not posted, and the way out, as text; empty if all have."""
        values = self._values()
        silent = [rank for rank in self._keys if rank not in values]
        # Counted last: a rank that has seen that all are equal deletes its value.
        if self._ask(lambda store: int(store.add(self._all, 0))) >= len(self._keys):
            return ""
        return f"no word from {_named(silent)}, where rank {self._rank} has {self._what}: {_ADVICE}"


def check_plans(epoch: int, step: int, plan_hash: str | None, groups: Sequence[Any]) -> None:
    """Compare the plan of the step that is delivered next; `plan_hash` is None at the end of an epoch.

    A collective over groups, one after another, which together reach every rank. Raises RuntimeError on all ranks: it
    names those that differ, with hashes, or those that failed, with errors.
    """
    by_rank = gather({"epoch": epoch, "step": step, "plan": plan_hash}, groups)
    where = f"epoch {epoch}, step {step}"
    if failed := _failures(by_rank):
        raise RuntimeError(f"other ranks failed where plans are compared, at {where}: {failed}")
    if differing := _differing(by_rank):
        raise RuntimeError(f"ranks follow different plans at {where} of this rank: {'; '.join(differing.values())}")


def fail_check(error: Exception, groups: Sequence[Any]) -> None:
    """Take part in the others' `check_plans` with `error` in place of a plan, so that they raise and do not wait."""
    with contextlib.suppress(RuntimeError):  # of lost ranks: this rank raises `error`
        gather(_failure(error), groups)


def account(described: Any, path: str = "") -> dict[str, Any]:
    """Return the entries of a description by dotted path; a digest for a long one."""
    if isinstance(described, Mapping) and described:
        parts = (account(inner, f"{path}.{name}" if path else str(name)) for name, inner in described.items())
        return {name: value for part in parts for name, value in part.items()}
    text = json.dumps(described, sort_keys=True)
    return {path: described if len(text) <= _SHOWN_CHARACTERS else f"{len(text)} characters, {_digest(text)}"}


def check_accounts(by_rank: ByRank, advice: str = "") -> None:
    """Raise ValueError if ranks differ, with each entry, its values and their ranks; RuntimeError if one failed."""
    if failed := _failures(by_rank):
        raise RuntimeError(f"this loader needs all its ranks, and some could not make it: {failed} ({advice})")
    differing = _differing(by_rank)
    difference = "; ".join(differing.values())
    if differing.keys() & {"epoch", "step"}:
        raise ValueError(
            f"all ranks of a loader must begin an iteration at the same step: {difference} (pass load_state_dict and "
            "set_epoch the same on every rank)"
        )
    if any(name.split(".")[0] == DATA for name in differing):
        advice += "; if these are equal data under other paths or fingerprints, dp=(rank, size) is not compared"
    if differing:
        raise ValueError(f"all ranks of a loader must plan the same steps: {difference} ({advice})")


def _failure(error: Exception) -> dict[str, Any]:
    return {_FAILURE: f"{type(error).__name__}: {error}"}


def _failures(by_rank: ByRank) -> str:
    """Return the first ranks that failed, each with its error, as text; empty if none did."""
    failed = [f"rank {rank}: {entries[_FAILURE]}" for rank, entries in by_rank.items() if _FAILURE in entries]
    return "; ".join(failed[:_SHOWN_RANKS])


def _differing(by_rank: ByRank) -> dict[str, str]:
    """Return the entries that differ: name -> "NAME is VALUE on ranks ..., VALUE on ...", the most common first."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for entries in by_rank.values() for name in entries):
        ranks: dict[str, list[int]] = {}
        for rank, entries in by_rank.items():
            value = json.dumps(entries[name], sort_keys=True) if name in entries else "missing"
            ranks.setdefault(value, []).append(rank)
        if len(ranks) > 1:
            ordered = sorted(ranks.items(), key=lambda item: -len(item[1]))
            found[name] = f"{name} is " + ", ".join(f"{value} on {_named(ranks)}" for value, ranks in ordered)
    return found


def _named(ranks: Sequence[int]) -> str:
    shown = ranks[:_SHOWN_RANKS]
    more = f" and {len(ranks) - len(shown)} more" if len(ranks) > len(shown) else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, shown))}{more}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def gather(value: Any, groups: Sequence[Any]) -> dict[int, Any]:
    """Return the JSON-safe `value` of every rank that `groups` reach, by global rank: tuples become lists, keys str.
    Nothing that a rank sends is executed. A collective over each group in turn. Raises WireError, with the rank, if a
    message is not JSON.
    """
    entries = [[dist.get_rank() if groups else 0, value]]
    for group in groups:
        entries = [entry for part in gather_json(entries, group) for entry in part]
    return dict(sorted((int(rank), each) for rank, each in entries))


def gather_json(value: Any, group: Any) -> list[Any]:
    """Return the `value` of every rank of one group, in the group's order."""
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    counts = [int(count) for count in _gather(torch.tensor([len(own)]), group)]
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: len(own)] = own
    texts = [part[:count].numpy().tobytes() for part, count in zip(_gather(padded, group), counts, strict=True)]
    return [_read(text, rank) for rank, text in enumerate(texts)]


def small_device(group: Any) -> torch.device:
    """Return the device for small tensors of the group's collectives: the CPU if the backend serves it."""
    served = served_devices(group)
    return torch.device("cpu" if "cpu" in served else served[0])


def _gather(tensor: Tensor, group: Any) -> list[Tensor]:
    """Return the tensors of all ranks, which have the same shape, on the CPU."""
    there = tensor.to(small_device(group))
    gathered = [torch.empty_like(there) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, there, group=group)
    return [part.cpu() for part in gathered]


def _read(text: bytes, rank: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"rank {rank} of the group sent a message that is not JSON: {text[:80]!r} ({error})") from error
