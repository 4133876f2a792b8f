"""Ranks forked off a process that has imported and compiled what they need: that takes some seconds of each otherwise.

    rank_jobs: Server(0) --script, arguments, environment, files--> rank_server: fork --> the script, as __main__
               Rank.wait <----------------pid, exit code----------               <--- ends

Ranks of even and odd number are forked off two servers, so that hashes of strings differ among them, and with them the
order of what is in a set, as in processes started apart. All processes of one run of tests share the two.
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

MOST_BYTES = 1 << 20
READY = b"ready"
LONELY_SECONDS = 60
"""After which a server ends that no one has connected to."""
# Of what several jobs import, what takes long.
IMPORTED = (
    "torch._dynamo",  # as making an optimizer does
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "orchdata.dataloader",
    "orchdata.dataset.shard_dataset",
    "orchdata.post_balancing.loader",
    "orchdata.ranks.exchange",
    "examples.model",
    "shard_factory",
    "torchaudio",
)
# What scripts import that have a word, once one of them comes.
IMPORTED_FOR = {
    "hf_families": ("hf_families.families", "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"),
    "transformers": ("transformers.models.llama.modeling_llama",),
}


class Server:
    """A process that forks ranks until those who use it have ended. It is no child of any: tests look at those."""

    def __init__(self, number: int) -> None:
        self._codes: dict[int, int] = {}
        self.alive = True
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
        address = f"\0ranks-{run}-{number}"
        for _ in range(3):  # one may end as this one connects
            with suppress(ConnectionError):
                self._channel = _connected(address)
                if self._channel.recv(MOST_BYTES) == READY:
                    return
        raise RuntimeError("the process that forks ranks does not start: what it wrote is above")

    def start(
        self, program: list[str], environment: Mapping[str, str], log: IO[bytes], *, to_the_end: bool = False
    ) -> Rank:
        """Start a script with arguments, with pipes to its stdin and from its stdout.

        Args:
            to_the_end: let the interpreter end as Python does, with exit handlers; else the script's end is at once.
        """
        stdin, write = os.pipe()
        read, stdout = os.pipe()
        given = {
            "program": program,
            "path": sys.path,
            "environment": dict(environment),
            "folder": os.getcwd(),
            "to_the_end": to_the_end,
        }
        request = json.dumps(given).encode()
        assert len(request) < MOST_BYTES
        socket.send_fds(self._channel, [request], [stdin, stdout, log.fileno()])
        os.close(stdin)
        os.close(stdout)
        while (answer := self._receive(None)) is None or "started" not in answer:
            pass
        return Rank(self, answer["started"], os.fdopen(write, "wb", 0), os.fdopen(read, "rb"))

    def code(self, pid: int, timeout: float | None) -> int | None:
        """Its exit code; None where it has not ended within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while pid not in self._codes:
            left = None if deadline is None else max(0, deadline - time.monotonic())
            if self._receive(left) is None:
                return None
        return self._codes[pid]

    def _receive(self, timeout: float | None) -> dict[str, int] | None:
        if not select.select([self._channel], [], [], timeout)[0]:
            return None
        answer: dict[str, int] = json.loads(self._channel.recv(MOST_BYTES) or "{}")
        if not answer:
            self.alive = False
            raise RuntimeError("the process that forks ranks has ended: what it wrote is above")
        if "ended" in answer:
            self._codes[answer["ended"]] = answer["code"]
        return answer


