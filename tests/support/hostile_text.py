"""Texts, chats and names of members that are not what a reader would think of."""

# ruff: noqa: E731 - small makers of bytes are next to the one line that takes them
from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator

from hostile import EITHER, FAILS, MIB, HostileSample, zeros
from shard_factory import chat, jpeg


def text_samples() -> Iterator[HostileSample]:
    def one(
        name: str, fate: str, field: str, make: Callable[[], bytes], reason: str = "", *, heavy: bool = False
    ) -> HostileSample:
        return HostileSample(name, fate, lambda: {field: make()}, reason, heavy=heavy)

    yield one(
        "a gzip bomb of 1 GiB", FAILS, "txt.gz", lambda: zeros(1 << 30, wbits=31), "Limits.text_bytes", heavy=True
    )
    yield one("100,000 empty gzip members", FAILS, "txt.gz", lambda: gzip.compress(b"", mtime=0) * 100_000)
    yield one("a cut gzip", FAILS, "txt.gz", lambda: gzip.compress(b"text" * 1000)[:-9])
    yield one("gzip of gzip", FAILS, "txt.gz", lambda: gzip.compress(gzip.compress(b"text", mtime=0)))
    yield one("text of 16 MiB and a byte", FAILS, "txt", lambda: b"x" * (16 * MIB + 1), "Limits.text_bytes")
    yield one("two million placeholders", FAILS, "txt", lambda: b"<image>" * 2_000_000, heavy=True)
    yield one("text that is not UTF-8", FAILS, "txt", lambda: b"\xff\xfe\x00\xd8" * 10)
    yield one("empty text", FAILS, "txt", lambda: b"")
    yield one("a byte order mark alone", FAILS, "txt", lambda: b"\xef\xbb\xbf")
    yield one("zero bytes", EITHER, "txt", lambda: bytes(1000))
    turns = lambda **turn: json.dumps([turn, {"role": "assistant", "content": "answer"}]).encode()
    yield one("an item whose type is a list", FAILS, "json", lambda: turns(role="user", content=[{"type": ["text"]}]))
    yield one("an item whose type is a dict", FAILS, "json", lambda: turns(role="user", content=[{"type": {}}]))
    yield one("an item whose type is null", FAILS, "json", lambda: turns(role="user", content=[{"type": None}]))
    yield one(
        "a text item without text", FAILS, "json", lambda: turns(role="user", content=[{"type": "text", "text": 5}])
    )
    yield one("items that are lists", FAILS, "json", lambda: turns(role="user", content=[["text"]]))
    yield one("content that is a number", FAILS, "json", lambda: turns(role="user", content=5))
    yield one("content that is a dict", FAILS, "json", lambda: turns(role="user", content={"type": "text"}))
    yield one("a role that is a list", FAILS, "json", lambda: turns(role=["user"], content="hi"))
    yield one("a role that is a dict", FAILS, "json", lambda: turns(role={}, content="hi"))
    yield one("a role that is null", FAILS, "json", lambda: turns(role=None, content="hi"))
    yield one("turns that are lists", FAILS, "json", lambda: b"[[1], [2]]")
    yield one("turns that are null", FAILS, "json", lambda: b'{"messages": [null, null]}')
    yield one("messages that are a dict", FAILS, "json", lambda: b'{"messages": {"role": "user"}}')
    yield one("messages that are a number", FAILS, "json", lambda: b'{"messages": 7}')
    yield one("from and value that are lists", FAILS, "json", lambda: b'{"conversations": [{"from": [], "value": []}]}')
    yield one("JSON nested 100,000 deep", FAILS, "json", lambda: b"[" * 100_000 + b"]" * 100_000)
    yield one("dicts nested 100,000 deep", FAILS, "json", lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
    deep = lambda: b'{"messages":[{"role":"user","content":' + b'[{"text":' * 3000 + b'"x"' + b"}]" * 3000 + b"}]}"
    yield one("content nested 3,000 deep", FAILS, "json", deep)
    number = lambda: b'[{"role": "user", "content": "hi", "id": ' + b"1" * 5000 + b"}]"
    yield one("JSON with a number of 5,000 digits", EITHER, "json", number)
    yield one(
        "JSON with 1e999999 and NaN",
        EITHER,
        "json",
        lambda: b'[{"role": "user", "content": "a", "x": [1e999999, NaN]}]',
    )
    yield one("a lone surrogate", FAILS, "json", lambda: b'[{"role": "user", "content": "\\ud800"}]')
    yield one("a lone surrogate in a role", FAILS, "json", lambda: b'[{"role": "\\udfff", "content": "a"}]')
    yield one("JSON as UTF-16", EITHER, "json", lambda: chat("a", "b").decode().encode("utf-16"))
    yield one("JSON that is a number", FAILS, "json", lambda: b"1")
    yield one("JSON that is null", FAILS, "json", lambda: b"null")
    yield one("JSON that is empty", FAILS, "json", lambda: b"")
    yield one("JSON of no turns", FAILS, "json", lambda: b"[]")
    yield one(
        "200,000 turns",
        EITHER,
        "json",
        lambda: json.dumps([{"role": "user", "content": "a"}] * 200_000).encode(),
        heavy=True,
    )
    yield one(
        "a role of 10 MiB",
        EITHER,
        "json",
        lambda: json.dumps([{"role": "u" * 10 * MIB, "content": "a"}]).encode(),
        heavy=True,
    )
    yield one(
        "jsonl of 100,000 lines",
        EITHER,
        "jsonl",
        lambda: chat("a", "b") + b"\n" + (chat("a", "b") + b"\n") * 100_000,
        heavy=True,
    )
    null_calls = [{"role": "user", "content": "call"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]
    yield one("an answer of tool calls alone", FAILS, "json", lambda: json.dumps(null_calls).encode())


def named_samples() -> Iterator[HostileSample]:
    def one(name: str, fate: str, member: str) -> HostileSample:
        return HostileSample(name, fate, lambda: {member: jpeg(40, 40), "txt": b"text"})

    yield one("a field of 5,000 digits", EITHER, "1" * 5000 + ".jpg")
    yield one("a field of 5,000 dots", EITHER, "." * 5000 + "jpg")
    yield one("a field of 60,000 letters", EITHER, "x" * 60_000 + ".jpg")
    yield one("a field of Arabic digits", EITHER, "٣٤.jpg")
    yield one("a field with a superscript", EITHER, "²³.jpg")
    yield one("a field of spaces", EITHER, "   .jpg")
    keys = {
        "a key of 60,000 letters": "k" * 60_000,
        "a key that leads out": "../../../../etc/passwd",
        "an absolute key": "/etc/passwd",
        "a key with a newline": "new\nline",
        "a key with an escape": "\x1b[31mred",
        "a key that is not UTF-8": "caf\udce9",
        "an empty key": "",
        "a key of 2,000 folders": "d/" * 2000 + "k",
    }
    for name, key in keys.items():
        yield HostileSample(name, EITHER, lambda: {"txt": b"text"}, key=key)
