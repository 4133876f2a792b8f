"""Forks, other processes, and Ctrl-C: what a process with open stores must not do, and what it hears."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from children import in_a_child
from remote_epochs import LOADER, Epochs, epoch, remote
from servers.fixtures import Proxied
from servers.s3_server import S3Server
from shard_factory import write_shard

import orchdata as od

WHY = 'start processes with multiprocessing_context="forkserver" or "spawn"'


def test_a_forked_child_is_refused_at_once(s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "orchdata.loaders.storage.remote.requests.FORKED_SECONDS", float("inf")
    )  # or it would wait for ever
    pattern = f"s3://{bucket}/train/*.tar"
    used = remote(pattern, s3_server.options)
    used.index()
    used[0]

    def child() -> None:
        for work in (
            lambda: used[0],
            lambda: remote(pattern, s3_server.options).index(rebuild=True),
            lambda: remote(pattern, s3_server.options).urls,
            lambda: epoch(used),
        ):
            with pytest.raises(od.StorageError, match=WHY):
                work()

    in_a_child(child)


def test_a_loader_of_forked_workers_is_refused(s3_server: S3Server, bucket: str) -> None:
    dataset = remote(f"s3://{bucket}/train/*.tar", s3_server.options)
    loader = od.DataLoader(dataset, num_workers=1, multiprocessing_context="fork", on_error="skip", **LOADER)
    with pytest.raises(od.StorageError, match=WHY):
        list(loader)


@pytest.mark.parametrize("context", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_other_contexts_work(s3_server: S3Server, bucket: str, local: Epochs, context: str) -> None:
    dataset = remote(f"s3://{bucket}/train/*.tar", s3_server.options)
    assert epoch(dataset, num_workers=1, multiprocessing_context=context) == local.local


def in_a_program(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program that has used nothing before."""
    return subprocess.run([*command(text), *arguments], capture_output=True, text=True, timeout=100, check=False)


def command(text: str) -> list[str]:
    support = Path(__file__).parents[2] / "support"
    # Where tests run in the background of a shell, children would ignore Ctrl-C.
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    lines = f"import sys\nsys.path.insert(0, {str(support)!r})\n{heard}\n{textwrap.dedent(text)}"
    return [sys.executable, "-c", lines]


def test_a_child_of_a_process_whose_own_code_used_obstore_gives_up(s3_server: S3Server, bucket: str) -> None:
    program = """
        import json, os
        import obstore
        from servers.s3_server import store_at
        from orchdata.loaders.storage.remote import requests
        from orchdata.loaders.storage.files import Files

        requests.FORKED_SECONDS = 0.5
        url, options = sys.argv[1], json.loads(sys.argv[2])
        obstore.list(store_at(url, options)).collect()
        pid = os.fork()
        if not pid:
            try:
                Files(options).version(f"{url}train/omni-000000.tar")
            except Exception as error:
                print(error, flush=True)
                os._exit(3)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    """
    run = in_a_program(program, f"s3://{bucket}/", json.dumps(s3_server.options))
    assert run.returncode == 0, run.stderr
    assert WHY in run.stdout


WAITING: dict[str, str] = {
    "a listing": "remote(f'{url}*.tar', options).urls",
    "a read in this process": "next(iter(od.DataLoader(indexed(), batch_size=2, num_threads=0)))",
    "a read in threads": "next(iter(od.DataLoader(indexed(), batch_size=2, num_threads=2)))",
}


@pytest.mark.slow
@pytest.mark.parametrize("waiting", WAITING)
def test_ctrl_c_is_heard_while_a_server_stalls(
    s3_server: S3Server, bucket: str, local: Epochs, proxied: Proxied, waiting: str, tmp_path: Path
) -> None:
    """The program waits for an answer that never comes when it is interrupted."""
    proxy = proxied(s3_server)
    is_read = "read" in waiting
    program = f"""
        import json
        from remote_epochs import RECIPE, remote
        import orchdata as od

        url, options = sys.argv[1], json.loads(sys.argv[2])

        def indexed():
            dataset = remote(f"{{url}}omni-{{{{000000..000001}}}}.tar", options)
            dataset.index()
            print("indexed", flush=True)
            sys.stdin.readline()
            return dataset

        try:
            {WAITING[waiting]}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    given = [f"s3://{bucket}/train/", json.dumps(s3_server.options_of("all", proxy.endpoint))]
    if not is_read:
        proxy.delay = 1000
    child = subprocess.Popen(
        [*command(program), *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        if is_read:
            assert child.stdout.readline() == "indexed\n"
            proxy.clear()
            proxy.delay = 1000
            child.stdin.write("\n")
            child.stdin.flush()
        while not proxy.requests():
            time.sleep(0.02)
        os.kill(child.pid, signal.SIGINT)
        assert child.stdout.readline() == "interrupted\n"
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.communicate()


@pytest.mark.slow_cases("24-")
@pytest.mark.filterwarnings("ignore:DataLoader worker")
@pytest.mark.parametrize(
    ("memory", "error"),
    [
        pytest.param(
            24, r"not enough memory to read a step: its samples have 3355\d* bytes in object storage, 0 bytes"
        ),
        # What decodes may take the memory that a client was about to need, which then ends its process.
        pytest.param(
            64, "went beyond worker_memory|was killed by signal: Aborted under worker_memory", marks=pytest.mark.slow
        ),
        pytest.param(600, None),
    ],
)
def test_bytes_on_their_way_count_as_memory_of_the_step(
    tmp_path: Path, s3_server: S3Server, memory: int, error: str | None
) -> None:
    samples = [{"__key__": str(number), "txt": b"hello", "bin": bytes(8 << 20)} for number in range(4)]
    bucket = s3_server.make_bucket(f"memory-{memory}")
    s3_server.put(bucket, "a.tar", Path(write_shard(tmp_path / "a.tar", samples)).read_bytes())
    dataset = remote(f"s3://{bucket}/a.tar", s3_server.options, recipe=od.Recipe(keep=["bin"]))
    loader = od.DataLoader(
        dataset,
        batch_size=4,
        num_workers=1,
        num_threads=2,
        worker_memory=memory << 20,
        on_error=od.ErrorPolicy("skip", max_failures=None),
    )
    if error is None:
        assert [len(batch.sample_ids) for batch in loader] == [4]
    else:
        with pytest.raises(RuntimeError, match=error) as raised:
            list(loader)
        assert "none of its samples ends a process alone" in str(raised.value)
        # Where the step does not fit at all, no client is asked, which would end its process.
        assert memory == 64 or "Aborted" not in str(raised.value)
    assert loader.stats()["failures"]["count"] == 0
