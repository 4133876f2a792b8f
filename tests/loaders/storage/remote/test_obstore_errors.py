"""What exceptions of obstore mean: words of a key say nothing."""

from __future__ import annotations

import pytest

from orchdata.loaders.storage.remote.clients.obstore_errors import trouble_of

LOST = "Generic HTTP error: error sending request for url (http://host/{key}/0.tar) kind: Unknown"
METADATA = "Error getting credentials from http://169.254.169.254/latest/: Server returned error status: {status}"


@pytest.mark.parametrize("key", ["apple", "orange", "arrange/content-range", "certificate", "dns%20error"])
def test_a_lost_connection_is_passing_for_any_key(key: str) -> None:
    trouble = trouble_of(OSError(LOST.format(key=key)), "host", "words")
    assert (trouble.kind, trouble.reason) == ("passing", "the connection was lost")


def test_a_server_without_ranges_is_final() -> None:
    assert trouble_of(OSError("Received non-partial response when range requested"), "host", "words").kind == "final"


@pytest.mark.parametrize(
    "text",
    [
        "Content-Range header not present in partial response",
        "Failed to parse value for CONTENT_RANGE header",
        "Generic HTTP error: Requested 1536..1636, got 1539..1639",
    ],
)
def test_a_wrong_content_range_is_tried_again_as_a_wrong_length(text: str) -> None:
    trouble = trouble_of(OSError(text), "host", "words")
    assert (trouble.kind, trouble.is_odd) == ("passing", True)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("status code: 409 Conflict: <Code>OperationAborted</Code>", "passing"),
        ("status code: 400 Bad Request: <Code>RequestTimeout</Code>", "passing"),
        ("status code: 400 Bad Request: <Code>InvalidArgument</Code>", "final"),
    ],
)
def test_what_the_clients_of_the_vendors_try_again(text: str, kind: str) -> None:
    assert trouble_of(OSError(text), "host", "words").kind == kind


@pytest.mark.parametrize(("status", "kind"), [("503", "passing"), ("429", "passing"), ("404", "final")])
def test_cloud_metadata_that_fails_once_is_asked_again(status: str, kind: str) -> None:
    assert trouble_of(OSError(METADATA.format(status=status)), "bucket", "words").kind == kind
