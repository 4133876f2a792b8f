"""The families: how the processor and the model of each are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from hf_families.build import (
    MROPE,
    QWEN,
    QWEN_TOWER,
    TEXT,
    build_processor,
    ids,
    image_processor,
    qwen_images,
    random_model,
)
from hf_families.hearing import (
    omni_model,
    omni_processor,
    qwen2_audio_model,
    qwen2_audio_processor,
    whisper_model,
    whisper_processor,
)
from hf_families.templates import template
from hf_families.tokenizers_in_code import tokenizer


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family is built, and what its model and processor take.

    Attributes:
        media: what a sample may hold: "image", "audio".
        packed: whether the model keeps samples of one row apart.
        per_phase: whether features of all its media can be made elsewhere.
        chat: what samples are: "chat", "pair" (a chat of a question and its answer) or "speech" (a clip and its text).
    """

    name: str
    processor: Callable[[], Any]
    model: Callable[[Any], Any]
    media: tuple[str, ...] = ("image",)
    packed: bool = True
    per_phase: bool = True
    chat: str = "chat"

    def build(self) -> tuple[Any, Any]:
        """The processor, and a model for it. Each call builds a new model: its gradients are the caller's."""
        processor = cached_processor(self.name)
        return processor, self.model(processor)


@cache
def cached_processor(name: str) -> Any:
    return FAMILIES[name].processor()


_QWEN_SPECIAL = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _qwen2_vl_processor() -> Any:
    from transformers import Qwen2VLProcessor

    chat = template("qwen2_vl")
    return build_processor(Qwen2VLProcessor, qwen_images(), tokenizer(_QWEN_SPECIAL, **QWEN), chat_template=chat)


def _qwen_tokens(processor: Any) -> dict[str, int]:
    to_id = processor.tokenizer.convert_tokens_to_ids
    return {
        "image_token_id": to_id("<|image_pad|>"),
        "video_token_id": to_id("<|video_pad|>"),
        "vision_start_token_id": to_id("<|vision_start|>"),
        "vision_end_token_id": to_id("<|vision_end|>"),
    }


def _qwen2_vl_model(processor: Any) -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    text = TEXT | ids(processor.tokenizer) | {"rope_parameters": MROPE}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **_qwen_tokens(processor))
    return random_model(Qwen2VLForConditionalGeneration, config)


def _qwen2_5_vl_processor() -> Any:
    from transformers import Qwen2_5_VLProcessor

    chat = template("qwen2_5_vl")
    return build_processor(Qwen2_5_VLProcessor, qwen_images(), tokenizer(_QWEN_SPECIAL, **QWEN), chat_template=chat)


def _qwen2_5_vl_model(processor: Any) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = QWEN_TOWER | {"fullatt_block_indexes": [1], "window_size": 56}
    text = TEXT | ids(processor.tokenizer) | {"rope_parameters": MROPE}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_qwen_tokens(processor))
    return random_model(Qwen2_5_VLForConditionalGeneration, config)


def _qwen3_vl_processor() -> Any:
    from transformers import Qwen3VLProcessor

    size = {"shortest_edge": 4 * 32 * 32, "longest_edge": 40 * 32 * 32}
    images = qwen_images(patch_size=16, size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    chat = template("qwen3_vl")
    return build_processor(Qwen3VLProcessor, images, tokenizer(_QWEN_SPECIAL, **QWEN), chat_template=chat)


def _qwen3_vl_model(processor: Any) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = QWEN_TOWER | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64, "patch_size": 16}
    rope = MROPE | {"mrope_interleaved": True}
    text = TEXT | ids(processor.tokenizer) | {"rope_parameters": rope, "num_hidden_layers": 3}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **_qwen_tokens(processor))
    return random_model(Qwen3VLForConditionalGeneration, config)


_LLAMA2 = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 112,
    "patch_size": 14,
}


def _clip_images(side: int = 112) -> Any:
    size = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    return image_processor("clip", "CLIPImageProcessor", **size)


def _llava_processor() -> Any:
    from transformers import LlavaProcessor

    text = tokenizer(["<image>"], adds_bos=True, **_LLAMA2)
    return LlavaProcessor(
        _clip_images(),
        text,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=template("llava"),
        num_additional_image_tokens=1,
    )


def _llava_model(processor: Any) -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        text_config=TEXT | ids(processor.tokenizer) | {"model_type": "llama"},
        vision_config=_CLIP | {"model_type": "clip_vision_model"},
        image_token_index=processor.image_token_id,
        image_seq_length=64,
    )
    return random_model(LlavaForConditionalGeneration, config)


_PINPOINTS = [[112, 224], [224, 112], [224, 224], [336, 112], [112, 336]]


