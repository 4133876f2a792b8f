"""`torchtune_loader.py`: torchtune's recipe for finetuning on one device, its loader and loop without its model.

`_setup_data` and the collate function are taken from torchtune's source next to this file; the loop is the recipe's:
`set_epoch`, an iteration an epoch, a state in the middle of one, and from it a second loader that goes on.
"""

from __future__ import annotations

import ast
import textwrap
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

HERE = Path(__file__).parent


def function_of(path: Path, name: str, **names: Any) -> Any:
    """A function of a source file, on its own, with what it needs from its module."""
    source = path.read_text(encoding="utf-8")
    found = next(node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") == name)
    text = "from __future__ import annotations\n" + textwrap.dedent(
        "\n".join(source.splitlines()[found.lineno - 1 : found.end_lineno])
    )
    exec(compile(text, str(path), "exec"), names)  # noqa: S102 - that is what is asked for
    return names[name]


def texts() -> list[dict[str, list[int]]]:
    """50 made-up samples of 4 to 19 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 20, (50,), generator=generator).tolist()
    ids = [torch.randint(1, 100, (length,), generator=generator).tolist() for length in lengths]
    return [{"tokens": row, "labels": row} for row in ids]


if __name__ == "__main__":
    collate = function_of(
        HERE / "torchtune/data/_collate.py",
        "padded_collate_sft",
        torch=torch,
        pad_sequence=pad_sequence,
        F=torch.nn.functional,
        CROSS_ENTROPY_IGNORE_IDX=-100,
    )
    setup = function_of(
        HERE / "recipes/full_finetune_single_device.py",
        "_setup_data",
        ListConfig=list,
        config=SimpleNamespace(instantiate=lambda cfg, tokenizer: texts()),
        _get_component_from_path=lambda path: collate,
        StatefulDistributedSampler=StatefulDistributedSampler,
        StatefulDataLoader=StatefulDataLoader,
        partial=partial,
        padded_collate_packed=None,
    )
    recipe = SimpleNamespace(_tokenizer=SimpleNamespace(pad_id=0), _loss_fn=SimpleNamespace(ignore_index=-100))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 100))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = setup(recipe, {}, shuffle=True, batch_size=4, collate_fn="padded_collate_sft")
    state = None
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(iter(loader)):
            loss = torch.nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (epoch, number + 1) == (1, len(loader) // 2):
                state = loader.state_dict()
                break
        if state is not None:
            break
    resumed = setup(recipe, {}, True, 4, "padded_collate_sft", dataloader_state_dict=state)
    resumed.sampler.set_epoch(1)
    for batch in resumed:
        loss = torch.nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
