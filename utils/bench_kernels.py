"""Where the time of a step goes, by kinds of kernels: those that compute, and messages, waiting and nothing at all.

    torchrun --nproc_per_node=4 utils/bench_kernels.py --mesh ulysses=4 tp=4 --mode compile+graph --json FILE
    python utils/bench_kernels.py --alone --mesh ulysses=4 tp=4 --mode compile+graph --json FILE

`--alone` is one rank of each mesh on one GPU: its model is sharded and split as ever, and its messages go nowhere, in
no time, since torch's fake process group does nothing. So a row has no communication and no waiting for other ranks:
what a step of the real mesh takes longer is theirs, and a quarter of one rank's time is what this computing would be
if all of it were split over four. What comes out means nothing there.

A kernel of NCCL, and one in which ranks meet, ends when all have come to it. So of these a message is what it takes
the rank that comes last, and the rest is waiting; a copy out of another rank's memory waits for nobody. Hidden is what
of both has another kernel beside it. Kernels are told apart by their names. The rows are the first rank's. Random bf16
weights. A mesh whose answer is not one rank's is called wrong, and not timed.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from arguments import new_file, positive
from ranks import rank_of_torchrun
from torch.utils._pytree import tree_leaves
from versions import versions

import diffusers_rocm
from diffusers_rocm.benchmarks.distance import bar_of, distance, largest_of
from diffusers_rocm.benchmarks.known_models import KNOWN_MODELS, build, count_blocks, inputs, made
from diffusers_rocm.benchmarks.step import MODES, ONE, Clock, check_meshes, parse_mesh, ranks_of
from diffusers_rocm.commands import Parser
from diffusers_rocm.commands.bench_step import setting
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.collectives import all_gather_int64
from diffusers_rocm.distributed.launching import under_torchrun
from diffusers_rocm.distributed.overlap import HIDE_MESSAGES
from diffusers_rocm.hooks import sequence_split, step_graph, token_slices
from diffusers_rocm.hooks.step_graph import WARM_UP, StepGraph
from diffusers_rocm.models import modeling_utils
from diffusers_rocm.planner.rehearsal import ranks_that_are_not_there


# Parts of the names that kernels of NVIDIA's libraries have; the compiler's are named by all that they do.
KINDS = {
    "meetings": ("nccl", "barrier_kernel"),
    "copies": ("memcpy ptop", "memcpy dtoh", "memcpy htod"),
    "other": ("triton_",),
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "splitk"),
}

# Steps that are profiled; the last is looked at, when the clocks are those of a GPU that is busy.
IN_A_ROW = 5

# Whether a message is waited for before what does not need it is computed, or after.
WAYS_TO_WAIT = {"at-once": {}, "late": HIDE_MESSAGES}


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--alone", action="store_true", help="one rank of each mesh by itself")
    parser.add_argument("--model", choices=KNOWN_MODELS, default="flux")
    parser.add_argument("--mesh", nargs="+", default=["ulysses=4", "ring=4", "tp=4"])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["compile+graph"])
    parser.add_argument("--resolution", type=positive)
    parser.add_argument("--frames", type=positive)
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--config", nargs="+", default=[], metavar="NAME=VALUE", help="what differs from the model's")
    parser.add_argument("--wait", choices=WAYS_TO_WAIT, help="in compiled code; default: as the links are")
    parser.add_argument("--process-group", action="store_true", help="messages by it, not by copies")
    parser.add_argument("--memsets", action="store_true", help="leave those of a graph what they are")
    parser.add_argument("--gelu-apart", action="store_true", help="not in the product before it, in compiled code")
    parser.add_argument("--fuse", action="store_true", help="queries, keys and values in one product")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=new_file)
    args = parser.parse_args()
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))

    device = torch.device(args.device, 0) if args.alone else rank_of_torchrun(args.device)
    rows, first = [], args.alone or dist.get_rank() == 0

    if args.process_group or args.alone:
        sequence_split.reaches_memory = token_slices.reaches_memory = lambda _: False

    if args.gelu_apart:
        modeling_utils.FUSE_GELU = {}

    if args.memsets:
        step_graph.memsets_become_kernels = lambda device: False

    def ranks(count: int) -> contextlib.AbstractContextManager:
        return ranks_that_are_not_there(count) if args.alone else contextlib.nullcontext()

    with ranks(1):
        found = versions()
    wanted, wrong = None, False
    for mode, mesh in itertools.product(args.mode, (ONE, *args.mesh)):
        with ranks(1 if mesh == ONE else ranks_of(mesh)):
            figures, answer, bar = measure(args, mesh, mode.split("+"), device)
        wanted = answer if wanted is None else wanted
        if not args.alone and not (most := largest_of(distance(answer, wanted), Axis.of_all())) <= bar:
            wrong, figures = True, {"wrong": f"{most:.1e} from one rank, more than {bar:.1e}"}
        rows.append({"mesh": mesh, "mode": mode, **figures})
        if first:
            shown = (f"{name} {value:.1f}" for name, value in figures.items() if isinstance(value, float))
            print(mesh, mode, *([f"wrong: {figures['wrong']}"] if "wrong" in figures else shown), sep="  ", flush=True)
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if first and args.json:
        command = " ".join(["utils/bench_kernels.py", *sys.argv[1:]]).replace(f" --json {args.json}", "")
        args.json.write_text(json.dumps({"command": command, "versions": found, "rows": rows}, indent=1) + "\n")
    if not args.alone:
        dist.destroy_process_group()
    sys.exit(int(wrong))


def check(args: argparse.Namespace) -> None:
    """Raises ValueError."""
    known = KNOWN_MODELS[args.model]
    known.sized(args.resolution, args.frames, None)
    made(known, dict(map(setting, args.config)))
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU: give --device cpu, which has no kernels to tell apart")
    if args.alone:
        for mesh in args.mesh:
            parse_mesh(mesh)
    elif under_torchrun() and check_meshes(tuple(args.mesh)) != (world := int(os.environ["WORLD_SIZE"])):
        raise ValueError(f"--mesh {args.mesh[0]} is of {ranks_of(args.mesh[0])} ranks, and torchrun started {world}")
    if args.device == "cpu" and any("graph" in mode for mode in args.mode):
        raise ValueError(f"--mode {' '.join(args.mode)} needs a GPU: give --mode eager")


@torch.no_grad()
def measure(
    args: argparse.Namespace, mesh: str, flags: list[str], device: torch.device
) -> tuple[dict[str, Any], torch.Tensor, float]:
    """Median milliseconds of a step, and those of its kernels by kind; its answer, and how far others may be off."""
    known = KNOWN_MODELS[args.model]
    model = build(known, dict(map(setting, args.config)), device, torch.bfloat16)
    given = inputs(known, known.sized(args.resolution, args.frames, None), model, torch.bfloat16)
    if mesh != ONE:
        model.enable_parallelism(config=diffusers_rocm.ParallelConfig(**parse_mesh(mesh)))
    if args.fuse:
        model.fuse_qkv_projections()
    graph = StepGraph(model) if "graph" in flags else None
    if "compile" in flags:
        options = {} if args.wait is None else {"options": modeling_utils.FUSE_GELU | WAYS_TO_WAIT[args.wait]}
        model.compile_repeated_blocks(fullgraph=True, **options)
    for _ in range(2 + WARM_UP):
        model(**given)
    clock = Clock(device)
    clock.sync()
    found = {"ms": statistics.median(clock.milliseconds(lambda: model(**given)) for _ in range(args.repeats))}
    if device.type == "cuda":
        if not args.alone:
            dist.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(IN_A_ROW):
                model(**given)
            clock.sync()
        on_gpu = (each for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA)
        launched = sorted(on_gpu, key=lambda each: each.time_range.start)
        if len(launched) % IN_A_ROW:
            print(f"{mesh}: {len(launched)} kernels are not those of {IN_A_ROW} like steps", file=sys.stderr)
        last = launched[-(len(launched) // IN_A_ROW) :]
        found |= by_kind(last, Axis.of_all())
        totals: Counter[str] = Counter()
        for each in last:
            totals[each.name[:90]] += each.time_range.elapsed_us() / 1000
        found["kernels"] = dict(totals.most_common(30))
    answer = tree_leaves(model(**given))[0].clone()
    if graph is not None:
        graph.remove()
    return found, answer, bar_of(count_blocks(model), torch.bfloat16, lossy="int8" in mesh)


def by_kind(kernels: Iterable[Any], world: Axis) -> dict[str, float]:
    """Milliseconds of a step of this rank: of kernels by kind, of waiting, and of what is hidden of messages."""
    spans: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for event in kernels:
        name = event.name.lower()
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
        spans[kind].append((event.time_range.start, event.time_range.end))
    found = {kind: sum(stop - start for start, stop in of) / 1000 for kind, of in spans.items()}
    meetings = sorted(spans.pop("meetings"))
    messages = [*meetings, *spans.pop("copies")]
    own, copies = found.pop("meetings"), found.pop("copies")
    counts = all_gather_int64(torch.tensor([len(meetings)]), world)
    assert counts.min() == counts.max(), counts
    of_the_last = 0.0
    if meetings:
        taken = torch.tensor([round(1000 * (stop - start)) for start, stop in meetings])  # ns
        of_the_last = all_gather_int64(taken, world).amin(dim=0).sum().item() / 1e6
    found |= {"messages": copies + of_the_last, "waiting": own - of_the_last}
    computing = covered(itertools.chain.from_iterable(spans.values()))
    found["hidden"] = (covered(messages) + computing - covered([*messages, *itertools.chain(*spans.values())])) / 1000
    return found


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of all of them together, what is in several counted once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


if __name__ == "__main__":
    main()
