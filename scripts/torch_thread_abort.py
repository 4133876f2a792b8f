"""Why a rank on gloo can abort at its end, after all its work: torch alone, nothing of orchdata.

    python scripts/torch_thread_abort.py [--times 8] [--tensors 40000]

A thread of ProcessGroupGloo ("pt_gloo_runloop") drops a collective's tensors after it notified the waiting thread that
the collective is over. To drop one that Python made it takes the interpreter's lock. If the interpreter is on its way
out by then, Python before 3.14 ends the thread in that place, by pthread_exit through frames of C++ that let nothing
through: std::terminate, "terminate called without an active exception", SIGABRT.

    ProcessGroupGloo::runLoop -> ~AsyncWork -> TensorImpl::decref_pyobject -> gil_scoped_acquire -> take_gil
        -> PyThread_exit_thread -> pthread_exit -> _Unwind_ForcedUnwind -> __gxx_personality_v0 -> std::terminate

With few tensors the moment is short, and met on busy CPUs; with many it is long. Every collective here is waited for.
destroy_process_group ends those threads first, unless something holds the group, as a DDP model does.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import warnings
from typing import Any

ENDINGS = {
    "plain": "the program ends",
    "destroyed": "destroy_process_group, then it ends",
    "held": "the same, while something holds the group",
    "left": "destroy_process_group, then os._exit(0)",
}

held: Any = None


def be_rank(ending: str, num_tensors: int) -> None:
    global held
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce_coalesced([torch.ones(1) for _ in range(num_tensors)])  # returns once it is over
    if ending == "held":
        held = dist.group.WORLD
    if ending != "plain":
        dist.destroy_process_group()
    if ending == "left":
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--tensors", type=int, default=40_000)
    parser.add_argument("--ending", choices=ENDINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ending:
        be_rank(options.ending, options.tensors)
        return
    command = [sys.executable, __file__, "--tensors", str(options.tensors), "--ending"]
    for ending, words in ENDINGS.items():
        statuses = [
            subprocess.run([*command, ending], stderr=subprocess.DEVNULL, check=False).returncode
            for _ in range(options.times)
        ]
        print(f"{words:45} {statuses.count(-signal.SIGABRT)} of {options.times} aborted", flush=True)


if __name__ == "__main__":
    main()
