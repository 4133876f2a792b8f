"""Imports for the process that workers are forked from: a worker then starts in milliseconds."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

for name in ("orchdata.building.step", "orchdata.engines.processes.worker"):
    import_module(name)
with suppress(Exception):  # a worker reports it
    import_module("orchdata.native.jit").load_numba()  # once, for all workers
import_module("orchdata.loaders.first_calls").settle_first_calls()
