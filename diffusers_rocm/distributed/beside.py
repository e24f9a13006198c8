"""What is sent while the rank goes on computing.

Each function here begins a collective and answers another function, which waits for it and answers what came.

A kernel that fills the device keeps a collective out to its own end, if it comes first, and nothing is hidden
(docs/performance.md). So on an accelerator the computation is held for the moment that the collective needs to begin.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import host_memory
from .graph_calls import come_to, register


# For each device, a stream of collectives.
_side: dict[torch.device, torch.Stream] = {}

# For each device, a row whose softmax is a kernel of one block, some microseconds long.
_rows: dict[torch.device, torch.Tensor] = {}

# For each device, a stream of copies that no kernel makes.
_copying: dict[torch.device, torch.Stream] = {}


def beside(collective: Callable[..., Any], received: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Run a collective into `received` beside the computation that follows; a function that waits, and answers it."""
    if received.device.type == "cpu":
        finish = collective(async_op=True).wait
    else:
        module = torch.get_device_module(received.device)
        if received.device not in _side:
            _side[received.device] = module.Stream(received.device)
        here, aside = module.current_stream(received.device), _side[received.device]
        aside.wait_stream(here)
        with module.stream(aside):
            begins = aside.record_event()
            collective()
            ends = aside.record_event()
        here.wait_event(begins)
        _hold(received.device)
        finish = functools.partial(_wait_for, ends, received.device)

    def wait() -> torch.Tensor:
        nonlocal collective, finish
        finish()
        collective = finish = None  # they would keep what was sent
        return received

    return wait


def _hold(device: torch.device) -> None:
    if device not in _rows:
        _rows[device] = torch.zeros(1, 1 << 14, device=device)
    _rows[device].softmax(-1)


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
    memory = host_memory.of_captured_call(group)
    if memory is not None:
        received = x.new_empty(sum(receive))
        return come_to(received, memory.begin(x, received.split(receive)))
    process_group = dist.distributed_c10d._resolve_process_group(group)
    return begin_exchange(x.repeat(len(incoming) - 1), send, receive, process_group)


def begin_exchange(
    x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Callable[[], torch.Tensor]:
    """Begin an all-to-all as `exchange_in_group` makes it.

    Returns:
        A function that waits, and answers what came; compiled code waits where that is read.
    """
    if torch.compiler.is_compiling():
        coming = _ours.begin_all_to_all(x, list(receive), list(send), group.group_name)
        return functools.partial(_functional.wait_tensor, coming)
    memory = host_memory.of_captured_call(group.group_name)
    if memory is not None:
        return come_to(*memory.exchange(x, receive, send))
    received = x.new_empty(sum(receive))
    return beside(functools.partial(dist.all_to_all_single, received, x, receive, send, group=group), received)


# In compiled code a collective begins and ends as torch's functional ones do, which the compiler moves apart.

_library = torch.library.Library("diffusers_rocm", "FRAGMENT")
_library.define("begin_all_to_all(Tensor x, SymInt[] receive, SymInt[] send, str group) -> Tensor")
_library.define("begin_all_gather(Tensor x, int world, str group) -> Tensor")
_ours, _functional = torch.ops.diffusers_rocm, torch.ops._c10d_functional


def _all_to_all(x: torch.Tensor, receive: Sequence[int], send: Sequence[int], group: str) -> torch.Tensor:
    memory = host_memory.of_captured_call(group)
    if memory is not None:
        received, arrive = memory.exchange(x, receive, send)
        register(received, arrive)
        return received
    return _held(_functional.all_to_all_single(x, receive, send, group))


def _all_gather(x: torch.Tensor, world: int, group: str) -> torch.Tensor:
    memory = host_memory.of_captured_call(group)
    if memory is not None:
        received, arrive = memory.gather(x)
        register(received, arrive)
        return received
    return _held(_functional.all_gather_into_tensor(x, world, group))


def _held(coming: torch.Tensor) -> torch.Tensor:
    if coming.device.type != "cpu":
        _hold(coming.device)
    return coming


for _device in ("CUDA", "CPU"):
    _library.impl("begin_all_to_all", _all_to_all, _device)
    _library.impl("begin_all_gather", _all_gather, _device)


@torch.library.register_fake("diffusers_rocm::begin_all_to_all", lib=_library)
def _(x, receive, send, group):
    _teach_compiler()
    return x.new_empty(sum(receive))


@torch.library.register_fake("diffusers_rocm::begin_all_gather", lib=_library)
def _(x, world, group):
    _teach_compiler()
    return x.new_empty(world * x.shape[0], *x.shape[1:])


@functools.cache
def _teach_compiler() -> None:
    """What is sent is nobody else's memory until it has been waited for."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    def teach(operation: torch._ops.OpOverload) -> None:
        @register_lowering(operation, type_promotion_kind=None)
        def lower(x: ir.TensorBox, *args: Any) -> ir.TensorBox:
            return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(operation, x, *args))

    teach(_ours.begin_all_to_all.default)
    teach(_ours.begin_all_gather.default)


def begin_compiled_gather(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Begin, in compiled code, to gather `x` [n, ...] of all ranks of a group.

    Returns:
        A function that waits, and answers [ranks x n, ...].
    """
    coming = _ours.begin_all_gather(x, group.size(), group.group_name)
    return functools.partial(_functional.wait_tensor, coming)
