"""Azurite, Microsoft's stand-in for Azure's blobs, on loopback. npm installs it once into a cache folder.

AzureServer() --node azurite-blob--> a free port, blobs in memory; one account, made for this server
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import format_datetime
from fcntl import LOCK_EX, flock
from pathlib import Path

import obstore
from obstore.exceptions import BaseError

from servers.processes import ProcessServer, asked, free_ports, start, wait_until
from servers.s3_server import store_at

PACKAGE = "azurite@3.35.0"
INSTALL_SECONDS = 240
_VERSION = "2021-08-06"  # of Azure's interface
_READY = "is-it-ready"


class NoAzurite(Exception):
    """There is no Azurite, and none can be installed; the text says why."""


def azurite() -> Path:
    """The program, from the cache folder; npm installs it there if it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orchdata-tests" / PACKAGE
    cache.mkdir(parents=True, exist_ok=True)
    script = cache / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    with (cache / "lock").open("w") as lock:  # another process of tests may install it now
        flock(lock, LOCK_EX)
        if not (cache / "installed").exists():
            _install(cache)
            (cache / "installed").touch()
    if not script.exists():
        raise NoAzurite(f"{PACKAGE} has no {script}: another version lays its files elsewhere")
    return script


def _install(cache: Path) -> None:
    npm = shutil.which("npm")
    if not npm or not shutil.which("node"):
        raise NoAzurite(f"there are no npm and node here, which install and run {PACKAGE}")
    # Its dependencies' own install scripts are for what the blob server does not use.
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(cache), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise NoAzurite(f"npm did not install {PACKAGE} in {INSTALL_SECONDS} s: is there a registry?") from None
    if done.returncode:
        raise NoAzurite(f"npm cannot install {PACKAGE}: {done.stderr[-500:]}")


class AzureServer(ProcessServer):
    """One server, from `with` to its end, with one account. Containers are made by `make_container`."""

    def __init__(self) -> None:
        self._script = azurite()
        super().__init__()
        # Other servers know no such account: an answer can come only from this one.
        self.account = f"tests{secrets.token_hex(4)}"
        self.key = base64.b64encode(secrets.token_bytes(64)).decode()

    @property
    def options(self) -> dict[str, str]:
        """`storage_options`, in obstore's names, for URLs such as `az://container/`.

        The account is a part of the endpoint's path here; on Azure it is one of the host's name.
        """
        address = f"{self.endpoint}/{self.account}"
        return {"account_name": self.account, "account_key": self.key, "endpoint": address, "allow_http": "true"}

    def make_container(self, name: str) -> str:
        """A new container; its name has at least three characters, of lower case."""
        path = f"/{self.account}/{name}"
        headers = {"x-ms-date": format_datetime(datetime.now(UTC), usegmt=True), "x-ms-version": _VERSION}
        headers |= {"Content-Length": "0", "Authorization": self._signature(path, {"restype": "container"}, headers)}
        status, said = asked(self.port, "PUT", f"{path}?restype=container", headers)
        if status != 201:
            raise RuntimeError(f"Azurite made no container {name}: {status} {said!r}")
        return name

    def put(self, container: str, key: str, content: bytes) -> None:
        obstore.put(store_at(f"az://{container}/", self.options), key, content, use_multipart=False)

    def _signature(self, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> str:
        """The Authorization header of a PUT without a body."""
        named = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        resource = f"/{self.account}{path}" + "".join(f"\n{name}:{query[name]}" for name in sorted(query))
        signed = "PUT" + "\n" * 12 + named + resource
        digest = hmac.new(base64.b64decode(self.key), signed.encode(), hashlib.sha256).digest()
        return f"SharedKey {self.account}:{base64.b64encode(digest).decode()}"

    def _attempt(self) -> subprocess.Popen[bytes]:
        (self.port,) = free_ports(1)
        command = ["node", str(self._script), "--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--silent"]
        command += ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]
        log = self._folder / "log"
        environment = {**os.environ, "AZURITE_ACCOUNTS": f"{self.account}:{self.key}"}
        process = start(command, log, environment)
        wait_until(self._ready, process, log)
        return process

    def _ready(self) -> bool:
        try:
            self.make_container(_READY)
            self.put(_READY, "ready", b"yes")
        except (BaseError, RuntimeError, OSError, http.client.HTTPException):
            return False
        return True
