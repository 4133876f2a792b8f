"""Every model kind of the installed transformers: the verdict on packed samples against a comparison of its own.

    python tests/support/packing_sweep.py [--of llava] [KIND ...]

The comparison shares no code with what decides: other samples (three, of other lengths), other windows, two layers of
each kind, float64 where the model runs in it, and calls of the model written here. `--of llava` puts each kind into the
text of that vision model. One line a kind, then counts; the exit status is 1 where any packed kind is not exact.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch

LENGTHS = (37, 6, 45)
WINDOW = 11
EXACT = 1e-4


def kinds() -> list[str]:
    """Model types of all causal and image-text models."""
    from transformers.models.auto import modeling_auto

    tasks = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    return sorted({kind for task in tasks for kind in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")})


def config_of(kind: str, inside: str | None) -> Any:
    from transformers import AutoConfig

    if inside is None:
        return AutoConfig.for_model(kind)
    return AutoConfig.for_model(inside, text_config=AutoConfig.for_model(kind).to_dict())


def other_model(config: Any) -> Any:
    """A model of two layers of each kind and other windows, with drawn weights."""
    from orchdata.hf.families import model_class
    from orchdata.hf.tiny import tiny_configs

    last: Exception | None = None
    for smaller in islice(tiny_configs(config), 1, None):
        text = smaller.get_text_config()
        for name in ("sliding_window", "attention_chunk_size", "sliding_window_size"):
            if isinstance(getattr(text, name, None), int):
                setattr(text, name, WINDOW)
        try:
            with torch.device("meta"):
                if sum(each.numel() for each in model_class(config)(smaller).parameters()) > 80_000_000:
                    raise ValueError("too large")
            torch.manual_seed(3)
            model = model_class(config)(smaller)
            for parameter in model.parameters():
                scale = 0.1 if parameter.dim() < 2 else 1.5 * parameter.shape[-1] ** -0.5
                torch.nn.init.normal_(parameter, std=scale)
            model = model.train()
            outputs(model, [{"input_ids": ids(4, 0)[None]}], [ids(4, 0)[None]])
            return model
        except Exception as error:
            last = error
    raise ValueError(f"{type(last).__name__}: {last}")


def ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 60, (length,), generator=torch.Generator().manual_seed(100 + seed))


def outputs(model: Any, calls: list[dict[str, Any]], labels: list[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    """Summed loss and gradients of some calls."""
    model.zero_grad()
    total = 0.0
    for call, wanted in zip(calls, labels, strict=True):
        logits = model(**call, use_cache=False).logits
        shifted = logits[:, :-1].reshape(-1, logits.shape[-1])
        loss = torch.nn.functional.cross_entropy(shifted, wanted[:, 1:].reshape(-1), reduction="sum")
        loss.backward()
        total += float(loss)
    return total, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def off(found: tuple[float, list[torch.Tensor]], expected: tuple[float, list[torch.Tensor]]) -> float:
    loss = abs(found[0] / expected[0] - 1)
    norm = sum(float(each.double().square().sum()) for each in expected[1]) ** 0.5
    apart = sum(
        float((one.double() - other.double()).square().sum()) for one, other in zip(found[1], expected[1], strict=True)
    )
    return max(loss, apart**0.5 / norm)


def compared(model: Any, mrope: bool) -> tuple[float, float]:
    """How far packed and padded samples are off each alone; infinite where the model does not take them so."""
    texts = [ids(length, seed) for seed, length in enumerate(LENGTHS)]
    alone = outputs(model, [{"input_ids": text[None]} for text in texts], [text[None] for text in texts])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    row, row_labels = torch.cat(texts)[None], torch.cat([with_no_first(text) for text in texts])[None]
    turned = positions.expand(4, 1, -1) if mrope else positions
    rows = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    padded = {"input_ids": rows, "attention_mask": mask}
    found = []
    for call, labels in (
        ({"input_ids": row, "position_ids": turned}, row_labels),
        (padded, rows.masked_fill(mask == 0, -100)),
    ):
        try:
            found.append(off(outputs(model, [call], [labels]), alone))
        except Exception:
            found.append(float("inf"))
    return found[0], found[1]


def with_no_first(text: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.tensor([-100]), text[1:]])


def swept(kind: str, inside: str | None) -> dict[str, Any]:
    import orchdata as od

    try:
        config = config_of(kind, inside)
        inputs = od.hf.Inputs(config)
    except Exception as error:
        return {"kind": kind, "result": "refused", "why": f"{type(error).__name__}: {error}"[:150]}
    row = {
        "kind": kind,
        "packed": not inputs.padded,
        "attention": inputs.verdict.attention,
        "why": inputs.verdict.why[:150],
    }
    if inputs.family.sees_ahead:  # the calls here give no masks; the parity tests compare these families
        return row | {"result": f"{'packed' if row['packed'] else 'padded'}, sees ahead"}
    try:
        packed, padded = compared(other_model(config), inputs.family.mrope)
    except Exception as error:
        return row | {"result": f"{'packed' if row['packed'] else 'padded'}, no model", "error": str(error)[:150]}
    row |= {"packed_off": packed, "padded_off": padded}
    if row["packed"]:
        return row | {"result": "packed and exact" if packed < EXACT else "PACKED AND OFF"}
    if packed < EXACT:
        return row | {"result": "padded, packed would be exact"}
    return row | {"result": "padded and exact" if padded < EXACT else "padded and off"}


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--of", metavar="MODEL_TYPE")
    options = parser.parse_args(arguments)
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for kind in options.kinds or kinds():
        found = swept(kind, options.of)
        counts[found["result"]] += 1
        print(json.dumps(found), flush=True)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: {dict(counts)}")
    return int(counts["PACKED AND OFF"] > 0)


if __name__ == "__main__":
    sys.exit(main())
