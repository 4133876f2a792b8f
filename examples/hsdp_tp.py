"""Train a small multimodal LLM on shards on a mesh: replicas of sharded weights (HSDP), and tensor parallelism in each.

orchdata synth datasets/omni.yaml omni
orchdata index 'omni/*.tar' --recipe examples.common:RECIPE
torchrun --nproc-per-node 8 -m examples.hsdp_tp 'omni/*.tar' --replicate 2 --tp 2 --checkpoints runs/hsdp

Ranks that differ only in tp get the same batches: one of them reads and sends them to the others.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from examples import common
from examples.fsdp2 import shard, train
from orchdata.reference.model import MultimodalLM


def main(arguments: list[str] | None = None) -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--replicate", type=int, default=1, help="replicas of the weights")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share each matrix")
    args = parser.parse_args(arguments)
    with common.world():
        sizes = (args.replicate, dist.get_world_size() // (args.replicate * args.tp), args.tp)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        model = split(common.make_model(), mesh["tp"])
        train(args, shard(model, mesh["dp_replicate", "dp_shard"]), common.make_loader(args, dp=mesh))


def split(model: MultimodalLM, mesh: DeviceMesh) -> MultimodalLM:
    """The feed-forward layers of the LLM, each in as many parts as the mesh has ranks."""
    for block in model.llm.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


if __name__ == "__main__":
    main()
