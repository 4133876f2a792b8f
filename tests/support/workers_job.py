"""A loader with a worker that holds its GIL for ever: `python workers_job.py START_METHOD`, ended from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from typing import Any

import orchdata as od


class Stuck:
    """Its last items never return."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        if number >= 4:
            if number == 4:
                os.write(1, json.dumps("a worker hangs").encode() + b"\n")
            re.match(r"(a+)+$", "a" * 60 + "b")
        return number


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    for batch in od.DataLoader(Stuck(), 2, num_workers=2, multiprocessing_context=sys.argv[1], cost=[1] * 40):
        len(batch)
