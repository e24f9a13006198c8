"""What every rank must agree on goes through `broadcast_from_first` (bug TP-2 of docs/tp_bugs.md)."""

import unittest
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from parameterized import parameterized

from diffusers_rocm.distributed import collectives, host_memory
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.collectives import (
    all_gather,
    all_gather_text,
    broadcast_from_first,
    exchange_in_group,
)
from diffusers_rocm.distributed.mesh import mesh_axes

from ..models.testing_utils.common import randn
from ..testing_utils import relative_l2, run_ranks


class Embeds(NamedTuple):
    prompt: torch.Tensor
    pooled: torch.Tensor | None


def world_axis() -> Axis:
    return Axis("tp", dist.group.WORLD, dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))


def step_inputs(rank: int) -> dict:
    """What a denoising step is fed, with a rank's own values in all of it."""
    return {
        "latents": torch.randn(2, 35, 16, generator=torch.Generator().manual_seed(rank)),
        "timestep": torch.tensor(1000.0 * (rank == 0)),
        "timesteps": torch.linspace(1000, 0, 5, dtype=torch.float64) * (rank == 0),
        "embeds": Embeds(torch.full((1, 4, 8), float(rank), dtype=torch.bfloat16), None),
        "ids": [torch.arange(6).reshape(2, 3).T + rank, (torch.tensor([rank % 2 == 0]),)],
        "guidance": 3.5,
    }


def leaves(value) -> list:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def broadcast_worker() -> bool:
    rank = dist.get_rank()
    mine = step_inputs(rank)
    before = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves(mine)]
    received, expected = broadcast_from_first(mine, world_axis()), step_inputs(0)
    untouched = all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(leaves(mine), before, strict=True)
    )
    equal = all(
        torch.equal(a, b) and a.dtype == b.dtype and a.device == b.device if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(leaves(received), leaves(expected), strict=True)
    )
    return untouched and equal and isinstance(received["embeds"], Embeds)


def broadcast_into_a_temporary_worker() -> float:
    """The bug itself: the tensor is moved for the collective, and what arrived is thrown away."""
    timestep = step_inputs(dist.get_rank())["timestep"]
    dist.broadcast(timestep.clone(), src=0)  # stands in for timestep.cuda()
    return timestep.item()


def gather_worker(sizes: tuple[int, ...]) -> bool:
    full = torch.arange(2 * 3 * sum(sizes)).reshape(2, 3, -1).float()
    mine = full.split(sizes, dim=-1)[dist.get_rank()]
    return torch.equal(all_gather(mine, sizes, world_axis()), full)


def text_worker() -> list[str]:
    return all_gather_text("" if dist.get_rank() == 1 else "größer", world_axis())


def exchange_worker(
    sizes: list[list[int]], slow: bool, device: str, compiled: bool, communication: str
) -> tuple[float, int]:
    """`sizes[i][j]` elements go from rank i to rank j: how far they are from what plain messages
    bring, and how many of those were sent."""
    axis = mesh_axes({"ulysses": 2}).sending(communication).ulysses
    axis = replace(axis, slow_links=slow, known_gpus=True, device=torch.device(device))  # as that does
    send, receive = tuple(sizes[axis.rank]), tuple(row[axis.rank] for row in sizes)
    x = randn(sum(send), seed=axis.rank)
    wanted = exchange_in_group(x, send, receive, axis.group)
    torch._dynamo.reset()

    def exchange(*args: Any) -> torch.Tensor:
        return collectives.start_exchange(*args)()

    if compiled:
        exchange = torch.compile(exchange, fullgraph=True, backend="aot_eager")
    messages = []

    def noted(*args):
        messages.append(args)
        return exchange_in_group(*args)

    with mock.patch.object(collectives, "exchange_in_group", noted):
        got = exchange([x], 0, send, receive, axis)
    return relative_l2(got, wanted), len(messages)


def compiled_exchange_worker() -> list[list[str]]:
    """What an exchange of two GPUs over slow links is in compiled code, without shared memory of the host and with."""
    axis = mesh_axes({"ulysses": 2}).ulysses
    axis = replace(axis, slow_links=True, known_gpus=True, device=torch.device("cuda"))
    names, found = ("begin_all_gather", "begin_all_to_all"), []

    def noted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        targets = [node.target for node in graph.graph.nodes]
        found.append([name for name in names if getattr(torch.ops.diffusers_rocm, name) in targets])
        return graph

    for memory in (None, object()):
        torch._dynamo.reset()
        with mock.patch.dict(host_memory._memories, {axis.group.group_name: memory}):
            exchange = torch.compile(
                lambda x: collectives.start_exchange([x], 0, (4, 4), (4, 4), axis)(), backend=noted
            )
            exchange(torch.ones(8))
    return found


class TestCollectives(unittest.TestCase):
    @parameterized.expand([(2,), (4,)])
    def test_inputs_are_equal_after_the_broadcast(self, world):
        assert run_ranks(world, broadcast_worker) == [True] * world

    def test_a_broadcast_into_a_temporary_leaves_timestep_zero(self):
        assert run_ranks(3, broadcast_into_a_temporary_worker) == [1000.0, 0.0, 0.0]

    def test_texts_one_of_them_empty(self):
        assert run_ranks(3, text_worker) == [["größer", "", "größer"]] * 3

    @parameterized.expand(
        [
            ([[128, 128], [128, 128]], 0, True, "cuda", False, "exact"),
            ([[128, 128], [128, 128]], 1, False, "cuda", False, "exact"),
            ([[128, 128], [128, 128]], 1, True, "cpu", False, "exact"),
            ([[70, 200], [200, 3]], 0, True, "cuda", False, "exact"),
            ([[5, 70], [200, 5]], 1, True, "cuda", False, "exact"),
            ([[70, 200], [200, 3]], 0, True, "cuda", True, "exact"),
            ([[70, 200], [200, 3]], 0, True, "cuda", False, "int8"),
        ]
    )
    def test_exchange_of_two(self, sizes, messages, *how):
        """GPUs over slow links, as many for each other as the other has for it: a gather. Else as ever."""
        for error, plain in run_ranks(2, exchange_worker, sizes, *how):
            assert error <= (0 if "exact" in how else 0.01) and plain == messages, (error, plain)

    def test_exchange_of_two_through_the_host(self):
        assert run_ranks(2, compiled_exchange_worker) == [[["begin_all_gather"], ["begin_all_to_all"]]] * 2

    @parameterized.expand([((3, 3),), ((3, 2),), ((5, 4, 4),), ((1, 1, 1, 0),)])
    def test_gather_of_uneven_slices(self, sizes):
        assert all(run_ranks(len(sizes), gather_worker, sizes))


if __name__ == "__main__":
    unittest.main()
