"""Samples of one rank -> their summed loss: embedded text and patches in one causal transformer of random weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.resume.data import MERGE, RECIPE
from examples.model import Stack
from orchdata.batch.tensors import IGNORE
from orchdata.loaders.samples.sample import Sample, TextPart

_HIDDEN: Final = 32
_VOCABULARY: Final = 260


class TinyLM(nn.Module):
    """A language model that sees images and clips through one linear layer each. All samples of a call are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _HIDDEN)
        self.encoders = nn.ModuleDict(
            {
                name: nn.Linear(media.patch_dim, _HIDDEN)
                for name, media in (("image", RECIPE.image), ("video", RECIPE.video))
            }
        )
        self.stack = Stack(_HIDDEN, layers=2, ffn=64, num_heads=4, causal=True, checkpointed=False)
        self.head = nn.Linear(_HIDDEN, _VOCABULARY, bias=False)

    def forward(self, samples: Sequence[Sample]) -> Tensor:
        """The cross-entropy of all tokens with loss, summed."""
        rows, labels, lengths = [], [], []
        for sample in samples:
            length = 0
            for part in sample.parts:
                if isinstance(part, TextPart):
                    token_ids = torch.from_numpy(part.token_ids).long()
                    rows.append(self.embed(token_ids))
                    labels.append(token_ids.masked_fill(~torch.from_numpy(part.loss), IGNORE))
                else:
                    encoded = self.encoders[part.modality](part.tensor("patches")).unflatten(0, (-1, MERGE**2)).mean(1)
                    rows.append(encoded)
                    labels.append(torch.full((len(encoded),), IGNORE))
                length += len(rows[-1])
            lengths.append(length)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        logits = self.head(self.stack(torch.cat(rows), lengths, positions))
        # The first token of a sample never has loss, so no sample is predicted from the end of the one before it.
        loss = F.cross_entropy(logits[:-1], torch.cat(labels)[1:], ignore_index=IGNORE, reduction="sum")
        # Without images, too, all parameters take part, as DDP wants it.
        return loss + 0 * sum(parameter.sum() for parameter in self.encoders.parameters())


def trained_tokens(samples: Sequence[Sample]) -> int:
    """Tokens with loss."""
    return sum(int(part.loss.sum()) for sample in samples for part in sample.parts if isinstance(part, TextPart))
