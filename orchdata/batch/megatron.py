"""A packed batch in Megatron-LM's terms: sequences one after another, with their lengths and padded lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from orchdata.batch.batch import Batch
from orchdata.batch.tensors import IGNORE


def megatron_packed(batch: Batch, *, cp_group: Callable[[int], Any] | None = None) -> dict[str, Any]:
    """Return what Megatron-LM's sequence packing reads of a microbatch, for its data iterator or your `forward_step`.

    Sequences are the samples, then the sequence of dummies, then the padding of `od.Packed(length=...)` with 0 tokens.
    Those that a team shares are whole: your `forward_step` cuts each, and counts the labels that are left.

    Args:
        cp_group: of loaders with `Balance(teams=...)`: the size of a team -> the process group of this rank's team.

    Returns:
        tokens, labels: int64 (T,). Labels are those of the next token, 0 where `loss_mask` is 0.
        loss_mask: float32 (T,), 1 for each label with loss, or the `loss_weight` of its source.
        position_ids: int64 (T,), restarting in each sequence; (3, T) under "mrope".
        padding_mask: bool (T,), True on the padding after each sequence.
        cu_seqlens, cu_seqlens_padded: int32 (num_sequences + 1,), over tokens without that padding, and with it.
        max_seqlen: of the padded sequences.
        packed_seq_params: the arguments of `megatron.core.packed_seq_params.PackedSeqParams`: qkv_format,
            cu_seqlens_q and cu_seqlens_kv, both also padded, max_seqlen_q and max_seqlen_kv; with `cp_group` also
            local_cp_size, the size of the team, and cp_group; 1 and None where nothing is shared.

    `batch.loss_scale` and `batch.global_loss_tokens` apply to the sum of losses times `loss_mask`.

    Raises:
        ValueError: a padded batch; slices of `Teams(cut="loader")`; a team without `cp_group`, next to another size or
            to whole samples, or with a sequence that cannot be cut into two equal pieces for each member.
    """
    llm = batch.llm
    if llm.attention_mask is not None:
        raise ValueError("od.megatron_packed takes packed batches: collate_fn=od.Packed(...), not od.Padded")
    if batch.has_slices:
        raise ValueError(
            "this loader cuts sequences that ranks share, and Megatron-LM would cut its slices again: give "
            'od.Teams(cut="trainer", ...)'
        )
    parallel = _of_team(batch, cp_group)
    following = llm.next_labels
    has_loss = following != IGNORE
    weights = batch.loss_weights
    mask = has_loss.float()
    if weights is not None:
        mask[:-1] *= weights[1:]
    padded = llm.cu_seqlens
    own = torch.cat([padded[:1], llm.lengths.cumsum(0, dtype=torch.int32)])
    tokens = torch.arange(len(llm.input_ids), device=padded.device)
    sequence = torch.searchsorted(padded[1:].long(), tokens, right=True)
    bounds = {
        f"{kind}_{side}{end}": value
        for side in ("q", "kv")
        for kind, end, value in (
            ("cu_seqlens", "", own),
            ("cu_seqlens", "_padded", padded),
            ("max_seqlen", "", llm.max_seqlen),
        )
    }
    return {
        "tokens": llm.input_ids,
        "labels": following.masked_fill(~has_loss, 0),
        "loss_mask": mask,
        "position_ids": llm.position_ids,
        "padding_mask": tokens >= (padded[:-1] + llm.lengths)[sequence],
        "cu_seqlens": own,
        "cu_seqlens_padded": padded,
        "max_seqlen": llm.max_seqlen,
        "packed_seq_params": {"qkv_format": "thd", **bounds, **parallel},
    }


def _of_team(batch: Batch, cp_group: Callable[[int], Any] | None) -> dict[str, Any]:
    """Return the arguments of `PackedSeqParams` that say who shares the sequences of a microbatch."""
    if not batch.teams:
        return {} if cp_group is None else {"local_cp_size": 1, "cp_group": None}
    sizes = [team.size for team in batch.teams]
    if batch.teams[-1].samples.stop < len(batch.sample_ids):
        sizes.append(1)
    if len(sizes) > 1 or cp_group is None:
        raise ValueError(
            f"ranks share sequences of this microbatch in teams of {sizes}, and Megatron-LM takes one size and its "
            "process group: give od.Teams(mixed=False), and od.megatron_packed(batch, cp_group=function_of_size)"
        )
    if bool((batch.llm.cu_seqlens.diff() % (2 * sizes[0])).any()):
        raise ValueError(
            f"each of {sizes[0]} ranks takes two equal pieces of a sequence: give od.Packed(multiple_of=...) a "
            f"multiple of {2 * sizes[0]}; 2 x Teams.largest serves all sizes"
        )
    return {"local_cp_size": sizes[0], "cp_group": cp_group(sizes[0])}
