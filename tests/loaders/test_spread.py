"""One large shard is measured by all idle threads of a build, with the result of one thread."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from orchdata.loaders.index import measuring as reading
from orchdata.loaders.index.build import build_index
from orchdata.loaders.recipe import Recipe, TextPreprocessor
from orchdata.loaders.storage.cache import CacheFolder


class Words:
    """A tokenizer that fails for some texts, and counts the threads that are in it."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def __call__(self, text: str) -> list[int]:
        self.threads.add(threading.get_ident())
        if "7" in text:
            raise ValueError(f"cannot read {text[:20]}")
        return list(text.encode())


def keep(record: dict[str, Any]) -> Any:
    return None if record["text"].startswith("5") else record


def test_the_index_is_the_same_with_any_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_CHUNK_SAMPLES", 8)
    path = tmp_path / "a.jsonl"
    lines = [{"text": str(number) * (number % 11)} if number % 13 else {"other": 1} for number in range(400)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for record in (None, keep):
        built = []
        for threads in (1, 4):
            tokenizer = Words()
            text = TextPreprocessor(tokenizer, id="words", max_tokens=16, overflow="split", thread_safe=True)
            cache = CacheFolder(tmp_path / f"{threads} {record is None}")
            index = build_index([str(path)], Recipe(text=text, record=record), cache=cache, num_threads=threads)
            built.append((index.build_id, index.path.read_bytes(), index.totals))
        assert built[0] == built[1]
        assert built[0][2]["bad"] > 30 and index.is_split


def test_ctrl_c_ends_all_threads_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(20_000)))
    job = f"""
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from orchdata.loaders.index.build import build_index
from orchdata.loaders.recipe import Recipe, TextPreprocessor
from orchdata.loaders.storage.cache import CacheFolder
threads, calls = set(), []
def slow(text):  # 20,000 s in one thread
    calls.append(text)
    threads.add(threading.get_ident())
    if len(threads) == 3:
        print("at work", flush=True)
        threads.add(0)
    time.sleep(1)
    return [1]
try:
    text = TextPreprocessor(slow, id="slow", thread_safe=True)
    build_index([{str(path)!r}], Recipe(text=text), cache=CacheFolder({str(tmp_path)!r}), num_threads=3)
except KeyboardInterrupt:
    # Each thread ends the text that it is at, and not those that it would tokenize with that.
    print("interrupted", len(calls) < 60, [each.name for each in threading.enumerate() if "orchdata" in each.name])
"""
    with subprocess.Popen([sys.executable, "-c", job], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "at work\n"
        child.send_signal(2)
        output, _ = child.communicate(timeout=120)
    assert output == "interrupted True []\n"
