"""One attention over several ranks: what a hop, a kernel and each schedule take, in milliseconds.

    torchrun --nproc_per_node=4 utils/bench_attention.py --tokens 16896 66048
    NCCL_P2P_DISABLE=1 torchrun --nproc_per_node=4 utils/bench_attention.py --tokens 16896 66048

If hops hide under the computation, a ring takes little more than its kernels, or than its hops where they take longer.
Ulysses goes both ways, whatever the links: with all heads at once, and with groups of them.
"""

import argparse
import json
import statistics
from dataclasses import replace

import torch
import torch.distributed as dist
from arguments import new_file, positive
from ranks import rank_of_torchrun
from versions import versions

from diffusers_rocm import ContextParallelConfig
from diffusers_rocm.benchmarks.step import Clock
from diffusers_rocm.commands import Parser
from diffusers_rocm.distributed.beside import pass_on
from diffusers_rocm.models.attention_dispatch import choose_kernel
from diffusers_rocm.models.attention_kernels import KERNELS
from diffusers_rocm.models.attention_parallel import Layout, attention


@torch.no_grad()
def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=positive, nargs="+", default=[65536])
    parser.add_argument("--heads", type=positive, default=24)
    parser.add_argument("--kernel", choices=KERNELS, help="default: the fastest")
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--out", type=new_file, help="write the rows as JSON")
    args = parser.parse_args()
    device = rank_of_torchrun()
    rows = {tokens: measure(args, tokens, device) for tokens in args.tokens}
    if dist.get_rank() == 0 and args.out:
        content = {"versions": versions(), "heads": args.heads, "milliseconds": rows}
        args.out.write_text(json.dumps(content, indent=2) + "\n")
    dist.destroy_process_group()


def measure(args: argparse.Namespace, tokens: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds of each way to attend."""
    world, clock = dist.get_world_size(), Clock(device)

    def choose(q, mask, needs_lse):
        return choose_kernel(q, mask, args.kernel)

    axes = {name: ContextParallelConfig(**{f"{name}_degree": world}).axes() for name in ("ring", "ulysses")}
    layouts = {"ring": Layout((tokens,), axes["ring"].ring, axes["ring"].ulysses)}
    for name, slow in (("at once", False), ("in groups", True)):
        layouts[name] = Layout((tokens,), axes["ulysses"].ring, replace(axes["ulysses"].ulysses, slow_links=slow))
    length = layouts["ring"].lengths()[dist.get_rank()]
    dtype = getattr(torch, args.dtype)
    q, k, v = (torch.randn(1, length, args.heads, 128, device=device, dtype=dtype) for _ in range(3))
    kernel, group = choose(q, None, True), axes["ring"].ring.group.group_name
    message = torch.cat([k, v], dim=2).flatten()

    def schedule(name, rotate_method="p2p"):
        cp = axes["ring"].context
        return lambda: attention(q, k, v, None, None, False, layouts[name], cp, choose, rotate_method)

    cases = {
        f"{world} kernels": lambda: [KERNELS[kernel.name](q, k, v, None, None) for _ in range(world)],
        f"{world - 1} hops": lambda: [
            pass_on(message, message.numel(), dist.get_rank(), world, group)() for _ in range(world - 1)
        ],
        "ring, p2p": schedule("ring"),
        "ring, allgather": schedule("ring", "allgather"),
        "Ulysses, at once": schedule("at once"),
        "Ulysses, in groups": schedule("in groups"),
    }
    rows = {}
    for name, step in cases.items():
        for _ in range(3):
            step()
        clock.sync()
        dist.barrier()
        rows[name] = statistics.median(clock.milliseconds(step) for _ in range(args.repeats))
        if dist.get_rank() == 0:
            print(f"{tokens:6d} tokens, {kernel.name}  {name:20s} {rows[name]:8.2f} ms", flush=True)
    return rows


if __name__ == "__main__":
    main()
