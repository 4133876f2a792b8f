"""Processors of Hugging Face as their models ship them, built in code, with small tiles."""

from __future__ import annotations

from typing import Any

import transformers
from hf_families.build import build_processor, has_torchvision
from hf_families.tokenizers_in_code import tokenizer as tokenizer_in_code

BACKENDS = ("pil", "torchvision") if has_torchvision() else ("pil",)


def tokenizer(*special: str, **named: str) -> Any:
    """Byte-level BPE with added tokens; `named` ones are attributes too, as `image_token`."""
    return tokenizer_in_code(special, named=named, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def image_processor(name: str, backend: str, **settings: Any) -> Any:
    """transformers' image processor of a model, of backend "pil" or "torchvision"."""
    return getattr(transformers, name + ("Pil" if backend == "pil" else ""))(**settings)


FAMILIES = (
    "qwen2_vl",
    "qwen3_vl",
    "glm4v",
    "paddleocr_vl",
    "llava",
    "llava_square",
    "llava_next",
    "llava_next_parts",
    "llava_onevision",
    "internvl",
    "idefics3",
    "idefics3_whole",
    "smolvlm",
    "gemma3",
    "gemma3_pan_and_scan",
    "paligemma",
)


def processor(family: str, backend: str = "pil") -> Any:
    """A processor of the family, with small tiles and the settings that its models ship with otherwise."""
    return _BUILD[family](backend)


def _qwen(kind: str, patch: int, **settings: Any) -> Any:
    def build(backend: str) -> Any:
        words = tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
        images = image_processor("Qwen2VLImageProcessor", backend, patch_size=patch, **settings)
        return build_processor(getattr(transformers, kind), images, words)

    return build


def _llava(*, pad: bool) -> Any:
    def build(backend: str) -> Any:
        side = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
        images = image_processor("LlavaImageProcessor" if pad else "CLIPImageProcessor", backend, **side)
        images.do_pad = pad
        return transformers.LlavaProcessor(
            images,
            tokenizer(image_token="<image>"),
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )

    return build


def _llava_next(unit: int) -> Any:
    """`unit`: what the sizes are multiples of; tiles are of 56 pixels."""

    def build(backend: str) -> Any:
        images = image_processor(
            "LlavaNextImageProcessor",
            backend,
            size={"shortest_edge": 56},
            crop_size={"height": 56, "width": 56},
            image_grid_pinpoints=[
                [high * unit, wide * unit] for high, wide in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
            ],
        )
        return transformers.LlavaNextProcessor(
            images,
            tokenizer(image_token="<image>"),
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )

    return build


def _glm4v(backend: str) -> Any:
    words = tokenizer("<|begin_of_video|>", "<|end_of_video|>", image_token="<|image|>", video_token="<|video|>")
    limits = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 128}
    return build_processor(
        transformers.Glm4vProcessor, image_processor("Glm4vImageProcessor", backend, size=limits), words
    )


def _paddleocr_vl(backend: str) -> Any:
    limits = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}
    images = image_processor("PaddleOCRVLImageProcessor", backend, size=limits)
    return transformers.PaddleOCRVLProcessor(images, tokenizer(image_token="<image>"))


def _llava_onevision(backend: str) -> Any:
    sides = range(48, 48 * 7, 48)
    images = image_processor(
        "LlavaOnevisionImageProcessor",
        backend,
        size={"height": 48, "width": 48},
        image_grid_pinpoints=[[high, wide] for high in sides for wide in sides],
    )
    return build_processor(
        transformers.LlavaOnevisionProcessor,
        images,
        tokenizer(image_token="<image>", video_token="<video>"),
        num_image_tokens=9,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
    )


def _internvl(backend: str) -> Any:
    words = tokenizer(
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    images = image_processor(
        "GotOcr2ImageProcessor", backend, size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=12
    )
    return build_processor(transformers.InternVLProcessor, images, words, image_seq_length=4)


def _split(kind: str, **settings: Any) -> Any:
    def build(backend: str) -> Any:
        tags = [f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)]
        images = image_processor(
            f"{kind}ImageProcessor",
            backend,
            size={"longest_edge": 4 * 56},
            max_image_size={"longest_edge": 56},
            **settings,
        )
        if kind == "Idefics3":
            words = tokenizer(*tags, "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
            return transformers.Idefics3Processor(images, words, image_seq_len=4)
        tags += ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
        words = tokenizer(*tags, image_token="<image>")
        return build_processor(transformers.SmolVLMProcessor, images, words, image_seq_len=4)

    return build


def _gemma3(**call: Any) -> Any:
    def build(backend: str) -> Any:
        named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
        words = tokenizer(**named)
        images = image_processor("Gemma3ImageProcessor", backend, size={"height": 56, "width": 56})
        found = transformers.Gemma3Processor(images, words, image_seq_length=4)
        found.images_kwargs = found.images_kwargs | call
        return found

    return build


def _paligemma(backend: str) -> Any:
    images = image_processor("SiglipImageProcessor", backend, size={"height": 56, "width": 56})
    images.image_seq_length = 16
    return transformers.PaliGemmaProcessor(images, tokenizer(image_token="<image>"))


_BUILD = {
    "qwen2_vl": _qwen("Qwen2VLProcessor", 14, min_pixels=56 * 56, max_pixels=28 * 28 * 64),
    "qwen3_vl": _qwen(
        "Qwen3VLProcessor", 16, min_pixels=64 * 64, max_pixels=32 * 32 * 64, image_mean=[0.5] * 3, image_std=[0.5] * 3
    ),
    "glm4v": _glm4v,
    "paddleocr_vl": _paddleocr_vl,
    "llava": _llava(pad=False),
    "llava_square": _llava(pad=True),
    "llava_next": _llava_next(56),
    "llava_next_parts": _llava_next(84),
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "idefics3": _split("Idefics3"),
    "idefics3_whole": _split("Idefics3", do_image_splitting=False),
    "smolvlm": _split("SmolVLM"),
    "gemma3": _gemma3(),
    "gemma3_pan_and_scan": _gemma3(
        do_pan_and_scan=True,
        pan_and_scan_min_crop_size=64,
        pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2,
    ),
    "paligemma": _paligemma,
}
