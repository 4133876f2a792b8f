"""`record.py RESULT GPU SCRIPT ARGUMENTS`: run a training script and write down what it trained on.

RESULT gets JSON: the loss of each backward pass, how often models were called with gradients and without, and a
number for the tensors of each call. With GPU "gpu" a script that asks for CUDA and NCCL gets the CPU and gloo.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Recorder:
    """Losses, and calls of whole models: modules with parameters that no other module calls."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.inputs: list[float] = []
        self.calls = {"training": 0, "evaluation": 0}
        self._depth = 0
        backward = torch.Tensor.backward

        def recorded(loss: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            self.losses.append(float(loss.detach().sum()))
            return backward(loss, *arguments, **options)

        torch.Tensor.backward = recorded  # type: ignore[method-assign]
        nn.modules.module.register_module_forward_pre_hook(self._enter)
        nn.modules.module.register_module_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._depth == 0 and next(module.parameters(), None) is not None:
            self.calls["training" if torch.is_grad_enabled() else "evaluation"] += 1
            self.inputs.append(sum(in_a_number(value) for value in inputs if isinstance(value, torch.Tensor)))
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1


def in_a_number(tensor: torch.Tensor) -> float:
    """Other values, or in another order, very likely give another one."""
    values = tensor.detach().double().flatten()
    return float(values @ torch.arange(1, len(values) + 1, dtype=torch.float64))


def give_cpu_for_gpu() -> None:
    """Let `.to(0)`, `cuda.set_device`, NCCL and `device_ids` mean the CPU."""
    for kind in (torch.Tensor, nn.Module):
        plain = kind.to
        kind.to = lambda self, to, *more, plain=plain, **named: (  # type: ignore[method-assign]
            self if isinstance(to, int) else plain(self, to, *more, **named)
        )
    torch.cuda.set_device = lambda device: None
    init = dist.init_process_group
    dist.init_process_group = lambda backend=None, **named: init("gloo", **named)
    wrap = nn.parallel.DistributedDataParallel.__init__
    nn.parallel.DistributedDataParallel.__init__ = (  # type: ignore[method-assign]
        lambda self, module, device_ids=None, **named: wrap(self, module, **named)
    )


def main() -> None:
    result, gpu, *sys.argv = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)  # for scripts without a seed of their own
    if gpu == "gpu":
        give_cpu_for_gpu()
    recorder = Recorder()
    error = ""
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException as raised:  # noqa: BLE001 - it is the result
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    with open(result, "w", encoding="utf-8") as file:
        json.dump({"losses": recorder.losses, "inputs": recorder.inputs, **recorder.calls, "error": error}, file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that gloo may still hold abort a process that ends the long way


if __name__ == "__main__":
    main()
