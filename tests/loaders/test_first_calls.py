"""torch's vector math is called first by one thread, whoever loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_program import run_forked

COUNTED = """
import sys, threading, torch
from collections import Counter
from orchdata.loaders import first_calls

calls, threads, seen = Counter(), set(), []
def counted(name, function):
    def call(values):
        calls[name, values.dtype] += 1
        threads.add(threading.current_thread().name)
        return function(values)
    return call
for name in first_calls._FUNCTIONS:
    setattr(torch, name, counted(name, getattr(torch, name)))
together = threading.Barrier(8)
def load():
    together.wait()
    first_calls.settle_first_calls()
    seen.append(sum(calls.values()))
sys.setswitchinterval(1e-6)
started = [threading.Thread(target=load) for _ in range(8)]
for thread in started: thread.start()
for thread in started: thread.join()
print(len(threads), set(calls.values()), set(seen) == {2 * len(first_calls._FUNCTIONS)})
"""

LOADED = """
import sys
import torch
import orchdata as od
from orchdata.loaders import first_calls

class Items:
    def __len__(self): return 8
    def __getitem__(self, row): return torch.tensor(first_calls._is_settled)

if __name__ == "__main__":
    options = eval(sys.argv[1])
    print(first_calls._is_settled, all(batch.all() for batch in od.DataLoader(Items(), batch_size=2, **options)))
"""


def said_by(folder: Path, program: str, *args: str) -> list[str]:
    return run_forked(program, *args, folder=folder).stdout.split("\n")[:-1]


def test_one_thread_makes_each_first_call_and_the_others_wait_for_it(tmp_path):
    assert said_by(tmp_path, COUNTED) == ["1 {1} True"]


@pytest.mark.parametrize("options", ["{}", "{'num_workers': 1}"])
def test_they_are_made_before_anything_is_loaded(options, tmp_path):
    assert said_by(tmp_path, LOADED, options) == ["False True"]
