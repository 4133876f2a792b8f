"""S3, Google Cloud Storage, Azure and HTTP through obstore, with what AWS tools find by themselves.

obstore finds credentials in the environment and on machines of AWS. It reads no profiles (boto3 reads their
credentials, region and endpoint), and takes a session token of the environment for keys that were given. Its own
retries are off: those of `requests` are the same for all clients.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from orchdata.loaders.environment import way_out
from orchdata.loaders.errors import PackageError
from orchdata.loaders.storage.remote.requests import Answer, Buffer, Client, Listed
from orchdata.loaders.storage.remote.urls import HTTP, ObjectUrl, without_secrets
from orchdata.loaders.storage.storage import FileVersion

_KEYS: Final[tuple[str, ...]] = ("access_key_id", "secret_access_key", "session_token", "token")
_OTHER_CREDENTIALS: Final = {"skip_signature", "role_arn", "web_identity_token_file", "credential_provider"}
_OF_ENVIRONMENT: Final = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
_FILES: Final = (("SHARED_CREDENTIALS", "credentials"), ("CONFIG", "config"))


def with_aws_settings(config: Mapping[str, Any], profile: str | None) -> dict[str, Any]:
    """Return the settings of a store of S3, with what a profile of AWS adds to them (None: AWS_PROFILE, or the default
    one). Given settings count first, then the environment. Raises ValueError for no such profile; PackageError without
    boto3.
    """
    settings = dict(config)
    given = {name.lower().removeprefix("aws_"): name for name in settings}
    if {"access_key_id", "secret_access_key"} <= given.keys():
        keys = {each: settings.pop(given[each]) for each in _KEYS if each in given}
        # Without a session token of the environment, which is of other keys.
        settings["credential_provider"] = lambda: {
            "access_key_id": keys["access_key_id"],
            "secret_access_key": keys["secret_access_key"],
            "token": keys.get("session_token") or keys.get("token"),
            "expires_at": None,
        }
    has_credentials = bool(given.keys() & (_OTHER_CREDENTIALS | set(_KEYS))) or (
        profile is None and any(map(os.environ.get, _OF_ENVIRONMENT))
    )
    has_endpoint, has_region = given.keys() & {"endpoint", "endpoint_url"}, given.keys() & {"region", "default_region"}
    files = [Path(os.environ.get(f"AWS_{name}_FILE") or f"~/.aws/{file}").expanduser() for name, file in _FILES]
    if (profile is None and not any(file.exists() for file in files)) or (
        has_credentials and has_endpoint and has_region
    ):
        return settings

    try:
        import boto3
        from botocore.configprovider import ConfiguredEndpointProvider
        from botocore.exceptions import ProfileNotFound
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise PackageError("boto3", str(error), way_out("boto3", error), "a profile of AWS") from error
    try:
        session = boto3.Session(profile_name=profile)
    except ProfileNotFound as error:
        raise ValueError(f"AWS has no such profile on this machine: {error}") from None
    if not has_credentials and session.get_credentials() is not None:
        settings["credential_provider"] = Boto3CredentialProvider(session)
    if session.region_name and not has_region:
        settings["region"] = os.environ.get("AWS_REGION") or session.region_name
    if not has_endpoint:  # which may be named for S3 alone
        of_profile = session._session
        provider = ConfiguredEndpointProvider(of_profile.full_config, of_profile.get_scoped_config(), "s3")
        if endpoint := provider.provide():
            settings["endpoint"] = endpoint
    return settings


SCHEMES: Final = ("s3", "gs", "az", *HTTP)
"""Schemes of URLs that obstore reads."""

_CLIENT: Final = {
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "default_headers", "http1_only", "http2_only"),
    *("http2_keep_alive_interval", "http2_keep_alive_timeout", "http2_keep_alive_while_idle", "http2_max_frame_size"),
    *("pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes", "proxy_url"),
    "randomize_addresses",
    *("read_timeout", "root_certificate", "timeout", "user_agent"),
}
_OURS: Final = ("anonymous", "profile", "retry_seconds")
_READ_TIMEOUT: Final = "30s"
_TIMEOUT: Final = "1h"  # for a whole answer, however slowly it comes: `read_timeout` ends one that stalls
_PUBLIC: Final = {*_OURS, *("endpoint", "region", "account_name", "container_name", "skip_signature")} | (
    _CLIENT - {"default_headers", "proxy_url"}
)
"""Options with values that may be shown."""


class ObstoreClient(Client):
    """Requests to a bucket, container or host through obstore, or through a store of the user's, used as it is."""

    def __init__(self, url: ObjectUrl, options: Mapping[str, Any], store: Any = None) -> None:
        self._url = url
        self._options = {
            name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()
        }
        self._is_given = store is not None
        self._obstore = library()
        self._secrets = [
            each
            for name, each in self._options.items()
            if name not in _PUBLIC and each not in ("true", "false") and len(each) > 3
        ]
        self._secrets += [url.query, url.user, *url.user.split(":", 1)[1:], *map(unquote, url.user.split(":", 1)[1:])]
        self._store = self._opened() if store is None else store

    def get(self, key: str, start: int, stop: int, version: str) -> Answer:
        # A weak etag never fits a condition: what the answer says is compared.
        match = {"if_match": version} if version.startswith('"') else {}

        def answer() -> Answer:
            result = self._obstore.get(self._store, key, options={"range": (start, stop), **match})
            file, begin = _version_of(result.meta), result.range[0]
            return Answer(memoryview(result.bytes()), begin, file)

        return self._called(answer)

    def head(self, key: str) -> FileVersion:
        if self._url.query:  # a signature is for one method
            first = {"range": (0, 1)}
            return self._called(lambda: _version_of(self._obstore.get(self._store, key, options=first).meta))
        return self._called(lambda: _version_of(self._obstore.head(self._store, key)))

    def pages(self, folder: str, after: str, *, deep: bool = True) -> Iterator[list[Listed]]:
        where = folder.rstrip("/") or None
        listing: Iterator[Any]
        if deep:
            listing = self._called(
                lambda: self._obstore.list(self._store, where, offset=after or None, chunk_size=1000)
            )
        else:
            found = self._called(lambda: self._obstore.list_with_delimiter(self._store, where))["objects"]
            listing = iter([[each for each in found if each["path"] > after]])
        while (page := self._called(lambda: next(listing, None))) is not None:
            yield [Listed(each["path"], _version_of(each)) for each in page]

    def put(self, key: str, data: Buffer) -> None:
        self._called(lambda: self._obstore.put(self._store, key, bytes(data)))

    def refresh(self) -> bool:
        if self._is_given:
            return False
        self._store = self._opened()
        return True

    def _opened(self) -> Any:
        from obstore.store import HTTPStore, from_url

        self._check_endpoint()
        url = self._url
        client: dict[str, Any] = {"read_timeout": _READ_TIMEOUT, "timeout": _TIMEOUT}
        client |= {name: value for name, value in self._options.items() if name in _CLIENT}
        config: dict[str, Any] = {
            name: value for name, value in self._options.items() if name not in (*_CLIENT, *_OURS)
        }
        if url.scheme in HTTP:
            if url.user:
                word = base64.b64encode(unquote(url.user).encode()).decode()
                client["default_headers"] = {"authorization": f"Basic {word}"}
            if url.scheme == "http":
                client["allow_http"] = "true"
            if config:
                raise ValueError(
                    f"storage_options has {', '.join(sorted(config))}, which {url.scheme}:// does not take"
                )
        elif "anonymous" in self._options:
            config["skip_signature"] = self._options["anonymous"]
        if url.scheme == "s3":
            config = with_aws_settings(config, self._options.get("profile"))
            # obstore reads it only where no client options are given.
            client.setdefault("allow_http", os.environ.get("AWS_ALLOW_HTTP", "false"))
        settings: dict[str, Any] = {"client_options": client, "retry_config": {"max_retries": 0}}
        try:
            if url.scheme in HTTP:
                return HTTPStore.from_url(f"{url.root}/{url.query}", **settings)
            return from_url(f"{url.root}/", **config, **settings)
        except BaseException as error:  # obstore panics for some values, which is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            words = self._words(error)
        way = ' (storage_options={"account_name": ...}, or AZURE_STORAGE_ACCOUNT_NAME)' if url.scheme == "az" else ""
        raise ValueError(f"{url.root} cannot be opened with these storage_options: {words}{way}")

    def _check_endpoint(self) -> None:
        """Raise ValueError for an endpoint that is no URL: obstore panics then, at the first request."""
        for name in ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url", "azure_storage_endpoint"):
            endpoint = self._options.get(name)
            if endpoint is not None and not re.match(r"https?://[^/?#\s]", endpoint):
                # Not shown: what is no URL may hold a password anywhere.
                raise ValueError(
                    f"storage_options {name} must be a URL such as https://storage.example.com, with its scheme"
                )

    def _words(self, error: BaseException) -> str:
        first = str(error).split("\n\nDebug source", 1)[0]
        return without_secrets(" ".join(first.split()), self._secrets)[:300]


def library() -> Any:
    """Return the package obstore. Raises PackageError."""
    try:
        import obstore
        import obstore.exceptions
    except ImportError as error:
        raise PackageError("obstore", str(error), way_out("obstore", error), "object storage") from error
    return obstore


def _version_of(meta: Any) -> FileVersion:
    """Return size and version: the etag, or the time of change where the server has no etags."""
    if tag := meta["e_tag"]:
        # Listings of Azure have no quotes, and answers have them.
        return FileVersion(meta["size"], tag if tag.startswith(('"', "W/")) else f'"{tag}"')
    changed = meta["last_modified"]
    return FileVersion(meta["size"], f"of {changed:%Y-%m-%dT%H:%M:%SZ}" if changed and changed.year > 1970 else "")
