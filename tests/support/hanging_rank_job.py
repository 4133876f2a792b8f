"""Run by test_hanging under torchrun: the loader of one rank hangs, and the others wait for it in a collective."""

from __future__ import annotations

import sys
import threading

import torch
import torch.distributed as dist
from map_dataset import Numbers

import orchdata as od


class Hanging(Numbers):
    def __getitem__(self, number: int) -> dict[str, int]:
        if number >= 8 and dist.get_rank() == int(sys.argv[1]):
            threading.Event().wait()
        return super().__getitem__(number)


def main() -> None:
    dist.init_process_group("gloo")
    loader = od.DataLoader(Hanging(16), 2, num_threads=1, timeout=1, dp=dist.group.WORLD, cost=[1] * 16)
    try:
        for batch in loader:
            dist.all_reduce(batch["length"])
    finally:
        if sys.argv[2] == "tidy":
            dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
