"""Complex spectra -> separate real and imaginary parts, for vector instructions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel


@kernel
def split_complex(values: NDArray[np.float32], real: NDArray[np.float32], imaginary: NDArray[np.float32]) -> None:
    """Write the parts of complex numbers.

    Args:
        values: (2 * n,), alternating real and imaginary parts.
        real, imaginary: (n,), written.
    """
    for at in range(np.uint64(len(real))):
        real[at] = values[at + at]
        imaginary[at] = values[at + at + np.uint64(1)]
