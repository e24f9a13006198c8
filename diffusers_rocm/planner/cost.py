"""From what a rank does to the seconds that it takes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..distributed.mesh import AXES, JOINED
from .hardware import GPU, Links, to_one_neighbour
from .rehearsal import Exchange, Ledger, Work


# Rows and columns of a product that one unit of a GPU makes at a time.
TILE = 128, 256


@dataclass
class Seconds:
    """Of one forward of one rank.

    Attributes:
        matmul, attention, other: computing.
        communication: by axis, what the rank waits for.
        hidden: sent while it computes.
    """

    matmul: float = 0.0
    attention: float = 0.0
    other: float = 0.0
    communication: dict[str, float] = field(default_factory=dict)
    hidden: float = 0.0

    @property
    def compute(self) -> float:
        """Of computing alone."""
        return self.matmul + self.attention + self.other

    @property
    def total(self) -> float:
        """Of computing and of waiting for others."""
        return self.compute + sum(self.communication.values())


def predict(
    ledger: Ledger, degrees: Mapping[str, int], gpu: GPU, links: Links, gpus_per_node: int, compiled: bool = True
) -> Seconds:
    """Seconds of a forward: products and attention at the rates that are reached, all else by its bytes.

    A collective takes its latency, and its bytes over the slowest link that they cross. Keys and values that a ring
    passes on are waited for as far as attention to those that are there takes less.
    """
    found, launches = Seconds(), 0
    for work, count in ledger.work.items():
        launches += count
        match work.kind:
            case "matmul":
                found.matmul += count * _matmul(work, gpu)
            case "attention":
                found.attention += count * work.flops / gpu.attention
            case "masked attention":
                found.attention += count * work.flops / gpu.masked_attention
            case _:
                moved, rate = (work.fused_bytes, gpu.fused) if compiled else (work.eager_bytes, gpu.eager)
                found.other += count * moved / rate
    hidden: dict[str, float] = {}
    for exchange, count in ledger.exchanges.items():
        axis, seconds = exchange.axis, count * _wire_seconds(exchange, degrees, links, gpus_per_node)
        # Computing is held until what is hidden begins, too.
        waited = count * links.latency + (0.0 if exchange.hidden else seconds)
        found.communication[axis] = found.communication.get(axis, 0.0) + waited
        if exchange.hidden:
            hidden[axis] = hidden.get(axis, 0.0) + seconds
            # Copies are made by the units that compute: out of memory, through a buffer of the library, and into it.
            found.other += count * 4 * exchange.sent / gpu.fused
    for axis, seconds in hidden.items():
        size = axis_size(axis, degrees)
        beside = found.attention * (size - 1) / size  # the last part's attention has nothing to hide
        found.hidden += min(seconds, beside)
        found.communication[axis] += max(0.0, seconds - beside)
    if not compiled:  # a host that is slower than its GPU
        found.other += max(0.0, launches * gpu.launch - found.compute)
    return found


def _matmul(work: Work, gpu: GPU) -> float:
    rows, columns, inner = work.shape
    products = max(1, work.flops // (2 * rows * columns * inner))
    waves = math.ceil(rows / TILE[0]) * math.ceil(columns / TILE[1]) * products / gpu.units
    # A last wave that is half full takes longer than its half, but leaves power to the others.
    busy = math.sqrt(waves / math.ceil(waves))
    return max(work.flops / (gpu.matmul * busy), work.fused_bytes / gpu.fused)


def axis_size(axis: str, degrees: Mapping[str, int]) -> int:
    """Ranks of an axis, or of what several make together."""
    return math.prod(degrees.get(name, 1) for name in JOINED.get(axis, (axis,)))


def _on_one_node(axis: str, degrees: Mapping[str, int], gpus_per_node: int) -> int:
    """How many ranks of the axis are neighbours of a rank inside its node: inner axes take their places first."""
    innermost = JOINED.get(axis, (axis,))[-1]
    within = math.prod(degrees.get(name, 1) for name in AXES[AXES.index(innermost) + 1 :])
    return max(1, min(axis_size(axis, degrees), gpus_per_node // within))


def _wire_seconds(exchange: Exchange, degrees: Mapping[str, int], links: Links, gpus_per_node: int) -> float:
    """Of its bytes over the slowest link that they cross."""
    size, here = axis_size(exchange.axis, degrees), _on_one_node(exchange.axis, degrees, gpus_per_node)
    match exchange.kind:
        case "hop":
            return exchange.sent / to_one_neighbour(links.inside if here == size else links.between)
        case "all-reduce":
            wire = 2 * (size - 1) / size * exchange.sent
        case "all-gather":
            wire = (size - 1) * exchange.sent
        case _:
            wire = exchange.sent
    # Of what goes to all others a part stays in the node; rings of a sum or a gather cross its border with all of it.
    outside = wire * (size - here) / max(1, size - 1) if exchange.kind == "all-to-all" else wire * (here < size)
    return max((wire - outside) / links.inside, outside / links.between)
