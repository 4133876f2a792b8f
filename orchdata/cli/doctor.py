"""`orchdata doctor` and `warm`: what this machine has, what it lacks and for what, and its kernels."""

from __future__ import annotations

import importlib
import os
import platform
import re
import resource
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import typer

from orchdata.cli.options import JsonOption
from orchdata.cli.output import human_bytes, one_line_errors, print_json
from orchdata.loaders.environment import failed_import, requirements, way_out

Verdict = Literal["good", "note", "missing", "broken"]


class Finding(NamedTuple):
    """One thing looked at.

    Attributes:
        verdict: "note" is worth knowing; "missing" leaves out a feature; "broken" stops everything.
        hint: what to do; "" for nothing.
    """

    about: str
    name: str
    found: str
    verdict: Verdict = "good"
    hint: str = ""


_FEATURES: Final = {
    "av": ("video", "video"),
    "transformers": ("Hugging Face models: od.hf", "hf"),
    "jinja2": ("chat templates of models: ChatTemplate.from_jinja", "hf"),
    "obstore": ("shards in object storage: s3://, gs://, az://, http(s)://", "remote"),
    "fsspec": ("shards in other storage, such as hf://", "remote"),
    "boto3": ("AWS profiles", "remote"),
    "torchvision": ("comparing the resizer with torchvision's; not needed to load", ""),
    "datasets": ("making Hugging Face data sets; those on disk are read without", ""),
    "matplotlib": ("plots of the demo", "plots"),
    "ray": ("steps from other machines: od.RayEngine", "ray"),
}
"""Package -> what it is for, and the extra that it is of, if any."""
_REPLACED: Final = {
    "torchaudio": "`pip uninstall torchaudio` if it is installed and you use transformers, which imports what is "
    "installed and fails with it. Nothing else is to do: clips are resampled in torch, with the same values to the bit"
}
"""Package -> what is done without it."""
_MODULES: Final = {"pillow": "PIL", "pyyaml": "yaml"}
_STYLES: Final = {"good": "green", "note": "yellow", "missing": "dim", "broken": "bold red"}
_LOW_DISK: Final = 5 << 30
_FEW_FILES: Final = 4096


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


@one_line_errors
def doctor(as_json: JsonOption = False) -> None:
    """Look at this machine: versions, media libraries, the resizer, vector units, the cache folder, shared memory.

    Fails where something is broken that loading needs.
    """
    findings = [finding for look in _LOOKS for finding in _tried(look)]
    if as_json:
        print_json({"findings": [finding._asdict() for finding in findings]})
    else:
        _print(findings)
    if any(finding.verdict == "broken" for finding in findings):
        raise typer.Exit(1)


