"""Whether a configuration's model keeps packed samples apart, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from orchdata.batch.batch import Batch
from orchdata.hf.families import Family
from orchdata.hf.packing import kept
from orchdata.hf.packing.trial import keeps_apart
from orchdata.hf.tiny import NoTinyModelError, tiny_model
from orchdata.hf.tiny.shrink import text_part

RULES: Final = 4
"""Increased with every change of the trial or of tiny models: earlier verdicts are then computed again."""

POSITIONS: Final = 48
"""That the tiny model knows: more than a sample of the trial has, fewer than all of them have in one row."""

_FIELDS: Final = {"packs": bool, "pads": bool, "attention": str, "why": str}
_ELSEWHERE: Final = ("flash", "flex", "paged", "/")
"""In the names of attention implementations that need an accelerator, a compiler, or kernels from a hub."""
# Of a configuration, what changes nothing that its model computes.
_NAMES: Final = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "id2label",
    "label2id",
)

Arguments = Callable[[Batch], dict[str, Any]]
ArgumentsOf = Callable[[Any], tuple[Arguments, Arguments]]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of a configuration's model.

    Attributes:
        packs: whether it keeps packed samples apart.
        pads: whether it keeps padded samples apart, as far as that was tried.
        attention: the implementation that was tried; empty where nothing was.
        why: the result as text.
    """

    packs: bool
    pads: bool = True
    attention: str = ""
    why: str = ""


def verdict_of(config: Any, family: Family, arguments_of: ArgumentsOf) -> Verdict:
    """Return the verdict on a configuration: a stored one, or the result of trying a tiny model now, in seconds.

    If its attention implementation cannot run on a CPU, eager attention is tried instead.

    Args:
        family: how its batches are read.
        arguments_of: configuration -> arguments of its forward, for batches packed and padded.
    """
    asked = attention_of(config)
    # On a machine without it, flash attention would fail after seconds of trying.
    wanted = "eager" if any(name in asked for name in _ELSEWHERE) else asked
    facts = {**kept.facts_of(config), "family": asdict(family), "rules": RULES}
    for attention in dict.fromkeys((wanted, "eager")):
        digest = kept.digest_of({**facts, "attention": attention})
        if (stored := kept.find(digest, _FIELDS)) is not None:
            return Verdict(**stored)
        try:
            verdict = _found(config, family, arguments_of, attention)
        except NoTinyModelError as error:
            missing = Verdict(packs=False, why=f"could not be tried on packed samples: {error}")
            continue
        # Asked for by its name or as transformers' own choice, it is the same.
        for name in {attention, verdict.attention}:
            kept.keep(kept.digest_of({**facts, "attention": name}), asdict(verdict))
        return verdict
    # Not for other runs: a package that a model lacks today may be there tomorrow.
    kept.keep(digest, asdict(missing), on_disk=False)
    return missing


def attention_of(config: Any) -> str:
    """Return the configuration's choice of the language model's attention; "" for transformers' own choice."""
    return str(text_part(config)._attn_implementation or config._attn_implementation or "")


def _found(config: Any, family: Family, arguments_of: ArgumentsOf, attention: str) -> Verdict:
    """Raises NoTinyModelError where a model cannot be built, or does not train on a sample alone."""
    model = tiny_model(config, attention or None, POSITIONS)
    try:
        trial = keeps_apart(model, family, *arguments_of(model.config))
    except Exception as error:
        raise NoTinyModelError(
            f"no tiny model of {config.model_type} trains: {type(error).__name__}: {error}"
        ) from error
    return Verdict(packs=trial.packs, pads=trial.pads, attention=attention_of(model.config), why=trial.why)
