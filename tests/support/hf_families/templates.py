"""Chat templates of published models, with `{% generation %}` around what an assistant says."""

from __future__ import annotations

from collections.abc import Callable

Wrap = Callable[[str], str]


def _generation(body: str) -> str:
    """The body marked where it is an assistant's; what is empty at the end keeps the newline that follows a tag."""
    return (
        "{% if message['role'] == 'assistant' %}{% generation %}"
        + body
        + "{% endgeneration %}{% else %}"
        + body
        + "{% endif %}{{ '' }}"
    )


def template(name: str) -> str:
    """The template of a family; what is marked has the end mark, where it has one."""
    return _TEMPLATES[name](_generation)


_IMAGE = "content['type'] == 'image' or 'image' in content or 'image_url' in content"


def _chatml(said: Wrap, items: str, counted: str = "") -> str:
    """`items`: branches for media of a content; `counted`: the name of a counter in them."""
    body = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for content in message['content'] %}"
        + items
        + "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>"
    )
    return (
        (f"{{% set {counted} = namespace(value=0) %}}" if counted else "")
        + "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
        "<|im_start|>{{ message['role'] }}\n" + said(body) + "\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _qwen2_vl(said: Wrap) -> str:
    items = (
        "{% if " + _IMAGE + " %}{% set image_count.value = image_count.value + 1 %}"
        "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% elif content['type'] == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>"
    )
    return _chatml(said, items, "image_count")


def _qwen3_vl(said: Wrap) -> str:
    body = (
        "{%- if message.content is string %}{{- message.content }}{%- else %}"
        "{%- for content in message.content %}"
        "{%- if content.type == 'image' or 'image' in content or 'image_url' in content %}"
        "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
        "{%- elif content.type == 'video' or 'video' in content %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
        "{%- elif 'text' in content %}{{- content.text }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>' }}"
    )
    return (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
        + said(body)
        + "{{- '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )


def _omni(said: Wrap) -> str:
    items = (
        "{% if " + _IMAGE + " %}<|vision_bos|><|IMAGE|><|vision_eos|>"
        "{% elif content['type'] == 'audio' or 'audio' in content or 'audio_url' in content %}"
        "<|audio_bos|><|AUDIO|><|audio_eos|>"
    )
    return _chatml(said, items)


def _qwen2_audio(said: Wrap) -> str:
    items = (
        "{% if 'audio' in content or 'audio_url' in content or message['type'] == 'audio'"
        " or content['type'] == 'audio' %}{% set audio_count.value = audio_count.value + 1 %}"
        "Audio {{ audio_count.value }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
    )
    return _chatml(said, items, "audio_count")


_IMAGES = "message['content'] | selectattr('type', 'equalto', 'image')"
_TEXTS = "message['content'] | selectattr('type', 'equalto', 'text')"


def _llava(said: Wrap) -> str:
    return (
        "{% for message in messages %}"
        "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
        "{% for content in " + _IMAGES + " %}{{ '<image>\n' }}{% endfor %}"
        "{% for content in " + _TEXTS + " %}" + said("{{ content['text'] + ' '}}") + "{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    )


def _llava_next(said: Wrap) -> str:
    return (
        "{% for message in messages %}{% if message['role'] == 'system' %}"
        "{{ '<<SYS>>\n' + message['content'][0]['text'] + '\n<</SYS>>\n\n' }}"
        "{% elif message['role'] == 'user' %}{{ '[INST] ' }}"
        "{% for content in " + _IMAGES + " %}{{ '<image>\n' }}{% endfor %}"
        "{% for content in " + _TEXTS + " %}{{ content['text'] }}{% endfor %}{{ ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' }}"
        "{% for content in " + _TEXTS + " %}" + said("{{ content['text'] }}") + "{% endfor %}"
        "{{ '</s>' }}{% endif %}{% endfor %}"
    )


def _onevision(said: Wrap) -> str:
    return (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}"
        "{% for content in " + _IMAGES + " %}{{ '<image>' }}{% endfor %}"
        "{% for content in " + _TEXTS + " %}" + said("{{ '\n' + content['text'] }}") + "{% endfor %}"
        "{{'<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def _internvl(said: Wrap) -> str:
    body = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
        "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
        "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>' }}"
    )
    return (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}" + said(body) + "{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
    )


def _idefics3(said: Wrap, start: str = "<|begin_of_text|>") -> str:
    body = (
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>"
    )
    return (
        start + "{% for message in messages %}{{message['role'] | capitalize}}"
        "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}" + said(body) + "\n"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )


def _smolvlm(said: Wrap) -> str:
    return _idefics3(said, "<|im_start|>")


def _gemma3(said: Wrap) -> str:
    body = (
        "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
        "{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}"
        "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
        "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}"
        "{%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}{{ '<end_of_turn>' }}"
    )
    return (
        "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- if messages[0]['content'] is string -%}"
        "{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- else -%}"
        "{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}"
        "{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = '' -%}"
        "{%- set loop_messages = messages -%}{%- endif -%}{%- for message in loop_messages -%}"
        "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}"
        "{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}"
        "{%- set role = message['role'] -%}{%- endif -%}"
        "{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}"
        + said(body)
        + "{{ '\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
    )


def _llama3(said: Wrap) -> str:
    return (
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
        + said("{{ message['content'] | trim + '<|eot_id|>' }}")
        + "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    )


def _qwen3(said: Wrap) -> str:
    thought = (
        "{%- if message.role == 'assistant' and loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
        "{{- message.content + '<|im_end|>' }}"
    )
    return (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}" + said(thought) + "{{- '\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    )


_TEMPLATES: dict[str, Callable[[Wrap], str]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen2_5_omni": _omni,
    "qwen2_audio": _qwen2_audio,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _onevision,
    "internvl": _internvl,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "gemma3": _gemma3,
    "llama": _llama3,
    "qwen3": _qwen3,
}
