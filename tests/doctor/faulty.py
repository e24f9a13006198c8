"""What ranks of a probe do wrong. A process that needs no torch does not import it."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta


def _join(rank):
    import torch.distributed as dist

    group = {"init_method": rank.meet, "rank": rank.rank, "world_size": rank.world}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **group)
    return dist


def hang(rank, pid_file: str) -> None:
    """For ever, deaf to SIGTERM, with a process of its own that is as deaf."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", deaf])
    with open(f"{pid_file}.{rank.rank}", "w") as file:
        file.write(f"{os.getpid()} {other.pid}")
    rank.stage("sleeping")
    time.sleep(600)


def die(rank, who: int, by: int) -> str:
    """One rank is killed in the middle of a collective that the others wait in."""
    rank.stage("meeting")
    dist = _join(rank)
    rank.stage("the collective")
    rank.found({"wrong": {"a collective": 0}, "gigabytes": {}})
    if rank.rank == who:
        time.sleep(1)  # until the other has met it, and said what it found
        os.kill(os.getpid(), by)
    dist.barrier()
    return "done"


def raise_error(rank, who: int) -> str:
    dist = _join(rank)
    if rank.rank == who:
        raise RuntimeError(f"rank {who} has\nno luck")
    dist.barrier()
    return "done"


def environment(rank, names: list[str]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def abort(rank) -> None:
    rank.stage("the collective")
    os.abort()


def write_log(rank, text: str) -> None:
    with open(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())), "w") as file:
        file.write(text)


KERNELS = ("cudnn", "flash", "efficient", "flash_cpu", "flash_attn_3", "flash_attn", "aiter", "math")


def crashing_kernel(rank, device: str, skip: list[str]) -> dict[str, dict[str, str]]:
    """In the place of `kernel_work.try_kernels`: one kernel takes the process with it."""
    found = {}
    for name in KERNELS:
        if name in skip:
            continue
        rank.stage(f"kernel {name}")
        if name == "flash_cpu":
            os.kill(os.getpid(), signal.SIGSEGV)
        found[name] = {"why_not": "not here"}
        rank.found(found)
    return found


def lossy_exchange(rank, work: str, which: str) -> dict:
    """`work.exchange` with a collective that loses its last element."""
    import importlib.util

    import torch.distributed as dist

    spec = importlib.util.spec_from_file_location("work", work)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.REPEATS = module.IN_A_ROW = 1
    owner = module if which == "_all_gather" else dist
    original = getattr(owner, which)

    def lossy(received, *args, **kwargs):
        before = received.flatten()[-1].clone()
        original(received, *args, **kwargs)
        received.view(-1)[-1] = before + 1e6

    setattr(owner, which, lossy)
    return module.exchange(rank, "cpu", [0, 0])


def die_instead(rank, device: str, local_ranks: list[int]) -> str:
    """In the place of `work.exchange`."""
    return die(rank, who=1, by=signal.SIGKILL)


def hang_instead(rank, device: str, local_ranks: list[int]) -> None:
    rank.stage("nothing at all")
    time.sleep(600)


def refuse_to_begin(rank, device: str, skip: list[str]) -> None:
    raise ImportError("no luck")


def hang_copies(rank, device: str, count: int) -> None:
    """In the place of `work.copy_between`."""
    rank.stage("copying for ever")
    time.sleep(600)


def die_alone(rank, device: str, local_ranks: list[int]) -> None:
    """In the place of `work.exchange`: one rank dies, the other never hears of it."""
    rank.stage("the collective")
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
