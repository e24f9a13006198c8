"""Messages through memory of the host, by copies, between GPUs that do not reach each other's.

A kernel of NCCL writes such a message to the host's memory, and another one reads it there. Both take multiprocessors
from what is computed beside them, and come late where none are free. Copy engines do neither, and a stream waits for a
word of memory without a kernel: so in a graph of a step messages over slow links are copied from the GPU into memory
that the receiver's process maps too, and from there into its GPU.

Each rank has few slots, so that the caches of the processor may hold them all, and for each slot and each other rank a
word, which says whether it is full for that one. The sender waits until a slot is empty, fills it, and says so; the
receiver waits until it is full for it, empties it, and says so. What is longer goes a slot at a time: some are filled
while others are emptied. What is for all is filled once. Which slots a message takes follows from what both sides
know: who sends it to whom, its length, and what has gone from the one to the other in this call.

Messages go in the same order on all ranks, and of each the part for the next rank goes first, then that for the one
after it: so among ranks that wait for each other, those who are least far can always go on.

A stream waits without end. Where a rank fails in the middle of a step the others wait until they are stopped, as they
do in kernels of NCCL that a graph has captured.
"""

import ctypes
import itertools
import logging
import os
import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from . import cuda_driver
from .graph_calls import current_call


T = TypeVar("T")

logger = logging.getLogger(__name__)

# Of each rank, and bytes of one.
SLOTS, SLOT = 4, 2 << 20

# Of a word, which has a line of the caches for itself: different GPUs write them.
_LINE = 64

_EMPTY, _FULL = 0, 1

# Of `cuStreamBatchMemOp`: wait until a word is equal to a value, or write it, when all before is done.
_WAIT, _EQUAL, _WRITE = 1, 1, 2

# Where processes of one host share files. NCCL, whose groups connect late, needs some of it, too: so much is left.
_FOLDER, _LEFT = "/dev/shm", 256 << 20

# Seconds that the trial waits for other ranks.
_PATIENCE = 20.0


