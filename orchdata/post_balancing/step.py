"""Steps of post_balance: each rank draws its samples, all compute the same plan, and samples move.

On the wire, for each step: seven int64 from every rank (its action, iteration, step, number of samples, hash of the
last plan, number of parts, number of phases that are new) and three for each of its first 64 samples (cost, loss
tokens, bytes); if a rank has more samples, three for each sample of all ranks, padded to the longest list; the names of
phases, if some are new; five for each part (phase, sample, cost, rows, bytes), padded; then the bytes of the objects
that move: the samples; or, per phase, the rests of samples, then the parts of one encoder after another.
"""

from __future__ import annotations

import copy
import hashlib
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

from orchdata.balancers.assignment import loads_of, lower_bound
from orchdata.balancers.placement import renamed
from orchdata.loaders.errors import StepError
from orchdata.planning.balance import Balance
from orchdata.planning.parts import Encoders, Parts, own_parts, share_out_parts
from orchdata.planning.route import Route, grouped_route
from orchdata.planning.sharing.shares import assign, one_microbatch
from orchdata.post_balancing.group import Bytes, Ints, LostRanksError, RankGroup, unpadded
from orchdata.ranks.wire import Message, describe, read

Ranks = NDArray[np.int32]

Cost = Callable[[Any], int | Mapping[str, int]]
LossTokens = Callable[[Any], int]

# Rows sent together with the action. A constant, so that even ranks with different settings can report that.
_FIRST_ROWS = 64
_HEADER = 7
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


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveRule:
    """When and how far samples move: scope and assignment, with a group size if the scope needs one; consecutive ranks
    that share a node; the minimum share of the step's price that moving must save, below which nothing moves.
    """

    balance: Balance
    ranks_per_node: int
    gain: float


@dataclass(frozen=True, eq=False)
class PostPlan:
    """The rank that drew each sample of a step, and the rank that gets it. Samples are sorted by the rank that drew
    them, then in the order drawn.

    Attributes:
        costs: int64 (num_samples,), at least 1; per phase, those of the LLM.
        sizes: int64 (num_objects,), bytes on the wire; 0 if nothing can move.
        owner: int32 (num_samples,), the rank that drew it.
        rank: int32 (num_samples,), the rank that gets it.
        num_ranks: ranks of the group.
        parts: encoder phase -> its parts, with the ranks that encode them; `part` is the number in the sample.
        below_gain: whether moving would have helped, but by less than the required gain.
    """

    costs: Ints
    sizes: Ints
    owner: Ranks
    rank: Ranks
    num_ranks: int
    parts: Mapping[str, Parts] = field(default_factory=dict)
    below_gain: bool = False

    @cached_property
    def hash(self) -> str:
        """Hash of 16 hexadecimal digits; equal plans have equal hashes."""
        digest = hashlib.blake2b(digest_size=8)
        arrays = [np.array([self.num_ranks]), self.costs, self.sizes, self.owner, self.rank]
        for parts in self.parts.values():
            arrays += [np.array([len(parts)]), parts.sample, parts.costs, parts.tokens, parts.rank]
        for array in arrays:
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def loads_before(self) -> Ints:
        """Loads without any move, int64 (num_phases, num_ranks): of the phases of `parts`, then of `costs`."""
        return self._loads(self.owner, [self.owner[parts.sample] for parts in self.parts.values()])

    @cached_property
    def loads(self) -> Ints:
        """Loads after the move, shaped as `loads_before`."""
        return self._loads(self.rank, [parts.rank for parts in self.parts.values()])

    def _loads(self, rank: Ranks, encoder_ranks: list[Ranks]) -> Ints:
        costs = [*(parts.costs for parts in self.parts.values()), self.costs]
        return np.stack([loads_of(*each, self.num_ranks) for each in zip(costs, [*encoder_ranks, rank], strict=True)])

    @cached_property
    def object_owner(self) -> Ranks:
        """The rank that drew each object, int32 (num_objects,)."""
        return np.concatenate([self.owner, *(self.owner[parts.sample] for parts in self.parts.values())])

    @cached_property
    def object_rank(self) -> Ranks:
        """The rank that gets each object, int32 (num_objects,)."""
        return np.concatenate([self.rank, *(parts.rank for parts in self.parts.values())])

    def places(self, rank: int) -> Ints:
        """Return the indices, in the step, of the samples that `rank` gets, ascending."""
        return np.flatnonzero(self.rank == rank)

    def leaving(self, rank: int) -> Ints:
        """Return the objects that leave `rank`, by destination, then ascending."""
        leaving = np.flatnonzero((self.object_owner == rank) & (self.object_rank != rank))
        return leaving[np.argsort(self.object_rank[leaving], kind="stable")]

    def arriving(self, rank: int) -> Ints:
        """Return the objects that come to `rank`, by origin, then ascending."""
        arriving = np.flatnonzero((self.object_owner != rank) & (self.object_rank == rank))
        return arriving[np.argsort(self.object_owner[arriving], kind="stable")]

    @cached_property
    def moved(self) -> Ints:
        """Objects that change their rank."""
        return np.flatnonzero(self.object_rank != self.object_owner)


