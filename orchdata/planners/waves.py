"""Devices of runs of equal operators: seconds of an operator by devices -> when each run has how many devices.

runs, devices --bisection--> devices of each run, a fraction --the two sizes next to it--> operators at each size
                                                 operators at each size --list schedule, moves--> operators in time

After Spindle (Wang et al., ASPLOS 2025, arXiv 2409.03365): its contracted operators (MetaOps: runs here), its relaxed
optimum, and its two sizes for each run. A list schedule and moves stand in place of its waves.

Towers that share a device: measured seconds by share and neighbour -> who runs side by side, who in turn.

The idea is from the abstract of Mosaic (arXiv 2605.18710): modules that share a GPU by quotas. Its engine is not here.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import groupby

import numpy as np

from orchdata.balancers.assignment import checked_count
from orchdata.planners.values import Value, checked_number

MOST_TRIES, MOST_STARTED = 6_000, 300_000  # Of schedules, and of operators in all of them together.
HEAT = 0.3  # A move may be this part worse at first, and none at the end.


@dataclass(frozen=True, kw_only=True, slots=True)
class Operators(Value):
    """A run of `count` equal operators, one after another, as the layers of a tower of a task.

    Attributes:
        seconds: of one operator, by the number of devices that it may have.
        after: names of the runs that end before this one starts.
    """

    name: str
    count: int
    seconds: Mapping[int, float]
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checked_count(self.count, f"Operators({self.name!r}).count")
        for devices, each in self.seconds.items():
            checked_count(devices, f"Operators({self.name!r}).seconds: devices")
            checked_number(each, f"Operators({self.name!r}).seconds[{devices}]")


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorsRun(Value):
    """Operators of a run, one right after another on as many devices, from when to when, in seconds."""

    name: str
    devices: int
    operators: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WavesPlan(Value):
    """What runs when.

    Attributes:
        runs: by start, then by name.
        seconds: to the end of the last operator.
        bound_seconds: no schedule takes less.
        relaxed: devices of each run in the relaxed optimum of the runs that are as many runs after the first.
        allocated: the sizes next to it: (devices, operators) of each run, before any move.
    """

    runs: tuple[OperatorsRun, ...]
    seconds: float
    bound_seconds: float
    relaxed: Mapping[str, float]
    allocated: Mapping[str, tuple[tuple[int, int], ...]]


def plan_waves(runs: Sequence[Operators], devices: int) -> WavesPlan:
    """Return when each run has how many devices, for an early end of all.

    Runs of one depth are relaxed together: each gets devices in fractions so that all end at once, by bisection. Its
    operators get the two sizes next to that. Then a list schedule starts the operator with the longest way to the end
    first, and random moves change sizes and priorities as long as that ends earlier. The same arguments give the same
    plan. Devices are counted, not named, and data that move between them cost nothing.

    Raises:
        ValueError: names that are not unique, unknown or cyclic `after`, or a run without a size of at most `devices`.
    """
    checked_count(devices, "devices")
    named = {run.name: run for run in sorted(runs, key=lambda run: run.name)}
    if not runs or len(named) < len(runs):
        raise ValueError(f"runs must be one at least, each with its own name, got {[run.name for run in runs]}")
    curves = {name: _Curve(run, devices) for name, run in named.items()}
    if unknown := [(run.name, other) for run in runs for other in run.after if other not in named]:
        raise ValueError(f"Operators({unknown[0][0]!r}).after has {unknown[0][1]!r}, which is no run")
    sorter = TopologicalSorter({run.name: run.after for run in named.values()})
    try:
        sorter.prepare()
    except CycleError as error:
        raise ValueError(f"Operators.after must have no cycle, got {' -> '.join(error.args[1])}") from None
    order: list[str] = []
    ways: dict[str, float] = {}  # Seconds of the longest way to the end of each run, with the fastest sizes.
    relaxed: dict[str, float] = {}
    sizes: dict[str, list[int]] = {}
    while sorter.is_active():
        peers = sorted(sorter.get_ready())  # As many runs after the first.
        sorter.done(*peers)
        order += peers
        seconds = _relaxed([curves[name] for name in peers], devices)
        for name in peers:
            ways[name] = max((ways[other] for other in named[name].after), default=0.0) + curves[name].fastest
            relaxed[name] = curves[name].area(seconds) / seconds
            sizes[name] = curves[name].two_sizes(seconds)
    bound = max(_relaxed(list(curves.values()), devices), *ways.values())

    schedule = _Schedule(named, order, devices)
    best = _moved(schedule, sizes, curves, bound, random.Random(0))
    ends, found = schedule.run(*best)
    return WavesPlan(
        runs=_joined(found),
        seconds=ends,
        bound_seconds=min(bound, ends),  # Sums of the same floats in another order.
        relaxed=relaxed,
        allocated={name: tuple((size, len(list(each))) for size, each in groupby(sizes[name])) for name in named},
    )


class _Curve:
    """What a run may take: seconds and device-seconds, from its fastest size to its cheapest, mixtures between them."""

    def __init__(self, run: Operators, devices: int) -> None:
        usable = sorted((size, each) for size, each in run.seconds.items() if size <= devices)
        if not usable:
            raise ValueError(f"Operators({run.name!r}).seconds must have a size up to {devices}, got {[*run.seconds]}")
        self.count = run.count
        hull: list[tuple[int, float]] = []
        self.sizes: list[int] = []
        for size, each in usable:
            if self.sizes and each >= run.seconds[self.sizes[-1]]:
                continue  # More devices that are no faster.
            self.sizes.append(size)
            # Fewer device-seconds at more devices, or than a mixture of two others. Equal ones stay.
            while hull and size * each < hull[-1][0] * hull[-1][1] * (1 - 1e-9):
                hull.pop()
            while len(hull) > 1 and _slope(*hull[-2:]) > _slope(hull[-1], (size, each)) + 1e-9 * size:
                hull.pop()
            hull.append((size, each))
        # Fastest first: sizes, and seconds and device-seconds of an operator.
        self.hull, self.each = [size for size, _ in hull[::-1]], [each for _, each in hull[::-1]]
        self.areas = [size * each for size, each in hull[::-1]]
        self.fastest, self.slowest = self.count * self.each[0], self.count * self.each[-1]

    def area(self, seconds: float) -> float:
        """Return the least device-seconds of the run within some seconds, at least those of its fastest size."""
        return self.count * float(np.interp(seconds / self.count, self.each, self.areas))

    def two_sizes(self, seconds: float) -> list[int]:
        """Return a size of each operator, the larger first."""
        place = float(np.interp(seconds / self.count, self.each, range(len(self.each))))
        at_small = math.floor(place % 1 * self.count + 0.5)
        return [self.hull[int(place)]] * (self.count - at_small) + [self.hull[math.ceil(place)]] * at_small


def _slope(first: tuple[int, float], second: tuple[int, float]) -> float:
    """Device-seconds that a second less costs, from a smaller to a larger size."""
    return (second[0] * second[1] - first[0] * first[1]) / (first[1] - second[1])


def _relaxed(curves: Sequence[_Curve], devices: int) -> float:
    """Return the least seconds in which independent runs end, with sizes in fractions: a bound, by bisection."""
    low, high = max(curve.fastest for curve in curves), sum(curve.slowest for curve in curves)
    if sum(curve.area(low) for curve in curves) <= devices * low:
        return low
    while (middle := (low + high) / 2) not in (low, high):
        fits = sum(curve.area(middle) for curve in curves) <= devices * middle
        low, high = (low, middle) if fits else (middle, high)
    return high


Started = tuple[str, int, float, float]  # Run, devices, start, end.
State = tuple[dict[str, list[int]], dict[str, float]]  # Sizes of operators, and weights, by run.


class _Schedule:
    """The list schedule of some runs."""

    def __init__(self, named: Mapping[str, Operators], order: Sequence[str], devices: int) -> None:
        self.named, self.order, self.devices = named, order, devices
        self.next: dict[str, list[str]] = {name: [] for name in named}
        for run in named.values():
            for other in set(run.after):
                self.next[other].append(run.name)

    def run(self, sizes: Mapping[str, Sequence[int]], weights: Mapping[str, float]) -> tuple[float, list[Started]]:
        """Start the ready operator that fits with the longest way to the end, times a weight, first. Return the end."""
        left: dict[str, float] = {}  # Seconds from the next operator of a run to the end.
        for name in reversed(self.order):
            own = sum(self.named[name].seconds[size] for size in sizes[name])
            left[name] = own + max((left[other] for other in self.next[name]), default=0.0)
        missing = {name: len(set(run.after)) for name, run in self.named.items()}
        done = dict.fromkeys(self.named, 0)
        ready = [(-left[name] * weights[name], name) for name, count in missing.items() if not count]
        heapq.heapify(ready)
        running: list[tuple[float, str]] = []
        started: list[Started] = []
        free, now = self.devices, 0.0
        while ready or running:
            aside = []
            while ready and free:
                key, name = heapq.heappop(ready)
                size = sizes[name][done[name]]
                if size > free:
                    aside.append((key, name))
                    continue
                free -= size
                end = now + self.named[name].seconds[size]
                started.append((name, size, now, end))
                heapq.heappush(running, (end, name))
            for back in aside:
                heapq.heappush(ready, back)
            now = running[0][0]
            while running and running[0][0] == now:
                name = heapq.heappop(running)[1]
                size = sizes[name][done[name]]
                free += size
                left[name] -= self.named[name].seconds[size]
                done[name] += 1
                for other in [name] if done[name] < len(sizes[name]) else self.next[name]:
                    missing[other] -= other != name
                    if not missing[other]:
                        heapq.heappush(ready, (-left[other] * weights[other], other))
        return now, started


def _moved(
    schedule: _Schedule, sizes: Mapping[str, list[int]], curves: Mapping[str, _Curve], bound: float, draw: random.Random
) -> State:
    """Return sizes and weights that end early: random moves under a falling threshold."""
    names = list(sizes)
    state: State = ({**sizes}, dict.fromkeys(names, 1.0))
    seconds, _ = schedule.run(*state)
    best, least = state, seconds
    tries = min(MOST_TRIES, MOST_STARTED // sum(map(len, sizes.values())))
    for left in range(tries, 0, -1):
        if least <= bound * (1 + 1e-9):
            break
        new: State = ({**state[0]}, {**state[1]})
        for _ in range(1 + (draw.random() < 0.5)):  # What two runs do at once may be better than each alone.
            name, kind = draw.choice(names), draw.random()
            if kind < 0.6:
                mine = list(new[0][name])
                first, last = sorted((draw.randrange(len(mine)), draw.randrange(len(mine))))
                if kind < 0.2:
                    first, last = 0, len(mine) - 1
                mine[first : last + 1] = [draw.choice(curves[name].sizes)] * (last + 1 - first)
                new[0][name] = mine
            else:
                new[1][name] = math.exp(draw.uniform(-1.5, 1.5))
        found, _ = schedule.run(*new)
        if found <= seconds * (1 + HEAT * left / tries):
            state, seconds = new, found
            if seconds < least:
                best, least = state, seconds
    return best


def _joined(found: Sequence[Started]) -> tuple[OperatorsRun, ...]:
    """Return operators of a run that follow each other on as many devices as one."""
    joined: list[OperatorsRun] = []
    for name, size, start, end in sorted(found, key=lambda each: (each[0], each[2])):
        last = joined[-1] if joined else None
        if last and (last.name, last.devices, last.end_seconds) == (name, size, start):
            joined[-1] = replace(last, operators=last.operators + 1, end_seconds=end)
        else:
            joined.append(OperatorsRun(name=name, devices=size, operators=1, start_seconds=start, end_seconds=end))
    return tuple(sorted(joined, key=lambda run: (run.start_seconds, run.name)))


MOST_TOWERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TogetherTable(Value):
    """What `scripts/measure_together.py` measures on one device.

    Attributes:
        device: what it was measured on, in words.
        seconds: of each tower alone, by the tenths of the device that it may use, 1 to 10.
        slowdown: of a tower by its neighbour: seconds next to it over seconds alone, with the same tenths.
    """

    device: str
    seconds: Mapping[str, Mapping[int, float]]
    slowdown: Mapping[str, Mapping[str, float]]

    def __post_init__(self) -> None:
        for name, of in self.seconds.items():
            named = f"TogetherTable.seconds[{name!r}]"
            if 10 not in of or not set(of) <= set(range(1, 11)):
                raise ValueError(f"{named} must be by tenths from 1 to 10, and have 10, got {sorted(of)}")
            for tenths, each in of.items():
                checked_number(each, f"{named}[{tenths}]")
            for other in set(self.seconds) - {name}:
                factor = self.slowdown.get(name, {}).get(other)
                checked_number(factor, f"TogetherTable.slowdown[{name!r}][{other!r}]")


@dataclass(frozen=True, kw_only=True, slots=True)
class TogetherPlan(Value):
    """Which towers share a device.

    Attributes:
        devices: of each device its groups, one after another; of each group its towers and their tenths, side by side.
        seconds: until all towers have run once; `in_turn_seconds` where no tower runs next to another.
    """

    devices: tuple[tuple[tuple[tuple[str, int], ...], ...], ...]
    seconds: float
    in_turn_seconds: float


def plan_together(table: TogetherTable | None, *, num_devices: int = 1) -> TogetherPlan:
    """Return which towers (at most 4) share a device, with which tenths of it, or run in turn: the best of every
    placement on equal devices. A tower with several neighbours is slowed by the product of what each costs.

    Raises ValueError for no table (what neighbours cost follows from no model), or more towers.
    """
    if table is None:
        raise ValueError("plan_together needs a measured table, got None: run scripts/measure_together.py")
    checked_count(num_devices, "num_devices")
    names = sorted(table.seconds)
    if not 1 <= len(names) <= MOST_TOWERS:
        raise ValueError(f"TogetherTable.seconds must be of 1 to {MOST_TOWERS} towers, got {names}")
    groupings = list(_groupings(tuple(names)))
    best = {of: min(side_by_side(table, of), default=(math.inf, ())) for groups in groupings for of in groups}
    # Of equal placements that with most in turn.
    every = []
    for groups in groupings:
        for where in itertools.product(range(min(num_devices, len(groups))), repeat=len(groups)):
            ends = [0.0] * num_devices
            for group, device in zip(groups, where, strict=True):
                ends[device] += best[group][0]
            every.append((max(ends), -len(groups), groups, where))
    seconds, _, groups, where = min(every)
    placed = list(zip(groups, where, strict=True))
    return TogetherPlan(
        devices=tuple(tuple(best[of][1] for of, at in placed if at == device) for device in range(num_devices)),
        seconds=seconds,
        in_turn_seconds=min(ends for ends, size, *_ in every if size == -len(names)),
    )


def _groupings(names: tuple[str, ...]) -> Iterator[list[tuple[str, ...]]]:
    """Yield every way to put names into groups."""
    if len(names) < 2:
        yield [names]
        return
    for rest in _groupings(names[1:]):
        yield [names[:1], *rest]
        for at, group in enumerate(rest):
            yield [*rest[:at], (names[0], *group), *rest[at + 1 :]]


def side_by_side(table: TogetherTable, group: tuple[str, ...]) -> Iterator[tuple[float, tuple[tuple[str, int], ...]]]:
    """Yield seconds until all towers of a group have run side by side, for all tenths that fit."""
    for tenths in itertools.product(*(sorted(table.seconds[name]) for name in group)):
        if sum(tenths) > 10:
            continue
        now, left = 0.0, dict.fromkeys(group, 1.0)  # The part of each tower that is still to run.
        alone = {name: table.seconds[name][tenth] for name, tenth in zip(group, tenths, strict=True)}
        while left:
            costs = {name: math.prod(table.slowdown[name][other] for other in left if other != name) for name in left}
            whole = {name: alone[name] * costs[name] for name in left}
            first = min(left, key=lambda name: left[name] * whole[name])
            span = left.pop(first) * whole[first]
            now += span
            left = {name: part - span / whole[name] for name, part in left.items()}
        yield now, tuple(zip(group, tenths, strict=True))
