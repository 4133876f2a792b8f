"""RayEngine: builds steps in actors of a Ray cluster, the one that this process is in already, one at an address, or a
local one. Ray is imported when an engine is opened, and not before.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from orchdata.building.step import BuildSpec
from orchdata.engines.engine import Workers
from orchdata.engines.supervisor import WorkerEngine
from orchdata.loaders.errors import PackageError, one_line
from orchdata.notices import warn_once

_ADDRESS: Final = "RAY_ADDRESS"
_CLIENT: Final = "ray://"
_JOIN: Final = "`ray start --address=HOST:PORT --num-cpus=0`"
_START: Final = "`ray start --head`"
_NO_CLUSTER: Final = "Could not find any running Ray instance"
_ANSWER_SECONDS: Final = 10.0
_CODE: Final = ("working_dir", "py_modules")
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
    engines, to the bit. An actor that is lost is replaced, and its steps are built again. Machines that train must be
    part of the cluster: docs/workers.md.

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
        from orchdata.engines.on_ray.actors import open_engine

        return open_engine(spec, workers, options, float(self.start_timeout))


def import_ray() -> Any:
    """Import Ray. Raises PackageError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise PackageError("ray", one_line(error), "pip install 'orchdata[ray]'", "od.RayEngine") from error
    return ray


def check_address(address: str | None, named: str = "address") -> None:
    """Raise ValueError for the address of a Ray Client, and TypeError for what is no address."""
    if address is None:
        return
    if not isinstance(address, str):
        raise TypeError(f"{named} is a string, such as '10.0.0.1:6379', or None, got {address!r}")
    if address.startswith(_CLIENT):
        raise ValueError(_no_client(f"{named}={address!r}"))


def _no_client(what: str) -> str:
    return (
        f"{what} is that of a Ray Client, through which every batch would travel twice: let this machine join the "
        f"cluster with {_JOIN}, and leave the address out"
    )


def connect(address: str | None, *, num_ranks: int, code: Mapping[str, Any] | None = None) -> None:
    """Have this process use a cluster; a Ray that is initialized is used as it is.

    Args:
        address: None for RAY_ADDRESS, else the cluster of this machine, else a local Ray that is started.
        num_ranks: of the loader. Several would each start a Ray of their own, so they raise an error.
        code: folders that the nodes get, as a `runtime_env` has them.

    Raises:
        ValueError: the address, or RAY_ADDRESS, is that of a Ray Client; the address is not that of the Ray that is
            initialized; or that has not the folders.
        RuntimeError: there is no cluster, it has another version of Ray or Python, or it refuses this process.
    """
    ray = import_ray()
    if ray.is_initialized():
        from ray.util.client import ray as client

        if client.is_connected():
            raise ValueError(_no_client("the address of the Ray that this process uses"))
        _check_running(address)
        _check_code(code or {})
        return
    if address is None:
        address = os.environ.get(_ADDRESS) or None
        check_address(address, _ADDRESS)
    host, _, port = (address or "").rpartition(":")
    try:
        if host and port.isdigit():  # for an address at which nothing listens, Ray would wait for minutes
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
        ray.init(address=address or "auto", runtime_env=dict(code or {}))
    except Exception as error:
        if address is None and _NO_CLUSTER in str(error):
            _start_local(num_ranks, error, code or {})
            return
        raise RuntimeError(
            f"Ray cannot connect to {address or 'the cluster of this machine'}: {one_line(error)}. Start a cluster "
            f"with {_START}, let this machine join it with {_JOIN}, and use one version of Ray and Python on all "
            "machines. If it asks for a token, RAY_AUTH_MODE and RAY_AUTH_TOKEN must be those of `ray start`"
        ) from error


def _check_running(address: str | None) -> None:
    """Raise ValueError if an address is not that of the Ray that this process uses."""
    ray = import_ray()
    running = ray.get_runtime_context().gcs_address
    if address in (None, "auto", "local", running):
        return
    host, _, port = address.rpartition(":")
    with suppress(OSError):  # of an address that is no name of a host
        host = socket.gethostbyname(host)
    host = ray.util.get_node_ip_address() if host.startswith("127.") else host
    if f"{host}:{port}" != running:
        raise ValueError(
            f"address={address!r}: this process uses the Ray at {running} already. Leave the address out, or call "
            "ray.shutdown() first"
        )


def num_cpus() -> int:
    """Return the number of CPUs of the cluster that this process uses, at least 1."""
    return max(1, int(import_ray().cluster_resources().get("CPU", 1)))


def split_code(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of actors without local folders of code, and these folders: Ray uploads them for a whole job,
    when a process connects, and not for an actor.
    """
    env = options.get("runtime_env")
    if not isinstance(env, Mapping):
        return dict(options), {}
    code = {name: env[name] for name in _CODE if name in env and not _is_uploaded(env[name])}
    rest = {name: value for name, value in env.items() if name not in code}
    return dict(options) | {"runtime_env": rest}, code


def _is_uploaded(folders: Any) -> bool:
    return all("://" in str(each) for each in (folders if isinstance(folders, list | tuple) else [folders]))


def _check_code(code: Mapping[str, Any]) -> None:
    """Raise ValueError if Ray is initialized without the folders that nodes must get."""
    sent = import_ray().get_runtime_context().runtime_env
    missing = [name for name in code if not sent.get(name)]
    if missing:
        raise ValueError(
            f"Ray is initialized already, without runtime_env={{{missing[0]!r}: ...}}, and sends folders only then: "
            f"give it to ray.init(runtime_env={dict(code)!r}), or leave ray.init() to RayEngine"
        )


def _start_local(num_ranks: int, error: Exception, code: Mapping[str, Any]) -> None:
    """Start a Ray of this process alone, with a notice; raises RuntimeError if there are several ranks."""
    if num_ranks > 1:
        raise RuntimeError(
            f"there is no Ray cluster on this machine, and each of the {num_ranks} ranks would start one of its own: "
            f"run {_START} on one machine and {_JOIN} on the others, or set {_ADDRESS}"
        ) from error
    warn_once(
        "a local Ray",
        "there is no Ray cluster on this machine: this process starts a Ray of its own, which has the CPUs of this "
        f"machine and ends with it. Run {_START} to keep one",
    )
    import_ray().init(address="local", include_dashboard=False, runtime_env=dict(code))
