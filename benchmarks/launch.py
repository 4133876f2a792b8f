"""Start a program under torchrun, follow its progress, and leave no process however this one ends."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import IO, NoReturn

from orchdata.loaders.errors import OrchdataError

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_GRACE_SECONDS = 5.0


class LaunchError(OrchdataError, RuntimeError):
    """A rank failed; the message ends with the last lines it wrote."""


def torchrun(
    program: Sequence[str],
    *,
    num_ranks: int,
    environment: Mapping[str, str],
    log: IO[bytes],
    progress: Callable[[int, int], None] = lambda done, total: None,
    python: str = sys.executable,
) -> None:
    """Run a program on `num_ranks` local ranks and wait for them.

    Args:
        program: a script and its arguments, or `-m`, a module and its arguments.
        num_ranks: processes to start; each computes with one thread.
        environment: set for the ranks, besides this process's own.
        log: a file that takes what the ranks write to stderr; its end is quoted when one fails.
        progress: called for each line {"done": ..., "total": ...} that a rank prints.
        python: the interpreter, which may be of another virtual environment.

    Raises:
        LaunchError: a rank failed.
    """
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if sys.platform == "linux":
        own["GLOO_SOCKET_IFNAME"] = "lo"  # All ranks are here; a host name that does not resolve must not matter.
    process = subprocess.Popen(
        [*command, *program],
        env={**os.environ, **own, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,  # Ctrl-C reaches only this process, which then stops the others in order.
        preexec_fn=end_with_parent,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                report = json.loads(line)
                progress(report["done"], report["total"])
        code = process.wait()
    finally:
        _stop(process)
    if code:
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines()
        # What torchrun adds about the failure comes last and does not say why.
        said = list(takewhile(lambda line: "torch/distributed/elastic/" not in line, lines)) or lines
        raise LaunchError("\n".join([f"training failed with exit code {code}; its last lines:", *said[-30:]]))


def end_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent of this process ends, even by SIGKILL; elsewhere do nothing."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def leave() -> NoReturn:
    """End this rank, its work done, without running destructors.

    Threads that gloo may still hold then abort a process that ends the long way ("terminate called without an active
    exception"), and torchrun takes finished training for a failure.
    """
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.stdout is not None:
        process.stdout.close()
    if process.poll() is None:
        process.terminate()  # torchrun passes it on to its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
