"""Steps of post_balance: each rank draws its samples, all compute the same plan, and samples move.

On the wire, for each step: int64 from every rank (its action, iteration, step, hash of the last plan, numbers of
samples and parts; three for each sample: cost, loss tokens, bytes; five for each part: phase, sample, cost, rows,
bytes; the letters of a text: the names of its phases, or why it failed); then the bytes of the objects that move: the
samples; or, per phase, the rests of samples, then the parts of one encoder after another.
"""

from __future__ import annotations

import copy
import json
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate

from orchdata.balancers.assignment import loads_of, lower_bound
from orchdata.loaders.errors import StepError
from orchdata.planning.parts import Encoders, Parts, share_out_parts
from orchdata.planning.plan import Plan
from orchdata.planning.route import Route, grouped_route
from orchdata.planning.sharing.shares import assign, one_microbatch
from orchdata.post_balancing.group import Bytes, Ints, LostRanksError, RankGroup
from orchdata.ranks.wire import Message, describe, read

Ranks = NDArray[np.int32]

Cost = Callable[[Any], int | Mapping[str, int]]
LossTokens = Callable[[Any], int]

_HEADER = 6
_ENOUGH = 200  # Moving little is good enough where a phase then takes at most this part more.


class _Action(IntEnum):
    """The action of a rank in a step."""

    DRAWING = 0
    EXHAUSTED = 1  # Takes part with an empty list.
    CLOSING = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Part:
    """What `post_balance(parts=...)` says of a part of a sample, as of one image.

    Attributes:
        object: what its encoder takes: it moves to the rank that encodes it, and is of the types that samples are of.
        cost: of encoding it, an integer; 0 counts as 1.
        rows: features that the encoder yields for it.
    """

    object: Any
    cost: int
    rows: int


PartsOf = Callable[[Any], tuple[Any, Mapping[str, Sequence[Part]]]]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PostPlan(Plan):
    """The plan of samples that ranks have drawn already, in one micro-step: `stream_rank` is the rank that drew each.
    Samples are sorted by it, then in the order drawn. Their positions are not known. What moves are objects: samples,
    then the parts of one phase after another.

    Attributes:
        sizes: int64 (num_objects,), bytes on the wire; 0 if nothing can move.
        before, after: the sum over phases of the largest load, as drawn and as planned.
        below_gain: whether moving would have helped, but by less than the required gain.
    """

    sizes: Ints
    before: int = 0
    after: int = 0
    below_gain: bool = False

    @cached_property
    def object_ranks(self) -> tuple[Ranks, Ranks]:
        """The rank that drew each object, and the rank that gets it, int32 (num_objects,) each."""
        owner, parts = self.stream_rank, self.parts.values()
        drawn = np.concatenate([owner, *(owner[of.sample] for of in parts)])
        return drawn, np.concatenate([self.rank, *(of.rank for of in parts)])

    @cached_property
    def moved(self) -> Ints:
        """The objects that change their rank, int64."""
        return np.flatnonzero(np.not_equal(*self.object_ranks))

    def moves(self, rank: int) -> tuple[Ints, Ints, Route]:
        """Return the objects that leave `rank`, by destination, those that come to it, by origin, and the route of
        their bytes.
        """
        owner, gets = self.object_ranks
        leaving, arriving = (self.moved[of[self.moved] == rank] for of in (owner, gets))
        leaving = leaving[np.argsort(gets[leaving], kind="stable")]
        arriving = arriving[np.argsort(owner[arriving], kind="stable")]
        route = grouped_route(
            rank,
            self.num_ranks,
            receivers=gets[leaving],
            sent=self.sizes[leaving],
            senders=owner[arriving],
            received=self.sizes[arriving],
        )
        return leaving, arriving, route

    def cells_unbalanced(self, phase: str) -> Ints:
        """Return what `cells` would be without any move."""
        owner = self.stream_rank
        parts = {phase: replace(of, rank=owner[of.sample]) for phase, of in self.parts.items()}
        return replace(self, rank=owner, parts=parts).cells(phase)


