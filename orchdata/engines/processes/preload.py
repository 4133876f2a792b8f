"""Imports for the process that workers are forked from: a worker then starts in milliseconds.

They take seconds, in which the process does not watch its trainer: so it first has the kernel end it with the trainer.
A terminal sends Ctrl-C to this process too. It is for the training process, which waits for the imports and then ends.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from importlib import import_module

from orchdata.engines.processes.life import end_server_with_trainer

end_server_with_trainer()
handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
for name in ("orchdata.building.spec", "orchdata.engines.processes.worker"):
    import_module(name)
with suppress(Exception):  # a worker reports it
    import_module("orchdata.native.jit").load_numba()  # once, for all workers
import_module("orchdata.loaders.required").load_built_in()
import_module("orchdata.loaders.first_calls").settle_first_calls()
signal.signal(signal.SIGINT, handler)
