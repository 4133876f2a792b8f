"""A worker's spec on its way to other nodes: pickled with what the main program defines, by value.

Modules of the user's are imported on the node. One that is not there is an error that names it and the way out.
"""

from __future__ import annotations

import io
from typing import Any, cast

from orchdata.engines.on_ray.compare import Expected
from orchdata.engines.on_ray.node_files import file_of_array, file_of_index, open_array, open_index
from orchdata.engines.pickling import explain_pickling
from orchdata.engines.work import WorkerSpec
from orchdata.loaders.errors import OrchdataError
from orchdata.loaders.index.index import Index
from orchdata.loaders.storage.mapped_array import MappedArray


def make_parcel(worker: WorkerSpec, expected: Expected) -> bytes:
    """Return a worker's spec, and what the trainer expects of a node, as bytes.

    Raises TypeError that names the member that does not pickle.
    """
    out = io.BytesIO()
    try:
        _pickler(out).dump((worker, expected))
    except Exception as error:
        explain_pickling(worker, error, pickles=_pickles, way_out=_WAY_OUT)
        raise
    return out.getvalue()


def open_parcel(parcel: bytes) -> tuple[WorkerSpec, Expected]:
    """Return the spec that `make_parcel` was given, and what the trainer expects of this node.

    Raises:
        RuntimeError: something cannot be imported on this node.
        StorageError: the index cannot be fetched.
    """
    from ray import cloudpickle

    try:
        return cast("tuple[WorkerSpec, Expected]", cloudpickle.loads(parcel))
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


def _pickler(out: io.BytesIO) -> Any:
    """Return a pickler that sends files of the cache folder by name and digest."""
    import ray
    from ray import cloudpickle as untyped

    cloudpickle: Any = untyped

    node = ray.get_runtime_context().get_node_id()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if type(value) is Index:
                return open_index, (file_of_index(value, node), value.fetch, value.place)
            if type(value) is MappedArray and value.array.size:
                return open_array, (file_of_array(value, node),)
            return super().reducer_override(value)

    return Pickler(out, protocol=5)


def _pickles(value: Any) -> bool:
    try:
        _pickler(io.BytesIO()).dump(value)
    except Exception:  # noqa: BLE001 - pickling a user's object may raise anything
        return False
    return True
