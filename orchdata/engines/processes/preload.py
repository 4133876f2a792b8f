"""Imports for the process that workers are forked from: a worker then starts in milliseconds.

They take seconds, in which the process does not watch its trainer: so it first has the kernel end it with the trainer.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

from orchdata.engines.processes.life import end_server_with_trainer

end_server_with_trainer()
for name in ("orchdata.building.spec", "orchdata.engines.processes.worker"):
    import_module(name)
with suppress(Exception):  # a worker reports it
    import_module("orchdata.native.jit").load_numba()  # once, for all workers
import_module("orchdata.loaders.required").load_built_in()
import_module("orchdata.loaders.first_calls").settle_first_calls()
