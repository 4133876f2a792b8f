"""`python -m benchmarks.loading.child DESCRIPTOR`: call what a pickle on stdin says, and send the result."""

from __future__ import annotations

import os
import pickle
import sys


def main(descriptor: int) -> None:
    answer: tuple[object, str]
    try:
        function, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 - of this process's parent
        answer = function(*arguments), ""
    except Exception as error:  # noqa: BLE001 - a loader that fails is a row of the table, with any error
        text = " ".join(str(error).split())
        answer = None, f"{type(error).__name__}: {text}"[:300]
    with os.fdopen(descriptor, "wb") as out:
        pickle.dump(answer, out)


if __name__ == "__main__":
    main(int(sys.argv[1]))
