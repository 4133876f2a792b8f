"""Fixtures of servers, for all tests (a plugin that tests/conftest.py names). Each server starts when first asked for.

A server that does not start is a failure. Where its program is not installed, a test skips, but in CI that fails too.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import pytest

# Names alone: what starts a server imports it, and most tests start none.
if TYPE_CHECKING:
    from servers.azure_server import AzureServer
    from servers.http_server import HttpServer
    from servers.proxy import Fault, Proxy
    from servers.s3_server import S3Server

_numbers = itertools.count(1)


class Target(Protocol):
    """What a proxy can stand before."""

    @property
    def endpoint(self) -> str: ...


class Proxied(Protocol):
    def __call__(self, server: Target, *faults: Fault, delay: float = 0.0) -> Proxy: ...


def needs_program(name: str) -> None:
    from servers.processes import program

    try:
        program(name)
    except FileNotFoundError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A running SeaweedFS, one to a process of tests. A test makes a bucket of its own (`new_bucket`)."""
    needs_program("weed")
    from servers.s3_server import S3Server

    with S3Server() as server:
        yield server


@pytest.fixture(scope="session")
def http_server() -> Iterator[HttpServer]:
    """A running `rclone serve http`, one to a process of tests. A test takes keys of its own."""
    needs_program("rclone")
    from servers.http_server import HttpServer

    with HttpServer() as server:
        yield server


@pytest.fixture
def new_bucket(s3_server: S3Server) -> Callable[[], str]:
    """Makes an empty bucket on `s3_server`; returns its name."""
    return lambda: s3_server.make_bucket(f"bucket-{next(_numbers)}")


@pytest.fixture
def proxied() -> Iterator[Proxied]:
    """Makes a proxy before a server, for one test: `proxied(s3_server, Fault("cut", every=20), delay=0.02)`."""
    from servers.proxy import Proxy

    with ExitStack() as proxies:
        yield lambda server, *faults, delay=0.0: proxies.enter_context(Proxy(server.endpoint, faults, delay))


@pytest.fixture(scope="session")
def azure_server() -> Iterator[AzureServer]:
    """A running Azurite, one to a process of tests. npm may have to install it first: tests with it are slow ones."""
    from servers.azure_server import AzureServer, NoAzurite

    try:
        made = AzureServer()
    except NoAzurite as error:
        pytest.skip(str(error))
    with made as server:
        yield server


def _stub(module: str, name: str) -> Callable[[], Iterator[Any]]:
    @pytest.fixture(name=module)
    def server() -> Iterator[Any]:
        with getattr(importlib.import_module(f"servers.{module}"), name)() as made:
            yield made

    return server


gcs_server = _stub("gcs_server", "GcsServer")
hub_server = _stub("hub_server", "HubServer")
odd_server = _stub("odd_server", "OddServer")
