"""The families: how the processor and the model of each are built, small, in code, with random weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torchvision_operators  # noqa: F401
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

from hf_families.templates import TEMPLATES

SENTENCES = (
    "What is in the picture, and where is it?",
    "Compare the first image with the second one.\n\nThe first image shows a chart of three columns.",
    "The speaker says that nothing is left to do. You are a helpful assistant.",
    "user\nassistant\nsystem\nmodel\n USER: ASSISTANT: User: Assistant: Picture 1: Audio 1: Here is the original image",
)


@cache
def _merges() -> str:
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    bare.train_from_iterator(SENTENCES, trainer)
    bare.decoder = decoders.ByteLevel()
    return bare.to_str()


def tokenizer(
    special: Sequence[str] = (),
    *,
    named: Mapping[str, str] | None = None,
    adds_bos: bool = False,
    kind: type[Any] | None = None,
    **options: Any,
) -> Any:
    """A fast tokenizer."""
    named = dict(named or {})
    inner = Tokenizer.from_str(_merges())
    known = [text for key, text in options.items() if key.endswith("_token")]
    for text in dict.fromkeys([*known, *special, *named.values()]):
        inner.add_special_tokens([AddedToken(text, normalized=False, special=True)])
    if adds_bos:
        bos = options["bos_token"]
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A $B:1",
            special_tokens=[(bos, inner.token_to_id(bos))],
        )
    return (kind or transformers.PreTrainedTokenizerFast)(tokenizer_object=inner, extra_special_tokens=named, **options)


def has_torchvision() -> bool:
    return find_spec("torchvision") is not None


BACKENDS = ("pil", "torchvision") if has_torchvision() else ("pil",)


def image_processor(name: str, backend: str, **settings: Any) -> Any:
    """transformers' image processor of a model, of backend "pil" or "torchvision"."""
    return getattr(transformers, name + ("Pil" if backend == "pil" else ""))(**settings)


def build_processor(kind: Any, *args: Any, **settings: Any) -> Any:
    """A processor of an image and a tokenizer; where its class asks for a video processor, one that no test uses.

    Without torchvision transformers has no class of video processors, not even to compare with, and without num2words
    SmolVLM's refuses: both only serve videos.
    """
    stand_in = transformers.Qwen2VLVideoProcessor() if has_torchvision() else NoVideo()
    module = sys.modules[kind.__module__]
    with ExitStack() as stack:
        if not has_torchvision():
            stack.enter_context(mock.patch.object(kind, "check_argument_for_proper_class", lambda *_: None))
        if getattr(module, "num2words", kind) is None:
            stack.enter_context(mock.patch.object(module, "num2words", str))
        return kind(*args, video_processor=stand_in, **settings)


class NoVideo:
    """Says what processors ask their video processor for before they look whether there is a video."""

    num_frames, fps, merge_size, temporal_patch_size = 64, 1, 2, 2
    size: Mapping[str, int] = {"longest_edge": 512}
    model_input_names: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"video_processor_type": "NoVideo"}


