"""What Hugging Face's own processor and model make of samples, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

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
