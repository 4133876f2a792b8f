"""Towers that share a device: measured seconds by share and neighbour -> who runs side by side, who in turn.

The idea is from the abstract of Mosaic (arXiv 2605.18710): modules that share a GPU by quotas. Its engine is not here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from orchdata.balancers.checks import checked_count
from orchdata.planners.values import Value, checked_number

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
