"""What this machine's GPUs and links reach, measured in some seconds; `diffusers-rocm plan --measure`.

`python -m diffusers_rocm.planner.measure FILE`, on as many ranks as there are GPUs, writes it to FILE.
"""

import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F

from ..benchmarks.step import Clock
from ..distributed import init
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_stacked
from ..distributed.launching import end_rank, launch
from ..distributed.root_cause import record
from .hardware import GPU, PCIE, Links


REPEATS = 7

# What a step reaches of what one kernel alone does: a GPU that is busy all the time clocks lower, and its caches are
# full of other things. The shares are those of the H200's in a step (hardware.py) to what this file measures on it.
IN_A_STEP = {
    "matmul": 0.876, "attention": 0.958, "masked_attention": 1.07, "fused": 0.687, "eager": 0.938, "launch": 2.0,
}  # fmt: skip

# Collectives in a row, so that the launch of one hides under the one before, as it does in a model.
IN_A_ROW = 20


@dataclass(frozen=True)
class Measured:
    """Rates of one device alone, FLOP or bytes a second; seconds to start an operation; bytes a second of a link."""

    name: str
    matmul: float
    attention: float
    masked_attention: float
    copy: float
    launch: float
    units: int
    memory: float
    link: float | None

    def gpu(self) -> GPU:
        """What of these rates a transformer's step reaches."""
        return GPU(
            self.name,
            self.matmul * IN_A_STEP["matmul"],
            self.attention * IN_A_STEP["attention"],
            self.masked_attention * IN_A_STEP["masked_attention"],
            self.copy * IN_A_STEP["fused"],
            self.copy * IN_A_STEP["eager"],
            self.units,
            self.memory,
            self.link or PCIE,
            measured=True,
            launch=self.launch * IN_A_STEP["launch"],
        )


def measure() -> Measured:
    """Of this machine's first device, and of the links between all of them where there are several.

    Raises:
        RuntimeError: the ranks that measure the links failed; they said why.
    """
    count = torch.cuda.device_count()
    if count < 2:
        return _of_device(torch.device("cuda" if count else "cpu"))
    with tempfile.TemporaryDirectory(prefix="diffusers_rocm_") as folder:
        file = Path(folder, "measured.json")
        if code := launch(count, ["diffusers_rocm.planner.measure", str(file)]):
            raise RuntimeError(f"the links could not be measured (exit code {code})")
        return Measured(**json.loads(file.read_text()))


@torch.no_grad()
def _of_device(device: torch.device) -> Measured:
    on_gpu = device.type == "cuda"
    of = torch.cuda.get_device_properties(device) if on_gpu else None
    dtype, rows, heads = (torch.bfloat16, 4608, 24) if on_gpu else (torch.float32, 512, 4)
    x, weight = (torch.randn(shape, device=device, dtype=dtype) for shape in ((rows, 3072), (12288, 3072)))
    q = torch.randn(1, heads, rows, 128, device=device, dtype=dtype)
    mask = torch.ones(1, 1, 1, rows, device=device, dtype=torch.bool)
    mask[..., -rows // 8 :] = False
    large = torch.randn((1 << 28 if on_gpu else 1 << 24), device=device, dtype=dtype)
    small, into = torch.zeros(1, device=device), torch.empty_like(large)
    seconds = functools.partial(_seconds, Clock(device))
    attention = 4 * heads * rows**2 * 128
    return Measured(
        name=torch.cuda.get_device_name(device) if on_gpu else "CPU",
        matmul=2 * x.numel() * weight.shape[0] / seconds(lambda: F.linear(x, weight)),
        attention=attention / seconds(lambda: F.scaled_dot_product_attention(q, q, q)),
        masked_attention=attention / seconds(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask)),
        copy=2 * large.nbytes / seconds(lambda: into.copy_(large)),
        launch=seconds(lambda: [small.add_(1) for _ in range(1000)]) / 1000,
        units=of.multi_processor_count if on_gpu else 1,
        memory=of.total_memory if on_gpu else 16e9,
        link=None,
    )


def _seconds(clock: Clock, run: Callable[[], object]) -> float:
    run()
    clock.sync()
    return statistics.median(clock.milliseconds(run) for _ in range(REPEATS)) / 1e3


@record
def _measure_links(file: Path) -> None:
    device, world = init(timeout=timedelta(minutes=2)), Axis.of_all()
    found = replace(_of_device(device), link=_link(device, world))
    if world.rank == 0:
        file.write_text(json.dumps(asdict(found)))
    end_rank()


def _link(device: torch.device, world: Axis) -> float:
    """Bytes a second that each rank gives to each other; every rank calls it."""
    numel = 7_077_888 if device.type == "cuda" else 442_368  # a quarter of FLUX.1's activations at 1024 x 1024; at 256
    part = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    in_a_row = _seconds(Clock(device), lambda: [all_gather_stacked(part, world) for _ in range(IN_A_ROW)])
    return part.nbytes * (world.size - 1) / max(in_a_row / IN_A_ROW - Links(1, 1).latency, 1e-6)


if __name__ == "__main__":
    _measure_links(Path(sys.argv[1]))
