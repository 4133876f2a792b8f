"""Devices of runs of equal operators: seconds of an operator by devices -> when each run has how many devices.

runs, devices --bisection--> devices of each run, a fraction --the two sizes next to it--> operators at each size
                                                 operators at each size --list schedule, moves--> operators in time

After Spindle (Wang et al., ASPLOS 2025, arXiv 2409.03365): its contracted operators (MetaOps: runs here), its relaxed
optimum, and its two sizes for each run. A list schedule and moves stand in place of its waves.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import groupby

import numpy as np

from orchdata.balancers.checks import checked_count
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