def _llava_next_processor() -> Any:
    from transformers import LlavaNextProcessor

    images = image_processor(
        "llava_next",
        "LlavaNextImageProcessor",
        size={"shortest_edge": 112},
        crop_size={"height": 112, "width": 112},
        image_grid_pinpoints=_PINPOINTS,
    )
    return LlavaNextProcessor(
        images,
        tokenizer(["<image>"], adds_bos=True, **_LLAMA2),
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=template("llava_next"),
        num_additional_image_tokens=1,
    )


def _llava_next_model(processor: Any) -> Any:
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    config = LlavaNextConfig(
        text_config=TEXT | ids(processor.tokenizer) | {"model_type": "mistral", "sliding_window": None},
        vision_config=_CLIP | {"model_type": "clip_vision_model"},
        image_token_index=processor.image_token_id,
        image_grid_pinpoints=_PINPOINTS,
        image_seq_length=64,
    )
    return random_model(LlavaNextForConditionalGeneration, config)


_ONE_PINPOINTS = [[98 * rows, 98 * columns] for rows in range(1, 5) for columns in range(1, 5)]


def _onevision_processor() -> Any:
    from transformers import LlavaOnevisionProcessor

    images = image_processor(
        "llava_onevision",
        "LlavaOnevisionImageProcessor",
        size={"height": 98, "width": 98},
        image_grid_pinpoints=_ONE_PINPOINTS,
    )
    text = tokenizer(["<|im_start|>", "<image>", "<video>"], **QWEN)
    return build_processor(
        LlavaOnevisionProcessor,
        images,
        text,
        num_image_tokens=49,
        vision_feature_select_strategy="full",
        chat_template=template("llava_onevision"),
        vision_aspect_ratio="anyres_max_4",
    )


def _onevision_model(processor: Any) -> Any:
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    vision = _CLIP | {"model_type": "siglip_vision_model", "image_size": 98, "vision_use_head": False}
    config = LlavaOnevisionConfig(
        text_config=TEXT | ids(processor.tokenizer) | {"model_type": "qwen2"},
        vision_config=vision,
        image_token_index=processor.image_token_id,
        video_token_index=processor.video_token_id,
        image_grid_pinpoints=_ONE_PINPOINTS,
        vision_aspect_ratio="anyres_max_4",
    )
    return random_model(LlavaOnevisionForConditionalGeneration, config)


def _internvl_processor() -> Any:
    from transformers import InternVLProcessor

    images = image_processor(
        "got_ocr2",
        "GotOcr2ImageProcessor",
        size={"height": 112, "width": 112},
        crop_to_patches=True,
        min_patches=1,
        max_patches=6,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    )
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    text = tokenizer(["<|im_start|>"], named=named, **QWEN)
    return build_processor(InternVLProcessor, images, text, image_seq_length=16, chat_template=template("internvl"))


def _internvl_model(processor: Any) -> Any:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    vision = _CLIP | {"image_size": [112, 112], "patch_size": [14, 14]}
    config = InternVLConfig(
        text_config=TEXT | ids(processor.tokenizer) | {"model_type": "qwen2"},
        vision_config=vision,
        image_token_id=processor.image_token_id,
        image_seq_length=16,
    )
    return random_model(InternVLForConditionalGeneration, config)


_ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_IDEFICS_IMAGES = {"size": {"longest_edge": 336}, "max_image_size": {"longest_edge": 112}}


def _idefics3_processor() -> Any:
    from transformers import Idefics3Processor

    images = image_processor("idefics3", "Idefics3ImageProcessor", **_IDEFICS_IMAGES)
    tokens = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "pad_token": "<|finetune_right_pad_id|>",
    }
    special = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *_ROWS]
    text = tokenizer(special, adds_bos=True, **tokens)
    return Idefics3Processor(images, text, image_seq_len=16, chat_template=template("idefics3"))


_SIGLIP = _CLIP | {"num_hidden_layers": 2}


def _idefics3_model(processor: Any) -> Any:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    config = Idefics3Config(
        text_config=TEXT | ids(processor.tokenizer) | {"model_type": "llama"},
        vision_config=_SIGLIP,
        image_token_id=processor.image_token_id,
        scale_factor=2,
    )
    return random_model(Idefics3ForConditionalGeneration, config)


def _smolvlm_processor() -> Any:
    from transformers import SmolVLMProcessor

    images = image_processor("smolvlm", "SmolVLMImageProcessor", **_IDEFICS_IMAGES)
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>"}
    special = ["<fake_token_around_image>", "<image>", "<global-img>", *_ROWS]
    text = tokenizer(special, **tokens)
    return build_processor(SmolVLMProcessor, images, text, image_seq_len=16, chat_template=template("smolvlm"))


