"""What the process imports that workers are forked off: a worker then starts in milliseconds.

That takes seconds, in which it does not listen for the end of its trainer: it has the kernel tell it first.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

from orchdata.engines.processes.life import end_server_with_trainer

end_server_with_trainer()
for name in ("orchdata.building.spec", "orchdata.engines.processes.worker"):
    import_module(name)
with suppress(Exception):  # a worker tells of it
    import_module("orchdata.native.jit").load_numba()  # once, for all workers
import_module("orchdata.loaders.required").load_built_in()
import_module("orchdata.loaders.first_calls").settle_first_calls()
