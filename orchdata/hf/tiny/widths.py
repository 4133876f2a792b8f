"""Smaller widths: of each configuration in a tree by what a field's name says it is, or all divided by one number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

HIDDEN, HEADS, HEAD = 32, 2, 16

Fields = Mapping[str, Any]

_HIDDEN: Final = re.compile(
    r"(?!.*position)"  # tables of positions are as long as images and clips want them
    r"(.*_)?(hidden_size|hidden_dim|hidden_width|d_model|n_embd|embed_dim|emb_dim|embedding_size|embedding_dim|model_dim"
    r"|out_dim|output_dim|projection_dim|proj_dim|projector_input_dim|adapter_in_dim|adapter_input_size|lru_width"
    r"|embed_size|conv_output_size|output_size|backbone_hidden_size|conv_channels|out_channel)|dim"
)
# What a configuration calls its own width, the first that it has.
_OWN: Final = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_dim", "emb_dim", "hidden_dim")
_INNER: Final = re.compile(
    r"(.*_)?(intermediate_size|ffn_hidden_size|ffn_dim|ffn_size|d_ff|dff|dim_ff|mlp_dim|n_inner|feed_forward_size"
    r"|intermediate_size_mlp|feedforward_dim|expert_dim|d_inner|ffn_hidden)"
)
# But for heads of an index: few give many positions a score of 0, and which are chosen then depends on their number.
_HEADS: Final = re.compile(
    r"(?!index(er)?_n_heads)(.*_)?(num_attention_heads|attention_heads|n_heads?|num_heads|attention_heads_per_layer|query_groups)"
)
_KEY_HEADS: Final = re.compile(r"(.*_)?(num_key_value_heads|kv_n_heads|num_kv_heads|kv_heads|num_key_heads)")
_HEAD: Final = re.compile(r"(.*_)?(head_dim|headdim|d_kv|kv_channels|dim_head|d_head|attention_head_size)")
_EXPERTS: Final = re.compile(r"(.*_)?(num|n)(_[a-z]+)?_experts|zero_expert_num")
_CHOSEN: Final = re.compile(r"(.*_)?(experts_per_tok|experts_per_token|moe_topk|moe_top_k|moe_k|top_k_experts)")
_GROUPS: Final = re.compile(r"n_group|topk_group|num_expert_group|o_groups|(.*_)?n_?groups")
_RANKS: Final = re.compile(
    r"(.*_)?(rank|lowrank|latent_size|d_rel|state_size|d_state|router_hidden_size|ple_embed_dim|hidden_size_per_layer_input)"
)
# But for the longest piece of an evaluation, which bounds no attention.
_SEEN: Final = re.compile(
    r"(?!max_inference)(.*_)?(window|chunk|span)s?(_?(size|len|length|width))?|(.*_)?(local_attention|rel_extent|floor_scale"
    r"|log_scaling_n_floor|index_topk|block_size|attention_context_left|attention_context_right)"
)
_FEW: Final = re.compile(r"index_topk_blocks|index_kpool|.*compress_ratio|compress_rates")
_TABLES: Final = re.compile(r"ngram_vocab_size_base|encoder_hash_byte_group_vocab")
_FEW_TIMES: Final = 4
WINDOW: Final = 8
"""Positions that attention reaches back where it is bounded, and of a chunk."""
_ROTARY: Final = ("qk_rope_head_dim", "head_dim", "kv_channels", "d_kv")


@dataclass(frozen=True)
class Widths:
    """Of one tree of configurations.

    Attributes:
        own: what its parts call their own width: fields that equal one stay equal.
        hidden: what all of these become.
        heads: of attention; `hidden / heads` positions each.
        head: positions of a head, where they are said.
    """

    own: frozenset[int]
    hidden: int = HIDDEN
    heads: int = HEADS
    head: int = HEAD

    @classmethod
    def of(cls, tree: list[Fields]) -> Widths:
        return cls(frozenset(width for fields in tree if (width := own_width(fields))))

    def with_heads_of(self, fields: Fields) -> Widths:
        """The same with one head as large as those of a configuration: for models that know its size."""
        size = rotary(fields)
        return replace(self, hidden=size, heads=1, head=size)


def own_width(fields: Fields) -> int:
    return next((fields[name] for name in _OWN if type(fields.get(name)) is int), 0)


def by_role(fields: Fields, widths: Widths, *, text: bool) -> dict[str, Any]:
    """Fields of one configuration -> those that change: hidden sizes of 32, two heads of 16, four experts.

    Args:
        widths: of the whole tree: what equals one, or is a multiple of one, stays that.
        text: whether it is of the language model, where windows shrink too. In towers they belong to the data.
    """
    new_fields: dict[str, Any] = {}
    for name, value in fields.items():
        new = _mapped(name, value, fields, widths, text=text)
        if new is not None and new != value:
            new_fields[name] = new
    return _consistent(fields, new_fields, widths)


def _mapped(name: str, value: Any, fields: Fields, widths: Widths, *, text: bool) -> Any:
    if isinstance(value, dict):
        inner = {key: _mapped(f"{name}.{key}", each, fields, widths, text=text) for key, each in value.items()}
        return {key: value[key] if new is None else new for key, new in inner.items()}
    if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
        if any(role.fullmatch(name) for role in (_HEADS, _KEY_HEADS, _INNER, _SEEN)):
            return type(value)(_number(name, each, fields, widths, text=text) or each for each in value)
        if _HIDDEN.fullmatch(name) and min(value) > 0:  # of stages, each wider than the one before
            return type(value)(widths.hidden * each // min(value) for each in value)
        return None
    if type(value) is not int or value <= 0:
        return None
    return _number(name, value, fields, widths, text=text)


def _number(name: str, value: int, fields: Fields, widths: Widths, *, text: bool) -> int | None:
    if text and _FEW.fullmatch(name.split(".")[0]):
        return min(value, 4)
    if text and _SEEN.fullmatch(name):
        return min(value, WINDOW)
    for roles, most in ((_EXPERTS, 4), (_CHOSEN, 2), (_GROUPS, 2), (_RANKS, 8), (_TABLES, 64)):
        if roles.fullmatch(name):
            return min(value, most)
    if _KEY_HEADS.fullmatch(name):
        return widths.heads if value == _heads(name, fields) else 1
    if _HEADS.fullmatch(name):
        return min(value, widths.heads)
    if _HEAD.fullmatch(name):
        return min(value, widths.head)
    if _INNER.fullmatch(name):
        return _inner(value, fields, widths)
    if _HIDDEN.fullmatch(name):
        return _hidden(value, fields, widths)
    return None


def _inner(value: int, fields: Fields, widths: Widths) -> int:
    """A small multiple of the own width stays that, because some models reshape by it (Llama 4 shuffles pixels so)."""
    own = own_width(fields)
    if _expands(fields) or (own and value % own == 0 and value // own <= _FEW_TIMES):
        return _multiple(value, own, widths.hidden)
    return min(value, 2 * HIDDEN)


def _expands(fields: Fields) -> bool:
    return type(fields.get("expand")) is int


def _heads(name: str, fields: Fields) -> int:
    """Return the number of query heads that belong to a number of key heads."""
    stem = re.sub(r"(num_key_value_heads|kv_n_heads|num_kv_heads|kv_heads|num_key_heads)$", "", name)
    for end in ("num_attention_heads", "num_value_heads", "n_heads", "num_heads"):
        if type(heads := fields.get(stem + end)) is int:
            return heads
    heads = fields.get("num_attention_heads", fields.get("n_heads"))
    return heads if type(heads) is int else 0


def _hidden(value: int, fields: Fields, widths: Widths) -> int:
    if value in widths.own or value < widths.hidden:
        return min(value, widths.hidden)
    return _multiple(value, own_width(fields), widths.hidden)


def _multiple(value: int, width: int, hidden: int) -> int:
    """The same multiple of `hidden` that a value is of a width; `hidden` for what is none."""
    if width and value % width == 0 and value // width <= 16:
        return hidden * (value // width)
    return min(value, hidden)


def _consistent(fields: Fields, new_fields: dict[str, Any], widths: Widths) -> dict[str, Any]:
    """Add fields that depend on others: heads of a state's width, query and key heads of parts, rotary sections."""
    if type(turned := fields.get("qk_rope_head_dim")) is int and turned > widths.head:
        # A head has a turned part and another: both, and their sum, are divided by the same number.
        by = turned // widths.head
        sizes = {name: value for name, value in fields.items() if type(value) is int and _HEAD.fullmatch(name)}
        new_fields |= {name: max(1, value // by) for name, value in sizes.items()}
    new = {**fields, **new_fields}
    expand = next((new[name] for name in ("mamba_expand", "expand") if type(new.get(name)) is int), None)
    for heads, head in (
        ("mamba_n_heads", "mamba_d_head"),
        ("mamba_num_heads", "mamba_head_dim"),
        ("n_mamba_heads", "mamba_headdim"),
        ("num_heads", "head_dim"),
    ):
        if expand and type(fields.get(heads)) is int and type(fields.get(head)) is int:
            if fields[heads] * fields[head] == expand * own_width(fields):
                new_fields[head] = expand * own_width(new) // new[heads]
            elif fields[heads] * fields[head] == fields.get("mamba_d_ssm"):
                new_fields["mamba_d_ssm"] = new[heads] * new[head]
    values, keys = fields.get("linear_num_value_heads"), fields.get("linear_num_key_heads")
    if type(values) is int and type(keys) is int:
        few = min(HEADS, keys)
        new_fields |= {"linear_num_key_heads": few, "linear_num_value_heads": few * min(2, max(1, values // keys))}
    return new_fields | _rotary_fields(fields, new_fields)


def _rotary_fields(fields: Fields, new_fields: Fields) -> dict[str, Any]:
    """Fields about turned positions, in proportion to the size of a head."""
    before, after = rotary(fields), rotary({**fields, **new_fields})
    if not before or not after:
        return {}
    turned = {
        name: _turned(value, before, after) for name, value in {**fields, **new_fields}.items() if type(value) is dict
    }
    if type(fields.get("rotary_dim")) is int:
        turned["rotary_dim"] = max(2, fields["rotary_dim"] * after // before)
    return turned


def rotary(fields: Fields) -> int:
    """Return the width of a head that rotary positions turn, or that their width is in proportion to."""
    width = next((fields[name] for name in _ROTARY if type(fields.get(name)) is int and fields[name] > 0), None)
    if width is not None:
        return int(width)
    heads = next(
        (fields[name] for name in ("num_attention_heads", "n_heads", "num_heads", "n_head") if fields.get(name)), None
    )
    return own_width(fields) // heads if type(heads) is int and heads else 0


def _turned(value: dict[str, Any], before: int, after: int) -> dict[str, Any]:
    """Rotary parameters of a smaller head: sections of mrope, and factors of long contexts, one for each frequency."""
    changed: dict[str, Any] = {}
    for name, each in value.items():
        if isinstance(each, dict):
            changed[name] = _turned(each, before, after)
        elif name == "mrope_section" and each:
            changed[name] = _sections(each, max(1, sum(each) * after // before))
        elif name in ("short_factor", "long_factor") and each:
            changed[name] = list(each)[: max(1, len(each) * after // before)]
        else:
            changed[name] = each
    return changed


def _sections(sections: Any, total: int) -> Any:
    """Parts of a head for time, height and width, in proportion, that sum to `total`; one each at least, if it can."""
    scaled = [max(1, section * total // sum(sections)) for section in sections]
    while sum(scaled) < total:
        scaled[scaled.index(min(scaled))] += 1
    while sum(scaled) > total and max(scaled) > 0:
        scaled[scaled.index(max(scaled))] -= 1
    return type(sections)(scaled)


def divided(fields: Fields, by: int, *, text: bool) -> dict[str, Any]:
    """All widths of a configuration divided by one number, heads left alone: what adds and multiplies up still does."""
    changed: dict[str, Any] = {}
    named = (_HIDDEN, _INNER, _HEAD, _RANKS)
    for name, value in fields.items():
        if type(value) is int and value >= 4 * by and value % by == 0 and any(role.fullmatch(name) for role in named):
            changed[name] = value // by
        elif type(value) is int and value > 0:
            new = _number(name, value, fields, Widths(frozenset()), text=text)
            if new is not None and not any(role.fullmatch(name) for role in (*named, _HEADS, _KEY_HEADS)):
                changed[name] = new
    return changed | _rotary_fields(fields, changed)
