"""The table of lanes: ours, the limits, and every peer. A new peer is a function that yields its batches' sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from orchdata.bench.throughput import cluster_peers, ours, thread_peers, torch_peers
from orchdata.bench.throughput.job import Job


@dataclass(frozen=True, slots=True)
class Lane:
    """One way to load.

    Attributes:
        kind: "limit", "ours", or a peer: "torch" in workers of torch's DataLoader, "other".
        load: job -> samples of each batch, while the batch is held, as training holds it.
        prepare: writes what the loader needs besides the tars into a folder of its own; not timed.
        module: imported before anything is timed; "" where nothing is to be imported.
        package: what is to be installed.
        peer: its name for `--peers`.
    """

    kind: Literal["limit", "ours", "torch", "other"]
    load: Callable[[Job], Iterator[int]]
    prepare: Callable[[Job, Path], None] | None = None
    module: str = ""
    package: str = ""
    peer: str = ""

    @property
    def installed(self) -> bool:
        """Whether its package can be found."""
        try:
            return not self.module or find_spec(self.module) is not None
        except ModuleNotFoundError:
            return False


_OURS: Final = "orchdata.dataloader"
BARE: Final = "bare threads, bytes in memory"
LANES: Final[dict[str, Lane]] = {
    "raw read, bytes only": Lane("limit", ours.raw_read),
    BARE: Lane("limit", ours.bare_threads),
    "orchdata, threads": Lane("ours", ours.threads, module=_OURS),
    "orchdata, processes": Lane("ours", ours.processes, module=_OURS),
    "torch DataLoader": Lane("torch", torch_peers.map_style, peer="torch"),
    "webdataset": Lane("torch", torch_peers.webdataset, None, "webdataset", "webdataset", "webdataset"),
    "HF datasets": Lane("torch", torch_peers.hugging_face, torch_peers.write_arrow, "datasets", "datasets", "datasets"),
    "LitData": Lane("torch", torch_peers.litdata, torch_peers.write_litdata, "litdata", "litdata", "litdata"),
    "Mosaic Streaming": Lane(
        "torch", torch_peers.mosaic_streaming, torch_peers.write_mds, "streaming", "mosaicml-streaming", "streaming"
    ),
    "Energon": Lane(
        "torch",
        cluster_peers.energon,
        cluster_peers.prepare_energon,
        "megatron.energon",
        "megatron-energon",
        "energon",
    ),
    "SPDL, threads": Lane("other", thread_peers.spdl, None, "spdl.pipeline", "spdl", "spdl"),
    "Grain, threads": Lane("other", thread_peers.grain_threads, None, "grain", "grain", "grain"),
    "Grain, processes": Lane("other", thread_peers.grain_processes, None, "grain", "grain", "grain"),
    "Ray Data": Lane("other", cluster_peers.ray_data, cluster_peers.write_parquet, "ray.data", "ray[data]", "ray"),
}


def chosen_lanes(peers: str) -> list[str]:
    """Ours, the limits, and the peers named, commas between them: "all", "none", or names of `Lane.peer`."""
    known = sorted({lane.peer for lane in LANES.values() if lane.peer})
    names = {"all": known, "none": []}.get(peers, [name.strip() for name in peers.split(",")])
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"no peer is called {', '.join(unknown)}: say all, none, or some of {', '.join(known)}")
    return [name for name, lane in LANES.items() if not lane.peer or lane.peer in names]
