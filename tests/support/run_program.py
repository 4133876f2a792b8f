"""Run a program as `python PROGRAM ARGUMENTS` does, and end without destructors once it is done.

Threads that gloo may still hold can abort a process that ends the long way ("terminate called without an active
exception"), after all its work.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
