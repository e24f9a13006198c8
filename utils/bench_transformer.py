"""Step time and memory of a transformer's real shape with random bf16 weights, ours beside the peers, in one run.

    torchrun --nproc_per_node=4 utils/bench_transformer.py single tp diffusers-tp single+c tp+c diffusers-tp+c
    torchrun --nproc_per_node=4 utils/bench_transformer.py --model hunyuan-video --double 2 --single 4 ring4 ulysses4

A mode is NAME[+c][+g]: +c compiles the repeated blocks, +g replays the model's forward as a CUDA graph. NAME is
`single` (one GPU, no parallelism), `tp` (ours), `tp-gather-each` (ours, with a gather in every block in place of one
a step), `diffusers-tp` (DTensor, diffusers 0.40 or later), or any mesh: `ring4`, `ulysses2tp2`, `cfg2ulysses2`, in
the order cfg, ring, ulysses, tp, with `-allgather` after it for the other way round the ring and `-int8` for
activations sent in 8 bits, and `diffusers-` before it for diffusers' own. `@BACKEND` at the end of a name sets
diffusers' attention backend. The speed-up of a mode is over the `single` of the same flags, so name that first; the
error is against the same weights and inputs in float32. One forward is one step; with `--guidance` a step is two,
with another text in the second. `--resolution`, `--double`, `--single`, `--dtype` and `--width` change the shape, so
that the script can be tried on a CPU.
"""

import argparse
import gc
import json
import math
import os
import platform
import re
import statistics
import sys
import time
from pathlib import Path

import diffusers
import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

import diffusers_rocm
from diffusers_rocm.benchmarks.known_models import KNOWN_MODELS, build, inputs
from diffusers_rocm.benchmarks.step import Clock
from diffusers_rocm.hooks.step_graph import WARM_UP, StepGraph


def config(args: argparse.Namespace) -> dict:
    """Fewer or narrower blocks than the model's."""
    given = {"num_layers": args.double, "num_single_layers": args.single}
    if args.width is not None:
        given["num_attention_heads"] = args.width // 128
        if args.model == "wan":
            given["ffn_dim"] = args.width * 27 // 10
    return {name: value for name, value in given.items() if value is not None}


MESH = re.compile(r"(diffusers-)?(?:cfg(\d+))?(?:ring(\d+))?(?:ulysses(\d+))?(?:tp(\d+))?(-allgather)?(-int8)?")


def enable(name: str, model: torch.nn.Module) -> None:
    if name in ("tp", "tp-gather-each"):
        model.enable_parallelism(config=diffusers_rocm.TensorParallelConfig(tp=dist.get_world_size()))
        for hook in model.parallelism.hooks if name == "tp-gather-each" else ():
            hook.remove()
    elif name == "diffusers-tp":
        model.enable_parallelism(config=diffusers.TensorParallelConfig(tp_degree=dist.get_world_size()))
    elif name != "single":
        found = MESH.fullmatch(name)
        if found is None:
            raise ValueError(f"unknown mode {name!r}")
        theirs, *degrees, gathered, rounded = found.groups()
        cfg, ring, ulysses, tp = (int(degree or 1) for degree in degrees)
        if theirs:
            config = diffusers.ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
        else:
            ways = {
                "rotate_method": "allgather" if gathered else "p2p",
                "communication": "int8" if rounded else "exact",
            }
            config = diffusers_rocm.ParallelConfig(cfg=cfg, ring=ring, ulysses=ulysses, tp=tp, **ways)
        model.enable_parallelism(config=config)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@torch.no_grad()
def float32_reference(args: argparse.Namespace, device: torch.device) -> torch.Tensor:
    """The same weights and inputs, all arithmetic in float32."""
    known = KNOWN_MODELS[args.model]
    model = build(known, config(args), device, args.dtype).float()
    given = inputs(known, args.size, model, args.dtype).items()
    kwargs = {k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in given}
    return model(**kwargs)[0]