def _connected(address: str) -> socket.socket:
    """A connection to the server at an address, which who comes first starts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        try:
            listening.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            listening.listen()
            _launch(listening)
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(address)
    return channel


def _launch(listening: socket.socket) -> None:
    own = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    own |= {"JE_ARROW_MALLOC_CONF": "background_thread:false", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, __file__, str(listening.fileno())],
        env={**os.environ, **own},
        stdin=subprocess.DEVNULL,
        pass_fds=[listening.fileno()],
        check=True,
    )


class Rank:
    """One forked rank, as subprocess.Popen has a process."""

    def __init__(self, server: Server, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._server = server

    def wait(self, timeout: float | None = None) -> int:
        code = self._server.code(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0)
        return code

    def poll(self) -> int | None:
        return self._server.code(self.pid, 0)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # ended, and not reported yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve(listening: socket.socket) -> NoReturn:
    load_kernels()
    import_for_ranks(IMPORTED)
    awake, wake = os.pipe()
    for end in (awake, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for who holds the other end
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    owners: dict[int, socket.socket] = {}  # by the number of a rank's process
    channels: list[socket.socket] = []
    while True:
        ready, _, _ = select.select([listening, awake, *channels], [], [], None if channels else LONELY_SECONDS)
        if awake in ready:
            os.read(awake, 1 << 16)
            _tell_who_ended(owners)
        for channel in [each for each in channels if each in ready]:
            if not _forked(channel, owners, [listening, *channels], [awake, wake]):
                channels.remove(channel)
                _forget(channel, owners)
        if listening in ready:
            channels.append(listening.accept()[0])
            with suppress(ConnectionError):
                channels[-1].send(READY)
        elif not channels:
            os._exit(0)


def _forked(
    channel: socket.socket, owners: dict[int, socket.socket], sockets: list[socket.socket], pipes: list[int]
) -> bool:
    """Fork the rank that is asked for; false if who asked has ended."""
    try:
        request, files, _, _ = socket.recv_fds(channel, MOST_BYTES, 3)
    except ConnectionError:
        return False
    if not request:
        return False
    given = json.loads(request)
    text = Path(given["folder"], given["program"][0]).read_text()
    for word in [word for word in IMPORTED_FOR if word in text]:
        import_for_ranks(IMPORTED_FOR.pop(word))
    pid = os.fork()
    if pid == 0:
        for end in pipes:
            os.close(end)
        _become(given, files, sockets)
    owners[pid] = channel
    for file in files:
        os.close(file)
    with suppress(ConnectionError):
        channel.send(json.dumps({"started": pid}).encode())
    return True


def import_for_ranks(names: Iterable[str]) -> None:
    for name in names:
        with suppress(ImportError):  # an error of the script that needs it
            importlib.import_module(name)
    gc.freeze()  # what is shared with the ranks: their collections would look through it, and copy it
    threads = Path("/proc/self/task")
    assert not threads.exists() or len(list(threads.iterdir())) == 1, "a thread would be missing from the ranks"


def _forget(channel: socket.socket, owners: dict[int, socket.socket]) -> None:
    """Ranks end with who asked for them."""
    channel.close()
    for pid in [pid for pid, owner in owners.items() if owner is channel]:
        del owners[pid]
        os.kill(pid, signal.SIGKILL)


def load_kernels() -> None:
    """Import numba and load all kernels that plans and batches call."""
    from orchdata.engines.warm import FAMILIES

    for family in FAMILIES.values():
        family[1]()


def _tell_who_ended(owners: dict[int, socket.socket]) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if (channel := owners.pop(pid, None)) is not None:
                with suppress(ConnectionError):
                    channel.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _become(request: dict[str, Any], files: list[int], sockets: list[socket.socket]) -> NoReturn:
    """This fork is the script, as if it had been started."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in sockets:
        each.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["program"]
    sys.path[:] = [str(Path(sys.argv[0]).parent), *request["path"]]
    if request["to_the_end"]:
        gc.unfreeze()  # else what is frozen is not freed at the end, and libraries with nanobind print that it leaks
        sys.modules["__main__"] = main = ModuleType("__main__")  # which the interpreter clears last
        main.__file__ = sys.argv[0]
        exec(compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec"), vars(main))  # an error is for the interpreter
        sys.exit()
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    serve(socket.socket(fileno=int(sys.argv[1])))
