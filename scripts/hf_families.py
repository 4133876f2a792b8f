"""What becomes of every model of the installed transformers that writes text: lists of them.

    python scripts/hf_families.py                 # tries all, writes the lists of docs/huggingface_models.md
    python scripts/hf_families.py llama qwen2_vl  # tries these, prints a line each

Each `model_type` is tried in a child process with limits of memory and time: its default config, the layout that
`od.hf.Inputs` chooses, three samples through a loader and a tiny random model compared with each sample alone, and
`od.hf.cost`. Models of images and clips get samples of these, with a processor and a configuration that
`tests/support/hf_sweep` makes fit each other, and are compared with the processor itself. Families that the parity
tests have are run as these do. `make .venv/torchvision` first: many processors ask for it.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
PAGE = ROOT / "docs" / "huggingface_models.md"
BEGIN, END = "<!-- begin of scripts/hf_families.py -->", "<!-- end of scripts/hf_families.py -->"
AT_ONCE, SECONDS, BYTES = 2, 150, 24 << 30
TOLERANCE = 1e-4
TEXTS = ("a small thing", "two of them, side by side, and a longer text after them", "nothing")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TASKS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ")
SPEECH = "SEQ_TO_SEQ_CAUSAL_LM"
"""A task among whose models are some that hear."""
HEADINGS = {
    "packed": "Packed, exact",
    "padded": "Padded, exact",
    "runs": "Padded, not compared",
    "alone": "One sample a step, else refused",
    "crashes": "A tiny model fails in its first step",
    "differs": "Differ from one sample at a time",
    "refused": "Refused before the first step",
    "untried": "Could not be built offline",
}
SHORT = 220
PACKAGE = re.compile(r"requires the (\S+) library|No module named '(\w+)'", re.IGNORECASE)
NEIGHBOURS = ("change each other", "neither packed nor padded batches")
# What only helps at the place where an error was raised.
ADVICE = (". Texts alone take ", ". Give its cost")


@dataclass(frozen=True)
class Row:
    """What became of a model.

    Attributes:
        of_text: it takes text alone.
        word: a key of HEADINGS.
        why: the message, where it is refused or was not tried.
        no_cost: why `od.hf.cost` has none; "" where it has.
    """

    model_type: str
    of_text: bool
    word: str
    why: str = ""
    no_cost: str = ""


def main(names: Sequence[str]) -> int:
    """Try the models that are named, or all; 1 where one differs from one sample at a time."""
    with_torchvision()
    rows = sorted(tried(names or model_types()), key=lambda row: row.model_type)
    if not names:
        PAGE.write_text(written(PAGE.read_text(), rows))
    return int(any(row.word == "differs" for row in rows))


def with_torchvision() -> None:
    """Let this process import the torchvision of `make .venv/torchvision`, where there is one."""
    sys.path.insert(1, str(ROOT / ".venv" / "torchvision"))
    import torchvision_operators  # noqa: F401 - before transformers, which looks for it once


def model_types() -> list[str]:
    """Every `model_type` of which transformers has a model that writes text."""
    from transformers.models.auto import modeling_auto, processing_auto

    def of(task: str) -> set[str]:
        return set(getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", ()))

    return sorted(set().union(*map(of, TASKS)) | (of(SPEECH) & set(processing_auto.PROCESSOR_MAPPING_NAMES)))


def tried(names: Sequence[str]) -> Iterator[Row]:
    """A row for each name, in the order in which they end, also printed."""
    # Once, before the children are forked.
    import hf_sweep.outcomes  # noqa: F401 - first, for torchvision
    import transformers.models.llama.modeling_llama  # noqa: F401

    waiting, running = list(reversed(names)), {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = waiting.pop()
            ours, theirs = multiprocessing.Pipe(duplex=False)
            child = multiprocessing.get_context("fork").Process(target=_child, args=(name, theirs))
            child.start()
            theirs.close()
            running[ours] = (name, child, time.monotonic() + SECONDS)
        ready = wait(list(running), timeout=1)
        for ours, (name, child, limit) in list(running.items()):
            late = time.monotonic() > limit
            if ours not in ready and not late:
                continue
            row = _received(ours, name, late=late)
            child.kill()
            child.join()
            ours.close()
            del running[ours]
            print(f"{row.model_type:26} {row.word:8} {row.why or '-'} | cost: {row.no_cost or 'yes'}", flush=True)
            yield row


def _received(ours: Connection, name: str, *, late: bool) -> Row:
    if late:
        return Row(name, False, "untried", f"took more than {SECONDS} s", "not tried")
    try:
        return Row(*ours.recv())
    except EOFError:
        return Row(name, False, "untried", "its process ended", "not tried")


def _child(name: str, theirs: Connection) -> None:
    import torch
    import transformers

    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ORCHDATA_CACHE"] = str(Path(folder) / "cache")  # no verdict of an earlier version
        theirs.send(astuple(row_of(name, Path(folder))))
    theirs.close()


def row_of(name: str, folder: Path) -> Row:
    """What becomes of a model, here in this process."""
    try:
        config = _config_of(name)
        of_text = _is_of_text(config)
    except Exception as error:  # noqa: BLE001 - a model may raise any exception
        return Row(name, False, "untried", _short(error), _short(error))
    no_cost = _no_cost(config)
    try:
        word, why = _text_outcome(config, folder) if of_text else _media_outcome(name, folder)
    except Exception as error:  # noqa: BLE001 - a model may raise any exception
        word, why = "untried", _short(error)
    return Row(name, of_text, word, why, no_cost)


def _config_of(name: str) -> Any:
    """The default config, with what defaults leave out."""
    from hf_sweep.configs import default_config

    from orchdata.hf.families import thinker

    return thinker(default_config(name))


def _is_of_text(config: Any) -> bool:
    from orchdata.hf.families import takes

    return not takes(config) & {
        "pixel_values",
        "input_features",
        "input_values",
        "image_pixel_values",
        "pixel_values_videos",
    }


def _no_cost(config: Any) -> str:
    """Why there is no cost of a config: neither of the default one, nor of a tiny one, whose sizes go together."""
    import orchdata as od
    from orchdata.hf.tiny import tiny_model

    try:
        od.hf.cost(config)
    except Exception as error:  # noqa: BLE001 - a model may raise any exception
        try:
            od.hf.cost(tiny_model(config).config)
        except Exception:  # noqa: BLE001
            return _short(error)
    return ""


def _text_outcome(config: Any, folder: Path) -> tuple[str, str]:
    from hf_families.tokenizers_in_code import tokenizer
    from shard_factory import write_shard

    import orchdata as od
    from orchdata.hf.tiny import tiny_model

    try:
        inputs = od.hf.Inputs(config)
    except (ValueError, TypeError) as error:
        return _refused(error)
    rows = [{"__key__": f"{at}", "txt": text.encode()} for at, text in enumerate(TEXTS)]
    recipe = od.hf.recipe(tokenizer(**SPECIAL))
    dataset = od.ShardDataset(write_shard(folder / "texts.tar", rows), recipe=recipe)
    try:
        together, alone = (
            od.DataLoader(dataset, batch_size=size, collate_fn=inputs, num_threads=0) for size in (len(rows), 1)
        )
    except (ValueError, TypeError) as error:
        return _refused(error)
    model = tiny_model(inputs.config).eval()
    try:
        found, expected = _loss(model, together), _loss(model, alone)
    except Exception as error:  # noqa: BLE001 - a model may raise any exception
        return "crashes", _short(error)
    if abs(found / expected - 1) > TOLERANCE:
        return "differs", f"the loss by {abs(found / expected - 1):.0e}"
    return ("padded" if inputs.padded else "packed"), ""


def _loss(model: Any, loader: Any) -> float:
    """The summed loss of an epoch."""
    import torch

    import orchdata as od

    total = 0.0
    for batch in loader:
        with torch.no_grad():
            total += float(od.hf.loss(model(**batch.model_inputs()), batch)) / batch.loss_scale
    return total


def _media_outcome(name: str, folder: Path) -> tuple[str, str]:
    from hf_sweep.outcomes import outcome_of

    found = outcome_of(name, folder)
    if found.word == "refused":
        return _refused(found.detail)
    words = {"exact": found.layout, "not built": "untried"}
    return words.get(found.word, found.word), "" if found.word in ("exact", "alone") else _short(found.detail)


def _refused(reason: object) -> tuple[str, str]:
    """What a refusal is: of batches of several samples, or of the model."""
    if any(words in str(reason) for words in NEIGHBOURS):
        return "alone", ""
    return "refused", _short(reason)


def _short(reason: object) -> str:
    """The first statement of a message, for a cell of a table."""
    text = " ".join(str(reason).split()).replace("|", "/").replace("`", "'")
    if isinstance(reason, Exception) and not isinstance(reason, ValueError):
        text = f"{type(reason).__name__}: {text}"
    text = text.removeprefix("ValueError: ")
    for advice in ADVICE:
        text = text.partition(advice)[0]
    return text if len(text) <= SHORT else f"{text[:SHORT].rpartition(' ')[0]} ..."


def written(page: str, rows: Sequence[Row]) -> str:
    """The page with the lists of `rows` in the place of those that it has."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"docs/huggingface_models.md has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{lists(rows)}{END}{after}"


