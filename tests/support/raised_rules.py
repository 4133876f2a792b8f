"""Rules that judge samples otherwise, as those of another release, and small data whose verdicts anyone can work out.

Each text begins with a letter. Rules refuse some letters, and lengthen the texts of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from shard_factory import write_shard

import orchdata as od
from orchdata.loaders.errors import FieldError
from orchdata.loaders.samples import compose, values
from orchdata.loaders.versions import RULES

LETTERS = "abcdefgh"


@dataclass(frozen=True)
class Rules:
    """Attributes: refused: letters; longer: letter -> words that are added to a text."""

    number: int
    refused: str = ""
    longer: Mapping[str, int] = field(default_factory=dict)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Everything inside judges by these rules."""

        def text_of(*args: Any) -> str:
            text = values.text_of(*args)
            letter = text[:1]
            if letter in self.refused:
                raise FieldError(args[0].field, f"rules {self.number} refuse {letter!r}")
            return text + " and" * self.longer.get(letter, 0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(RULES, "text", 1000 + self.number)
            patch.setattr(compose, "text_of", text_of)
            yield


class RuledData:
    """Texts in a folder: in three tars, and in another one; `letters` has the letter of each, by file and key."""

    def __init__(self, folder: Path) -> None:
        self.letters: dict[tuple[str, str], str] = {}
        self.folder = folder
        for shard in range(3):
            samples = []
            for number in range(14):
                key = f"s{shard}{number:02d}"
                letter = LETTERS[(5 * number + 3 * shard) % 8]
                self.letters[f"t{shard}.tar", key] = letter
                samples.append(
                    {"__key__": key, "txt": f"{letter} {'word ' * (1 + (7 * number + shard) % 11)}".encode()}
                )
            write_shard(folder / f"t{shard}.tar", samples)
        samples = []
        for number in range(17):
            letter = LETTERS[3 * number % 8]
            self.letters["other.tar", f"r{number}"] = letter
            samples.append({"__key__": f"r{number}", "txt": f"{letter} {'more ' * (1 + 5 * number % 7)}".encode()})
        write_shard(folder / "other.tar", samples)

    def tars(self, **text: Any) -> od.ShardDataset:
        """Made again: rules may have changed."""
        recipe = od.Recipe(image=None, audio=None, text=od.TextPreprocessor(**text))
        return od.ShardDataset(str(self.folder / "t*.tar"), recipe)

    def others(self) -> od.ShardDataset:
        return od.ShardDataset(str(self.folder / "other.tar"), od.Recipe(image=None, audio=None))

    def usable(self, rules: Rules) -> set[tuple[str, str]]:
        """(file, key) of what is usable."""
        return {name for name, letter in self.letters.items() if letter not in rules.refused}
