"""A module whose ranks misbehave, for the launcher's tests: `python -m tests.distributed.rank_that WHAT`."""

import os
import resource
import signal
import sys
import time
import warnings

import torch
import torch.distributed as dist

from diffusers_rocm.distributed.launching import end_rank
from diffusers_rocm.distributed.root_cause import record


def main(what: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"rank {rank} has pid {os.getpid()} and begins at {time.time()}", flush=True)
    time.sleep(1 - rank)  # rank 0 is the last to say it, and is still the one that is heard
    warnings.warn("the same on every rank", UserWarning, stacklevel=1)
    if rank == 1:
        print("said by rank 1 alone", file=sys.stderr, flush=True)
    dist.barrier()
    if what == "raises" and rank == 1:
        raise RuntimeError("the cause of it all")
    if what == "is killed while it says why" and rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, 2**19))
        raise RuntimeError("its error" * 2**17)
    if what == "is killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exits" and rank == 1:
        os._exit(7)
    if what != "ends":
        dist.all_reduce(torch.ones(1))  # the others wait here for the one that failed
        time.sleep(600)
    end_rank()


if __name__ == "__main__":
    record(main)(sys.argv[1])
