"""URLs: their parts, the names without secrets, and messages without them."""

from __future__ import annotations

import pytest

from orchdata.loaders.storage.remote.urls import identity, same_name, without_secrets


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/a?b", "s3://bucket/a?b"),
        ("S3://Bucket/a", "s3://Bucket/a"),
        ("https://me:word@h/a%20b?sig=1#part", "https://h/a%20b"),
        ("https://token@h/a", "https://h/a"),
        ("ftp://me:word@h/a", "ftp://h/a"),
        ("abfs://container@account/a", "abfs://container@account/a"),
    ],
)
def test_identity_has_no_secret(url: str, name: str) -> None:
    assert identity(url) == name
    assert identity(name) == name


def test_two_spellings_have_one_name() -> None:
    assert same_name("https://H/a%20b?x") == same_name("https://u:p@h/a b")
    assert same_name("s3://b/a%20b") != same_name("s3://b/a b")
    assert same_name("s3://b/a") != same_name("s3://B/a")


@pytest.mark.parametrize(
    "text",
    [
        "at https://h/a?X-Sig=SECRET&b=c: no",
        "(https://h/a?sig=SECRET)",
        "https://h/a?sig=a,SECRET",
        "https://h/a?a=b)SECRET",
        "'https://me:SECRET@h/a'",
        "https://me:p@SECRET@h/a",
        "HTTPS://SECRET@h/a",
        "ftp://me:SECRET@h/a",
        "two: https://h/a?SECRET and https://h/b?SECRET",
        "the key is SECRET",
    ],
)
def test_messages_have_no_secret(text: str) -> None:
    shown = without_secrets(text, ["SECRET"] if "key" in text else [])
    assert "SECRET" not in shown
    assert shown.endswith("no") or "h/" in shown or "key" in shown
