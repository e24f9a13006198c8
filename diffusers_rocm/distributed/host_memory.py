"""Messages through memory of the host, by copies, between GPUs that do not reach each other's.

A kernel of NCCL writes such a message to the host's memory, and another one reads it there. Both take multiprocessors
from what is computed beside them, and come late where none are free. Copy engines do neither, and a stream waits for a
word of memory without a kernel: so in a graph of a step messages over slow links are copied from the GPU into memory
that the receiver's process maps too, and from there into its GPU.

From each rank to each other one there are slots, and for each slot a word, which says whether it is full. The sender
waits until a slot is empty, fills it, and says so; the receiver waits until it is full, empties it, and says so. What
is longer goes a slot at a time: one is filled while another is emptied. What is for all is filled once, and each has a
word of its own for it. Every message begins with the first slot.

A stream waits without end. Where a rank fails in the middle of a step the others wait until they are stopped, as they
do in kernels of NCCL that a graph has captured.
"""

import ctypes
import functools
import itertools
import logging
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .graph_calls import current_call


T = TypeVar("T")

logger = logging.getLogger(__name__)

# Between each two ranks, in each direction, two slots of 2 MiB.
SLOTS, SLOT = 2, 2 << 20

# Of a word, which has a line of the caches for itself: different GPUs write them.
_LINE = 64

_EMPTY, _FULL = 0, 1

# Where processes of one host share files. NCCL, whose groups connect late, needs some of it, too: so much is left.
_FOLDER, _LEFT = "/dev/shm", 256 << 20

# Seconds that the trial waits for other ranks.
_PATIENCE = 20.0


