"""What becomes of a data set where a package is broken: it is indexed, loaded and verified in processes that find a
stand-in first on sys.path, whose import raises.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RAISES = {"ImportError": 'ImportError("planted")', "RuntimeError": 'RuntimeError("planted")'}
ENGINES: dict[str, dict[str, Any]] = {
    "inline": {"num_threads": 0},
    "threads": {"num_threads": 2},
    "processes": {"num_workers": 1},
}
SAMPLES = 3
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor %}"


def main(folder: Path, cases: list[list[str]]) -> None:
    names = sorted({name for _, _, name in cases})
    (folder / "whole").mkdir(parents=True)
    in_fork(folder, "prepare", "whole", lambda: [prepare(folder, name) for name in names])
    for number, (package, error, name) in enumerate(cases):
        broken = folder / f"broken{number}"
        (broken / package).mkdir(parents=True)
        (broken / package / "__init__.py").write_text(f"raise {RAISES[error]}\n")
        found = {"case": [package, error, name]}
        for step, path, call in (
            ("index", broken.name, lambda name=name: indexed(folder, name)),
            ("load", broken.name, lambda name=name: loaded(folder, name)),
            ("after", "whole", lambda name=name: sound(folder, name)),
        ):
            cache = "good" if step == "load" else f"cache{number}"
            found[step] = in_fork(folder, cache, path, call, package)
        print(json.dumps(found), flush=True)


def in_fork(folder: Path, cache: str, path: str, call: Callable[[], Any], package: str = "") -> Any:
    """What a call gives in a process of its own, which finds `path` first."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.environ["ORCHDATA_CACHE"] = str(folder / ("good" if cache == "prepare" else cache))
        os.environ["PYTHONPATH"] = os.pathsep.join((str(folder / path), os.environ["PYTHONPATH"]))
        sys.path.insert(0, str(folder / path))
        for name in [each for each in sys.modules if each.partition(".")[0] == package]:
            del sys.modules[name]
        try:
            warnings.simplefilter("ignore")
            said = json.dumps(call())
        except BaseException:
            said = json.dumps(traceback.format_exc())
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        found = json.loads(file.read())
    os.waitpid(child, 0)
    return found


def prepare(folder: Path, name: str) -> None:
    """A shard, its recipe, and its index, while all is whole."""
    from shard_factory import audio, chat, jpeg, write_shard

    import orchdata as od
    from orchdata.loaders.index.build import build_index

    fields: dict[str, Any] = {"txt": b"some text"}
    recipe = od.Recipe()
    if name == "media":
        fields |= {"jpg": jpeg(60, 40), "wav": audio(0.5, 22_050)}
    elif name == "video":
        from video_clips import clip

        fields["mp4"], recipe = clip(), od.Recipe(video=od.VideoPreprocessor())
    elif name == "chat":
        import chat_templates

        trained = chat_templates.hf_tokenizer()
        text = od.TextPreprocessor(trained, template=od.ChatTemplate.from_jinja(TEMPLATE))
        fields, recipe = {"json": chat("a question", "an answer")}, od.Recipe(text=text)
    else:
        import hf_processors

        fields["jpg"] = jpeg(60, 40)
        recipe = od.Recipe(image=od.hf.recipe(hf_processors.processor("qwen2_vl")).image)
    shard = write_shard(folder / f"{_file(name)}.tar", [{"__key__": f"k{at}", **fields} for at in range(SAMPLES)])
    (folder / f"{_file(name)}.recipe").write_bytes(pickle.dumps((shard, recipe)))
    assert not len(build_index([shard], recipe).bad_rows())


def _file(name: str) -> str:
    return "".join(each for each in name if each.isalnum())


def _type_and_message(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error)]


def _given(folder: Path, name: str) -> tuple[str, Any]:
    shard, recipe = pickle.loads((folder / f"{_file(name)}.recipe").read_bytes())
    return shard, recipe


def indexed(folder: Path, name: str) -> list[str] | str:
    """What building the index raises."""
    try:
        import orchdata as od

        shard, recipe = _given(folder, name)
        od.ShardDataset(shard, recipe=recipe).index()
    except Exception as error:
        return _type_and_message(error)
    return "built"


def loaded(folder: Path, name: str) -> dict[str, Any]:
    """What loading raises, by engine and policy, and what verifying does."""
    found: dict[str, Any] = {}
    for policy in ("raise", "skip"):
        for engine, options in ENGINES.items():
            found[f"{engine} {policy}"] = _attempt(folder, name, policy, options)
    try:
        import orchdata as od

        shard, recipe = _given(folder, name)
        index = od.ShardDataset(shard, recipe=recipe).index()
        from orchdata.verifying import verify

        found["verify"] = [str(failure) for failure in verify(index, recipe, jobs=1).failures]
    except Exception as error:
        found["verify"] = _type_and_message(error)
    return found


def _attempt(folder: Path, name: str, policy: str, options: dict[str, Any]) -> Any:
    loader = None
    try:
        shard, recipe = _given(folder, name)
        import orchdata as od

        loader = od.DataLoader(od.ShardDataset(shard, recipe=recipe), batch_size=1, on_error=policy, **options)
        count = sum(1 for _ in loader)
    except Exception as error:
        failures = 0 if loader is None else loader.stats()["failures"]["count"]
        return [*_type_and_message(error), failures]
    return [count, loader.stats()["failures"]["count"]]


def sound(folder: Path, name: str) -> list[int]:
    """Rows, and bad rows, of the index that is built in the cache that a broken build has left."""
    shard, recipe = _given(folder, name)
    from orchdata.loaders.index.build import build_index

    index = build_index([shard], recipe)
    return [len(index), len(index.bad_rows())]


if __name__ == "__main__":  # worker processes import this file too, and are to find what is broken by themselves
    import numba  # noqa: F401 - what takes long to import, and nothing of ours, is there before the forks
    import pyarrow  # noqa: F401

    torch.set_num_threads(1)
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
