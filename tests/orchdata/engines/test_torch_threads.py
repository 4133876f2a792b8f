"""A decoding thread's torch setting does not change other threads."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import threading, torch
from orchdata.engines.threads import use_one_thread

torch.set_num_threads(3)
seen = {}
def decode():
    use_one_thread()
    torch.ones(300, 300) @ torch.ones(300, 300)
    seen["decoding"] = torch.get_num_threads()
def later():
    torch.ones(300, 300) @ torch.ones(300, 300)
    seen["later"] = torch.get_num_threads()
for target in (decode, later):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
print(seen["decoding"], seen["later"], torch.get_num_threads())
"""


def test_other_threads_keep_their_setting():
    output = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["1", "3", "3"]
