"""Compares numbers that differ by the order of their sums alone."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_near(got: Any, wanted: Any, err_msg: str = "", slack: float = 1.0) -> None:
    """Each number is off by at most 2e-5 of the largest wanted one, as float32 is with another order of sums.

    The order depends on the instruction set and, in torch, on the processor. `slack`: the wanted ones are less exact.
    """
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5 * slack * np.abs(wanted).max(), err_msg=err_msg)
