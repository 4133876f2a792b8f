"""The scaled loss of a Hugging Face model's outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from orchdata.batch.batch import Batch
from orchdata.hf.forward.token_losses import summed_loss
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
    labels, weights = as_rows(batch.llm.labels), batch.loss_weights
    rows = None if weights is None else weights.view(labels.shape)
    return summed_loss(outputs, labels, rows, of_decoder=batch.inputs.family.decoder) * batch.loss_scale
