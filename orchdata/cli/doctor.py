"""`orchdata doctor` and `warm`: what this machine has, what it lacks and for what, and its kernels."""

from __future__ import annotations

import importlib
import os
import platform
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Final

import typer

from orchdata.cli.options import JsonOption
from orchdata.cli.output import one_line_errors, print_json
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
    "torchaudio": "not needed; transformers imports it if it is installed: leave out one that does not fit torch",
    "torchvision": "processors of some models of transformers, such as Qwen's",
}
"""Package -> what it is for."""
_MODULES: Final = {"pillow": "PIL", "pyyaml": "yaml"}


@one_line_errors
def doctor(as_json: JsonOption = False) -> None:
    """Look at this machine: versions, what is missing and for what, accelerators, the cache folder.

    Fails where something is broken that loading needs.
    """
    findings = []
    packages = [name for name in requirements() if name not in _FEATURES] + list(_FEATURES)
    for name in ("orchdata", "Python", *packages, "accelerators", "cache folder"):
        module, use = _MODULES.get(name, name), f" ({_FEATURES[name]})" if name in _FEATURES else ""
        verdict, hint = "good", ""
        try:
            if name in packages:
                importlib.import_module(module)
            found = _LOOKS[name]() if name in _LOOKS else version(name)
        except Exception as error:  # noqa: BLE001 - anything that is wrong with an installation is a finding
            found, verdict = " ".join(f"{type(error).__name__}: {error}".split()), "missing" if use else "broken"
            hint = way_out(module, error) if name in packages else ""
        findings.append({"name": name, "found": found + use, "verdict": verdict, "hint": hint})
    broken = sum(finding["verdict"] == "broken" for finding in findings)
    if as_json:
        print_json({"findings": findings})
    else:
        for finding in findings:
            typer.echo(f"{finding['verdict']:<8}{finding['name']}: {finding['found']}")
            if finding["hint"]:
                typer.echo(f"        {finding['hint']}")
        typer.echo(f"{broken} broken" if broken else "all that loading needs is here")
    if broken:
        raise typer.Exit(1)


def _accelerators() -> str:
    import torch

    return f"{torch.cuda.device_count()} that torch sees; {len(os.sched_getaffinity(0))} CPUs"


def _cache_folder() -> str:
    from orchdata.loaders.storage.cache import CacheFolder

    root = CacheFolder().make_root()
    with tempfile.NamedTemporaryFile(dir=root):
        return f"{root}: can be written to"


_LOOKS: Final = {"Python": platform.python_version, "accelerators": _accelerators, "cache folder": _cache_folder}


@one_line_errors
def warm(as_json: JsonOption = False) -> None:
    """Compile the kernels of indexing, loading and planning, for the image of a container or a new machine.

    They are stored in NUMBA_CACHE_DIR if it is set, as it must be when they are used; else next to the package.
    """
    from orchdata import DataLoader, ShardDataset
    from orchdata.engines.kernel_families import FAMILIES
    from orchdata.engines.warm import Warming, stored_in
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
