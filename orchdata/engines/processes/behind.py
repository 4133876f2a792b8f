"""What a worker leaves behind each step, for a process that goes on in its place.

Its random states, told as they change, and what its data set holds of its own: both as bytes, which the training
process keeps and does not look into unless a state is asked for.
"""

from __future__ import annotations

import ctypes
import pickle
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

_MT19937_BYTES = 624 * 4 + 4  # its words, and the place among them


def packed(value: Any) -> bytes:
    """Anything of a user's, for this process's own workers or its parent."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpacked(data: bytes) -> Any:
    """What `packed` was given, there."""
    return pickle.loads(data)  # noqa: S301 - of this process's own workers, or its parent


class RandomStates:
    """Those of Python, numpy and torch, in the process where it is made."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}

    def begin(self, drawn: Mapping[str, bytes]) -> None:
        """Go on where another process was, as its calls of `changed` told, and from here on tell what changes."""
        states = {name: unpacked(state) for name, state in drawn.items()}
        if "python" in states:
            random.setstate(states["python"])
        if "numpy" in states:
            kind, keys, *place, _ = states["numpy"]
            np.random.set_state((kind, np.frombuffer(keys, np.uint32), *place))  # noqa: NPY002
        if "torch" in states:
            torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
        self._last = _states({})

    def changed(self) -> dict[str, bytes]:
        """name -> state, pickled, of those that were drawn from since the last call."""
        last, self._last = self._last, _states(self._last)
        return {name: packed(state) for name, state in self._last.items() if state != last[name]}


def _states(last: Mapping[str, Any]) -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": _numpy(last), "torch": torch.get_rng_state().numpy().tobytes()}


def _numpy(last: Mapping[str, Any]) -> tuple[Any, ...]:
    """numpy's takes long to say: what it said last still holds where its memory is the same."""
    generator = cast("Any", np.random).get_bit_generator()
    memory = b""
    if isinstance(generator, np.random.MT19937):
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        # A normal number that was drawn along with another, and waits, lies elsewhere.
        if "numpy" in last and last["numpy"][-1] == memory and not last["numpy"][3]:
            return cast("tuple[Any, ...]", last["numpy"])
    kind, keys, *place = cast("tuple[Any, ...]", np.random.get_state())  # noqa: NPY002
    return (kind, keys.tobytes(), *place, memory)
