"""Small processors and models that hear, with random weights."""

from __future__ import annotations

from typing import Any

from hf_families.build import MROPE, QWEN, QWEN_TOWER, TEXT, build_processor, ids, qwen_images, random_model
from hf_families.templates import template
from hf_families.tokenizers_in_code import tokenizer

# Windows of 5 seconds where the published ones have 30: towers compute a whole window, however short its clip.
_WINDOW_SECONDS = 5
_TOWER_AUDIO = {
    "max_source_positions": _WINDOW_SECONDS * 50,
    "num_mel_bins": 128,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
}


def _mel(bins: int = 128) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=bins, chunk_length=_WINDOW_SECONDS)


def qwen2_audio_processor() -> Any:
    from transformers import Qwen2AudioProcessor

    special = ["<|im_start|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"]
    text = tokenizer(special, **QWEN)
    return Qwen2AudioProcessor(_mel(), text, chat_template=template("qwen2_audio"))


def qwen2_audio_model(processor: Any) -> Any:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    config = Qwen2AudioConfig(
        audio_config=_TOWER_AUDIO,
        text_config=TEXT | ids(processor.tokenizer) | {"model_type": "qwen2"},
        audio_token_index=processor.audio_token_id,
    )
    return random_model(Qwen2AudioForConditionalGeneration, config)


def omni_processor() -> Any:
    from transformers import Qwen2_5OmniProcessor

    named = {
        "image_token": "<|IMAGE|>",
        "audio_token": "<|AUDIO|>",
        "video_token": "<|VIDEO|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    }
    text = tokenizer(["<|im_start|>"], named=named, **QWEN)
    parts = {"image_processor": qwen_images(), "feature_extractor": _mel(), "tokenizer": text}
    return build_processor(Qwen2_5OmniProcessor, **parts, chat_template=template("qwen2_5_omni"))


def omni_model(processor: Any) -> Any:
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    tokens = processor.tokenizer
    config = Qwen2_5OmniThinkerConfig(
        audio_config=_TOWER_AUDIO | {"n_window": 50, "output_dim": 32},
        vision_config=QWEN_TOWER | {"fullatt_block_indexes": [1], "window_size": 56},
        text_config=TEXT | ids(tokens) | {"rope_parameters": MROPE},
        audio_token_index=tokens.audio_token_id,
        image_token_index=tokens.image_token_id,
        video_token_index=tokens.video_token_id,
        audio_start_token_id=tokens.audio_bos_token_id,
        audio_end_token_id=tokens.audio_eos_token_id,
    )
    config.vision_start_token_id = tokens.vision_bos_token_id
    config.vision_end_token_id = tokens.vision_eos_token_id
    return random_model(Qwen2_5OmniThinkerForConditionalGeneration, config)


def whisper_processor() -> Any:
    from transformers import WhisperProcessor, WhisperTokenizer

    tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    special = ["<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
    special += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    text = tokenizer(
        special, kind=WhisperTokenizer, unk_token="<|endoftext|>", language="en", task="transcribe", **tokens
    )
    return WhisperProcessor(_mel(80), text)


def whisper_model(processor: Any) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    tower = {key: value for key, value in _TOWER_AUDIO.items() if key != "num_mel_bins"}
    config = WhisperConfig(
        **tower,
        num_mel_bins=80,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=48,
        decoder_start_token_id=processor.tokenizer.convert_tokens_to_ids("<|startoftranscript|>"),
        **ids(processor.tokenizer),
    )
    return random_model(WhisperForConditionalGeneration, config)
