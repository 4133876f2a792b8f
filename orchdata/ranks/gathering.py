"""Gathering: a JSON-safe value of every rank -> all values on every rank. Nothing that a rank sends is executed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchdata.ranks.parallel import served_devices
from orchdata.ranks.wire import WireError


def gather(value: Any, groups: Sequence[Any]) -> dict[int, Any]:
    """Return the `value` of every rank that `groups` reach, by global rank: tuples become lists, keys of mappings str.
    A collective over each group in turn. Raises WireError, with the rank, if a message is not JSON.
    """
    entries = [[dist.get_rank() if groups else 0, value]]
    for group in groups:
        entries = [entry for part in gather_json(entries, group) for entry in part]
    return dict(sorted((int(rank), each) for rank, each in entries))


def gather_json(value: Any, group: Any) -> list[Any]:
    """Return the `value` of every rank of one group, in the group's order."""
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    counts = [int(count) for count in _gather(torch.tensor([len(own)]), group)]
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: len(own)] = own
    texts = [part[:count].numpy().tobytes() for part, count in zip(_gather(padded, group), counts, strict=True)]
    return [_read(text, rank) for rank, text in enumerate(texts)]


def small_device(group: Any) -> torch.device:
    """Return the device for small tensors of the group's collectives: the CPU if the backend serves it."""
    served = served_devices(group)
    return torch.device("cpu" if "cpu" in served else served[0])


def _gather(tensor: Tensor, group: Any) -> list[Tensor]:
    """Return the tensors of all ranks, which have the same shape, on the CPU."""
    there = tensor.to(small_device(group))
    gathered = [torch.empty_like(there) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, there, group=group)
    return [part.cpu() for part in gathered]


def _read(text: bytes, rank: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"rank {rank} of the group sent a message that is not JSON: {text[:80]!r} ({error})") from error