def random_model(kind: Any, config: Any, seed: int = 0) -> nn.Module:
    """A model in float64 whose weights are large enough that every input matters to its loss."""
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    model = kind._from_config(config) if hasattr(kind, "_from_config") else kind(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = 0.05 if parameter.dim() < 2 else min(0.3, parameter[0].numel() ** -0.5)
            parameter.copy_(parameter + scale * drawn if parameter.dim() < 2 else scale * drawn)
    return model.double().train()


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family is built, and what its model and processor take."""

    name: str
    processor: Callable[[], Any]
    model: Callable[[Any], Any]
    media: tuple[str, ...] = ("image",)  # what a sample may hold: "image", "audio"
    packed: bool = True  # whether the model keeps samples of one row apart
    per_phase: bool = True  # whether features of all its media can be made elsewhere
    # What samples are: "chat", "pair" (a chat of a question and its answer) or "speech" (a clip and its text).
    chat: str = "chat"

    def build(self) -> tuple[Any, Any]:
        """The processor, and a model for it. Each call builds a new model: its gradients are the caller's."""
        processor = cached_processor(self.name)
        return processor, self.model(processor)


@cache
def cached_processor(name: str) -> Any:
    return FAMILIES[name].processor()


# --- processors: tiles are squares of `side` pixels, in patches of 14, of which models make a token each or of four

_BACKEND = BACKENDS[-1]
_QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_QWEN_SPECIAL = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_LLAMA2 = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
_HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
# Windows of 5 seconds where the published ones have 30: towers compute a whole window, however short its clip.
_WINDOW_SECONDS = 5


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _qwen_images(backend: str, unit: int, **settings: Any) -> Any:
    """`unit`: the side of a merged token."""
    size = {"shortest_edge": 4 * unit * unit, "longest_edge": 40 * unit * unit}
    return image_processor("Qwen2VLImageProcessor", backend, size=size, patch_size=unit // 2, **settings)


def qwen_vl_processor(kind: str, unit: int = 28, backend: str = _BACKEND, **settings: Any) -> Any:
    images, words = _qwen_images(backend, unit, **settings), tokenizer(_QWEN_SPECIAL, **_QWEN)
    chat = {"Qwen2VL": "qwen2_vl", "Qwen2_5_VL": "qwen2_5_vl", "Qwen3VL": "qwen3_vl"}[kind]
    return build_processor(getattr(transformers, f"{kind}Processor"), images, words, chat_template=TEMPLATES[chat])


qwen3_vl_processor = partial(qwen_vl_processor, "Qwen3VL", 32, **_HALVES)


def _llava(kind: Any, images: Any, chat: str) -> Any:
    return kind(
        images,
        tokenizer(["<image>"], named={"image_token": "<image>"}, adds_bos=True, **_LLAMA2),
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATES[chat],
        num_additional_image_tokens=1,
    )


def llava_processor(side: int = 112, backend: str = _BACKEND, *, pads: bool = False) -> Any:
    sizes = {"size": {"shortest_edge": side}, "crop_size": square(side)}
    images = image_processor("LlavaImageProcessor" if pads else "CLIPImageProcessor", backend, **sizes)
    images.do_pad = pads
    return _llava(transformers.LlavaProcessor, images, "llava")


def _pinpoints(unit: int) -> list[list[int]]:
    return [[high * unit, wide * unit] for high, wide in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]


def llava_next_processor(side: int = 112, backend: str = _BACKEND, *, unit: int | None = None) -> Any:
    """`unit`: what the sizes are multiples of; default: tiles."""
    sizes = {"size": {"shortest_edge": side}, "crop_size": square(side)}
    images = image_processor("LlavaNextImageProcessor", backend, image_grid_pinpoints=_pinpoints(unit or side), **sizes)
    return _llava(transformers.LlavaNextProcessor, images, "llava_next")


def _squares(side: int, most: int) -> list[list[int]]:
    return [[side * rows, side * columns] for rows in range(1, most + 1) for columns in range(1, most + 1)]


def onevision_processor(side: int = 98, backend: str = _BACKEND, *, most: int = 4, ratio: int = 4) -> Any:
    """Sizes of up to `most` tiles a side."""
    pinpoints = {"size": square(side), "image_grid_pinpoints": _squares(side, most)}
    return build_processor(
        transformers.LlavaOnevisionProcessor,
        image_processor("LlavaOnevisionImageProcessor", backend, **pinpoints),
        tokenizer(["<|im_start|>"], named={"image_token": "<image>", "video_token": "<video>"}, **_QWEN),
        num_image_tokens=(side // 14) ** 2,
        vision_feature_select_strategy="full",
        chat_template=TEMPLATES["llava_onevision"],
        vision_aspect_ratio=f"anyres_max_{ratio}",
    )


def internvl_processor(side: int = 112, backend: str = _BACKEND, *, most: int = 6) -> Any:
    """Of up to `most` tiles."""
    norm = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    tiles = {"size": square(side), "crop_to_patches": True, "min_patches": 1, "max_patches": most}
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    return build_processor(
        transformers.InternVLProcessor,
        image_processor("GotOcr2ImageProcessor", backend, **tiles, **norm),
        tokenizer(["<|im_start|>"], named=named, **_QWEN),
        image_seq_length=(side // 28) ** 2,
        chat_template=TEMPLATES["internvl"],
    )


def split_processor(kind: str, side: int = 112, backend: str = _BACKEND, *, most: int = 3, **settings: Any) -> Any:
    """Idefics3 and SmolVLM: of up to `most` tiles a side."""
    sizes = {"size": {"longest_edge": most * side}, "max_image_size": {"longest_edge": side}}
    images = image_processor(f"{kind}ImageProcessor", backend, **sizes, **settings)
    special = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *_ROWS]
    given = {"image_seq_len": (side // 28) ** 2, "chat_template": TEMPLATES[kind.lower()]}
    if kind == "SmolVLM":
        ends = {"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>"}
        return build_processor(transformers.SmolVLMProcessor, images, tokenizer(special, **ends), **given)
    ends = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|finetune_right_pad_id|>"}
    return transformers.Idefics3Processor(images, tokenizer(special, adds_bos=True, **ends), **given)


def gemma3_processor(side: int = 112, backend: str = _BACKEND, **call: Any) -> Any:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    found = transformers.Gemma3Processor(
        image_processor("Gemma3ImageProcessor", backend, size=square(side)),
        tokenizer(["<start_of_turn>", "<end_of_turn>"], named=named, adds_bos=True, **_GEMMA),
        chat_template=TEMPLATES["gemma3"],
        image_seq_length=(side // 28) ** 2,
    )
    found.images_kwargs = found.images_kwargs | call
    return found


def paligemma_processor(side: int = 112, backend: str = _BACKEND) -> Any:
    images = image_processor("SiglipImageProcessor", backend, size=square(side))
    images.image_seq_length = (side // 14) ** 2
    words = tokenizer(named={"image_token": "<image>"}, adds_bos=True, **_GEMMA)
    return transformers.PaliGemmaProcessor(images, words)


def _mel(bins: int = 128) -> Any:
    return transformers.WhisperFeatureExtractor(feature_size=bins, chunk_length=_WINDOW_SECONDS)


def _qwen2_audio_processor() -> Any:
    words = tokenizer(["<|im_start|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"], **_QWEN)
    return transformers.Qwen2AudioProcessor(_mel(), words, chat_template=TEMPLATES["qwen2_audio"])


def _omni_processor() -> Any:
    marks = ("IMAGE", "AUDIO", "VIDEO", "vision_bos", "vision_eos", "audio_bos", "audio_eos")
    words = tokenizer(["<|im_start|>"], named={f"{each.lower()}_token": f"<|{each}|>" for each in marks}, **_QWEN)
    parts = {"image_processor": _qwen_images(_BACKEND, 28), "feature_extractor": _mel(), "tokenizer": words}
    return build_processor(transformers.Qwen2_5OmniProcessor, **parts, chat_template=TEMPLATES["qwen2_5_omni"])


def _whisper_processor() -> Any:
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    names = "startoftranscript en de translate transcribe startoflm startofprev nospeech notimestamps".split()
    kind = {"kind": transformers.WhisperTokenizer, "language": "en", "task": "transcribe"}
    return transformers.WhisperProcessor(_mel(80), tokenizer([f"<|{each}|>" for each in names], **kind, **ends))


def _llama_tokenizer() -> Any:
    ends = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|finetune_right_pad_id|>"}
    special = ["<|start_header_id|>", "<|end_header_id|>"]
    return tokenizer(special, adds_bos=True, chat_template=TEMPLATES["llama"], **ends)


def _qwen3_tokenizer() -> Any:
    return tokenizer(["<|im_start|>", "<think>", "</think>"], chat_template=TEMPLATES["qwen3"], **_QWEN)


# --- models

_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32_768,
}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
_QWEN_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 112,
    "patch_size": 14,
}
_SIGLIP = _CLIP | {"num_hidden_layers": 2}
_HEADLESS = {"model_type": "siglip_vision_model", "vision_use_head": False}
_HEARING = {
    "max_source_positions": _WINDOW_SECONDS * 50,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
}


def _ids(words: Any) -> dict[str, Any]:
    """Vocabulary and end of text, as each text config names them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"vocab_size": len(words), **{name: getattr(words, name) for name in names}}


def _model(kind: str, processor: Any, text: Mapping[str, Any], **given: Any) -> Any:
    """`text`: settings of the language model besides those that all have."""
    text_config = _TEXT | _ids(processor.tokenizer) | dict(text)
    config = getattr(transformers, f"{kind}Config")(text_config=text_config, **given)
    return random_model(getattr(transformers, f"{kind}ForConditionalGeneration"), config)


def _qwen_vl_model(kind: str, vision: Mapping[str, Any], processor: Any, **text: Any) -> Any:
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {f"vision_{end}_token_id": f"vision_{end}" for end in ("start", "end")}
    marks = {name: processor.tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for name, mark in names.items()}
    return _model(kind, processor, {"rope_parameters": _MROPE} | text, vision_config=dict(vision), **marks)


def _qwen3_vl_model(processor: Any) -> Any:
    vision = _QWEN_TOWER | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64, "patch_size": 16}
    text = {"rope_parameters": _MROPE | {"mrope_interleaved": True}, "num_hidden_layers": 3}
    return _qwen_vl_model("Qwen3VL", vision, processor, **text)


def _llava_model(kind: str, text: Mapping[str, Any], processor: Any, **given: Any) -> Any:
    vision = _CLIP | {"model_type": "clip_vision_model"}
    given |= {"image_token_index": processor.image_token_id, "image_seq_length": 64}
    return _model(kind, processor, text, vision_config=vision, **given)


def _onevision_model(processor: Any) -> Any:
    return _model(
        "LlavaOnevision",
        processor,
        {"model_type": "qwen2"},
        vision_config=_CLIP | _HEADLESS | {"image_size": 98},
        image_token_index=processor.image_token_id,
        video_token_index=processor.video_token_id,
        image_grid_pinpoints=_squares(98, 4),
        vision_aspect_ratio="anyres_max_4",
    )


def _internvl_model(processor: Any) -> Any:
    vision = _CLIP | {"image_size": [112, 112], "patch_size": [14, 14]}
    marks = {"image_token_id": processor.image_token_id, "image_seq_length": 16}
    return _model("InternVL", processor, {"model_type": "qwen2"}, vision_config=vision, **marks)


def _split_model(kind: str, processor: Any) -> Any:
    given = {"vision_config": _SIGLIP, "image_token_id": processor.image_token_id, "scale_factor": 2}
    return _model(kind, processor, {"model_type": "llama"}, **given)


def _gemma3_model(processor: Any) -> Any:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24, "query_pre_attn_scalar": 8}
    names = ("boi_token", "eoi_token", "image_token")
    marks = {f"{name}_index": getattr(processor.tokenizer, f"{name}_id") for name in names}
    vision = _SIGLIP | {"vision_use_head": False}
    return _model("Gemma3", processor, layers, vision_config=vision, mm_tokens_per_image=16, **marks)


def _paligemma_model(processor: Any) -> Any:
    given = {"image_token_index": processor.image_token_id, "projection_dim": 32, "hidden_size": 32}
    return _model("PaliGemma", processor, {"model_type": "gemma"}, vision_config=_SIGLIP | _HEADLESS, **given)


def _qwen2_audio_model(processor: Any) -> Any:
    given = {"audio_config": _HEARING | {"num_mel_bins": 128}, "audio_token_index": processor.audio_token_id}
    return _model("Qwen2Audio", processor, {"model_type": "qwen2"}, **given)


def _omni_model(processor: Any) -> Any:
    words = processor.tokenizer
    config = transformers.Qwen2_5OmniThinkerConfig(
        audio_config=_HEARING | {"num_mel_bins": 128, "n_window": 50, "output_dim": 32},
        vision_config=_QWEN_TOWER | {"fullatt_block_indexes": [1], "window_size": 56},
        text_config=_TEXT | _ids(words) | {"rope_parameters": _MROPE},
        **{f"{name}_token_index": getattr(words, f"{name}_token_id") for name in ("audio", "image", "video")},
        audio_start_token_id=words.audio_bos_token_id,
        audio_end_token_id=words.audio_eos_token_id,
    )
    config.vision_start_token_id = words.vision_bos_token_id
    config.vision_end_token_id = words.vision_eos_token_id
    return random_model(transformers.Qwen2_5OmniThinkerForConditionalGeneration, config)


def _whisper_model(processor: Any) -> Any:
    config = transformers.WhisperConfig(
        **_HEARING,
        num_mel_bins=80,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=48,
        decoder_start_token_id=processor.tokenizer.convert_tokens_to_ids("<|startoftranscript|>"),
        **_ids(processor.tokenizer),
    )
    return random_model(transformers.WhisperForConditionalGeneration, config)


def _text_model(kind: str, words: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**_TEXT, **_ids(words))
    return random_model(getattr(transformers, f"{kind}ForCausalLM"), config)


_QWEN2_TOWER = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
_WINDOWED_TOWER = _QWEN_TOWER | {"fullatt_block_indexes": [1], "window_size": 56}
_NEXT = {"image_grid_pinpoints": _pinpoints(112)}
_MISTRAL = {"model_type": "mistral", "sliding_window": None}
_BUILT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "qwen2_vl": (partial(qwen_vl_processor, "Qwen2VL"), partial(_qwen_vl_model, "Qwen2VL", _QWEN2_TOWER)),
    "qwen2_5_vl": (partial(qwen_vl_processor, "Qwen2_5_VL"), partial(_qwen_vl_model, "Qwen2_5_VL", _WINDOWED_TOWER)),
    "qwen3_vl": (qwen3_vl_processor, _qwen3_vl_model),
    "llava": (llava_processor, partial(_llava_model, "Llava", {"model_type": "llama"})),
    "llava_next": (llava_next_processor, partial(_llava_model, "LlavaNext", _MISTRAL, **_NEXT)),
    "llava_onevision": (onevision_processor, _onevision_model),
    "internvl": (internvl_processor, _internvl_model),
    "idefics3": (partial(split_processor, "Idefics3"), partial(_split_model, "Idefics3")),
    "smolvlm": (partial(split_processor, "SmolVLM"), partial(_split_model, "SmolVLM")),
    "gemma3": (gemma3_processor, _gemma3_model),
    "paligemma": (paligemma_processor, _paligemma_model),
    "qwen2_audio": (_qwen2_audio_processor, _qwen2_audio_model),
    "qwen2_5_omni": (_omni_processor, _omni_model),
    "whisper": (_whisper_processor, _whisper_model),
    "llama": (_llama_tokenizer, partial(_text_model, "Llama")),
    "qwen3": (_qwen3_tokenizer, partial(_text_model, "Qwen3")),
}
_OTHERWISE: dict[str, dict[str, Any]] = {
    # Per phase it is refused where a sample has several images, which it takes for another kind of image.
    "llava_onevision": {"per_phase": False},
    "paligemma": {"chat": "pair"},
    "qwen2_audio": {"media": ("audio",), "per_phase": False},
    "qwen2_5_omni": {"media": ("image", "audio"), "per_phase": False},
    "whisper": {"media": ("audio",), "packed": False, "per_phase": False, "chat": "speech"},
    "llama": {"media": (), "per_phase": False},
    "qwen3": {"media": (), "per_phase": False},
}
FAMILIES = {
    name: Family(name=name, processor=processor, model=model, **_OTHERWISE.get(name, {}))
    for name, (processor, model) in _BUILT.items()
}
