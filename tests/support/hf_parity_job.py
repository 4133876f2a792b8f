"""Run by test_families: one family in every way on some ranks; how far each is from Hugging Face's own."""

from __future__ import annotations

import torch.distributed as dist
from hf_families.families import FAMILIES
from hf_families.reference import errors, make_loader, modes_of, reference, trained
from hf_families.samples import made_up
from rank_jobs import run_rank


def main(name: str, seed: str, count: str, *shards: str) -> dict[str, tuple[float, float]]:
    family = FAMILIES[name]
    processor, model = family.build()
    expected = reference(family, model, processor, made_up(family, int(count), int(seed)))
    return {
        str(mode): errors(trained(model, make_loader(family, model, processor, shards, mode)), expected)
        for mode in modes_of(family, dist.get_world_size())
    }


if __name__ == "__main__":
    run_rank(main)
