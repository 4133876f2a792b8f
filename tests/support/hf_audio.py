"""Hugging Face's audio processors built in code, with a tokenizer of bytes and the audio tokens."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import numpy as np
import soundfile
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

NAMES = {
    "audio_token": "<|AUDIO|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
}


def byte_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", extra_special_tokens=special
    )


def without_video(kind: Any, extractor: Any, **attributes: Any) -> Any:
    """A processor whose video processor would need torchvision, made without its constructor."""
    processor = kind.__new__(kind)
    tokenizer = byte_tokenizer(**NAMES)
    held = {"feature_extractor": extractor, "tokenizer": tokenizer, "chat_template": None, **attributes}
    held |= {"audio_token": tokenizer.audio_token, "audio_token_id": tokenizer.audio_token_id}
    for name, value in held.items():
        setattr(processor, name, value)
    return processor


_AUDIO = {"feature_size": 128}
_KINDS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "qwen2_audio": ("Qwen2AudioProcessor", _AUDIO, NAMES),
    "qwen2_5_omni": ("Qwen2_5OmniProcessor", _AUDIO, NAMES),  # published: chunk_length=300, so much for each clip
    "whisper": ("WhisperProcessor", {}, {}),
    "qwen3_omni": ("Qwen3OmniMoeProcessor", _AUDIO, NAMES),
    "audioflamingo3": ("AudioFlamingo3Processor", _AUDIO, {"audio_token": "<sound>"}),
}


@cache
def processor_of(family: str, **extractor: Any) -> Any:
    """`extractor` overrides parameters of its feature extractor."""
    name, settings, words = _KINDS[family]
    kind, mel = getattr(transformers, name), WhisperFeatureExtractor(**{**settings, **extractor})
    if family.endswith("omni"):
        return without_video(kind, mel, **({"n_window": 50} if family == "qwen3_omni" else {}))
    return kind(mel, byte_tokenizer(**words))


def noise(num_samples: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng((seed, num_samples))
    loudness = np.interp(np.arange(num_samples), np.linspace(0, num_samples, 9), rng.random(9))
    return (rng.normal(scale=0.1, size=num_samples) * loudness).astype(np.float32)


def wav(wave: np.ndarray, rate: int = 16_000) -> bytes:
    """In floats, so that what is read are the same samples."""
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()
