"""`python scripts/see_packages.py ENVIRONMENT`: show this environment's packages to another one, after its own.

pip counts them as installed there, so that what is installed in that environment brings no second torch.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"


def main(environment: Path) -> None:
    python = str(environment / "bin" / "python")
    theirs = subprocess.run([python, "-c", _PACKAGES], check=True, capture_output=True, text=True).stdout.strip()
    ours = sysconfig.get_path("purelib")
    # Not the path alone: what is installed for editing is found by .pth files of our folder, which this reads too.
    line = f"import site; site.addsitedir({ours!r})\n"
    (Path(theirs) / "zz_orchdata.pth").write_text(line)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
