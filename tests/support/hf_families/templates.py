"""Chat templates of published models, with `{% generation %}` around what an assistant says."""

from __future__ import annotations

from chat_templates import LLAMA3


def _said(body: str) -> str:
    """The body marked where it is an assistant's; what is empty at the end keeps the newline that follows a tag."""
    return (
        "{% if message['role'] == 'assistant' %}{% generation %}"
        + body
        + "{% endgeneration %}{% else %}"
        + body
        + "{% endif %}{{ '' }}"
    )


_IMAGE = "content['type'] == 'image' or 'image' in content or 'image_url' in content"


def _chatml(items: str, counted: str = "") -> str:
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
        "<|im_start|>{{ message['role'] }}\n" + _said(body) + "\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


_QWEN2_VL_ITEMS = (
    "{% if " + _IMAGE + " %}{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>"
)
_QWEN2_VL = _chatml(_QWEN2_VL_ITEMS, "image_count")

_QWEN3_VL_BODY = (
    "{%- if message.content is string %}{{- message.content }}{%- else %}"
    "{%- for content in message.content %}"
    "{%- if content.type == 'image' or 'image' in content or 'image_url' in content %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif content.type == 'video' or 'video' in content %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif 'text' in content %}{{- content.text }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>' }}"
)
_QWEN3_VL = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    + _said(_QWEN3_VL_BODY)
    + "{{- '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_OMNI_ITEMS = (
    "{% if " + _IMAGE + " %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif content['type'] == 'audio' or 'audio' in content or 'audio_url' in content %}"
    "<|audio_bos|><|AUDIO|><|audio_eos|>"
)
_OMNI = _chatml(_OMNI_ITEMS)

_QWEN2_AUDIO_ITEMS = (
    "{% if 'audio' in content or 'audio_url' in content or message['type'] == 'audio'"
    " or content['type'] == 'audio' %}{% set audio_count.value = audio_count.value + 1 %}"
    "Audio {{ audio_count.value }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
)
_QWEN2_AUDIO = _chatml(_QWEN2_AUDIO_ITEMS, "audio_count")

_IMAGES = "message['content'] | selectattr('type', 'equalto', 'image')"
_TEXTS = "message['content'] | selectattr('type', 'equalto', 'text')"


_LLAVA = (
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in " + _IMAGES + " %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in " + _TEXTS + " %}" + _said("{{ content['text'] + ' '}}") + "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

_LLAVA_NEXT = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<<SYS>>\n' + message['content'][0]['text'] + '\n<</SYS>>\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ '[INST] ' }}"
    "{% for content in " + _IMAGES + " %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in " + _TEXTS + " %}{{ content['text'] }}{% endfor %}{{ ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' }}"
    "{% for content in " + _TEXTS + " %}" + _said("{{ content['text'] }}") + "{% endfor %}"
    "{{ '</s>' }}{% endif %}{% endfor %}"
)

_ONEVISION = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}"
    "{% for content in " + _IMAGES + " %}{{ '<image>' }}{% endfor %}"
    "{% for content in " + _TEXTS + " %}" + _said("{{ '\n' + content['text'] }}") + "{% endfor %}"
    "{{'<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_INTERNVL_BODY = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>' }}"
)
_INTERNVL = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}" + _said(_INTERNVL_BODY) + "{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)


def _idefics3(start: str) -> str:
    body = (
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>"
    )
    return (
        start + "{% for message in messages %}{{message['role'] | capitalize}}"
        "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}" + _said(body) + "\n"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )


_GEMMA3_BODY = (
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
    "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}"
    "{%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}{{ '<end_of_turn>' }}"
)
_GEMMA3 = (
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
    + _said(_GEMMA3_BODY)
    + "{{ '\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)

_QWEN3_THOUGHT = (
    "{%- if message.role == 'assistant' and loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{- message.content + '<|im_end|>' }}"
)
_QWEN3 = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}" + _said(_QWEN3_THOUGHT) + "{{- '\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

# By family; what is marked has the end mark, where it has one.
TEMPLATES = {
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen3_vl": _QWEN3_VL,
    "qwen2_5_omni": _OMNI,
    "qwen2_audio": _QWEN2_AUDIO,
    "llava": _LLAVA,
    "llava_next": _LLAVA_NEXT,
    "llava_onevision": _ONEVISION,
    "internvl": _INTERNVL,
    "idefics3": _idefics3("<|begin_of_text|>"),
    "smolvlm": _idefics3("<|im_start|>"),
    "gemma3": _GEMMA3,
    "llama": LLAMA3,
    "qwen3": _QWEN3,
}
