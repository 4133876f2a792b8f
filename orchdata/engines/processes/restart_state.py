"""What a worker reports after each step, so that another process can replace it.

Its random states that changed, and its data set's own state. The training process keeps both as bytes, and unpickles
them only if the loader's state is requested.
"""

from __future__ import annotations

import ctypes
import pickle
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

_MT19937_BYTES = 624 * 4 + 4  # its words, and the position among them


def packed(value: Any) -> bytes:
    """Pickle a user's value for this process's own workers or its parent."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpacked(data: bytes) -> Any:
    """Return the value that `packed` was given."""
    return pickle.loads(data)  # noqa: S301 - of this process's own workers, or its parent


class RandomStates:
    """The random states of Python, numpy and torch in this process."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}

    def begin(self, saved: Mapping[str, bytes]) -> None:
        """Restore the states that `changed` or `all` returned in any process, then start to track changes."""
        states = {name: unpacked(state) for name, state in saved.items()}
        if "python" in states:
            random.setstate(states["python"])
        if "numpy" in states:
            kind, keys, *rest, _ = states["numpy"]
            np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002
        if "torch" in states:
            torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
        self._last = _states({})

    def all(self) -> dict[str, bytes]:
        """Return the pickled states, by name, as they were at the last call of `begin` or `changed`."""
        return {name: packed(state) for name, state in self._last.items()}

    def changed(self) -> dict[str, bytes]:
        """Return the pickled states, by name, that changed since the last call."""
        last, self._last = self._last, _states(self._last)
        return {name: packed(state) for name, state in self._last.items() if state != last[name]}


def _states(last: Mapping[str, Any]) -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": _numpy(last), "torch": torch.get_rng_state().numpy().tobytes()}


def _numpy(last: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return numpy's state. Computing it is slow: the last one is reused if the generator's memory is unchanged."""
    generator = cast("Any", np.random).get_bit_generator()
    memory = b""
    if isinstance(generator, np.random.MT19937):
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        # numpy draws normal numbers in pairs, and stores the second one elsewhere.
        if "numpy" in last and last["numpy"][-1] == memory and not last["numpy"][3]:
            return cast("tuple[Any, ...]", last["numpy"])
    kind, keys, *rest = cast("tuple[Any, ...]", np.random.get_state())  # noqa: NPY002
    return (kind, keys.tobytes(), *rest, memory)
