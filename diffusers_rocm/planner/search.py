"""All meshes of some GPUs: what each costs, and why those that cannot be had cannot."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ..benchmarks.known_models import Size
from ..distributed.choices import Busy
from ..distributed.links import FAST
from ..pipelines.room import ROOM
from .cost import Seconds, axis_size, predict
from .hardware import GPU, Links, to_one_neighbour
from .rehearsal import Ledger, rehearse
from .stages import decode_bytes, encoder_bytes
from .subject import Subject


# Of a GPU's memory, what its driver, the contexts and the buffers of collectives take.
RESERVED = 1.0e9

# GPUs from which on not all meshes are looked at.
MANY = 9

# Bytes of a weight, and of a Linear's weight in 8 or 4 bits, scales included.
WEIGHT_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "int8": 1.01, "fp8": 1.01, "int4": 0.56}
QUANTIZED = ("int8", "fp8", "int4")


@dataclass(frozen=True)
class Machine:
    """The GPUs that there are.

    Attributes:
        memory: bytes of each.
    """

    gpu: GPU
    gpus: int
    nodes: int
    memory: float
    links: Links

    @property
    def world(self) -> int:
        """GPUs of all nodes."""
        return self.gpus * self.nodes


@dataclass(frozen=True)
class Candidate:
    """A mesh, as the rank with the most has it.

    Attributes:
        degrees: axis -> ranks, without those of one.
        rotate_method: of a ring.
        seconds: of one forward.
        forwards: in a row, of one step.
        guidance: seconds in which the branches of guidance exchange their predictions.
        stages: bytes while text is encoded, while it denoises and while it decodes.
        tiled: whether it decodes tile by tile.
    """

    degrees: Mapping[str, int]
    rotate_method: str
    seconds: Seconds
    forwards: int
    guidance: float
    stages: Mapping[str, float]
    tiled: bool

    @property
    def step(self) -> float:
        """Seconds of one denoising step."""
        return self.forwards * self.seconds.total + self.guidance

    def __str__(self) -> str:
        return mesh_name(self.degrees, self.rotate_method)


@dataclass(frozen=True)
class Dropped:
    """A mesh that cannot be had; where bytes are why: `short_of` has how many it lacks, `way_out` what frees them."""

    mesh: str
    reason: str
    short_of: float = 0.0
    way_out: str = ""


def mesh_name(degrees: Mapping[str, int], rotate_method: str) -> str:
    """`ring=2,ulysses=2 (p2p)`, or `one GPU`."""
    named = ",".join(f"{axis}={size}" for axis, size in degrees.items()) or "one GPU"
    return f"{named} ({rotate_method})" if degrees.get("ring", 1) > 1 else named


def meshes(machine: Machine, forwards: int) -> Iterator[tuple[dict[str, int], str]]:
    """All products of the axes that share a picture, and how a ring sends; sums stay inside a node."""
    world, links = machine.world, machine.links
    divisors = [each for each in range(1, world + 1) if world % each == 0]
    # Where sending to one neighbour is as fast as to all, gathering was never faster (docs/performance.md).
    slow = any(to_one_neighbour(rate) < rate for rate in (links.inside, links.between))
    for cfg, ring, ulysses, tp in itertools.product((1, 2), divisors, divisors, divisors):
        if cfg * ring * ulysses * tp != world or cfg > forwards or tp > machine.gpus:
            continue
        degrees = {"cfg": cfg, "ring": ring, "ulysses": ulysses, "tp": tp}
        for rotate_method in ("p2p", "allgather") if ring > 1 and slow else ("p2p",):
            yield {axis: size for axis, size in degrees.items() if size > 1}, rotate_method


def search(
    subject: Subject,
    size: Size,
    machine: Machine,
    dtype: str,
    compiled: bool = True,
    told: Callable[[str], None] = lambda mesh: None,
    wanted: Callable[[Mapping[str, int]], bool] = lambda degrees: True,
) -> tuple[list[Candidate], list[Dropped]]:
    """Every mesh of all GPUs of the machine: those that fit, the fastest first, and those that are dropped.

    Where there are many, a higher tp is looked at only as long as it is faster than the last.

    Args:
        dtype: of the weights: of `WEIGHT_BYTES`. What is computed is in bfloat16 where weights are smaller.
        told: is called with the name of each mesh, and of what is beside them, before it is looked at.
        wanted: which meshes to look at.

    Raises:
        ValueError: a class that diffusers or transformers lacks.
    """
    told("text encoders and VAE")
    around, tiled = _around_denoising(subject, size, machine, computed(dtype))
    found, dropped, ledgers = [], [], {}
    by_tp: dict[int, list[tuple[dict[str, int], str]]] = {}
    for degrees, rotate_method in meshes(machine, subject.forwards):
        if wanted(degrees):
            by_tp.setdefault(degrees.get("tp", 1), []).append((degrees, rotate_method))
    for tp, of_tp in sorted(by_tp.items()):
        fastest = min((each.step for each in found), default=math.inf)
        before = len(found)
        for degrees, rotate_method in of_tp:
            name = mesh_name(degrees, rotate_method)
            told(name)
            shared = {axis: count for axis, count in degrees.items() if axis != "cfg"}
            slow = _slowest_of_ulysses(machine, degrees) < FAST
            key = rotate_method, (*shared.items(), slow)
            try:
                if key not in ledgers:
                    given = subject.known, size, shared, subject.config, computed(dtype), rotate_method, slow
                    ledgers[key] = rehearse(*given, Busy.of_gpu(machine.gpu.multiprocessors))
            except ValueError as error:
                dropped.append(Dropped(name, str(error)))
                continue
            if rotate_method == "allgather" and ledgers[key] == ledgers.get(("p2p", key[1])):
                continue  # short sequences are gathered by either
            each = _candidate(degrees, rotate_method, ledgers[key], around, tiled, subject, machine, dtype, compiled)
            (found if isinstance(each, Candidate) else dropped).append(each)
        if machine.world > MANY and len(found) > before and min(each.step for each in found[before:]) > fastest:
            if tp < max(by_tp):
                dropped.append(Dropped(f"tp>{tp}", f"not looked at: tp={tp} is slower than less"))
            break
    return sorted(found, key=lambda each: each.step), dropped


def _slowest_of_ulysses(machine: Machine, degrees: Mapping[str, int]) -> float:
    """Bytes a second of the slowest link between ranks of the axis, inside of which the ranks of tp are."""
    inside = degrees.get("ulysses", 1) * degrees.get("tp", 1) <= machine.gpus
    return machine.links.inside if inside else min(machine.links.inside, machine.links.between)


def never_made(subject: Subject, machine: Machine) -> list[Dropped]:
    """Kinds of meshes that `meshes` leaves out."""
    found = []
    if subject.forwards == 1 and machine.world % 2 == 0:
        found.append(Dropped("cfg=2", "a step is one forward, without guidance that two could share (--guidance)"))
    if machine.nodes > 1:
        found.append(Dropped(f"tp>{machine.gpus}", "its sums in every layer would go between nodes"))
    return found


def _around_denoising(
    subject: Subject, size: Size, machine: Machine, dtype: torch.dtype
) -> tuple[dict[str, float], bool]:
    """Bytes of a rank while text is encoded, and while a picture is decoded; whether it must be tile by tile."""
    encoders = [encoder_bytes(part, machine.world, dtype) for part in subject.encoders.values()]
    # A whole encoder on each rank costs no traffic; they are sharded where they would not fit.
    fits = sum(whole for whole, _ in encoders) <= ROOM * machine.memory
    found: dict[str, float] = {"encode": sum(whole if fits else part for whole, part in encoders), "decode": 0}
    if subject.vae is None:
        return found, False
    found["decode"] = decode_bytes(subject.vae, size, dtype, tiled=False)
    tiled = found["decode"] > machine.memory - RESERVED
    if tiled:
        found["decode"] = decode_bytes(subject.vae, size, dtype, tiled=True)
    return found, tiled


def _candidate(
    degrees: dict[str, int],
    rotate_method: str,
    ledger: Ledger,
    around: Mapping[str, float],
    tiled: bool,
    subject: Subject,
    machine: Machine,
    dtype: str,
    compiled: bool,
) -> Candidate | Dropped:
    stages = {**around, "denoise": denoise_bytes(ledger, dtype)}
    stage, most = max(stages.items(), key=lambda item: item[1])
    short = most + RESERVED - machine.memory
    if short > 0:
        reason = f"{most / 1e9:.1f} GB to {stage}, {(machine.memory - RESERVED) / 1e9:.1f} are free"
        return Dropped(mesh_name(degrees, rotate_method), reason, short, _way_out(stage, short, ledger, dtype))
    seconds = predict(ledger, degrees, machine.gpu, machine.links, machine.gpus, compiled)
    cfg = degrees.get("cfg", 1)
    guidance = _seconds_of_guidance(ledger, degrees, machine) if cfg > 1 else 0.0
    return Candidate(degrees, rotate_method, seconds, subject.forwards // cfg, guidance, stages, tiled)


def _way_out(stage: str, short: float, ledger: Ledger, dtype: str) -> str:
    """What frees so many bytes: something about weights, where these are enough."""
    if stage == "decode":  # of a tile, by each rank
        return "a smaller --resolution, fewer --frames, or GPUs of more memory"
    held = denoise_bytes(ledger, dtype)
    if stage == "denoise" and short > held - ledger.activations:
        return "a smaller --resolution, fewer --frames, less --text, or more GPUs"
    enough = stage == "denoise" and short <= held - denoise_bytes(ledger, "int8")
    return f"{'--dtype int8' if enough else 'more GPUs'}, or generate's --offload group"


def one_gpu(subject: Subject, size: Size, machine: Machine, dtype: str, compiled: bool) -> float:
    """Seconds of a step of one GPU that has room for all of it."""
    ledger = rehearse(subject.known, size, {}, subject.config, computed(dtype))
    return subject.forwards * predict(ledger, {}, machine.gpu, machine.links, machine.gpus, compiled).total


def computed(dtype: str) -> torch.dtype:
    """What a forward is computed in, with weights of this dtype."""
    return getattr(torch, dtype) if dtype in ("float16", "float32") else torch.bfloat16


def denoise_bytes(ledger: Ledger, dtype: str) -> float:
    """Weights in their dtype, and what a step holds besides."""
    small = WEIGHT_BYTES[dtype] / 2 if dtype in QUANTIZED else 1.0
    return ledger.weights - ledger.linears * (1 - small) + ledger.activations


def _seconds_of_guidance(ledger: Ledger, degrees: Mapping[str, int], machine: Machine) -> float:
    rate = machine.links.inside if 2 * axis_size("model", degrees) <= machine.gpus else machine.links.between
    return machine.links.latency + ledger.output / rate
