"""A rank that runs a tiny FLUX, with a fault: `python -m tests.hooks.faulty_rank FAULT DEGREES FAULTY TIMEOUT`."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from diffusers_rocm import ParallelConfig, init, parallelize
from diffusers_rocm.distributed.launching import end_rank
from diffusers_rocm.distributed.root_cause import record
from diffusers_rocm.hooks.around_call import AroundCall

from ..pipelines.testing_utils import PIPELINES, build, latents


class BeforeCall(AroundCall):
    """Does something before one call of the denoiser, and before the guards look at it."""

    def __init__(self, model: torch.nn.Module, number: int, act: Callable[[dict[str, Any]], None]):
        super().__init__(model)
        self._left, self._act = number, act

    def around(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        if self._left == 0:
            self._act(kwargs)
        self._left -= 1
        return call(*args, **kwargs)


def raise_error(kwargs: dict[str, Any]) -> None:
    raise RuntimeError("the cause of it all")


def send_myself(number: signal.Signals) -> Callable[[dict[str, Any]], None]:
    return lambda kwargs: os.kill(os.getpid(), number)


def change_timestep(kwargs: dict[str, Any]) -> None:
    kwargs["timestep"] = kwargs["timestep"] - 0.01


# What a fault changes in a config, in the arguments of parallelize() and of a call, and what it does in which call of
# the denoiser, of which there are two a step.
CONFIGS = {
    "degrees": {"dp": 1, "cfg": 1, "ring": 1, "ulysses": -1, "tp": 1},
    "rotate_method": {"rotate_method": "allgather"},
}
CHECKS = {"rank_check": "off"}
ARGUMENTS = {
    "prompt": lambda call: {"prompt_embeds": call["prompt_embeds"].flip(1)},
    "dtype of the prompt": lambda call: {"prompt_embeds": call["prompt_embeds"].bfloat16()},
    "steps": lambda call: {"steps": 4},
    "generator": lambda call: {"seed": None},
    "resolution": lambda call: {"height": 64},
}
CALLS = {
    "timestep": (0, change_timestep),
    "a later timestep": (4, change_timestep),
    "exception": (3, raise_error),
    "SIGKILL": (3, send_myself(signal.SIGKILL)),
    "SIGSTOP": (3, send_myself(signal.SIGSTOP)),
}


def run(fault: str, degrees: dict[str, int], faulty: int, rank_check: str = "first") -> torch.Tensor:
    """The latents that the whole loop arrives at, with `fault` on the rank `faulty`."""
    pipe, call = build("flux"), PIPELINES["flux"].call(prompts=degrees.get("dp", 1))
    if dist.get_rank() != faulty:
        fault = "none"
    if fault == "dtype":
        pipe.transformer.bfloat16()
    config = ParallelConfig(**degrees | CONFIGS.get(fault, {}))
    parallelize(pipe, config, rank_check=CHECKS.get(fault, rank_check))
    if fault in CALLS:
        BeforeCall(pipe.transformer, *CALLS[fault])
    changes = ARGUMENTS[fault](call) if fault in ARGUMENTS else {}
    return latents(pipe, call, **changes)


def wait_for_all() -> None:
    """Ranks import for seconds, each at its own pace: the short timeout is for what comes after."""
    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=120)))
    store.set(f"imported/{rank}", b"1")
    store.wait([f"imported/{each}" for each in range(world)], timedelta(seconds=120))


@record
def main(fault: str, degrees: str, faulty: str, timeout: str) -> None:
    wait_for_all()
    init("cpu", timeout=timedelta(seconds=float(timeout)))
    print(f"rank {dist.get_rank()} has pid {os.getpid()} and begins at {time.time()}", flush=True)
    run(fault, json.loads(degrees), int(faulty))
    end_rank()


if __name__ == "__main__":
    main(*sys.argv[1:])
