"""Indexes of this release, kept next to the golden values: every later release opens them.

    PYTHONPATH=tests/support .venv/bin/python tests/support/golden_indexes.py

writes NAME.index.xz for each data set of `golden_data`, and digests.json, into `tests/orchdata/golden/indexes`. Indexes
that are there are never made again.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import tempfile
from pathlib import Path

import numpy as np
from golden_data import FILES_OF_RECIPE, OTHER_CONTAINERS, GoldenData

from orchdata.loaders.index.index import Index
from orchdata.loaders.index.table import TABLE_FORMAT, Columns

FOLDER = Path(__file__).resolve().parents[1] / "orchdata" / "golden" / "indexes"
DIGESTS = FOLDER / "digests.json"


def digest(index: Index) -> str:
    """Of everything that an index says of its samples; the folders of its shards do not count."""
    found = hashlib.blake2b(digest_size=16)
    for name in Columns.__slots__:
        values = np.ascontiguousarray(getattr(index, name))
        found.update(f"{name} {values.dtype} {values.shape}".encode())
        found.update(values.tobytes())
    shards = [[Path(shard.url).name, shard.size, shard.checksum] for shard in index.shards]
    rest = [index.totals, index.fields, index.modalities, shards, index.build_id]
    found.update(json.dumps(rest, sort_keys=True).encode())
    return found.hexdigest()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    digests = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        data = GoldenData(Path(folder))
        for name in sorted({*FILES_OF_RECIPE, *OTHER_CONTAINERS}):
            kept = FOLDER / f"{name}, format {TABLE_FORMAT}.index.xz"
            if not kept.exists():
                index = data.shards(name).index()
                kept.write_bytes(lzma.compress(index.path.read_bytes()))
                digests[kept.name] = digest(index)
    DIGESTS.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
