"""What a user meets first: credentials, buckets, patterns and options that are wrong. Each is one clear error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from remote_epochs import Epochs, epoch, remote
from servers.fixtures import Proxied
from servers.s3_server import S3Server
from servers.stub_server import Answer, Seen, StubServer

import orchdata as od

BRACES = "omni-{000000..000001}.tar"


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No credentials of whoever runs the tests count."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    yield


def said(error: type[Exception], url: str, options: dict[str, Any]) -> str:
    """What is raised for an epoch, on one line."""
    with pytest.raises(error) as caught:
        epoch(remote(url, options), on_error="skip")
    text = str(caught.value)
    assert "\n" not in text
    assert "169.254" not in text
    return text


def test_wrong_credentials(s3_server: S3Server, bucket: str) -> None:
    wrong = s3_server.options | {"secret_access_key": "wrong-and-secret"}
    text = said(od.StorageError, f"s3://{bucket}/train/*.tar", wrong)
    assert text.startswith(
        f"s3://{bucket}/train/: cannot be listed: may not be listed with these credentials (HTTP 403"
    )
    text = said(od.StorageError, f"s3://{bucket}/train/{BRACES}", s3_server.options_of("nothing"))
    assert text.startswith(f"s3://{bucket}/train/omni-000000.tar: cannot be looked at: may not be read")


def test_no_credentials(s3_server: S3Server, bucket: str) -> None:
    options = {name: s3_server.options[name] for name in ("endpoint", "allow_http", "region")}
    text = said(od.StorageError, f"s3://{bucket}/train/*.tar", options)
    assert "no credentials were found" in text
    assert "anonymous=true" in text


def test_no_such_bucket(s3_server: S3Server) -> None:
    for pattern in ("*.tar", BRACES):
        text = said(od.StorageError, f"s3://no-such-bucket/train/{pattern}", s3_server.options)
        assert "there is no bucket s3://no-such-bucket" in text


def test_a_bucket_that_may_be_read_and_not_listed(s3_server: S3Server, bucket: str, local: Epochs) -> None:
    reader = s3_server.options_of("reader")
    text = said(od.StorageError, f"s3://{bucket}/train/*.tar", reader)
    assert "may not be listed with these credentials" in text
    assert "with braces" in text
    assert epoch(remote(f"s3://{bucket}/train/{BRACES}", reader)) == local.local


class Refusing(StubServer):
    """An S3 server that refuses each request, as a server says it."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__()
        self.status = status
        self.code = code

    def answer(self, seen: Seen) -> Answer:
        body = f"<Error><Code>{self.code}</Code><Message>no</Message></Error>"
        return Answer(self.status, body.encode(), {"Content-Type": "application/xml"})


CREDENTIALS = {"access_key_id": "key", "secret_access_key": "the-secret-key", "region": "eu-1", "allow_http": True}


@pytest.mark.parametrize(
    ("status", "code", "requests", "words"),
    [
        (403, "ExpiredToken", 2, "with these credentials (HTTP 403 ExpiredToken)"),
        (400, "ExpiredToken", 2, "with these credentials (HTTP 400 ExpiredToken)"),
        (403, "RequestTimeTooSkewed", 2, "with these credentials (HTTP 403 RequestTimeTooSkewed)"),
        (403, "AccessDenied", 2, "may not be listed with these credentials"),
        (301, "PermanentRedirect", 1, "the bucket is in another region (HTTP 301"),
        (400, "AuthorizationHeaderMalformed", 1, "the bucket is in another region"),
        (404, "NoSuchBucket", 1, "there is no bucket s3://some-bucket"),
        (418, "Teapot", 1, "the server refuses (HTTP 418 Teapot)"),
    ],
)
def test_what_a_server_says(status: int, code: str, requests: int, words: str) -> None:
    with Refusing(status, code) as server:
        text = said(od.StorageError, "s3://some-bucket/a/*.tar", CREDENTIALS | {"endpoint": server.endpoint})
        assert words in text
        assert len(server.requests()) == requests  # credentials are read again once


