"""Shards from servers of HTTP: passwords and signatures, redirects, and servers that answer oddly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from remote_epochs import LOADER, RECIPE, Epochs, digests, epoch, remote
from servers.odd_server import OddServer

import orchdata as od

NAMES = "omni-{000000..000001}.tar"
SHORT = {"retry_seconds": 0.3}


@pytest.fixture
def server(odd_server: OddServer, local: Epochs) -> OddServer:
    for path in local.paths:
        odd_server.put(f"d/{Path(path).name}", Path(path).read_bytes())
    return odd_server


def test_a_name_and_a_password(server: OddServer, local: Epochs) -> None:
    server.credentials = ("me", "p@ss word")
    place = server.endpoint.removeprefix("http://")
    dataset = remote(f"http://me:p%40ss%20word@{place}/d/{NAMES}", SHORT)
    assert dataset.urls[0] == server.url("d/omni-000000.tar")
    assert epoch(dataset) == local.local
    assert epoch(dataset, num_workers=1) == local.local
    with pytest.raises(od.StorageError, match="may not be read with these credentials .HTTP 401") as caught:
        remote(f"http://me:wrong-one@{place}/d/{NAMES}", SHORT).index(rebuild=True)
    assert "wrong-one" not in str(caught.value)


def test_a_refreshed_signature_finds_the_same_index(server: OddServer, local: Epochs) -> None:
    server.signature = "first-secret"
    first = remote([server.url(f"d/omni-00000{number}.tar", sig="first-secret") for number in (0, 1)], SHORT)
    loader = od.DataLoader(first, num_workers=1, **LOADER)
    assert digests(loader) == local.local
    for seen in (loader.state_dict(), first.urls, [shard.url for shard in first.index().shards]):
        assert "secret" not in json.dumps(seen)
    assert "secret" not in repr(first) + repr(loader) + repr(first.files) + repr(first.reading)
    server.signature = "second-secret"
    server.clear()
    second = remote([server.url(f"d/omni-00000{number}.tar", sig="second-secret") for number in (0, 1)], SHORT)
    assert second.index().build_id == first.index().build_id
    assert not server.requests("GET")  # each is looked at, and nothing is read
    continued = od.DataLoader(second, **LOADER)
    continued.load_state_dict(loader.state_dict())
    whole = od.DataLoader(od.ShardDataset(local.paths, recipe=RECIPE), **LOADER)
    whole.set_epoch(1)
    assert digests(continued) == digests(whole)


def test_a_redirect_to_another_host_is_followed_without_credentials(server: OddServer, local: Epochs) -> None:
    with OddServer(server.files) as other:
        server.credentials = ("me", "word")
        server.redirects_to = other.endpoint.replace("127.0.0.1", "localhost")
        place = server.endpoint.removeprefix("http://")
        try:
            assert epoch(remote(f"http://me:word@{place}/d/{NAMES}", SHORT)) == local.local
        except od.StorageError as error:  # a client may refuse to follow
            assert "redirects to where no request may go" in str(error)
        assert not [each for each in other.requests() if "authorization" in each.headers]


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "ignores Range": ({"ignores_range": True}, "does not answer ranges of bytes as asked"),
    "says HTML": ({"says_html": True}, "does not answer ranges of bytes as asked"),
    "sends more": ({"extra_bytes": 5}, r"the answer has \d+ bytes from \d+ on, of \d+, in place of"),
    "sends less": ({"missing_bytes": 5}, r"the answer has \d+ bytes from \d+ on, of \d+, in place of"),
    "compresses": ({"says_gzip": True}, r"the answer has \d+ bytes from \d+ on, of \d+, in place of"),
    "shifts ranges": ({"shifts_range": 3}, "other bytes than were asked for"),
    "hides the size": ({"hides_size": True}, "other bytes than were asked for"),
    "redirects to a file": ({"redirects_to": "file:///etc/hostname"}, "redirects to where no request may go"),
    "fails": ({"status": 500}, "the server failed .HTTP 500"),
    "is gone": ({"status": 404}, "no such object"),
    "lost its etags": ({"etags": False}, "was replaced since it was indexed"),
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_answer_is_one_error_and_no_sample(server: OddServer, odd: str) -> None:
    switches, words = ODD[odd]
    dataset = remote(f"{server.endpoint}/d/{NAMES}", SHORT)
    loader = od.DataLoader(dataset, on_error="skip", **LOADER)
    for name, value in switches.items():
        setattr(server, name, value)
    with pytest.raises((od.StorageError, od.StaleIndexError), match=words) as caught:
        list(loader)
    assert "\n" not in str(caught.value)
    assert loader.stats()["failures"]["count"] == 0


@pytest.mark.parametrize("odd", sorted(ODD.keys() - {"lost its etags", "sends more", "sends less", "compresses"}))
def test_an_odd_answer_while_indexing_is_no_bad_shard(server: OddServer, odd: str) -> None:
    switches, _ = ODD[odd]
    for name, value in switches.items():
        setattr(server, name, value)
    with pytest.raises(od.StorageError):
        remote(f"{server.endpoint}/d/{NAMES}", SHORT).index()
    for name, value in switches.items():
        setattr(server, name, type(value)())
    assert len(remote(f"{server.endpoint}/d/{NAMES}", SHORT).index().bad_rows()) == 0
