"""Does a model keep packed samples apart? Tried on a tiny model of its configuration, not read from a list.

    config --tiny model--> samples in one row, against each alone: logits and gradients --> Verdict, kept on disk

The arguments of both forwards are those that the real model would be given. Alone, a sample is a padded row without
padding, which is exact for every model. What floats alone make different is measured on the same model: the samples as
padded rows of one batch, against each alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
from torch import Tensor

from orchdata.batch.batch import Batch
from orchdata.batch.tensors import IGNORE, LLMBatch, TextBatch
from orchdata.hf.families import Family, model_class
from orchdata.hf.tiny import NoTinyModelError, parts, text_of, text_part, tiny_model, undisturbed
from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.atomic import write_once
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.planning.plan import Plan

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FOLDER: Final = "packing"
RULES: Final = 5
"""Increased with every change of the trial or of tiny models: earlier verdicts are then computed again."""
TOLERANCE: Final = 2e-5
"""Largest difference, relative to the largest value, that is taken for rounding in float32."""
_NOISE_FACTOR: Final = 16
_LARGEST: Final = 3e-3
"""If rounding alone may exceed this, a leak cannot be distinguished from it."""
_LENGTHS: Final = (29, 7, 23)
"""Tokens of the samples: more than twice a tiny model's windows and chunks, and fewer; multiples of none. The short one
shows models that look at the length of a row to know whether their window matters.
"""
POSITIONS: Final = 48
"""That the tiny model knows: more than a sample of the trial has, fewer than all of them have in one row."""
_PROMPT: Final = 3
SHARED: Final = "_in_teams"
"""The end of the name of an attention that ranks share (`sharing.py`); before it stands the model's own."""
_ELSEWHERE: Final = ("flash", "flex", "paged", "/")
"""In the names of attention implementations that need an accelerator, a compiler, or kernels from a hub."""

_seen: dict[str, Any] = {}
Kept = TypeVar("Kept", bound="DataclassInstance")

Arguments = Callable[[Batch], dict[str, Any]]
ArgumentsOf = Callable[[Any], tuple[Arguments, Arguments]]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of a configuration's model: whether it keeps packed samples apart, and padded ones, as far as that was tried; the
    attention implementation that was tried, empty where nothing was; and the result as text.
    """

    packs: bool
    pads: bool = True
    attention: str = ""
    why: str = ""


def verdict_of(config: Any, family: Family, arguments_of: ArgumentsOf) -> Verdict:
    """Return the verdict on a configuration: a stored one, or the result of trying a tiny model now, in seconds.

    If its attention implementation cannot run on a CPU, eager attention is tried instead.
    """
    asked = attention_of(config)
    # On a machine without it, flash attention would fail after seconds of trying.
    wanted = "eager" if any(name in asked for name in _ELSEWHERE) else asked
    for attention in dict.fromkeys((wanted, "eager")):
        if (stored := find(FOLDER, name_of(config, family, attention), Verdict)) is not None:
            return stored
        try:
            verdict = _tried(config, family, arguments_of, attention)
        except NoTinyModelError as error:
            missing = Verdict(packs=False, why=f"could not be tried on packed samples: {error}")
            continue
        # Asked for by its name or as transformers' own choice, it is the same.
        for each in {attention, verdict.attention}:
            keep(FOLDER, name_of(config, family, each), verdict)
        return verdict
    return missing  # and not kept: a package that a model lacks today may be there tomorrow


def attention_of(config: Any) -> str:
    """Return the configuration's choice of the language model's attention; "" for transformers' own choice."""
    return str(text_part(config)._attn_implementation or config._attn_implementation or "").removesuffix(SHARED)


def name_of(config: Any, family: Family, attention: str) -> str:
    """The name under which a verdict is kept: all that it depends on; "" of a class outside of transformers, whose code
    has no version.
    """
    import transformers

    kinds = [model_class(config), *(type(each) for _, each in parts(config))]
    if any(kind.__module__.partition(".")[0] != "transformers" for kind in kinds):
        return ""
    facts = {
        "rules": RULES,
        "config": config.to_dict(),
        "family": asdict(family),
        "attention": attention,
        "versions": [torch.__version__, transformers.__version__],
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=20).hexdigest()


def find(folder: str, name: str, kind: type[Kept]) -> Kept | None:
    """Return the verdict of this kind that was kept under a name, in this process or on disk; None if none was."""
    if name in _seen:
        return cast("Kept", _seen[name])
    try:
        stored: Any = json.loads((CacheFolder().root / folder / f"{name}.json").read_text()) if name else None
        found = {field: type(value).__name__ for field, value in stored.items()} if isinstance(stored, dict) else {}
    except (OSError, ValueError, RecursionError):
        return None  # not there, or damaged: it is tried again
    return kind(**stored) if found == {field.name: field.type for field in fields(kind)} else None


