"""SeaweedFS as an S3 server on loopback: it checks signatures, rights, If-Match and If-None-Match as S3 does.

    S3Server() --weed server -s3 -filer--> master, volume, filer and S3 on eight free ports, data in a temporary folder

It differs from S3 in this: one who may read and not list sees 404 for a key that does not exist, and S3 says 403.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import obstore.store
from obstore.exceptions import BaseError

from servers.processes import ProcessServer, answers, asked, free_ports, program, start, wait_until

REGION = "us-east-1"
_READY = "is-it-ready"
_ONE_VOLUME = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
"""A bucket begins with one volume, not seven."""
_RIGHTS = {"all": ["Admin", "Read", "Write", "List", "Tagging"], "reader": ["Read"], "lister": ["List"], "nothing": []}


class S3Server(ProcessServer):
    """One server, from `with` to its end, with credentials for each of: `all`, `reader`, `lister`, `nothing`.

    A reader may read any key and list no bucket. Buckets are made by `make_bucket` alone.
    """

    region = REGION

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self._more = dict(options or {})
        # Other servers know no such key: an answer can come only from this one.
        self._credentials = {name: (secrets.token_hex(10), secrets.token_hex(20)) for name in _RIGHTS}

    @property
    def access_key(self) -> str:
        return self._credentials["all"][0]

    @property
    def secret_key(self) -> str:
        return self._credentials["all"][1]

    @property
    def options(self) -> dict[str, str]:
        """`storage_options` of one who may do all."""
        return self.options_of("all")

    def options_of(self, identity: str, endpoint: str | None = None) -> dict[str, str]:
        """`storage_options` of an identity, in obstore's names; the endpoint may be that of a proxy."""
        access, secret = self._credentials[identity]
        options = {"endpoint": endpoint or self.endpoint, "access_key_id": access, "secret_access_key": secret}
        return options | {"region": REGION, "allow_http": "true"}

    def store(self, bucket: str, identity: str = "all", endpoint: str | None = None) -> Any:
        """An obstore store of a bucket, which tries each request once."""
        return store_at(f"s3://{bucket}/", self.options_of(identity, endpoint))

    def make_bucket(self, name: str) -> str:
        """A new bucket; its name has at least three characters, of lower case."""
        status, said = asked(self._filer_port, "POST", f"/buckets/{name}/")
        if status != 201:
            raise RuntimeError(f"SeaweedFS made no bucket {name}: {status} {said!r}")
        return name

    def put(self, bucket: str, key: str, content: bytes) -> str:
        """Store an object; returns its etag."""
        return obstore.put(self.store(bucket), key, content, use_multipart=False)["e_tag"]

    def get(self, bucket: str, key: str) -> bytes:
        return bytes(obstore.get(self.store(bucket), key).bytes())

    def delete(self, bucket: str, key: str) -> None:
        obstore.delete(self.store(bucket), key)

    def list(self, bucket: str, prefix: str = "") -> list[str]:
        """The keys of a bucket that begin with a prefix of whole folders, sorted."""
        return sorted(each["path"] for some in obstore.list(self.store(bucket), prefix or None) for each in some)

    def _attempt(self) -> subprocess.Popen[bytes]:
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, self._filer_port, filer_grpc = free_ports(8)
        self.port = s3
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        identities = [
            {"name": name, "credentials": [{"accessKey": access, "secretKey": secret}], "actions": _RIGHTS[name]}
            for name, (access, secret) in self._credentials.items()
        ]
        (folder / "identities.json").write_text(json.dumps({"identities": identities}))
        (folder / "data").mkdir()
        (folder / "logs").mkdir()
        options = {
            "s3.config": folder / "identities.json",
            "dir": folder / "data",
            "ip": "127.0.0.1",
            "volume.max": 10_000,  # each bucket has volumes of its own
            "master.volumeSizeLimitMB": 1024,
            "master.telemetry": "false",
            "s3.autoCreateBucket": "false",
            "s3.port": s3,
            "s3.port.grpc": s3_grpc,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "master.port": master,
            "master.port.grpc": master_grpc,
            "volume.port": volume,
            "volume.port.grpc": volume_grpc,
            "filer.port": self._filer_port,
            "filer.port.grpc": filer_grpc,
            "s3.localSocket": folder / "s3.sock",
            "filer.localSocket": folder / "filer.sock",
            **self._more,
        }
        given = [f"-{name}={value}" for name, value in options.items()]
        log = folder / "log"
        command = [str(program("weed")), f"-logdir={folder / 'logs'}", "server", "-s3", "-filer", *given]
        process = start(command, log, {**os.environ, **_ONE_VOLUME})
        wait_until(self._ready, process, log)
        return process

    def _ready(self) -> bool:
        """Whether a signed request for a write succeeds: then the volume server has joined too."""
        if not (answers(self.port) and answers(self._filer_port)):
            return False
        try:
            self.make_bucket(_READY)
            self.put(_READY, "ready", b"yes")
        except (BaseError, RuntimeError, OSError, http.client.HTTPException):
            return False
        return True


# obstore takes these in `client_options` only: among its other options S3Store panics over them.
OF_THE_CLIENT = {"allow_http", "connect_timeout", "timeout", "user_agent", "proxy_url", "default_headers"}
ONCE = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
"""A `retry_config` under which each error comes out at once."""


def store_at(url: str, options: Mapping[str, Any], retry: Mapping[str, Any] = ONCE) -> Any:
    """The store at a URL such as `s3://bucket/prefix`. By default it tries each request once."""
    client = {key: value for key, value in options.items() if key in OF_THE_CLIENT}
    others = {key: value for key, value in options.items() if key not in OF_THE_CLIENT}
    return obstore.store.from_url(url, client_options=client, retry_config=retry, **others)