def plan_as_drawn(
    epoch: int,
    step: int,
    num_ranks: int,
    costs: Ints,
    owner: Ranks,
    sizes: Ints,
    loss_tokens: int,
    parts: Mapping[str, Parts],
) -> PostPlan:
    """Return the plan in which nothing moves; `costs`, int64 (num_samples,), at least 1, are of the phase `llm`."""
    num_samples = len(costs)
    encoders = {phase: loads_of(of.costs, of.sample.astype(np.int32), num_samples) for phase, of in parts.items()}
    return PostPlan(
        epoch=epoch,
        step=step,
        num_ranks=num_ranks,
        num_microbatches=1,
        source=np.zeros(num_samples, np.int32),
        row=np.arange(num_samples),
        rank=owner,
        microbatch=np.zeros(num_samples, np.int32),
        costs=encoders | {"llm": costs},
        llm_positions=np.zeros(num_samples, np.int64),
        loss_tokens=loss_tokens,
        stream_rank=owner,
        parts=parts,
        sizes=sizes,
    )


def make_post_plan(drawn: PostPlan, encoders: Encoders, gain: float) -> PostPlan:
    """Return the plan with samples and parts moved, each phase balanced by itself. Nothing moves where that would save
    less than the share `gain` of the step's price, the sum over phases of the largest load.

    Per phase, where moving little leaves a phase above what a loader plans, that is taken, with ranks named so that
    much stays.
    """
    balance, num_ranks, stop = encoders.balance, drawn.num_ranks, len(drawn.row)
    costs, owner = drawn.costs["llm"], drawn.stream_rank
    searches = balance.assignment == "per_phase" and balance.scope == "global"

    @cache
    def dealt() -> Ranks:
        return assign({"llm": costs}, balance, num_ranks, owner)

    def moved(costs: Ints, sizes: Ints, owner: Ranks, planned: Callable[[], Ranks]) -> Ranks:
        if not len(costs):
            return owner
        little = encoders.assign(costs, sizes, owner)
        enough = int(loads_of(costs, little, num_ranks).max()) * _ENOUGH
        if not searches or enough <= lower_bound(costs, num_ranks) * (_ENOUGH + 1):
            return little
        rank = planned()
        if enough <= int(loads_of(costs, rank, num_ranks).max()) * (_ENOUGH + 1):
            return little
        return encoders.renamed(rank, sizes, owner)

    spread, rank = {}, moved(costs, drawn.sizes[:stop], owner, dealt)
    for phase, parts in drawn.parts.items():
        start, stop = stop, stop + len(parts)

        def planned(parts: Parts = parts) -> Ranks:
            return share_out_parts(parts, one_microbatch(dealt()), replace(encoders, ranks_per_node=None)).rank

        spread[phase] = replace(parts, rank=moved(parts.costs, drawn.sizes[start:stop], parts.rank, planned))
    plan = replace(drawn, rank=rank, parts=spread)
    before, after = (sum(int(each.loads(phase).max()) for phase in each.phases) for each in (drawn, plan))
    if before > after and before - after >= gain * before:
        return replace(plan, before=before, after=after)
    return replace(drawn, before=before, after=before, below_gain=after < before)


@dataclass(frozen=True, slots=True)
class PostBatch:
    """One rank's samples of one step.

    Per phase, every rank encodes `parts` of each phase, joined in their order, or a dummy where it has none. Then
    `od.exchange(features, batch.routes["image"], requires_grad=True)` returns the features of the parts of `samples`,
    in the order of `arriving["image"]`. All ranks have the same phases: those that a cost has named so far.

    Attributes:
        samples: samples of this rank, by the rank that drew them, then in the order drawn; possibly none. Per phase,
            what `parts=` left of them.
        loss_scale: number of ranks / max(1, loss tokens of the step over all ranks). Summed losses times this, with
            gradients averaged over the ranks, give the mean over all loss tokens (over samples, without `loss_tokens`).
        step: number of the step in this epoch, from 0.
        global_loss_tokens: loss tokens of the step over all ranks; its samples, without `loss_tokens`.
        plan: as a loader's, the same on every rank: `plan.stream_rank` drew each sample, `plan.rank` got it.
        parts: phase -> objects that this rank encodes, in the order of encoding.
        routes: phase -> the route of its features.
        arriving: phase -> int64 (num_parts, 3), for each part of `samples`, in the order in which features arrive: the
            index of its sample in `samples`, its number among the sample's parts of the phase, and its rows.
    """

    samples: list[Any]
    loss_scale: float
    step: int
    global_loss_tokens: int
    plan: PostPlan
    parts: Mapping[str, list[Any]] = field(default_factory=dict)
    routes: Mapping[str, Route] = field(default_factory=dict)
    arriving: Mapping[str, Ints] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReadyStep:
    """A step ready to be delivered; whether the loader had no more, and its state, if it has one, after the step was
    drawn; stage -> seconds.
    """

    batch: PostBatch
    exhausted: bool
    state: Any
    seconds: dict[str, float]


