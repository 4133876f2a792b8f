"""Hugging Face configs -> sizes of a TransformerCost, for one phase. Reads plain mappings, without transformers.

Most configs have all that counts under the same few keys. Rules of a family add the form of its feed-forward, the
layers with windows, and the end of its vision tower. A config with layers that the formula lacks (latent or linear
attention, state spaces, another window) raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchdata.balancers.assignment import checked_count

Sizes = dict[str, Any]

# Keys under which a config of the whole model has the config of a phase.
PARTS = {
    "image": ("vision_config",),
    "audio": ("audio_config",),
    "llm": ("text_config", "llm_config", "language_config"),
}
# A key that only the config of this phase has.
MARKS = {"image": "patch_size", "audio": "num_mel_bins", "llm": "vocab_size"}

# With a GELU, the gate depends on the model: these text models have one, or none.
GATED = ("gemma", "gemma2", "gemma3", "gemma3_text")
NOT_GATED = ("gpt2", "gpt_neox", "gptj", "opt", "phi", "starcoder2")
# Without head_dim in the config, heads together are not as wide as the residual stream.
HEADED = ("gemma", "gpt_oss", "qwen3")
# Attention with a gate, or other layers than their keys say: refused.
NOT_AS_USUAL = ("afmoe", "beam", "hunyuan_v1_moe")
SILU = ("silu", "swish", "swiglu")
# Towers with a GELU that their config.json may leave out.
GELU_TOWERS = ("clip", "idefics3", "intern", "qwen2_vl", "siglip", "smolvlm", "vit")
# Models that cut an image into any number of squares of one size, each a separate sequence in the tower.
SQUARES = (
    "gemma3",
    "idefics3",
    "internvl",
    "internvl_chat",
    "llava",
    "llava_next",
    "llava_onevision",
    "paligemma",
    "smolvlm",
)
# Encoders like that of Whisper.
WHISPERS = ("qwen2_audio", "qwen2_5_omni", "qwen3_omni", "voxtral_encoder", "whisper")
# One of this number of layers has full attention; 0: none has.
FULL_EVERY = {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gemma3_text": 6, "mistral": 0, "mixtral": 0, "phi3": 0}
# Keys of the sizes of experts.
EXPERTS = {
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "ffn": ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size"),
    "shared": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "shared_ffn": ("shared_expert_intermediate_size", "shared_intermediate_size"),
}
EXPERT_KEYS = {key for keys in EXPERTS.values() for key in keys}
# If present and not empty, these change the cost of a position in ways that are not known here.
NOT_READ = {
    "llm": (
        "attention_chunk_size",
        "cross_attention_layers",
        "global_head_dim",
        "hidden_size_per_layer_input",
        "hybrid_override_pattern",
        "index_n_heads",
        "is_encoder_decoder",
        "keep_window_size",
        "kv_channels",
        "kv_lora_rank",
        "lambda_std_dev",
        "layers_block_type",
        "linear_num_key_heads",
        "mamba_d_state",
        "multi_query",
        "new_decoder_architecture",
        "num_kv_shared_layers",
        "num_layers_per_stack",
        "ssm_cfg",
        "state_size",
        "v_head_dim",
    ),
    "image": ("depths", "global_attn_indexes", "num_global_layers", "use_swiglu_ffn"),
    "audio": (),
}


@dataclass(frozen=True, slots=True)
class MoE:
    """A mixture of experts in place of the feed-forward: the experts that a position passes count, not all.

    Attributes:
        num_experts: experts that the router scores.
        top_k: experts that a position is sent to.
        ffn: width of one expert.
        shared_ffn: width of the experts that all positions pass, together.
        dense_layers: layers that have a plain feed-forward instead, of `TransformerCost.ffn`.
    """

    num_experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_experts", 1), ("top_k", 1), ("ffn", 1), ("shared_ffn", 0), ("dense_layers", 0)):
            object.__setattr__(self, name, checked_count(getattr(self, name), f"MoE.{name}", least))
        if self.top_k > self.num_experts:
            raise ValueError(f"MoE.top_k must be at most num_experts={self.num_experts}, got {self.top_k}")


@dataclass(frozen=True, slots=True)
class Part:
    """The config of one phase: its keys, and those of its model (its own if no other config was given); `phase` is
    "image", "audio" or "llm"; `given` are sizes that are not read from the config.
    """

    values: Mapping[str, Any]
    whole: Mapping[str, Any]
    phase: str
    given: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.values.get("model_type") or self.whole.get("model_type") or "of no model_type")

    def get(self, *keys: str, default: Any = None) -> Any:
        """Return the first value of `keys` that is not None."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), default)

    def size(self, name: str, *keys: str) -> Any:
        """Return an attribute of TransformerCost: the given one, or that of one of `keys`."""
        return self.given[name] if name in self.given else self.need(*keys, name=name)

    def need(self, *keys: str, name: str) -> Any:
        """Return the first value of `keys`, needed for `name`."""
        value = self.get(*keys)
        if value is None:
            raise ValueError(
                f"the {self.phase} config ({self.kind}) has no {' or '.join(keys)}. A config.json leaves out"
                " defaults of its class: give the object that transformers.AutoConfig.from_pretrained returns, or"
                f" pass it: from_config(config, {self.phase!r}, {name}=...)"
            )
        return value

    def refuse(self, what: str) -> ValueError:
        return ValueError(
            f"the {self.phase} config ({self.kind}) has {what}, which TransformerCost.from_config does not read:"
            " describe the phase with TransformerCost(...), or measure it with fit_phase_costs"
        )


