"""Does a model keep packed samples apart, and can ranks share its attention? Tried on a tiny model of its
configuration, not read from a list. And the attention that is shared.

    config --tiny model--> samples in one row, against each alone: logits and gradients --> Verdict, kept on disk
    config --tiny model--> two members in two threads, against each sample alone: gradients --> Sharing, kept on disk
    model(**inputs, teams=batch.teams) --hook--> attend=, an argument that its layers pass on --name--> TeamAttention

The arguments of both forwards are those that the real model would be given. Alone, a sample is a padded row without
padding, which is exact for every model. What floats alone make different is measured on the same model: the samples as
padded rows of one batch, against each alone.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from orchdata.batch.batch import Batch
from orchdata.batch.tensors import IGNORE, LLMBatch, Team, TeamUse, TextBatch
from orchdata.hf.models import (
    Family,
    NoTinyModelError,
    model_class,
    parts,
    text_of,
    text_part,
    thinker,
    tiny_model,
    undisturbed,
)
from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import write_once
from orchdata.planning.plan import Plan
from orchdata.ranks.team_attention import Kernel, TeamAttention, attend_over, sdpa_by_sequence

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_RULES: Final = 5
_RULES_OF_SHARING: Final = 1
"""Increased with every change of the trial or of tiny models: earlier verdicts are then computed again."""
_TOLERANCE: Final = 2e-5
"""Largest difference, relative to the largest value, that is taken for rounding in float32."""
_NOISE_FACTOR: Final = 16
_LARGEST: Final = 3e-3
"""If rounding alone may exceed this, a leak cannot be distinguished from it."""
_LENGTHS: Final = (29, 7, 23)
"""Tokens of the samples: more than twice a tiny model's windows and chunks, and fewer; multiples of none. The short one
shows models that look at the length of a row to know whether their window matters.
"""
_POSITIONS: Final = 48
"""That the tiny model knows: more than a sample of the trial has, fewer than all of them have in one row."""
_PROMPT: Final = 3
_SHARED: Final = "_in_teams"
"""The end of the name of an attention that ranks share; before it stands the model's own."""
_ELSEWHERE: Final = ("flash", "flex", "paged", "/")
"""In the names of attention implementations that need an accelerator, a compiler, or kernels from a hub."""

_ALONE: Final = (11, 5)
"""Tokens of each member's own sequence, in a team of two: the slices of the others end within a sequence."""
_SECONDS: Final = 120.0
_UNKNOWN_TO_KERNELS: Final = ("softcap", "s_aux", "position_bias")

_seen: dict[str, Any] = {}
_forward = threading.local()
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
        if (stored := find("packing", name_of(config, family, attention), Verdict)) is not None:
            return stored
        try:
            verdict = _tried(config, family, arguments_of, attention)
        except NoTinyModelError as error:
            missing = Verdict(packs=False, why=f"could not be tried on packed samples: {error}")
            continue
        # Asked for by its name or as transformers' own choice, it is the same.
        for each in {attention, verdict.attention}:
            keep("packing", name_of(config, family, each), verdict)
        return verdict
    return missing  # and not kept: a package that a model lacks today may be there tomorrow


def attention_of(config: Any) -> str:
    """Return the configuration's choice of the language model's attention; "" for transformers' own choice."""
    return str(text_part(config)._attn_implementation or config._attn_implementation or "").removesuffix(_SHARED)