def test_expired_credentials_are_read_again(
    s3_server: S3Server, bucket: str, local: Epochs, proxied: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the environment, in the middle of an epoch."""
    from remote_epochs import LOADER, digests
    from servers.proxy import Fault

    proxy = proxied(s3_server)
    options = s3_server.options_of("all", proxy.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options.pop("access_key_id"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options.pop("secret_access_key"))
    dataset = remote(f"s3://{bucket}/train/{BRACES}", options)
    dataset.index()
    loader = od.DataLoader(dataset, num_threads=0, **LOADER)
    batches = iter(loader)
    found = digests([next(batches)])
    proxy.faults = (Fault("status", status=403, times=1),)
    assert found + digests(batches) == local.local
    assert loader.stats()["reads"]["requests"]["again"] == 1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("end_point", "x", "cannot be opened with these storage_options: Configuration key: 'end_point' is not valid"),
        ("read_timeout", "soon", "cannot be opened with these storage_options"),
        ("endpoint", "nonsense", "endpoint must be a URL such as https://"),
        ("root_certificate", "secret-certificate", "cannot be opened with these storage_options"),
        ("profile", "no-such-profile", "AWS has no such profile on this machine: The config profile (no-such-profile)"),
        ("retry_seconds", "soon", "retry_seconds is a number of seconds"),
    ],
)
def test_options_that_cannot_be(s3_server: S3Server, bucket: str, name: str, value: Any, words: str) -> None:
    options = s3_server.options | {name: value}
    if name == "profile":  # asked only where no credentials are given
        options = {key: options[key] for key in ("profile", "endpoint", "allow_http", "region")}
    text = said(ValueError, f"s3://{bucket}/train/*.tar", options)
    assert words in text
    assert s3_server.secret_key not in text
    assert "secret-" not in text


def test_a_host_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(od.StorageError, "http://no-such-host.invalid/a.tar", {"retry_seconds": 0})
    assert "the name of the host cannot be resolved" in text


def write_profile(home: Path, server: S3Server, name: str, secret: str) -> None:
    folder = home / ".aws"
    folder.mkdir()
    section = name if name == "default" else f"profile {name}"
    (folder / "config").write_text(f"[{section}]\nregion = {server.region}\nendpoint_url = {server.endpoint}\n")
    keys = f"aws_access_key_id = {server.access_key}\naws_secret_access_key = {secret}\n"
    (folder / "credentials").write_text(f"[{name}]\n{keys}")


@pytest.mark.slow_cases("team")
@pytest.mark.parametrize(("name", "by"), [("default", "nothing"), ("team", "environment"), ("team", "options")])
def test_a_profile_of_aws_is_found(
    s3_server: S3Server, bucket: str, local: Epochs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, by: str
) -> None:
    """Credentials, region and endpoint are those of the profile; an endpoint without encryption must be allowed."""
    write_profile(tmp_path, s3_server, name, s3_server.secret_key)
    options: dict[str, Any] = {"allow_http": True}
    if by == "environment":
        monkeypatch.setenv("AWS_PROFILE", name)
    elif by == "options":
        options["profile"] = name
    url = f"s3://{bucket}/train/{BRACES}"
    assert epoch(remote(url, options), num_workers=1) == local.local
    options.pop("allow_http")
    assert "allow_http=true" in said(od.StorageError, url, options)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert epoch(remote(url, options)) == local.local


def test_given_keys_take_no_token_of_the_environment(
    s3_server: S3Server, bucket: str, local: Epochs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("ACCESS_KEY_ID", "ASIA"),
        ("SECRET_ACCESS_KEY", "other"),
        ("SESSION_TOKEN", "of-another-login"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    assert epoch(remote(f"s3://{bucket}/train/{BRACES}", s3_server.options)) == local.local


def test_a_scheme_that_no_package_knows() -> None:
    with pytest.raises(
        od.StorageError, match="foo://bucket/a.tar: cannot be looked at: .*knows no file system of foo.*store="
    ):
        remote("foo://bucket/a.tar").index()


@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [
        ("ftp://127.0.0.1:1/a.tar", od.StorageError, "the server cannot be reached: refused"),
        (
            "az://container/a.tar",
            ValueError,
            "az://container cannot be opened with these storage_options: .*Account must.*account_name",
        ),
        ("github://owner/a.tar", od.StorageError, "github://owner/a.tar: .* 'org' and 'repo'"),
    ],
)
def test_an_error_without_settings_names_the_url_and_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, url: str, kind: type[Exception], words: str
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    assert re.search(words, said(kind, url, {"retry_seconds": 0}))
