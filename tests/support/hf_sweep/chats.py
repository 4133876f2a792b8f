"""Chats for processors that come without a template: one as jinja, and what it renders, as Python."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from orchdata.hf.processor_parts import placeholder_of

# Around the place of an image or clip published templates write a token on either side, where a processor has such.
# Models that count positions from runs of media ask for text between two of them.
_AROUND: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "image": (
        ("vision_bos_token", "vision_eos_token"),
        ("vision_start_token", "vision_end_token"),
        ("image_start_token", "image_end_token"),
    ),
    "audio": (("audio_bos_token", "audio_eos_token"), ("audio_start_token", "audio_end_token")),
}


def template(processor: Any) -> str:
    """A chat template in which every image and clip stands on a line of its own, and answers are trained."""
    places = "".join(
        f"{{%- {'elif' if at else 'if'} item.type == '{kind}' -%}}{{{{ {json.dumps(place(processor, kind))} }}}}"
        for at, kind in enumerate(_AROUND)
    )
    return (
        "{%- for message in messages -%}{{ message.role + ':\\n' }}"
        "{%- if message.content is string -%}{%- set items = [{'type': 'text', 'text': message.content}] -%}"
        "{%- else -%}{%- set items = message.content -%}{%- endif -%}"
        "{%- for item in items -%}" + places + "{%- elif message.role == 'assistant' -%}"
        "{% generation %}{{ item.text }}{% endgeneration %}"
        "{%- else -%}{{ item.text + '\\n' }}{%- endif -%}{%- endfor -%}{%- endfor -%}"
    )


def place(processor: Any, kind: str) -> str:
    """The line on which an image or clip stands."""
    mark = placeholder_of(processor) if kind == "image" else getattr(processor, f"{kind}_token", None) or ""
    for start, end in _AROUND[kind]:
        around = [_text(processor, name) for name in (start, end)]
        if all(around):
            return f"{around[0]}{mark}{around[1]}\n"
    return f"{mark}\n"


def _text(processor: Any, name: str) -> str:
    holders = (processor, getattr(processor, "tokenizer", None))
    found = next((each for holder in holders if (each := getattr(holder, name, None))), "")
    return str(found)


def messages(num_images: int, num_clips: int, answer: str) -> list[dict[str, Any]]:
    """A question about images and clips, and its answer."""
    items = [{"type": "image"}] * num_images + [{"type": "audio"}] * num_clips
    return [
        {"role": "user", "content": [*items, {"type": "text", "text": "Say what is there."}]},
        {"role": "assistant", "content": answer},
    ]


def rendered(processor: Any, num_images: int, num_clips: int, answer: str) -> str:
    """What `template` makes of `messages`."""
    media = place(processor, "image") * num_images + place(processor, "audio") * num_clips
    return f"user:\n{media}Say what is there.\nassistant:\n{answer}"
