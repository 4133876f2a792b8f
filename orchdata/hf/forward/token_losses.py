"""The loss of a batch's tokens, summed, from what a model's forward returned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchdata.batch.tensors import IGNORE


def summed_loss(outputs: Any, labels: Tensor, weights: Tensor | None, *, of_decoder: bool) -> Tensor:
    """The summed cross-entropy of each next token.

    Args:
        outputs: of a model; its logits (rows, L, vocab) are read.
        labels: (rows, L), int64.
        weights: (rows, L), of each label; None where all are 1.
        of_decoder: whether the model is an encoder-decoder, with logits of one position for labels of one.

    Returns:
        A scalar, summed in float32, or in the logits' dtype where that is more precise. Without any loss token it is
        zero and joined to the graph.

    Raises:
        ValueError: outputs without logits for every position of the batch.
    """
    logits = getattr(outputs, "logits", None)
    wanted = labels[:, 1:]
    if logits is not None and logits.shape[1] == (1 if of_decoder else labels.shape[1]):
        logits = logits[:, : wanted.shape[1]]  # the logits of the last position predict no label
    if logits is None or logits.shape[:-1] != wanted.shape:
        shape = "none" if logits is None else f"{tuple(logits.shape)}"
        raise ValueError(
            f"the loss needs logits of every position of the batch {tuple(labels.shape)}, the outputs have {shape}: "
            "leave logits_to_keep out, and let the model return them"
        )
    if torch.finfo(logits.dtype).bits < 32:
        logits = logits.float()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORE, reduction="sum" if weights is None else "none"
    )
    return losses if weights is None else (losses * weights[:, 1:].flatten()).sum()
