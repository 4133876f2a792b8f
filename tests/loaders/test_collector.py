"""What collections pass over while a process runs is freed at its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc, os
from orchdata.loaders.collector import leave_out_what_is_loaded

class Loaded:
    def __del__(self, write=os.write):
        write(1, b"freed ")

gc.disable()
loaded = Loaded()
loaded.itself = loaded
del loaded
{call}
gc.collect()
os.write(1, b"ends ")
"""


@pytest.mark.parametrize(
    ("call", "order"),
    [("leave_out_what_is_loaded()", "ends freed "), ("gc.freeze()", "ends "), ("", "freed ends ")],
)
def test_what_is_loaded_is_freed_at_the_end(call: str, order: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(call=call)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == order
