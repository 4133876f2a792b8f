"""torchtitan where it can be imported; else what of it a loader and its trainer meet, which says the same."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.stateful import Stateful


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[Any] = None

        def build(self, **runtime: Any) -> Any:
            return self._owner(config=replace(self), **runtime)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "Config" in cls.__dict__:
            cls.Config._owner = cls


class DataloaderExhaustedError(Exception):
    pass


class BaseDataLoader(Stateful, ABC, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    def close(self) -> None:
        pass


class Trainer(Stateful, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def __init__(self, config: Any) -> None:
        self.config = config

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        iterator = iter(data_iterable)
        while True:
            try:
                input_dict, labels = next(iterator)
            except StopIteration as error:
                raise DataloaderExhaustedError from error
            yield input_dict, labels

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        self.optimizers.zero_grad()
        at_a_time = range(self.num_pp_microbatches)
        groups = [[next(data_iterator) for _ in at_a_time] for _ in range(self.gradient_accumulation_steps)]
        valid = sum((labels != -100).sum() for group in groups for _, labels in group)
        for group in groups:
            given = map(list, zip(*group, strict=True)) if self.parallel_dims.pp_enabled else group[0]
            input_dict, labels = given
            self.forward_backward_step(input_dict=input_dict, labels=labels, global_valid_tokens=valid)
        self.optimizers.step()


try:
    importlib.import_module("torchtitan.trainer")
except ImportError:  # torchtitan's own requirements are many, triton among them
    trainer, tyro = ModuleType("torchtitan.trainer"), ModuleType("tyro")
    trainer.__dict__.update(Trainer=Trainer, BaseDataLoader=BaseDataLoader)
    trainer.DataloaderExhaustedError = DataloaderExhaustedError
    tyro.conf = ModuleType("tyro.conf")
    tyro.conf.Suppress = object()
    sys.modules.update({"torchtitan": ModuleType("torchtitan"), "torchtitan.trainer": trainer})
    sys.modules.setdefault("tyro", tyro)

titan = sys.modules["torchtitan.trainer"]


class Dims:
    """Dimensions of one rank, for any arguments of the loaders."""

    dp_enabled = ep_enabled = dp_cp_enabled = False

    def __init__(self, pp_enabled: bool) -> None:
        self.pp_enabled = pp_enabled

    def get_optional_mesh(self, name: str) -> None:
        return None


class Schedule:
    def get_metrics(self) -> dict[str, Any]:
        return {}

    def step(self) -> None:
        pass


class Quiet(Schedule):
    """A metrics processor and a checkpointer."""

    ntokens_since_last_log = 0

    def __init__(self) -> None:
        self.data_loading_times: list[float] = []

    def should_log(self, step: int) -> bool:
        return False

    def maybe_wait_for_staging(self) -> None:
        pass


class Optimizers:
    def __init__(self, model: torch.nn.Module) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()


class Bare(titan.Trainer):
    """torchtitan's loop around a model that sees each token alone: without devices, meshes and configurations."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.model = make_model()
        self.model_parts = [self.model]
        self.optimizers, self.lr_schedulers = Optimizers(self.model), Schedule()
        self.metrics_processor = self.checkpointer = Quiet()
        self.parallel_dims, self.device = Dims(config.at_a_time > 1), torch.device("cpu")
        self.step, self.gradient_accumulation_steps, self.pp_has_last_stage = 0, config.accumulation, True
        self.num_pp_microbatches = self.num_pipeline_parallel_microbatches = config.at_a_time
        self.dataloader = config.dataloader.build(**config.runtime)
        self.seen: list[list[Any]] = []

    def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: Any) -> torch.Tensor:
        pairs = zip(input_dict, labels, strict=True) if isinstance(labels, list) else [(input_dict, labels)]
        loss = torch.zeros(())
        for given, wanted in pairs:
            self.seen[-1].append((given, wanted))
            logits = self.model(given["input"])
            loss = loss + token_losses(logits, wanted) / global_valid_tokens
        loss.backward()
        return loss.detach()

    def run(self, num_steps: int) -> None:
        """As `train` does."""
        iterator = self.batch_generator(self.dataloader)
        for _ in range(num_steps):
            self.step += 1
            self.seen.append([])
            try:
                self.train_step(iterator)
            except titan.DataloaderExhaustedError:
                self.seen.pop()
                break


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(260, 8), torch.nn.Linear(8, 260))


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
