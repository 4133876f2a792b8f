"""Samples that take long are reported of, and judged by work that is counted: never by a clock."""

from __future__ import annotations

import base64
import gc
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from shard_factory import write_shard
from video_clips import animation, clip

import orchdata as od
from orchdata.loaders import slow
from orchdata.loaders.index.build import build_index
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.video.decode import open_video
from orchdata.loaders.shards.jsonl.named_media import media_of
from orchdata.loaders.slow import AFTER_SECONDS, Watcher, here
from orchdata.loaders.storage.retries import tried
from orchdata.loaders.text.jinja import Inputs, JinjaTemplate, Work
from orchdata.loaders.text.loss_spans import loss_spans
from orchdata.loaders.text.template import ChatTemplate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@contextmanager
def at_work(key: str, *, waits: bool = False) -> Iterator[None]:
    """A thread that is at a sample of shard a.tar, or waits for its storage."""
    ready, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        ready.set()
        go_on.wait(60)

    def run() -> None:
        with here().at("a.tar"):
            here().key = key
            tried("a.tar", "cannot be read", wait) if waits else wait()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)
    try:
        yield
    finally:
        go_on.set()
        thread.join()


def test_a_slow_sample_is_reported_once_by_shard_and_key(caplog: pytest.LogCaptureFixture) -> None:
    reports: list[Any] = []
    watcher = Watcher(lambda *what: reports.append(what))
    with at_work("slow"):
        watcher.look(1.0)  # it is seen for the first time
        for _ in range(4):
            watcher.look(AFTER_SECONDS / 2)
    assert reports == [("a.tar", "slow", AFTER_SECONDS)]
    with caplog.at_level(logging.WARNING, "orchdata"):
        slow.log(*reports[0])
    assert "a.tar: sample 'slow' has taken 30 s" in caplog.text


def test_a_text_that_is_tokenized_alone_is_that_of_the_sample_under_way(tmp_path: Path) -> None:
    """Texts of several samples are prepared together."""
    found: list[tuple[str, object]] = []

    def tokenize(text: str) -> list[int]:
        found.append((text, here().key))
        return [1]

    shard = write_shard(tmp_path / "a.tar", [{"__key__": f"k{at}", "txt": f"k{at}".encode()} for at in range(9)])
    build_index([shard], od.Recipe(text=od.TextPreprocessor(tokenize, id="keys")))
    assert len(found) == 9 and all(text == key for text, key in found)


def test_waiting_for_storage_counts_for_nothing() -> None:
    reports: list[Any] = []
    watcher = Watcher(lambda *what: reports.append(what))
    with at_work("waits", waits=True):
        for _ in range(9):
            watcher.look(AFTER_SECONDS)
    assert reports == []


def test_megabytes_of_blanks_where_base64_may_stand_take_no_time() -> None:
    # 8 s for 64 KiB where it was quadratic: hours for these.
    head = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(14)).decode()
    (media,) = media_of({"image": head + " " * (16 << 20) + "!"}, file_names=False)
    assert media.path is not None
    (media,) = media_of({"image": head + "\n" * (1 << 20) + "=="}, file_names=False)
    assert media.encoded is not None


def _work(pairs: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Turns that are rendered for a chat of so many pairs."""
    turns = 0

    def counted(self: Any, messages: Any, *args: Any, render: Any = JinjaTemplate.render, **kwargs: Any) -> Any:
        nonlocal turns
        turns += len(messages)
        return render(self, messages, *args, **kwargs)

    chat = []
    for number in range(pairs):
        chat += [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    template = ChatTemplate.from_jinja(CHATML, eos_token="<|im_end|>")
    text, generated = template.render(chat, Inputs())
    trained = [turn["role"] == "assistant" for turn in chat]
    with monkeypatch.context() as patch:
        patch.setattr(JinjaTemplate, "render", counted)
        spans = loss_spans(chat, trained, template, Inputs(), text, generated, Work())
    assert [text[start:end] for start, end in spans] == [f"answer {number}<|im_end|>" for number in range(pairs)]
    return turns


def test_renderings_grow_with_the_turns_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = _work(250, monkeypatch), _work(1000, monkeypatch)
    assert many < 6 * few  # 4 times as many turns; 16 times as much where it was quadratic


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("webm", "gif")] + ["mp4"])
def test_clips_leave_no_garbage(name: str) -> None:
    data = {"mp4": clip, "webm": lambda: clip(codec="vp9", container="webm"), "gif": animation}[name]()

    def decode() -> None:
        with open_video(data, Limits()) as video:
            video.size()
            for _ in video.frames(range(video.timeline.frames)):
                pass

    def left() -> int:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                decode()
            return gc.collect()
        finally:
            gc.enable()

    decode()
    # Threads of other tests that end meanwhile may leave some objects once.
    collected = [left() for _ in range(3)]
    assert min(collected) == 0, f"{collected} objects are left by 5 clips"
    assert sys.getrefcount(data) < 5
