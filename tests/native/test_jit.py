"""Kernels: compiled once for each combination of types, and not before they are called."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest

from orchdata.native.jit import Kernel, inlined, kernel
from orchdata.native.permutation import shuffled_rows

FIRST_CALL = """
import sys
import numpy as np
from orchdata.native.sorting import first_invalid
print("numba" in sys.modules)
print(first_invalid(np.array([3, -1]), 9))
print("numba" in sys.modules)
"""


FORKED = """
import os, signal, threading
from orchdata.native.jit import kernel, load_numba

def made(number):
    def each(value: int) -> int:
        return value * number
    return kernel(each)

def compile_more():
    begun.set()
    for number in range(3, 40):
        made(number)(2)

load_numba()
begun = threading.Event()
threading.Thread(target=compile_more, daemon=True).start()
begun.wait()
for _ in range(8):
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(0 if made(2)(4) == 8 else 1)
    assert os.waitpid(child, 0)[1] == 0, "a forked process waits for a thread it does not have"
os._exit(0)
"""

FORKED_EARLY = """
import importlib.abc, os, signal, sys, threading
import numpy as np
from orchdata.native.jit import kernel

class Tells(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            begun.set()
            imported.wait(0.5)  # so that the other thread forks, or waits to fork

def made(number):
    def each(values):
        return values.sum() * number
    return kernel(each)

def compile_more():
    for number in range(3, 12):
        made(number)(np.arange(5))

begun, imported = threading.Event(), threading.Event()
sys.meta_path.insert(0, Tells())
threading.Thread(target=compile_more, daemon=True).start()
begun.wait()
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(0 if made(2)(np.arange(5)) == 20 else 1)
assert os.waitpid(child, 0)[1] == 0, "a forked process waits for a thread it does not have"
os._exit(0)
"""


def plus(number: int, more: int) -> int:
    return number + more


def test_constants_of_a_caller_compile_nothing_again() -> None:
    inner = kernel(plus)

    def calls(number: int) -> int:
        return inner(number, 1) + inner(number, more=2) + inner(3, number)

    assert kernel(calls)(10) == 11 + 12 + 13
    assert len(inner.signatures) == 1  # type: ignore[attr-defined]


def test_a_kernel_may_call_pieces_that_are_not_compiled_yet() -> None:
    piece = inlined(plus)

    def calls(number: int) -> int:
        return piece(number, 1) * 2

    assert kernel(calls)(10) == 22


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("disabled", [False, True])
def test_numba_is_imported_by_the_first_call(disabled: bool) -> None:
    environ = {key: value for key, value in os.environ.items() if key != "NUMBA_DISABLE_JIT"}
    environ |= {"NUMBA_DISABLE_JIT": "1"} if disabled else {}
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.split("\n")[:3] == ["False", "(1, False)", "True"]


def test_threads_that_call_a_kernel_first_together_share_what_is_compiled() -> None:
    def made(function: Any) -> list[int]:
        calls.append(function)
        assert not both.wait(timeout=0.2)  # the other one waits
        return [function(1, 2)]

    calls: list[Any] = []
    found: list[Any] = []
    both = threading.Event()
    shared = Kernel(plus, made)
    threads = [threading.Thread(target=lambda: found.append(shared.compiled())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is shared.compiled()
    assert len(calls) == 1


@pytest.mark.slow
def test_a_process_that_is_forked_while_a_thread_compiles_can_compile() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_process_that_is_forked_while_a_thread_imports_numba_can_compile() -> None:
    command = [sys.executable, "-c", FORKED_EARLY, "numba.core.compiler_lock"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_kernels_pickle_by_name_and_keep_what_describes_them() -> None:
    assert pickle.loads(pickle.dumps(shuffled_rows)) is shuffled_rows
    assert shuffled_rows.__name__ == "shuffled_rows"
    assert kernel(plus).__doc__ == plus.__doc__
    assert not hasattr(kernel(plus), "__len__")
    with pytest.raises(AttributeError):
        _ = kernel(plus).no_such_thing  # type: ignore[attr-defined]
