"""What the Python of a page in docs/ finds before its first block: names of the reader's own program, and his data."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from shard_factory import RECIPE, audio, jpeg, omni_samples, write_shard

import orchdata as od


def recipe_of(page: str, *words: str) -> str:
    """The block of Python on a page that has these words."""
    text = (Path(__file__).resolve().parents[2] / "docs" / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if all(word in block for word in words)]
    return found


def _tar(path: str, samples: list[dict[str, Any]] | None = None) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_shard(Path(path), omni_samples(20) if samples is None else samples)


def _parquet(path: str, columns: dict[str, list[Any]]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def nothing() -> dict[str, Any]:
    return {}


def batches() -> dict[str, Any]:
    """A batch of one image, and a model with an encoder that takes merge blocks of four patches."""
    width, size = 8, RECIPE.image.patch_dim
    model = SimpleNamespace(
        embed=torch.nn.Embedding(RECIPE.text.vocab_size, width),
        image=lambda patches, cu_seqlens: torch.nn.Linear(4 * size, width)(patches.reshape(-1, 4 * size)),
    )
    return next(iter(in_folder()["loader"])).model_inputs() | {"self": model}


def attending(input_ids: torch.Tensor, teams: Any, attend: od.TeamAttention, **_: Any) -> torch.Tensor:
    """A model of one head, which is the tokens."""
    head = input_ids.float()[:, None, None]
    return attend(head, head, head, teams)


def choosing_settings() -> dict[str, Any]:
    samples = omni_samples(200)
    samples[17]["__key__"] = "sample-17"
    _tar("data/a.tar", samples)
    return {"loader": od.DataLoader(od.ShardDataset("data/a.tar", RECIPE), batch_size=4)}


def coming_from() -> dict[str, Any]:
    import datasets

    picture = jpeg(40, 40)
    caption = json.dumps({"blip_caption": "a cat"}).encode()
    _tar("cc3m/00000.tar", [{"__key__": "a", "jpg": picture, "json": caption}])
    for number in range(1, 332):
        shutil.copy("cc3m/00000.tar", f"cc3m/{number:05d}.tar")
    Path("out").mkdir()
    ds = datasets.Dataset.from_dict({"text": ["a cat", "a dog"]})
    return {"streaming_dataset": [{"image": picture, "caption": "a cat"}], "ds": ds}


def balancing() -> dict[str, Any]:
    import webdataset

    _tar("texts/a.tar", [{"__key__": f"{n}", "txt": b"word " * (n + 1)} for n in range(16)])
    weight = torch.zeros((), requires_grad=True)
    return {
        "wds": webdataset,
        "urls": "texts/a.tar",
        "tokenize": lambda sample: {"tokens": list(sample[0].encode())},
        "loss_sum": lambda samples: weight * sum(len(sample["tokens"]) for sample in samples),
        "torch": torch,
        "a_dummy": torch.zeros(1, 4),
        "albums": [[{"tokens": [1, 2], "images": [torch.ones(rows, 4) for rows in (3, 5)]}]],
        "encoder": torch.nn.Linear(4, 2),
    }


def containers() -> dict[str, Any]:
    for path in ("books/a.txt", "notes/a.md"):
        Path(path).parent.mkdir()
        Path(path).write_text("a document")
    return {}


def costs() -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    return {"model": AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads))}


def data() -> dict[str, Any]:
    import datasets

    _tar("data/a.tar")
    _parquet("data/a.parquet", {"text": ["a word"] * 4})
    Path("images").mkdir()
    Path("train.jsonl").write_text(json.dumps({"text": "a word"}))
    return {"datasets": datasets, "ds": datasets.Dataset.from_dict({"text": ["a cat", "a dog"]})}


def indexing() -> dict[str, Any]:
    import pandas as pd

    _tar("data/a.tar")
    _parquet("scores.parquet", {"key": ["3", "0"], "score": [4.5, 2.0]})
    _parquet("data/a.parquet", {"text": ["a word"] * 4, "score": [1, 2, 4, 5], "lang": ["en", "fr", "de", "it"]})
    return {"dataset": od.ShardDataset("data/a.tar"), "pd": pd}


def fields() -> dict[str, Any]:
    _tar("data/a.tar", [{"__key__": f"a-key{n}", "txt": b"a word", "cls": b"3"} for n in range(8)])
    return {}


def text() -> dict[str, Any]:
    import tokenizers
    from chat_templates import CHATML, hf_tokenizer

    words = {"a": 0, "<image>": 1, "<audio>": 2, "[UNK]": 3}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]")).save("tokenizer.json")
    hub = SimpleNamespace(from_pretrained=lambda name: hf_tokenizer(CHATML))
    return {"tokenizers": tokenizers, "transformers": SimpleNamespace(AutoTokenizer=hub)}


def layouts() -> dict[str, Any]:
    for folder in ("speech", "clips"):
        Path(folder).mkdir()
        Path(folder, "a.wav").write_bytes(audio(0.3))
    Path("speech/metadata.csv").write_text("file_name,transcription\na.wav,a word\n")
    Path("manifest.jsonl").write_text(json.dumps({"audio_filepath": "a.wav", "text": "a word"}))
    turns = [[{"user": "What is it?", "assistant": "a cat"}]]
    _parquet("finevision/a.parquet", {"images": [[{"bytes": jpeg(40, 40), "path": None}]], "texts": turns})
    return {}


def mixtures() -> dict[str, Any]:
    for name in ("web", "ocr"):
        _tar(f"{name}/a.tar")
    _parquet("speech/a.parquet", {"text": ["a word"] * 4})
    paths = {"web": "web/*.tar", "ocr": "ocr/*.tar", "speech": "speech/*.parquet"}
    sources = {name: od.Source(od.ShardDataset(path, RECIPE)) for name, path in paths.items()}
    weighted = od.Mixture({name: od.Source(source.dataset, weight=1) for name, source in sources.items()})
    losses = od.Mixture({"web": od.Source(sources["web"].dataset, weight=1, loss_weight=2)})
    batch = next(iter(od.DataLoader(losses, batch_size=8)))
    # The state of a run like the page's, with other weights.
    endless = od.Mixture(weighted.sources, by="tokens", stop="repeat", epoch_tokens=50_000_000_000)
    state = od.DataLoader(endless, global_batch_tokens=4_194_304, shuffle=True, seed=0).state_dict()
    logits = torch.zeros(len(batch.llm.input_ids), RECIPE.text.vocab_size)
    return {"recipe": RECIPE, "sources": sources, "state": state, "batch": batch, "logits": logits, "F": F}


def in_folder() -> dict[str, Any]:
    """A data set and a loader of it, as most programs have them."""
    _tar("data/a.tar")
    dataset = od.ShardDataset("data/a.tar", RECIPE)
    return {"dataset": dataset, "recipe": RECIPE, "loader": od.DataLoader(dataset, batch_size=4)}


def order() -> dict[str, Any]:
    return in_folder() | {"num_epochs": 2}


def training() -> dict[str, Any]:
    return in_folder() | {"cost": od.CostModel(llm=od.PhaseCost(linear=1))}


def stats() -> dict[str, Any]:
    """A loader that has been iterated."""
    names = in_folder()
    for _ in names["loader"]:
        pass
    return names


RUN: dict[str, Callable[[], dict[str, Any]]] = {
    "bad_samples.md": in_folder,
    "balancing.md": balancing,
    "batches.md": batches,
    "choosing_settings.md": choosing_settings,
    "coming_from.md": coming_from,
    "containers.md": containers,
    "costs.md": costs,
    "data.md": data,
    "fields.md": fields,
    "indexing.md": indexing,
    "layouts.md": layouts,
    "losses.md": nothing,
    "media.md": nothing,
    "mixtures.md": mixtures,
    "object_storage.md": in_folder,
    "order-and-resume.md": order,
    "planning_a_run.md": nothing,
    "ranks.md": lambda: training() | {"mesh": (0, 1), "model": attending},
    "stats.md": stats,
    "text.md": text,
    "training.md": training,
    "workers.md": in_folder,
}
