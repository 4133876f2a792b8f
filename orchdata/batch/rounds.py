"""Rounds: an encoder runs once for several micro-steps of a step, forward and backward.

    media of the round's micro-steps --joined--> encode --> rows --cut, a leaf each--> micro-steps forward, backward
    encoder's backward <--once-- gradients that the leaves have collected <----------------------------------+

Nothing here communicates: `od.exchange` does, in each micro-step. Plans say which micro-steps a round has
(`Plan.round_of`), the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from orchdata.batch.batch import Batch
from orchdata.batch.tensors import MediaBatch, token_rows
from orchdata.planning.plan import Plan

Encode = Callable[[str, MediaBatch], Any]
Context = Callable[[], AbstractContextManager[Any]]

UNUSED = (
    "DistributedDataParallel(find_unused_parameters=True) around encoders and LLM takes encoders for unused in rounds, "
    "and does not reduce their gradients: freeze what is never used, and leave the argument out"
)
_OPEN: WeakSet[Plan] = WeakSet()
"""Plans of steps with a round that must be run backward."""


def rounds(
    step: Sequence[Batch],
    encode: Encode,
    *,
    no_sync: Context | None = None,
    shared: bool = False,
    recompute: bool = False,
) -> Iterator[Round]:
    """Encode a step round by round, as `Balance(encode=...)` plans it.

    Every rank calls `encode` once for each modality and round, in the same order, when it takes the round: with the
    media of all its micro-steps, or one dummy if this rank encodes no part in any of them.

    Args:
        step: the microbatches of a step, an item of `DataLoader.steps()`, on the encoders' device.
        encode: (modality, its tensors) -> the encoder's output, (num_rows, ...), one row a token, or padded
            (num_parts, max_tokens, hidden); or a tuple or list of such tensors with the same rows.
        no_sync: of the encoders' DistributedDataParallel: all rounds but the last are encoded, and run backward, in it.
        shared: `no_sync` is of one DistributedDataParallel around encoders and LLM: every round is encoded in it, and
            the caller leaves it for the LLM's last micro-step alone. No parameter may be in both parts.
        recompute: encode without a graph, and again in `backward()`, under the random states and autocast of the first
            time. A round then keeps no activations; running statistics of norms are updated once. Whether encoders
            are frozen is not known before: `backward()` must be called once a gradient has come to a feature.

    Raises:
        ValueError: not the whole step, in its order; `shared` with `recompute`, or with a DistributedDataParallel that
            finds unused parameters; or an output that is no tensor of the rows that the plan has.
        RuntimeError: the next round is taken before `backward()` of one whose features require a gradient. Leaving the
            loop, by an exception or `break`, gives the round up, as `Round.drop()` does.
    """
    if shared and recompute:
        raise ValueError(
            "od.rounds(shared=True, recompute=True): one DistributedDataParallel runs no forward after the LLM's last "
            "micro-step until its gradients are reduced: wrap encoders by themselves, or leave recompute out"
        )
    if shared and getattr(getattr(no_sync, "__self__", None), "find_unused_parameters", False):
        raise ValueError(UNUSED)
    given = [batch.microbatch for batch in step]
    if not step or given != list(range(step[0].num_microbatches)):
        raise ValueError(f"od.rounds takes all microbatches of a step, an item of loader.steps(); got numbers {given}")
    plan, last = step[0].plan, step[0].plan.round_of(step[-1].microbatch)
    try:
        for number, batches in groupby(step, lambda batch: plan.round_of(batch.microbatch)):
            context = no_sync if no_sync is not None and (shared or number < last) else nullcontext
            yield Round(list(batches), encode, context, recompute=recompute)
            check_rounds(plan, "the next round was taken")
    finally:
        _OPEN.discard(plan)


def check_rounds(plan: Plan | None, when: str) -> None:
    """Raise RuntimeError if a round of a step was not run backward."""
    if plan is not None and plan in _OPEN:
        raise RuntimeError(
            f"{when} before backward() of a round of step {plan.step}, whose features require a gradient: call "
            "group.backward() once, after the loop over its microbatches; without it encoders get no gradient. To give "
            "a failed step up, leave the loop over od.rounds, or call group.drop()"
        )


class Round:
    """The micro-steps of a round, made by `od.rounds`. Iterating yields their microbatches."""

    def __init__(self, batches: list[Batch], encode: Encode, context: Context, *, recompute: bool) -> None:
        self._batches, self._encode, self._context = batches, encode, context
        self._recomputes = recompute and torch.is_grad_enabled()
        self._taken, self._is_over = 0, False
        self._features: list[dict[str, Any]] = [{} for _ in batches]
        # By output of `encode`: its rows, and where each micro-step's are; in recomputation, what makes them again.
        self._rows: list[Tensor] = []
        self._leaves: list[list[tuple[slice, Tensor]]] = []
        self._again: list[tuple[str, MediaBatch, Context]] = []
        for name in batches[0].media:
            self._encode_first(name, [batch.media[name] for batch in batches])
        if any(rows.requires_grad for rows in self._rows):
            _OPEN.add(batches[0].plan)

    def __len__(self) -> int:
        """Return the number of micro-steps."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self._batches, start=1):
            self._taken = max(self._taken, number)
            yield batch

    def features(self, batch: Batch) -> Mapping[str, Any]:
        """Return modality -> the rows, (num_rows, ...), of the parts that this rank encodes in a micro-step: what
        `od.exchange` sends along `batch.route(modality)`. A tuple of them if `encode` returns several tensors.

        They are leaves: gradients stay in them until `backward()`, which drops them. Raises ValueError for a microbatch
        of another round.
        """
        number = batch.microbatch - self._batches[0].microbatch
        if not 0 <= number < len(self._features) or batch.step != self._batches[0].step:
            raise ValueError(
                f"{batch!r} is not of this round, of {len(self)} micro-steps of step {self._batches[0].step}, or the "
                "round is over, and its features were freed"
            )
        return self._features[number]

    def backward(self) -> None:
        """Run the encoders backward once, from the gradients that the rows of all micro-steps have collected; rows
        without one count as zeros. Does nothing if no feature requires a gradient. If it fails, the round is over too.

        Raises RuntimeError before all micro-steps were taken, the second time, and if no row has a gradient.
        """
        if self._is_over:
            raise RuntimeError("backward() of a round that is over was called: encoders would get its gradients twice")
        if not any(leaf.requires_grad for leaves in self._leaves for _, leaf in leaves):
            return
        if self._taken < len(self._batches):
            raise RuntimeError(
                f"backward() of a round was called after {self._taken} of its {len(self._batches)} micro-steps: call "
                "it after the loop over them, or encoders lose the gradients of the others"
            )
        rows, leaves, again = self._rows, self._leaves, self._again
        self.drop()
        with self._context():
            rows = self._encoded_again(again) if self._recomputes else rows
            ends = [pair for pair in zip(rows, leaves, strict=True) if pair[0].requires_grad]
            _check_collected([leaf for _, cut in ends for _, leaf in cut if len(leaf)])
            # One call for all modalities: encoders may share parameters, which DDP reduces once a backward.
            if ends:
                torch.autograd.backward([end for end, _ in ends], [_gradient(*pair) for pair in ends])

    def drop(self) -> None:
        """Give the round up, after an error in it: what it holds is freed, and no `backward()` is asked for."""
        self._is_over, self._rows, self._leaves, self._again, self._features = True, [], [], [], []
        _OPEN.discard(self._batches[0].plan)

    def _encode_first(self, name: str, of_steps: list[MediaBatch]) -> None:
        media = joined(of_steps)
        if self._recomputes:
            self._again.append((name, media, _conditions()))
        with self._context(), torch.set_grad_enabled(torch.is_grad_enabled() and not self._recomputes):
            output = self._encode(name, media)
        if self._recomputes:
            torch.clear_autocast_cache()  # Old versions of torch keep weights without a graph in it.
        cut: list[list[Tensor]] = []
        for rows in _rows(name, media, output):
            spans = _spans(name, of_steps, rows)
            # A leaf each: the gradient of one leaf that is split is as large as all rows, for each of its pieces.
            leaves = [rows.detach()[span] for span in spans]
            if rows.requires_grad or (self._recomputes and rows.is_floating_point()):
                for leaf in leaves:
                    leaf.requires_grad_().register_post_accumulate_grad_hook(partial(_mark, self._batches[0].plan))
            self._rows += [] if self._recomputes else [rows]
            self._leaves.append(list(zip(spans, leaves, strict=True)))
            cut.append(leaves)
        for features, own in zip(self._features, zip(*cut, strict=True), strict=True):
            features[name] = own[0] if isinstance(output, Tensor) else own

    def _encoded_again(self, again: list[tuple[str, MediaBatch, Context]]) -> list[Tensor]:
        rows = []
        for name, media, conditions in again:
            with torch.enable_grad(), conditions(), _kept_statistics():
                rows += _rows(name, media, self._encode(name, media))
        return rows


