"""`python scripts/see_packages.py ENVIRONMENT [FOLDER]...`: show this environment's packages to another one.

They come after its own. pip counts them as installed there, so that what is installed in that environment brings no
second torch. Folders with modules of ours may follow.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"


def main(environment: Path, *folders: str) -> None:
    python = str(environment / "bin" / "python")
    theirs = subprocess.run([python, "-c", _PACKAGES], check=True, capture_output=True, text=True).stdout.strip()
    site_folders = [sysconfig.get_path("purelib"), *map(os.path.abspath, folders)]
    # Not the path alone: what is installed for editing is found by .pth files of our folder, which this reads too.
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site_folders]
    (Path(theirs) / "zz_orchdata.pth").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
