"""Whether a model's own loss can be trusted to be the scaled sum: tried on its class, not read from it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from orchdata.batch.tensors import IGNORE
from orchdata.hf.families import model_class
from orchdata.hf.packing import kept
from orchdata.hf.tiny.model import undisturbed

_HIDDEN = 4
_RULES = "loss 1"


class _Nothing:
    """Outputs of a base model: its hidden states, and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, at: int) -> torch.Tensor:
        return (self.last_hidden_state,)[at]


class _Base(nn.Module):
    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *_: Any, **__: Any) -> _Nothing:
        return _Nothing(self._hidden)


def loss_follows(config: Any) -> bool:
    """Whether the loss of the configuration's class is the summed cross entropy of the next token, divided by the
    `num_items_in_batch` that its forward is given.

    The class's own forward is run around a base model that gives fixed hidden states. What cannot be tried so does not
    follow. What was found is kept, as verdicts on packed samples are.
    """
    digest = kept.digest_of({**kept.facts_of(config), "rules": _RULES})
    if (stored := kept.find(digest, {"follows": bool})) is not None:
        return bool(stored["follows"])
    try:
        follows = _tried(config)
    except Exception:  # noqa: BLE001 - a class that is built otherwise
        follows = False
    kept.keep(digest, {"follows": follows})
    return follows


def _tried(config: Any) -> bool:
    from transformers import PreTrainedModel

    kind, vocab = model_class(config), config.get_text_config().vocab_size
    with undisturbed(), torch.no_grad():
        hidden, head = torch.randn(1, 5, _HIDDEN), nn.Linear(_HIDDEN, vocab, bias=False)
        model = object.__new__(kind)
        own = copy.deepcopy(config)
        own._attn_implementation = "eager"  # none is computed, and others may not be installed here
        PreTrainedModel.__init__(model, own)
        model.model, model.lm_head, model.vocab_size = _Base(hidden), head, vocab
        ids = torch.randint(0, vocab, (1, 5))
        labels = ids.clone()
        labels[0, :2] = IGNORE
        positions = torch.arange(5)[None]
        runs = [
            model(input_ids=ids, position_ids=positions, labels=labels, num_items_in_batch=items, use_cache=False)
            for items in (0.5, 4)
        ]
        expected = nn.functional.cross_entropy(runs[0].logits[0, 1:-1].float(), labels[0, 2:], reduction="sum")
    return all(
        torch.allclose(outputs.loss, expected / items, rtol=1e-5) for outputs, items in zip(runs, (0.5, 4), strict=True)
    )
