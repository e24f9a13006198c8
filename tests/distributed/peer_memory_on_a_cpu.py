"""Memory of other ranks on a CPU: files that all ranks map."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from diffusers_rocm.distributed import peer_memory, peer_products
from diffusers_rocm.distributed.peer_memory import forget_places

from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig


class Even(FluxTransformerTesterConfig):
    """What two ranks or four share alike."""

    def get_dummy_inputs(self, batch_size: int = 1) -> dict:
        inputs = super().get_dummy_inputs(batch_size)
        inputs["hidden_states"] = inputs["hidden_states"][:, :32]
        inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, :8]
        return inputs | {"img_ids": inputs["img_ids"][:32], "txt_ids": inputs["txt_ids"][:8]}


class MappedFiles:
    """What torch's handle of symmetric memory answers, of a file of each rank of a group."""

    def __init__(self, files: Iterable[Path], size: int, group: dist.ProcessGroup, number: int):
        self.group, self.number = group, number
        self.mapped = [torch.from_file(str(file), True, size, dtype=torch.uint8) for file in files]

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        count = torch.Size(sizes).numel()
        return self.mapped[rank].view(dtype)[storage_offset : storage_offset + count].view(sizes)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        assert timeout_ms > 0
        of_all = [torch.empty(1, dtype=torch.int64) for _ in range(self.group.size())]
        dist.all_gather(of_all, torch.tensor([self.number]), group=self.group)
        assert {int(number) for number in of_all} == {self.number}, "ranks would wait for ever, each at another place"


@contextlib.contextmanager
def mapped_memory(folder: str, late: float = 0.0) -> Iterator[None]:
    """Symmetric memory is files; copies come when they are waited for, so as late as they may, and `late` seconds."""
    files: dict[int, int] = {}
    numbers, times = itertools.count(), itertools.count()

    def empty(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        number = next(numbers)
        x = torch.from_file(str(Path(folder) / f"{dist.get_rank()}-{number}"), True, count, dtype=dtype)
        files[x.data_ptr()] = number
        return x

    def rendezvous(x: Tensor, group: str) -> MappedFiles:
        process_group = dist.distributed_c10d._resolve_process_group(group)
        own = torch.tensor([next(times), files[x.data_ptr()]])
        of_all = [torch.empty_like(own) for _ in range(process_group.size())]
        dist.all_gather(of_all, own, group=process_group)
        assert len({int(count) for count, _ in of_all}) == 1, "torch would wait for ever"
        ranks = dist.get_process_group_ranks(process_group)
        names = [Path(folder) / f"{rank}-{int(number)}" for rank, (_, number) in zip(ranks, of_all, strict=True)]
        return MappedFiles(names, x.nbytes, process_group, int(own[0]))

    def copy_late(pairs: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Callable[[], None]:
        return lambda: [time.sleep(late), *(into.copy_(x) for into, x in pairs)] and None

    memory = mock.Mock(empty=empty, rendezvous=rendezvous)
    copies = mock.patch.object(peer_products, "copy_beside", copy_late)
    with copies, mock.patch.multiple(peer_memory, symmetric=memory, copy_beside=copy_late, _shared=0):
        yield
        forget_places()
