"""Where a forward exchanges something, for those who note it or measure it."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from ..distributed import collectives


# Name -> where it is called, and which of its arguments this rank gives.
_CALLS = {
    "all-reduce": (dist, "all_reduce", 0),
    "all-gather": (collectives, "_all_gather", 1),
    "all-to-all": (dist, "all_to_all_single", 1),
    "broadcast": (dist, "broadcast", 0),
}


@contextlib.contextmanager
def collective_calls(called: Callable[..., Any]) -> Iterator[None]:
    """In here, in place of collectives, `called(name, bytes that this rank gives away, original, *args, **kwargs)`."""

    def instead(name: str, given: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sent = args[given].nbytes
        if name == "all-to-all":
            sent -= args[3][dist.get_rank(kwargs["group"])] * args[given].element_size()  # what stays here
        return called(name, sent, original, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name, (owner, attribute, given) in _CALLS.items():
            call = functools.partial(instead, name, given, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, call))
        yield
