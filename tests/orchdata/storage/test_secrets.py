"""Nothing that is written has a secret: files, states, errors with their chains, logs, warnings, reprs, output."""

from __future__ import annotations

import inspect
import io
import json
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from remote_epochs import LOADER, Epochs, remote
from servers.fixtures import Proxied
from servers.odd_server import OddServer
from servers.proxy import Fault
from servers.s3_server import S3Server

import orchdata as od

MARK = "MARKEDSECRET"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and all that it refers to."""
    while error is not None:
        yield error
        yield from chain(error.__cause__)
        error = error.__context__


class Written:
    """All that a run writes: what is said, and what is kept in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.texts: list[str] = []

    def run(self, work: Callable[[], Any]) -> BaseException | None:
        """Do work. Note its error, its logs at the lowest level, its warnings and its output."""
        raised: BaseException | None = None
        said = io.StringIO()
        handler = logging.StreamHandler(said)
        root, level = logging.getLogger(), logging.getLogger().level
        root.addHandler(handler)
        root.setLevel(logging.DEBUG)
        try:
            with warnings.catch_warnings(record=True) as seen, redirect_stdout(said), redirect_stderr(said):
                warnings.simplefilter("always")
                try:
                    work()
                except Exception as error:
                    raised = error
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
        self.texts += [said.getvalue(), *(str(each.message) for each in seen)]
        for each in chain(raised):
            self.texts += [repr(each), str(each), repr(vars(each)), "".join(traceback.format_exception(each))]
        return raised

    def note(self, *values: Any) -> None:
        self.texts += [repr(each) for each in values]

    def check(self, *secrets: str) -> None:
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        assert files
        for secret in secrets:
            for text in self.texts:
                assert secret not in text
            for path in files:
                assert secret.encode() not in path.read_bytes(), path


def test_the_check_finds_a_secret(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("none")
    written = Written(tmp_path)

    def work() -> None:
        try:
            raise ValueError(f"a {MARK}")
        except ValueError:
            raise RuntimeError("hidden") from None

    written.run(work)
    with pytest.raises(AssertionError):
        written.check(MARK)


FAULTS = [
    *(Fault(action) for action in ("cut", "cut_body", "short", "fewer", "long")),
    *(Fault("status", status=status) for status in (301, 400, 401, 403, 404, 409, 412, 416, 429, 500, 503)),
]


@pytest.mark.slow
def test_options(
    s3_server: S3Server, local: Epochs, new_bucket: Callable[[], str], proxied: Proxied, private_cache: Path
) -> None:
    bucket, proxy = new_bucket(), proxied(s3_server)
    pattern = local.to_s3(s3_server, bucket)
    options = s3_server.options_of("all", proxy.endpoint) | {"retry_seconds": 0.05}
    written = Written(private_cache)

    def whole() -> None:
        dataset = remote(pattern, options)
        written.note(dataset, dataset.files, dataset.reading, dataset.urls)
        for workers in (0, 1):
            loader = od.DataLoader(dataset, num_workers=workers, **LOADER)
            for batch in loader:
                written.note(batch.sample_ids, batch.plan)
            written.note(json.dumps(loader.state_dict()), loader, loader.stats())

    assert written.run(whole) is None
    indexed = remote(pattern, options)
    indexed.index()
    errors = set()
    for fault in FAULTS:
        proxy.faults = (fault,)
        for work in (
            lambda: remote(pattern, options).urls,
            lambda: list(od.DataLoader(indexed, **LOADER)),
            lambda: remote(pattern.replace("*", "omni-{000000..000001}"), options).index(rebuild=True),
        ):
            errors.add(type(written.run(work)))
    assert {od.StorageError, od.StaleIndexError} <= errors
    proxy.faults = ()
    for name in ("secret_access_key", "access_key_id", "session_token", "foo"):
        wrong = {name: f"{MARK}-{name}"}
        assert written.run(lambda wrong=wrong: remote(pattern, options | wrong).urls) is not None
    for name in ("checksum_algorithm", "read_timeout", "endpoint", "proxy_url", "root_certificate"):
        value = f"http://u:{MARK}-{name}@x y" if name in ("endpoint", "proxy_url") else f"{MARK}-{name}"
        written.run(lambda name=name, value=value: remote(pattern, options | {name: value}).urls)
    if any(f"{MARK}-read_timeout" in text for text in written.texts):  # a public option, which an error shows
        written.texts = [text.replace(f"{MARK}-read_timeout", "") for text in written.texts]
    written.check(MARK, s3_server.secret_key, s3_server.access_key)


def test_queries_and_passwords(odd_server: OddServer, local: Epochs, private_cache: Path) -> None:
    for path in local.paths:
        odd_server.put(f"d/{Path(path).name}", Path(path).read_bytes())
    place = odd_server.endpoint.removeprefix("http://")
    url = f"http://{MARK}-user:{MARK}-word@{place}/d/omni-{{000000..000001}}.tar?X-Sig={MARK}-sig&b={MARK},c)"
    written = Written(private_cache)

    def whole() -> None:
        dataset = remote(url, {"retry_seconds": 0.2})
        written.note(dataset, dataset.files, dataset.reading, dataset.urls, dataset[0], dataset.find("s0-0000"))
        for workers in (0, 1):
            loader = od.DataLoader(dataset, num_workers=workers, **LOADER)
            for batch in loader:
                written.note(batch.sample_ids)
            written.note(json.dumps(loader.state_dict()), loader, loader.stats())

    assert written.run(whole) is None
    indexed = remote(url, {"retry_seconds": 0.2})
    indexed.index()
    for name, value in {
        "status": 403,
        "ignores_range": True,
        "says_html": True,
        "extra_bytes": 5,
        "says_gzip": True,
        "redirects_to": "file:///etc/hostname",
        "shifts_range": 3,
        "hides_size": True,
        "etags": False,
    }.items():
        before = getattr(odd_server, name)
        setattr(odd_server, name, value)
        assert written.run(lambda: list(od.DataLoader(indexed, **LOADER))) is not None
        written.run(lambda: remote(url, {"retry_seconds": 0.2}).index(rebuild=True))
        setattr(odd_server, name, before)
    odd_server.files.clear()
    for wrong in (
        lambda: list(od.DataLoader(indexed, **LOADER)),
        lambda: remote([url, url]),
        lambda: remote(url.replace(".tar", ".unknown")),
        lambda: remote(url.replace("omni-", "*")),
        lambda: remote(url.replace("}", "")),
        lambda: remote(url.replace("{000000..000001}", "{0..99999999}")),
        lambda: remote(url.replace("http://", "foo://").partition("?")[0]).index(),
        lambda: remote(url, {"region": "x"}).index(rebuild=True),
        lambda: remote(f"http://{MARK}:{MARK}@{place}:99999/a.tar").index(),
        lambda: remote(f"http://{MARK}:{MARK}@/a.tar?{MARK}"),
        lambda: remote(f"http://{MARK}:{MARK}@{place}/a//b.tar?{MARK}"),
    ):
        assert written.run(wrong) is not None, inspect.getsource(wrong)
    written.check(MARK)
