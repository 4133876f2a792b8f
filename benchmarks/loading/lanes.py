"""The lanes that every comparison has: this library's, and the limits that they are compared with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.loading import ours


@dataclass(frozen=True, slots=True)
class Lane:
    """One way to load.

    Attributes:
        kind: "limit", "ours", or of another loader: "torch" in workers of torch's DataLoader, "other".
        load: job -> samples of each batch, while the batch is kept, as training keeps it.
        module: imported before anything is timed; "" where nothing is to be imported.
        prepare: writes what the loader needs besides the data into a folder; not timed.
        folder: its name; lanes that name the same share it.
        python: the interpreter that runs it.
        in_processes: whether it loads in worker processes.
        absent: why it cannot run; "" where it can.
    """

    kind: Literal["limit", "ours", "torch", "other"]
    load: Callable[[Any], Iterator[int]]
    module: str = ""
    prepare: Callable[[Any, Path], None] | None = None
    folder: str = ""
    python: str = sys.executable
    in_processes: bool = False
    absent: str = ""


OURS: Final = "orchdata.dataloader"
BARE: Final = "bare threads, bytes in memory"
LANES: Final[dict[str, Lane]] = {
    "raw read, bytes only": Lane("limit", ours.raw_read),
    BARE: Lane("limit", ours.bare_threads),
    "orchdata, threads": Lane("ours", ours.threads, OURS),
    "orchdata, processes": Lane("ours", ours.processes, OURS, in_processes=True),
}
