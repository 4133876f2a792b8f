"""Loads texts in worker processes after the tokenizer's threads have run in this one: START_METHOD FOLDER [ways].

Each worker prints what it finds: the variables, and how many threads a batch of many texts starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from chat_templates import trained

import orchdata as od


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def report(_number: int = 0) -> None:
    before = num_threads()
    trained().encode_batch(["a cat on the mat"] * 64)
    names = ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS")
    print("worker", *(os.environ.get(name) for name in names), num_threads() - before, flush=True)


def main(start_method: str, folder: str) -> None:
    path = Path(folder, "texts.jsonl")
    path.write_text("".join(json.dumps({"text": f"a cat is on the mat {number}"}) + "\n" for number in range(40)))
    recipe = od.Recipe(image=None, audio=None, text=od.TextPreprocessor(trained()))
    given = dict(os.environ)
    recipe.text.tokenizer.encode_batch(["a cat"] * 64, add_special_tokens=[True] * 64)
    loader = od.DataLoader(
        od.ShardDataset(str(path), recipe),
        batch_size=4,
        num_workers=2,
        multiprocessing_context=start_method,
        worker_init_fn=report,
    )
    print("batches", sum(1 for _ in loader))
    subprocess.run([sys.executable, "-c", "import os; print('program', os.environ.get('TOKENIZERS_PARALLELISM'))"])
    child = os.fork()
    if not child:
        assert recipe.text.tokenizer.encode_batch(["a cat"] * 64, add_special_tokens=[True] * 64)
        print("fork", os.environ.get("TOKENIZERS_PARALLELISM"), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert dict(os.environ) == given, "the environment of the training process is as before"


if __name__ == "__main__":
    main(*sys.argv[1:])
