"""Other servers that tests of storage use: Azurite, the stubs of Google's storage and of the hub, and the odd one."""

from __future__ import annotations

import gzip
import http.client
from collections.abc import Iterator
from typing import Any

import fsspec
import obstore
import pytest
from obstore.exceptions import GenericError, NotSupportedError, PreconditionError
from servers.azure_server import AzureServer
from servers.fixtures import Proxied
from servers.gcs_server import GcsServer
from servers.hub_server import HubServer
from servers.odd_server import HTML, OddServer
from servers.stores import store_at
from store_checks import CONTENT, check_conditions, check_reads_and_lists, keys_of, read


class TestGcs:
    def test_answers_as_a_store_of_objects(self, gcs_server: GcsServer) -> None:
        gcs_server.put(gcs_server.make_bucket("bucket"), "folder/object & more", CONTENT)
        store = gcs_server.store("bucket")
        check_reads_and_lists(store, "folder/object & more")
        check_conditions(store, "folder/object & more")
        with pytest.raises(FileNotFoundError):
            read(gcs_server.store("no-bucket"), "folder", 0, 1)

    @pytest.mark.parametrize("page_size", [1, 2, 3, 6, 7])
    def test_pages_have_each_key_once(self, gcs_server: GcsServer, page_size: int) -> None:
        gcs_server.page_size = page_size
        gcs_server.make_bucket("bucket")
        keys = ["a/1", "a/2", "a0", "b/c/1", "b/c/2", "d"]
        for key in keys:
            gcs_server.put("bucket", key, b"")
        store = gcs_server.store("bucket")
        assert keys_of(store) == keys
        assert len(gcs_server.requests()) == -(-len(keys) // page_size)
        assert keys_of(store, "b") == ["b/c/1", "b/c/2"]
        found = obstore.list_with_delimiter(store)
        assert found["common_prefixes"] == ["a", "b"]
        assert sorted(each["path"] for each in found["objects"]) == ["a0", "d"]

    def test_a_put_of_an_older_generation_is_refused(self, gcs_server: GcsServer) -> None:
        gcs_server.put(gcs_server.make_bucket("bucket"), "key", b"one")
        store = gcs_server.store("bucket")
        before = obstore.head(store, "key")
        gcs_server.put("bucket", "key", b"two")
        version = {"e_tag": before["e_tag"], "version": before["version"]}
        with pytest.raises(PreconditionError):
            obstore.put(store, "key", b"three", mode=version, use_multipart=False)
        assert gcs_server.get("bucket", "key") == b"two"

    def test_its_requests_are_counted_by_their_kinds(self, gcs_server: GcsServer, proxied: Proxied) -> None:
        gcs_server.put(gcs_server.make_bucket("bucket"), "key", CONTENT)
        proxy = proxied(gcs_server)
        store = gcs_server.store("bucket", proxy.endpoint)
        assert read(store, "key", 1, 9) == CONTENT[1:9]
        keys_of(store)
        obstore.head(store, "key")
        assert proxy.counts() == {"RANGE": 1, "LIST": 1, "HEAD": 1}


@pytest.mark.slow  # npm installs it
@pytest.mark.timeout(600)
class TestAzure:
    def test_answers_as_a_store_of_objects(self, azure_server: AzureServer, proxied: Proxied) -> None:
        azure_server.put(azure_server.make_container("container"), "folder/object & more", CONTENT)
        proxy = proxied(azure_server)
        for endpoint in (None, proxy.endpoint):
            store = azure_server.store("container", endpoint)
            check_reads_and_lists(store, "folder/object & more")
            check_conditions(store, "folder/object & more")
        assert proxy.counts()["RANGE"] == 5
        assert proxy.counts()["LIST"] == 2
        with pytest.raises(FileNotFoundError):
            read(azure_server.store("no-container"), "folder", 0, 1)

    def test_a_wrong_key_is_refused(self, azure_server: AzureServer) -> None:
        azure_server.put(azure_server.make_container("refusing"), "key", CONTENT)
        wrong = store_at("az://refusing/", azure_server.options | {"account_key": "d3Jvbmc="})
        with pytest.raises(GenericError, match="403"):
            keys_of(wrong)


class TestHub:
    @pytest.fixture
    def commits(self, hub_server: HubServer) -> tuple[str, str]:
        files = {"data/a.tar": CONTENT, "data/b.tar": b"b", "data/more/c.tar": b"c", "README.md": b"words"}
        return hub_server.commit("user/name", files), hub_server.commit("user/name", {"data/a.tar": b"changed"})

    @pytest.fixture
    def hub(self, hub_server: HubServer) -> Any:
        return fsspec.filesystem("hf", **hub_server.options)

    @pytest.mark.parametrize("page_size", [1, 2, 1000])
    def test_lists_a_revision(self, hub_server: HubServer, hub: Any, commits: tuple[str, str], page_size: int) -> None:
        hub_server.page_size = page_size
        folder = f"datasets/user/name@{commits[0]}/data"
        assert hub.find(folder) == [f"{folder}/{name}" for name in ("a.tar", "b.tar", "more/c.tar")]
        assert hub.glob(f"{folder}/*.tar") == [f"{folder}/a.tar", f"{folder}/b.tar"]
        assert hub.info(f"{folder}/a.tar")["size"] == len(CONTENT)

    def test_reads_ranges_of_a_revision(self, hub_server: HubServer, hub: Any, commits: tuple[str, str]) -> None:
        with hub.open(f"datasets/user/name@{commits[0]}/data/a.tar", cache_type="none") as file:
            file.seek(100)
            assert file.read(50) == CONTENT[100:150]
        assert [each.range for each in hub_server.requests("GET", "/resolve/")] == ["bytes=100-149"]
        assert hub.cat_file("datasets/user/name/data/a.tar") == b"changed"
        assert hub.cat_file("datasets/user/name@main/README.md") == b"words"

    def test_what_does_not_exist_is_not_found(self, hub: Any, commits: tuple[str, str]) -> None:
        for path in ("datasets/user/name/none.tar", "datasets/user/name@none/data/a.tar", "datasets/user/none/a.tar"):
            with pytest.raises(FileNotFoundError):
                hub.info(path)

    def test_a_token_is_asked_for(self, hub_server: HubServer, hub: Any, commits: tuple[str, str]) -> None:
        hub_server.token = "hf_secret"
        with pytest.raises(FileNotFoundError):
            hub.cat_file("datasets/user/name/data/a.tar")
        assert fsspec.filesystem("hf", **hub_server.options).cat_file("datasets/user/name/data/b.tar") == b"b"


class TestOdd:
    """Each switch, as a plain client sees it, and what obstore makes of it."""

    @pytest.fixture
    def odd(self, odd_server: OddServer) -> OddServer:
        odd_server.put("folder/a.bin", CONTENT)
        return odd_server

    @pytest.fixture
    def elsewhere(self) -> Iterator[OddServer]:
        with OddServer({"folder/a.bin": b"from elsewhere"}) as server:
            yield server

    def asked(self, odd: OddServer, path: str = "/folder/a.bin", **headers: str) -> tuple[int, Any, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", odd.port, timeout=20)
        connection.request("GET", path, headers={"Range": "bytes=10-19", **headers})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, answer.headers, content

    def test_without_oddities(self, odd: OddServer) -> None:
        status, headers, content = self.asked(odd)
        assert (status, content) == (206, CONTENT[10:20])
        assert headers["Content-Range"] == f"bytes 10-19/{len(CONTENT)}"
        etag = headers["ETag"]
        assert self.asked(odd, **{"If-Match": etag})[0] == 206
        odd.put("folder/a.bin", CONTENT[1:])
        assert self.asked(odd, **{"If-Match": etag})[0] == 412
        assert self.asked(odd, Range="bytes=-5")[2] == CONTENT[-5:]
        assert self.asked(odd, Range="bytes=99999-")[0] == 416
        assert self.asked(odd, "/none")[0] == 404
        assert [each.range for each in odd.requests(path="a.bin")][:2] == ["bytes=10-19"] * 2
        assert read(odd.store(), "folder/a.bin", 10, 20) == CONTENT[11:21]

    def test_without_etags(self, odd: OddServer) -> None:
        odd.etags = False
        status, headers, _ = self.asked(odd, **{"If-Match": '"any"'})
        assert (status, headers["ETag"]) == (206, None)

    def test_weak_etags(self, odd: OddServer) -> None:
        odd.weak_etags = True
        etag = self.asked(odd)[1]["ETag"]
        assert etag.startswith('W/"')
        assert self.asked(odd, **{"If-Match": etag})[0] == 412

    def test_ignored_ranges(self, odd: OddServer) -> None:
        odd.ignores_range = True
        assert self.asked(odd)[::2] == (200, CONTENT)
        with pytest.raises(NotSupportedError):
            read(odd.store(), "folder/a.bin", 10, 20)

    def test_more_and_fewer_bytes_than_asked(self, odd: OddServer) -> None:
        odd.extra_bytes = 3
        assert self.asked(odd)[2] == CONTENT[10:20] + bytes(3)
        assert len(read(odd.store(), "folder/a.bin", 10, 20)) == 13  # obstore does not see it
        odd.extra_bytes, odd.missing_bytes = 0, 3
        assert self.asked(odd)[2] == CONTENT[10:17]
        assert len(read(odd.store(), "folder/a.bin", 10, 20)) == 7

    def test_a_page_of_html(self, odd: OddServer) -> None:
        odd.says_html = True
        assert self.asked(odd)[::2] == (200, HTML)

    def test_compression(self, odd: OddServer) -> None:
        odd.says_gzip = True
        _, headers, content = self.asked(odd)
        assert headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(content) == CONTENT[10:20]
        assert read(odd.store(), "folder/a.bin", 10, 20) == content  # obstore gives it as it is

    def test_a_redirect_to_another_port(self, odd: OddServer, elsewhere: OddServer) -> None:
        odd.redirects_to = elsewhere.endpoint
        assert self.asked(odd)[0] == 302
        secret = {"default_headers": {"authorization": "Bearer secret"}}
        store = store_at(odd.endpoint, odd.options | secret)
        assert read(store, "folder/a.bin", 0, 4) == b"from"
        assert odd.requests()[-1].headers["authorization"] == "Bearer secret"
        assert "authorization" not in elsewhere.requests()[-1].headers

    def test_a_redirect_to_a_file(self, odd: OddServer) -> None:
        odd.redirects_to = "file:///etc/hostname"
        assert self.asked(odd)[1]["Location"] == "file:///etc/hostname"
        with pytest.raises(GenericError, match="302"):
            read(odd.store(), "folder/a.bin", 0, 4)

    def test_a_range_that_was_not_asked(self, odd: OddServer) -> None:
        odd.shifts_range = 5
        _, headers, content = self.asked(odd)
        assert (headers["Content-Range"], content) == (f"bytes 15-24/{len(CONTENT)}", CONTENT[10:20])
        with pytest.raises(GenericError, match=r"Requested 10\.\.20, got 15\.\.25"):
            read(odd.store(), "folder/a.bin", 10, 20)
        odd.shifts_range, odd.shifts_content = 0, 5
        _, headers, content = self.asked(odd)
        assert (headers["Content-Range"], content) == (f"bytes 10-19/{len(CONTENT)}", CONTENT[15:25])

    def test_a_range_without_the_size(self, odd: OddServer) -> None:
        odd.hides_size = True
        assert self.asked(odd)[1]["Content-Range"] == "bytes 10-19/*"
        with pytest.raises(GenericError, match="CONTENT_RANGE"):
            read(odd.store(), "folder/a.bin", 10, 20)

    def test_a_time_of_change_that_changes(self, odd: OddServer) -> None:
        assert self.asked(odd)[1]["Last-Modified"] == self.asked(odd)[1]["Last-Modified"]
        odd.changes_modified = True
        assert self.asked(odd)[1]["Last-Modified"] != self.asked(odd)[1]["Last-Modified"]

    def test_a_signature_in_the_query(self, odd: OddServer) -> None:
        odd.signature = "secret"
        assert self.asked(odd)[0] == 403
        assert self.asked(odd, "/folder/a.bin?sig=wrong")[0] == 403
        assert self.asked(odd, "/folder/a.bin?sig=secret")[0] == 206
        assert read(store_at(odd.url("", sig="secret"), odd.options), "folder/a.bin", 0, 5) == CONTENT[:5]

    def test_basic_authentication(self, odd: OddServer) -> None:
        odd.credentials = ("user", "word")
        status, headers, _ = self.asked(odd)
        assert (status, headers["WWW-Authenticate"]) == (401, 'Basic realm="odd"')
        assert self.asked(odd, Authorization="Basic dXNlcjp3b3Jk")[0] == 206
        assert self.asked(odd, Authorization="Basic d3Jvbmc6d29yZA==")[0] == 401

    def test_a_status(self, odd: OddServer) -> None:
        odd.status = 503
        assert self.asked(odd)[0] == 503
