"""Types of numpy arrays, for annotations."""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Floats"]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
