"""Processors of Hugging Face as their models ship them, built in code, with small tiles."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers
from hf_families.families import (
    BACKENDS,
    build_processor,
    gemma3_processor,
    image_processor,
    internvl_processor,
    llava_next_processor,
    llava_processor,
    onevision_processor,
    paligemma_processor,
    qwen3_vl_processor,
    qwen_vl_processor,
    split_processor,
)
from hf_families.families import tokenizer as tokenizer_in_code

__all__ = ["BACKENDS", "FAMILIES", "image_processor", "processor", "tokenizer"]


def tokenizer(*special: str, **named: str) -> Any:
    """Byte-level BPE with added tokens; `named` ones are attributes too, as `image_token`."""
    return tokenizer_in_code(special, named=named, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def processor(family: str, backend: str = "pil") -> Any:
    """A processor of the family, with small tiles and the settings that its models ship with otherwise."""
    return FAMILIES[family](backend=backend)


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


_CROPS = {"min_crop_size": 64, "max_num_crops": 4, "min_ratio_to_activate": 1.2}
FAMILIES: dict[str, Any] = {
    "qwen2_vl": partial(qwen_vl_processor, "Qwen2VL"),
    "qwen3_vl": qwen3_vl_processor,
    "glm4v": _glm4v,
    "paddleocr_vl": _paddleocr_vl,
    "llava": partial(llava_processor, 56),
    "llava_square": partial(llava_processor, 56, pads=True),
    "llava_next": partial(llava_next_processor, 56),
    "llava_next_parts": partial(llava_next_processor, 56, unit=84),
    "llava_onevision": partial(onevision_processor, 48, most=6, ratio=9),
    "internvl": partial(internvl_processor, 56, most=12),
    "idefics3": partial(split_processor, "Idefics3", 56, most=4),
    "idefics3_whole": partial(split_processor, "Idefics3", 56, most=4, do_image_splitting=False),
    "smolvlm": partial(split_processor, "SmolVLM", 56, most=4),
    "gemma3": partial(gemma3_processor, 56),
    "gemma3_pan_and_scan": partial(
        gemma3_processor, 56, do_pan_and_scan=True, **{f"pan_and_scan_{name}": value for name, value in _CROPS.items()}
    ),
    "paligemma": partial(paligemma_processor, 56),
}
