"""CUDA's driver, for what torch has no functions for."""

import ctypes
import functools
from typing import Any


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(function: str, *args: Any) -> None:
    """Raises OSError: there is no driver. RuntimeError: it has no such function, or refuses."""
    driver = _driver()
    if not hasattr(driver, function):
        raise RuntimeError(f"CUDA's driver has no {function}")
    code = getattr(driver, function)(*args)
    if code:
        raise RuntimeError(f"{function} of CUDA's driver answers {code}")