def joined(media: Sequence[MediaBatch]) -> MediaBatch:
    """Return the parts of several micro-steps in one, in their order; without dummies, or with one if there is no part.
    Padding of `encoder_lengths` stays after the parts of each micro-step.
    """
    own = [each for each in media if not _is_empty(each)] or list(media[:1])
    if len(own) == 1:
        return own[0]
    is_padded = own[0].mask is not None

    def together(tensors: Sequence[Tensor]) -> Tensor:
        if is_padded and len({each.shape[1:2] for each in tensors}) > 1:  # Rows of parts: up to the longest.
            width = max(each.shape[1] for each in tensors)
            wide = [each.new_zeros((len(each), width, *each.shape[2:])) for each in tensors]
            for to, each in zip(wide, tensors, strict=True):
                to[:, : each.shape[1]] = each
            tensors = wide
        return torch.cat(list(tensors))

    starts, places, rows, parts = [own[0].cu_seqlens[:1]], [], own[0].cu_seqlens[0], 0
    for each in own:
        starts.append(each.cu_seqlens[1:] + rows)
        rows = starts[-1][-1]
        if each.token_places is not None:
            places.append(each.token_places + each.token_places.new_tensor([[parts], [0]]))
        parts += len(each.cu_seqlens) - 1
    masks, valid = [each.mask for each in own], [each.valid for each in own]
    return MediaBatch(
        arrays={name: together([each.arrays[name] for each in own]) for name in own[0].arrays},
        cu_seqlens=torch.cat(starts),
        max_seqlen=max(each.max_seqlen for each in own),
        num_tokens=sum(each.num_tokens for each in own),
        padding_tokens=sum(each.padding_tokens for each in own),
        mask=together([mask for mask in masks if mask is not None]) if is_padded else None,
        token_places=torch.cat(places, dim=1) if places else None,
        valid=torch.cat([each for each in valid if each is not None]) if valid[0] is not None else None,
        part_axes={
            name: (axis, tuple(length for each in own for length in each.part_axes[name][1]))
            for name, (axis, _) in own[0].part_axes.items()
        },
    )


