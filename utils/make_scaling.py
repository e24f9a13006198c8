"""Write docs/scaling.md: what the planner predicts for 1 to 64 nodes. Minutes, on all cores."""

import argparse
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from diffusers_rocm.planner.hardware import BETWEEN_NODES, GPUS, Links
from diffusers_rocm.planner.search import Machine, one_gpu, search
from diffusers_rocm.planner.subject import find_subject


PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
NODES = (1, 2, 3, 4, 5, 8, 16, 32, 64)
MODELS = {"hunyuan-video": 24, "wan": 40}
COLUMNS = "| nodes | GPUs | mesh | s a step | over one GPU | by Ulysses alone |\n|---|---|---|---|---|---|"
HEAD = """# From 1 to 64 nodes, predicted

**Predictions, not measurements**, by `python utils/make_scaling.py`: nodes of 8 MI300X, of which nothing was measured
here (shares of the data sheet are assumed, [planning.md](planning.md)), {inside:g} GB/s inside a node and {between:g}
GB/s for each GPU between nodes, compiled, bfloat16. A step is one denoising step; tp is left out, since weights fit.
On more than 8 nodes not all meshes were looked at: of Ulysses only multiples of 4.

By Ulysses alone HunyuanVideo (24 heads) goes as far as 3 nodes and Wan 2.1 14B (40 heads) as far as 5: each rank needs
a head. Beyond, a ring joins, whose hops hide under attention, as most of what Ulysses sends between nodes does where
there is no ring; with guidance each branch has half of the GPUs. A step gets no faster without end: more GPUs than
help one picture make more pictures at a time (`dp`).
"""


def row(name: str, heads: int, nodes: int) -> str:
    subject, gpu = replace(find_subject(name), encoders={}, vae=None), GPUS["MI300X"]
    machine = Machine(gpu, 8, nodes, gpu.memory, Links(gpu.link, BETWEEN_NODES))

    def wanted(degrees: Mapping[str, int]) -> bool:
        # Whole branches by cfg; on many nodes also whole halves of a node by Ulysses, as all meshes would take hours.
        ulysses = degrees.get("ulysses", 1)
        branches = degrees.get("cfg", 1) == subject.forwards or degrees.keys() == {"ulysses"}
        return "tp" not in degrees and ulysses <= heads and branches and (ulysses % 4 == 0 or nodes <= 8)

    found, dropped = search(subject, subject.size, machine, "bfloat16", wanted=wanted)
    if not found:
        return f"| {nodes} | {machine.world} | none: {dropped[0].reason.partition(': ')[2]} | | | |"
    alone = one_gpu(subject, subject.size, machine, "bfloat16", True)
    best = found[0]
    ulysses = next((each for each in found if each.degrees == {"ulysses": machine.world}), None)
    beside = f"{ulysses.step:.2f}" if ulysses else "too few heads"
    return f"| {nodes} | {machine.world} | {best} | {best.step:.2f} | {alone / best.step:.1f}x | {beside} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    parts = [HEAD.format(inside=GPUS["MI300X"].link / 1e9, between=BETWEEN_NODES / 1e9)]
    one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ProcessPoolExecutor(mp_context=get_context("spawn"), **one_thread) as pool:
        rows = {
            (name, nodes): pool.submit(row, name, heads, nodes)
            for nodes in reversed(NODES)  # the longest first
            for name, heads in MODELS.items()
        }
        for name in MODELS:
            subject = find_subject(name)
            size = subject.size
            title = f"{subject.name}, {size.height} x {size.width} x {size.frames} frames"
            lines = [COLUMNS, *(rows[name, nodes].result() for nodes in NODES)]
            parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    PAGE.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
