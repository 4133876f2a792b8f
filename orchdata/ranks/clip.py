"""Clipping of gradients that live on several meshes, as those of encoders and LLM that are wrapped by themselves."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip gradients in place by their norm over all parameters, as `torch.nn.utils.clip_grad_norm_` does on one mesh.

    For parameters of several meshes, and plain ones among them, for which torch's raises an error. Every rank that has
    a part of a parameter calls it. A plain gradient counts as whole, and the same on every rank, as under
    DistributedDataParallel. As torch's, the infinity norm raises RuntimeError on a rank whose shard has no element.

    Returns:
        The norm before clipping, a plain tensor (), the same on every rank.
    """
    of_meshes: dict[object, list[Tensor]] = {}
    for each in [parameters] if isinstance(parameters, Tensor) else parameters:
        if each.grad is not None:
            of_meshes.setdefault(getattr(each.grad, "device_mesh", None), []).append(each)

    norms = [
        get_total_norm([each.grad for each in own if each.grad is not None], norm_type) for own in of_meshes.values()
    ]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = get_total_norm(whole, norm_type or 1.0)  # numbers of elements add up
    for own in of_meshes.values():
        clip_grads_with_norm_(own, max_norm, total)
    return total
