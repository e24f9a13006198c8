"""Kernels of Triton: each is tried before it is used."""

import importlib.util
import logging
from collections.abc import Callable
from typing import TypeVar


K = TypeVar("K", bound=Callable)

logger = logging.getLogger(__name__)


def kernel_if_right(load: Callable[[], K], is_right: Callable[[K], bool], what: str) -> K | None:
    """A kernel, where Triton is there, can compile it, and then computes the same as torch's operations.

    Args:
        load: imports it.
        is_right: runs it, and compares.
        what: torch's operations do otherwise, for the log: "parts are summed", say.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        kernel = load()
        if is_right(kernel):
            return kernel
        reason = "Triton's kernel is wrong here"
    except Exception as error:  # it needs a C compiler
        reason = f"Triton cannot compile: {error}"
    logger.warning(f"{what} by torch's operations, since {reason}")
    return None
