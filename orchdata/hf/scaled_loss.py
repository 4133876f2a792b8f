"""The scaled loss of a Hugging Face model's outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchdata.batch.batch import Batch
from orchdata.batch.tensors import IGNORE
from orchdata.hf.inputs import Inputs, as_rows


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
