"""The table of lanes. A new loader is a function that yields its batches' sizes of two epochs, and a line here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from benchmarks.loading.lanes import OURS, Lane
from benchmarks.remote import ours, peers
from benchmarks.throughput.lanes import ENVIRONMENTS, is_here

NEAR: Final = ", local files"
ALONE: Final = "bytes from S3 alone"
LANES: Final[dict[str, Lane]] = {
    ALONE: Lane("limit", ours.reading_alone, "obstore"),
    f"orchdata, threads{NEAR}": Lane("limit", ours.near_threads, OURS),
    f"orchdata, processes{NEAR}": Lane("limit", ours.near_processes, OURS, in_processes=True),
    "orchdata, threads": Lane("ours", ours.threads, OURS),
    "orchdata, processes": Lane("ours", ours.processes, OURS, in_processes=True),
    "orchdata, threads, od.Cache": Lane("ours", ours.cached_threads, OURS),
    "orchdata, processes, od.Cache": Lane("ours", ours.cached_processes, OURS, in_processes=True),
}
PEERS: Final[dict[str, Lane]] = {
    "webdataset": Lane("torch", peers.webdataset, "webdataset", in_processes=True),
    "LitData": Lane("torch", peers.litdata, "litdata", peers.write_litdata, "litdata", in_processes=True),
    "LitData, raw files": Lane(
        "torch", peers.litdata_raw, "litdata", peers.write_files, "litdata-raw", in_processes=True
    ),
    "Mosaic Streaming": Lane(
        "torch", peers.mosaic_streaming, "streaming", peers.write_mds, "streaming", in_processes=True
    ),
    "Lance": Lane("torch", peers.lance, "lance", peers.write_lance, "lance", in_processes=True),
}


def chosen_lanes(chosen: str) -> dict[str, Lane]:
    """Ours, the limit, and the peers named, with commas between them: "all", "none", or names of modules.

    Raises ValueError for a name that none has.
    """
    known = sorted({lane.module for lane in PEERS.values()})
    names = {"all": known, "none": []}.get(chosen, [name.strip() for name in chosen.split(",")])
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"no peer is called {', '.join(unknown)}: say all, none, or some of {', '.join(known)}")
    return LANES | dict(_placed(names))


def _placed(names: list[str]) -> Iterator[tuple[str, Lane]]:
    """The lanes of these peers, each with the interpreter that has its loader, or why none has."""
    for lane, described in PEERS.items():
        if (name := described.module) not in names:
            continue
        environment = ENVIRONMENTS / name
        if (environment / ".installed").exists():
            yield lane, replace(described, python=str(environment / "bin" / "python"))
        elif is_here(name):
            yield lane, replace(described, python=sys.executable)
        else:
            yield lane, replace(described, absent=f"not installed: make peers-{name}")
