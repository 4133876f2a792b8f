"""Loaders that a benchmark compares: the interpreter that has one, its version, and how it is set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final, TypeVar

from benchmarks.loading.processes import LaneError, run_in_child
from benchmarks.throughput.lanes import interpreter_of
from orchdata.bench import WideTable, work_folder

Lane = TypeVar("Lane", bound="Peer")
_VERSION_SECONDS: Final = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One loader.

    Attributes:
        peer: how `--peers`, and `make peers-NAME`, call it; "ours" for this library.
        package: whose version is reported.
        module: that must be there.
        settings: how it is set up, in a few words.
    """

    peer: str
    package: str
    module: str
    settings: str

    @property
    def python(self) -> str:
        """The interpreter that has it.

        Raises:
            LaneError: none has.
        """
        python = interpreter_of(self.peer, self.module)
        if python is None:
            raise LaneError(f"make peers-{self.peer}")
        return python

    @property
    def version(self) -> str:
        """Of the package; "" where it is not installed."""
        try:
            with work_folder(None) as folder:
                found: str = run_in_child(version, (self.package,), folder, _VERSION_SECONDS, python=self.python)[0]
        except LaneError:
            return ""
        return found


def settings_table(peers: Mapping[str, Peer]) -> WideTable:
    """Version and settings of each loader."""
    return WideTable(
        title="settings",
        columns=("loader", "version", "set up with"),
        rows=tuple((name, peer.version, peer.settings) for name, peer in peers.items()),
    )


def names_in(given: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Names with commas between them, as the command line has them: "all" for all known ones, "none" for none.

    Raises:
        ValueError: one that is not known.
    """
    names = {"all": known, "none": ()}.get(given, tuple(name.strip() for name in given.split(",")))
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"no {what} is called {', '.join(unknown)}: say all, or some of {', '.join(known)}")
    return names


def chosen(lanes: Mapping[str, Lane], peers: str) -> dict[str, Lane]:
    """Those of this library, and of the peers named."""
    known = tuple(dict.fromkeys(lane.peer for lane in lanes.values() if lane.peer != "ours"))
    names = ("ours", *names_in(peers, known, "peer"))
    return {name: lane for name, lane in lanes.items() if lane.peer in names}