def _smolvlm_model(processor: Any) -> Any:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    config = SmolVLMConfig(
        text_config=TEXT | ids(processor.tokenizer) | {"model_type": "llama"},
        vision_config=_SIGLIP,
        image_token_id=processor.image_token_id,
        scale_factor=2,
    )
    return random_model(SmolVLMForConditionalGeneration, config)


_GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}


def _gemma3_processor() -> Any:
    from transformers import Gemma3Processor

    images = image_processor("gemma3", "Gemma3ImageProcessor", size={"height": 112, "width": 112})
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    text = tokenizer(["<start_of_turn>", "<end_of_turn>"], named=named, adds_bos=True, **_GEMMA)
    return Gemma3Processor(images, text, chat_template=template("gemma3"), image_seq_length=16)


def _gemma3_model(processor: Any) -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = TEXT | ids(processor.tokenizer)
    text |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24, "query_pre_attn_scalar": 8}
    config = Gemma3Config(
        text_config=text,
        vision_config=_SIGLIP | {"vision_use_head": False},
        mm_tokens_per_image=16,
        boi_token_index=processor.tokenizer.boi_token_id,
        eoi_token_index=processor.tokenizer.eoi_token_id,
        image_token_index=processor.tokenizer.image_token_id,
    )
    return random_model(Gemma3ForConditionalGeneration, config)


def _paligemma_processor() -> Any:
    from transformers import PaliGemmaProcessor

    images = image_processor("siglip", "SiglipImageProcessor", size={"height": 112, "width": 112})
    images.image_seq_length = 64
    text = tokenizer(named={"image_token": "<image>"}, adds_bos=True, **_GEMMA)
    return PaliGemmaProcessor(images, text)


def _paligemma_model(processor: Any) -> Any:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    text = TEXT | ids(processor.tokenizer) | {"model_type": "gemma", "vocab_size": len(processor.tokenizer)}
    config = PaliGemmaConfig(
        text_config=text,
        vision_config=_SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=processor.image_token_id,
        projection_dim=32,
        hidden_size=32,
    )
    return random_model(PaliGemmaForConditionalGeneration, config)


def _llama_tokenizer() -> Any:
    tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|finetune_right_pad_id|>"}
    special = ["<|start_header_id|>", "<|end_header_id|>"]
    return tokenizer(special, adds_bos=True, chat_template=template("llama"), **tokens)


def _llama_model(processor: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return random_model(LlamaForCausalLM, LlamaConfig(**TEXT, **ids(processor)))


def _qwen3_tokenizer() -> Any:
    return tokenizer(["<|im_start|>", "<think>", "</think>"], chat_template=template("qwen3"), **QWEN)


def _qwen3_model(processor: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return random_model(Qwen3ForCausalLM, Qwen3Config(**TEXT, **ids(processor)))


_ALL = (
    Family(name="qwen2_vl", processor=_qwen2_vl_processor, model=_qwen2_vl_model),
    Family(name="qwen2_5_vl", processor=_qwen2_5_vl_processor, model=_qwen2_5_vl_model),
    Family(name="qwen3_vl", processor=_qwen3_vl_processor, model=_qwen3_vl_model),
    Family(name="llava", processor=_llava_processor, model=_llava_model),
    Family(name="llava_next", processor=_llava_next_processor, model=_llava_next_model),
    # Per phase it is refused where a sample has several images, which it takes for another kind of image.
    Family(name="llava_onevision", processor=_onevision_processor, model=_onevision_model, per_phase=False),
    Family(name="internvl", processor=_internvl_processor, model=_internvl_model),
    Family(name="idefics3", processor=_idefics3_processor, model=_idefics3_model),
    Family(name="smolvlm", processor=_smolvlm_processor, model=_smolvlm_model),
    Family(name="gemma3", processor=_gemma3_processor, model=_gemma3_model),
    Family(name="paligemma", processor=_paligemma_processor, model=_paligemma_model, chat="pair"),
    Family(
        name="qwen2_audio",
        processor=qwen2_audio_processor,
        model=qwen2_audio_model,
        media=("audio",),
        per_phase=False,
    ),
    Family(
        name="qwen2_5_omni",
        processor=omni_processor,
        model=omni_model,
        media=("image", "audio"),
        per_phase=False,
    ),
    Family(
        name="whisper",
        processor=whisper_processor,
        model=whisper_model,
        media=("audio",),
        packed=False,
        per_phase=False,
        chat="speech",
    ),
    Family(name="llama", processor=_llama_tokenizer, model=_llama_model, media=(), per_phase=False),
    Family(name="qwen3", processor=_qwen3_tokenizer, model=_qwen3_model, media=(), per_phase=False),
)
FAMILIES = {family.name: family for family in _ALL}