def name_of(config: Any, family: Family, attention: str) -> str:
    """The name under which a verdict is kept: all that it depends on; "" of a class outside of transformers, whose code
    has no version.
    """
    import transformers

    kinds = [model_class(config), *(type(each) for _, each in parts(config))]
    if any(kind.__module__.partition(".")[0] != "transformers" for kind in kinds):
        return ""
    facts = {
        "rules": _RULES,
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
    model = tiny_model(config, attention or None, _POSITIONS)
    in_one_row, in_rows = arguments_of(model.config)
    found = attention_of(model.config)
    start = _PROMPT if family.sees_ahead == "prefix" else 1
    with undisturbed():
        samples = [text_of(model.config, length, seed) for seed, length in enumerate(_LENGTHS)]
        try:
            alone = _outputs(model, in_rows, [_padded([sample], start, family) for sample in samples])
        except Exception as error:
            said = f"no tiny model of {config.model_type} trains: {type(error).__name__}: {error}"
            raise NoTinyModelError(said) from error
        if not all(bool(each.isfinite().all()) for each in (*alone[0], *alone[1])):
            why = "has logits or gradients that are not finite on random weights"
            return Verdict(packs=False, attention=found, why=why)
        try:
            rows = _outputs(model, in_rows, [_padded(samples, start, family, multiple_of=16)])
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
    tolerance = max(_TOLERANCE, _NOISE_FACTOR * noise)
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
    return _batch_of(torch.cat(list(samples)), labels, counting, samples, family)


def _padded(samples: Sequence[Tensor], start: int, family: Family, multiple_of: int = 1) -> Batch:
    """One row a sample, padded to the longest one, aligned up."""
    longest = -(-max(map(len, samples)) // multiple_of) * multiple_of

    def rows(values: Iterator[Tensor] | Sequence[Tensor], filler: int) -> Tensor:
        return torch.stack([pad(each, (0, longest - len(each)), value=filler) for each in values])

    counting = torch.arange(longest).expand(len(samples), -1)
    labels = rows([_labels(sample, start) for sample in samples], IGNORE)
    return _batch_of(rows(samples, 0), labels, counting, samples, family)


def _labels(sample: Tensor, start: int) -> Tensor:
    return torch.where(torch.arange(len(sample)) < start, IGNORE, sample)


def _batch_of(ids: Tensor, labels: Tensor, counting: Tensor, samples: Sequence[Tensor], family: Family) -> Batch:
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


def _outputs(model: Any, arguments: Arguments, batches: list[Batch]) -> tuple[list[Tensor], list[Tensor]]:
    """Return logits of each sample, (T, vocabulary), and gradients of the summed loss, by parameter; of a batch of each
    sample, or of one with all of them.
    """
    model.zero_grad(set_to_none=True)
    logits: list[Tensor] = []
    for batch in batches:
        labels = batch.llm.any_labels.view(-1, batch.llm.any_labels.shape[-1])
        predicted = model(**arguments(batch)).logits.float()
        loss = cross_entropy(
            predicted[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
        )
        loss.backward()
        lengths = batch.llm.lengths.tolist()
        if len(predicted) == len(lengths):
            logits += [row[:length] for row, length in zip(predicted.detach(), lengths, strict=True)]
        else:
            logits += predicted.detach()[0].split(lengths)
    zeros = (torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters())
    return logits, [each.clone() for each in zeros]


def _difference(
    outputs: tuple[list[Tensor], list[Tensor]], expected: tuple[list[Tensor], list[Tensor]]
) -> tuple[float, float]:
    """Return the largest differences, relative to the largest value: of logits, and of any parameter's gradient."""
    pairs = zip(outputs[0], expected[0], strict=True)
    logits = [float((one - other).abs().max() / other.abs().max()) for one, other in pairs]
    return _largest(logits), _difference_of_gradients(outputs[1], expected[1])


def _difference_of_gradients(gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
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


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Of a configuration's model: whether ranks can share its attention, and the reason."""

    shares: bool
    why: str


def share_attention(model: Any, loader: Any, kernel: Kernel = sdpa_by_sequence) -> None:
    """Let a model of transformers attend over the teams of a loader, in its text model alone.

    Called once for each loader that has teams, before the model is wrapped or compiled. `model(**batch.model_inputs())`
    then exchanges heads in every layer, in training and in evaluation; a forward without teams is the model's own. Any
    other model raises ValueError for such inputs.

    Args:
        model: of transformers.
        loader: with `od.Balance(teams=...)` and `collate_fn=od.hf.Inputs(model.config)`, which has asked whether this
            configuration can be shared.
        kernel: as `od.TeamAttention` has it. It gets `scale`, and `window_size=(tokens, 0)` in layers with a window.

    Raises:
        ValueError: a loader for another model; what `od.TeamAttention` refuses.
    """
    asked, config = getattr(loader.collate_fn, "config", None), thinker(model.config)
    if type(asked) is not type(config):
        raise ValueError(
            f"od.hf.share_attention takes a loader with collate_fn=od.hf.Inputs(model.config), and this one is for "
            f"{type(asked).__name__}, the model of {type(config).__name__}"
        )
    use = loader._runtime.context.delivery.team_use
    install(model, TeamAttention(loader, kernel), use)
    use.is_by_name = True
    use.mark()  # inputs that were asked for before were refused


def sharing_of(config: Any, family: Family, arguments_of: ArgumentsOf) -> Sharing:
    """Return whether the model of a configuration can be shared: a stored verdict, or that of a trial now, in seconds,
    of a tiny random model: two members in two threads, through its own layers and its own loss.
    """
    if not (family.packs and getattr(config, "is_encoder_decoder", False) is False):
        return Sharing(shares=False, why="has media or a decoder apart, and how slices of them are read is not known")
    if (rope := switching_rope(config)) is not None:
        why = f"chooses rotary positions by the longest position of a forward ({rope.kind}), and members have others"
        return Sharing(shares=False, why=why)
    if family.sees_ahead:
        return Sharing(shares=False, why="lets tokens see ahead, and the attention of teams is causal")
    name = name_of(config, family, f"sharing {_RULES_OF_SHARING}")
    if (stored := find("sharing", name, Sharing)) is not None:
        return stored
    try:
        found = _tried_in_slices(config, family, arguments_of)
    except NoTinyModelError as error:  # and not kept: a package that a model lacks today may be there tomorrow
        return Sharing(shares=False, why=f"could not be tried: {error}")
    keep("sharing", name, found)
    return found


class Unshared:
    """What stands for a cache in inputs with teams: a model that is not shared reads it, a shared one never does."""

    def __getattr__(self, name: str) -> Any:
        kind = ValueError if name.startswith(("get_", "update")) else AttributeError  # what others ask of any object
        raise kind(
            "these are slices of sequences that ranks share, and this model attends to them by themselves: call "
            "od.hf.share_attention(model, loader) for each model that gets them"
        )


def install(model: Any, attend: Callable[..., Tensor], use: TeamUse | None = None) -> None:
    """Give the text model our name of attention, and its forward an argument `teams`: those of the loader of `use` have
    this attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    config = text_part(thinker(model.config))
    own = (config._attn_implementation or "eager").removesuffix(_SHARED)
    AttentionInterface.register(own + _SHARED, partial(_attention, own))
    if own in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(own + _SHARED, partial(_mask, own))
    config._attn_implementation_internal = own + _SHARED
    if "_attends" not in vars(model):
        model._attends = {}
        model.register_forward_pre_hook(_begin, with_kwargs=True)
        model.register_forward_hook(_end, always_call=True)
    model._attends[use] = attend


def _begin(model: Any, args: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Put an attention in place of the teams: a checkpointed layer that is run again has it again."""
    teams = arguments.pop("teams", ())
    _forward.is_shared = bool(teams)
    if not teams:
        return args, arguments
    if (attend := model._attends.get(teams[0].use)) is None:
        raise ValueError("this loader shares sequences: call od.hf.share_attention(model, loader) for it, too")
    if isinstance(arguments.get("past_key_values"), Unshared):
        del arguments["past_key_values"]
    return args, arguments | {"attend": partial(attend, teams=teams)}


def _end(*_: Any) -> None:
    _forward.is_shared = False


def _mask(own: str, *args: Any, **arguments: Any) -> Any:
    """No mask is made for teams: it would have all pairs of a slice."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return None if getattr(_forward, "is_shared", False) else ALL_MASK_ATTENTION_FUNCTIONS[own](*args, **arguments)


def _attention(
    own: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    attend: Any = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """What a layer calls: (1, heads, T, head_dim) each -> (1, T, heads, value_dim)."""
    if attend is None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function: Callable[..., tuple[Tensor, Any]] = ALL_ATTENTION_FUNCTIONS.get_interface(own, eager)
        return function(module, query, key, value, attention_mask, **options)
    refused = [name for name in _UNKNOWN_TO_KERNELS if options.get(name) is not None]
    if refused or options.get("dropout"):
        what = refused[0] if refused else "dropout: set that of attention to 0 in the configuration"
        raise ValueError(f"attention over teams does not know {what}")
    window = options.get("sliding_window")
    given: dict[str, Any] = {"window_size": (window - 1, 0)} if window else {}
    mixed = attend(*(each[0].transpose(0, 1) for each in (query, key, value)), scale=options.get("scaling"), **given)
    return mixed[None], None


def _tried_in_slices(config: Any, family: Family, arguments_of: ArgumentsOf) -> Sharing:
    """Raises NoTinyModelError where a model cannot be built, or does not train on a sample alone."""
    model = tiny_model(config, "eager", _POSITIONS)
    in_one_row, in_rows = arguments_of(model.config)
    with undisturbed():
        samples = [text_of(model.config, length, seed) for seed, length in enumerate((*_LENGTHS, *_ALONE))]
        for dtype in (torch.float64, torch.float32):  # some have layers that take float32 alone
            try:
                alone = _gradients(model.to(dtype), in_rows, [_padded([sample], 1, family) for sample in samples])
                break
            except Exception as error:  # noqa: BLE001 - a forward may raise anything
                said = f"no tiny model of {config.model_type} trains: {type(error).__name__}: {error}"
        else:
            raise NoTinyModelError(said)
        try:
            shared = _shared(model, in_one_row, [_slices(samples, member, family) for member in (0, 1)])
        except Exception as error:  # noqa: BLE001
            return Sharing(shares=False, why=f"takes no slices ({type(error).__name__}: {str(error)[:200]})")
    if shared is None:
        return Sharing(shares=False, why="does not look its attention up by a name")
    off = _difference_of_gradients(shared, alone)
    if off > _TOLERANCE:
        return Sharing(shares=False, why=f"trains otherwise in slices (gradients {off:.1e} off)")
    return Sharing(shares=True, why=f"trains in slices as in one (gradients {off:.1e} off)")


def _gradients(model: Any, arguments: Arguments, batches: Sequence[Batch]) -> list[Tensor]:
    """Return those of the summed loss of batches, the model's own where it takes labels."""
    model.zero_grad(set_to_none=True)
    for batch in batches:
        given, labels = arguments(batch), batch.llm.any_labels.view(1, -1)
        outputs, first = model(**given), 0 if batch.has_slices else 1
        if "labels" in given:
            (outputs.loss / batch.loss_scale).backward()
        else:
            logits = outputs.logits[:, : labels.shape[1] - first].flatten(0, 1)
            cross_entropy(logits, labels[:, first:].flatten(), ignore_index=IGNORE, reduction="sum").backward()
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]


def _shared(model: Any, arguments: Arguments, batches: Sequence[Batch]) -> list[Tensor] | None:
    """Return the sums of the gradients of two members, each with its batch; None if no layer asked for attention."""
    barrier, box = threading.Barrier(2, timeout=_SECONDS), [torch.empty(0)] * 2
    found: list[list[Tensor]] = [[], []]
    errors: list[Exception] = []
    calls: list[int] = []

    def member(me: int) -> None:
        def swap(pieces: Tensor, _: int) -> Tensor:
            box[me] = pieces.detach()
            barrier.wait()
            received = torch.stack([each[me] for each in box])
            barrier.wait()  # no one replaces what is still read
            return received

        def attend(query: Tensor, key: Tensor, value: Tensor, teams: Sequence[Team], **options: Any) -> Tensor:
            calls.append(me)
            return attend_over(teams, query, key, value, sdpa_by_sequence, swap, **options)

        try:
            own = copy.deepcopy(model)
            install(own, attend)
            found[me] = _gradients(own, arguments, [batches[me]])
        except Exception as error:  # noqa: BLE001 - it is raised below
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=member, args=(me,)) for me in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if errors:  # that of the other is of the barrier
        raise next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
    return [one + other for one, other in zip(*found, strict=True)] if calls else None


def _slices(samples: Sequence[Tensor], member: int, family: Family) -> Batch:
    """What a loader gives one of two members: its half of the first samples, joined, and a sample of its own."""
    *together, own = *samples[: len(_LENGTHS)], samples[len(_LENGTHS) + member]

    def cut(values: Sequence[Tensor], filler: int) -> Tensor:
        joined = torch.cat([*values[:-1]])
        return torch.cat([pad(joined, (0, len(joined) % 2), value=filler).chunk(2)[member], values[-1]])

    every = (*together, own)
    ids, counting = cut(every, 0), cut([torch.arange(len(each)) for each in every], 0)
    labels = cut([pad(each[1:], (0, 1), value=IGNORE) for each in every], IGNORE)
    half = len(ids) - len(own)
    borders = [0, *itertools.accumulate(map(len, together))]
    borders += [2 * half] if borders[-1] < 2 * half else []
    given = [(2, member, (0, 1), slice(0, half), borders), (1, 0, (member,), slice(half, len(ids)), [0, len(own)])]
    teams = [
        Team(
            size=size,
            place=place,
            ranks=ranks,
            rows=rows,
            cu_seqlens=torch.tensor(starts, dtype=torch.int32),
            samples=slice(0, 0),
            valid=torch.ones(0, dtype=torch.bool),
        )
        for size, place, ranks, rows, starts in given
    ]
    batch = _batch_of(ids, labels, counting, [ids[:half], own], family)
    return replace(batch, llm=replace(batch.llm, labels=None, shift_labels=labels), teams=tuple(teams))
