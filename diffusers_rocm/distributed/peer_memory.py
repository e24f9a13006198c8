"""An all-to-all by copies out of the other ranks' memory, which occupy no multiprocessor.

A kernel of NCCL beside a product takes multiprocessors from it, and over fast links costs what it hides; a copy engine
takes none. So each rank lays what it sends where the others reach it, in torch's symmetric memory, and they fetch it.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from .beside import beside


# Bytes of a message that is sent so: it lies there a second time.
MOST = 256 << 20

# Of each group, the tensors that its ranks reach, and torch's handles of them. All of them stay: a graph that was
# captured has their addresses.
_shared: dict[str, list[tuple[Tensor, Any]]] = {}
# Of each group, what is on its way.
_coming: dict[str, "_Coming"] = {}


class _Coming(dist.Work):
    """A message on its way: the stream that waits for it goes on when it is there."""

    def __init__(self, arrive: Callable[[], Tensor]):
        super().__init__()
        self.arrive: Callable[[], Tensor] | None = arrive

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.arrive is not None:
            self.arrive()
        self.arrive = None
        return True


def _memory(group: str, size: int, device: torch.device) -> Any:
    """The handle of so many bytes of every rank, which all ranks ask for alike."""
    held = _shared.setdefault(group, [])
    if not held or held[-1][0].numel() < size:
        buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
        held.append((buffer, symmetric.rendezvous(buffer, group)))
    return held[-1][1]


def _exchange(x: Tensor, send: Sequence[int], receive: Sequence[int], slot: int, group: str) -> Tensor:
    process_group = dist.distributed_c10d._resolve_process_group(group)
    timeout = process_group._get_backend(x.device).options._timeout // timedelta(milliseconds=1)
    world, rank = len(send), process_group.rank()
    memory = _memory(group, world * slot * x.itemsize, x.device)
    if group in _coming:
        _coming.pop(group).wait()  # the others have fetched the last message
    received = x.new_empty(sum(receive))
    into, parts = received.split(receive), x.split(send)
    mine = memory.get_buffer(rank, (world, slot), x.dtype)
    if min(send) == slot:
        mine.view(-1).copy_(x)
    else:
        for to, part in enumerate(parts):
            mine[to, : part.numel()].copy_(part)
    into[rank].copy_(parts[rank])

    def fetch() -> None:
        memory.barrier(channel=0, timeout_ms=timeout)
        for step in range(1, world):
            peer = (rank + step) % world
            into[peer].copy_(memory.get_buffer(peer, (receive[peer],), x.dtype, rank * slot))
        memory.barrier(channel=1, timeout_ms=timeout)

    _coming[group] = _Coming(beside(fetch, received))
    torch._C._distributed_c10d._register_work(received, _coming[group])
    return received


_exchange_op = torch.library.custom_op("diffusers_rocm::exchange_by_copies", _exchange, mutates_args=())


@_exchange_op.register_fake
def _(x, send, receive, slot, group):
    return x.new_empty(sum(receive))


def exchange_by_copies(
    x: Tensor, send: Sequence[int], receive: Sequence[int], largest: int, group: dist.ProcessGroup
) -> Tensor:
    """`exchange_in_group` in compiled code, which the compiler knows for a message by the wait for it.

    Args:
        largest: elements of the largest part that any rank sends to another.
    """
    received = _exchange_op(x, list(send), list(receive), largest, group.group_name)
    return torch.ops._c10d_functional.wait_tensor(received)
