"""Models of transformers: what a family needs besides the common inputs, one row a family, by `config.model_type`; and
a tiny random model of any configuration, the same code and the same kinds of layers, at a thousandth of the size.

    config --tiny_configs--> smaller ones, the smallest first --tiny_model--> the first of which a model runs on a text

What can be asked of a model's class is asked there (`model_class`); the table has what only reading its code tells,
held by the parity tests. Of a tiny model the first layers stay, until each kind was seen; widths are divided by one
number, so that what adds and multiplies up still does. What is tried is true of the code that the user's model runs.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import random
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

SeesAhead = Literal["", "media", "prefix"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a model reads a batch."""

    packs: bool = True  # samples may stand in one row at all; whether they are kept apart there is tried (`trials`)
    mrope: bool = False  # positions are (4, rows, T): counting, then time, height and width
    first_position: int = 0  # of each sample
    # What attends in both directions: tokens of the same "media" part, or the "prefix" that is only read. Padded,
    # `token_type_ids` say so (1 on media, or after the prefix). Packed, transformers would let samples see each other,
    # so it gets the masks.
    sees_ahead: SeesAhead = ""
    nested: bool = False  # pixel arrays have a leading dimension for samples, (1, num_tiles, ...)
    part_features: tuple[str, ...] = ("image",)  # taken ready made, in `mm_encoder_outputs`: can be encoded per phase
    decoder: bool = False  # text is what a decoder says of what its encoder hears: no media in the sequence
    expects_runs: bool = False  # tokens of media that all stand alone are taken for marks of an older processor


_QWEN_VL: Final = Family(mrope=True, part_features=("image", "video"))
_LLAVA: Final = Family()
_IDEFICS: Final = Family(nested=True)
_TEXT: Final = Family(part_features=())

FAMILIES: Final[dict[str, Family]] = {
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "qwen3_vl": _QWEN_VL,
    "qwen2_5_omni_thinker": Family(mrope=True),
    "llava": _LLAVA,
    "llava_next": _LLAVA,
    "llava_onevision": _LLAVA,
    "internvl": _LLAVA,
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "gemma3": Family(sees_ahead="media"),
    "paligemma": Family(sees_ahead="prefix", first_position=1),
    "qwen2_audio": Family(part_features=(), expects_runs=True),
    "whisper": Family(packs=False, part_features=(), decoder=True),
}
READ_PADDING: Final = {
    "granite_speech": "audio",
    "granite_speech_plus": "audio",
    "phi4_multimodal": "audio",
    "prophetnet": "text",
}
"""Models whose samples change each other also in padded rows -> what they read the padding of."""
TOWERS: Final = {"image": "get_image_features", "video": "get_video_features"}
"""Modality -> the method that encodes it."""

_TASKS: Final = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "CAUSAL_LM")
_MEDIA_ARGUMENTS: Final = frozenset(
    "pixel_values pixel_values_videos image_pixel_values input_features audio_input_features input_values".split()
)


def thinker(config: Any) -> Any:
    """The part of a configuration whose model is trained: of Qwen2.5-Omni the thinker."""
    return config.thinker_config if hasattr(config, "thinker_config") else config


def family_of(config: Any) -> Family | None:
    """Return the family of a configuration; models of text alone are one family, with any layers. None if unknown."""
    if (known := FAMILIES.get(config.model_type)) is not None:
        return known
    if getattr(config, "is_encoder_decoder", False) or config.get_text_config() is not config:
        return None
    # A configuration that is its own text part may have towers too. Gemma3ForCausalLM names images, and takes none.
    read = model_class(config).input_modalities
    reads_text = "text" in ((read,) if isinstance(read, str) else read)
    return _TEXT if reads_text and not (takes(config) & _MEDIA_ARGUMENTS) else None


def model_class(config: Any) -> type[Any]:
    """The class whose forward is called. Raises ValueError for a configuration of no such model."""
    from transformers.models.auto import modeling_auto

    names = [name for name in vars(modeling_auto) if re.fullmatch(r"MODEL_FOR_\w+_MAPPING", name)]
    first = [f"MODEL_FOR_{task}_MAPPING" for task in _TASKS]
    for name in dict.fromkeys((*first, *sorted(names))):
        mapping = getattr(modeling_auto, name, {})
        kind: type[Any] | None = mapping.get(type(config), None)
        # Of other tasks, those whose models write text: AudioFlamingo3 is listed as one from sequence to sequence.
        if kind is None:
            continue
        can_generate, named = getattr(kind, "can_generate", None), inspect.signature(kind.forward).parameters
        if name in first or (can_generate and can_generate() and {"input_ids", "labels"} <= named.keys()):
            return kind
    raise ValueError(
        f"transformers {import_module('transformers').__version__} has no model for {type(config).__name__} that reads "
        "and writes text, which od.hf.Inputs is for: give the configuration of one (its model_type is "
        f"{config.model_type!r}), or use od.Packed() or od.Padded(), whose batches any model can be fed from"
    )


