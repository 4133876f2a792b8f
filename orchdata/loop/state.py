"""The state of a loader: its position in which epoch, and the fingerprint of what it loads.

    state_of --> State --to_json--> a plain dict, in a checkpoint --from_json--> State --> restore

Small, JSON-safe, versioned, and the same on every rank: rank 0's loads everywhere. No other file knows its keys.
`dataset/prepared.py` makes states of data sets, and compares them.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import orchdata
from orchdata.balancers.assignment import checked_count, checked_epoch
from orchdata.loaders.errors import StateError
from orchdata.loop.loop import Position, stored
from orchdata.order.merge import DUE_BITS, SourceProgress
from orchdata.order.mixture import ResumePoint, StretchStart
from orchdata.order.order import By
from orchdata.order.steps import Location

VERSION = 1
WINDOWS = "windows"  # in the fingerprint of concatenated documents
_MOST_ROWS = 1 << 48
_MOST_GIVEN = 1 << 62


class RowsDigest(NamedTuple):
    """What identifies the usable rows of a data set, or of a source of a mixture."""

    num_usable: int
    digest: str  # of their names, in order
    runs: bytes  # the first bytes of the digests of equal runs of them
    tokens: str | None = None  # digest of their tokens; None where steps do not depend on them


class MixtureState(NamedTuple):
    """What the sources of a mixture have given and are due. Its size does not depend on the number of stages."""

    now: StretchStart  # at its position; in windows, before the first document of which nothing is delivered
    periods: tuple[int, ...]  # there
    resumed: ResumePoint  # where the run continues


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a loader."""

    position: Position
    fingerprint: Mapping[str, Any]  # of the loader that wrote it
    location: Location = Location()  # where its step begins
    rows: tuple[RowsDigest, ...] = ()  # of shards: of the data set, or of each source; one object for the same rows
    mixture: MixtureState | None = None  # of a mixture; states of its windows that name no amounts have none

    def to_json(self) -> dict[str, Any]:
        """Raises what `state_dict` of a data set in this process raises."""
        position, location = self.position, self.location
        state = {
            "version": VERSION,
            "epoch": position.epoch,
            "step": position.step,
            "position": location.position,
            "tokens": location.tokens,
            "document": location.document,
            "token": location.token,
            "drawn": None if position.draw is None else dict(position.draw),
            "base_seed": position.base_seed if position.is_drawn else None,
            "left": list(position.left) or None,
            "sampler": position.sampler,
            "workers": [None if get is None else get() for get in position.workers] or None,
            "worker": position.worker if position.workers and position.step else None,
            "fingerprint": self.fingerprint,
            "rows": _dump_rows(self.rows) or None,
            "written_by": {"orchdata": orchdata.__version__} if self.rows else None,
            "given": None if self.mixture is None else _dump_mixture(self.mixture, self.fingerprint["mixture"]),
        }
        # It shares nothing with the loader: torch.distributed.checkpoint loads in place.
        return deepcopy({name: value for name, value in state.items() if value is not None})

    @classmethod
    def from_json(cls, state: Any) -> State:
        """Raises StateError for what is no state, for a version that is not known, and for what is damaged."""
        if not isinstance(state, Mapping) or "version" not in state:
            raise StateError("this is not a state of an orchdata DataLoader: it has no 'version'")
        if state["version"] != VERSION or isinstance(state["version"], bool):
            by = state.get("written_by")
            by = f" was written by orchdata {by['orchdata']} and" if by else ""
            raise StateError(
                f"the state{by} has version {state['version']}, this orchdata reads version {VERSION}: continue with "
                "that release or a later one"
            )
        try:
            epoch, step = checked_epoch(state["epoch"]), checked_count(state["step"], "step", 0)
            fingerprint, base_seed = state["fingerprint"], state.get("base_seed")
            position = Position(
                epoch,
                step,
                state.get("drawn"),
                base_seed=base_seed,
                is_drawn=base_seed is not None,
                left=tuple(state.get("left") or ()),
                sampler=state.get("sampler"),
                workers=tuple(None if each is None else stored(each) for each in state.get("workers") or ()),
                worker=state.get("worker", -1),
            )
            location = Location(state.get("position"), state.get("tokens"), state.get("document"), state.get("token"))
            rows, mixture = _load_rows(state.get("rows") or ()), None
            # States of windows had no amounts: they continue with the weights that they have.
            if "mixture" in fingerprint and (WINDOWS not in fingerprint or "given" in state):
                begins = location.to_begin(epoch)
                mixture = _load_mixture(state.get("given"), fingerprint["mixture"], checked_epoch(begins[0]), begins[1])
        except (LookupError, TypeError, ValueError) as error:
            raise StateError(f"the state is damaged: {type(error).__name__}: {error}"[:300]) from error
        return cls(position=position, fingerprint=fingerprint, location=location, rows=rows, mixture=mixture)


