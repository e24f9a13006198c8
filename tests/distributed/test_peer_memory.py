"""Messages by copies out of the other ranks' memory; on a CPU, a file that all ranks map stands in for it."""

import contextlib
import tempfile
import unittest
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from diffusers_rocm import ParallelConfig
from diffusers_rocm.distributed import peer_memory
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.collectives import exchange_in_group
from diffusers_rocm.distributed.peer_memory import exchange_by_copies
from diffusers_rocm.models import modeling_utils

from ..models.testing_utils.common import randn
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..testing_utils import relative_l2, run_ranks


class MappedFiles:
    """What torch's handle of symmetric memory answers, of a file for each rank."""

    def __init__(self, folder: Path, size: int):
        self.folder, self.size = folder, size
        torch.from_file(self._path(dist.get_rank()), shared=True, size=size, dtype=torch.uint8).fill_(255)
        dist.barrier()

    def _path(self, rank: int) -> str:
        return str(self.folder / f"{rank}-{self.size}")

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        mapped = torch.from_file(self._path(rank), shared=True, size=self.size, dtype=torch.uint8)
        count = torch.Size(sizes).numel()
        return mapped.view(dtype)[storage_offset : storage_offset + count].view(sizes)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        assert timeout_ms > 0
        dist.barrier()


def when_waited_for(collective: Callable[[], None], received: Tensor) -> Callable[[], Tensor]:
    """A message that comes as late as it may."""

    def wait() -> Tensor:
        collective()
        return received

    return wait


@contextlib.contextmanager
def mapped_memory(folder: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        memory = mock.Mock()
        memory.empty = lambda size, dtype, device: torch.empty(size, dtype=dtype)
        memory.rendezvous = lambda buffer, group: MappedFiles(Path(folder), buffer.numel())
        stack.enter_context(mock.patch.multiple(peer_memory, symmetric=memory, beside=when_waited_for))
        yield


def exchange_worker(folder: str) -> dict[str, bool]:
    """Whether what comes by copies is what the process group brings."""
    axis, found = Axis.of_all(), {}
    group, rank, world = axis.group, axis.rank, axis.size

    def sizes(unit: int, uneven: int) -> tuple[list[int], list[int], int]:
        parts = [[unit + uneven * (to + 2 * of) for to in range(world)] for of in range(world)]
        return parts[rank], [of[rank] for of in parts], max(map(max, parts))

    with mapped_memory(folder):
        for name, unit, uneven in (("even", 4, 0), ("uneven", 3, 2), ("none", 0, 1), ("smaller", 1, 1)):
            send, receive, largest = sizes(unit, uneven)
            x = randn(sum(send), seed=rank)
            came = exchange_by_copies(x, send, receive, largest, group)
            found[name] = torch.equal(came, exchange_in_group(x, send, receive, group))
        send, receive, largest = sizes(5, 1)
        xs = [randn(sum(send), seed=10 * index + rank) for index in range(3)]
        coming = [torch.ops.diffusers_rocm.exchange_by_copies(x, send, receive, largest, group.group_name) for x in xs]
        came = [torch.ops._c10d_functional.wait_tensor(each) for each in reversed(coming)][::-1]
        found["several at once"] = all(
            torch.equal(each, exchange_in_group(x, send, receive, group)) for each, x in zip(came, xs, strict=True)
        )
    return found


@torch.no_grad()
def flux_worker(folder: str, most: int) -> tuple[float, int]:
    """The error of compiled FLUX over ranks that reach each other's memory, and how many messages went by copies."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_inputs(1)
    reference = config.get_output(model, inputs)
    links = {"links_are_slow": lambda _: False, "reaches_memory": lambda _: True}
    with mapped_memory(folder), mock.patch.multiple(modeling_utils, **links):
        model.enable_parallelism(config=ParallelConfig(ulysses=dist.get_world_size()))
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        with mock.patch("diffusers_rocm.distributed.collectives.MOST", most), torch.profiler.profile() as profile:
            output = config.get_output(model, inputs)
    names = [event.name for event in profile.events()]
    return relative_l2(output, reference), names.count("diffusers_rocm::exchange_by_copies")


class TestPeerMemory(unittest.TestCase):
    def test_exchange(self):
        with tempfile.TemporaryDirectory() as folder:
            for found in run_ranks(3, exchange_worker, folder):
                self.assertTrue(all(found.values()), found)

    def test_flux(self):
        for most, some in ((1 << 20, True), (16, False)):
            with tempfile.TemporaryDirectory() as folder:
                for error, messages in run_ranks(3, flux_worker, folder, most):
                    self.assertLessEqual(error, FLOAT32_BAR)
                    self.assertEqual(messages > 0, some)
