"""On a CPU threads stand in for streams of copies that wait for words of the host's memory."""

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from diffusers_rocm.distributed import host_memory
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.collectives import all_gather_text, on_all_ranks
from diffusers_rocm.distributed.host_memory import HostMemory, share


class Thread:
    """In place of `host_memory.Queue`; each copy is late, and by other times on other ranks."""

    def __init__(self, device: torch.device):
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.begun = self.waited_for = 0  # copies
        self.late = 1e-4 * (1 + dist.get_rank())
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._tasks.get()()

    def after_what_is_computed(self) -> None:
        pass  # a CPU has computed it

    def wait(self, word: Tensor, value: int) -> None:
        def until_it_is() -> None:
            while int(word) != value:
                time.sleep(1e-4)

        self._tasks.put(until_it_is)

    def write(self, word: Tensor, value: int) -> None:
        self._tasks.put(lambda: word.fill_(value))

    def copy(self, into: Tensor, x: Tensor) -> None:
        self.begun += 1
        self._tasks.put(lambda: (time.sleep(self.late), into.copy_(x)))

    def drop(self) -> None:
        pass  # what is done with words has begun

    def end(self) -> Callable[[], None]:
        done, begun = threading.Event(), self.begun
        self._tasks.put(done.set)

        def wait() -> None:
            assert done.wait(30), "what was sent never came"
            self.waited_for = max(self.waited_for, begun)

        return wait


class Held(Thread):
    """What is done with words waits for the next copy, as in `Queue`; in a capture that fails nothing runs at all."""

    fails = False

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._words: list[Callable[[], None]] = []

    def drop(self) -> None:
        self._words = []

    def wait(self, word: Tensor, value: int) -> None:
        self._words.append(lambda: super(Held, self).wait(word, value))

    def write(self, word: Tensor, value: int) -> None:
        self._words.append(lambda: super(Held, self).write(word, value))

    def after_what_is_computed(self) -> None:
        words, self._words = self._words, []
        for each in words if not Held.fails else ():
            each()

    def copy(self, into: Tensor, x: Tensor) -> None:
        self.after_what_is_computed()
        if not Held.fails:
            super().copy(into, x)

    def end(self) -> Callable[[], None]:
        self.after_what_is_computed()
        return super().end()


@contextlib.contextmanager
def on_a_cpu(slot: int = 32) -> Iterator[None]:
    """Slots of so many bytes."""
    memory = mock.patch.multiple(host_memory, Queue=Thread, SLOT=slot, _LEFT=0, _register=lambda *_: None)
    with memory, mock.patch.object(HostMemory, "works", lambda _: True):
        yield
        host_memory.forget()


# Whether a memory that works is fast enough, as the last step of the trial says.
FAST = True


def share_on(axis: Axis) -> bool:
    on_all, of_all = (functools.partial(each, axis=axis) for each in (on_all_ranks, all_gather_text))
    return share(axis.group, axis.device, on_all, of_all, lambda _: FAST)