def _tried(look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a look; if the look itself fails, that is the last finding."""
    try:
        yield from look()
    except Exception as error:  # noqa: BLE001 - anything that is wrong with an installation is a finding
        name = look.__name__.strip("_")
        hint = "install orchdata again" if failed_import(error) is None else "see versions"
        yield Finding(name, "this look", f"{type(error).__name__}: {error}", "broken", hint)


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "orchdata", version("orchdata"))
    yield Finding("versions", "Python", f"{platform.python_version()}, {platform.platform()}")
    for package, wanted in (requirements("") | requirements("audio")).items():
        state, advice = _installed(package, wanted)
        if advice and package in _REPLACED:
            yield Finding("versions", package, state, "note", _REPLACED[package])
        else:
            yield Finding("versions", package, state, "broken" if advice else "good", advice)


def _features() -> Iterator[Finding]:
    for package, (feature, extra) in _FEATURES.items():
        wanted = requirements(extra).get(package, package) if extra else package
        state, advice = _installed(package, wanted)
        if package == "torchvision" and advice:
            advice = _fitting_torchvision(state == "not installed")
        yield Finding("features", package, f"{state}: {feature}", "missing" if advice else "good", advice)


def _fitting_torchvision(is_missing: bool) -> str:
    """Return what to do about torchvision. It is built for one torch, and by itself may bring another one."""
    if not is_missing:
        return "`pip uninstall torchvision`: it does not fit this torch, and transformers imports what is installed"
    number, _, build = version("torch").partition("+")
    if not build:
        return f"pip install torchvision 'torch=={number}'"
    if re.fullmatch(r"cpu|xpu|cu\d+|rocm[\d.]+", build):
        return f"pip install torchvision 'torch=={number}+{build}' --index-url https://download.pytorch.org/whl/{build}"
    return f"a torchvision from where this torch {number}+{build} is from"


def _installed(package: str, wanted: str) -> tuple[str, str]:
    """Return the version of a package, or why it cannot be used; and what to do, "" if it can be used."""
    install = f"pip install '{wanted}'"
    try:
        importlib.import_module(_MODULES.get(package, package))
        installed = version(package)
    except (PackageNotFoundError, ModuleNotFoundError) as error:
        lacks = getattr(error, "name", package)
        if isinstance(error, ModuleNotFoundError) and lacks != _MODULES.get(package, package):
            return f"needs {lacks}, which is not installed", way_out(_MODULES.get(package, package), error)
        return "not installed", install
    except Exception as error:  # noqa: BLE001 - an installation may be broken in any way
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return said, f"pip install --force-reinstall --no-deps '{wanted}'"
    return (installed, "") if _fits(installed, wanted) else (f"{installed}, and {wanted} is required", install)


def _fits(installed: str, wanted: str) -> bool:
    """Whether a version is within the bounds of a requirement, by its numbers alone."""
    bounds = re.findall(r"(>=|<)([\d.]+)", wanted)
    return all((_numbers(installed) < _numbers(bound)) == (sign == "<") for sign, bound in bounds)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])]


def _machine() -> Iterator[Finding]:
    import torch

    usable = len(os.sched_getaffinity(0))
    yield Finding("machine", "CPUs", f"{usable} of {os.cpu_count()} usable")
    unit = torch.backends.cpu.get_cpu_capability()
    plain = unit == "DEFAULT"
    hint = "images are resized several times slower than with AVX2" if plain else ""
    yield Finding("machine", "vector units", unit, "note" if plain else "good", hint)
    yield Finding("machine", "accelerators", _accelerators(torch), "good")
    backends = [name for name in ("nccl", "gloo", "mpi") if _has_backend(torch, name)]
    yield Finding(
        "machine", "torch.distributed", ", ".join(backends) or "not available", "good" if backends else "note"
    )
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files < _FEW_FILES
    hint = f"{_more_files(most)}: each open shard, worker and kept batch takes some" if few else ""
    yield Finding("machine", "open files", f"at most {files:,}", "note" if few else "good", hint)


def _more_files(most: int) -> str:
    """Return how to raise the limit of open files, where `most` is as far as a user may."""
    if most != resource.RLIM_INFINITY and most < _FEW_FILES:
        return (
            "`nofile` in /etc/security/limits.conf, or `docker run --ulimit nofile=65536`, raises what a user may have"
        )
    return f"`ulimit -n {65536 if most == resource.RLIM_INFINITY else min(most, 65536)}`"


def _accelerators(torch: Any) -> str:
    if not torch.cuda.is_available():
        return "none that torch sees"
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _has_backend(torch: Any, name: str) -> bool:
    distributed = torch.distributed
    return bool(distributed.is_available() and getattr(distributed, f"is_{name}_available")())


def _workers() -> Iterator[Finding]:
    """What worker processes need: memory without a name, and its pages."""
    try:
        file = os.memfd_create("orchdata-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, 1 << 20)
            os.pwrite(file, b"x", (1 << 20) - 1)
        finally:
            os.close(file)
    except OSError as error:
        yield Finding("workers", "shared memory", f"{error}", "broken", "worker processes need memfd_create")
        return
    yield Finding("workers", "shared memory", "memfd_create works; /dev/shm is not used")


def _media() -> Iterator[Finding]:
    import simplejpeg
    import soundfile
    from PIL import features

    turbo = features.version("libjpeg_turbo") if features.check("libjpeg_turbo") else None
    yield Finding(
        "media", "JPEG", f"libjpeg-turbo of simplejpeg {simplejpeg.__version__}; Pillow's is {turbo or 'plain'}"
    )
    webp = features.check("webp")
    hint = "" if webp else f"the wheel has it: {way_out('PIL')}"
    yield Finding("media", "WebP", "yes" if webp else "not in this Pillow", "good" if webp else "missing", hint)
    formats = soundfile.available_formats()
    lost = [name for name in ("WAV", "FLAC", "OGG", "MP3") if name not in formats]
    libraries = f"libsndfile {soundfile.__libsndfile_version__}" + (f", without {', '.join(lost)}" if lost else "")
    hint = f"the wheel has a newer libsndfile: {way_out('soundfile')}" if lost else ""
    yield Finding("media", "audio", libraries, "missing" if lost else "good", hint)
    yield _ffmpeg()


def _ffmpeg() -> Finding:
    try:
        av = importlib.import_module("av")
        return Finding("media", "FFmpeg", f"{av.ffmpeg_version_info}, of PyAV {av.__version__}")
    except Exception:  # noqa: BLE001 - what is wrong with it is under features
        return Finding(
            "media", "FFmpeg", "that of PyAV, without which no video is read; all else needs none", "missing"
        )


def _resizer() -> Iterator[Finding]:
    """The default resizer against torchvision, bit by bit, and Pillow."""
    import numpy as np
    import torch

    from orchdata.loaders.modalities.image_decode import pass_order, resized

    noise = np.random.default_rng(0).integers(0, 256, (97, 131, 3), np.uint8)
    targets = [(56, 84), (140, 112), (131, 28)]
    ours = [resized(noise, target, "torchvision", "bicubic") for target in targets]
    pillow = [resized(noise, target, "pillow", "bicubic") for target in targets]
    most = max(int(np.abs(a.astype(int) - b).max()) for a, b in zip(ours, pillow, strict=True))
    yield Finding("resizer", "torchvision's against Pillow's", f"values differ by up to {most}/255 on noise")
    yield Finding("resizer", "Pillow's passes", pass_order())
    try:
        theirs = importlib.import_module("torchvision.transforms.v2.functional")
    except Exception as error:  # noqa: BLE001 - it fails in many ways where its torch is another
        yield Finding("resizer", "torchvision's", f"not compared: {type(error).__name__}: {error}", "note")
        return
    image = torch.from_numpy(noise).permute(2, 0, 1)
    bicubic = theirs.InterpolationMode.BICUBIC
    equal = all(
        np.array_equal(
            resized_image, theirs.resize(image, list(target[::-1]), bicubic, antialias=True).permute(1, 2, 0).numpy()
        )
        for resized_image, target in zip(ours, targets, strict=True)
    )
    verdict: Verdict = "good" if equal else "broken"
    hint = "" if equal else "models see other pixels than with their own processors: please report these versions"
    yield Finding("resizer", "torchvision's", "equal to the bit" if equal else "differs", verdict, hint)


def _kernels() -> Iterator[Finding]:
    """Count the compiled kernels, which numba keeps next to their source or in NUMBA_CACHE_DIR."""
    import numba

    import orchdata.native.permutation as kernel

    folder = Path(getattr(numba.config, "CACHE_DIR", "") or Path(kernel.__file__).parent)
    kept = sum(1 for _ in folder.rglob("*.nbc"))
    made = next(each for each in (folder, *folder.absolute().parents) if each.exists())  # numba makes the others
    good = os.access(made, os.W_OK)
    hint = "" if good else "set NUMBA_CACHE_DIR to a writable folder: otherwise each process compiles what is missing"
    yield Finding("kernels", "compiled", f"{kept} in {folder}", "good" if good else "note", hint)


def _cache() -> Iterator[Finding]:
    from orchdata.loaders.errors import StorageError
    from orchdata.loaders.storage.cache import CACHE_VARIABLE, CacheFolder

    try:
        root = CacheFolder().make_root()
        with tempfile.NamedTemporaryFile(dir=root):
            pass
        anyone = root.stat().st_mode & stat.S_IWOTH
    except (OSError, StorageError) as error:
        yield Finding("cache", "folder", str(error), "broken", f"set {CACHE_VARIABLE} to a folder that can be written")
        return
    free = shutil.disk_usage(root).free
    used = sum(map(_size, root.rglob("*")))
    low = free < _LOW_DISK
    hint = f"make room, or set {CACHE_VARIABLE}" if low else ""
    if anyone and not low:
        hint = (
            f"everyone can write to it, and so decide what is trained on: `chmod o-w {root}`, or set {CACHE_VARIABLE}"
        )
    text = f"{root}: {human_bytes(used)} used, {human_bytes(free)} free"
    yield Finding("cache", "folder", text, "note" if hint else "good", hint)


def _size(file: Path) -> int:
    """Return the bytes of a file; 0 if it is no regular file, or no longer there: other jobs remove files."""
    try:
        status = file.lstat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


_LOOKS: Final = (_versions, _machine, _media, _resizer, _kernels, _workers, _cache, _features)


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    before = ""
    for finding in findings:
        if finding.about != before:
            console.print(Text(finding.about, style="bold"))
            before = finding.about
        console.print(Text(f"  {finding.verdict:<8}", style=_STYLES[finding.verdict]), end="")
        console.print(Text(f"{finding.name}: {finding.found}"), soft_wrap=True)
        if finding.hint:
            console.print(Text(f"          {finding.hint}", style="dim"), soft_wrap=True)
    broken = sum(finding.verdict == "broken" for finding in findings)
    words = "all that loading needs is here" if not broken else f"{broken} broken"
    console.print(Text(words, style="bold" if not broken else "bold red"))
