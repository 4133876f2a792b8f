"""Jobs of ranks: a script of this folder, one process a rank over gloo; what each rank found comes back as JSON.

    test: run_ranks(script, *arguments) --environment, arguments--> rank: run_rank(work)
          results, by rank <-----------------JSON on stdout--------       work(*arguments)
          all there -------------------------end of stdin---------> end

Ranks end once all have reported, so that no rank ends while others still work; one that ends without a result ends the
job, with what it wrote. Nothing waits by a clock, but for the end of a job that hangs, which shows where its ranks are.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from rank_server import Rank, Server

from benchmarks.launch import end_with_parent

LIMIT_SECONDS = 900  # so that a loaded machine is not taken for a job that hangs
PATIENCE = timedelta(seconds=90)
FSDP2_RUNS = hasattr(torch.cpu.Stream, "record_event")
"""On a CPU: it asks of streams what those of a CPU have since torch 2.7."""
_LAST_LINES = 40


class RanksFailed(Exception):
    """Ranks ended without a result, or the job hung; the message ends with what they wrote."""


def run_ranks(
    script: str,
    *arguments: object,
    num_ranks: int,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    lost: Collection[int] = (),
    limit_seconds: float = LIMIT_SECONDS,
) -> list[Any]:
    """What each rank's `work(*arguments)` returned; None for those in `lost`, which must end or stop without a word."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's, it outlives ranks
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    own |= {"TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    own |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    if sys.platform == "linux":
        own["GLOO_SOCKET_IFNAME"] = "lo"
    shared = {**os.environ, **own, **(environment or {})}
    with ThreadPoolExecutor(num_ranks) as threads, ExitStack() as stack:
        servers = list(threads.map(server, range(min(num_ranks, 2))))  # both, before a rank waits for another
        ranks = []
        for rank in range(num_ranks):
            process = servers[rank % 2].start(
                [script, *map(str, arguments)],
                shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stack.enter_context((folder / f"{rank}.log").open("wb")),
            )
            stack.callback(_end, process)
            ranks.append(process)
        telling = [threads.submit(process.stdout.read) for process in ranks]
        silent = _wait_for(telling, lost, limit_seconds)
        if silent is None:
            _show_where(ranks)
            raise RanksFailed(f"no end after {limit_seconds:g} seconds\n{_said(folder, range(num_ranks))}")
        if silent:
            _show_where(ranks)  # the others, which these may have waited for
            raise RanksFailed(f"ranks {silent} ended without a result\n{_said(folder, range(num_ranks))}")
        for process in ranks:
            process.stdin.close()
        failed = [rank for rank, process in enumerate(ranks) if rank not in lost and process.wait()]
        if failed:
            raise RanksFailed(f"ranks {failed} ended badly, their work done\n{_said(folder, failed)}")
    results = [found.result() for found in telling]
    if spoke := [rank for rank in lost if results[rank]]:
        raise RanksFailed(f"ranks {spoke} were to be lost, and have results")
    return [json.loads(text) if text else None for text in results]


def run_rank(
    work: Callable[..., Any], *, timeout: timedelta = PATIENCE, store: Callable[[], Any] | None = None
) -> NoReturn:
    """Be one rank: `work` is called with the arguments of the job, as text, in an initialized process group.

    Args:
        work: returns what is JSON; it may end or stop the process instead.
        timeout: of the process group.
        store: makes the one that ranks meet in; default: the one that is there whoever of them ends.
    """
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not get into the result
    faulthandler.enable()
    end_with_parent()
    torch.set_num_threads(1)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    given = {} if store is None else {"store": store(), "rank": rank, "world_size": num_ranks}
    try:
        dist.init_process_group("gloo", timeout=timeout, **given)
        text = json.dumps(work(*sys.argv[1:]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # Threads that gloo may still hold abort a process that ends the long way.
    with result:
        result.write(text)
    sys.stdin.read()
    os._exit(0)


def made_on_rank_0(like: torch.Tensor, make: Callable[..., torch.Tensor], *given: object) -> torch.Tensor:
    """A reference that is the same on all ranks, computed once."""
    made = make(*given) if dist.get_rank() == 0 else torch.empty_like(like)
    dist.broadcast(made, 0)
    return made


def message(act: Callable[[], Any]) -> str | None:
    """The error of `act`, with its type."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def store_on_rank_0() -> dist.TCPStore:
    """A store that ends with rank 0, which tells its port to the others."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    launchers = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    if os.environ["RANK"] != "0":
        return dist.TCPStore(address, int(launchers.get("port")), is_master=False, wait_for_workers=False)
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    launchers.set("port", str(store.port))
    return store


def _wait_for(telling: list[Future[bytes]], lost: Collection[int], limit_seconds: float) -> list[int] | None:
    """Ranks that ended without a result, as soon as there are any; [] once all have reported; None if some hang."""
    deadline = time.monotonic() + limit_seconds
    ranks = {found: rank for rank, found in enumerate(telling) if rank not in lost}
    waiting: set[Future[bytes]] = set(ranks) or set(telling)  # where all are to be lost, until they are
    while waiting:
        done, waiting = wait(waiting, deadline - time.monotonic(), FIRST_COMPLETED)
        if not done:
            return None
        if silent := sorted(ranks[found] for found in done if found in ranks and not found.result()):
            return silent
    return []


_servers: dict[int, Server] = {}


def server(odd: int) -> Server:
    """The server 0 or 1, which lasts as long as this process."""
    if odd not in _servers or not _servers[odd].alive:
        _servers[odd] = Server(odd)
    return _servers[odd]


def _show_where(ranks: list[Rank]) -> None:
    """Have ranks that hang write down where, and end."""
    for process in ranks:
        process.send_signal(signal.SIGABRT)
        process.send_signal(signal.SIGCONT)
    for process in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def _end(process: Rank) -> None:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def _said(folder: Path, ranks: Collection[int]) -> str:
    lines = []
    for rank in ranks:
        text = (folder / f"{rank}.log").read_text(errors="replace")
        lines += [f"--- rank {rank}", *text.splitlines()[-_LAST_LINES:]]
    return "\n".join(lines)
