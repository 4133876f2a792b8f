"""The table of other loaders. A new one is a function that yields its batches' sizes, and a line here.

Each runs in the interpreter of an environment of its own where it has one (`make peers-NAME`), else in this one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from benchmarks.loading import ours
from benchmarks.loading.lanes import LANES, OURS, Lane
from benchmarks.throughput import cluster_peers, thread_peers, torch_peers

ENVIRONMENTS: Final = Path(__file__).resolve().parents[2] / ".venv-peers"
PEERS: Final[dict[str, Lane]] = {
    "torch DataLoader": Lane("torch", torch_peers.map_style, in_processes=True),
    "webdataset": Lane("torch", torch_peers.webdataset, "webdataset", in_processes=True),
    "HF datasets": Lane(
        "torch", torch_peers.hugging_face, "datasets", torch_peers.write_arrow, "datasets", in_processes=True
    ),
    "LitData": Lane("torch", torch_peers.litdata, "litdata", torch_peers.write_litdata, "litdata", in_processes=True),
    "Mosaic Streaming": Lane(
        "torch", torch_peers.mosaic_streaming, "streaming", torch_peers.write_mds, "streaming", in_processes=True
    ),
    "Energon": Lane(
        "torch", cluster_peers.energon, "megatron.energon", cluster_peers.prepare_energon, "energon", in_processes=True
    ),
    "SPDL, threads": Lane("other", thread_peers.spdl, "spdl.pipeline"),
    "Grain, threads": Lane("other", thread_peers.grain_threads, "grain"),
    "Grain, processes": Lane("other", thread_peers.grain_processes, "grain", in_processes=True),
    "Ray Data": Lane(
        "other", cluster_peers.ray_data, "ray.data", cluster_peers.write_parquet, "ray", in_processes=True
    ),
}
# Started as torch's DataLoader, and so most peers, start theirs: their memory is compared like for like.
FORKED: Final = {"orchdata, forked": Lane("ours", ours.forked, OURS, in_processes=True)}
_NAMES: Final = {
    "torch DataLoader": "torch",
    "HF datasets": "datasets",
    "Mosaic Streaming": "streaming",
    "SPDL, threads": "spdl",
    "Grain, threads": "grain",
    "Grain, processes": "grain",
    "Ray Data": "ray",
}


def name_of(lane: str) -> str:
    """How `--peers`, and `make peers-NAME`, call the loader of a lane."""
    return _NAMES.get(lane, lane.lower())


def chosen_lanes(peers: str) -> dict[str, Lane]:
    """Ours, the limits, and the peers named, with commas between them: "all", "none", or names of `name_of`.

    Raises ValueError for a name that none has.
    """
    known = sorted(set(map(name_of, PEERS)))
    names = {"all": known, "none": []}.get(peers, [name.strip() for name in peers.split(",")])
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"no peer is called {', '.join(unknown)}: say all, none, or some of {', '.join(known)}")
    return dict(LANES) | FORKED | dict(_placed(names))


def _placed(names: list[str]) -> Iterator[tuple[str, Lane]]:
    """The lanes of these peers, each with the interpreter that has its loader, or why none has."""
    for lane, described in PEERS.items():
        if (name := name_of(lane)) not in names:
            continue
        python = interpreter_of(name, described.module)
        if python:
            yield lane, replace(described, python=python)
        else:
            yield lane, replace(described, absent=f"not installed: make peers-{name}")


def interpreter_of(peer: str, module: str) -> str | None:
    """The interpreter of a peer's own environment, else this one if it has the module, else None."""
    environment = ENVIRONMENTS / peer
    if (environment / ".installed").exists():
        return str(environment / "bin" / "python")
    return sys.executable if is_here(module) else None


def is_here(module: str) -> bool:
    """Whether this environment has a module."""
    try:
        return not module or find_spec(module) is not None
    except ModuleNotFoundError:
        return False