def takes(config: Any) -> frozenset[str]:
    """Names that its forward takes."""
    return frozenset(inspect.signature(model_class(config).forward).parameters)


WINDOW: Final = 8
"""Positions that attention of the language model reaches back where it is bounded, and of a chunk."""
_DIVISORS: Final = (16, 8, 4)
_MOST_PARAMETERS: Final = 60_000_000
_MOST_TOKENS: Final = 4096
"""Of a vocabulary. Special tokens beyond it become others in its second half."""
_TOKENS: Final = 24
_TRIED: Final = 6
"""Tokens of the text that a model must run on."""

Fields = Mapping[str, Any]

# What a field is follows from its name. Fields about layers:
_COUNTS: Final = re.compile(
    r"(?!.*(adapter|feat_extract|conv|lstm|residual|dense|nextn|mtp|shared|add|prediction))"
    r"(.*_)?(num_hidden_layers|num_layers|n_layers?|num_blocks|num_layers_per_stack|depth|layers"
    r"|(encoder|decoder)_num_hidden_layers|(encoder|decoder)_layers|num_(encoder|decoder)_layers)"
)
_PERIODS: Final = re.compile(
    r".*(_pattern|_period|_interval|_freq|_frequency|_step|_every_n_layers|layer_group_size|per_attn_res_block)"
)
_LEADING: Final = re.compile(r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|max_window_layers")
_NUMBERS: Final = re.compile(r".*(_indexes|_indices|_idxs|_layer_ids|_layers|_layer|insert_layer_id|layer_end_index)")
# Widths, but for tables of positions, which are as long as images and clips want them.
_WIDTHS: Final = re.compile(
    r"(?!.*position)(.*_)?(hidden_size|hidden_dim|hidden_width|d_model|n_embd|embed_dim|emb_dim|embedding_size"
    r"|embedding_dim|model_dim|out_dim|output_dim|projection_dim|proj_dim|projector_input_dim|adapter_in_dim"
    r"|adapter_input_size|lru_width|embed_size|conv_output_size|output_size|conv_channels|out_channel"
    r"|intermediate_size|intermediate_size_mlp|ffn_hidden_size|ffn_hidden|ffn_dim|ffn_size|d_ff|dff|dim_ff|mlp_dim"
    r"|n_inner|feed_forward_size|feedforward_dim|expert_dim|d_inner|head_dim|headdim|d_kv|kv_channels|dim_head|d_head"
    r"|attention_head_size|rank|lowrank|latent_size|d_rel|state_size|d_state|d_ssm|router_hidden_size"
    r"|hidden_size_per_layer_input)|dim"
)
_HEADS: Final = re.compile(r"(.*_)?(num_attention_heads|attention_heads|num_key_value_heads|n_heads?|num_heads)")
_HEAD: Final = re.compile(r"(.*_)?(head_dim|headdim|d_kv|kv_channels|dim_head|d_head|attention_head_size)")
_FEW: Final = (
    (re.compile(r"(.*_)?(num|n)(_[a-z]+)?_experts|zero_expert_num"), 4),
    (re.compile(r"(.*_)?(experts_per_tok|experts_per_token|moe_topk|moe_top_k|moe_k|top_k_experts)"), 2),
    (re.compile(r"n_group|topk_group|num_expert_group"), 2),
    (re.compile(r"ngram_vocab_size_base|encoder_hash_byte_group_vocab"), 64),
    (re.compile(r"(.*_)?vocab_size(_per_layer_input)?"), _MOST_TOKENS),
)
# Of the language model: what bounds attention, but for the longest piece of an evaluation, which bounds none.
_FEW_OF_TEXT: Final = (
    (re.compile(r"index_topk_blocks|index_kpool|.*compress_ratio|compress_rates"), 4),
    (
        re.compile(
            r"(?!max_inference)(.*_)?(window|chunk|span)s?(_?(size|len|length|width))?|(.*_)?(local_attention|rel_extent"
            r"|floor_scale|log_scaling_n_floor|index_topk|block_size|attention_context_left|attention_context_right)"
        ),
        WINDOW,
    ),
)
_POSITIONS: Final = re.compile(r"(original_)?max_position_embeddings|n_positions|n_ctx|max_sequence_length|max_seq_len")
_SPECIAL: Final = re.compile(r".*(_id|_index|_ids)")
# What makes two runs of the same model differ, or adds to its loss.
_CHANCE: Final = re.compile(
    r".*(dropout|drop_rate|drop_path_rate|pdrop|layerdrop|layer_drop|jitter|_drop)(_.*)?"
    r"|.*(aux_loss_coef|z_loss_coefficient|z_loss_coef|moe_loss_weight|mtp_loss_scaling_factor)"
)
_OFF: Final = ("output_router_logits", "apply_spec_augment", "use_cache", "use_mamba_kernels", "use_mem_eff_path")


class NoTinyModelError(ValueError):
    """No tiny model of a configuration can be built, or none runs on a text."""


def tiny_model(config: Any, attn_implementation: str | None = None, positions: int | None = None) -> Any:
    """A tiny random model of a configuration (of Qwen-Omni the thinker's), on the CPU, in float32 and in training mode,
    the same at each call; its language model knows at most `positions`. Nothing of the caller's has influence, or is
    touched. Raises NoTinyModelError.
    """
    config = thinker(config)
    kind, last = model_class(config), None
    for smaller in tiny_configs(config, positions):
        try:
            with undisturbed():
                return built(kind, smaller, attn_implementation)
        except Exception as error:  # noqa: BLE001 - classes of all kinds, on untried sizes
            last = error
    raise NoTinyModelError(f"no tiny model of {config.model_type} runs: {type(last).__name__}: {last}") from last


def built(kind: Any, config: Any, attention: str | None) -> Any:
    """One model of a class and a small configuration, that runs on a text. For use within `undisturbed`."""
    for _, each in parts(config) if attention else ():
        each._attn_implementation = attention
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind(config).parameters())
    if count > _MOST_PARAMETERS:
        raise NoTinyModelError(f"{count:,} parameters, {_MOST_PARAMETERS:,} at most")
    model = kind(config)

    # Weights large enough that every input matters; those of initialisation hide what is zero or nearly so.
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(0.05 * drawn)
            else:
                parameter.copy_(drawn * min(0.3, parameter.shape[-1] ** -0.5))
    model = model.float().train()
    if getattr(config, "is_encoder_decoder", False):  # they want to hear or see something first
        return model

    arguments: dict[str, Any] = {"input_ids": text_of(config, _TRIED)[None], "use_cache": False}
    for name in {"mm_token_type_ids", "token_type_ids"} & takes(config):
        arguments[name] = torch.zeros_like(arguments["input_ids"])
    with torch.no_grad():
        logits = model(**arguments).logits
    if not bool(logits.isfinite().all()):
        raise NoTinyModelError("its logits are not finite")
    return model


