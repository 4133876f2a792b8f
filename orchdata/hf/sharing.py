"""Attention of a Hugging Face model over teams, and the verdict by trial on whether a configuration can be shared.

    model(**inputs, teams=batch.teams) --hook--> attend=, an argument that its layers pass on --name--> TeamAttention
    config --tiny model--> two members in two threads, against each sample alone: gradients --> Sharing, kept on disk

Layers look their attention up by a name (transformers' AttentionInterface). That of the text model gets a name of ours,
under which a forward without teams runs the model's own attention, with its own masks.
"""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from orchdata.batch.batch import Batch
from orchdata.batch.tensors import IGNORE, Team, TeamUse
from orchdata.hf.families import Family, thinker
from orchdata.hf.packing import (
    POSITIONS,
    SHARED,
    TOLERANCE,
    Arguments,
    ArgumentsOf,
    batch_of,
    difference_of_gradients,
    find,
    keep,
    name_of,
    padded,
    switching_rope,
)
from orchdata.hf.tiny import NoTinyModelError, text_of, text_part, tiny_model, undisturbed
from orchdata.ranks.team_attention import Kernel, TeamAttention, attend_over, sdpa_by_sequence

FOLDER: Final = "sharing"
RULES: Final = 1
"""Increased with every change of the trial: earlier verdicts are then computed again."""
_TOGETHER: Final = (29, 7, 23)
"""Tokens of the sequences of a team of two: its slices end within a sequence, and one is longer than tiny windows."""
_ALONE: Final = (11, 5)
"""Tokens of each member's own sequence."""
_SECONDS: Final = 120.0
_UNKNOWN_TO_KERNELS: Final = ("softcap", "s_aux", "position_bias")

_forward = threading.local()


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
    name = name_of(config, family, f"{FOLDER} {RULES}")
    if (stored := find(FOLDER, name, Sharing)) is not None:
        return stored
    try:
        found = _tried(config, family, arguments_of)
    except NoTinyModelError as error:  # and not kept: a package that a model lacks today may be there tomorrow
        return Sharing(shares=False, why=f"could not be tried: {error}")
    keep(FOLDER, name, found)
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
    own = (config._attn_implementation or "eager").removesuffix(SHARED)
    AttentionInterface.register(own + SHARED, partial(_attention, own))
    if own in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(own + SHARED, partial(_mask, own))
    config._attn_implementation_internal = own + SHARED
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


def _tried(config: Any, family: Family, arguments_of: ArgumentsOf) -> Sharing:
    """Raises NoTinyModelError where a model cannot be built, or does not train on a sample alone."""
    model = tiny_model(config, "eager", POSITIONS)
    in_one_row, in_rows = arguments_of(model.config)
    with undisturbed():
        samples = [text_of(model.config, length, seed) for seed, length in enumerate((*_TOGETHER, *_ALONE))]
        for dtype in (torch.float64, torch.float32):  # some have layers that take float32 alone
            try:
                alone = _gradients(model.to(dtype), in_rows, [padded([sample], 1, family) for sample in samples])
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
    off = difference_of_gradients(shared, alone)
    if off > TOLERANCE:
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
    *together, own = *samples[: len(_TOGETHER)], samples[len(_TOGETHER) + member]

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
    batch = batch_of(ids, labels, counting, [ids[:half], own], family)
    return replace(batch, llm=replace(batch.llm, labels=None, shift_labels=labels), teams=tuple(teams))
