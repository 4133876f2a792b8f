"""Per phase: towers run on what a rank encodes, and their features travel to the samples that they belong to; and the
scaled loss of a model's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from orchdata.batch.batch import Batch
from orchdata.batch.rounds import UNUSED
from orchdata.batch.rounds import rounds as rounds_of
from orchdata.batch.tensors import IGNORE, MediaBatch
from orchdata.hf.families import TOWERS
from orchdata.hf.inputs import Inputs, as_rows
from orchdata.ranks.exchange import exchange


def encode(model: Any, batch: Batch, group: Any = None) -> dict[str, Any]:
    """The features of a batch's parts, for `model(**batch.model_inputs(), mm_encoder_outputs=...)`.

    Every rank encodes what the plan gives it, in `model.get_image_features`, and gets the features of its own samples;
    all feature tensors of a part travel, such as the deepstack layers of Qwen3-VL, in one exchange. Gradients come back
    along the routes, so every rank runs the backward too.

    Args:
        model: a Hugging Face model, or that in DistributedDataParallel. Under FSDP2 its method is registered as one
            that gathers parameters.
        batch: of a loader with `collate_fn=od.hf.Inputs(config)`, on the model's device.
        group: the ranks of the routes, as `od.exchange` takes it.

    Raises:
        ValueError: a batch of another `collate_fn`, or of assignment="joint", whose `model_inputs()` have the media
            themselves; features in other numbers than the plan has.
    """
    towers = _Towers(model, batch, "od.hf.encode")
    return {name: towers.arrived(name, towers(name, media), batch, group) for name, media in batch.media.items()}


def rounds(
    model: Any, step: Sequence[Batch], group: Any = None, *, recompute: bool = False
) -> Iterator[tuple[Batch, dict[str, Any]]]:
    """Go through a step of `od.Balance(assignment="per_phase", encode=...)`: each batch, on the model's device, and its
    features, for `model(**batch.model_inputs(), mm_encoder_outputs=features).loss.backward()`.

    Towers run once a round, forward before its first batch and backward when the batch after its last one, or the end
    of the step, is asked for: go through all of the step. The other arguments are those of `encode` and `od.rounds`. Of
    a model in DistributedDataParallel, only the LLM's last micro-step is outside of `no_sync()`, as always.

    Raises what `encode` and `od.rounds` raise, and RuntimeError where no loss of a round was run backward.
    """
    if getattr(model, "find_unused_parameters", False):
        raise ValueError(UNUSED)
    towers = _Towers(model, step[0], "od.hf.rounds")
    for each in rounds_of(step, towers, recompute=recompute):
        for batch in each:
            rows = each.features(batch)
            yield batch, {name: towers.arrived(name, rows[name], batch, group) for name in rows}
        each.backward()


class _Towers:
    """(modality, media) -> rows of all feature tensors, (num_rows, sum of their widths): what `od.rounds` calls."""

    def __init__(self, model: Any, batch: Batch, caller: str) -> None:
        inputs = batch.inputs
        if not isinstance(inputs, Inputs):
            raise ValueError(f"{caller} reads batches of a DataLoader with collate_fn=od.hf.Inputs(config)")
        if not batch.routes:
            raise ValueError(
                f"{caller} is for od.Balance(assignment='per_phase'): without it batch.model_inputs() has the media, "
                "and the model encodes them"
            )
        if others := [name for name in batch.media if name not in inputs.family.part_features]:
            raise ValueError(
                f"{inputs.config.model_type} takes no features of {others[0]} ready made: give them as "
                "batch.model_inputs() does, under assignment='joint'"
            )
        self._model, self._inputs = getattr(model, "module", model), inputs
        self._made: dict[str, Callable[[Tensor, bool], Any]] = {}  # rows -> outputs, as the tower made them

    def __call__(self, name: str, media: MediaBatch) -> Tensor:
        method = TOWERS[name]
        _register(self._model, method)
        outputs = getattr(self._model, method)(**self._inputs.tower_arguments(media, name), return_dict=True)
        tensors = [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or ())]
        rows = [_flat(each) for each in tensors]
        shapes = [each.shape[1:] if isinstance(each, Tensor) else None for each in tensors]
        self._made[name] = partial(_made, type(outputs), shapes, [each.shape[-1] for each in rows])
        return torch.cat([each.to(rows[0].dtype) for each in rows], dim=-1)

    def arrived(self, name: str, rows: Tensor, batch: Batch, group: Any) -> Any:
        """Return the tower's outputs for the samples of this rank, from the rows that it has encoded."""
        rows = exchange(rows, batch.route(name), group=group, requires_grad=rows.requires_grad)
        # transformers fills places in the order of the sequence; a dummy's features stayed where they were made.
        rows = rows[batch.llm.media_positions[name].argsort()]
        rows = torch.cat([rows, rows.new_zeros(batch.llm.dummies.get(name, 0), rows.shape[-1])])
        return self._made[name](rows, batch.has_slices)


