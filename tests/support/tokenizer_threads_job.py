"""Loads texts in worker processes after the tokenizer's threads have run in this one: CASES FOLDER."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
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


def main(cases: str, folder: str) -> None:
    for number, (start_method, given) in enumerate(json.loads(cases)):
        here = Path(folder, str(number))
        here.mkdir()
        child = os.fork()
        if not child:
            for descriptor, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(here / name, os.O_WRONLY | os.O_CREAT), descriptor)
            os.environ |= {"ORCHDATA_CACHE": str(here / "cache"), **given}
            code = 1
            try:
                load(start_method, here)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        written = [(here / name).read_text() for name in ("out", "err")]
        print(json.dumps([os.waitstatus_to_exitcode(status), *written]), flush=True)


def load(start_method: str, folder: Path) -> None:
    path = folder / "texts.jsonl"
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
    print("batches", sum(1 for _ in loader), flush=True)
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
