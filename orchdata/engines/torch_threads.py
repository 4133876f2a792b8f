"""torch in decoding threads: one CPU thread each, or its thread pools fight over the cores.

With torch's default of a pool thread a core, on busy cores, operations of 1 ms were measured to take 40.
"""

from __future__ import annotations

import threading


def use_one_thread() -> None:
    """Let torch's operations in this thread run in it alone. Other threads, and threads to come, keep their setting.

    Meant as the first thing a decoding thread does; not for a thread that trains.
    """
    import torch

    with _lock:
        others = torch.get_num_threads()
        torch.set_num_threads(1)
        if others > 1:
            # It is this thread's setting, and the default of threads to come: another thread puts that back.
            restore = threading.Thread(target=torch.set_num_threads, args=(others,))
            restore.start()
            restore.join()


_lock = threading.Lock()
