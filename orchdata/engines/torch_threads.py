"""torch in decoding threads: one CPU thread each, or torch's thread pools compete for the cores.

With torch's default of one pool thread per core, operations of 1 ms were measured to take 40 ms on busy cores.
"""

from __future__ import annotations

import threading


def use_one_thread() -> None:
    """Let torch's operations in this thread use this thread alone. Other threads, and later ones, keep their setting.

    A decoding thread calls it first; a training thread must not.
    """
    import torch

    with _lock:
        others = torch.get_num_threads()
        torch.set_num_threads(1)
        if others > 1:
            # The call sets this thread, and the default of later threads: another thread restores the default.
            restore = threading.Thread(target=torch.set_num_threads, args=(others,))
            restore.start()
            restore.join()


_lock = threading.Lock()
