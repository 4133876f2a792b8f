"""What a run is planned for: GPUs, their speed, memory and links, and every constant of the formulas."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from orchdata.balancers.checks import checked_count, checked_effort
from orchdata.planners.values import Value, checked_number


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumed(Value):
    """The constants of the formulas (`docs/planning_a_run.md`). Bytes are of bf16 weights and Adam in float32."""

    # Bytes of a parameter that is trained; a frozen one has the weight.
    weight_bytes: float = 2.0
    gradient_bytes: float = 2.0
    optimizer_bytes: float = 12.0
    # Bytes a token, layer and unit of width; with recomputation `kept_bytes`, and one whole layer.
    activation_bytes: float = 34.0
    kept_bytes: float = 2.0
    logit_bytes: float = 6.0  # a token and entry of the vocabulary
    feature_bytes: float = 2.0  # a row and unit of the LLM's width, one way
    # Bytes a token, layer and unit of width that tensor parallelism sends, of which computing hides `hidden`.
    tensor_bytes: float = 16.0
    tensor_bytes_recomputed: float = 24.0
    hidden: float = 0.5
    # Bytes that FSDP sends in a micro-step: of a trained parameter, a frozen one whose inputs need gradients, another.
    sharded_bytes: float = 6.0
    sharded_input_bytes: float = 4.0
    sharded_frozen_bytes: float = 2.0
    reduced_bytes: float = 4.0  # of a trained parameter, once a step, without FSDP
    optimizer_traffic: float = 28.0  # bytes of memory that the optimizer reads and writes for a parameter
    not_hidden: float = 0.1  # part of the smaller one of sending and computing that the larger one does not hide
    usable: float = 0.9  # part of memory that states and activations may fill
    width: float = 128.0  # of a GPU's slice of a layer, at which kernels reach half of their share of peak

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if checked_effort(value, f"Assumed.{name}") > 1 and name in ("hidden", "not_hidden", "usable"):
                raise ValueError(f"Assumed.{name} is a part, at most 1, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster(Value):
    """GPUs of one kind in nodes, and two levels of links.

    Attributes:
        gpus, gpus_per_node: all of them, and those of a node, which reach each other by the faster link.
        operations: dense bf16 operations/s of a GPU, peak.
        memory, memory_bandwidth: bytes of a GPU, and bytes/s of its memory.
        within, between: bytes/s that a GPU sends, inside a node and between nodes.
        name, source: where the figures are from.
    """

    gpus: int
    operations: float
    memory: float
    memory_bandwidth: float
    within: float
    between: float
    gpus_per_node: int = 8
    name: str = ""
    source: str = ""
    assumed: Assumed = field(default_factory=Assumed)

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_node"):
            object.__setattr__(self, name, checked_count(getattr(self, name), f"Cluster.{name}"))
        for name in _SPEEDS:
            object.__setattr__(self, name, checked_number(getattr(self, name), f"Cluster.{name}"))

    @classmethod
    def named(cls, name: str, **changes: Any) -> Cluster:
        """Return a preset, `h100x64`: a kind (a100, a800, b200, h100, h200, h800) and a number of GPUs; `changes` are
        fields in place of its own. Raises ValueError for an unknown kind or no GPUs.
        """
        kind, _, gpus = name.partition("x")
        if kind not in _PRESETS or not gpus.isdecimal():
            raise ValueError(f"a cluster is KINDxGPUS, such as h100x64, of {', '.join(_PRESETS)}; got {name!r:.80}")
        preset = dict(zip((*_SPEEDS, "source"), _PRESETS[kind], strict=True))
        return cls(**{"gpus": int(gpus), "name": kind.upper(), **preset, **changes})

    @property
    def usable(self) -> float:
        """Bytes of a GPU that states and activations may fill."""
        return self.memory * self.assumed.usable

    def link(self, gpus: Any) -> Any:
        """Return bytes/s of the slowest link among so many neighbours; an array gives an array."""
        return np.where(np.asarray(gpus) <= self.gpus_per_node, self.within, self.between)


_SPEEDS = ("operations", "memory", "memory_bandwidth", "within", "between")
_SXM, _LINKS = "NVIDIA's data sheet, SXM", "Gb/s a GPU; links at 80 % of their rate"
_PRESETS = {
    # Operations/s, bytes, bytes/s of memory, bytes/s one way by NVLink, and by a network card for each GPU.
    "a100": (312e12, 80e9, 2.039e12, 0.8 * 300e9, 0.8 * 25e9, f"{_SXM}, NVLink 600 GB/s both ways; 200 {_LINKS}"),
    "a800": (312e12, 80e9, 2.039e12, 0.8 * 200e9, 0.8 * 25e9, f"{_SXM}, NVLink 400 GB/s both ways; 200 {_LINKS}"),
    "b200": (2250e12, 180e9, 7.7e12, 0.8 * 900e9, 0.8 * 50e9, f"{_SXM} (HGX, an eighth); 400 {_LINKS}"),
    "h100": (989e12, 80e9, 3.35e12, 0.8 * 450e9, 0.8 * 50e9, f"{_SXM}, NVLink 900 GB/s both ways; 400 {_LINKS}"),
    "h200": (989e12, 141e9, 4.8e12, 0.8 * 450e9, 0.8 * 50e9, f"{_SXM}, NVLink 900 GB/s both ways; 400 {_LINKS}"),
    "h800": (989e12, 80e9, 3.35e12, 0.8 * 200e9, 0.8 * 50e9, f"{_SXM}, NVLink 400 GB/s both ways; 400 {_LINKS}"),
}
