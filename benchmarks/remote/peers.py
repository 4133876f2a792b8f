"""Other loaders, in worker processes of torch's DataLoader, each as its documentation says for data in S3.

They find server and credentials in the environment, keep their workers from one epoch to the next, and decode by the
same functions. What they read besides tars was written before by a function here, and stored in the bucket.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.remote.job import EPOCHS, RemoteJob
from benchmarks.throughput.decoding import DecodePack, Tensors, pack
from benchmarks.throughput.records import joined
from benchmarks.throughput.torch_peers import DecodeRecords, JoinedRecords, web_samples

_RECORD: Final = "record"


def webdataset(job: RemoteJob) -> Iterator[int]:
    """A pipe of curl for each shard, in the order of the shards: less work than ours, which shuffles."""
    if shutil.which("curl") is None:
        raise RuntimeError("there is no curl, which reads the shards")
    pipes = [f"pipe:curl --silent --fail {shlex.quote(url)}" for url in job.signed]
    return _epochs(_loader(job, web_samples(pipes, job.decoder), collate_fn=pack))


def litdata(job: RemoteJob) -> Iterator[int]:
    """LitData's chunks, shuffled."""
    from litdata import StreamingDataLoader, StreamingDataset

    _allow_http()
    data = StreamingDataset(job.url("litdata"), cache_dir=str(job.scratch), shuffle=True, seed=job.seed)
    loader = StreamingDataLoader(
        data,
        batch_size=job.batch_size,
        num_workers=job.workers,
        collate_fn=DecodeRecords(job.decoder),
        persistent_workers=True,
    )
    return _epochs(loader)


def _allow_http() -> None:
    """Without encryption, as the server here speaks: LitData has no option that reaches its client."""
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


def write_litdata(job: RemoteJob, folder: Path) -> None:
    from litdata import optimize

    optimize(
        fn=JoinedRecords(job.records),
        inputs=list(range(len(job.records))),
        output_dir=str(folder),
        chunk_bytes=job.shard_bytes,
        num_workers=1,
    )


def litdata_raw(job: RemoteJob) -> Iterator[int]:
    """Files of their own for images and captions, shuffled, and kept on this machine when they were read.

    It is given the list of the files, which it would have from a listing.
    """
    from litdata import StreamingRawDataset
    from litdata.raw.indexer import BaseIndexer, FileMetadata

    class Indexer(BaseIndexer):  # type: ignore[misc]
        def discover_files(self, input_dir: str, storage_options: Any) -> list[Any]:
            return [
                FileMetadata(f"{input_dir.rstrip('/')}/{key}.{field}", size)
                for _, key, members in job.records.places
                for field, _, size in members
            ]

        def build_or_load_index(self, input_dir: str, cache_dir: str, storage_options: Any, *_: Any) -> list[Any]:
            return self.discover_files(input_dir, storage_options)

    class Samples(StreamingRawDataset):  # type: ignore[misc]
        def setup(self, files: list[Any]) -> list[list[Any]]:
            groups: dict[str, list[Any]] = {}
            for file in files:
                groups.setdefault(Path(file.path).stem, []).append(file)
            return list(groups.values())

    _allow_http()
    data = Samples(job.url("litdata-raw"), cache_dir=str(job.scratch), cache_files=True, indexer=Indexer())
    fields = [[field for field, _, _ in members] for _, _, members in job.records.places]
    if any(names != fields[0] for names in fields):
        raise RuntimeError("samples have different fields")
    return _epochs(_loader(job, data, shuffle=True, collate_fn=_DecodeFiles(fields[0], DecodePack(job.decoder))))


def write_files(job: RemoteJob, folder: Path) -> None:
    """A file for each member."""
    for number in range(len(job.records)):
        record = job.records[number]
        for name, payload in record.items():
            if isinstance(payload, bytes):
                (folder / f"{record['__key__']}.{name}").write_bytes(payload)


def mosaic_streaming(job: RemoteJob) -> Iterator[int]:
    """MDS shards, in its own shuffled order."""
    from streaming import StreamingDataset

    data = StreamingDataset(
        remote=job.url("streaming"),
        local=str(job.scratch),
        batch_size=job.batch_size,
        shuffle=True,
        shuffle_seed=job.seed,
    )
    for stream in data.streams:
        # It has read the index. Its workers, which are forked, would share that connection: one then waits for 60 s.
        stream._downloader.clean_up()
    return _epochs(_loader(job, data, collate_fn=DecodeRecords(job.decoder)))


def write_mds(job: RemoteJob, folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={_RECORD: "bytes"}, size_limit=job.shard_bytes) as writer:
        for number in range(len(job.records)):
            writer.write({_RECORD: joined(job.records[number])})


def lance(job: RemoteJob) -> Iterator[int]:
    """Rows at random, those of a batch at a time. Its threads do not survive a fork."""
    data = _LanceRows(job.url("lance/data.lance"), len(job.records))
    return _epochs(
        _loader(job, data, shuffle=True, collate_fn=DecodeRecords(job.decoder), multiprocessing_context="forkserver")
    )


def write_lance(job: RemoteJob, folder: Path) -> None:
    import lance
    import pyarrow as pa

    def batches() -> Iterator[Any]:
        for start in range(0, len(job.records), 64):
            stop = min(start + 64, len(job.records))
            rows = pa.array([joined(job.records[number]) for number in range(start, stop)], pa.large_binary())
            yield pa.record_batch([rows], schema=schema)

    schema = pa.schema([(_RECORD, pa.large_binary())])
    lance.write_dataset(batches(), str(folder / "data.lance"), schema=schema, max_bytes_per_file=job.shard_bytes)


class _LanceRows:
    """A map-style data set of rows, opened in each process."""

    def __init__(self, url: str, num_rows: int) -> None:
        self._url = url
        self._num_rows = num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        return _LanceRows, (self._url, self._num_rows)

    def __len__(self) -> int:
        return self._num_rows

    @cached_property
    def _opened(self) -> Any:
        import lance

        return lance.dataset(self._url)

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, bytes]]:
        rows: list[dict[str, bytes]] = self._opened.take(list(numbers), columns=[_RECORD]).to_pylist()
        return rows


class _DecodeFiles:
    """The bytes of files to a batch."""

    def __init__(self, names: Sequence[str], decode: DecodePack) -> None:
        self._names = names
        self._decode = decode

    def __call__(self, rows: Sequence[Sequence[bytes]]) -> Tensors:
        samples = [dict(zip(self._names, row, strict=True)) for row in rows]
        return self._decode([{"__key__": "", "__url__": "", **fields} for fields in samples])


def _loader(job: RemoteJob, data: Any, **options: Any) -> Any:
    if options.get("shuffle"):
        options["generator"] = torch.Generator().manual_seed(job.seed)
    return torch.utils.data.DataLoader(
        data, batch_size=job.batch_size, num_workers=job.workers, persistent_workers=True, **options
    )


def _epochs(loader: Iterable[Tensors]) -> Iterator[int]:
    for _ in range(EPOCHS):
        for batch in loader:
            yield len(batch["number"])
