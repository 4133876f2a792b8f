"""The Ray cluster that this process uses: the one it is in already, one at an address, or a local one."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from orchdata.loaders.errors import PackageError, one_line
from orchdata.notices import warn_once

_ADDRESS: Final = "RAY_ADDRESS"
_CLIENT: Final = "ray://"
_JOIN: Final = "`ray start --address=HOST:PORT --num-cpus=0`"
_START: Final = "`ray start --head`"
_NO_CLUSTER: Final = "Could not find any running Ray instance"
_ANSWER_SECONDS: Final = 10.0
_CODE: Final = ("working_dir", "py_modules")


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
    try:
        _check_answers(address)
    except OSError as error:
        raise RuntimeError(
            f"no Ray cluster answers at {address}: {one_line(error)}. Start one with {_START}, and let this machine "
            f"join it with {_JOIN}"
        ) from error
    try:
        ray.init(address=address or "auto", runtime_env=dict(code or {}))
    except ConnectionError as error:
        if address is None and _NO_CLUSTER in str(error):
            _start_local(num_ranks, error, code or {})
            return
        raise RuntimeError(_not_connected(address, error)) from error
    except Exception as error:
        hint = (
            "use one version of each on all machines"
            if "ersion" in str(error)
            else "`ray status` on this machine shows whether the cluster takes it"
        )
        raise RuntimeError(
            f"Ray cannot connect to {address or 'the cluster of this machine'}: {error}. {hint}"
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


def _not_connected(address: str | None, error: ConnectionError) -> str:
    cause = "" if error.__cause__ is None else f" ({one_line(error.__cause__)})"
    start = f"Start a cluster with {_START}, and let this machine join it with {_JOIN}"
    if _NO_CLUSTER not in str(error):
        start = (
            f"Either this machine has not joined the cluster: run {_JOIN}; or the cluster refuses the token of this "
            "process: RAY_AUTH_MODE, and RAY_AUTH_TOKEN or the file ~/.ray/auth_token, must be those of `ray start`. "
            "`ray status` says which"
        )
    return f"Ray cannot connect to {address or 'the cluster of this machine'}: {one_line(error)}{cause}. {start}"


def _check_answers(address: str | None) -> None:
    """Raise OSError if nothing listens at an address with a port, for which Ray would wait for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()


def outside_of_groups() -> Any:
    """Return the strategy of actors outside of a placement group: one that captures children, as that of a Ray Tune
    trial, has no room for them.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(placement_group=None)  # type: ignore[arg-type]


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