def _is_empty(media: MediaBatch) -> bool:
    """Return whether a micro-step has no part, per phase: only a dummy, or nothing."""
    return media.valid is not None and not len(media.valid)


def _rows(name: str, media: MediaBatch, output: Any) -> list[Tensor]:
    """Return what `encode` returned as tensors of rows. Raises ValueError if it is something else."""
    tensors = [output] if isinstance(output, Tensor) else list(output) if isinstance(output, tuple | list) else []
    if not tensors or not all(isinstance(each, Tensor) for each in tensors):
        raise ValueError(
            f"encode({name!r}, media) returned {type(output).__name__} without a tensor: return one row for each "
            "token, (num_rows, ...), or a tuple of such tensors"
        )
    return [token_rows(name, media, each) if media.mask is not None else each for each in tensors]


def _spans(name: str, of_steps: Sequence[MediaBatch], rows: Tensor) -> list[slice]:
    """Return where the rows of each micro-step are. Raises ValueError for other rows than the plan has."""
    spans, start = [], 0
    for each in of_steps:
        spans.append(slice(start, start + each.num_tokens))
        start += 0 if _is_empty(each) else each.num_tokens + each.padding_tokens
    if start and len(rows) != start:
        raise ValueError(
            f"encode({name!r}, media) returned {len(rows)} rows, and the round has {start}: return one row for each "
            "token of all parts, in their order"
        )
    return spans


def _mark(plan: Plan, _: Tensor) -> None:
    _OPEN.add(plan)


def _check_collected(leaves: Sequence[Tensor]) -> None:
    if leaves and all(leaf.grad is None for leaf in leaves):
        raise RuntimeError(
            "backward() of a round found no gradient in any row that its micro-steps had: run the loss backward in "
            "each of them before, and exchange features of trained encoders by od.exchange(..., requires_grad=True)"
        )


def _gradient(rows: Tensor, leaves: Sequence[tuple[slice, Tensor]]) -> Tensor:
    gradient = torch.zeros_like(rows)
    for span, leaf in leaves:
        if leaf.grad is not None:
            gradient[span] = leaf.grad
    return gradient


def _conditions() -> Context:
    """Return a context in which the present random states, of the CPU and the device, and autocast hold again."""
    device, kinds = torch.get_device_module(), ["cpu"]
    cpu, state, devices = torch.get_rng_state(), None, []
    if device is not torch.cpu and device.is_initialized():
        state, devices = device.get_rng_state(), [device.current_device()]
        kinds.append(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices, device_type=kinds[-1] if devices else "cuda"))
            torch.set_rng_state(cpu)
            if state is not None:
                device.set_rng_state(state)
            for kind, enabled, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=caches))
            yield

    return again


@contextmanager
def _kept_statistics() -> Iterator[None]:
    """Leave running statistics of norms as they are: copies are updated instead."""
    kept: list[tuple[nn.Module, str, Tensor]] = []

    def lend(module: nn.Module, _: Any) -> None:
        if isinstance(module, _NormBase) and module.training and not any(module is each for each, *_ in kept):
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    kept.append((module, name, buffer))
                    module._buffers[name] = buffer.clone()

    hook = nn.modules.module.register_module_forward_pre_hook(lend)
    try:
        yield
    finally:
        hook.remove()
        for module, name, buffer in kept:
            module._buffers[name] = buffer
