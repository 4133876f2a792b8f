"""Losses of slices, in each way that transformers and others compute them, add up to that of whole sequences."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import orchdata as od

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

import transformers
from transformers.modeling_outputs import CausalLMOutput
from transformers.trainer_pt_utils import LabelSmoother

from orchdata.hf.trainer import _unshifted, sft_arguments

pytestmark = [pytest.mark.usefixtures("same_cache"), pytest.mark.filterwarnings("ignore:len")]

RANKS, VOCAB = 4, 260
CONFIG = transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
INPUTS = od.hf.Inputs(CONFIG, padded=False, probe=False)
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def shifting(outputs: Any, labels: Tensor, num_items_in_batch: float) -> Tensor:
    """A `compute_loss_func` that shifts labels, as the Trainer documents them."""
    logits, wanted = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, wanted, reduction="sum") / num_items_in_batch


def of_model(outputs: Any, **given: Any) -> Tensor:
    loss: Tensor = transformers.LlamaForCausalLM._from_config(CONFIG).loss_function(
        logits=outputs.logits, vocab_size=VOCAB, **given
    )
    return loss


WAYS: dict[str, Any] = {
    "od.hf.loss": lambda batch, outputs: od.hf.loss(outputs, batch),
    "the model's own": lambda batch, outputs: of_model(
        outputs, **{name: each for name, each in batch.model_inputs().items() if "labels" in name or "num" in name}
    ),
    "compute_loss_func": lambda batch, outputs: shifting(*_unshifted(outputs, batch), 1 / batch.loss_scale),
    "label smoothing": lambda batch, outputs: partial(LabelSmoother(0.1), shift_labels=True)(
        *_unshifted(outputs, batch), num_items_in_batch=1 / batch.loss_scale
    ),
    "SFT": lambda batch, outputs: of_model(
        outputs,
        num_items_in_batch=1 / batch.loss_scale,
        **{name: each for name, each in sft_arguments({}, batch).items() if "labels" in name},
    ),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> list[str]:
    rng, paths = np.random.default_rng(1), []
    for name in ("a", "b"):
        path = tmp_path_factory.mktemp("texts") / f"{name}.jsonl"
        lengths = [1500, *rng.integers(20, 120, 7).tolist()]
        said = ["".join(map(chr, rng.integers(97, 123, length))) for length in lengths]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in said))
        paths.append(str(path))
        od.ShardDataset(str(path), od.Recipe(image=None, audio=None)).index()
    return paths


def batches_of(texts: list[str], weight: float, *, shared: bool) -> list[od.Batch]:
    """The first step on all ranks, or on one that has everything whole."""
    recipe = od.Recipe(image=None, audio=None)
    a, b = (od.ShardDataset(path, recipe) for path in texts)
    data = od.Mixture({"a": od.Source(a), "b": od.Source(b, loss_weight=weight)}, stop="all")
    cost = od.CostModel(llm=od.PhaseCost(1.0, 0.01))
    balance = od.Balance(teams=od.Teams(largest=4)) if shared else od.Balance()
    common = {"global_batch_size": 16, "cost": cost, "balance": balance, "num_threads": 0, "collate_fn": INPUTS}
    ranks = RANKS if shared else 1
    loaders = [od.DataLoader(data, dp=(rank, ranks), **common) for rank in range(ranks)]
    for each in loaders:
        each._runtime.context.delivery.team_use.is_by_name = True  # as od.hf.share_attention does, on each rank
    return [next(iter(each)) for each in loaders]


@pytest.mark.parametrize(("way", "weight"), [*((way, 1.0) for way in WAYS), ("od.hf.loss", 3.0)])
def test_losses_of_members_add_up(texts: list[str], way: str, weight: float) -> None:
    ours, (whole,) = batches_of(texts, weight, shared=True), batches_of(texts, weight, shared=False)
    assert max(team.size for batch in ours for team in batch.teams) > 1

    def loss(batch: od.Batch) -> float:
        return float(WAYS[way](batch, CausalLMOutput(logits=TABLE[batch.llm.input_ids][None])))

    assert sum(map(loss, ours)) / RANKS == pytest.approx(loss(whole), rel=1e-6)
    names = {"attention_mask", "cu_seq_lens_q"}
    assert all("teams" in batch.model_inputs() and not names & batch.model_inputs().keys() for batch in ours)


def test_a_model_that_shifts_labels_itself_gets_none(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (batch, *_) = batches_of(texts, 1.0, shared=True)
    monkeypatch.setattr("orchdata.hf.inputs._loss_follows", lambda _, *, shifted=False: not shifted)
    batch = SimpleNamespace(**vars(batch), has_slices=True, loss_weights=None, loss_scale=1.0)
    batch.inputs = od.hf.Inputs(CONFIG, padded=False, probe=False)
    assert not {"labels", "shift_labels"} & batch.inputs.arguments(batch).keys()
    with pytest.raises(ValueError, match="shifts labels that were shifted before"):
        sft_arguments({}, batch)