def make_post_plan(
    costs: Ints,
    sizes: Ints,
    owner: Ranks,
    num_ranks: int,
    rule: MoveRule,
    parts: Mapping[str, Parts] | None = None,
) -> PostPlan:
    """Plan one step.

    Costs, int64 (num_samples,), are at least 1; sizes, int64 (num_objects,), are bytes on the wire of the samples, then
    of the parts of each phase; owner, int32 (num_samples,), ascends. `parts`, per phase: encoder phase -> its parts, on
    the ranks that drew them.
    """
    stay = PostPlan(costs, sizes, owner, owner, num_ranks, parts or {})
    if not len(costs):
        return stay
    if parts is None:
        move = replace(stay, rank=_move_little(costs, sizes, owner, num_ranks, rule))
    else:
        move = _moved_per_phase(stay, rule)
    before, after = (int(loads.max(axis=1).sum()) for loads in (stay.loads, move.loads))
    if before > after and before - after >= rule.gain * before:
        return move
    return replace(stay, below_gain=after < before)


def _moved_per_phase(stay: PostPlan, rule: MoveRule) -> PostPlan:
    """Balance each phase by itself.

    Where moving little leaves a phase above what a loader plans, that is taken, with ranks named so that much stays.
    """
    num_ranks, num_samples = stay.num_ranks, len(stay.costs)

    @cache
    def dealt() -> Ranks:
        return assign({"llm": stay.costs}, rule.balance, num_ranks, stay.owner)

    def moved(costs: Ints, sizes: Ints, owner: Ranks, planned: Callable[[], Ranks]) -> Ranks:
        little = _move_little(costs, sizes, owner, num_ranks, rule)
        enough = int(loads_of(costs, little, num_ranks).max()) * _ENOUGH
        if rule.balance.scope != "global" or enough <= lower_bound(costs, num_ranks) * (_ENOUGH + 1):
            return little
        rank = planned()
        if enough <= int(loads_of(costs, rank, num_ranks).max()) * (_ENOUGH + 1):
            return little
        return renamed(rank, owner, sizes, num_ranks, rule.ranks_per_node)

    spread, stop = {}, num_samples
    for phase, parts in stay.parts.items():
        start, stop = stop, stop + len(parts)

        def planned(parts: Parts = parts) -> Ranks:
            return share_out_parts(parts, one_microbatch(dealt()), Encoders(rule.balance, num_ranks)).rank

        spread[phase] = replace(parts, rank=moved(parts.costs, stay.sizes[start:stop], parts.rank, planned))
    rank = moved(stay.costs, stay.sizes[:num_samples], stay.owner, dealt)
    return replace(stay, rank=rank, parts=spread)


def _move_little(costs: Ints, sizes: Ints, owner: Ranks, num_ranks: int, rule: MoveRule) -> Ranks:
    if not len(costs):
        return owner
    return assign({"llm": costs}, rule.balance, num_ranks, owner, sizes=sizes, ranks_per_node=rule.ranks_per_node)


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
        plan: the rank that drew and the rank that got each sample, the same on every rank.
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
    """The contribution of this rank to a step; of parts, the index of each one's sample too."""

    action: _Action
    samples: list[Any] = field(default_factory=list)
    parts: dict[str, list[tuple[int, Part]]] = field(default_factory=dict)
    messages: dict[str, list[Message]] = field(default_factory=dict)
    table: Ints = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    error: Exception | None = None


