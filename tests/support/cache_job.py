"""A process of a node that fills its cache: `python cache_job.py FOLDER MAX_BYTES INDEX OPTIONS`. It imports little."""

from __future__ import annotations

import json
import sys

from orchdata.caching import Filler
from orchdata.loaders.index.index import Index
from orchdata.loaders.storage.files import Cache, Files
from orchdata.loaders.storage.storage import ReadBytes
from orchdata.order.order import Order, Shuffle


def main(folder: str, max_bytes: str, path: str, options: str) -> None:
    index = Index(path)
    cache, order = Cache(folder, max_bytes=int(max_bytes)), Order(index.num_rows, shuffle=Shuffle(), seed=0)
    filler = Filler(cache, index, Files(json.loads(options)), order, None, ReadBytes())
    print("ready", flush=True)
    sys.stdin.readline()
    filler.begin(lambda: (0, 0.0))
    filler.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
