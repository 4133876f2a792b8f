"""What Hugging Face's own processor and model make of samples, one at a time; and the same samples through orchdata:
the loss and gradients of one optimizer step, averaged over ranks as DDP does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import orchdata as od
from hf_families.families import Family
from hf_families.samples import Sample, as_image, as_wave, hf_messages


@dataclass(frozen=True)
class Measured:
    """The summed loss of some samples, how many tokens it is over, and its gradients by parameter name."""

    loss_sum: float
    loss_tokens: int
    gradients: dict[str, Tensor]

    @property
    def loss(self) -> float:
        return self.loss_sum / self.loss_tokens

    def mean_gradients(self) -> dict[str, Tensor]:
        return {name: gradient / self.loss_tokens for name, gradient in self.gradients.items()}


class _Float64(TorchFunctionMode):
    """Leaves out the float32 that models ask for inside (norms, rotary, softmax): sums in it depend on their order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if func is Tensor.to:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **kwargs)


@contextmanager
def float64() -> Iterator[None]:
    with _Float64():
        yield


def inputs_of(family: Family, processor: Any, sample: Sample) -> dict[str, Any]:
    """The model's arguments for one sample by HF's own processor, with `labels` of what has loss."""
    if family.chat == "speech":
        return _speech_inputs(processor, sample)
    if family.chat == "pair":
        images = [as_image(data) for data in sample.images]
        prompt, suffix = sample.text("user"), sample.text("assistant")
        return dict(processor(text=prompt, suffix=suffix, images=images, return_tensors="pt"))
    return _chat_inputs(processor, hf_messages(family, sample))


def _chat_inputs(processor: Any, messages: list[Any]) -> dict[str, Any]:
    asked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True, "return_tensors": "pt"}
    inputs = dict(processor.apply_chat_template(messages, **asked))
    trained = torch.as_tensor(inputs.pop("assistant_masks")).reshape(inputs["input_ids"].shape)
    labels = inputs["input_ids"].masked_fill(trained == 0, -100)
    starts = inputs["attention_mask"].argmax(1, keepdim=True)
    return inputs | {"labels": labels.scatter(1, starts, -100)}


def _speech_inputs(processor: Any, sample: Sample) -> dict[str, Any]:
    heard = processor.feature_extractor(as_wave(sample.clips[0]), sampling_rate=16_000, return_tensors="pt")
    ids = processor.tokenizer(sample.text("assistant"), return_tensors="pt").input_ids
    assert ids[0, 0] == processor.tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    return dict(heard) | {"labels": ids[:, 1:]}  # as the usual collator: the model puts the start there itself


def as_double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def loss_sum_of(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, int]:
    """The sum of the cross entropy over labels, shifted for decoders, and how many they are."""
    inputs = as_double(inputs)
    labels = inputs["labels"]
    shifted = model.config.is_encoder_decoder
    given = inputs if shifted else {name: value for name, value in inputs.items() if name != "labels"}
    logits = model(**given, use_cache=False).logits
    if not shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, int((labels != -100).sum())


def reference(family: Family, model: nn.Module, processor: Any, samples: Sequence[Sample]) -> Measured:
    """Each sample alone through HF's processor and the model; losses and gradients added up."""
    return measured(model, (inputs_of(family, processor, sample) for sample in samples))


