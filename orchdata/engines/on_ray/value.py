"""RayEngine: builds steps in actors of a Ray cluster, on this machine and on others.

    RayEngine --open(spec, workers)--> ActorEngine: `num_workers` actors for each rank that reads

Ray is imported when an engine is opened, and not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from orchdata.building.spec import BuildSpec
from orchdata.engines.engine import WorkerEngine, Workers
from orchdata.engines.on_ray.cluster import check_address, connect, import_ray, split_code

START_SECONDS: Final = 600
_OURS: Final = {
    "max_restarts": "actors are restarted as often as needed",
    "max_task_retries": "a step that is lost is built again",
    "max_concurrency": "num_threads= and prefetch_factor= say how much an actor does at a time",
    "concurrency_groups": "num_threads= and prefetch_factor= say how much an actor does at a time",
    "lifetime": "actors end with the loader",
    "name": "each loader has actors of its own",
    "get_if_exists": "each loader has actors of its own",
    "num_returns": "an actor returns steps",
}
"""Options of actors that the engine sets itself, and why."""


@dataclass(frozen=True, init=False)
class RayEngine:
    """Builds steps in actors of a Ray cluster: `DataLoader(..., num_workers=8, engine=od.RayEngine())`.

    Each rank that reads has `num_workers` actors, each with `num_threads` threads. Batches are those of the other
    engines, to the bit. An actor that is lost is started again by Ray, and its steps are built again. Machines that
    train must be part of the cluster: docs/workers.md.

    Args:
        address: of the cluster, as for `ray.init`. Default: the Ray that this process uses already, else RAY_ADDRESS,
            else the cluster of this machine. A loader with one rank starts a local Ray if there is none.
        start_timeout: seconds that actors may wait for free CPUs. A warning says at once what is missing.
        ray_options: options of each actor, with their names of `ray.remote`: `num_cpus` (default: `num_threads`),
            `resources`, `memory`, `runtime_env`, `scheduling_strategy` and others.

    Raises:
        ValueError: the address is that of a Ray Client (ray://), an option is one that the engine sets, or
            start_timeout is not above 0.
    """

    address: str | None
    start_timeout: float
    ray_options: Mapping[str, Any] = field(hash=False)

    def __init__(self, address: str | None = None, *, start_timeout: float = START_SECONDS, **ray_options: Any) -> None:
        check_address(address)
        if isinstance(start_timeout, bool) or not start_timeout > 0:
            raise ValueError(f"start_timeout is a number of seconds above 0, got {start_timeout!r}")
        for name in ray_options:
            if name in _OURS:
                raise ValueError(f"RayEngine sets {name} itself, because {_OURS[name]}: leave it out")
        for name, value in (("address", address), ("start_timeout", start_timeout), ("ray_options", ray_options)):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        given: dict[str, Any] = {} if self.address is None else {"address": self.address}
        given |= {} if self.start_timeout == START_SECONDS else {"start_timeout": self.start_timeout}
        return (
            f"RayEngine({', '.join(f'{name}={value!r}' for name, value in (given | dict(self.ray_options)).items())})"
        )

    def open(self, spec: BuildSpec, workers: Workers) -> WorkerEngine:
        """Connect to the cluster, and start the actors of a rank.

        Raises:
            PackageError: Ray is not installed.
            ValueError: an option that Ray does not know, or `worker_memory`.
            RuntimeError: there is no cluster, or it has another version of Ray or Python.
        """
        import_ray()
        if workers.worker_memory is not None:
            raise ValueError(
                "worker_memory limits processes of this machine: leave it out. RayEngine(memory=...) reserves memory "
                "of a node, and Ray's memory monitor ends what takes too much"
            )
        options, code = split_code(self.ray_options)
        connect(self.address, num_ranks=workers.num_ranks, code=code)
        from orchdata.engines.on_ray.engine import ActorEngine

        return ActorEngine(spec, workers, options=options, start_timeout=float(self.start_timeout))