@dataclass(slots=True)
class _Drawn:
    """The contribution of this rank to a step: of samples, their costs, loss tokens and bytes too, int64 (num_samples,
    3); of parts, the index of each one's sample.
    """

    action: _Action
    samples: list[Any] = field(default_factory=list)
    parts: dict[str, list[tuple[int, Part]]] = field(default_factory=dict)
    messages: dict[str, list[Message]] = field(default_factory=dict)
    table: Ints = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    error: Exception | None = None


@dataclass(eq=False, kw_only=True)
class StepMaker:
    """Builds the steps of one iteration, one after another, together with the other ranks.

    The loader is iterated in the thread that builds steps. `encoders` has the scope, the assignment and the ranks of a
    node; `gain` is as in `make_post_plan`. `iteration` is its number, the same on every rank; `step` the first step to
    build; `exhausted` whether the loader has no more in this epoch.
    """

    loader: Any
    cost: Cost
    loss_tokens: LossTokens | None
    parts: PartsOf | None
    group: RankGroup
    encoders: Encoders
    gain: float
    iteration: int
    step: int
    exhausted: bool

    def __post_init__(self) -> None:
        self.state: Any = None
        self._phases: list[str] = []  # of encoders that a cost has named so far; the same on every rank
        self._samples: Iterator[Any] | None = iter(()) if self.exhausted else None
        self._last_hash = 0
        self._movable = self.encoders.balance.scope != "none" and self.group.size > 1
        if self.exhausted:
            self._take_state()

    def make(self, *, closing: bool = False) -> ReadyStep | None:
        """Return the next step; None if no rank has one, or this one is closing.

        Raises:
            StepError: on every rank, if one of them cannot continue; it names the step, and the rank if known.
        """
        started = time.perf_counter()
        drawn = _Drawn(_Action.CLOSING) if closing else self._draw()
        fetched = time.perf_counter()
        try:
            plan = self._agree(drawn)
            if plan is None:
                return None
            planned = time.perf_counter()
            batch = self._batch(plan, self._moved(drawn, plan))
        except LostRanksError as error:
            raise self.group.explain_loss(self.step, error) from error
        except StepError:
            raise
        except Exception as error:
            # The others are in the middle of this step: only closed connections wake them.
            reason = f"failed in step {self.step}: {_name(error)}"
            self.group.give_up(reason)
            raise StepError(f"rank {self.group.rank} {reason}", self.step, self.group.rank) from error
        self.step += 1
        self._last_hash = int(plan.hash[:15], 16)
        seconds = {
            "fetching": fetched - started,
            "planning": planned - fetched,
            "moving": time.perf_counter() - planned,
        }
        return ReadyStep(batch, self.exhausted, self.state, seconds)

    def _draw(self) -> _Drawn:
        try:
            if self._samples is None:
                self._samples = iter(self.loader)
            if self.exhausted:
                return _Drawn(_Action.EXHAUSTED)
            try:
                samples = next(self._samples)
            except StopIteration:
                self.exhausted = True
                self._take_state()
                return _Drawn(_Action.EXHAUSTED)
            self._take_state()
            return self._described(samples)
        except Exception as error:  # noqa: BLE001 - every rank raises it
            return _Drawn(_Action.FAILED, error=error)

    def _described(self, samples: Any) -> _Drawn:
        # torch's default makes columns of a list of samples; strings stay as they are.
        is_list, collated = (
            isinstance(samples, list | tuple),
            getattr(self.loader, "collate_fn", None) is default_collate,
        )
        if not is_list or (collated and not isinstance(next(iter(samples), ""), str | bytes)):
            what = "columns" if is_list else f"a {type(samples).__name__}"
            raise TypeError(
                f"the loader must yield lists of samples, got {what}: collate after post_balance; torch's DataLoader "
                "yields such lists with collate_fn=list"
            )
        drawn = _Drawn(_Action.DRAWING, samples=list(samples), table=np.zeros((len(samples), 3), np.int64))
        for index, sample in enumerate(samples):
            cost = self.cost(sample)
            tokens = 1 if self.loss_tokens is None else _count(self.loss_tokens(sample), "loss_tokens")
            if self.parts is not None:
                drawn.samples[index], parts = self.parts(sample)
                cost = _add_parts(drawn.parts, index, cost, parts)
            drawn.table[index, :2] = max(1, _total(cost)), tokens
        if self._movable:
            drawn.messages = {phase: [describe(part.object) for _, part in own] for phase, own in drawn.parts.items()}
            drawn.messages["llm"] = [describe(sample) for sample in drawn.samples]
            drawn.table[:, 2] = [message.num_bytes for message in drawn.messages["llm"]]
        return drawn

    def _take_state(self) -> None:
        if hasattr(self.loader, "state_dict"):
            self.state = copy.deepcopy(self.loader.state_dict())

    def _agree(self, drawn: _Drawn) -> PostPlan | None:
        """Send the others the action and rows of this rank. Return the plan of all of them; None at the end."""
        part_rows = [
            (number, index, part.cost, part.rows, drawn.messages[phase][at].num_bytes if self._movable else 0)
            for number, (phase, of_phase) in enumerate(drawn.parts.items())
            for at, (index, part) in enumerate(of_phase)
        ]
        header = drawn.action, self.iteration, self.step, self._last_hash, len(drawn.samples), len(part_rows)
        own = np.concatenate([header, drawn.table.ravel(), np.array(part_rows, np.int64).ravel()])
        text = json.dumps(list(drawn.parts)) if drawn.error is None else _name(drawn.error)
        gathered = self.group.gather(own, text)
        headers = np.stack([values[:_HEADER] for values, _ in gathered])

        # A rank that cannot continue ends the step on all ranks.
        actions = headers[:, 0]
        for failed in np.flatnonzero(actions == _Action.FAILED).tolist():
            rank = failed if drawn.error is None else self.group.rank
            reason = f"rank {rank} failed at step {self.step}: {gathered[rank][1]}"
            raise StepError(reason, self.step, rank) from drawn.error
        if (actions != _Action.DRAWING).all() or drawn.action == _Action.CLOSING:
            return None
        for closing in np.flatnonzero(actions == _Action.CLOSING).tolist():
            raise StepError(
                f"rank {closing} stopped iterating before step {self.step}, which needs every rank: leave the loop"
                " after the same step on all of them",
                self.step,
                closing,
            )
        for column, what in ((1, "iteration"), (2, "step"), (3, "the hash of the last plan")):
            for rank in np.flatnonzero(headers[:, column] != headers[0, column]).tolist():
                raise StepError(
                    f"at step {self.step} rank {rank} differs from rank 0 in {what}: {headers[rank, column]} and"
                    f" {headers[0, column]}",
                    self.step,
                    rank,
                )

        # Rows of all ranks: of samples; and of parts, by phase, with the index of their sample in the step.
        counts = headers[:, 4]
        ends = _HEADER + 3 * counts
        rows = [values[_HEADER:end].reshape(-1, 3) for (values, _), end in zip(gathered, ends.tolist(), strict=True)]
        costs, loss_tokens, sizes = np.concatenate(rows).T.copy()
        owner = np.repeat(np.arange(self.group.size, dtype=np.int32), counts)
        of_phases: dict[str, list[Ints]] = {phase: [np.zeros((0, 5), np.int64)] for phase in self._phases}
        for (values, names), end, first in zip(gathered, ends.tolist(), np.cumsum(counts) - counts, strict=True):
            of_rank = values[end:].reshape(-1, 5)
            of_rank[:, 1] += first
            for number, phase in enumerate(json.loads(names)):
                of_phases.setdefault(phase, []).append(of_rank[of_rank[:, 0] == number])
        self._phases = list(of_phases)
        parts, of_objects = {}, [sizes]
        for phase, of_ranks in of_phases.items():
            _, sample, cost, num_rows, num_bytes = np.concatenate(of_ranks).T.copy()
            place = np.arange(len(sample)) - np.searchsorted(sample, sample)  # in the sample
            shape: dict[str, Any] = {"positions": num_rows, "tokens": num_rows}
            parts[phase] = Parts(sample=sample, part=place, costs=cost, rank=owner[sample], **shape)
            of_objects.append(num_bytes)
        where = self.iteration, self.step, self.group.size
        total = int(loss_tokens.sum())
        as_drawn = plan_as_drawn(*where, costs, owner, np.concatenate(of_objects), total, parts)
        return make_post_plan(as_drawn, self.encoders, self.gain)

    def _moved(self, drawn: _Drawn, plan: PostPlan) -> dict[int, Any]:
        """Exchange objects, and return those of this rank after the move, by their index in the plan."""
        own, (owner, rank) = self.group.rank, plan.object_ranks
        here = np.flatnonzero(owner == own)
        drawn_parts = [drawn.parts.get(phase, []) for phase in plan.parts]
        objects = [*drawn.samples, *(part.object for of_phase in drawn_parts for _, part in of_phase)]
        held = {at: each for at, each in zip(here.tolist(), objects, strict=True) if rank[at] == own}
        if not len(plan.moved):
            return held
        leaving, arriving, route = plan.moves(own)
        messages = [message for phase in ("llm", *plan.parts) for message in drawn.messages.get(phase, ())]
        outgoing: Bytes = np.empty(int(route.send_rows.sum()), np.uint8)
        for place, (start, stop) in zip(np.searchsorted(here, leaving), _spans(plan.sizes[leaving]), strict=True):
            messages[place].write_to(outgoing[start:stop])
        incoming = self.group.exchange(outgoing, route)
        for at, (start, stop) in zip(arriving.tolist(), _spans(plan.sizes[arriving]), strict=True):
            held[at] = read(incoming[start:stop])
        return held

    def _batch(self, plan: PostPlan, objects: dict[int, Any]) -> PostBatch:
        """Return the batch of this rank, which has `objects`, by their index in the plan."""
        rank, start = self.group.rank, len(plan.rank)
        places = plan.places(rank)
        encoded, arriving = {}, {}
        for phase, parts in plan.parts.items():
            encoded[phase] = [objects[start + index] for index in plan.encoded(phase, rank, 0).tolist()]
            coming = plan.arriving(phase, rank, 0)
            at = np.searchsorted(places, parts.sample[coming])
            arriving[phase] = np.stack([at, parts.part[coming], parts.tokens[coming]], axis=1)
            start += len(parts)
        return PostBatch(
            samples=[objects[index] for index in places.tolist()],
            loss_scale=self.group.size / max(1, plan.loss_tokens),
            step=self.step,
            global_loss_tokens=plan.loss_tokens,
            plan=plan,
            parts=encoded,
            routes={phase: plan.route(phase, rank, 0) for phase in plan.parts},
            arriving=arriving,
        )


