"""What other loaders are given: the samples as places in tars, or as records of one field.

index --places_of--> Records --[i]--> fields of bytes --Decoder--> Sample
                                 '--joined--> one record of bytes, for formats of their own --split--> fields
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from benchmarks.loading.job import Job
from benchmarks.throughput.decoding import Decoder
from orchdata.loaders.index.index import Index
from orchdata.loaders.samples.sample import Sample
from orchdata.loaders.shards.fields import RAW

Fields = Mapping[str, Any]
"""A sample as webdataset gives it: field -> bytes, and `__key__` and `__url__`."""


@dataclass(frozen=True, slots=True)
class Records:
    """The samples of some tars by number, as a map-style data set of fields. Knows where their bytes are, holds none.

    Attributes:
        places: of each sample, its shard, its key, and the (field, offset, size) of its members.
    """

    places: tuple[tuple[str, str, tuple[tuple[str, int, int], ...]], ...]

    @classmethod
    def of(cls, index: Index) -> Records:
        """Those of an index. Raises ValueError for bad samples, and for members that are not plain bytes of a tar."""
        if bad := len(index.bad_rows()):
            raise ValueError(
                f"{bad} of {len(index)} samples are bad: `orchdata index` lists them, leave their shards out"
            )
        found = []
        for row in range(index.num_rows):
            shard, spec = index.shard_of(row).url, index.read_spec(row)
            if not shard.endswith(".tar") or any(encoding != RAW for _, _, encoding, _ in spec):
                raise ValueError(f"{shard}: loaders are compared on plain .tar files, with members stored as they are")
            found.append((shard, index.key(row), tuple((field, offset, size) for offset, size, _, field in spec)))
        return cls(tuple(found))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> dict[str, Any]:
        shard, key, members = self.places[number]
        file = _opened(shard)
        return {
            "__url__": shard,
            "__key__": key,
            **{field: os.pread(file, size, offset) for field, offset, size in members},
        }

    @property
    def num_bytes(self) -> int:
        """In all members together."""
        return sum(size for _, _, members in self.places for _, _, size in members)


@lru_cache(maxsize=64)
def _opened(path: str) -> int:
    return os.open(path, os.O_RDONLY)  # for as long as the process lives, and it lives for one lane


def joined(fields: Fields) -> bytes:
    """A sample as one record, for formats that want the same columns in every sample."""
    payloads = {name: value for name, value in fields.items() if isinstance(value, bytes)}
    head = {
        "names": {name: value for name, value in fields.items() if name not in payloads},
        "sizes": {name: len(value) for name, value in payloads.items()},
    }
    return json.dumps(head).encode() + b"\n" + b"".join(payloads.values())


def split(record: bytes) -> dict[str, Any]:
    """The fields that were joined."""
    end = record.index(b"\n") + 1
    head = json.loads(record[:end])
    fields = dict(head["names"])
    for name, size in head["sizes"].items():
        fields[name] = record[end : end + size]
        end += size
    return fields


@dataclass(frozen=True, kw_only=True, slots=True)
class PeersJob(Job):
    """What a lane of a comparison loads.

    Attributes:
        urls: the tars.
        records: their samples.
        decoder: of all lanes but ours.
    """

    urls: tuple[str, ...]
    records: Records
    decoder: Decoder


@dataclass(frozen=True, slots=True)
class RecordSamples:
    """Records as the limits take them."""

    records: Records
    decoder: Decoder

    def __len__(self) -> int:
        return len(self.records)

    @property
    def num_bytes(self) -> int:
        return self.records.num_bytes

    def read(self, number: int) -> Fields:
        return self.records[number]

    def decode(self, held: Fields) -> Sample:
        return self.decoder(held)
