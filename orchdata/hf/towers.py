"""Per phase: towers run on what a rank encodes, and their features travel to the samples that they belong to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchdata.batch.batch import Batch
from orchdata.hf.families import TOWERS
from orchdata.hf.inputs import Inputs
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
    inputs = batch.inputs
    if not isinstance(inputs, Inputs):
        raise ValueError("od.hf.encode reads batches of a DataLoader with collate_fn=od.hf.Inputs(config)")
    if not batch.routes:
        raise ValueError(
            "od.hf.encode is for od.Balance(assignment='per_phase'): without it batch.model_inputs() has the media, "
            "and the model encodes them"
        )
    model = getattr(model, "module", model)
    features: dict[str, Any] = {}
    for name in batch.media:
        if name not in inputs.family.part_features:
            raise ValueError(
                f"{inputs.config.model_type} takes no features of {name} ready made: give them as batch.model_inputs() "
                "does, under assignment='joint'"
            )
        features[name] = _encoded(model, inputs, batch, name, group)
    return features


def _encoded(model: Any, inputs: Inputs, batch: Batch, name: str, group: Any) -> Any:
    method = TOWERS[name]
    _register(model, method)
    outputs = getattr(model, method)(**inputs.tower_arguments(batch, name), return_dict=True)
    layers = list(getattr(outputs, "deepstack_features", None) or ())
    rows = [_flat(outputs.pooler_output), *map(_flat, layers)]
    widths = [each.shape[-1] for each in rows]
    together = torch.cat([each.to(rows[0].dtype) for each in rows], dim=-1)
    together = exchange(together, batch.route(name), group=group, requires_grad=together.requires_grad)
    # transformers fills places in the order of the sequence; a dummy's features stayed where they were made.
    together = together[batch.llm.media_positions[name].argsort()]
    together = torch.cat([together, together.new_zeros(batch.llm.dummies.get(name, 0), together.shape[-1])])
    pooled, *others = together.split(widths, dim=-1)
    outputs.pooler_output = _as(outputs.pooler_output, pooled)
    if others:
        outputs.deepstack_features = [_as(layer, each) for layer, each in zip(layers, others, strict=True)]
    return outputs


def _flat(features: Any) -> Tensor:
    """Return features as (num_tokens, hidden), joined if they come in pieces."""
    if isinstance(features, Tensor):
        return features.reshape(-1, features.shape[-1])
    return torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in features])


def _as(before: Any, rows: Tensor) -> Any:
    """Rows in the pieces in which a model gave its own."""
    if isinstance(before, Tensor):
        return rows.view(-1, *before.shape[1:]) if before.dim() == 3 else rows
    return (rows,)


def _register(model: Any, method: str) -> None:
    """Under FSDP2 a method other than forward gathers no parameters unless it is registered."""
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    if isinstance(model, FSDPModule):
        assert isinstance(model, torch.nn.Module)
        register_fsdp_forward_method(model, method)
