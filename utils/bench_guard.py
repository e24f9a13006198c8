"""What it costs to compare the ranks' inputs: FLUX.1-dev's real shape through FluxPipeline, by `rank_check`.

    torchrun --nproc_per_node=2 utils/bench_guard.py --tp 2 --compile

Milliseconds a step over whole calls of the pipeline, from embeddings to latents, and what of them the comparing took
by itself: all ranks wait for each other before it, and for their devices after it, so that it is neither hidden nor
charged with another rank's delay. Random bf16 weights.
"""

import functools
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from arguments import new_file, positive
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from ranks import rank_of_torchrun
from versions import versions

import diffusers_rocm
from diffusers_rocm.benchmarks.known_models import KNOWN_MODELS, build
from diffusers_rocm.commands import Parser
from diffusers_rocm.hooks import rank_guard
from diffusers_rocm.hooks.rank_guard import GuardedScheduler
from diffusers_rocm.pipelines import guard_ranks
from diffusers_rocm.pipelines.choices import CHOICES


class Stopwatch:
    """Sums the milliseconds that functions take, each begun by all ranks together with nothing left to do."""

    def __init__(self, device: torch.device):
        self.device, self.milliseconds = device, 0.0

    def sync(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def wrap(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def timed(*args, **kwargs):
            self.sync()
            dist.barrier()
            self.sync()
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.sync()
            self.milliseconds += (time.perf_counter() - started) * 1000
            return result

        return timed


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=positive, default=1)
    parser.add_argument("--ulysses", type=positive, default=1)
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--repeats", type=positive, default=4)
    parser.add_argument("--resolution", type=positive, default=1024)
    parser.add_argument("--double", type=positive, default=19)
    parser.add_argument("--single", type=positive, default=38)
    parser.add_argument("--width", type=positive, default=3072)
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=new_file, help="write the rows as JSON")
    args = parser.parse_args()
    shape = {"num_layers": args.double, "num_single_layers": args.single, "num_attention_heads": args.width // 128}
    device = rank_of_torchrun()
    embeddings = torch.randn(1, 512, 4096, generator=torch.Generator().manual_seed(0)).to(device, args.dtype)
    pooled = torch.randn(1, 768, generator=torch.Generator().manual_seed(1)).to(device, args.dtype)
    config = diffusers_rocm.ParallelConfig(tp=args.tp, ulysses=args.ulysses)
    model = build(KNOWN_MODELS["flux"], shape, device, args.dtype)
    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), *[None] * 5, model)
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
    times: dict[str, list[float]] = {check: [] for check in CHOICES["rank_check"]}
    guards: dict[str, list[float]] = {check: [] for check in CHOICES["rank_check"]}
    parts = [(rank_guard, "agree"), (GuardedScheduler, "end_step")]
    for turn in range(args.repeats + 1):
        for check in CHOICES["rank_check"]:
            hooks = guard_ranks(pipe, [pipe.transformer], check)
            taken = call()
            watch = Stopwatch(device)
            plain = [getattr(*part) for part in parts]
            for part, function in zip(parts, plain, strict=True):
                setattr(*part, watch.wrap(function))
            call()
            for part, function in zip(parts, plain, strict=True):
                setattr(*part, function)
            if turn:  # the first one warms up
                times[check].append(taken)
                guards[check].append(watch.milliseconds / args.steps)
            for _, hook in reversed(hooks):
                hook.remove()
    if dist.get_rank() == 0:
        rows = [
            {"rank_check": check, "ms": statistics.median(times[check]), "guard_ms": statistics.median(guards[check])}
            for check in CHOICES["rank_check"]
        ]
        for row in rows:
            row["share"], least = row["guard_ms"] / row["ms"], min(times[row["rank_check"]])
            print(
                f"rank_check={row['rank_check']!r:9} {row['ms']:8.3f} ms a step (from {least:.3f}), "
                f"of them comparing {row['guard_ms']:.3f} ms ({row['share']:.2%})"
            )
        if args.out:
            arguments = {name: str(value) for name, value in vars(args).items() if name != "out"}
            content = {"arguments": arguments, "versions": versions(), "rows": rows}
            args.out.write_text(json.dumps(content, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