def keep(folder: str, name: str, verdict: Any) -> None:
    """Keep a verdict, a dataclass; without a name it is not kept."""
    if not name:
        return
    _seen[name] = verdict
    with suppress(OSError, StorageError):  # a folder that cannot be written costs other processes the trial again
        write_once(CacheFolder().file(folder, f"{name}.json"), json.dumps(asdict(verdict)).encode())


def _tried(config: Any, family: Family, arguments_of: ArgumentsOf, attention: str) -> Verdict:
    """Raises NoTinyModelError where a model cannot be built, or does not train on a sample alone."""
    model = tiny_model(config, attention or None, POSITIONS)
    in_one_row, in_rows = arguments_of(model.config)
    found = attention_of(model.config)
    start = _PROMPT if family.sees_ahead == "prefix" else 1
    with undisturbed():
        samples = [text_of(model.config, length, seed) for seed, length in enumerate(_LENGTHS)]
        try:
            alone = _outputs(model, in_rows, [padded([sample], start, family) for sample in samples])
        except Exception as error:
            said = f"no tiny model of {config.model_type} trains: {type(error).__name__}: {error}"
            raise NoTinyModelError(said) from error
        if not all(bool(each.isfinite().all()) for each in (*alone.logits, *alone.gradients)):
            why = "has logits or gradients that are not finite on random weights"
            return Verdict(packs=False, attention=found, why=why)
        try:
            rows = _outputs(model, in_rows, [padded(samples, start, family, multiple_of=16)])
            noise = max(_difference(rows, alone))
        except Exception:  # noqa: BLE001 - the model takes no such batch: then the bound for float32 stands
            noise = 0.0
        try:
            packed = _outputs(model, in_one_row, [_packed(samples, start, family)])
        except Exception as error:  # noqa: BLE001 - a forward may raise anything on a packed row
            why = f"takes no packed rows ({type(error).__name__}: {str(error)[:200]})"
            return Verdict(packs=False, pads=noise <= _LARGEST, attention=found, why=why)
    packs, why = judged(*_difference(packed, alone), noise)
    return Verdict(packs=packs, pads=packs or noise <= _LARGEST, attention=found, why=why)


def judged(logits: float, gradients: float, noise: float) -> tuple[bool, str]:
    """Return whether differences of packed samples are rounding, given that of padded ones; and the result as text."""
    tolerance = max(TOLERANCE, _NOISE_FACTOR * noise)
    said = f"logits {logits:.1e} and gradients {gradients:.1e} off"
    if max(logits, gradients) <= tolerance <= _LARGEST:
        return True, f"keeps packed samples apart ({said})"
    if tolerance > _LARGEST and max(logits, gradients) <= tolerance:
        return False, f"gives a sample other results in another batch ({noise:.1e} off in padded rows)"
    return False, f"lets packed samples see each other ({said})"


def _packed(samples: Sequence[Tensor], start: int, family: Family) -> Batch:
    """All samples in one row. Positions restart at each sample; no loss before `start`."""
    counting = torch.cat([torch.arange(len(sample)) for sample in samples])
    labels = torch.cat([_labels(sample, start) for sample in samples])
    return batch_of(torch.cat(list(samples)), labels, counting, samples, family)


