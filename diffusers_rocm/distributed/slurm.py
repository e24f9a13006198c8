"""What Slurm's variables say of the nodes and ranks of a run. https://slurm.schedmd.com/srun.html names them."""

import re
from collections.abc import Mapping


def slurm_nodes(environment: Mapping[str, str]) -> tuple[int, int, str] | None:
    """Number of nodes, this node and the first one's name, where Slurm runs the command on several; else None.

    In a job step, which may have fewer nodes than its job, the step's variables count.

    Raises:
        ValueError: they are not what Slurm writes.
    """
    count = _number(environment, "SLURM_STEP_NUM_NODES") or _number(environment, "SLURM_NNODES") or 1
    names = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    node = _number(environment, "SLURM_NODEID")
    if count == 1 or not names or node is None:
        return None
    return count, node, first_host(names)


def slurm_rank(environment: Mapping[str, str], port: int, devices: int) -> dict[str, str]:
    """torchrun's variables for a task that srun started as one of several on its node: each is a rank. Else none.

    Only srun says how many tasks a step has: a batch script knows those of the job, and is one process.

    Args:
        devices: that this task sees. Where srun bound one to each task, it is the first that the task sees.

    Raises:
        ValueError: they are not what Slurm writes.
    """
    tasks, nodes = _number(environment, "SLURM_STEP_NUM_TASKS"), _number(environment, "SLURM_STEP_NUM_NODES")
    rank, local = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_LOCALID")
    names = environment.get("SLURM_STEP_NODELIST")
    if tasks is None or nodes is None or tasks <= nodes or rank is None or local is None or not names:
        return {}
    if rank >= tasks or tasks % nodes:
        raise ValueError(
            f"Slurm's task {rank} of {tasks} on {nodes} nodes is no rank: give each node as many tasks "
            "(--ntasks-per-node)"
        )
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(0 if devices == 1 else local),
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": str(tasks // nodes),
        "MASTER_ADDR": first_host(names),
        "MASTER_PORT": str(port),
    }


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name)
    if value is not None and not re.fullmatch(r"\d+", value):
        raise ValueError(f"{name}={value} is no number: unset it, or give --nnodes, --node-rank and --master-addr")
    return None if value is None else int(value)


def first_host(names: str) -> str:
    """`gpu03` of a list of nodes, `gpu[03-05,09],login1`.

    Raises:
        ValueError: it begins with none.
    """
    first = re.match(r"(?:[^,\[\]\s]|\[\w[\w,-]*\])+", names)
    if first is None:
        raise ValueError(f"Slurm's list of nodes, {names!r}, begins with no name")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])
