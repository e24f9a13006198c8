"""What messages cost by copies through the host's memory, by how large its slots are and how many.

    NCCL_P2P_DISABLE=1 torchrun --nproc_per_node=4 utils/bench_host_memory.py --slots 2 4 --kib 1024 2048 --out FILE

The messages are those of a block of FLUX.1 at 1024x1024 on four ranks: queries and keys of Ulysses, its values or what
goes back, and of tensor parallelism a slice of all tokens, each exact and in 8 bits. Each is sent ten times in a row
in a graph, and waited for each time; the same by the process group. The slowest rank's time counts.
"""

import functools
import itertools
import json
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from arguments import new_file, positive
from ranks import rank_of_torchrun
from versions import versions

from diffusers_rocm.benchmarks.step import Clock
from diffusers_rocm.commands import Parser
from diffusers_rocm.distributed import host_memory
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.collectives import all_gather_text, on_all_ranks


TIMES = 10

TOKENS, WIDTH, RANKS = 4608, 3072, 4

# Bytes for each other rank, and whether they are the same for all.
_SLICE = TOKENS // RANKS * WIDTH
MESSAGES = {
    f"{name}{', 8 bits' if size == 1 else ''}": (elements * 2 if size == 2 else elements * 68 // 64, for_all)
    for (name, elements, for_all), size in itertools.product(
        (
            ("queries and keys", 2 * _SLICE // RANKS, False),
            ("values", _SLICE // RANKS, False),
            ("slices, scattered", _SLICE, False),
            ("slices, gathered", _SLICE, True),
        ),
        (2, 1),
    )
}


def captured(work: Callable[[], object]) -> Callable[[], object]:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(TIMES):
            work()
    return graph.replay


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=positive, nargs="+", default=[host_memory.SLOTS])
    parser.add_argument("--kib", type=positive, nargs="+", default=[host_memory.SLOT >> 10], help="of a slot")
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--out", type=new_file, help="write the rows as JSON")
    args = parser.parse_args()
    device = rank_of_torchrun("cuda")
    axis, clock, rows = Axis.of_all(), Clock(device), {}

    def time(row: str, of_message: Callable[[torch.Tensor, torch.Tensor, bool], Callable[[], object]]) -> None:
        rows[row] = {}
        for message, (size, for_all) in MESSAGES.items():
            sent, received = torch.zeros(2, axis.size, size, dtype=torch.uint8, device=device)
            replay = captured(of_message(sent, received, for_all))
            times = [clock.milliseconds(replay) for _ in range(args.repeats)]
            slowest = torch.tensor(statistics.median(times), device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            rows[row][message] = round(slowest.item() * 1e3 / TIMES, 1)
        if axis.rank == 0:
            print(f"{row:16s}", *(f"{name} {value:.1f}" for name, value in rows[row].items()), sep="  ", flush=True)

    def by_group(sent: torch.Tensor, received: torch.Tensor, for_all: bool) -> Callable[[], object]:
        if for_all:
            return lambda: dist.all_gather_into_tensor(received, sent[axis.rank])
        return lambda: dist.all_to_all_single(received, sent)

    time("process group", by_group)
    for slots, kib in itertools.product(args.slots, args.kib):
        host_memory.forget()
        host_memory.SLOTS, host_memory.SLOT = slots, kib << 10
        if not host_memory.share(
            axis.group,
            device,
            functools.partial(on_all_ranks, axis=axis),
            functools.partial(all_gather_text, axis=axis),
            lambda _: True,
        ):
            raise SystemExit("copies through the host's memory do not work here: the log says why")
        memory = host_memory.of_group(axis.group.group_name)

        def through_host(sent: torch.Tensor, received: torch.Tensor, for_all: bool, memory=memory) -> Callable:
            parts = sent[axis.rank] if for_all else sent.unbind()
            return lambda: memory.begin(parts, received.unbind())()

        time(f"{slots} of {kib} KiB", through_host)
    if axis.rank == 0 and args.out:
        content = {"versions": versions(), "ranks": axis.size, "bytes": MESSAGES, "microseconds": rows}
        args.out.write_text(json.dumps(content, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
