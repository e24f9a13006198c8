"""What a message costs beside a product that does not wait for it, on this machine's links.

    torchrun --nproc_per_node=2 utils/bench_overlap.py --out FILE

In a block of one stream FLUX.1 projects its MLP from the same input as its queries, and Ulysses' message could go at
the same time; the sum of a row projection could go beside the next part of the same product. Whether two kernels share
a device depends on both: a product of NVIDIA's library starts one block on every multiprocessor and waits for those
that a message occupies. So each pair is timed one after the other, side by side, and with multiprocessors left free;
and the message once by NCCL, and once by copies out of symmetric memory, which occupy none. On GPUs all of it is
replayed from a graph, ten times in a row.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import torch.nn.functional as F
from arguments import new_file, positive
from ranks import rank_of_torchrun
from versions import versions

from diffusers_rocm.benchmarks.step import Clock
from diffusers_rocm.commands import Parser
from diffusers_rocm.distributed.beside import beside


TIMES = 10


class Bench:
    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device, self.clock = args, device, Clock(device)
        self.on_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.microseconds: dict[str, float] = {}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def shared(self, count: int) -> torch.Tensor:
        return symmetric.empty(count, dtype=self.dtype, device=self.device)

    def time(self, name: str, work: Callable[[], object]) -> None:
        """Median microseconds of `work`, on the slowest rank."""

        def ten() -> None:
            for _ in range(TIMES):
                work()

        ten()
        run = ten
        if self.on_gpu:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                ten()
            run = graph.replay
        times = []
        for _ in range(self.args.repeats + 3):
            dist.barrier()
            times.append(self.clock.milliseconds(run) * 1000 / TIMES)
        found = torch.tensor(statistics.median(times[3:]), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        self.microseconds[name] = round(found.item(), 1)
        if self.rank == 0:
            print(f"{name:64s} {found.item():9.1f} us", flush=True)

    def with_fewer(self, name: str, work: Callable[[], object]) -> None:
        """`work` where products may use all multiprocessors, and where they leave some free."""
        self.time(name, work)
        for count in self.args.free if self.on_gpu else ():
            torch._C._set_sm_carveout_experimental(count)
            self.time(f"{name}, {count} left free", work)
            torch._C._set_sm_carveout_experimental(None)

    def side_by_side(self, name: str, message: Callable[..., Any], received: torch.Tensor, product: Callable) -> None:
        def both() -> None:
            arrive = beside(message, received)
            product()
            arrive()

        self.time(f"{name}: message", message)
        self.time(f"{name}: product", product)
        self.time(f"{name}: one after the other", lambda: (message(), product()))
        self.with_fewer(f"{name}: side by side", both)

    def ulysses(self, rows: int) -> None:
        """The message of queries, keys and values of `rows` tokens, and the projection of their MLP."""
        width = self.args.width
        x, weight = self.random(rows, width), self.random(4 * width, width)
        sent, received = (self.random(rows * 3 * width) for _ in range(2))

        def by_nccl(**kwargs: bool) -> Any:
            return dist.all_to_all_single(received, sent, **kwargs)

        self.side_by_side(f"ulysses {rows}, NCCL", by_nccl, received, lambda: F.linear(x, weight))
        if not self.on_gpu or self.args.no_symmetric:
            return
        shared = self.shared(sent.numel())
        handle = symmetric.rendezvous(shared, dist.group.WORLD.group_name)
        shared.copy_(sent)
        peers = [handle.get_buffer(rank, shared.shape, shared.dtype) for rank in range(self.world)]
        copied = torch.empty_like(received)
        into = copied.chunk(self.world)

        def by_copies() -> None:
            handle.barrier(channel=0)
            for step in range(self.world):
                peer = (self.rank + step) % self.world
                into[peer].copy_(peers[peer].chunk(self.world)[self.rank])
            handle.barrier(channel=1)

        by_nccl()
        by_copies()
        torch.cuda.synchronize()
        assert torch.equal(copied, received)
        self.side_by_side(f"ulysses {rows}, copies", by_copies, copied, lambda: F.linear(x, weight))

    def sums(self, rows: int) -> None:
        """The sum of a row projection's output of `rows` tokens, whole, and in parts under the product."""
        width = self.args.width
        x, weight = self.random(rows, 5 * width // self.world), self.random(width, 5 * width // self.world)
        y = torch.zeros(rows, width, device=self.device, dtype=self.dtype)  # summed again and again
        part = y[: rows // self.world].clone()
        self.time(f"sum {rows}: product", lambda: F.linear(x, weight))
        self.time(f"sum {rows}: NCCL", lambda: dist.all_reduce(y))
        if self.on_gpu:

            def in_two() -> None:
                dist.reduce_scatter_tensor(part, y)
                dist.all_gather_into_tensor(y, part)

            self.time(f"sum {rows}: reduce-scatter, all-gather", in_two)
        self.time(f"sum {rows}: product, NCCL", lambda: dist.all_reduce(F.linear(x, weight)))
        for count in (2, 4):

            def in_parts(count: int = count) -> None:
                waits = []
                for piece in x.chunk(count):
                    output = F.linear(piece, weight)
                    waits.append(beside(functools.partial(dist.all_reduce, output), output))
                for wait in waits:
                    wait()

            self.with_fewer(f"sum {rows}: product, NCCL in {count} parts side by side", in_parts)
        if not self.on_gpu or self.args.no_symmetric:
            return
        group = dist.group.WORLD.group_name
        shared, wanted = self.shared(rows * width), self.random(rows * width)
        symmetric.rendezvous(shared, group)
        shared.copy_(wanted)
        out = torch.empty_like(wanted)
        dist.all_reduce(wanted)
        torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", group, out)
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)
        for found in (out, shared):
            assert (found - wanted).norm() <= 1e-2 * wanted.norm()
        shared.zero_()
        for name, work in {
            "one-shot": lambda: torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", group, out),
            "two-shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group),
        }.items():
            self.time(f"sum {rows}: {name}", work)


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=positive, nargs="+", default=[2304, 1152], help="tokens of a rank")
    parser.add_argument("--sums", type=positive, nargs="+", default=[4608, 512], help="tokens of a sum")
    parser.add_argument("--width", type=positive, default=3072)
    parser.add_argument("--free", type=int, nargs="*", default=[16, 32], help="multiprocessors left to a message")
    parser.add_argument("--no-symmetric", action="store_true", help="NCCL alone")
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument("--out", type=new_file, help="write the rows as JSON")
    args = parser.parse_args()
    bench = Bench(args, rank_of_torchrun())
    for rows in args.rows:
        bench.ulysses(rows)
    for rows in args.sums:
        bench.sums(rows)
    if bench.rank == 0 and args.out:
        content = {"versions": versions(), "microseconds": bench.microseconds}
        args.out.write_text(json.dumps(content, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
