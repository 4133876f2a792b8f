"""How tars become a data set of Energon, and an encoder that leaves its samples as bytes. Imports no decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final


def task_encoder(pack: Callable[[Sequence[Any]], Any]) -> Any:
    """An encoder that leaves samples as bytes, and makes batches of their fields by `pack`."""
    from megatron.energon import Cooker, DefaultTaskEncoder, stateless

    def cook(sample: dict[str, Any]) -> Any:
        return {**sample, "__url__": sample["__shard__"]}

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
        decoder = None  # bytes stay bytes
        cookers: Final = [Cooker(stateless(cook))]

        def encode_sample(self, sample: Any) -> Any:
            return sample

        def batch(self, samples: Sequence[Any]) -> Any:
            return pack(samples)

        def encode_batch(self, batch: Any) -> Any:
            return batch

    return Encoder()


def prepare_tars(urls: Sequence[str], folder: Path) -> None:
    """Write links to the tars, and the index that energon expects next to them."""
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    names = []
    for number, url in enumerate(urls):
        names.append(f"{number:06d}.tar")
        (folder / names[-1]).symlink_to(Path(url).resolve())
    WebdatasetPreparator.prepare_dataset(EPath(str(folder)), names, split_parts_ratio=[("train", 1.0)], workers=1)
    described = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (folder / ".nv-meta" / "dataset.yaml").write_text(described)
