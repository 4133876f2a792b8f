"""Listings of S3 by boto3, where obstore's end: for one key that it cannot have, it refuses the whole page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchdata.loaders.environment import way_out
from orchdata.loaders.errors import PackageError
from orchdata.loaders.storage.remote.clients.client import Listed
from orchdata.loaders.storage.storage import FileVersion


def pages(store: Any, folder: str, after: str, *, deep: bool) -> Iterator[list[Listed]]:
    """Yield the objects as `Client.pages`, without those that have an empty or dot part.

    Args:
        store: an S3Store of obstore, whose settings are used.

    Raises PackageError, and exceptions of botocore.
    """
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
    except ImportError as error:
        raise PackageError("boto3", str(error), way_out("boto3", error), "a bucket with such keys") from error
    given, client = store.config, store.client_options or {}
    keys = given if store.credential_provider is None else store.credential_provider()
    proxy = client.get("proxy_url")
    service = boto3.client(
        "s3",
        endpoint_url=given.get("endpoint"),
        region_name=given.get("region"),
        aws_access_key_id=keys.get("access_key_id"),
        aws_secret_access_key=keys.get("secret_access_key"),
        aws_session_token=keys.get("token"),
        verify=False if client.get("allow_invalid_certificates") == "true" else None,
        config=Config(
            signature_version=UNSIGNED if given.get("skip_signature") == "true" else None,
            proxies={"http": proxy, "https": proxy} if proxy else None,
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"} if "endpoint" in given else None,
        ),
    )
    root = f"{store.prefix}/" if store.prefix else ""
    more = {} if deep else {"Delimiter": "/"}
    more |= {"StartAfter": root + after} if after else {}
    listing = service.get_paginator("list_objects_v2").paginate(Bucket=given["bucket"], Prefix=root + folder, **more)
    for page in listing:
        yield [
            Listed(each["Key"][len(root) :], FileVersion(each["Size"], each["ETag"]))
            for each in page.get("Contents", ())
            if not {"", ".", ".."} & set(each["Key"].split("/"))
        ]
