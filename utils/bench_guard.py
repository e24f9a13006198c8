"""What it costs to compare the ranks' inputs: FLUX.1-dev's real shape through FluxPipeline, by `rank_check`.

    torchrun --nproc_per_node=2 utils/bench_guard.py --tp 2 --compile

Milliseconds a step over whole calls of the pipeline, from embeddings to latents; random bf16 weights.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bench_transformer import build, versions
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

import diffusers_rocm
from diffusers_rocm.hooks.rank_guard import RANK_CHECKS
from diffusers_rocm.pipelines import guard_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ulysses", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--resolution", type=int, default=1024)
    parser.add_argument("--double", type=int, default=19)
    parser.add_argument("--single", type=int, default=38)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    args.model = "flux"
    device = diffusers_rocm.init()
    embeddings = torch.randn(1, 512, 4096, generator=torch.Generator().manual_seed(0)).to(device, args.dtype)
    pooled = torch.randn(1, 768, generator=torch.Generator().manual_seed(1)).to(device, args.dtype)
    config = diffusers_rocm.ParallelConfig(tp=args.tp, ulysses=args.ulysses)
    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, build(args, device))
    pipe.set_progress_bar_config(disable=True)

    def call() -> float:
        started = time.perf_counter()
        pipe(
            prompt_embeds=embeddings,
            pooled_prompt_embeds=pooled,
            height=args.resolution,
            width=args.resolution,
            num_inference_steps=args.steps,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        )
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return (time.perf_counter() - started) * 1000 / args.steps

    pipe.transformer.enable_parallelism(config=config)
    if args.compile:
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
    times: dict[str, list[float]] = {check: [] for check in RANK_CHECKS}
    for turn in range(args.repeats + 1):
        for check in RANK_CHECKS:
            hooks = guard_ranks(pipe, [pipe.transformer], check)
            taken = call()
            if turn:  # the first one warms up
                times[check].append(taken)
            for _, hook in reversed(hooks):
                hook.remove()
    medians = {check: statistics.median(taken) for check, taken in times.items()}
    if dist.get_rank() == 0:
        for check, median in medians.items():
            extra = 100 * (median / medians["off"] - 1)
            print(f"rank_check={check!r:9} {median:8.3f} ms a step, {extra:+.2f} % (from {min(times[check]):.3f})")
        if args.out:
            content = {"arguments": {k: str(v) for k, v in vars(args).items()}, "versions": versions(), "ms": times}
            args.out.write_text(json.dumps(content, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
