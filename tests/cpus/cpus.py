"""The tests that compare floats, and the golden values that integers decide, under several instruction sets:
`make test-cpus`.

    each set --its variables--> pytest -m "cpus and not slow" --> passed under each

Further arguments are pytest's, in place of these: `make test-cpus ARGS="tests/loaders"`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from platform import machine

# Of x86-64: SSE2 to SSE4, which every such processor has, and AVX2. On others, only the portable kernels.
_X86: Mapping[str, Mapping[str, str]] = {
    "baseline": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "OPENBLAS_CORETYPE": "Prescott",
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "",
    },
}
_OTHER: Mapping[str, Mapping[str, str]] = {
    "baseline": {"ATEN_CPU_CAPABILITY": "default", "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
}
_ABOVE_AVX2 = ("AVX512", "X86_V4")

_CAPABILITY = "import torch; print(torch.backends.cpu.get_cpu_capability())"
_FEATURES = """
try:
    from numpy._core._multiarray_umath import __cpu_dispatch__
except ImportError:
    from numpy.core._multiarray_umath import __cpu_dispatch__
print(*__cpu_dispatch__)
"""


def instruction_sets() -> dict[str, dict[str, str]]:
    """Environment variables of each set that this machine has: "native" is the machine's own, without any."""
    is_x86 = machine() in ("x86_64", "AMD64")
    has_avx2 = _printed(_CAPABILITY)[0] in ("AVX2", "AVX512")
    features = _printed(_FEATURES)
    found: dict[str, dict[str, str]] = {"native": {}}
    for name, variables in (_X86 if is_x86 else _OTHER).items():
        if name == "avx2" and not has_avx2:
            continue
        # NumPy names its own features, other ones in each release, and warns of names that it does not know.
        left_out = [each for each in features if name == "baseline" or each.startswith(_ABOVE_AVX2)]
        found[name] = {**variables, "NPY_DISABLE_CPU_FEATURES": " ".join(left_out)}
    return found


def _printed(program: str, variables: Mapping[str, str] | None = None) -> list[str]:
    environment = os.environ | dict(variables or {})
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0 where all tests have passed."""
    chosen, failed = list(arguments) or ["-m", "cpus and not slow"], []
    for name, variables in instruction_sets().items():
        print(f"== {name} (torch: {_printed(_CAPABILITY, variables)[0]}): pytest {' '.join(chosen)}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *chosen]
        if subprocess.run(command, env=os.environ | variables, check=False).returncode:
            failed.append(name)
    print(f"Tests failed under: {', '.join(failed)}" if failed else "Tests passed under every instruction set")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
