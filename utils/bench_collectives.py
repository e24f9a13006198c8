"""What the collectives of a FLUX.1 step cost on this machine's links.

    torchrun --nproc_per_node=4 utils/bench_collectives.py

A double block ends its attention with two row projections, for the image and the text stream: is one all-reduce over
both worth a shared buffer? What does a round of latency cost, by a gather of one block's modulation? And is a hop of
the ring better sent as a batch of two messages or as an all-to-all in which each rank has one receiver?
"""

import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from arguments import new_file, positive
from ranks import rank_of_torchrun
from versions import versions

from diffusers_rocm.benchmarks.step import Clock
from diffusers_rocm.commands import Parser


def microseconds(collective: Callable[[], object], clock: Clock, repeats: int) -> tuple[float, float]:
    """Of one call: until it is done, and of the host to launch it."""
    launches = []

    def ten() -> None:
        """In a row, so that the launch of one hides under the one before, as it does in a model."""
        start = time.perf_counter()
        for _ in range(10):
            collective()
        launches.append((time.perf_counter() - start) * 1e5)

    times = [clock.milliseconds(ten) * 100 for _ in range(repeats + 5)]
    return tuple(round(statistics.median(each[5:]), 1) for each in (times, launches))


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", type=positive, default=4096, help="image tokens")
    parser.add_argument("--text", type=positive, default=512, help="text tokens")
    parser.add_argument("--width", type=positive, default=3072)
    parser.add_argument("--hop", type=positive, default=16512, help="tokens whose keys and values go round the ring")
    parser.add_argument("--repeats", type=positive, default=30)
    parser.add_argument("--out", type=new_file, help="write the rows as JSON")
    args = parser.parse_args()
    device = rank_of_torchrun()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    both = torch.randn(args.image + args.text, args.width, device=device, dtype=dtype)
    image, text = both[: args.image], both[args.image :]
    part = torch.randn(6 * args.width // dist.get_world_size(), device=device, dtype=dtype)
    whole = part.new_empty(part.numel() * dist.get_world_size())
    keys_values = torch.randn(2 * args.hop * args.width, device=device, dtype=dtype)
    rank, world = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % world, (rank + 1) % world

    def separate():
        dist.all_reduce(image)
        dist.all_reduce(text)

    def coalesced():
        with dist._coalescing_manager(device=device):
            dist.all_reduce(image)
            dist.all_reduce(text)

    def hop():
        sizes = [[keys_values.numel() * (other == to) for other in range(world)] for to in (before, after)]
        dist.all_to_all_single(torch.empty_like(keys_values), keys_values, *sizes)

    def batched_hop():
        send = dist.P2POp(dist.isend, keys_values, after)
        for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, torch.empty_like(keys_values), before)]):
            work.wait()

    cases = {
        "all-reduce image": lambda: dist.all_reduce(image),
        "all-reduce text": lambda: dist.all_reduce(text),
        "all-reduce image, all-reduce text": separate,
        "all-reduce of both, one buffer": lambda: dist.all_reduce(both),
        "gather of one modulation": lambda: dist.all_gather_into_tensor(whole, part),
        "hop, as an all-to-all": hop,
        "hop, isend and irecv": batched_hop,
    }
    if device.type == "cuda":
        cases["all-reduce of both, coalesced"] = coalesced
    clock, rows, host = Clock(device), {}, {}
    for name, collective in cases.items():
        rows[name], host[name] = microseconds(collective, clock, args.repeats)
        if rank == 0:
            print(f"{name:36s} {rows[name]:8.1f} us, of the host {host[name]:6.1f}", flush=True)
    if rank == 0 and args.out:
        content = {"versions": versions(), "microseconds": rows, "host_microseconds": host}
        args.out.write_text(json.dumps(content, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
