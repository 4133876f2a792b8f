"""Run by test_tools in megatron-core's environment: `megatron_core_job.py WAY`, in a folder with `data`.

Its GPTModel and its schedule of forward and backward, on CPUs. Two things stand for a GPU: the counter of tokens that
the schedule makes there is on the CPU, and torch's dense attention is in the place of Transformer Engine's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import shared
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch.overrides import TorchFunctionMode

import orchdata as od

LENGTH = 256


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class DenseAttention(torch.nn.Module):
    """Attention inside the sequences of `packed_seq_params`, or of each row."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()

    def forward(self, q: Any, k: Any, v: Any, mask: Any, **others: Any) -> torch.Tensor:
        """q, k, v: (T, heads, width) where packed, else (T, rows, heads, width)."""
        packed = others["packed_seq_params"]
        if packed is None:
            return attended(q, k, v, ~mask)
        bounds = packed.cu_seqlens_q_padded[1:].contiguous()
        sequence = torch.searchsorted(bounds, torch.arange(len(q)), right=True)
        is_seen = (sequence[:, None] == sequence) & ~causal(len(q))
        return attended(q[:, None], k[:, None], v[:, None], is_seen)[:, 0]


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_seen: torch.Tensor) -> torch.Tensor:
    """(T, rows, heads, width) -> (T, rows, heads * width)."""
    heads = [each.permute(1, 2, 0, 3) for each in (q, k, v)]
    found = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=is_seen)
    return found.permute(2, 0, 1, 3).flatten(2)


def causal(length: int) -> torch.Tensor:
    """True where attention is masked, as Megatron has it."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def make_model() -> GPTModel:
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    spec.submodules.self_attention.submodules.core_attention = DenseAttention
    model = GPTModel(config, spec, vocab_size=256, max_sequence_length=LENGTH)
    model.model_type = None
    return model


def finalize(models: list[Any], num_tokens: torch.Tensor, **others: Any) -> None:
    """As Megatron's: gradients summed over the ranks, and divided by the tokens of all."""
    dist.all_reduce(num_tokens)
    for parameter in models[0].parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= num_tokens


def forward_backward(*, forward_step_func: Any, data_iterator: Iterator[Any], **arguments: Any) -> None:
    """Megatron's schedule; the loss of the step, and the keys of its samples, are recorded."""
    batches, total = list(data_iterator), torch.zeros(2)

    def seen(batches: Iterator[Any], model: Any) -> Any:
        losses, loss_of = forward_step_func(batches, model)

        def loss_seen(losses: torch.Tensor) -> Any:
            loss, tokens, report = loss_of(losses)
            total.add_(torch.tensor([loss.item(), float(tokens)]))
            return loss, tokens, report

        return losses, loss_seen

    with OnCpu():
        get_forward_backward_func()(forward_step_func=seen, data_iterator=iter(batches), **arguments)
    dist.all_reduce(total)
    keys = batches[0]["keys"] if isinstance(batches[0], dict) else shared.keys_of(batches)
    recorder.step(total[0] / total[1], keys)


def ours(model: Any, optimizer: Any) -> None:
    names = {"model": model, "optimizer": optimizer, "forward_backward": forward_backward}
    names |= {"dataset": od.ShardDataset("data/*.tar", recipe=od.Recipe(image=None, audio=None))}
    names |= {"cost": od.CostModel(llm=od.PhaseCost(linear=1))}
    exec(shared.page_code("megatron_core"), names)


def collate(samples: list[Any]) -> dict[str, Any]:
    ids, labels = shared.padded(samples)
    labels = torch.cat([labels[:, 1:], torch.full((len(samples), 1), -100)], dim=1)
    return {"tokens": ids, "labels": labels, "keys": [key for key, _ in samples]}


def forward_step(batches: Iterator[Any], model: Any) -> Any:
    batch = next(batches)
    tokens, labels = batch["tokens"], batch["labels"]
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    losses = model(tokens, positions, causal(length)[None, None], labels=labels.clamp(min=0))
    has_loss = labels != -100

    return losses, lambda losses: ((losses * has_loss).sum(), has_loss.sum(), {})


def plain(model: Any, optimizer: Any) -> None:
    for batch in shared.plain_loader(collate):
        sizes = {"num_microbatches": 1, "seq_length": LENGTH, "micro_batch_size": len(batch["keys"])}
        forward_backward(forward_step_func=forward_step, data_iterator=iter([batch]), model=model, **sizes)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    recorder = shared.Recorder(sys.argv[1])
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    trained = make_model()
    {"ours": ours, "plain": plain}[sys.argv[1]](trained, torch.optim.SGD(trained.parameters(), lr=shared.RATE))
