"""Gathering: a JSON-safe value of every rank -> all of them on every rank. Nothing that a rank sends is executed."""

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
    """The `value` of every rank that `groups` reach, by global rank: tuples become lists, keys of mappings text.

    A collective over each group in turn. Raises WireError for what is not JSON, naming the rank.
    """
    held = [[dist.get_rank() if groups else 0, value]]
    for group in groups:
        held = [told for part in gather_json(held, group) for told in part]
    return dict(sorted((int(rank), told) for rank, told in held))


def gather_json(value: Any, group: Any) -> list[Any]:
    """The `value` of every rank of one group, in its order."""
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    counts = [int(count) for count in _gather(torch.tensor([len(own)]), group)]
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: len(own)] = own
    texts = [part[:count].numpy().tobytes() for part, count in zip(_gather(padded, group), counts, strict=True)]
    return [_read(text, place) for place, text in enumerate(texts)]


def small_device(group: Any) -> torch.device:
    """Where the group's backend wants small tensors."""
    served = served_devices(group)
    return torch.device("cpu" if "cpu" in served else served[0])


def _gather(tensor: Tensor, group: Any) -> list[Tensor]:
    """The tensors of one shape of all ranks, on the CPU."""
    there = tensor.to(small_device(group))
    gathered = [torch.empty_like(there) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, there, group=group)
    return [part.cpu() for part in gathered]


def _read(text: bytes, place: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"rank {place} of the group sent what is not JSON: {text[:80]!r} ({error})") from error
