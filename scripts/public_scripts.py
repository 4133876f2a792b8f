"""`python scripts/public_scripts.py SOURCES`: public training scripts, nothing changed but the import of DataLoader.

    SOURCES/OWNER/NAME (git clones) --copy, one import changed--> run with torch's loader, then with ours
        --losses, calls of the model--> a table: torch's loader, ours, what differs

torch's loader is the denominator: a script that does not run with it says nothing of ours. `--site FOLDER` is put
on the path for packages that are not installed with orchdata (lightning, accelerate, torchdata). What scripts need of
torchvision, and of a GPU, are the stand-ins of `scripts/stand_ins`, for both loaders alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

STAND_INS = Path(__file__).parent / "stand_ins"
LIMIT_SECONDS = 150
LIMIT_BYTES = 12 << 30
TINY_MNIST = ("--epochs", "2", "--no-accel", "--log-interval", "1")
TINY_IMAGENET = ("--dummy", "--epochs", "2", "--batch-size", "16", "--seed", "1", "--no-accel", "--print-freq", "1")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script of one source.

    Attributes:
        source: "OWNER/NAME" of a repository, or a package.
        folder: in the repository, copied whole; of a package's case the stand-ins.
        script: in that folder, and the arguments it gets.
        changed: files in which the import is changed.
        gpu: whether it asks for one.
        why: what is known to differ, and why; printed where something does.
    """

    name: str
    source: str
    folder: str = ""
    script: str
    arguments: tuple[str, ...] = ()
    changed: tuple[str, ...]
    num_ranks: int = 1
    gpu: bool = False
    why: str = ""


def _imagenet(num_ranks: int, workers: int) -> Case:
    ranks = ("--world-size", str(num_ranks), "--dist-url", "env://", "--dist-backend", "gloo") if num_ranks > 1 else ()
    return Case(
        name=f"imagenet, {num_ranks} rank{'s' * (num_ranks > 1)}, {workers} workers",
        source="pytorch/examples",
        folder="imagenet",
        script="main.py",
        arguments=(*TINY_IMAGENET, "--workers", str(workers), *ranks),
        changed=("main.py",),
        num_ranks=num_ranks,
        why="torch's DistributedSampler repeats a sample where the ranks do not divide the last batch, ours does not",
    )


def _trainer(name: str, source: str, script: str, *arguments: str, num_ranks: int = 1, why: str = "") -> Case:
    return Case(
        name=name,
        source=source,
        script=script,
        arguments=arguments,
        changed=(script,),
        num_ranks=num_ranks,
        why=why,
    )


def _tutorial(name: str, num_ranks: int) -> Case:
    return Case(
        name=f"DDP tutorial, {name}",
        source="pytorch/examples",
        folder="distributed/ddp-tutorial-series",
        script=f"{name}.py",
        arguments=("2", "1", "--batch_size", "100"),
        changed=(f"{name}.py",),
        num_ranks=num_ranks,
        gpu=True,
    )


CASES = (
    Case(
        name="mnist",
        source="pytorch/examples",
        folder="mnist",
        script="main.py",
        arguments=TINY_MNIST,
        changed=("main.py",),
    ),
    _imagenet(1, 0),
    _imagenet(1, 4),
    _imagenet(2, 0),
    _imagenet(2, 4),
    _tutorial("single_gpu", 1),
    _tutorial("multigpu_torchrun", 2),
    Case(
        name="minGPT, adder",
        source="karpathy/minGPT",
        script="projects/adder/adder.py",
        arguments=("--trainer.max_iters=40",),
        changed=("mingpt/trainer.py", "projects/adder/adder.py"),
    ),
    Case(
        name="torchtune, loader and loop",
        source="pytorch/torchtune",
        script="torchtune_loader.py",
        changed=("torchtune_loader.py", "recipes/full_finetune_single_device.py"),
    ),
    _trainer(
        "HF Trainer",
        "transformers",
        "hf_trainer.py",
        "0",
        "seeded",
        why="accelerate draws the order of a loader of torch's class by a generator of its own",
    ),
    _trainer("HF Trainer, order as given", "transformers", "hf_trainer.py", "0", "given"),
    _trainer("HF Trainer, order as given, 2 workers", "transformers", "hf_trainer.py", "2", "given"),
    _trainer(
        "HF Trainer, order as given, 2 ranks",
        "transformers",
        "hf_trainer.py",
        "0",
        "given",
        num_ranks=2,
        why="over ranks accelerate draws by a generator of its own all the same, and deals whole batches",
    ),
    _trainer(
        "Lightning",
        "lightning",
        "lightning_fit.py",
        "given",
        why="Lightning calls iter() once more on a loader that is not of torch's class, which draws another order",
    ),
    _trainer("Lightning, in order", "lightning", "lightning_fit.py", "given", "plain"),
    _trainer(
        "Lightning, loaders from hooks, 2 ranks",
        "lightning",
        "lightning_fit.py",
        "hooks",
        num_ranks=2,
        why="Lightning gives a loader of torch's class a DistributedSampler with a seed of its own",
    ),
    _trainer(
        "Lightning, loaders given, 2 ranks",
        "lightning",
        "lightning_fit.py",
        "given",
        num_ranks=2,
        why="made before the process group, where each rank would get every sample",
    ),
)


