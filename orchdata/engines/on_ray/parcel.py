"""A worker's spec on its way to other nodes: pickled with what the main program defines, by value.

Modules of the user's are imported on the node. One that is not there is an error that names it and the way out.
"""

from __future__ import annotations

from typing import Any, cast

from orchdata.engines.pickling import explain_pickling
from orchdata.engines.work import WorkerSpec
from orchdata.loaders.errors import OrchdataError


def make_parcel(worker: WorkerSpec) -> bytes:
    """Return a worker's spec as bytes. Raises TypeError that names the member that does not pickle."""
    from ray import cloudpickle

    try:
        return cast("bytes", cloudpickle.dumps(worker))
    except Exception as error:
        explain_pickling(worker, error, pickles=_pickles, way_out=_WAY_OUT)
        raise


def open_parcel(parcel: bytes) -> WorkerSpec:
    """Return the spec that `make_parcel` was given. Raises RuntimeError for what cannot be imported on this node."""
    from ray import cloudpickle

    try:
        return cast("WorkerSpec", cloudpickle.loads(parcel))
    except OrchdataError:
        raise
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"this node cannot import the module {error.name!r}, which the loader's arguments use: send the folder "
            "that has it with od.RayEngine(runtime_env={'working_dir': '.'}), or install it on every node"
        ) from error
    except Exception as error:
        raise RuntimeError(
            f"this node cannot unpickle the data set, or another argument of the loader ({type(error).__name__}: "
            f"{error}): all nodes need the same code. od.RayEngine(runtime_env={{'working_dir': '.'}}) sends a folder"
        ) from error


_WAY_OUT = (
    "Define it at the top level of a module, with functools.partial for its arguments; or build in this process, "
    "inline or with threads, where nothing is pickled"
)


def _pickles(value: Any) -> bool:
    from ray import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - pickling a user's object may raise anything
        return False
    return True
