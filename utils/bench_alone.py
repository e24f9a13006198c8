"""What one rank of a mesh computes, on one GPU: its model is sharded and split as ever, and its messages go nowhere.

    python utils/bench_alone.py --mesh ulysses=4 tp=4 --mode compile+graph --json FILE

The process group is torch's fake one, whose collectives do nothing, in no time. So a row has no communication and no
waiting for other ranks: what a step of the real mesh takes longer is theirs, and a quarter of one rank's time is what
this computing would be if all of it were split. Kernels are told apart by their names. Random bf16 weights; what comes
out means nothing.
"""

import argparse
import gc
import json
import statistics
import sys
from pathlib import Path

import torch
from bench_transformer import versions

import diffusers_rocm
from diffusers_rocm.benchmarks.known_models import KNOWN_MODELS, build, inputs
from diffusers_rocm.benchmarks.step import MODES, ONE, Clock, parse_mesh, ranks_of
from diffusers_rocm.hooks.step_graph import WARM_UP, StepGraph
from diffusers_rocm.planner.rehearsal import ranks_that_are_not_there


# Parts of the names that kernels of NVIDIA's libraries have; the compiler's are named by all that they do.
KINDS = {
    "other": ("triton_",),
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "splitk"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=KNOWN_MODELS, default="flux")
    parser.add_argument("--mesh", nargs="+", default=["ulysses=4", "ring=4", "tp=4"])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["compile+graph"])
    parser.add_argument("--resolution", type=int)
    parser.add_argument("--frames", type=int)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--config", type=json.loads, default={}, help="what differs from the model's, as JSON")
    parser.add_argument("--fuse", action="store_true", help="queries, keys and values in one product")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
    rows = []
    with ranks_that_are_not_there(1):
        found = versions()
    for mode in args.mode:
        for mesh in (ONE, *args.mesh):
            with ranks_that_are_not_there(1 if mesh == ONE else ranks_of(mesh)):
                rows.append({"mesh": mesh, "mode": mode, **measure(args, mesh, mode.split("+"), device)})
            figures = {name: value for name, value in rows[-1].items() if isinstance(value, float)}
            print(mesh, mode, *(f"{name} {value:.1f}" for name, value in figures.items()), sep="  ")
            gc.collect()
            torch._dynamo.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if args.json:
        command = " ".join(["utils/bench_alone.py", *sys.argv[1:]]).replace(f" --json {args.json}", "")
        args.json.write_text(json.dumps({"command": command, "versions": found, "rows": rows}, indent=1) + "\n")


@torch.no_grad()
def measure(args: argparse.Namespace, mesh: str, flags: list[str], device: torch.device) -> dict[str, float]:
    """Median milliseconds of a step, and those of its kernels by kind."""
    known = KNOWN_MODELS[args.model]
    model = build(known, args.config, device, torch.bfloat16)
    given = inputs(known, known.sized(args.resolution, args.frames, None), model, torch.bfloat16)
    if mesh != ONE:
        model.enable_parallelism(config=diffusers_rocm.ParallelConfig(**parse_mesh(mesh)))
    if args.fuse:
        model.fuse_qkv_projections()
    if "compile" in flags:
        model.compile_repeated_blocks(fullgraph=True)
    graph = StepGraph(model) if "graph" in flags else None
    for _ in range(2 + WARM_UP):
        model(**given)
    clock = Clock(device)
    clock.sync()
    found = {"ms": statistics.median(clock.milliseconds(lambda: model(**given)) for _ in range(args.repeats))}
    if device.type == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            model(**given)
            clock.sync()
        kinds = dict.fromkeys(KINDS, 0.0)
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                name = event.name.lower()
                kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
                kinds[kind] += event.device_time / 1000
        found |= kinds
        totals = {each.key[:90]: each.device_time_total / 1000 for each in profile.key_averages()}
        found["kernels"] = dict(sorted(totals.items(), key=lambda pair: -pair[1])[:30])
    if graph is not None:
        graph.remove()
    return found


if __name__ == "__main__":
    main()
