"""Hugging Face's audio processors built in code, with a tokenizer of bytes and the audio tokens."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import numpy as np
import soundfile
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


@cache
def processor_of(family: str, **extractor: Any) -> Any:
    """`extractor` overrides parameters of its feature extractor."""
    if family == "qwen2_audio":
        from transformers import Qwen2AudioProcessor

        return Qwen2AudioProcessor(
            WhisperFeatureExtractor(**{"feature_size": 128, **extractor}), byte_tokenizer(**NAMES)
        )
    if family == "qwen2_5_omni":
        from transformers import Qwen2_5OmniProcessor

        given = {"feature_size": 128, **extractor}  # published: chunk_length=300, so much to compute for each clip
        return without_video(Qwen2_5OmniProcessor, WhisperFeatureExtractor(**given))
    if family == "whisper":
        from transformers import WhisperProcessor

        return WhisperProcessor(WhisperFeatureExtractor(**extractor), byte_tokenizer())
    if family == "qwen3_omni":
        from transformers import Qwen3OmniMoeProcessor

        given = {"feature_size": 128, **extractor}
        return without_video(Qwen3OmniMoeProcessor, WhisperFeatureExtractor(**given), n_window=50)
    if family == "audioflamingo3":
        from transformers import AudioFlamingo3Processor

        given = {"feature_size": 128, **extractor}
        return AudioFlamingo3Processor(WhisperFeatureExtractor(**given), byte_tokenizer(audio_token="<sound>"))
    raise ValueError(family)


def noise(num_samples: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng((seed, num_samples))
    loudness = np.interp(np.arange(num_samples), np.linspace(0, num_samples, 9), rng.random(9))
    return (rng.normal(scale=0.1, size=num_samples) * loudness).astype(np.float32)


def wav(wave: np.ndarray, rate: int = 16_000) -> bytes:
    """In floats, so that what is read are the same samples."""
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()