class _WordOperation(ctypes.Structure):
    """CUDA's `CUstreamBatchMemOpParams`."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("more", ctypes.c_uint64),
    )


class Queue:
    """A stream of copies out of the host's memory, or into it, that waits for words of it.

    What is done with words between two copies is one step of the stream: a copy engine has nothing to do meanwhile.
    """

    def __init__(self, device: torch.device):
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._words: list[_WordOperation] = []

    def after_what_is_computed(self) -> None:
        self._do_words()
        self._stream.wait_stream(self._module.current_stream(self._stream.device))

    def wait(self, word: Tensor, value: int) -> None:
        self._words.append(_WordOperation(_WAIT, word.data_ptr(), value, _EQUAL))

    def write(self, word: Tensor, value: int) -> None:
        self._words.append(_WordOperation(_WRITE, word.data_ptr(), value))

    def drop(self) -> None:
        """Forget what is to be done with words, of a call whose capture failed."""
        self._words = []

    def copy(self, into: Tensor, x: Tensor) -> None:
        self._do_words()
        with self._module.stream(self._stream):
            into.copy_(x, non_blocking=True)

    def end(self) -> Callable[[], None]:
        """What has the computation wait for all that is queued now."""
        self._do_words()
        event = self._stream.record_event()
        return lambda: self._module.current_stream(self._stream.device).wait_event(event)

    def _do_words(self) -> None:
        count, self._words, words = len(self._words), [], self._words
        if not count:
            return
        batch = (_WordOperation * count)(*words)
        cuda_driver.call("cuStreamBatchMemOp_v2", ctypes.c_void_p(self._stream.cuda_stream), count, batch, 0)


class HostMemory:
    """Slots between this rank of a group and each other one."""

    def __init__(self, files: Sequence[str], rank: int, device: torch.device):
        """`files`: one of each rank, as `make_file` makes it. Raises OSError, RuntimeError: one cannot be mapped."""
        for file in files:
            os.stat(file)  # torch makes one that is not there
        self.world, self.device, self.rank = len(files), device, rank
        self._shared = [torch.from_file(file, True, _size(self.world), dtype=torch.uint8) for file in files]
        _register(self, self._shared)
        self._outgoing, self._incoming = Queue(device), Queue(device)
        # The other ranks, from the next one on: whom one sends to first receives from it first.
        self.targets = [(rank + step) % self.world for step in range(1, self.world)]
        self.sources = [(rank - step) % self.world for step in range(1, self.world)]
        # Of the call that runs, its number, and the pieces that have gone from whom to whom, to all as to itself.
        self._call: int | None = None
        self._gone: Counter[tuple[int, int]] = Counter()

    def _slot(self, source: int, index: int) -> Tensor:
        return self._shared[source][: SLOTS * SLOT].view(SLOTS, SLOT)[index]

    def _word(self, source: int, target: int, index: int) -> Tensor:
        """Whether a slot of `source` holds something for `target`."""
        words = self._shared[source][SLOTS * SLOT :].view(torch.int32)
        return words.view(self.world, SLOTS, -1)[target, index, :1]

    def begin(self, parts: Sequence[Tensor] | Tensor, into: Sequence[Tensor]) -> Callable[..., None]:
        """Begin to send `parts[i]` [n] to each rank i, or one tensor to all, and to receive into `into[i]` [n].

        This rank's own is copied, unless `into` is empty there. All ranks of the group call it in the same order.

        Returns:
            What has the computation wait until both are done; given a rank, until what it sends has come.
        """
        for_all = isinstance(parts, Tensor)
        own = parts if for_all else parts[self.rank]
        arrive = self.receive(into, for_all)
        if for_all:
            self.send(parts, self.rank)
        else:
            for target in self.targets:
                self.send(parts[target], target)
        end = self.sent()
        if into[self.rank].numel():
            into[self.rank].copy_(own)

        def wait(source: int | None = None) -> None:
            nonlocal parts, own
            arrive(source)
            if source is None:
                end()
                parts = own = None  # which nobody else may have kept

        return wait

    def exchange(self, x: Tensor, receive: Sequence[int], send: Sequence[int]) -> tuple[Tensor, Callable[[], None]]:
        """Begin an all-to-all of `x` [sum(send)]: where it comes to, [sum(receive)], and what waits for it."""
        received = x.new_empty(sum(receive))
        return received, self.begin(x.split(list(send)), received.split(list(receive)))

    def gather(self, x: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Begin to gather `x` [n, ...], contiguous: where it comes to, [ranks x n, ...], and what waits for it."""
        received = x.new_empty(self.world * x.shape[0], *x.shape[1:])
        return received, self.begin(x.flatten(), [part.flatten() for part in received.chunk(self.world)])

    def send(self, x: Tensor, target: int) -> None:
        """Begin to send `x` [n], which the caller keeps until it is `sent`, to a rank, or to all, if that is this one.

        All ranks do alike: they send to all, or to each of their `targets`, in that order.
        """
        self._come_to_call()
        self._outgoing.after_what_is_computed()
        readers = self.targets if target == self.rank else [target]
        for piece, index in self._pieces(x, self.rank, target):
            for reader in self.targets:
                self._outgoing.wait(self._word(self.rank, reader, index), _EMPTY)
            self._outgoing.copy(self._slot(self.rank, index)[: piece.numel()], piece)
            for reader in readers:
                self._outgoing.write(self._word(self.rank, reader, index), _FULL)

    def sent(self) -> Callable[[], None]:
        """What has the computation wait until all is sent that is now being sent."""
        return self._outgoing.end()

    def receive(self, into: Sequence[Tensor], for_all: bool) -> Callable[..., None]:
        """Begin to receive into `into[i]` [n] what each other rank i sends, to this rank or to all.

        Returns:
            What has the computation wait until all has come; given a rank, until what it sends has.
        """
        self._come_to_call()
        self._incoming.after_what_is_computed()
        pieces = {x: self._pieces(into[x], x, x if for_all else self.rank) for x in self.sources}
        ends, longest = {}, max(map(len, pieces.values()))
        # A slot for all is filled again when all have emptied it. Where one waits for the rest of a message, another
        # for that of a second one, and so on, none would come.
        in_a_row = SLOTS if for_all else longest
        for start in range(0, longest, in_a_row or 1):
            for source in self.sources:
                for piece, index in pieces[source][start : start + in_a_row]:
                    word = self._word(source, self.rank, index)
                    self._incoming.wait(word, _FULL)
                    self._incoming.copy(piece, self._slot(source, index)[: piece.numel()])
                    self._incoming.write(word, _EMPTY)
                ends[source] = self._incoming.end()
        last = self._incoming.end()
        return lambda source=None: ends.get(source, last)()

    def _come_to_call(self) -> None:
        """Tell the call of copies; what one whose capture failed has left, and counted, is none of the next one's."""
        call = current_call()
        if call is not None:
            call.by_copies = True
        number = None if call is None else call.number
        if number != self._call:
            self._call, self._gone = number, Counter()
            self._outgoing.drop()
            self._incoming.drop()

    def _pieces(self, x: Tensor, source: int, target: int) -> list[tuple[Tensor, int]]:
        """What fits into a slot each of a message [n], and that slot; it is for all, if `target` is the source."""
        pieces = x.view(torch.uint8).split(SLOT) if x.numel() else ()
        first, step = self._gone[source, source], (target - source) % self.world
        if step:  # slots are taken in turn where messages are as long for each
            first += (self.world - 1) * self._gone[source, target] + (step - 1) * len(pieces)
        self._gone[source, target] += len(pieces)
        return [(piece, (first + index) % SLOTS) for index, piece in enumerate(pieces)]

    def works(self) -> bool:
        """Whether what this rank is sent in a graph comes; all of them call it."""
        x = torch.arange(self.world * (SLOTS * SLOT // 8 + 1), device=self.device).view(self.world, -1)
        wanted = x[self.rank] + torch.arange(self.world, device=self.device)[:, None]
        sent, received, answers = x + self.rank, torch.empty_like(x), []
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
                for other, index in itertools.product(self.targets, range(SLOTS)):
                    self._word(self.rank, other, index).fill_(_EMPTY)
                    self._word(other, self.rank, index).fill_(_FULL)
            time.sleep(1e-3)


def _size(world: int) -> int:
    """Bytes of a file."""
    return SLOTS * (SLOT + world * _LINE)


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
    try:
        if on_all(file is not None):
            files = of_all(file)
            memory = tried(lambda: HostMemory(files, group.rank(), device))
        reached = on_all(memory is not None)
    finally:  # where a rank has died, too: it is memory that nobody else gives back
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


def of_group(group: str) -> HostMemory | None:
    """What messages of a group go through in captured calls."""
    return _memories.get(group)


@torch.compiler.assume_constant_result
def carries(group: str) -> bool:
    """Whether messages of captured calls of a group go so."""
    return of_group(group) is not None


def of_captured_call(group: str) -> HostMemory | None:
    """The same, if the call that runs is captured."""
    call = current_call()
    return of_group(group) if call is not None and call.captured else None


def tried(step: Callable[[], T]) -> T | None:
    """Its answer; None where it fails, of which the log says why."""
    try:
        return step()
    except Exception as error:
        logger.warning(f"this rank shares no memory with the others: {str(error).partition(chr(10))[0]}")
        return None
