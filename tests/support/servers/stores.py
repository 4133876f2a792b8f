"""A store of obstore from a URL and flat `storage_options`, as tests use it to look at a server on their own."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import obstore.store

# obstore takes these in `client_options` only: among its other options S3Store panics over them.
OF_THE_CLIENT = {"allow_http", "connect_timeout", "timeout", "user_agent", "proxy_url", "default_headers"}
ONCE = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
"""A `retry_config` under which each error comes out at once."""


def store_at(url: str, options: Mapping[str, Any], retry: Mapping[str, Any] = ONCE) -> Any:
    """The store at a URL such as `s3://bucket/prefix`. By default it tries each request once."""
    client = {key: value for key, value in options.items() if key in OF_THE_CLIENT}
    others = {key: value for key, value in options.items() if key not in OF_THE_CLIENT}
    return obstore.store.from_url(url, client_options=client, retry_config=retry, **others)
