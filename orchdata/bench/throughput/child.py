"""`python -m orchdata.bench.throughput.child FILE DESCRIPTOR`: call what a pickle holds, and send what comes of it."""

from __future__ import annotations

import os
import pickle
import sys


def main(path: str, descriptor: int) -> None:
    answer: tuple[object, str]
    try:
        with open(path, "rb") as file:
            function, arguments = pickle.load(file)  # noqa: S301 - of this process's parent
        answer = function(*arguments), ""
    except Exception as error:  # noqa: BLE001 - a loader that fails is a row of the table, with any error
        text = " ".join(str(error).split())
        answer = None, f"{type(error).__name__}: {text}"[:300]
    with os.fdopen(descriptor, "wb") as out:
        pickle.dump(answer, out)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
