"""Objects read whole: in blocks, in order, of one version."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers.fixtures import Proxied
from servers.proxy import Fault
from servers.s3_server import S3Server

import orchdata as od
from orchdata.loaders.storage.files import Files
from orchdata.loaders.storage.node import Copies
from orchdata.loaders.storage.remote.objects import BLOCK_BYTES, Blocks, RemoteFile
from orchdata.loaders.storage.storage import FileVersion, ReadBytes
from orchdata.loaders.watch import Ended, here

CONTENT = random.Random(7).randbytes(5 * BLOCK_BYTES // 2)


def blocks(files: Files, url: str, file: FileVersion, reads: ReadBytes) -> Iterator[bytes]:
    source = Blocks(RemoteFile(files.objects, url, file, reads))
    return (bytes(source.view(start, BLOCK_BYTES)) for start in range(0, file.size, BLOCK_BYTES))


def test_an_object_is_copied_in_blocks_in_spite_of_faults(
    s3_server: S3Server, new_bucket: Callable[[], str], proxied: Proxied, tmp_path: Path
) -> None:
    proxy = proxied(s3_server, Fault("cut_body", kinds=("RANGE",), times=1))
    url = f"s3://{(bucket := new_bucket())}/a.bin"
    s3_server.put(bucket, "a.bin", CONTENT)
    files = Files(s3_server.options_of("all", proxy.endpoint))
    file = files.version(url)
    assert file is not None
    copies, reads = Copies(od.Cache(tmp_path, max_bytes=1 << 30)), ReadBytes()

    def make(out: object) -> None:
        for block in blocks(files, url, file, reads):
            out.write(block)  # type: ignore[attr-defined]

    assert copies.add(url, file, make) == "added"
    copy = copies.find(url, file)
    assert copy is not None
    assert copy.read(0, copy.size) == CONTENT
    assert reads.storage.value == len(CONTENT)
    assert reads.requests.as_dict() == {"get": 4, "again": 1}  # three blocks, and one again
    assert {each.if_match for each in proxy.requests("RANGE")} == {file.version}


def test_blocks_that_are_no_longer_wanted_end(
    s3_server: S3Server, new_bucket: Callable[[], str], proxied: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = proxied(s3_server, Fault("stall", kinds=("RANGE",), after=0, seconds=600))
    url = f"s3://{(bucket := new_bucket())}/a.bin"
    s3_server.put(bucket, "a.bin", CONTENT)
    files = Files(s3_server.options_of("all", proxy.endpoint))
    file = files.version(url)
    assert file is not None
    monkeypatch.setattr(here(), "ended", lambda: True)
    with pytest.raises(Ended):
        list(blocks(files, url, file, ReadBytes()))
