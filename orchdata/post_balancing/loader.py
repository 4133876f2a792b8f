"""post_balance: wraps a loader of one rank, and balances each of its steps over all ranks, in a thread, a few ahead."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from orchdata.engines.warm import Warming
from orchdata.finalizers import Ending, User, call_soon
from orchdata.loop.state import PostState
from orchdata.planning.balance import Balance, as_balance
from orchdata.planning.parts import Encoders
from orchdata.post_balancing.group import POLL_SECONDS, LostRanksError, RankGroup
from orchdata.post_balancing.step import Cost, LossTokens, PartsOf, PostBatch, ReadyStep, StepMaker
from orchdata.ranks.agreement import check_accounts
from orchdata.ranks.parallel import ranks_per_node, resolve_rank

STEPS_AHEAD = 2
_CLOSE_SECONDS = 5.0
_STAGES = ("waiting", "fetching", "planning", "moving")


def post_balance(
    loader: Any,
    *,
    cost: Cost,
    parts: PartsOf | None = None,
    loss_tokens: LossTokens | None = None,
    group: Any = None,
    balance: str | Balance = "global",
    gain: float = 0.02,
    timeout: float | None = None,
) -> PostBalanced:
    """Balance the steps of a loader if costs are known only once samples are drawn.

    In every step each rank draws its list of samples. Costs are gathered, all ranks compute the same plan, and samples
    move in one all-to-all. The set of samples of a step never changes. The number of steps is the largest over the
    ranks: a rank without further samples draws nothing and still gets its share. All this happens in a thread, up to
    two steps ahead, on a gloo group created here: with more than one rank, the call is a collective of the group.

    Args:
        loader: any iterable of lists of samples; that thread iterates it again in each epoch (a generator has one).
            Samples are torch tensors on the CPU, numpy arrays, bytes, str, numbers, None, and dicts, lists and tuples
            of them; moved ones arrive contiguous, and bytearrays and memoryviews as bytes.
        cost: sample -> integer, or a mapping of integers by phase; their sum is balanced; 0 counts as 1. Per phase,
            such a mapping, with each phase and 0 where the sample lacks it; "llm" is the one that has the samples, and
            of the others the costs of their parts count.
        parts: for `od.Balance(assignment="per_phase")`, which balances each phase by itself: sample -> (its rest,
            {phase: [od.Part(object, cost, rows), ...]}). The rest moves to the rank that trains it, and each object
            to the one that encodes it; `PostBatch` says how features come back. A step is one micro-step.
        loss_tokens: sample -> integer, the number of labels in its loss; without it each sample counts as one, and
            `loss_scale` gives a mean over samples.
        group: process group or one-dimensional DeviceMesh of data-parallel ranks; default torch.distributed's world,
            else a single rank.
        balance: "none", "grouped", "grid", "global", or an `od.Balance` with scope and group_size; the default group
            size is the ranks of a node (LOCAL_WORLD_SIZE), else all: give it for a group whose ranks are not those of
            whole nodes.
        gain: minimum share of the step's price that moving must save; in a step below it nothing moves. The price is
            the sum over phases of the largest load.
        timeout: seconds that a rank waits for the others; default the timeout of `group`. It must cover the longest
            pause of a single rank's training loop.

    Raises:
        ValueError: an argument is out of range, or arguments differ between ranks.
        TypeError: the loader is not iterable, or a cost is not callable.
        RuntimeError: other ranks did not call post_balance within the timeout.
    """
    for name, given in {"cost": cost, "loss_tokens": loss_tokens, "parts": parts}.items():
        if not callable(given) and (given is not None or name == "cost"):
            raise TypeError(f"{name} must be callable with a sample, got {given!r}")
    if not hasattr(loader, "__iter__"):
        raise TypeError(f"loader must be an iterable of lists of samples, got {type(loader).__name__}")
    if isinstance(gain, bool) or not isinstance(gain, int | float) or not 0 <= gain < 1:
        raise ValueError(f"gain must be from 0 to below 1, got {gain!r}")
    if timeout is not None and (isinstance(timeout, bool) or not timeout > 0):
        raise ValueError(f"timeout must be more than 0 seconds, got {timeout!r}")
    ranks = resolve_rank(group)
    if ranks.size > 1 and ranks.group is None:
        raise ValueError(f"samples move in a process group: group={group!r} names none")
    balance = as_balance(balance)
    for name in ("max_tokens", "order", "equal_count", "max_samples", "teams"):
        if getattr(balance, name):
            raise ValueError(f"Balance.{name} is for a DataLoader: post_balance shares out costs alone")
    if balance.encode != "micro_step":
        raise ValueError("Balance.encode is for a DataLoader: a step of post_balance is one micro-step")
    if (balance.assignment == "per_phase") != (parts is not None):
        raise ValueError("parts= and Balance(assignment='per_phase') go together: give both, or neither")
    node = min(ranks_per_node() or ranks.size, ranks.size)
    if balance.scope in ("grouped", "grid"):
        balance = replace(balance, group_size=balance.group_size or node)
    Warming(["moves"] if ranks.size > 1 else []).wait()
    settings = asdict(balance) | {"ranks_per_node": node, "gain": float(gain), "loss_tokens given": bool(loss_tokens)}
    try:
        rank_group = RankGroup(ranks.group, timeout)
        gathered = rank_group.gather(np.zeros(0, np.int64), json.dumps(settings))
    except LostRanksError as error:
        raise RuntimeError(f"all {ranks.size} ranks must call post_balance together, some did not: {error}") from None
    check_accounts({rank: json.loads(text) for rank, (_, text) in enumerate(gathered)}, "in post_balance")
    drawn: dict[str, Any] = {"loader": loader, "cost": cost, "loss_tokens": loss_tokens, "parts": parts, "gain": gain}
    encoders = Encoders(balance, ranks.size, 1, node)
    return PostBalanced(loader, rank_group, partial(StepMaker, group=rank_group, encoders=encoders, **drawn))


class PostBalanced:
    """The result of `post_balance`: iteration yields a `PostBatch` for each step.

    Every rank must iterate, and leave the loop after the same step. If a rank leaves earlier or its loader fails, the
    others raise a StepError that names it; if its process dies, a StepError.
    """

    def __init__(self, loader: Any, rank_group: RankGroup, make_steps: Callable[..., StepMaker]) -> None:
        self._loader = loader
        self._rank_group = rank_group
        self._make_steps = make_steps
        self._iterations = 0
        self._loaded: PostState | None = None  # start of the next iteration; None for the beginning
        self._state: PostState | None = None  # after the last delivered step
        self._counts: Counter[str] = Counter()
        self._seconds = dict.fromkeys(_STAGES, 0.0)
        self._running: dict[Prefetcher, Ending] = {}

    def __iter__(self) -> Iterator[PostBatch]:
        """Iterate the steps from the loader's position to the end of the epoch. Closes an iteration still under way.

        Raises:
            StepError: on every rank, if one of them cannot continue; it names the step, and the rank if known.
        """
        self._stop(None)
        if not self._rank_group.connected:
            raise RuntimeError("an earlier error closed the connections of post_balance: call it again on all ranks")
        begin, self._loaded = self._loaded, None
        if begin is None and self._has_state:
            self._state = PostState(0, False, self._loader.state_dict())
        maker = self._make_steps(
            iteration=self._iterations,
            step=0 if begin is None else begin.step,
            exhausted=begin is not None and begin.exhausted,
        )
        self._iterations += 1
        if self._rank_group.size == 1:
            yield from self._deliver(iter(maker.make, None))
        else:
            prefetcher, user = Prefetcher(maker), User()
            self._running[prefetcher] = Ending(self, partial(_end, prefetcher))
            try:
                yield from self._deliver(iter(prefetcher))
            finally:
                close = partial(_close, self._running, prefetcher, _CLOSE_SECONDS)
                close() if user.drops_it() else call_soon(close)  # the collector may close this generator
        self._state = PostState(0, False, maker.state)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own position: the wrapped loader's state after the last delivered step, and that step's
        number. JSON-safe if the loader's state is.

        Raises:
            TypeError: the loader has no state.
        """
        self._need_state()
        return (self._state or PostState(0, False, self._loader.state_dict())).to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, this rank's own, at the next iteration. Closes an iteration under way, on all ranks.

        Raises:
            StateError: it is not a state of post_balance.
            TypeError: the loader has no state.
        """
        self._need_state()
        loaded = PostState.from_json(state)
        self._stop(None)
        self._loader.load_state_dict(loaded.loader)
        self._state = self._loaded = loaded

    def stats(self) -> dict[str, Any]:
        """Return plain values over the delivered steps, and over all ranks unless noted.

        `received`: samples that this rank got. `below_gain`: steps in which moving would have gained too little.
        `moved_samples`, `moved_bytes`: what changed its rank; bytes are those of parts too. `imbalance_before`,
        `imbalance`: the sum over steps and phases of the largest load over that of the mean load, as drawn and as
        delivered. `milliseconds`, per step on this rank: `waiting` is the time that the training loop waited. The
        others are times of the thread: `fetching` in the loader, `planning` and `moving` with the other ranks,
        including the wait for them.
        """
        counts, steps = self._counts, max(1, self._counts["steps"])
        mean = counts["total"] / max(1, counts["ranks"]) or 1.0
        counted = ("steps", "samples", "received", "below_gain", "moved_samples", "moved_bytes")
        return {
            **{name: counts[name] for name in counted},
            "imbalance_before": counts["before"] / mean or 1.0,
            "imbalance": counts["after"] / mean or 1.0,
            "milliseconds": {stage: 1000 * self._seconds[stage] / steps for stage in _STAGES},
        }

    def close(self) -> None:
        """End an iteration under way, as leaving the loop does."""
        self._stop(_CLOSE_SECONDS)

    def _deliver(self, steps: Iterator[ReadyStep]) -> Iterator[PostBatch]:
        while True:
            started = time.perf_counter()
            made = next(steps, None)
            if made is None:
                return
            for stage, seconds in {"waiting": time.perf_counter() - started, **made.seconds}.items():
                self._seconds[stage] += seconds
            plan = made.batch.plan
            self._counts["ranks"] = plan.num_ranks
            self._counts.update(
                steps=1,
                samples=len(plan.row),
                received=len(made.batch.samples),
                below_gain=plan.below_gain,
                moved_samples=int(np.count_nonzero(plan.rank != plan.stream_rank)),
                moved_bytes=int(plan.sizes[plan.moved].sum()),
                before=plan.before,
                after=plan.after,
                total=sum(int(costs.sum()) for costs in plan.costs.values()),
            )
            del plan
            if self._has_state:
                self._state = PostState(made.batch.step + 1, made.exhausted, made.state)
            batch = made.batch
            del made
            yield batch
            del batch  # else the last step would stay in memory during the wait for the next

    def _stop(self, timeout: float | None) -> None:
        """Close the iteration under way; without a timeout, wait until all ranks have closed it."""
        for prefetcher in list(self._running):
            _close(self._running, prefetcher, timeout)

    @property
    def _has_state(self) -> bool:
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    def _need_state(self) -> None:
        if not self._has_state:
            raise TypeError(
                f"post_balance cannot resume: {type(self._loader).__name__} has no state_dict and load_state_dict, so"
                " its position is not known; wrap a loader that has them, such as torchdata's StatefulDataLoader"
            )


def _end(prefetcher: Prefetcher) -> None:
    """End an iteration when the wrapper is collected or the process ends."""
    if not prefetcher.close(_CLOSE_SECONDS):
        prefetcher.leave()


def _close(running: dict[Prefetcher, Ending], prefetcher: Prefetcher, timeout: float | None) -> None:
    if prefetcher.close(timeout) and (ending := running.pop(prefetcher, None)):
        ending.cancel()


class Prefetcher:
    """Steps of one maker, which only its thread uses from now on, in order; few are ready or under way."""

    def __init__(self, maker: StepMaker) -> None:
        self._maker = maker
        self._ready: deque[ReadyStep] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="orchdata-post-balance", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[ReadyStep]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._over)
                if not self._ready:
                    break
                made = self._ready.popleft()
                self._changed.notify_all()
            yield made
            del made  # else the last step would stay in memory during the wait for the next
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, timeout: float | None) -> bool:
        """Ask the thread to end, which informs the other ranks, and wait for it. Return whether it has ended."""
        with self._changed:
            self._closing = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def leave(self) -> None:
        """Leave the reason for the others, as this process ends before they reach the step."""
        self._maker.group.leave(f"ended before step {self._maker.step}: leave the loop after one step on all ranks")

    def _run(self) -> None:
        try:
            while True:
                closing = not self._wait_for_room()
                made = self._maker.make(closing=closing)
                with self._changed:
                    if made is None:
                        break
                    if not self._closing:
                        self._ready.append(made)
                    self._changed.notify_all()
                del made
        except BaseException as error:  # noqa: BLE001 - raised by the training loop
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait until a step may be built. Return False if no more are needed."""
        group = self._maker.group
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing or len(self._ready) < STEPS_AHEAD, POLL_SECONDS):
                    return not self._closing
            try:
                group.check_others()
            except LostRanksError as error:
                raise group.explain_loss(self._maker.step, error) from error