class PostState(NamedTuple):
    """The state of `post_balance` on one rank."""

    step: int  # number of the next one
    exhausted: bool  # whether the loader has no more in this epoch
    loader: Any  # state of the loader before that step

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **self._asdict()}

    @classmethod
    def from_json(cls, state: Any) -> PostState:
        """Raises StateError for anything else."""
        if not isinstance(state, Mapping) or state.get("version") != VERSION or not {*cls._fields} <= state.keys():
            raise StateError(f"this is not a state of post_balance of version {VERSION}: {str(state)[:200]}")
        return cls(*(state[name] for name in cls._fields))


def _dump_rows(rows: Sequence[RowsDigest]) -> list[Any]:
    """Return an entry for each; a number stands for an earlier entry."""
    entries: list[Any] = []
    numbers: dict[int, int] = {}
    for usable in rows:
        number = numbers.setdefault(id(usable), len(entries))
        runs = b64encode(usable.runs).decode()
        entry = {"num_usable": usable.num_usable, "usable": usable.digest, "runs": runs}
        entry |= {} if usable.tokens is None else {"tokens": usable.tokens}
        entries.append(entry if number == len(entries) else number)
    return entries


def _load_rows(entries: Sequence[Any]) -> tuple[RowsDigest, ...]:
    rows: list[RowsDigest] = []
    for entry in entries:
        if isinstance(entry, int):
            rows.append(rows[entry])
        else:
            runs = b64decode(entry["runs"], validate=True)
            usable = RowsDigest(entry["num_usable"], entry["usable"], runs, entry.get("tokens"))
            if type(usable.digest) is not str or not 0 <= usable.num_usable < _MOST_ROWS:
                raise ValueError(f"rows {entry!r:.80}")
            rows.append(usable)
    return tuple(rows)


def _dump_mixture(mixture: MixtureState, described: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the sources have given; `described` is the mixture in the fingerprint."""
    now, periods, resumed = mixture
    given = {
        "weights": list(periods),
        "begun": list(resumed.given_before),
        "now": _dump_start(now, described["by"]),
        "is_changed": resumed.is_changed,
    }
    if resumed.stretch_start is not None:
        given["changed"] = _dump_start(resumed.stretch_start, described["by"])
    if described["stop"] == "repeat":
        given["start"] = {"samples": list(resumed.start.counts), "tokens": list(resumed.start.given)}
    return given


def _load_mixture(given: Any, described: Any, epoch: int, position: int) -> MixtureState:
    try:
        count, by = len(described["sources"]), described["by"]
        none = (0,) * count
        start = SourceProgress(none, none)
        if described["stop"] == "repeat":
            start = _load_progress(given["start"], count)
        samples, tokens = _ints(given["begun"], 2)
        stretch_start = _load_start(given["changed"], count, by) if "changed" in given else None
        resumed = ResumePoint(epoch, (samples, tokens), start, stretch_start, given["is_changed"] is True)
        mixture = MixtureState(_load_start(given["now"], count, by), _ints(given["weights"], count), resumed)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"the state is damaged: invalid amounts that the sources of its mixture have given: {given!r}"[:300]
        ) from error
    delivered = mixture.now.progress.position - start.position
    if delivered != position:
        raise StateError(
            f"the state is damaged: its mixture has given other amounts at this position than it says, {delivered} "
            f"samples of the epoch at position {position}"
        )
    return mixture


def _dump_start(start: StretchStart, by: By) -> dict[str, list[int]]:
    progress, due, last = start
    # Debts have fewer digits than what is due.
    debts = [each - (amount << DUE_BITS) for each, amount in zip(due, progress.amounts(by), strict=True)]
    dumped = {"samples": list(progress.counts), "tokens": list(progress.given), "debts": debts}
    return dumped if last is None else dumped | {"last": list(last)}


def _load_start(start: Mapping[str, Any], count: int, by: By) -> StretchStart:
    progress, debts = _load_progress(start, count), _ints(start["debts"], count, least=-(_MOST_GIVEN << DUE_BITS))
    due = tuple(debt + (amount << DUE_BITS) for debt, amount in zip(debts, progress.amounts(by), strict=True))
    if "last" not in start:
        return StretchStart(progress, due)
    source, row, stream, number, tokens = _ints(start["last"], 5)
    if not (source < count and progress.counts[source] and 0 < tokens <= progress.given[source]):
        raise ValueError(f"the last sample {start['last']}")
    return StretchStart(progress, due, (source, row, stream, number, tokens))


def _load_progress(progress: Mapping[str, Any], count: int) -> SourceProgress:
    samples, tokens = (_ints(progress[name], count, most=_MOST_GIVEN) for name in ("samples", "tokens"))
    return SourceProgress(samples, tokens)


def _ints(values: Any, count: int, least: int = 0, most: int = _MOST_GIVEN << DUE_BITS) -> tuple[int, ...]:
    ints = tuple(values)
    if len(ints) != count or not all(type(value) is int and least <= value <= most for value in ints):
        raise ValueError(values)
    return ints