def with_our_loader(source: str) -> str:
    """The text of a script that takes DataLoader from orchdata."""

    def without(match: re.Match[str]) -> str:
        names = [name.strip() for name in match[2].split(",")]
        kept = [name for name in names if name != "DataLoader"]
        return (f"from {match[1]} import {', '.join(kept)}\n" if kept else "") + "from orchdata import DataLoader"

    source = re.sub(
        r"^from (torch\.utils\.data(?:\.dataloader)?) import (.*\bDataLoader\b.*)$", without, source, flags=re.M
    )
    stateful = "from torchdata.stateful_dataloader import StatefulDataLoader"
    source = source.replace(stateful, "from orchdata import DataLoader as StatefulDataLoader")
    called = source.replace("torch.utils.data.DataLoader(", "orchdata.DataLoader(")
    return (
        called
        if called == source
        else re.sub(r"^import torch$", "import torch\nimport orchdata", called, count=1, flags=re.M)
    )


@dataclass(frozen=True)
class Ran:
    """What one script did: of each rank its record, and the end of what they wrote."""

    ranks: list[dict[str, Any]]
    said: str

    @property
    def error(self) -> str:
        """Of the first rank that failed."""
        return next((" ".join(rank["error"].split()) for rank in self.ranks if rank["error"]), "")

    def words(self) -> str:
        """Batches and losses in a cell of the table."""
        if self.error:
            return f"fails: {self.error[:160]}"
        calls = ", ".join(f"{rank['training']} + {rank['evaluation']}" for rank in self.ranks)
        return f"{calls} batches, last loss {self.ranks[0]['losses'][-1]:.6f}"


def run(case: Case, folder: Path, path: Sequence[str]) -> Ran:
    """Run the script in its folder, one process a rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchvision = [str(STAND_INS / "for_examples")] if case.source == "pytorch/examples" else []
    shared = os.environ | {
        "PYTHONPATH": os.pathsep.join((*torchvision, str(folder), *path)),
        "STAND_IN_ITEMS": "203",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "WORLD_SIZE": str(case.num_ranks),
        "LOCAL_WORLD_SIZE": str(case.num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if case.num_ranks > 1:
        shared["TORCHELASTIC_RUN_ID"] = "public-scripts"  # so do trainers know a launcher
    processes = []
    results = [folder / f"record.{rank}.json" for rank in range(case.num_ranks)]
    with (folder / "log").open("w+b") as log:
        for rank, result in enumerate(results):
            gpu = "gpu" if case.gpu else "cpu"
            command = [sys.executable, str(STAND_INS / "record.py"), str(result), gpu, case.script, *case.arguments]
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=folder,
                    env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_limit_memory,  # no thread runs here
                )
            )
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT_SECONDS)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
    lost = {
        "losses": [],
        "inputs": [],
        "training": 0,
        "evaluation": 0,
        "error": f"no end within {LIMIT_SECONDS} s, or killed",
    }
    return Ran([json.loads(result.read_text()) if result.exists() else lost for result in results], said)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))


def run_with(case: Case, sources: Path, path: Sequence[str], *, ours: bool) -> Ran:
    """Copy the case's files to a folder of their own, change the import for ours, and run it there."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if "/" in case.source:
            ignored = shutil.ignore_patterns(".git", "*.ipynb", "tests", "docs")
            shutil.copytree(sources / case.source / case.folder, folder, dirs_exist_ok=True, ignore=ignored)
        for own in STAND_INS.glob("*.py"):
            shutil.copy(own, folder)
        for name in case.changed if ours else ():
            text = (folder / name).read_text(encoding="utf-8")
            changed = with_our_loader(text)
            if changed == text:
                raise ValueError(f"{case.name}: {name} imports no DataLoader that could be changed")
            (folder / name).write_text(changed, encoding="utf-8")
        return run(case, folder, path)


def difference(torchs: Ran, ours: Ran) -> str:
    """What differs between the two, in words."""
    if torchs.error:
        return "does not run with torch's loader"
    if ours.error:
        return "refused or failed"
    for rank, (one, other) in enumerate(zip(torchs.ranks, ours.ranks, strict=True)):
        counts = [(ran["training"], ran["evaluation"]) for ran in (one, other)]
        if counts[0] != counts[1]:
            return f"batches of rank {rank}"
        for what in ("inputs", "losses"):
            pairs = list(zip(one[what], other[what], strict=True))
            if differing := [number for number, (a, b) in enumerate(pairs) if a != b]:
                return f"{what} of rank {rank}: {len(differing)} of {len(pairs)}, the first is number {differing[0]}"
    return "nothing: every input and loss is the same to the bit"


def where_from(case: Case, sources: Path) -> str:
    """Repository and commit, or package and version."""
    if "/" not in case.source:
        with contextlib.suppress(Exception):
            return f"{case.source} {version(case.source)}"
        return case.source
    command = ["git", "-C", str(sources / case.source), "rev-parse", "--short=9", "HEAD"]
    return f"{case.source}@{subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", type=Path, help="folder of git clones: pytorch/examples, karpathy/minGPT, ...")
    parser.add_argument("--site", action="append", default=[], help="a folder of more packages")
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--log", action="store_true", help="print what a script wrote that failed")
    options = parser.parse_args()
    sys.path += options.site
    print("| script | source | torch's loader | ours | what differs |\n| --- | --- | --- | --- | --- |")
    failed = False
    for case in CASES:
        if options.only not in case.name:
            continue
        torchs, ours = (run_with(case, options.sources, options.site, ours=mine) for mine in (False, True))
        found = difference(torchs, ours)
        if case.why and not found.startswith("nothing"):
            found = f"{found}; {case.why}"
        cells = (case.name, where_from(case, options.sources), torchs.words(), ours.words(), found)
        print(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |", flush=True)
        failed |= not found.startswith("nothing")
        for ran in (torchs, ours):
            if options.log and ran.error:
                print(ran.said[-3000:], file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
