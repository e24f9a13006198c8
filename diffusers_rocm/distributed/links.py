"""How fast the ranks of an axis reach each other: it decides whether messages are worth hiding."""

import torch

from .axis import Axis
from .collectives import all_gather_int64, exchange_in_group


# Bytes a second that a GPU sends to the others of its axis: NVLink and xGMI are above, PCIe and networks below.
FAST = 100e9

# Of one message, as large as those of a long sequence.
_BYTES, _REPEATS = 32 << 20, 3


def links_are_slow(axis: Axis) -> bool:
    """Whether the links of an axis are the slower part, by an all-to-all; the slowest rank's word counts for all.

    A message beside a kernel takes multiprocessors from it. Over fast links that costs more than it hides
    (docs/performance.md). Over Gloo it is the host that sends, and the answer is yes.
    """
    if axis.size == 1:
        return False
    if axis.device.type == "cpu":
        return True
    module, part = torch.get_device_module(axis.device), _BYTES // axis.size
    message, counts = torch.zeros(part * axis.size, dtype=torch.uint8, device=axis.device), (part,) * axis.size
    begin, end = (module.Event(enable_timing=True) for _ in range(2))
    exchange_in_group(message, counts, counts, axis.group)  # the group connects
    begin.record()
    for _ in range(_REPEATS):
        exchange_in_group(message, counts, counts, axis.group)
    end.record()
    module.synchronize(axis.device)
    rate = part * (axis.size - 1) * _REPEATS / (begin.elapsed_time(end) / 1e3)
    return all_gather_int64(torch.tensor([int(rate)]), axis).min().item() < FAST
