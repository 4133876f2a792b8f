"""Balance what a webdataset pipeline has loaded: its samples move between ranks, ahead of the training step.

orchdata synth omni omni
torchrun --nproc-per-node 2 examples/webdataset_pipeline.py 'omni/*.tar'

The pipeline stays as it is. For shards that orchdata reads itself see ddp.py: then nothing moves between ranks, and the
position of a run is a state.
"""

from __future__ import annotations

import argparse
import glob
import json
from typing import Any

import torch
import torch.distributed as dist
import webdataset as wds

import common
import orchdata as od

VOCABULARY = 256


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+")
    parser.add_argument("--batch-size", type=int, default=4, help="samples of a rank and step, before they move")
    args = parser.parse_args(arguments)
    with common.world():
        train(args)


def tokenize(sample: dict[str, Any]) -> dict[str, Any]:
    """The fields of a sample -> the bytes of its text as tokens."""
    text = sample.get("txt") or json.dumps(sample.get("json", ""))
    return {"key": sample["__key__"], "tokens": torch.tensor(list(text.encode()), dtype=torch.int64)}


def pipeline(args: argparse.Namespace) -> wds.WebLoader:
    """A loader of lists of samples: each rank reads its own shards, once."""
    urls = sorted(url for pattern in args.shards for url in glob.glob(pattern))
    shards = wds.WebDataset(urls, shardshuffle=False, nodesplitter=wds.split_by_node).decode().map(tokenize)
    return wds.WebLoader(shards.batched(args.batch_size, collation_fn=list), batch_size=None)


def num_tokens(sample: dict[str, Any]) -> int:
    return len(sample["tokens"])


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 32), torch.nn.Linear(32, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = od.post_balance(pipeline(args), cost=num_tokens, loss_tokens=lambda sample: num_tokens(sample) - 1)
    for moved in loader:
        loss = torch.zeros(()) * sum(parameter.sum() for parameter in model.parameters())
        for sample in moved.samples:
            tokens = sample["tokens"]
            loss = loss + torch.nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:], reduction="sum")
        (loss * moved.loss_scale).backward()
        for parameter in model.parameters():
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        keys = sorted(sample["key"] for sample in moved.samples)
        print(json.dumps({"step": moved.step, "keys": keys, "tokens": sum(map(num_tokens, moved.samples))}), flush=True)
    loader.close()


if __name__ == "__main__":
    main()