def measured(model: nn.Module, inputs: Iterable[dict[str, Any]]) -> Measured:
    """Losses and gradients of the arguments of several forwards, added up."""
    model.zero_grad()
    loss_sum, tokens = 0.0, 0
    for given in inputs:
        with float64():
            loss, count = loss_sum_of(model, given)
            loss.backward()
        loss_sum, tokens = loss_sum + loss.item(), tokens + count
    return Measured(loss_sum, tokens, gradients_of(model))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a gradient, relative to the largest entry of that gradient or a thousandth of all."""
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    return max(
        (found[name] - gradient).abs().max().item() / max(gradient.abs().max().item(), 1e-3 * largest)
        for name, gradient in expected.items()
    )


Change = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Mode:
    """A way to train on the samples."""

    padded: bool = False
    per_phase: bool = False
    microbatches: bool = False
    rounds: str | int = ""

    def __str__(self) -> str:
        flags = [name for name in ("microbatches", "rounds") if getattr(self, name)]
        return ", ".join(["padded" if self.padded else "packed", "per phase" if self.per_phase else "joint", *flags])


def modes_of(family: Family, num_ranks: int) -> list[Mode]:
    """Every way that the family can be trained on so many ranks."""
    layouts = [True, False] if family.packed else [True]
    modes = [Mode(padded=padded, microbatches=split) for padded in layouts for split in (False, True)]
    if num_ranks > 1 and family.per_phase:
        modes += [Mode(padded=padded, per_phase=True) for padded in layouts]
        modes += [Mode(padded=padded, per_phase=True, microbatches=True, rounds="step") for padded in layouts]
    return modes


def make_loader(family: Family, model: nn.Module, processor: Any, shards: Sequence[str], mode: Mode) -> od.DataLoader:
    """All samples of the shards in one global batch."""
    dataset = od.ShardDataset(list(shards), recipe=od.hf.recipe(processor))
    index = dataset.index()
    room = int(index.llm_tokens.max()) + 1 if mode.microbatches else None  # some models take even lengths
    return od.DataLoader(
        dataset,
        global_batch_size=len(index),
        collate_fn=od.hf.Inputs(model.config, padded=mode.padded),
        cost=od.hf.cost(model.config),
        balance=od.Balance(
            assignment="per_phase" if mode.per_phase else "joint",
            max_tokens=room,
            encode=mode.rounds or "micro_step",  # type: ignore[arg-type]
        ),
        num_threads=0,
    )


def trained(model: nn.Module, loader: od.DataLoader, change: Change | None = None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the epoch's only step."""
    model.zero_grad()
    loss = 0.0
    with float64():
        for batch, features in _with_features(model, loader):
            inputs = batch.model_inputs() | features
            part = od.hf.loss(model(**(change(inputs) if change else inputs)), batch)
            part.backward()
            loss += part.item()
    gradients = gradients_of(model)
    if dist.is_initialized():
        flat = torch.cat([torch.tensor([loss], dtype=torch.float64), *(each.flatten() for each in gradients.values())])
        dist.all_reduce(flat)
        averaged = (flat / dist.get_world_size()).split([1, *(each.numel() for each in gradients.values())])
        loss = averaged[0].item()
        shaped = zip(gradients.items(), averaged[1:], strict=True)
        gradients = {name: mean.view_as(gradient) for (name, gradient), mean in shaped}
    return loss, gradients


def _with_features(model: nn.Module, loader: od.DataLoader) -> Iterator[tuple[od.Batch, dict[str, Any]]]:
    for step in loader.steps():
        batches = [in_float64(batch) for batch in step]
        if batches[0].plan.rounds is not None:
            yield from ((batch, {"mm_encoder_outputs": made}) for batch, made in od.hf.rounds(model, batches))
            continue
        for batch in batches:
            yield batch, {"mm_encoder_outputs": od.hf.encode(model, batch)} if batch.routes else {}


def in_float64(batch: od.Batch) -> od.Batch:
    """The same batch; what is rounded to float32 is that before the model."""
    media = {
        name: held.map(lambda each: each.double() if each.is_floating_point() else each)
        for name, held in batch.media.items()
    }
    return replace(batch, media=media)


def errors(found: tuple[float, dict[str, Tensor]], expected: Measured) -> tuple[float, float]:
    """How far loss and gradients are from the reference, relative to it."""
    loss, gradients = found
    return abs(loss - expected.loss) / expected.loss, distance(gradients, expected.mean_gradients())
