"""A missing library of object storage is one error with the command that installs it."""

from __future__ import annotations

import sys

import pytest

import orchdata as od
from orchdata.loaders.errors import PackageError


@pytest.mark.parametrize(
    ("url", "package"), [("s3://bucket/a-{0..1}.tar", "obstore"), ("nosuch://place/a.tar", "fsspec")]
)
def test_a_missing_library_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch, url: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    dataset = od.ShardDataset(url, storage_options={"region": "eu-1"})  # nothing is opened yet
    with pytest.raises(PackageError, match=rf"{package}.*pip install") as raised:
        dataset.index()
    assert raised.value.package == package
