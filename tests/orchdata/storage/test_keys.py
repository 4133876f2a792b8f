"""Keys and patterns: what is listed, what a glob matches, and which keys no client can read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import boto3
import pytest
from remote_epochs import Epochs, epoch, remote
from servers.fixtures import Proxied
from servers.gcs_server import GcsServer
from servers.http_server import HttpServer
from servers.s3_server import S3Server

import orchdata as od

KEYS = [
    "a b",
    "a%20c",
    "a%2Fb",
    "a+b",
    "a#b",
    "a?b",
    "a*b",
    "ü",
    "u\u0308",
    "~x",
    "[x]",
    "{x}",
    "a&b=c",
    "日本",
    "a'b\"c",
]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> Epochs:
    return Epochs(tmp_path_factory.mktemp("shards"), shards=1, samples=6)


def put(server: S3Server, bucket: str, key: str, content: bytes) -> None:
    """Store an object of any key: obstore refuses some."""
    options = server.options
    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint"],
        aws_access_key_id=options["access_key_id"],
        aws_secret_access_key=options["secret_access_key"],
        region_name=options["region"],
    )
    client.put_object(Bucket=bucket, Key=key, Body=content)
    client.close()


@pytest.mark.parametrize("name", KEYS)
def test_a_key_of_any_characters(s3_server: S3Server, new_bucket: Callable[[], str], local: Epochs, name: str) -> None:
    bucket, key = new_bucket(), f"a folder/{name}.tar"
    put(s3_server, bucket, key, Path(local.paths[0]).read_bytes())
    for paths in (f"s3://{bucket}/a folder/*.tar", f"s3://{bucket}/**/*.tar", [f"s3://{bucket}/{key}"]):
        dataset = remote(paths, s3_server.options)
        assert dataset.urls == (f"s3://{bucket}/{key}",)
        assert len(epoch(dataset)) == len(local.local)


@pytest.mark.parametrize("name", ["a\tb", "a\nb", "a\x7fb", "a\x01b"])
def test_a_key_with_control_characters_is_refused(
    s3_server: S3Server, new_bucket: Callable[[], str], name: str
) -> None:
    bucket = new_bucket()
    with pytest.raises(ValueError, match="control characters cannot be read") as caught:
        remote(f"s3://{bucket}/{name}.tar", s3_server.options)
    assert "\n" not in str(caught.value)
    if name == "a\x01b":  # of XML, no such character can be listed
        return
    put(s3_server, bucket, f"{name}.tar", b"")
    with pytest.raises(od.StorageError, match=r"b.tar.*: name the shards with braces") as listed:
        remote(f"s3://{bucket}/*.tar", s3_server.options).index()
    assert "\n" not in str(listed.value)


@pytest.mark.parametrize("key", ["/a.tar", "a//b.tar", "./a.tar", "a/../b.tar"])
@pytest.mark.parametrize("root", ["s3://bucket", "https://host", "gs://bucket", "az://container"])
def test_a_key_that_clients_would_take_for_another_is_refused(root: str, key: str) -> None:
    with pytest.raises(ValueError, match="an empty part, '.' or '..' cannot be read"):
        remote(f"{root}/{key}")


@pytest.fixture(scope="module")
def listed(s3_server: S3Server, local: Epochs) -> str:
    """A bucket of many keys."""
    bucket = s3_server.make_bucket("patterns")
    content = Path(local.paths[0]).read_bytes()
    for key in ("a1.tar", "a2.tar", "b1.tar", "c/a1.tar", "c/d/a1.tar", ".h.tar", ".d/a1.tar", "c/.h.tar", "x[1].tar"):
        s3_server.put(bucket, key, content)
    return bucket


@pytest.mark.parametrize(
    ("patterns", "keys"),
    [
        (["*.tar"], ["a1", "a2", "b1", "x[1]"]),
        (["a?.tar"], ["a1", "a2"]),
        (["[!a]1.tar"], ["b1"]),
        (["[a-b]1.tar"], ["a1", "b1"]),
        (["*/a1.tar"], ["c/a1"]),
        (["**/a1.tar"], ["a1", "c/a1", "c/d/a1"]),
        (["c/**/*.tar"], ["c/a1", "c/d/a1"]),
        (["c/**"], ["c/a1", "c/d/a1"]),
        ([".*.tar"], [".h"]),
        (["x[1].tar"], ["x[1]"]),  # the key of this name is the only match
        (["{b,a}1.tar"], ["b1", "a1"]),
        (["{b,a}*.tar"], ["b1", "a1", "a2"]),
        (["c/*.tar", "a?.tar"], ["c/a1", "a1", "a2"]),
    ],
)
def test_what_a_pattern_matches(s3_server: S3Server, listed: str, patterns: list[str], keys: list[str]) -> None:
    dataset = remote([f"s3://{listed}/{pattern}" for pattern in patterns], s3_server.options)
    assert list(dataset.urls) == [f"s3://{listed}/{key}.tar" for key in keys]


def test_a_pattern_of_one_folder_lists_no_other(gcs_server: GcsServer) -> None:
    gcs_server.page_size = 1000
    bucket = gcs_server.make_bucket("folders")
    for number in range(5000):
        gcs_server.put(bucket, f"d/other/{number:05}.tar", b"")
    for number in range(2):
        gcs_server.put(bucket, f"d/{number}.tar", b"")
    for pattern, shards, requests in (("d/*.tar", 2, 1), ("d/**/*.tar", 5002, 6), ("d/other/*.tar", 5000, 5)):
        gcs_server.clear()
        assert len(remote(f"gs://{bucket}/{pattern}", gcs_server.options).urls) == shards
        assert len(gcs_server.requests()) == requests


def test_a_page_that_fails_is_listed_again_from_there(gcs_server: GcsServer, proxied: Proxied) -> None:
    from servers.proxy import Fault

    gcs_server.page_size = 1000
    bucket = gcs_server.make_bucket("pages")
    for number in range(5000):
        gcs_server.put(bucket, f"{number:05}.tar", b"")
    proxy = proxied(gcs_server, Fault("cut", ordinals=(3,)), Fault("fewer", ordinals=(5,)))
    dataset = remote(f"gs://{bucket}/*.tar", gcs_server.options_at(proxy.endpoint))
    assert len(dataset.urls) == 5000


def test_http_has_no_listing(http_server: HttpServer) -> None:
    with pytest.raises(ValueError, match="HTTP servers have no listing"):
        remote(http_server.url("a/*.tar"))
    with pytest.raises(ValueError, match="HTTP servers have no listing"):
        remote(http_server.url("a/[ab].tar"))
    assert remote(http_server.url("a/{a,b}.tar?x=*")).urls == tuple(http_server.url(f"a/{each}.tar") for each in "ab")