def padded(samples: Sequence[Tensor], start: int, family: Family, multiple_of: int = 1) -> Batch:
    """One row a sample, padded to the longest one, aligned up."""
    longest = -(-max(map(len, samples)) // multiple_of) * multiple_of

    def rows(values: Iterator[Tensor] | Sequence[Tensor], filler: int) -> Tensor:
        return torch.stack([torch.nn.functional.pad(each, (0, longest - len(each)), value=filler) for each in values])

    counting = torch.arange(longest).expand(len(samples), -1)
    labels = rows([_labels(sample, start) for sample in samples], IGNORE)
    return batch_of(rows(samples, 0), labels, counting, samples, family)


def _labels(sample: Tensor, start: int) -> Tensor:
    return torch.where(torch.arange(len(sample)) < start, IGNORE, sample)


def batch_of(ids: Tensor, labels: Tensor, counting: Tensor, samples: Sequence[Tensor], family: Family) -> Batch:
    lengths = torch.tensor([len(sample) for sample in samples])
    llm = LLMBatch(
        input_ids=ids,
        position_ids=counting.expand(3, *counting.shape) if family.mrope else counting,
        restart_position_ids=counting if family.mrope else None,
        labels=labels,
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int(),
        lengths=lengths.int(),
        max_seqlen=int(lengths.max()),
        attention_mask=torch.arange(ids.shape[1]) < lengths[:, None] if ids.dim() > 1 else None,
        media_positions={},
    )
    loss_tokens = int((labels != IGNORE).sum())
    return Batch(
        text=TextBatch(input_ids=ids.flatten(), cu_seqlens=llm.cu_seqlens),
        media={},
        llm=llm,
        sample_ids=tuple(("probe", str(number)) for number in range(len(samples))),
        plan=cast("Plan", None),  # nothing is planned, and only mixtures' weights would be read
        step=0,
        microbatch=0,
        num_microbatches=1,
        dp_size=1,
        loss_tokens=loss_tokens,
        global_loss_tokens=loss_tokens,
    )


@dataclass(frozen=True)
class _Outputs:
    """Of a model, for some samples: logits of each, (T, vocabulary), and gradients of the summed loss, by parameter."""

    logits: list[Tensor]
    gradients: list[Tensor]


def _outputs(model: Any, arguments: Arguments, batches: list[Batch]) -> _Outputs:
    """Return outputs for a batch of each sample, or for one with all of them."""
    model.zero_grad(set_to_none=True)
    logits: list[Tensor] = []
    for batch in batches:
        labels = batch.llm.any_labels.view(-1, batch.llm.any_labels.shape[-1])
        predicted = model(**arguments(batch)).logits.float()
        loss = torch.nn.functional.cross_entropy(
            predicted[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
        )
        loss.backward()
        lengths = batch.llm.lengths.tolist()
        if len(predicted) == len(lengths):
            logits += [row[:length] for row, length in zip(predicted.detach(), lengths, strict=True)]
        else:
            logits += predicted.detach()[0].split(lengths)
    zeros = (torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters())
    return _Outputs(logits, [each.clone() for each in zeros])


def _difference(outputs: _Outputs, expected: _Outputs) -> tuple[float, float]:
    """Return the largest differences, relative to the largest value: of logits, and of any parameter's gradient."""
    logits = [
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(outputs.logits, expected.logits, strict=True)
    ]
    return _largest(logits), difference_of_gradients(outputs.gradients, expected.gradients)


def difference_of_gradients(gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of any parameter's gradient, relative to its largest value."""
    largest = max((float(each.abs().max()) for each in expected if each.numel()), default=0.0)
    return _largest(
        [
            # Of gradients that are zero but for rounding, such as those of a key's bias, nothing can be said.
            float((one - other).abs().max()) / max(float(other.abs().max()), 1e-3 * largest, 1e-30)
            for one, other in zip(gradients, expected, strict=True)
            if other.numel()
        ]
    )


def _largest(values: Sequence[float]) -> float:
    return max((value if value == value else float("inf") for value in values), default=0.0)  # NaN is no rounding


# Rotary positions that depend on the longest sample of a microbatch: "longrope" and "dynamic" of transformers. Their
# frequencies are chosen once for a forward, by its largest position (`modeling_rope_utils.dynamic_rope_update`).


@dataclass(frozen=True)
class SwitchingRope:
    """Frequencies that change where a sample has more than `tokens`: for all samples of its microbatch, packed or
    padded. Of kind "longrope", long samples share one set of frequencies; of "dynamic", there is one for each length.
    """

    kind: str
    tokens: int

    def changes(self, longest: int, lengths: Tensor) -> bool:
        """Return whether samples of `lengths` would have other positions in a microbatch than alone: `longest` is of
        its longest row or sequence, padding included.
        """
        if longest <= self.tokens:
            return False
        shortest = int(lengths.min())
        return shortest <= self.tokens or (self.kind == "dynamic" and shortest < longest)

    def warning(self, model: str) -> str:
        return (
            f"the rotary positions of {model} ({self.kind}) are chosen once for a microbatch: a sample of more than "
            f"{self.tokens} tokens changes those of the other samples. Leave longer samples out "
            f"(dataset.filter('tokens <= {self.tokens}')) or cut them (od.TextPreprocessor(max_tokens={self.tokens}, "
            "overflow='truncate')), or give each rank one sample a step: batch_size=1, od.Balance(max_samples=1)"
        )


def switching_rope(config: Any) -> SwitchingRope | None:
    """Return that of a configuration's language model; None if its positions do not depend on lengths."""
    text = text_part(config)
    for rope in _ropes(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)):
        kind = rope.get("rope_type") or rope.get("type")
        if kind in ("longrope", "dynamic"):
            settings = (rope, vars(text))
            names = ("original_max_position_embeddings", "max_position_embeddings")
            tokens = next((each[name] for name in names for each in settings if each.get(name)), None)
            if tokens is not None:
                return SwitchingRope(str(kind), int(tokens))
    return None


def _ropes(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rope settings of a model, or of each type of its layers."""
    if isinstance(value, Mapping):
        yield value
        for each in value.values():
            yield from _ropes(each)