class Queue:
    """A stream of copies out of the host's memory, or into it, that waits for words of it."""

    def __init__(self, device: torch.device):
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def after_what_is_computed(self) -> None:
        self._stream.wait_stream(self._module.current_stream(self._stream.device))

    def wait(self, word: Tensor, value: int) -> None:
        self._call("cuStreamWaitValue32_v2", word, value, 1)  # until it is equal

    def write(self, word: Tensor, value: int) -> None:
        self._call("cuStreamWriteValue32_v2", word, value, 0)  # when all before is done, for all to see

    def copy(self, into: Tensor, x: Tensor) -> None:
        with self._module.stream(self._stream):
            into.copy_(x, non_blocking=True)

    def end(self) -> Callable[[], None]:
        """What has the computation wait for all that is queued now."""
        event = self._stream.record_event()
        return lambda: self._module.current_stream(self._stream.device).wait_event(event)

    def _call(self, name: str, word: Tensor, value: int, flags: int) -> None:
        stream, address = ctypes.c_void_p(self._stream.cuda_stream), ctypes.c_void_p(word.data_ptr())
        code = getattr(_driver(), name)(stream, address, ctypes.c_uint32(value), ctypes.c_uint32(flags))
        if code:
            raise RuntimeError(f"{name} of CUDA's driver answers {code}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class HostMemory:
    """Slots between this rank of a group and each other one."""

    def __init__(self, files: Sequence[str], rank: int, device: torch.device):
        """`files`: one of each rank, as `make_file` makes it. Raises OSError, RuntimeError: one cannot be mapped."""
        for file in files:
            os.stat(file)  # torch makes one that is not there
        self.world, self.device, self._rank = len(files), device, rank
        self._shared = [torch.from_file(file, True, _size(self.world), dtype=torch.uint8) for file in files]
        _register(self, self._shared)
        self._outgoing, self._incoming = Queue(device), Queue(device)

    def _slot(self, source: int, target: int, index: int) -> Tensor:
        """Bytes of `source` for `target`, or for all, if that is itself."""
        return self._shared[source][: self.world * SLOTS * SLOT].view(self.world, SLOTS, SLOT)[target, index]

    def _word(self, source: int, target: int, index: int) -> Tensor:
        """Whether the slot holds something for `target`."""
        words = self._shared[source][self.world * SLOTS * SLOT :].view(torch.int32)
        return words.view(self.world, SLOTS, -1)[target, index, :1]

    def begin(self, parts: Sequence[Tensor] | Tensor, into: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to send `parts[i]` [n] to each rank i, or one tensor to all, and to receive into `into[i]` [n].

        This rank's own is copied, unless `into` is empty there. All ranks of the group call it in the same order.

        Returns:
            What has the computation wait until both are done.
        """
        for_all = isinstance(parts, Tensor)
        own = parts if for_all else parts[self._rank]
        for queue in (self._outgoing, self._incoming):
            queue.after_what_is_computed()
        after, before = self._others(1), self._others(-1)
        sends = [(after, self._rank, parts)] if for_all else [([each], each, parts[each]) for each in after]
        for index, (targets, place, piece) in _in_turn(sends):
            self._send(piece, targets, place, index)
        receives = [(each, each if for_all else self._rank, into[each]) for each in before]
        for index, (source, place, piece) in _in_turn(receives):
            self._receive(piece, source, place, index)
        ends = self._outgoing.end(), self._incoming.end()
        if into[self._rank].numel():
            into[self._rank].copy_(own)

        def wait() -> None:
            nonlocal parts, own
            for end in ends:
                end()
            parts = own = None  # which nobody else may have kept

        return wait

    def _send(self, piece: Tensor, targets: Sequence[int], place: int, index: int) -> None:
        words = [self._word(self._rank, target, index) for target in targets]
        for word in words:
            self._outgoing.wait(word, _EMPTY)
        self._outgoing.copy(self._slot(self._rank, place, index)[: piece.numel()], piece)
        for word in words:
            self._outgoing.write(word, _FULL)

    def _receive(self, piece: Tensor, source: int, place: int, index: int) -> None:
        word = self._word(source, self._rank, index)
        self._incoming.wait(word, _FULL)
        self._incoming.copy(piece, self._slot(source, place, index)[: piece.numel()])
        self._incoming.write(word, _EMPTY)

    def _others(self, direction: int) -> list[int]:
        """The other ranks, from the next one on: whom one sends to first receives from it first."""
        return [(self._rank + direction * step) % self.world for step in range(1, self.world)]

    def works(self) -> bool:
        """Whether what this rank is sent in a graph comes; all of them call it."""
        x = torch.arange(self.world * (SLOTS * SLOT // 8 + 1), device=self.device).view(self.world, -1)
        wanted = x[self._rank] + torch.arange(self.world, device=self.device)[:, None]
        sent, received, answers = x + self._rank, torch.empty_like(x), []
        exchange = self.captured(sent.unbind(), received.unbind())
        for _ in range(2):
            received.zero_()
            exchange()
            self._come_to_an_end()
            answers.append(torch.equal(received, wanted))
        return all(answers)

    def captured(self, parts: Sequence[Tensor], into: Sequence[Tensor]) -> Callable[[], None]:
        """What sends so, and receives, whenever it is called: a graph of it. The caller keeps `parts` and `into`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.begin(parts, into)()
        return graph.replay

    def _come_to_an_end(self) -> None:
        """Wait for what the GPU does, but not for ever for ranks that have failed."""
        done, begun = torch.cuda.current_stream(self.device).record_event(), time.monotonic()
        while not done.query():
            if time.monotonic() - begun > _PATIENCE:
                for other, index in itertools.product(self._others(1), range(SLOTS)):
                    self._word(self._rank, other, index).fill_(_EMPTY)
                    self._word(other, self._rank, index).fill_(_FULL)
            time.sleep(1e-3)


def _size(world: int) -> int:
    """Bytes of a file."""
    return world * SLOTS * (SLOT + _LINE)


def make_file(world: int) -> str:
    """The path of what this rank shares with the others of a group. Raises OSError where there is no room for it."""
    free, needed = shutil.disk_usage(_FOLDER).free >> 20, world * _size(world) + _LEFT >> 20
    if free < needed:
        raise OSError(
            f"{_FOLDER} has {free} MiB left, and {needed} are needed, with what NCCL may take: give a container "
            "more, as by --shm-size=1g"
        )
    descriptor, path = tempfile.mkstemp(dir=_FOLDER)
    try:
        os.posix_fallocate(descriptor, 0, _size(world))  # zeros; to write where no memory is left would be the end
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return path


def _register(memory: HostMemory, shared: Sequence[Tensor]) -> None:
    """Have the GPU copy from and to it by itself, until `memory` is gone."""
    runtime = torch.cuda.cudart()
    for each in shared:
        code = int(runtime.cudaHostRegister(each.data_ptr(), each.nbytes, 0))
        if code:
            raise RuntimeError(f"cudaHostRegister answers {code}")
        end = weakref.finalize(memory, lambda x: runtime.cudaHostUnregister(x.data_ptr()), each)
        end.atexit = False  # when all goes; a GPU that still waits would keep the process


def _in_turn(messages: Sequence[tuple[Any, int, Tensor]]) -> Iterator[tuple[int, tuple[Any, int, Tensor]]]:
    """The first piece of each, then the second of each; and the slot that takes it.

    Where a slot is for all, one that is slow to empty it keeps the others waiting. So no rank may wait for all of one
    message before it has begun with another.
    """
    pieces = [
        [(*where, piece) for piece in x.view(torch.uint8).split(SLOT)] if x.numel() else [] for *where, x in messages
    ]
    for turn, of_each in enumerate(itertools.zip_longest(*pieces)):
        for piece in of_each:
            if piece is not None:
                yield turn % SLOTS, piece


# Of each group that has tried; None where messages do not go through it.
_memories: dict[str, HostMemory | None] = {}


def share(
    group: dist.ProcessGroup,
    device: torch.device,
    on_all: Callable[[bool], bool],
    of_all: Callable[[str], list[str]],
    is_fast: Callable[[HostMemory], bool],
) -> bool:
    """Have messages of a group go through the host's memory in captured calls, if that works; all its ranks call it.

    Args:
        on_all: tells whether something is so on all ranks.
        of_all: tells what each says.
        is_fast: tells, on all ranks alike, whether messages may go through what works.

    Returns:
        Whether they go so, of a group once and for all.
    """
    if group.group_name in _memories:
        return _memories[group.group_name] is not None
    file, memory = tried(lambda: make_file(group.size())), None
    if on_all(file is not None):
        files = of_all(file)
        memory = tried(lambda: HostMemory(files, group.rank(), device))
    reached = on_all(memory is not None)
    if file is not None:
        os.unlink(file)
    reached = reached and on_all(tried(memory.works) is True)
    if memory is not None and not reached:
        logger.info("copies through the host's memory do not work on all ranks")
    reached = reached and is_fast(memory)
    _memories[group.group_name] = memory if reached else None
    return reached


def forget(group: dist.ProcessGroup | None = None) -> None:
    """Let the memory of a group go, before itself does; of all groups by default."""
    if group is None:
        _memories.clear()
    else:
        _memories.pop(group.group_name, None)


def of_captured_call(group: str) -> HostMemory | None:
    """What messages of a group go through in the call that runs, if that is captured."""
    call = current_call()
    return _memories.get(group) if call is not None and call.captured else None


def begin_exchange(
    memory: HostMemory, x: Tensor, receive: Sequence[int], send: Sequence[int]
) -> tuple[Tensor, Callable[[], None]]:
    """Begin an all-to-all of `x` [sum(send)]: where it comes to, [sum(receive)], and what waits for it."""
    received = x.new_empty(sum(receive))
    return received, memory.begin(x.split(list(send)), received.split(list(receive)))


def begin_gather(memory: HostMemory, x: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Begin to gather `x` [n, ...], contiguous: where it comes to, [ranks x n, ...], and what waits for it."""
    received = x.new_empty(memory.world * x.shape[0], *x.shape[1:])
    return received, memory.begin(x.flatten(), [part.flatten() for part in received.chunk(memory.world)])


def tried(step: Callable[[], T]) -> T | None:
    """Its answer; None where it fails, of which the log says why."""
    try:
        return step()
    except Exception as error:
        logger.warning(f"this rank shares no memory with the others: {str(error).partition(chr(10))[0]}")
        return None