def phases_of(config: Any) -> tuple[str, ...]:
    """Return the phases that a config describes: of a whole model, or of a tower alone."""
    whole = model_keys(config)
    return tuple(phase for phase in PARTS if phase_keys(whole, phase) is not None)


def transformer_sizes(config: Any, phase: str | None, given: Mapping[str, Any]) -> Sizes:
    """Return arguments of TransformerCost for a phase of a config; given ones are unchanged. Raises ValueError: no such
    phase, a size that is missing, or layers that are not known here.
    """
    phases = phases_of(config)
    if phase is None and len(phases) == 1:
        phase = phases[0]
    if phase not in phases:
        has = f"it describes {', '.join(phases)}" if phases else "it has none of the keys by which phases are known"
        raise ValueError(
            f"the config has no phase {phase!r}: {has}" if phase else f"pass the phase of the config: {has}"
        )
    whole = model_keys(config)
    part = Part(phase_keys(whole, phase) or {}, whole, phase, given)
    if phase == "llm" and MARKS["audio"] in whole:
        return {**_decoder(part), **given}
    for key in NOT_READ[phase]:
        if part.get(key):
            raise part.refuse(f"{key}={part.get(key)!r}")
    return {**READERS[phase](part), **given}


def _decoder(part: Part) -> Sizes:
    """Whisper's decoder: each layer attends to all positions of the encoder, for a clip of any length."""
    return {
        "hidden": part.size("hidden", "d_model"),
        "layers": part.size("layers", "decoder_layers"),
        "heads": part.size("heads", "decoder_attention_heads"),
        "ffn": part.size("ffn", "decoder_ffn_dim"),
        "vocab": part.size("vocab", "vocab_size"),
        "causal": True,
        "cross_positions": part.size("cross_positions", "max_source_positions"),
    }


