"""Loaders in worker processes of torch's DataLoader, each started as it is by default: by fork."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.throughput.decoding import DecodePack, Decoder, Tensors, pack
from benchmarks.throughput.records import PeersJob, Records, joined, split
from orchdata.loaders.samples.sample import Sample

_RECORD: Final = "record"


def map_style(job: PeersJob) -> Iterator[int]:
    """A map-style data set over places in tars, shuffled."""
    generator = torch.Generator().manual_seed(job.seed)
    return _batches(job, _Decoded(job.records, job.decoder), shuffle=True, collate_fn=pack, generator=generator)


def webdataset(job: PeersJob) -> Iterator[int]:
    """Shards dealt to workers, in their order: less work than ours, which shuffles."""
    return _batches(job, web_samples(job.urls, job.decoder), collate_fn=pack)


def web_samples(urls: Sequence[str], decoder: Decoder) -> Any:
    """A webdataset pipeline of decoded samples."""
    import webdataset

    return webdataset.WebDataset(
        list(urls), shardshuffle=False, empty_check=False, workersplitter=webdataset.split_by_worker
    ).map(decoder)


def hugging_face(job: PeersJob) -> Iterator[int]:
    """A mapped Arrow file, shuffled."""
    datasets: Any = import_module("datasets")
    (path,) = (job.folder / "datasets").glob("*.arrow")
    data = datasets.Dataset.from_file(str(path))
    generator = torch.Generator().manual_seed(job.seed)
    return _batches(job, data, shuffle=True, collate_fn=DecodeRecords(job.decoder), generator=generator)


def write_arrow(job: PeersJob, folder: Path) -> None:
    """One Arrow stream of records, 64 to a batch of it."""
    import pyarrow as pa

    schema = pa.schema([(_RECORD, pa.large_binary())])
    with pa.ipc.new_stream(str(folder / "data.arrow"), schema) as stream:
        for start in range(0, len(job.records), 64):
            stop = min(start + 64, len(job.records))
            rows = [joined(job.records[number]) for number in range(start, stop)]
            stream.write_batch(pa.record_batch([pa.array(rows, pa.large_binary())], schema=schema))


def mosaic_streaming(job: PeersJob) -> Iterator[int]:
    """MDS shards, in its own shuffled order."""
    from streaming import StreamingDataset

    data = StreamingDataset(
        local=str(job.folder / "streaming"), batch_size=job.batch_size, shuffle=True, shuffle_seed=job.seed
    )
    return _batches(job, data, collate_fn=DecodeRecords(job.decoder))


def write_mds(job: PeersJob, folder: Path) -> None:
    """MDS shards of its default size."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={_RECORD: "bytes"}) as writer:
        for number in range(len(job.records)):
            writer.write({_RECORD: joined(job.records[number])})


def litdata(job: PeersJob) -> Iterator[int]:
    """LitData's chunks, shuffled."""
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(str(job.folder / "litdata"), shuffle=True, seed=job.seed)
    loader = StreamingDataLoader(
        data, batch_size=job.batch_size, num_workers=job.workers, collate_fn=DecodeRecords(job.decoder)
    )
    for batch in loader:
        yield len(batch["number"])


def write_litdata(job: PeersJob, folder: Path) -> None:
    """Chunks of 32 MB, several to a worker."""
    from litdata import optimize

    optimize(
        fn=JoinedRecords(job.records),
        inputs=list(range(len(job.records))),
        output_dir=str(folder),
        chunk_bytes="32MB",
        num_workers=1,
    )


def _batches(job: PeersJob, data: Any, **options: Any) -> Iterator[int]:
    loader: Any = torch.utils.data.DataLoader(data, batch_size=job.batch_size, num_workers=job.workers, **options)
    for batch in loader:
        yield len(batch["number"])


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A map-style data set of decoded samples."""

    records: Records
    decoder: Decoder

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> Sample:
        return self.decoder(self.records[number])


@dataclass(frozen=True, slots=True)
class JoinedRecords:
    """Numbers to records, where another library writes them."""

    records: Records

    def __call__(self, number: int) -> dict[str, bytes]:
        return {_RECORD: joined(self.records[number])}


@dataclass(frozen=True, slots=True)
class DecodeRecords:
    """Rows with a record each to a batch: what formats of their own hold."""

    decoder: Decoder

    def __call__(self, rows: Sequence[Mapping[str, bytes]]) -> Tensors:
        return DecodePack(self.decoder)([split(row[_RECORD]) for row in rows])
