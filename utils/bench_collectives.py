"""What the collectives of a FLUX.1 step cost on this machine's links.

    torchrun --nproc_per_node=4 utils/bench_collectives.py

A double block ends its attention with two row projections, for the image and the text stream: is one all-reduce over
both worth a shared buffer? And what does a round of latency cost, by a gather of one block's modulation?
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from bench_transformer import Clock, versions

import diffusers_rocm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", type=int, default=4096, help="image tokens")
    parser.add_argument("--text", type=int, default=512, help="text tokens")
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    device = diffusers_rocm.init()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    both = torch.randn(args.image + args.text, args.width, device=device, dtype=dtype)
    image, text = both[: args.image], both[args.image :]
    part = torch.randn(6 * args.width // dist.get_world_size(), device=device, dtype=dtype)
    whole = part.new_empty(part.numel() * dist.get_world_size())

    def separate():
        dist.all_reduce(image)
        dist.all_reduce(text)

    def coalesced():
        with dist._coalescing_manager(device=device):
            dist.all_reduce(image)
            dist.all_reduce(text)

    cases = {
        "all-reduce image": lambda: dist.all_reduce(image),
        "all-reduce text": lambda: dist.all_reduce(text),
        "all-reduce image, all-reduce text": separate,
        "all-reduce of both, one buffer": lambda: dist.all_reduce(both),
        "gather of one modulation": lambda: dist.all_gather_into_tensor(whole, part),
    }
    if device.type == "cuda":
        cases["all-reduce of both, coalesced"] = coalesced
    clock, rows = Clock(device), {}
    for name, collective in cases.items():
        times = []
        for _ in range(args.repeats + 5):
            # Ten in a row, so that the launch of one hides under the one before, as it does in a model.
            times.append(clock.milliseconds(lambda run=collective: [run() for _ in range(10)]) * 100)
        rows[name] = round(statistics.median(times[5:]), 1)
        if dist.get_rank() == 0:
            print(f"{name:36s} {rows[name]:8.1f} us", flush=True)
    if dist.get_rank() == 0 and args.out:
        args.out.write_text(json.dumps({"versions": versions(), "microseconds": rows}, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
