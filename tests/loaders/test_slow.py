"""Samples that take long are judged by work that is counted: never by a clock."""

from __future__ import annotations

import base64
import gc
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from video_clips import clip

from orchdata.loaders import pace
from orchdata.loaders.index import costs as reading
from orchdata.loaders.index.build import build_index
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.video.decode import open_video
from orchdata.loaders.pace import Pace, Turns
from orchdata.loaders.recipe import Recipe, TextPreprocessor
from orchdata.loaders.shards.named_media import media_of
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.text.jinja import Inputs, JinjaTemplate, Work
from orchdata.loaders.text.loss_spans import loss_spans
from orchdata.loaders.text.template import ChatTemplate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
        chat += [{"role": role, "content": f"{role} {number}"} for role in ("user", "assistant")]
    template = ChatTemplate.from_jinja(CHATML, eos_token="<|im_end|>")
    text, generated = template.render(chat, Inputs())
    trained = [turn["role"] == "assistant" for turn in chat]
    with monkeypatch.context() as patch:
        patch.setattr(JinjaTemplate, "render", counted)
        spans = loss_spans(chat, trained, template, Inputs(), text, generated, Work())
    assert [text[start:end] for start, end in spans] == [f"assistant {number}<|im_end|>" for number in range(pairs)]
    return turns


def test_renderings_grow_with_the_turns_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = _work(250, monkeypatch), _work(1000, monkeypatch)
    assert many < 6 * few  # 4 times as many turns; 16 times as much where it was quadratic


def test_clips_leave_no_garbage() -> None:
    data = clip()

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


# As many threads are at work as get most done.


def worked(pace: Pace, rate_of: Callable[[int, float], float], seconds: float) -> dict[int, float]:
    """Seconds at each number of threads, where so many of them do `rate_of(threads, now)` jobs a second."""
    now, spent = 0.0, dict.fromkeys(range(1, 65), 0.0)
    while now < seconds:
        step = 1 / rate_of(pace.at_work, now)
        spent[pace.at_work] += step
        now += step
        pace.done(1.0, now)
    return spent


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_of_threads_that_hinder_one_another_one_is_left_and_of_those_that_wait_all(most: int) -> None:
    assert worked(Pace(most, 0.0), lambda threads, _: 1400 / threads**0.5, 60)[1] > 55
    assert worked(Pace(most, 0.0), lambda threads, _: 100 * threads, 60)[most] > 50


def test_threads_that_hang_take_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not at work: the others go on one at a time, and wait for nothing."""
    monkeypatch.setattr(pace, "_SHORT_SECONDS", 0.0)
    turns, hangs, inside = Turns(3), threading.Event(), threading.Semaphore(0)
    turns._pace.at_work = 1

    def hang() -> None:
        with turns.turn():
            inside.release()
            hangs.wait()

    threads = [threading.Thread(target=hang) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert inside.acquire(timeout=60)
    monkeypatch.setattr(pace, "_SHORT_SECONDS", 3600.0)
    turns._begun.update(dict.fromkeys(turns._begun, -3600.0))  # an hour ago
    for _ in range(100):
        with turns.turn() as tell:
            tell(1.0)
    hangs.set()
    for thread in threads:
        thread.join()
    assert not turns._begun


# One large shard is measured by all idle threads of a build, with the result of one thread.


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
