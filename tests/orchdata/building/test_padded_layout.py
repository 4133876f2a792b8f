"""Padded batches hold what packed ones hold, train the same, and mark what is padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from padded_model import PaddedLM
from shard_factory import RECIPE, SKIP_ANY, jpeg, write_shard
from torch import Tensor

import orchdata as od
from examples.model import ModelConfig, MultimodalLM, Sizes, fit_to_recipe, make_cost
from orchdata.planning.balance import Layout


def trained(model: MultimodalLM, dataset: od.ShardDataset, layout: Layout, **options: Any) -> list[Tensor]:
    """The loss of each step, and the gradients summed over the epoch."""
    torch.manual_seed(0)
    model.double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    losses = []
    for batch in loader(dataset, layout, **options):
        loss = model(**batch.model_inputs()).loss_sum * batch.loss_scale
        loss.backward()
        losses.append(loss.detach())
    return [torch.stack(losses).sum(), *[parameter.grad for parameter in model.parameters()]]  # type: ignore[list-item]


SMALL = Sizes(hidden=24, layers=2, ffn=48, num_heads=2)
CONFIG = fit_to_recipe(ModelConfig(llm=SMALL, image=SMALL, audio=SMALL), RECIPE)


OMNI = {"shards": 2, "samples": 15}
pytestmark = pytest.mark.usefixtures("same_cache")


def loader(dataset: Any, layout: Layout, **options: Any) -> od.DataLoader:
    options = {"global_batch_size": 10, "shuffle": True, "num_threads": 2, "cost": make_cost(CONFIG)} | options
    return od.DataLoader(dataset, collate_fn=layout, **options)


@pytest.mark.parametrize("positions", ["restart", "mrope"])
@pytest.mark.parametrize("encoders", ["packed", "padded"])
def test_without_its_padding_a_padded_batch_is_the_packed_one(
    dataset: od.ShardDataset, positions: Any, encoders: Any
) -> None:
    padded = od.Padded(positions=positions, encoders=encoders, multiple_of=8)
    pairs = zip(loader(dataset, padded), loader(dataset, od.Packed(positions=positions)), strict=True)
    for one, other in pairs:
        mask = one.llm.attention_mask
        assert mask is not None
        assert one.sample_ids == other.sample_ids and one.plan.hash == other.plan.hash
        assert one.llm.input_ids.shape == mask.shape
        assert mask.shape[1] == -(-other.llm.max_seqlen // 8) * 8  # the longest, aligned
        assert torch.equal(mask.sum(1, dtype=torch.int32), other.llm.cu_seqlens.diff())
        assert torch.equal(one.llm.cu_seqlens, other.llm.cu_seqlens)
        assert torch.equal(one.llm.input_ids[mask], other.llm.input_ids)
        assert torch.equal(one.llm.labels[mask], other.llm.labels)
        assert torch.equal(one.llm.position_ids[..., mask], other.llm.position_ids)
        assert (one.llm.labels[~mask] == -100).all() and (one.llm.labels[:, 0] == -100).all()
        assert not one.llm.input_ids[~mask].any()
        assert (one.loss_tokens, one.loss_scale) == (other.loss_tokens, other.loss_scale)
        assert torch.equal(one.text.input_ids, other.text.input_ids)
        for name, field in (("image", "patches"), ("audio", "features")):
            ours, theirs = getattr(one, name), getattr(other, name)
            where = getattr(one.llm, f"{name}_positions")
            assert (one.llm.input_ids.flatten()[where] == getattr(RECIPE.text, f"{name}_token_id")).all()
            assert torch.equal(ours.cu_seqlens, theirs.cu_seqlens)
            assert (ours.num_tokens, ours.max_seqlen) == (theirs.num_tokens, theirs.max_seqlen)
            rows = getattr(ours, field)
            if encoders == "packed":
                assert ours.mask is None and torch.equal(rows, getattr(theirs, field))
                continue
            assert rows.shape[:2] == ours.mask.shape == (len(theirs.cu_seqlens) - 1, theirs.max_seqlen)
            assert torch.equal(rows[ours.mask], getattr(theirs, field))
            assert not rows[~ours.mask].any()


@pytest.mark.parametrize("layout", [od.Packed(multiple_of=64), od.Padded(multiple_of=64)])
def test_a_cap_counts_the_padding(dataset: od.ShardDataset, layout: Layout) -> None:
    cap = 640
    for rank in range(2):
        steps = list(loader(dataset, layout, balance=od.Balance(max_tokens=cap), dp=(rank, 2)).steps())
        assert max(len(microbatches) for microbatches in steps) > 1
        for batch in [batch for microbatches in steps for batch in microbatches]:
            assert batch.llm.input_ids[: len(batch.sample_ids)].numel() <= cap


@pytest.mark.parametrize("encoders", ["packed", "padded"])
def test_a_rank_without_samples_gets_a_dummy_row_that_reaches_no_loss(dataset: od.ShardDataset, encoders: Any) -> None:
    layout = od.Padded(encoders=encoders, multiple_of=8)
    batches = [next(iter(loader(dataset, layout, global_batch_size=3, dp=(rank, 8)))) for rank in range(8)]
    (batch,) = [batch for batch in batches if not batch.sample_ids][:1]
    assert batch.llm.input_ids.shape == (1, 8)
    assert batch.llm.attention_mask is not None
    assert batch.llm.attention_mask.tolist() == [[True] * 2 + [False] * 6]  # of an image and a clip
    assert batch.llm.dummies == {"image": 1, "audio": 1}
    assert batch.llm.image_positions.tolist() == [0] and batch.llm.audio_positions.tolist() == [1]
    assert (batch.llm.labels == -100).all() and batch.loss_tokens == 0
    model = PaddedLM(CONFIG)
    loss = model(**batch.model_inputs()).loss_sum
    assert loss == 0
    loss.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_a_sample_that_fails_to_decode_is_left_out(tmp_path: Path) -> None:
    broken = jpeg(80, 80)[:-200]
    samples = [
        {"__key__": "a", "jpg": jpeg(56, 56, 1), "txt": b"first"},
        {"__key__": "b", "jpg": broken, "txt": b"broken, and by far the longest of them all"},
        {"__key__": "c", "txt": b"text"},
    ]
    dataset = od.ShardDataset(write_shard(tmp_path / "a.tar", samples), recipe=RECIPE)
    layout = od.Padded(encoders="padded")
    one = od.DataLoader(dataset, batch_size=3, collate_fn=layout, on_error=SKIP_ANY, num_threads=0)
    (batch,) = one
    assert [key for _, key in batch.sample_ids] == ["a", "c"]
    whole = od.ShardDataset(write_shard(tmp_path / "b.tar", [samples[0], samples[2]]), recipe=RECIPE)
    (expected,) = od.DataLoader(whole, batch_size=2, collate_fn=layout, num_threads=0)
    assert equal(batch, expected)
    assert batch.global_loss_tokens > expected.global_loss_tokens  # the planned denominator stays
    assert [failure["key"] for failure in one.stats()["failures"]["samples"]] == ["b"]


def equal(one: od.Batch, other: od.Batch) -> bool:
    ours, theirs = one.model_inputs(), other.model_inputs()
    return ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) if torch.is_tensor(value) else value == theirs[name]
        for name, value in ours.items()
    )


def test_reused_memory_shows_nothing_of_earlier_batches(tmp_path: Path) -> None:
    """Large enough for the pool: every epoch but the first decodes into memory of other batches."""
    recipe = od.Recipe(image=od.ImagePreprocessor(max_tokens=256, dtype="float32"), audio=None)
    samples = [
        {"__key__": f"{number}", "jpg": jpeg(40 + 90 * (number % 4), 200, number), "txt": b"x" * 40 * (number % 3 + 1)}
        for number in range(12)
    ]
    dataset = od.ShardDataset(write_shard(tmp_path / "a.tar", samples), recipe=recipe)
    layout = od.Padded(multiple_of=4096, encoders="padded")
    one = od.DataLoader(dataset, batch_size=4, collate_fn=layout, shuffle=True, num_threads=0)
    for _ in range(3):
        for batch in one:
            assert not batch.image.patches[~batch.image.mask].any()
            assert batch.llm.input_ids.shape == (4, 4096)  # a fixed shape
            assert not batch.llm.input_ids[~batch.llm.attention_mask].any()
            assert (batch.llm.labels[~batch.llm.attention_mask] == -100).all()
            del batch


def test_batches_move_whole(dataset: od.ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = next(iter(loader(dataset, od.Padded(encoders="padded"))))
    moved = batch.to("meta")
    tensors = [value for value in moved.model_inputs().values() if torch.is_tensor(value)]
    assert len(tensors) == len([value for value in batch.model_inputs().values() if torch.is_tensor(value)])
    assert all(tensor.is_meta for tensor in tensors)
    assert equal(batch.to("cpu"), batch)
    pinned: list[Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    assert equal(batch.pin_memory(), batch)
    assert {id(value) for value in batch.model_inputs().values() if torch.is_tensor(value)} <= set(map(id, pinned))


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_merge_puts_features_where_placeholders_stand(dataset: od.ShardDataset, form: str) -> None:
    batch = next(iter(loader(dataset, od.Padded(encoders="padded"))))
    embeds = torch.zeros(*batch.llm.input_ids.shape, 2)
    features = {}
    for name in ("image", "audio"):
        held = getattr(batch, name)
        packed = torch.arange(2.0 * held.num_tokens).reshape(-1, 2) + 1
        features[name] = packed.requires_grad_()
        if form == "padded":
            item, place = held.token_places
            # One more place than needed, filled with what must not arrive.
            rows = torch.full((held.mask.shape[0], int(place.max()) + 2, 2), -1.0)
            rows[item, place] = packed.detach()
            features[name] = rows.requires_grad_()
    merged = batch.merge(embeds, features)
    assert merged.shape == embeds.shape
    for name in ("image", "audio"):
        wanted = torch.arange(2.0 * getattr(batch, name).num_tokens).reshape(-1, 2) + 1
        here = batch.llm.input_ids == getattr(RECIPE.text, f"{name}_token_id")
        assert torch.equal(merged[here], wanted)
    elsewhere = ~torch.isin(batch.llm.input_ids, torch.tensor([RECIPE.text.image_token_id, RECIPE.text.audio_token_id]))
    assert not merged[elsewhere].any()
    merged.sum().backward()
    assert all(
        one.grad is not None and one.grad.sum() == 2 * getattr(batch, n).num_tokens for n, one in features.items()
    )


def test_merge_refuses_features_of_another_shape(dataset: od.ShardDataset) -> None:
    padded = next(iter(loader(dataset, od.Padded(encoders="padded"))))
    packed = next(iter(loader(dataset, od.Padded())))
    embeds = torch.zeros(*padded.llm.input_ids.shape, 2)
    num_images = padded.image.mask.shape[0]
    with pytest.raises(ValueError, match=rf"expected \(num_tokens, hidden\) or \({num_images}, max_tokens, hidden\)"):
        padded.merge(embeds, {"image": torch.zeros(num_images + 1, 12, 2), "audio": torch.zeros(1, 2)})
    with pytest.raises(ValueError, match=r"expected \(num_tokens, hidden\)$"):
        packed.merge(embeds, {"image": torch.zeros(num_images, 12, 2), "audio": torch.zeros(1, 2)})
    with pytest.raises(ValueError, match="do not embed input_ids"):
        padded.merge(embeds[:, 1:], {})


def test_a_cap_on_padded_encoders_is_refused(dataset: od.ShardDataset) -> None:
    balance = od.Balance(max_tokens={"llm": 4096, "image": 600})
    with pytest.raises(ValueError, match=r"caps image, which od\.Padded\(encoders='padded'\) would exceed"):
        loader(dataset, od.Padded(encoders="padded"), balance=balance)
    for batch in loader(dataset, od.Padded(), balance=balance):
        assert batch.image.patches.shape[0] <= 600


@pytest.mark.slow_cases("restart")
@pytest.mark.parametrize("positions", ["restart", "mrope"])
def test_padded_training_has_the_loss_and_gradients_of_packed(dataset: od.ShardDataset, positions: Any) -> None:
    packed = trained(MultimodalLM(CONFIG), dataset, od.Packed(positions=positions))
    microbatched = od.Balance(max_tokens=640)
    for encoders, balance in (("packed", "none"), ("padded", "none"), ("padded", microbatched)):
        layout = od.Padded(positions=positions, encoders=encoders, multiple_of=16)  # type: ignore[arg-type]
        for ours, theirs in zip(trained(PaddedLM(CONFIG), dataset, layout, balance=balance), packed, strict=True):
            assert (ours - theirs).norm() <= 1e-9 * theirs.norm()