def _made(kind: Any, shapes: Sequence[torch.Size | None], widths: list[int], rows: Tensor, has_slices: bool) -> Any:
    """Return outputs of a tower with other rows, in pieces of the shapes of its own (None: a tuple of pieces), or in
    one, as slices may have part of a piece.
    """
    pooled, *others = (
        (each,) if shape is None else each if len(shape) == 1 else each[None] if has_slices else each.view(-1, *shape)
        for each, shape in zip(rows.split(widths, dim=-1), shapes, strict=True)
    )
    return kind(pooler_output=pooled, **({"deepstack_features": others} if others else {}))


def _flat(features: Any) -> Tensor:
    """Return features as (num_tokens, hidden), joined if they come in pieces."""
    if isinstance(features, Tensor):
        return features.reshape(-1, features.shape[-1])
    return torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in features])


def _register(model: Any, method: str) -> None:
    """Under FSDP2 a method other than forward gathers no parameters unless it is registered."""
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    if isinstance(model, FSDPModule):
        assert isinstance(model, torch.nn.Module)
        register_fsdp_forward_method(model, method)


def loss(outputs: Any, batch: Batch) -> Tensor:
    """The batch's part of the mean over the loss tokens of the global batch, as `batch.loss_scale` says: what to call
    `backward` on.

    Args:
        outputs: of `model(**batch.model_inputs())`: logits (rows, L, vocab) are read.
        batch: of a loader with `collate_fn=od.hf.Inputs(config)`.

    Returns:
        A scalar, summed in float32, or in the logits' dtype where that is more precise. Without any loss token it is
        zero and joined to the graph.

    Raises:
        ValueError: outputs without logits for every position of the batch, or a batch of another `collate_fn`.
    """
    if not isinstance(batch.inputs, Inputs):
        raise ValueError("od.hf.loss reads batches of a DataLoader with collate_fn=od.hf.Inputs(config)")
    labels, weights = as_rows(batch.llm.any_labels), batch.loss_weights
    first = 0 if batch.has_slices else 1  # labels of slices were shifted before the cut
    wanted, logits = labels[:, first:], getattr(outputs, "logits", None)
    # Of an encoder-decoder, a dummy has logits of one position for labels of one.
    whole = 1 if batch.inputs.family.decoder else labels.shape[1]
    if logits is not None and logits.shape[1] == whole:
        logits = logits[:, : wanted.shape[1]]  # the logits of the last position predict no label
    if logits is None or logits.shape[:-1] != wanted.shape:
        shape = "none" if logits is None else f"{tuple(logits.shape)}"
        raise ValueError(
            f"the loss needs logits of every position of the batch {tuple(labels.shape)}, the outputs have {shape}: "
            "leave logits_to_keep out, and let the model return them"
        )
    if torch.finfo(logits.dtype).bits < 32:
        logits = logits.float()
    reduction = "sum" if weights is None else "none"
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORE, reduction=reduction
    )
    if weights is not None:
        losses = (losses * weights.view(labels.shape)[:, first:].flatten()).sum()
    return losses * batch.loss_scale