@dataclass(eq=False, kw_only=True)
class StepMaker:
    """Builds the steps of one iteration, one after another, together with the other ranks.

    The loader is iterated in the thread that builds steps. `iteration` is its number, the same on every rank; `step`
    the first step to build; `exhausted` whether the loader has no more in this epoch.
    """

    loader: Any
    cost: Cost
    loss_tokens: LossTokens | None
    parts: PartsOf | None
    group: RankGroup
    rule: MoveRule
    iteration: int
    step: int
    exhausted: bool

    def __post_init__(self) -> None:
        self.state: Any = None
        self._phases: list[str] = []  # of encoders; the same on every rank, after the names are exchanged
        self._samples: Iterator[Any] | None = iter(()) if self.exhausted else None
        self._last_hash = 0
        self._movable = self.rule.balance.scope != "none" and self.group.size > 1
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
            agreed = self._agree(drawn)
            if agreed is None:
                return None
            plan, loss_tokens = agreed
            planned = time.perf_counter()
            batch = self._batch(plan, self._moved(drawn, plan), loss_tokens)
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
        self._last_hash = int(plan.hash, 16) >> 1
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
        if not isinstance(samples, list | tuple):
            raise TypeError(
                f"the loader must yield lists of samples, got a {type(samples).__name__}: collate after post_balance"
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

    def _agree(self, drawn: _Drawn) -> tuple[PostPlan, int] | None:
        """Send the others the action and rows of this rank. Return the plan, and all loss tokens; None at the end."""
        own = np.zeros(_HEADER + 3 * _FIRST_ROWS, np.int64)
        own[:5] = drawn.action, self.iteration, self.step, len(drawn.samples), self._last_hash
        own[5:7] = sum(map(len, drawn.parts.values())), len(drawn.parts.keys() - set(self._phases))
        first = drawn.table[:_FIRST_ROWS].ravel()
        own[_HEADER : _HEADER + len(first)] = first
        gathered = self.group.gather(own)
        # A rank that cannot continue ends the step on all ranks.
        actions = gathered[:, 0]
        if (actions == _Action.FAILED).any():
            raise self._failure(actions, drawn.error) from drawn.error
        if (actions != _Action.DRAWING).all() or drawn.action == _Action.CLOSING:
            return None
        for closing in np.flatnonzero(actions == _Action.CLOSING):
            raise StepError(
                f"rank {closing} stopped iterating before step {self.step}, which needs every rank: leave the loop"
                " after the same step on all of them",
                self.step,
                int(closing),
            )
        for column, what in ((1, "iteration"), (2, "step"), (4, "the hash of the last plan")):
            differing = np.flatnonzero(gathered[:, column] != gathered[0, column])
            if len(differing):
                rank = int(differing[0])
                raise StepError(
                    f"at step {self.step} rank {rank} differs from rank 0 in {what}: {gathered[rank, column]} and"
                    f" {gathered[0, column]}",
                    self.step,
                    rank,
                )
        # All rows, in a second gather if some rank has many.
        counts = gathered[:, 3]
        if counts.max() > _FIRST_ROWS:
            table = self.group.gather_rows(drawn.table, counts)
        else:
            table = unpadded(gathered[:, _HEADER:].reshape(self.group.size, _FIRST_ROWS, 3), counts)
        if gathered[:, 6].any():
            for text in self.group.gather_texts(json.dumps(list(drawn.parts))):
                self._phases += [phase for phase in json.loads(text) if phase not in self._phases]
        part_counts = gathered[:, 5]
        part_rows = self.group.gather_rows(self._part_rows(drawn), part_counts)

        # The plan of all of them.
        owner = np.repeat(np.arange(self.group.size, dtype=np.int32), counts)
        sizes, parts = [table[:, 2]], None
        if self.parts is not None:
            part_rows[:, 1] += np.repeat(np.cumsum(counts) - counts, part_counts)  # index in the step, not in the list
            of_phases = [part_rows[part_rows[:, 0] == number] for number in range(len(self._phases))]
            parts = {phase: _parts_of(rows, owner) for phase, rows in zip(self._phases, of_phases, strict=True)}
            sizes += [rows[:, 4] for rows in of_phases]
        plan = make_post_plan(table[:, 0], np.concatenate(sizes), owner, self.group.size, self.rule, parts)
        return plan, int(table[:, 1].sum())

    def _part_rows(self, drawn: _Drawn) -> Ints:
        """Return int64 (num_parts, 5): phase, sample, cost, rows and bytes of each part of this rank."""
        rows = [
            (number, index, part.cost, part.rows, drawn.messages[phase][at].num_bytes if self._movable else 0)
            for number, phase in enumerate(self._phases)
            for at, (index, part) in enumerate(drawn.parts.get(phase, ()))
        ]
        return np.array(rows, np.int64).reshape(-1, 5)

    def _failure(self, actions: Ints, error: Exception | None) -> StepError:
        texts = self.group.gather_texts("" if error is None else _name(error))
        rank = self.group.rank if error is not None else int(np.argmax(actions == _Action.FAILED))
        return StepError(f"rank {rank} failed at step {self.step}: {texts[rank]}", self.step, rank)

    def _batch(self, plan: PostPlan, objects: dict[int, Any], loss_tokens: int) -> PostBatch:
        """Return the batch of this rank, which has `objects`, by their index in the plan."""
        rank, places = self.group.rank, plan.places(self.group.rank)
        encoded, routes, arriving, start = {}, {}, {}, len(plan.rank)
        for phase, parts in plan.parts.items():
            (encodes,), (coming,) = own_parts(parts, rank, 0, one_microbatch(plan.rank))  # in one micro-step
            encoded[phase] = [objects[start + index] for index in encodes.tolist()]
            routes[phase] = grouped_route(
                rank,
                plan.num_ranks,
                receivers=plan.rank[parts.sample[encodes]],
                sent=parts.tokens[encodes],
                senders=parts.rank[coming],
                received=parts.tokens[coming],
                label=f"{phase}, step {self.step}",
            )
            at = np.searchsorted(places, parts.sample[coming])
            arriving[phase] = np.stack([at, parts.part[coming], parts.tokens[coming]], axis=1)
            start += len(parts)
        return PostBatch(
            [objects[index] for index in places.tolist()],
            self.group.size / max(1, loss_tokens),
            self.step,
            loss_tokens,
            plan,
            encoded,
            routes,
            arriving,
        )

    def _moved(self, drawn: _Drawn, plan: PostPlan) -> dict[int, Any]:
        """Exchange objects, and return those of this rank after the move, by their index in the plan."""
        own, owner, rank, sizes = self.group.rank, plan.object_owner, plan.object_rank, plan.sizes
        here = np.flatnonzero(owner == own)
        drawn_parts = [drawn.parts.get(phase, []) for phase in plan.parts]
        objects = [*drawn.samples, *(part.object for of_phase in drawn_parts for _, part in of_phase)]
        kept = {at: each for at, each in zip(here.tolist(), objects, strict=True) if rank[at] == own}
        if not len(plan.moved):
            return kept
        leaving, arriving = plan.leaving(own), plan.arriving(own)
        to_each, from_each = np.zeros((2, plan.num_ranks), np.int64)
        np.add.at(to_each, rank[leaving], sizes[leaving])
        np.add.at(from_each, owner[arriving], sizes[arriving])
        messages = [message for phase in ("llm", *plan.parts) for message in drawn.messages.get(phase, ())]
        outgoing: Bytes = np.empty(int(to_each.sum()), np.uint8)
        for place, (start, stop) in zip(np.searchsorted(here, leaving), _spans(sizes[leaving]), strict=True):
            messages[place].write_to(outgoing[start:stop])
        incoming = self.group.exchange(outgoing, to_each.tolist(), from_each.tolist())
        spans = _spans(sizes[arriving])
        return kept | {
            at: read(incoming[start:stop]) for at, (start, stop) in zip(arriving.tolist(), spans, strict=True)
        }


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


def _parts_of(rows: Ints, owner: Ranks) -> Parts:
    """Return the parts of a phase, on the ranks that drew them; rows as of `StepMaker._part_rows`."""
    _, sample, cost, num_rows, _ = rows.T
    number = np.arange(len(sample)) - np.searchsorted(sample, sample)
    return Parts(sample=sample, part=number, positions=num_rows, tokens=num_rows, costs=cost, rank=owner[sample])


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