def _add_parts(
    found: dict[str, list[tuple[int, Part]]], index: int, cost: Any, parts: Mapping[str, Sequence[Part]]
) -> int:
    """Add the parts of a sample to those `found`, in all phases that its cost names. Return its cost in `llm`."""
    if not isinstance(cost, Mapping) or "llm" not in cost:
        raise TypeError(f"with parts=, cost must return a mapping of phases with 'llm' among them, got {cost!r}")
    encoders = [phase for phase in cost if phase != "llm"]
    for phase in parts.keys() - set(encoders):
        raise ValueError(f"parts has the phase {phase!r}, but cost names the encoders {encoders}")
    for phase in encoders:
        own = found.setdefault(str(phase), [])
        if cost[phase] and not parts.get(phase):
            raise ValueError(f"phase {phase!r} costs {cost[phase]}, but parts has none of it: 0 means none")
        for part in parts.get(phase, ()):
            part_cost = _count(part.cost, f"parts, for the cost of a part of phase {phase!r},")
            rows = _count(part.rows, f"parts, for the rows of a part of phase {phase!r},")
            own.append((index, Part(part.object, max(1, part_cost), rows)))
    return _count(cost["llm"], "cost of phase 'llm'")


def _spans(sizes: Ints) -> Iterator[tuple[int, int]]:
    return pairwise([0, *np.cumsum(sizes).tolist()])


def _total(cost: Any) -> int:
    """Return a sample's cost, summed over phases."""
    if isinstance(cost, Mapping):
        return sum(_count(value, f"cost of phase {phase!r}") for phase, value in cost.items())
    return _count(cost, "cost")


def _count(value: Any, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must return an integer, got {value!r}: scale and round it") from None
    if not 0 <= number <= 1 << 62:
        raise ValueError(f"{name} must return an integer from 0 to 2**62, got {number}")
    return number


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
