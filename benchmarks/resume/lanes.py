"""The table of loaders that are stopped and resumed. A new one is a class with `RankLoader`'s methods, and a line here.

Each runs in the interpreter of an environment of its own where it has one (`make peers-NAME`), else in this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import Peer
from benchmarks.resume import format_peers, ours, torch_peers
from benchmarks.resume.rank import RankJob, RankLoader
from benchmarks.throughput import cluster_peers
from benchmarks.throughput import torch_peers as formats


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane(Peer):
    """One loader.

    Attributes:
        open: makes the loader of a rank.
        prepare: writes the format that it reads into a folder.
        folder: name of that folder.
    """

    open: Callable[[RankJob], RankLoader]
    prepare: Callable[[Any, Path], None] | None = None
    folder: str = ""


_OURS: Final = "shuffle=True, global_batch_size; the state of rank 0 is loaded by all"
_EACH: Final = "each rank loads the state of its number, or starts from the beginning if there is none"
_ITERABLE: Final = f"IterableDataset of 8 shards, split_dataset_by_node, StatefulDataLoader; {_EACH}"
LANES: Final[dict[str, Lane]] = {
    "orchdata, threads": Lane(
        peer="ours", package="orchdata", module="orchdata", open=ours.threads, settings=f"num_threads=2, {_OURS}"
    ),
    "orchdata, processes": Lane(
        peer="ours", package="orchdata", module="orchdata", open=ours.processes, settings=f"num_workers=2, {_OURS}"
    ),
    "torch DataLoader": Lane(
        peer="torch",
        package="torch",
        module="torch",
        open=torch_peers.TorchSkipping,
        settings="map-style, DistributedSampler; it has no state: the trained steps are read again and dropped",
    ),
    "torchdata": Lane(
        peer="torchdata",
        package="torchdata",
        module="torchdata",
        open=torch_peers.torchdata,
        settings=f"map-style, StatefulDataLoader, StatefulDistributedSampler; {_EACH}",
    ),
    "HF datasets": Lane(
        peer="torchdata",
        package="datasets",
        module="datasets",
        open=torch_peers.hugging_face,
        settings=f"not shuffled; {_ITERABLE}",
        prepare=formats.write_arrow,
        folder="datasets",
    ),
    "HF datasets, shuffled": Lane(
        peer="torchdata",
        package="datasets",
        module="datasets",
        open=torch_peers.hugging_face_shuffled,
        settings="shuffle(buffer_size=16, max_buffer_input_shards=1; with the default of 10, workers that load a state "
        f"raise an IndexError); {_ITERABLE}",
        prepare=formats.write_arrow,
        folder="datasets",
    ),
    "Energon": Lane(
        peer="energon",
        package="megatron-energon",
        module="megatron.energon",
        open=format_peers.Energon,
        settings="shuffle_buffer_size=16, max_samples_per_sequence=8; reproducible scaling: 4 workers over all ranks, "
        "micro-batches of 2, accumulated; states dealt by `energon checkpoint redist`",
        prepare=cluster_peers.prepare_energon,
        folder="energon",
    ),
    "Mosaic Streaming": Lane(
        peer="streaming",
        package="mosaicml-streaming",
        module="streaming",
        open=format_peers.streaming,
        settings="shuffle=True, num_canonical_nodes=1; elastic determinism; the state of rank 0 is loaded by all",
        prepare=formats.write_mds,
        folder="streaming",
    ),
    "LitData": Lane(
        peer="litdata",
        package="litdata",
        module="litdata",
        open=format_peers.litdata,
        settings="shuffle=True, drop_last=True, StreamingDataLoader; the state of rank 0 is loaded by all",
        prepare=formats.write_litdata,
        folder="litdata",
    ),
}
