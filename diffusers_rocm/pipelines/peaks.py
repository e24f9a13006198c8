"""Peaks of memory of this rank: of its device, and of its process on the host."""

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from ..distributed.peer_memory import held_bytes
from ..distributed.quantized import parts
from ..hooks.around_call import AroundCall
from .denoisers import denoisers_of


def device_peak(device: torch.device) -> int:
    """Bytes, at most, that tensors on the device took since its peak was reset, and messages do; 0 for a CPU."""
    if device.type == "cpu":
        return 0
    module = torch.get_device_module(device)
    module.synchronize()
    return module.max_memory_allocated() + held_bytes()


def host_peak() -> int:
    """Bytes, at most, that were resident of this process, mapped files included."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def weight_bytes(pipe: DiffusionPipeline) -> list[int]:
    """Of each tensor that this rank keeps of the components' weights; not of what waits on disk."""
    modules = [each for each in pipe.components.values() if isinstance(each, nn.Module)]
    kept = (x for each in modules for x in each.parameters() if not x.is_meta)
    return [part.nbytes for x in kept for part in parts(x).values()]


class StagePeaks:
    """The peak bytes of each stage, on this rank's device and of this process: `peaks[stage] == (device, host)`; and
    how long it took, in `seconds`.

    Of the host what is resident counts, mapped files included. Where the system does not let a process forget its
    peak (it has no Linux's `/proc/self/clear_refs`), a stage's is that of all stages so far.
    """

    def __init__(self, device: torch.device):
        self._device, self._stage = device, ""
        self.peaks: dict[str, tuple[int, int]] = {}
        self.seconds: dict[str, float] = {}

    def begin(self, stage: str) -> None:
        """A stage begins, and the one before it ends; one that is gone back to goes on."""
        if stage == self._stage:
            return
        self.end()
        self._stage, self._began = stage, time.perf_counter()
        if self._device.type != "cpu":
            torch.get_device_module(self._device).reset_peak_memory_stats()
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pass

    def end(self) -> None:
        """The stage that runs ends."""
        if self._stage:
            before = self.peaks.get(self._stage, (0, 0))
            self.peaks[self._stage] = tuple(map(max, before, (device_peak(self._device), host_peak())))
            took = time.perf_counter() - self._began  # the device was waited for
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + took
        self._stage = ""

    def watch(self, pipe: DiffusionPipeline) -> None:
        """Denoising begins with the first call of a transformer, decoding with the VAE's `decode`."""
        for denoiser in denoisers_of(pipe):
            _Watched(denoiser, self)
        vae = getattr(pipe, "vae", None)
        if vae is not None:
            decode = vae.decode

            def watched(*args: Any, **kwargs: Any) -> Any:
                self.begin("decode")
                return decode(*args, **kwargs)

            vae.decode = watched


class _Watched(AroundCall):
    """No hook of torch: a step that is replayed from a graph calls none."""

    def __init__(self, denoiser: nn.Module, stages: StagePeaks):
        super().__init__(denoiser)
        self._stages = stages

    def around(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        self._stages.begin("denoise")
        return call(*args, **kwargs)