@torch.no_grad()
def measure(mode: str, args: argparse.Namespace, device: torch.device) -> tuple[dict, torch.Tensor]:
    name, *flags = mode.split("+")
    known, clock = KNOWN_MODELS[args.model], Clock(device)
    model = build(known, config(args), device, args.dtype)
    kwargs = inputs(known, args.size, model, args.dtype)
    name, _, backend = name.partition("@")
    _AttentionBackendRegistry.set_active_backend("native")  # an earlier mode may have set it for the process
    if backend:
        model.set_attention_backend(backend)
    enable(name, model)
    free(device)
    if "c" in flags:
        model.compile_repeated_blocks(fullgraph=not name.startswith("diffusers-"))

    other = {**kwargs, "encoder_hidden_states": kwargs["encoder_hidden_states"].flip(1)}

    def step():
        prediction = model(**kwargs)[0]
        if args.guidance:
            unguided = model(**other)[0]
            return unguided + 5 * (prediction - unguided)
        return prediction

    graph = StepGraph(model) if "g" in flags else None
    for _ in range(args.warmup + WARM_UP):
        output = step()
    clock.sync()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [clock.milliseconds(step) for _ in range(args.repeats)]
    output = step()
    clock.sync()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else math.nan
    peaks = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    dist.all_gather_into_tensor(peaks, torch.tensor([peak], dtype=torch.float64, device=device))
    row = {"mode": mode, "ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
    row["peak_gib"] = [round(value / 2**30, 3) for value in peaks.tolist()]
    if graph is not None:
        graph.remove()
    return row, output.clone()


def versions() -> dict:
    found = {"torch": torch.__version__, "diffusers": diffusers.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        found["device"] = f"{dist.get_world_size()} x {torch.cuda.get_device_name()}"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["NCCL_P2P_DISABLE"] = os.environ.get("NCCL_P2P_DISABLE", "0")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="+")
    parser.add_argument("--model", choices=KNOWN_MODELS, default="flux")
    parser.add_argument("--resolution", type=int, help="the height; default: the model's")
    parser.add_argument("--frames", type=int, help="of a video; default: the model's")
    parser.add_argument("--guidance", action="store_true", help="two forwards a step")
    parser.add_argument("--double", type=int, help="double-stream blocks; default: the model's")
    parser.add_argument("--single", type=int, help="single-stream blocks; default: the model's")
    parser.add_argument("--width", type=int, help="default: the model's")
    parser.add_argument("--text", type=int, help="text tokens; default: the model's")
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--no-error", action="store_true", help="leave out the float32 reference, and the error")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    args.size = KNOWN_MODELS[args.model].sized(args.resolution, args.frames, args.text)
    device = diffusers_rocm.init()
    rank = dist.get_rank()

    args.no_error |= args.guidance
    reference, base, rows = None if args.no_error else float32_reference(args, device), {}, []
    free(device)
    for mode in args.modes:
        started = time.time()
        row, output = measure(mode, args, device)
        name, *flags = mode.split("+")
        if name == "single":
            base["+".join(flags)] = row["ms"]
        row["speedup"] = base.get("+".join(flags), math.nan) / row["ms"]
        if reference is not None:
            row["error"] = ((output.float() - reference).norm() / reference.norm()).item()
        rows.append(row)
        if rank == 0:
            print(
                f"{mode:34s} {row['ms']:8.2f} ms ({row['ms_min']:.2f} to {row['ms_max']:.2f})  "
                f"{row['speedup']:5.2f}x  peak {max(row['peak_gib']):6.2f} GiB a rank  "
                f"error against float32 {row.get('error', math.nan):.2e}  [{time.time() - started:.0f} s]",
                flush=True,
            )
        if rank == 0 and args.out:
            command = " ".join(["utils/bench_transformer.py", *sys.argv[1:]]).replace(f" --out {args.out}", "")
            content = {"command": command, "versions": versions(), "rows": rows}
            args.out.write_text(json.dumps(content, indent=2) + "\n")
        del output
        free(device)
        torch._dynamo.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
