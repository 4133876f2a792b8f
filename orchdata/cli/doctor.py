"""`orchdata doctor` and `warm`: what this machine has, what it lacks and for what, and its kernels."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

import typer

from orchdata.cli.options import JsonOption
from orchdata.cli.output import human_bytes, one_line_errors, print_json
from orchdata.loaders.environment import requirements, way_out

_FEATURES: Final = {
    "av": "video",
    "transformers": "Hugging Face models: od.hf",
    "jinja2": "chat templates of models: ChatTemplate.from_jinja",
    "obstore": "shards in object storage: s3://, gs://, az://, http(s)://",
    "fsspec": "shards in other storage, such as hf://",
    "boto3": "AWS profiles",
    "matplotlib": "plots and reports",
    "ray": "steps from other machines: od.RayEngine",
    "torchaudio": "not needed: clips are resampled in torch, with the same values to the bit",
    "torchvision": "processors of some models of transformers, such as Qwen's",
}
"""Package -> what it is for. transformers imports torchaudio and torchvision if they are installed."""
_MODULES: Final = {"pillow": "PIL", "pyyaml": "yaml"}


class Finding(NamedTuple):
    """One thing looked at: "missing" leaves out a feature; "broken" stops everything. `hint` is what to do, or ""."""

    name: str
    found: str
    verdict: str = "good"
    hint: str = ""


@one_line_errors
def doctor(as_json: JsonOption = False) -> None:
    """Look at this machine: versions, accelerators, the cache folder, shared memory.

    Fails where something is broken that loading needs.
    """
    findings = [Finding("orchdata", version("orchdata"))]
    findings.append(Finding("Python", f"{platform.python_version()}, {platform.platform()}"))
    findings += [_package(name, wanted) for name, wanted in requirements().items() if name not in _FEATURES]
    findings += [_package(name, name) for name in _FEATURES]
    for name, look in {"processors": _processors, "cache folder": _cache_folder, "shared memory": _memory}.items():
        try:
            findings.append(Finding(name, look()))
        except Exception as error:  # noqa: BLE001 - anything that is wrong with an installation is a finding
            findings.append(Finding(name, f"{type(error).__name__}: {error}", "broken"))
    broken = sum(finding.verdict == "broken" for finding in findings)
    if as_json:
        print_json({"findings": [finding._asdict() for finding in findings]})
    else:
        for finding in findings:
            typer.echo(f"{finding.verdict:<8}{finding.name}: {finding.found}")
            if finding.hint:
                typer.echo(f"        {finding.hint}")
        typer.echo(f"{broken} broken" if broken else "all that loading needs is here")
    if broken:
        raise typer.Exit(1)


def _package(name: str, wanted: str) -> Finding:
    """Import a package. `wanted` is its requirement, "pillow<14,>=10.3"; its bounds are compared by numbers alone."""
    module = _MODULES.get(name, name)
    use, bad = (f" ({_FEATURES[name]})", "missing") if name in _FEATURES else ("", "broken")
    try:
        importlib.import_module(module)
        found = version(name)
    except Exception as error:  # noqa: BLE001 - an installation may be broken in any way
        hint = way_out(module, error)
        if name in ("torchvision", "torchaudio"):
            hint = "leave it out, or install one that fits this torch: transformers imports what is installed"
        return Finding(name, " ".join(f"{type(error).__name__}: {error}".split()) + use, bad, hint)
    for sign, bound in re.findall(r"(>=|<)([\d.]+)", wanted):
        numbers, limit = ([int(each) for each in re.findall(r"\d+", text.split("+")[0])] for text in (found, bound))
        if (numbers < limit) != (sign == "<"):
            return Finding(name, f"{found}, and {wanted} is required", bad, f"pip install '{wanted}'")
    return Finding(name, found + use)


def _processors() -> str:
    import torch

    cpus = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} CPUs, {torch.backends.cpu.get_cpu_capability()}"
    return f"{cpus}; accelerators that torch sees: {torch.cuda.device_count()}"


def _cache_folder() -> str:
    from orchdata.loaders.storage.cache import CacheFolder

    root = CacheFolder().make_root()
    with tempfile.NamedTemporaryFile(dir=root):
        return f"{root}: {human_bytes(shutil.disk_usage(root).free)} free"


def _memory() -> str:
    os.close(os.memfd_create("orchdata-doctor"))
    return "memfd_create works; /dev/shm is not used"


@one_line_errors
def warm(as_json: JsonOption = False) -> None:
    """Compile the kernels of indexing, loading and planning, for the image of a container or a new machine.

    They are stored in NUMBA_CACHE_DIR if it is set, as it must be when they are used; else next to the package.
    """
    from orchdata import DataLoader, ShardDataset
    from orchdata.engines.warm import FAMILIES, Warming, stored_in
    from orchdata.synth import synthesize

    started = time.monotonic()
    Warming(list(FAMILIES)).wait()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        os.environ["ORCHDATA_CACHE"] = folder + "/cache"  # of this process, which then ends
        paths = synthesize("omni", Path(folder), samples=32).paths
        dataset = ShardDataset([str(path) for path in paths])
        dataset.index()
        next(iter(DataLoader(dataset.split("train", 0.5), batch_size=2, shuffle=True, dp=(0, 2), num_threads=1)))
    result = {"folders": stored_in(), "seconds": round(time.monotonic() - started, 1)}
    if as_json:
        print_json(result)
    else:
        typer.echo(f"kernels are compiled, in {result['seconds']} s: {', '.join(stored_in())}")