def _llm(part: Part) -> Sizes:
    if part.kind in NOT_AS_USUAL:
        raise part.refuse("layers that its keys do not describe")
    layers = part.size("layers", "num_hidden_layers", "n_layer", "num_layers")
    sizes = {
        "layers": layers,
        "hidden": part.size("hidden", "hidden_size", "n_embd", "d_model"),
        "heads": part.size("heads", "num_attention_heads", "n_head"),
        "kv_heads": part.get("num_key_value_heads"),
        "head_dim": part.size("head_dim", "head_dim") if part.kind.startswith(HEADED) else part.get("head_dim"),
        "vocab": part.size("vocab", "vocab_size"),
        "causal": True,
        "gated": _gated_llm(part),
        "moe": _moe(part, layers),
        **_sliding(part, layers),
    }
    ffn = part.get("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    if ffn is None and part.kind in ("gpt2", "gptj"):
        ffn = 4 * sizes["hidden"]
    if ffn is None and sizes["moe"] is not None:
        ffn = sizes["moe"].ffn
    return {**sizes, "ffn": ffn if ffn is not None else part.size("ffn", "intermediate_size")}


def _gated_llm(part: Part) -> bool:
    activation = part.get("hidden_activation", "hidden_act", "activation_function", default="")
    if "gated" in part.given or activation in SILU or part.kind in GATED:
        return True
    if part.kind in NOT_GATED:
        return False
    raise ValueError(
        f"the llm config ({part.kind}) with activation {activation!r} does not say whether its feed-forward has a gate:"
        " pass it, from_config(config, 'llm', gated=...)"
    )


def _moe(part: Part, layers: int) -> MoE | None:
    if "moe" in part.given:
        return None
    experts = part.get(*EXPERTS["num_experts"])
    for key, value in part.values.items():
        about_experts = "expert" in key or key.startswith("moe_")
        if about_experts and key not in EXPERT_KEYS and type(value) is int and value > 1:
            raise part.refuse(f"{key}={value}")
    if not experts or experts == 1:
        return None
    top_k, ffn = (part.need(*EXPERTS[name], name="moe") for name in ("top_k", "ffn"))
    shared = part.get(*EXPERTS["shared_ffn"], default=part.get(*EXPERTS["shared"], default=0) * ffn)
    return MoE(experts, top_k, ffn, shared, dense_layers=layers - _sparse_layers(part, layers))


def _sparse_layers(part: Part, layers: int) -> int:
    """Count the layers with experts."""
    by_layer = _by_layer(part, "mlp_layer_types", layers)
    if by_layer:
        return by_layer.count("sparse")
    first = part.get("first_k_dense_replace", "num_dense_layers", default=0)
    step = part.get("decoder_sparse_step", default=1)
    dense = set(part.get("mlp_only_layers", default=()))
    return sum(layer >= first and layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _sliding(part: Part, layers: int) -> Sizes:
    """Count the layers with a window, from the config's list of layers, or by the rule of the family."""
    if "window" in part.given:
        return {}
    window = part.get("sliding_window") if part.get("use_sliding_window", default=True) else None
    by_layer = _by_layer(part, "layer_types", layers)
    unknown = set(by_layer) - {"full_attention", *(("sliding_attention",) if window else ())}
    if unknown:
        raise part.refuse(f"layer_types {sorted(unknown)} and sliding_window={window}")
    if window is None:
        return {}
    every = part.get("sliding_window_pattern", "_sliding_window_pattern", default=FULL_EVERY.get(part.kind))
    if by_layer:
        sliding = by_layer.count("sliding_attention")
    elif part.get("max_window_layers") is not None:
        sliding = max(0, layers - part.values["max_window_layers"])
    elif every is not None:
        sliding = layers - (layers // every if every else 0)
    else:
        raise part.refuse(f"sliding_window={window} and no layer_types")
    return {"window": window, "window_layers": sliding}


def _by_layer(part: Part, key: str, layers: int) -> Sequence[str]:
    """Return the config's list for the first `layers` layers; empty if it has none."""
    listed: Sequence[str] = part.get(key, default=())
    stated = part.get("num_hidden_layers", default=layers)
    if listed and (len(listed) != stated or layers > stated):
        raise ValueError(
            f"the {part.phase} config ({part.kind}) lists {len(listed)} {key} for num_hidden_layers={stated}"
            + (f", and layers={layers} were passed" if layers != stated else "")
            + ": make the two agree"
        )
    return listed[:layers]


def _image(part: Part) -> Sizes:
    qwen = part.kind.startswith("qwen")
    if part.get("spatial_merge_size") and not qwen:
        raise part.refuse("a merger (spatial_merge_size)")
    # In Qwen2-VL embed_dim is the width, and hidden_size the width after the merger.
    hidden = part.size("hidden", *(("embed_dim", "hidden_size") if qwen else ("hidden_size", "embed_dim")))
    layers = part.size("layers", "num_hidden_layers", "depth", "num_layers")
    ratio = part.get("mlp_ratio") if part.get("intermediate_size") is None else None
    first, others = _connector(part, hidden)
    return {
        "hidden": hidden,
        "layers": layers,
        "heads": part.size("heads", "num_attention_heads", "num_heads"),
        "head_dim": part.get("head_dim"),
        "ffn": int(ratio * hidden) if ratio else part.size("ffn", "intermediate_size"),
        "gated": "gated" in part.given or _gated_tower(part),
        "stem_macs": _patch_embedding(part, hidden),
        "connector_macs": first + others,
        "connector_first_macs": first,
        **(_blocks(part, layers) or _squares(part)),
    }


def _gated_tower(part: Part) -> bool:
    if part.get("use_gated_mlp") is not None:
        return bool(part.get("use_gated_mlp"))
    if part.kind == "pixtral":  # with any activation
        return True
    if part.kind.startswith(GELU_TOWERS):
        return part.get("hidden_act", default="gelu") in SILU
    return part.need("hidden_act", "hidden_activation", name="gated") in SILU


def _patch_embedding(part: Part, hidden: int) -> float:
    if "stem_macs" in part.given:
        return 0.0
    patch, frames = part.need("patch_size", name="stem_macs"), part.get("temporal_patch_size", default=1)
    values = part.get("num_channels", "in_channels", "in_chans", default=3)
    for side in (*_pair(patch), _pair(frames)[0]):
        values *= side
    return float(values * hidden)


def _blocks(part: Part, layers: int) -> Sizes:
    """Windows of Qwen2.5-VL's tower: squares of `window_size` pixels."""
    if part.get("window_size") is None or "window" in part.given:
        return {}
    full = part.get("fullatt_block_indexes")
    if full is None:
        raise part.refuse(f"window_size={part.values['window_size']} and no fullatt_block_indexes")
    merge = part.need("spatial_merge_size", name="window")
    side = part.values["window_size"] // merge // _pair(part.need("patch_size", name="window"))[0] * merge
    return {"window": side * side, "window_layers": layers - sum(layer < layers for layer in full)}


def _squares(part: Part) -> Sizes:
    """Squares that a whole model cuts images into: pairs of positions are inside one square."""
    side = part.get("image_size")
    if str(part.whole.get("model_type")) not in SQUARES or part.kind == "pixtral" or not side:
        return {}
    rows, columns = (
        pixels // patch for pixels, patch in zip(_pair(side), _pair(part.values["patch_size"]), strict=True)
    )
    return {} if "window" in part.given else {"window": rows * columns}


def _audio(part: Part) -> Sizes:
    """Whisper's encoder and similar ones."""
    if not part.kind.startswith(WHISPERS):
        raise part.refuse(f"model_type {part.kind}")
    hidden = part.size("hidden", "d_model", "hidden_size")
    stem = _conv2d_stem if part.get("downsample_hidden_size") else _conv1d_stem
    first, others = _connector(part, hidden)
    return {
        "hidden": hidden,
        "layers": part.size("layers", "encoder_layers", "num_hidden_layers"),
        "heads": part.size("heads", "encoder_attention_heads", "num_attention_heads"),
        "ffn": part.size("ffn", "encoder_ffn_dim", "intermediate_size"),
        "connector_macs": first + others,
        "connector_first_macs": first,
        **stem(part, hidden),
    }


def _conv1d_stem(part: Part, hidden: int) -> Sizes:
    """Two convolutions of three frames, the second of stride 2; Qwen2.5-Omni has windows of 2*n_window frames."""
    window = {"window": part.values["n_window"]} if part.get("n_window") else {}
    return {"stem_macs": 2 * 3 * part.need("num_mel_bins", name="stem_macs") * hidden + 3 * hidden * hidden, **window}


def _conv2d_stem(part: Part, hidden: int) -> Sizes:
    """Qwen3-Omni: three convolutions of 3 x 3 and stride 2 over chunks of 2*n_window frames, then a layer."""
    channels, chunk = part.values["downsample_hidden_size"], 2 * part.need("n_window", name="stem_macs")
    frames, bins = chunk, part.need("num_mel_bins", name="stem_macs")
    macs, inputs = 0, 1
    for _ in range(3):
        frames, bins = -(-frames // 2), -(-bins // 2)
        macs += frames * bins * 9 * inputs * channels
        inputs = channels
    window = frames * (part.need("n_window_infer", name="window") // chunk)
    return {"stem_macs": macs / frames + channels * bins * hidden, "window": window}


def _connector(part: Part, width: int) -> tuple[float, float]:
    """Return multiply-accumulates for each position of the tower: of products directly after it, and of later ones; 0
    without a known connector. A norm before a product, trained with the connector, needs the gradients of its inputs as
    another product does.
    """
    if "connector_macs" in part.given:
        return 0.0, 0.0
    # Connectors of the tower itself.
    merge, pooled = part.get("spatial_merge_size"), part.get("output_dim")
    out = part.get("out_hidden_size", default=part.get("hidden_size") if part.get("embed_dim") else None)
    if merge and out:  # Qwen-VL: groups of merge**2 positions, a square layer and one to the LLM's width
        mergers = 1 + len(part.get("deepstack_visual_indexes", default=()))
        return 0.0, float(mergers * width * (merge * merge * width + out))
    if pooled and part.phase == "audio":  # Qwen3-Omni: two layers; Qwen2.5-Omni: one after pairs of positions
        two = part.get("downsample_hidden_size")
        return (float(width * width), float(width * pooled)) if two else (width * pooled / 2, 0.0)
    # Connectors of the whole model.
    rule = CONNECTORS.get(str(part.whole.get("model_type")))
    if rule is None:
        return 0.0, 0.0
    text = Part(phase_keys(part.whole, "llm") or {}, part.whole, "llm", {})
    first, others = rule(width, text.need("hidden_size", name="hidden"), part)
    return float(first), float(others)


def _tokens_pooled(part: Part) -> float:
    """Return the positions that Gemma 3 pools into one token."""
    image, patch, tokens = part.get("image_size"), part.get("patch_size"), part.whole.get("mm_tokens_per_image")
    return (image // patch) ** 2 / tokens if image and patch and tokens else 16.0


def _shuffled(width: int, llm: int, part: Part) -> tuple[float, float]:
    """InternVL: squares of positions concatenated, a norm and two layers."""
    side = int(1 / part.whole.get("downsample_ratio", 0.5))
    return 0.0, width * llm + llm * llm / side**2


def _projected(width: int, llm: int, part: Part) -> tuple[float, float]:
    """LLaVA: the outputs of one or more layers of the tower concatenated, then two layers."""
    chosen = part.whole.get("vision_feature_layer")
    return (len(chosen) if isinstance(chosen, list | tuple) else 1) * width * llm, llm * llm


# Width of the tower, width of the LLM -> multiply-accumulates a position, directly after the tower and later.
CONNECTORS: dict[str, Callable[[int, int, Part], tuple[float, float]]] = {
    "gemma3": lambda width, llm, part: (0.0, width * llm / _tokens_pooled(part)),
    "idefics3": lambda width, llm, part: (width * llm, 0.0),
    "internvl": _shuffled,
    "internvl_chat": _shuffled,
    "llava": _projected,
    "llava_next": _projected,
    "llava_onevision": _projected,
    "paligemma": lambda width, llm, part: (width * llm, 0.0),
    "qwen2_audio": lambda width, llm, part: (width * llm / 2, 0.0),
    "smolvlm": lambda width, llm, part: (width * llm, 0.0),
}
READERS: dict[str, Callable[[Part], Sizes]] = {"image": _image, "audio": _audio, "llm": _llm}


def _mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if callable(getattr(config, "to_dict", None)):
        return _mapping(config.to_dict())
    raise ValueError(
        f"a config must be a mapping or have to_dict, got {type(config).__name__}: pass model.config, or "
        "transformers.AutoConfig.from_pretrained(name)"
    )


def model_keys(config: Any) -> Mapping[str, Any]:
    """Return the keys of the whole model; for omni models those of its thinker."""
    whole = _mapping(config)
    return _mapping(whole["thinker_config"]) if whole.get("thinker_config") else whole


def phase_keys(whole: Mapping[str, Any], phase: str) -> Mapping[str, Any] | None:
    """Return the config of a phase: nested, or at the top level for text models and towers alone."""
    nested = next((whole[name] for name in PARTS[phase] if whole.get(name)), None)
    if nested is not None:
        return _mapping(nested)
    encoder_alone = phase == "llm" and MARKS["audio"] in whole and not whole.get("decoder_layers")
    return whole if MARKS[phase] in whole and not encoder_alone else None


def _pair(side: int | Sequence[int]) -> tuple[int, int]:
    return (side, side) if isinstance(side, int) else (side[0], side[1])
