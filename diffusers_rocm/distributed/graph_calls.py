"""The call of a model that is captured as a graph, or is like one that will be, and messages of it on their way."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Coming(dist.Work):
    """A message on its way: the stream that waits for it goes on when it is there."""

    def __init__(self, arrive: Callable[[], None]):
        super().__init__()
        self.arrive: Callable[[], None] | None = arrive

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.arrive is not None:
            self.arrive()
        self.arrive = None
        return True


def come_to(received: torch.Tensor, arrive: Callable[[], None]) -> Callable[[], torch.Tensor]:
    """What waits until something has come, and answers it."""

    def wait() -> torch.Tensor:
        arrive()
        return received

    return wait


def register(received: torch.Tensor, arrive: Callable[[], None]) -> Coming:
    """Have torch's `wait_tensor(received)` call `arrive`."""
    coming = Coming(arrive)
    torch._C._distributed_c10d._register_work(received, coming)
    return coming


_numbers = itertools.count()


@dataclass
class Call:
    """A call of a model, captured or to be captured next: which place each group's last message took."""

    captured: bool
    turn: dict[str, int] = field(default_factory=dict)
    # torch's handle of it, until the message is fetched.
    taken: dict[str, Any] = field(default_factory=dict)
    # What is not waited for yet.
    coming: dict[str, Coming] = field(default_factory=dict)
    # Slices of tokens on their way (`peer_products`).
    slices: dict[int, Any] = field(default_factory=dict)
    # Whether copies have begun, beside what is computed.
    by_copies: bool = False
    # Which call of this process it is.
    number: int = field(default_factory=lambda: next(_numbers))


class _OfThread(threading.local):
    call: Call | None = None


_current = _OfThread()


def current_call() -> Call | None:
    """The innermost such call of this thread; None outside of them."""
    return _current.call


@contextlib.contextmanager
def call_of_a_graph(captured: bool) -> Iterator[None]:
    """Around a call of a model: captured, its messages go by copies, if they can; before it is, places are made.

    All ranks of a group call it alike, at least once before they capture.
    """
    before, _current.call = _current.call, Call(captured)
    try:
        yield
    finally:
        _current.call = before
