"""A Hugging Face processor as a recipe: its tokenizer and chat template, and what it makes of images and audio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, get_args

from orchdata.hf.audio import LongClips, audio_modality, extractor_of
from orchdata.hf.images import image_modality
from orchdata.hf.video import video_modality
from orchdata.loaders.limits import Limits
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.text.preprocessor import TextPreprocessor
from orchdata.loaders.text.template import ChatTemplate

_ARGUMENTS: Final = frozenset(("source", "ignore_keys", "roles", "add_special_tokens", "date"))
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})

# What processors without a chat template write by themselves, for chats of a question and its answer.
_TEMPLATES: Final[Mapping[str, str]] = {
    "PaliGemmaProcessor": (
        "{%- for message in messages -%}"
        "{%- set texts = [] -%}"
        "{%- if message.content is string -%}{%- set texts = [message.content] -%}{%- else -%}"
        "{%- for item in message.content if item.type == 'image' -%}<image>{%- endfor -%}"
        "{%- set texts = message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | list -%}"
        "{%- endif -%}"
        "{%- if message.role == 'user' and loop.index == 1 -%}"
        "{{ bos_token }}{{ texts | join('') }}{{ '\\n' }}"
        "{%- elif message.role == 'assistant' and loop.index == 2 -%}"
        "{%- generation -%}{{ texts | join('') }}{{ eos_token }}{%- endgeneration -%}"
        "{%- else -%}{{ raise_exception('PaliGemma reads a prompt and then its completion, and nothing else') }}"
        "{%- endif -%}"
        "{%- endfor -%}"
    )
}

_REFUSAL: Final = (
    "{{{{ raise_exception('{name} has no chat template: give one, od.hf.recipe(processor, chat_template=...), or "
    "samples of plain text') }}}}"
)


def recipe(
    processor: Any,
    *,
    chat_template: str | None = None,
    variables: Mapping[str, Any] = _NOTHING,
    ignore_keys: tuple[str, ...] = (),
    date: str | None = None,
    append_eos: bool = False,
    long_clips: LongClips = "error",
    video: bool = False,
    audio_tracks: bool = False,
    tokens_per_second: float = 2.0,
    limits: Limits = Limits(),  # noqa: B008 - a frozen value
    keep: tuple[str, ...] = (),
) -> Recipe:
    """How a Hugging Face processor prepares samples: token ids, loss masks, pixels and features are its own, counts
    follow from headers, and the index's fingerprint holds its JSON and the content of its tokenizer.

    Args:
        processor: of `AutoProcessor`, or built in code; a tokenizer for text alone.
        chat_template: jinja in place of the processor's own.
        variables: what the chat template sees besides turns, as `add_vision_id`.
        ignore_keys: keys of chats that may be lost where the template does not render them.
        date: the day that the chat template takes for today, as in `od.ChatTemplate.from_jinja`.
        append_eos: whether texts, completions and the last answer of a chat end with the tokenizer's `eos_token`, and
            learn it, where neither the data nor the template has an end there.
        long_clips: clips above the 30 s that Whisper and Qwen2-Audio take are an "error" of their sample, "cut", or
            "split" into windows.
        video: whether videos are read, as the processor's `video_processor` prepares them, of Qwen2-VL, Qwen2.5-VL and
            Qwen3-VL; GIFs are videos then, and else images.
        audio_tracks: whether the sound of clips is audio of its own, as `od.AudioPreprocessor(tracks=True)` has it.
        tokens_per_second: of Qwen2.5-VL's videos: positions in time, as its model's `vision_config` has it.
        limits, keep: as `od.Recipe` has them.

    Raises:
        TypeError: no processor or tokenizer.
        ValueError: a variable of the name of an argument; `append_eos` of a tokenizer without one; a tokenizer that
            tells no offsets, or media whose places or counts the processor does not tell.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    if not hasattr(tokenizer, "apply_chat_template"):
        given = repr(processor) if isinstance(processor, str) else "name"
        raise TypeError(
            f"{type(processor).__name__} is no processor or tokenizer of transformers': pass the object, "
            f"od.hf.recipe(transformers.AutoProcessor.from_pretrained({given}))"
        )
    if not hasattr(tokenizer, "special_tokens_map"):
        raise TypeError(
            f"{type(processor).__name__} has no tokenizer: it is of a model that reads no text, and od.hf.recipe makes "
            "samples of text with media. Give the processor of a model that writes text"
        )
    if reserved := sorted(_ARGUMENTS & variables.keys()):
        raise ValueError(f"variables of a chat template cannot be called {', '.join(reserved)}: rename them in it")
    if long_clips not in get_args(LongClips):
        raise ValueError(f"long_clips must be one of {', '.join(get_args(LongClips))}, got {long_clips!r}")
    if append_eos and tokenizer.eos_token_id is None:
        raise ValueError(f"{type(tokenizer).__name__} has no eos_token to append")
    own = type(processor).__name__ in _TEMPLATES and chat_template is None
    # What renders chats: the processor's template, else its default, else a refusal.
    holders, name = (processor, tokenizer), type(processor).__name__
    rendering = processor if any(getattr(each, "chat_template", None) for each in holders) else None
    template = ChatTemplate.from_jinja(
        chat_template or rendering or _TEMPLATES.get(name) or _REFUSAL.format(name=name),
        ignore_keys=ignore_keys,
        date=date,
        add_special_tokens=processor is not tokenizer and not own,
        **{**tokenizer.special_tokens_map, **variables},
    )
    template = replace(template, pairs=own)
    audio = image = None
    if extractor_of(processor) is not None:
        with _advised("audio"):
            audio = replace(audio_modality(processor, long_clips=long_clips), tracks=audio_tracks)
    elif audio_tracks:
        raise ValueError(f"audio_tracks=True, and {type(processor).__name__} takes no audio")
    if getattr(processor, "image_processor", None) is not None:
        with _advised("image"):
            image = image_modality(processor)
    eos_token_id = tokenizer.eos_token_id if append_eos else None
    return Recipe(
        text=TextPreprocessor(tokenizer, template=template, eos_token_id=eos_token_id),
        image=image,
        audio=audio,
        video=video_modality(processor, tokens_per_second=tokens_per_second) if video else None,
        limits=limits,
        keep=keep,
    )


@contextmanager
def _advised(modality: str) -> Iterator[None]:
    """Errors of a processor of which images or clips cannot be used say what is possible without it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{error}. Texts alone take od.hf.recipe(processor.tokenizer); an od.Modality of your own is added to that "
            f"by dataclasses.replace(recipe, {modality}=...)"
        ) from error