def text_of(config: Any, length: int, seed: int = 0) -> Tensor:
    """(length,) int64: tokens of a text, none of which is special; some come again, as in any text."""
    said = [value for _, each in parts(config) for name, value in vars(each).items() if _SPECIAL.fullmatch(name)]
    special = {token for value in said for token in (value if isinstance(value, list | tuple) else [value])}
    usual = [token for token in range(min(text_part(config).vocab_size, 512)) if token not in special][:_TOKENS]
    drawn = torch.randint(len(usual), (length,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(usual)[drawn]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Run by torch's and transformers' defaults, silently, and leave everything as it was."""
    from transformers.utils import logging

    python, level = random.getstate(), logging.get_verbosity()
    arrays = np.random.get_state()  # noqa: NPY002 - what models draw from
    dtype, tokens = torch.get_default_dtype(), torch.random.get_rng_state()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.device("cpu"))
        warnings.simplefilter("ignore")
        try:
            logging.set_verbosity_error()
            torch.set_default_dtype(torch.float32)
            # Of torch.manual_seed also the accelerators' state would be lost.
            torch.default_generator.manual_seed(0)
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)  # noqa: NPY002
            torch.random.set_rng_state(tokens)
            torch.set_default_dtype(dtype)
            logging.set_verbosity(level)


def text_part(config: Any) -> Any:
    """The configuration of the language model; of several texts the one that is written."""
    for decoder in (None, True):
        try:
            return config.get_text_config(decoder=decoder)
        except ValueError:  # several
            continue
    return config


def parts(config: Any, *, of_text: bool | None = None) -> Iterator[tuple[bool, Any]]:
    """The configurations in a tree, the whole first, each with whether it is of the language model."""
    from transformers import PretrainedConfig

    inner = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    text = text_part(config) if of_text is None else None
    is_text = bool(of_text) if of_text is not None else text is config or not inner
    yield is_text, config
    for each in inner:
        holds_text = text is not None and any(other is text for _, other in parts(each, of_text=False))
        yield from parts(each, of_text=is_text or holds_text)


def tiny_configs(config: Any, positions: int | None = None) -> Iterator[Any]:
    """Copies of a configuration, the smallest first: which of them runs, only trying tells. They have the same kinds of
    layers, and what images and clips depend on. Dropout, router losses and quantisation are off.
    """
    yield _changed(config, _DIVISORS[0], positions)
    yield _changed(config, _DIVISORS[0], positions, twice=True)
    yield _changed(config, _DIVISORS[0], positions, heads=True)
    for by in (*_DIVISORS[1:], 1):
        yield _changed(config, by, positions)


def _changed(config: Any, by: int, positions: int | None, *, twice: bool = False, heads: bool = False) -> Any:
    """Widths divided; of heads their size, or if `heads` their number."""
    smaller = copy.deepcopy(config)
    for is_text, each in parts(smaller):
        fields = {name: value for name, value in _fields(each).items() if not name.startswith("_")}
        changed = _fewer_layers(fields, twice=twice)
        fields |= changed
        smaller_fields = {name: _smaller(name, value, by, text=is_text, heads=heads) for name, value in fields.items()}
        changed |= {name: value for name, value in smaller_fields.items() if value is not fields[name]}
        # Turned positions in proportion to the size of a head.
        before, after = _head(fields), _head(fields | changed)
        if before and before != after:
            changed |= {name: _turned(each, before, after) for name, each in fields.items() if name.startswith("rope_")}
            if type(fields.get("rotary_dim")) is int:
                changed["rotary_dim"] = max(2, fields["rotary_dim"] * after // before)
        width, count = (fields | changed).get("hidden_size"), (fields | changed).get("num_attention_heads")
        if not is_text and type(width) is type(count) is int and width % count:
            changed["num_attention_heads"] = math.gcd(width, count)
        if positions is not None and is_text:
            changed |= {name: _bounded(name, value, positions) for name, value in (fields | changed).items()}
        each.__dict__.update(changed)
        each.__dict__.pop("quantization_config", None)
    return smaller


def _fields(config: Any) -> dict[str, Any]:
    """Values of a configuration, also numbers that are said once for its class."""
    from transformers import PretrainedConfig

    own = [kind for kind in type(config).__mro__ if issubclass(kind, PretrainedConfig) and kind is not PretrainedConfig]
    said: dict[str, Any] = {}
    for kind in reversed(own):
        said |= {name: value for name, value in vars(kind).items() if type(value) is int}
    return {**said, **vars(config)}


def _fewer_layers(fields: Fields, *, twice: bool) -> dict[str, Any]:
    """The fields about layers, where the first ones stay: until each kind was seen, or for twice as many.

    A layer's kind is all that is said of it: its entry in each list that has one for every layer (`layer_types`,
    `no_rope_layers`, ...), whether lists of layer numbers name it, and its place in patterns that a number describes.
    """
    changed: dict[str, Any] = {}
    counts = {name: value for name, value in fields.items() if type(value) is int and _COUNTS.fullmatch(name)}
    patterns = [value for name, value in fields.items() if type(value) is int and _PERIODS.fullmatch(name)]
    leading = [value + 1 for name, value in fields.items() if type(value) is int and _LEADING.fullmatch(name)]
    for total in set(counts.values()):
        said = [value for value in fields.values() if _is_by_layer(value, total)]
        named = [value for name, value in fields.items() if _names_layers(name, value, total)]
        kinds = [
            (*(repr(value[layer]) for value in said), *(layer in value for value in named)) for layer in range(total)
        ]
        seen = max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)
        count = min(total, max(2, seen, *patterns, *(each for each in leading if each <= total)))
        count = min(total, 2 * count) if twice else count
        changed |= {name: count for name, value in counts.items() if value == total}
        for name, value in fields.items():
            if _names_layers(name, value, total):
                changed[name] = type(value)(layer for layer in value if layer < count)
            elif _is_by_layer(value, total):
                changed[name] = value[:count]
            elif _NUMBERS.fullmatch(name) and name not in counts and type(value) is int:
                changed[name] = max(-count, min(value, count - 1))
        if fields.get("num_kv_shared_layers") and "layer_types" in changed:
            # The last layers use keys of earlier ones of their kind: all layers twice.
            lists = {name: value for name, value in changed.items() if isinstance(value, list) and len(value) == count}
            changed |= {name: 2 * value for name, value in lists.items()} | {"num_kv_shared_layers": count}
            changed |= {name: 2 * count for name, value in counts.items() if value == total}
    return changed


def _is_by_layer(value: Any, total: int) -> bool:
    """Return whether the value has an entry for each layer, and is no list of all layers' numbers."""
    return isinstance(value, list | tuple | str) and len(value) == total > 2 and list(value) != list(range(total))


def _names_layers(name: str, value: Any, total: int) -> bool:
    """Return whether the value is a list of numbers of layers, each once and counted from the first."""
    return (
        isinstance(value, list | tuple)
        and bool(value and _NUMBERS.fullmatch(name))
        and all(type(each) is int and 0 <= each < total for each in value)
        and len(set(value)) == len(value)
        and not _is_by_layer(value, total)
    )


def _smaller(name: str, value: Any, by: int, *, text: bool, heads: bool) -> Any:
    """A field that is divided, bounded or off; itself if it is none of these."""
    if name == "dtype":
        return torch.float32
    if value is True and name in _OFF:
        return False
    if type(value) is float and value and _CHANCE.fullmatch(name):
        return 0.0
    if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
        changed = [_smaller(name, each, by, text=text, heads=heads) for each in value]
        return value if changed == list(value) else type(value)(changed)
    if isinstance(value, dict) and not name.startswith("rope_"):
        outer = any(roles.fullmatch(name) for roles, _ in _FEW_OF_TEXT)
        return {key: _smaller(name if outer else key, each, by, text=text, heads=heads) for key, each in value.items()}
    if type(value) is not int or value <= 0:
        return value
    for roles, most in (*_FEW, *(_FEW_OF_TEXT if text else ())):
        if roles.fullmatch(name):
            return min(value, most)
    if _SPECIAL.fullmatch(name) and value >= _MOST_TOKENS:
        return _MOST_TOKENS // 2 + value % (_MOST_TOKENS // 2)
    if heads and (_HEADS.fullmatch(name) or _HEAD.fullmatch(name)):
        return max(1, value // by) if _HEADS.fullmatch(name) else value
    if _WIDTHS.fullmatch(name) and value >= 4 * by and value % by == 0:
        return value // by
    return value


def _bounded(name: str, value: Any, positions: int) -> Any:
    """A field of so many positions at most: what the model does beyond is tried by longer rows."""
    if isinstance(value, dict) and name.startswith("rope_"):
        return {key: _bounded(key if type(each) is int else "rope_", each, positions) for key, each in value.items()}
    return min(value, positions) if type(value) is int and _POSITIONS.fullmatch(name) else value


def _head(fields: Fields) -> int:
    """Return the width of a head that rotary positions turn, or that their width is in proportion to; 0 if unknown."""
    for name in ("qk_rope_head_dim", "head_dim", "kv_channels", "d_kv"):
        if type(fields.get(name)) is int:
            return int(fields[name])
    widths = [fields[name] for name in ("hidden_size", "d_model", "n_embd", "embed_dim") if fields.get(name)]
    heads = [fields[name] for name in ("num_attention_heads", "n_heads", "num_heads", "n_head") if fields.get(name)]
    return int(widths[0]) // heads[0] if widths and type(heads[0] if heads else None) is int else 0


def _turned(value: Any, before: int, after: int) -> Any:
    """Rotary parameters of a smaller head: sections of mrope, and factors of long contexts, one for each frequency."""
    if not isinstance(value, dict):
        return value
    changed = {name: _turned(each, before, after) for name, each in value.items()}
    for name in ("short_factor", "long_factor"):
        if value.get(name):
            changed[name] = list(value[name])[: max(1, len(value[name]) * after // before)]
    if sections := value.get("mrope_section"):  # for time, height and width: one each at least, if it can
        total = max(1, sum(sections) * after // before)
        scaled = [max(1, section * total // sum(sections)) for section in sections]
        while sum(scaled) != total and max(scaled) > 0:
            step = 1 if sum(scaled) < total else -1
            scaled[scaled.index((min if step > 0 else max)(scaled))] += step
        changed["mrope_section"] = type(sections)(scaled)
    return changed
