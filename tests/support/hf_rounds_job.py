"""Run by test_families: od.hf.rounds of a wrapped model on some ranks; how far gradients are from od.hf.encode."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from hf_families.families import FAMILIES
from hf_families.reference import Mode, distance, float64, in_float64, make_loader, trained
from rank_jobs import FSDP2_RUNS, run_rank
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import orchdata as od


def main(name: str, *shards: str) -> dict[str, float]:
    family, found = FAMILIES[name], {}
    processor, model = family.build()
    mode = Mode(per_phase=True, microbatches=True)
    expected = trained(model, make_loader(family, model, processor, shards, mode))[1]
    for wrapper in ("ddp", "fsdp2") if FSDP2_RUNS else ("ddp",):
        own: Any = family.build()[1]
        own.load_state_dict(model.state_dict())
        wrapped = DistributedDataParallel(own) if wrapper == "ddp" else fully_shard(own)
        no_sync = wrapped.no_sync if wrapper == "ddp" else nullcontext
        loader = make_loader(family, model, processor, shards, Mode(per_phase=True, microbatches=True, rounds=2))
        (step,) = loader.steps()
        assert step[0].plan.round_of(len(step) - 1) > 0
        with float64():
            batches = [in_float64(batch) for batch in step]
            for batch, features in od.hf.rounds(wrapped, batches, recompute=wrapper == "fsdp2"):
                with nullcontext() if batch.is_last_microbatch else no_sync():
                    outputs = wrapped(**batch.model_inputs(), mm_encoder_outputs=features)
                    od.hf.loss(outputs, batch).backward()
        gradients = {name: each.grad for name, each in own.named_parameters()}
        whole = {name: each.full_tensor() if wrapper == "fsdp2" else each for name, each in gradients.items()}
        found[wrapper] = distance(whole, expected)
    return found


if __name__ == "__main__":
    run_rank(main)
