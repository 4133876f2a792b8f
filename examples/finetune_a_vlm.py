"""Fine-tune a vision-language model of transformers on chats with pictures: one process, or many under torchrun.

torchrun --nproc-per-node 2 examples/finetune_a_vlm.py train.jsonl --media-root images --held-out held_out.jsonl \\
    --checkpoints runs/vlm --ask images/0.jpg 'What is this?'

It continues from its last checkpoint, on any number of ranks. docs/finetune_a_vlm.md explains it part by part.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForImageTextToText, AutoProcessor

import common
import orchdata as od


def main(arguments: list[str] | None = None) -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--model", default="Qwen/Qwen2.5-VL-3B-Instruct", help="a name on the hub, or a folder")
    parser.add_argument("--media-root", help="the folder of the pictures that records name")
    parser.add_argument("--held-out", help="records for the evaluation")
    parser.add_argument("--ask", nargs=2, metavar=("PICTURE", "QUESTION"), help="a question after the training")
    args = parser.parse_args(arguments)
    with common.world():
        train(args)


def train(args: argparse.Namespace) -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

    # The model.
    processor = AutoProcessor.from_pretrained(args.model)
    model = AutoModelForImageTextToText.from_pretrained(args.model).to(device)
    model.train()
    net = DistributedDataParallel(model) if dist.is_initialized() else model  # saved without DDP's prefix
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    # The data.
    how = {"recipe": od.hf.recipe(processor), "media_root": args.media_root}
    inputs = od.hf.Inputs(model.config)  # batches with the model's own argument names
    loader = od.DataLoader(
        od.ShardDataset(args.shards, **how),
        global_batch_size=args.global_batch_size,
        shuffle=True,
        drop_last=True,
        cost=od.hf.cost(model),
        balance=od.Balance(max_tokens=args.max_tokens, oversize="own"),
        collate_fn=inputs,
    )
    held_out = od.DataLoader(od.ShardDataset(args.held_out, **how), batch_size=4, collate_fn=inputs)

    # Where the run stands.
    done, checkpoint = common.last_checkpoint(args)
    if checkpoint:
        state = torch.load(checkpoint / "state.pt", weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])

    # The loop.
    for step, microbatches in common.steps_to_go(args, loader.steps(), done):
        loss = torch.zeros((), device=device)
        for batch in microbatches:
            batch = batch.to(device)
            synchronised = batch.is_last_microbatch or net is model
            with contextlib.nullcontext() if synchronised else net.no_sync():
                scaled = od.hf.loss(net(**batch.model_inputs()), batch)
                scaled.backward()
            loss += scaled.detach()
        optimizer.step()
        optimizer.zero_grad()
        common.tell(args, step, loss, microbatches)
        if common.is_due(args, step):
            mean = evaluate(model, held_out)
            with common.new_checkpoint(args, step) as folder:
                if is_first_rank():  # states are the same on all ranks
                    print(f"held out after step {step}: loss {mean:.4f}", flush=True)
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state | {"loader": loader.state_dict()}, folder / "state.pt")

    if args.ask and is_first_rank():
        print("answer:", answer(model, processor, *args.ask), flush=True)


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


@torch.no_grad()
def evaluate(model: Any, loader: od.DataLoader) -> float:
    """The mean loss over all tokens that are learned, of all ranks."""
    device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    loader.set_epoch(0)  # from the first sample, if no state is loaded
    for batch in loader:
        batch = batch.to(device)
        sums[0] += od.hf.loss(model(**batch.model_inputs()), batch) / batch.loss_scale
        sums[1] += batch.loss_tokens
    model.train()
    if dist.is_initialized():
        dist.all_reduce(sums)
    return (sums[0] / sums[1].clamp(min=1)).item()


def answer(model: Any, processor: Any, picture: str, question: str) -> str:
    """What the model writes: transformers' own calls, as training used its own template."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    turns = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    model.eval()
    with Image.open(picture) as image:
        asked = processor(text=[text], images=[image.convert("RGB")], return_tensors="pt").to(model.device)
    written = model.generate(**asked, max_new_tokens=64, do_sample=False)
    return str(processor.tokenizer.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
