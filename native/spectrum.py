"""Complex spectra -> their real and imaginary parts apart, as vectors take them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel


@kernel
def split_complex(values: NDArray[np.float32], real: NDArray[np.float32], imaginary: NDArray[np.float32]) -> None:
    """Write the parts of complex numbers.

    Args:
        values: (2 * n,), real and imaginary parts in turn.
        real, imaginary: (n,), written in whole.
    """
    for at in range(np.uint64(len(real))):
        real[at] = values[at + at]
        imaginary[at] = values[at + at + np.uint64(1)]