def lists(rows: Sequence[Row]) -> str:
    """Markdown: the versions; models by what becomes of them; why those are refused that are; and those without a
    cost.
    """
    import torch
    import transformers

    torch_version = torch.__version__.partition("+")[0]
    lines = [f"Of transformers {transformers.__version__} and torch {torch_version}: {len(rows)} models.", ""]
    for word, heading in HEADINGS.items():
        kinds = {"Text": True, "Images, clips, videos": False}
        named = {
            kind: [row.model_type for row in rows if row.word == word and row.of_text is of_text]
            for kind, of_text in kinds.items()
        }
        if word != "untried" and any(named.values()):
            lines += [f"### {heading}", ""]
            lines += [f"- {kind}, {len(names)}: {_code(names)}" for kind, names in named.items() if names]
            lines += [""]
    explained = [row for row in rows if row.why and row.word != "untried"]
    lines += ["### What is wrong", ""]
    lines += [f"- `{row.model_type}`: {row.why}" for row in explained]
    unbuilt = [row for row in rows if row.word == "untried"]
    lines += ["", f"### {HEADINGS['untried']}", "", "This says nothing of published models.", ""]
    for cause, names in _by_cause(unbuilt).items():
        lines += [f"- {cause}, {len(names)}: {_code(names)}"]
    lacking = [row for row in rows if row.no_cost and row.word != "untried"]
    lines += [
        "",
        f"`od.hf.cost` is derived for {len(rows) - len([row for row in rows if row.no_cost])}. Of those above ",
    ]
    lines[-1] += (
        f"it has none for {len(lacking)}, which take an `od.CostModel`: {_code([r.model_type for r in lacking])}."
    )
    return "\n".join(lines) + "\n"


def _by_cause(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Models that could not be built, by what is missing."""
    found: dict[str, list[str]] = {}
    for row in rows:
        package = PACKAGE.search(row.why)
        if package:
            cause = f"`{package[1] or package[2]}` is not installed here"
        elif "names no processor" in row.why:
            cause = "transformers names no processor for them"
        else:
            cause = "their classes' defaults leave out or contradict what a model or a processor needs"
        found.setdefault(cause, []).append(row.model_type)
    return dict(sorted(found.items()))


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
