"""Samples that take long are judged by work that is counted: never by a clock."""

from __future__ import annotations

import base64
import gc
import sys
from typing import Any

import pytest
from video_clips import clip

from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.video.decode import open_video
from orchdata.loaders.shards.jsonl.named_media import media_of
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
