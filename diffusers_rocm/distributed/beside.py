"""What is sent while the rank goes on computing.

Each function here begins a collective and answers another function, which waits for it and answers what came.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist


# For each device a stream, and a row whose softmax is a kernel of one block, some microseconds long.
_side: dict[torch.device, tuple[torch.Stream, torch.Tensor]] = {}

# For each device, a stream of copies that no kernel makes.
_copying: dict[torch.device, torch.Stream] = {}


def beside(collective: Callable[..., Any], received: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Run a collective into `received` beside the computation that follows; a function that waits, and answers it.

    An attention kernel that fills the device first keeps the collective out to its own end, and nothing is hidden
    (docs/performance.md). So on an accelerator the computation is held for the moment that the collective needs to
    begin on a stream of ours.
    """
    if received.device.type == "cpu":
        finish = collective(async_op=True).wait
    else:
        module = torch.get_device_module(received.device)
        if received.device not in _side:
            _side[received.device] = module.Stream(received.device), torch.zeros(1, 1 << 14, device=received.device)
        here, (aside, row) = module.current_stream(received.device), _side[received.device]
        aside.wait_stream(here)
        with module.stream(aside):
            begins = aside.record_event()
            collective()
            ends = aside.record_event()
        here.wait_event(begins)
        row.softmax(-1)
        finish = functools.partial(_wait_for, ends, received.device)

    def wait() -> torch.Tensor:
        nonlocal collective, finish
        finish()
        collective = finish = None  # they would keep what was sent
        return received

    return wait


def copy_beside(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> Callable[[], None]:
    """Begin to copy into the first of each pair what is in the second, one after the other: so they are fastest.

    Returns:
        A function that waits.
    """
    module = torch.get_device_module(device)
    if device not in _copying:
        _copying[device] = module.Stream(device)
    _copying[device].wait_stream(module.current_stream(device))
    with module.stream(_copying[device]):
        for into, x in pairs:
            into.copy_(x, non_blocking=True)
        ends = _copying[device].record_event()
    return functools.partial(_wait_for, ends, device)


def _wait_for(event: torch.Event, device: torch.device) -> None:
    torch.get_device_module(device).current_stream(device).wait_event(event)


def pass_on(x: torch.Tensor, incoming: int, rank: int, world: int, group: str) -> Callable[[], torch.Tensor]:
    """Begin to send `x` [n], contiguous, to the next rank and to receive [incoming] from the previous one.

    An all-to-all in which every rank has one receiver, which costs the host less than a batch of messages.

    Returns:
        A function that waits, and answers what came.
    """
    send, receive = [0] * world, [0] * world
    send[(rank + 1) % world], receive[(rank - 1) % world] = x.numel(), incoming
    return begin_exchange(x, send, receive, dist.distributed_c10d._resolve_process_group(group))


def send_to_all(x: torch.Tensor, incoming: Sequence[int], rank: int, group: str) -> Callable[[], torch.Tensor]:
    """Begin to send `x` [n], contiguous, to every other rank, and to receive `incoming[i]` elements from each rank i.

    All links are in use at once, where a gather goes round a ring.

    Returns:
        A function that waits, and answers what came, in rank order and without this rank's own.
    """
    receive = [0 if index == rank else count for index, count in enumerate(incoming)]
    send = [0 if index == rank else x.numel() for index in range(len(incoming))]
    process_group = dist.distributed_c10d._resolve_process_group(group)
    return begin_exchange(x.repeat(len(incoming) - 1), send, receive, process_group)


def begin_exchange(
    x: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> Callable[[], torch.Tensor]:
    """Begin an all-to-all as `exchange_in_group` makes it.

    Returns:
        A function that waits, and answers what came.
    """
    received = x.new_empty(sum(receive))
    return beside(functools.partial(dist.all_to_all_single, received, x, receive, send, group=group), received)
