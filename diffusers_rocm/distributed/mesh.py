"""The one place that owns the degrees of parallelism: degrees in, one DeviceMesh and its axes out.

Axes are nested, outermost to innermost, so that the heaviest traffic (tp, ulysses) is between neighbours inside a node
and the lightest (cfg, dp: one exchange a step, or one a picture) between nodes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import default_device_type
from .axis import Axis, timeout_of


AXES = ("dp", "cfg", "ring", "ulysses", "tp")
# Those that some of them make together, of neighbours in this order.
JOINED = {"context": AXES[2:4], "model": AXES[2:], "replica": AXES[1:], "world": AXES}


@dataclass(frozen=True)
class Axes:
    """This rank's place on every axis, and on those that some of them make together.

    Attributes:
        dp: replicas, each making pictures of its own.
        cfg: the branches of one picture's guidance.
        ring, ulysses: the parts of a sequence.
        tp: the parts of the weights.
        context: ring and ulysses: the ranks that share a sequence.
        model: ring, ulysses and tp: the ranks that share one forward.
        replica: all but dp: the ranks that share one picture.
        world: all of them.
    """

    dp: Axis
    cfg: Axis
    ring: Axis
    ulysses: Axis
    tp: Axis
    context: Axis
    model: Axis
    replica: Axis
    world: Axis

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh | None) -> "Axes":
        """The axes of a mesh whose names are among `AXES`, in their order; without a mesh, each of one rank."""
        members = {name: (name,) for name in AXES} | JOINED
        return cls(**{name: _axis(mesh, name, members[name]) for name in members})

    def sending(self, communication: str) -> "Axes":
        """These, with activations of a forward sent so."""
        changed = {name: replace(getattr(self, name), communication=communication) for name in JOINED["model"]}
        return replace(self, **changed)

    def __str__(self) -> str:
        sizes = {name: getattr(self, name).size for name in AXES}
        return " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one rank"


def _axis(mesh: DeviceMesh | None, name: str, members: tuple[str, ...]) -> Axis:
    present = tuple(each for each in members if mesh is not None and each in mesh.mesh_dim_names)
    if not present:
        return Axis.single(name)
    part = mesh if present == mesh.mesh_dim_names else mesh[present]
    if part.ndim > 1:
        # The same members give the same group: torch keeps a flattened axis by the names that it was made of.
        part = part._flatten()
        _use_default_timeout(part)
    return Axis.from_mesh(part, name)


def _use_default_timeout(part: DeviceMesh) -> None:
    """Let the group of a 1-D mesh wait as long as the default one, and not as long as torch's own default."""
    if part.size() > 1 and dist.get_backend() != "fake":  # the planner's ranks, which do not exist
        part.get_group().set_timeout(timeout_of(dist.group.WORLD, torch.device(part.device_type)))


def resolve_degrees(degrees: Mapping[str, int], world: int) -> dict[str, int]:
    """Every degree as a number of ranks, whose product is `world`.

    Args:
        degrees: axis -> number of ranks; one of them may be -1 and takes what is left. An axis that is not there is 1.

    Raises:
        ValueError: the product is another; the message has the arithmetic and what would fit.
    """
    given = {name: degrees.get(name, 1) for name in AXES}
    rest = [name for name, degree in given.items() if degree == -1]
    known = math.prod(degree for degree in given.values() if degree != -1)
    shown = {name: degree for name, degree in given.items() if degree != 1} or dict.fromkeys(degrees, 1)
    arithmetic = " * ".join(f"{name}={degree}" for name, degree in shown.items())
    if len(rest) > 1:
        raise ValueError(f"{arithmetic}: only one degree may be -1 and take the ranks that are left")
    if rest and world % known:
        raise ValueError(
            f"{arithmetic}: {world} rank(s) were started, which {known} does not divide; start a multiple of {known}, "
            f"or use {_nearest(given | {rest[0]: 1}, world)}"
        )
    if rest:
        return given | {rest[0]: world // known}
    if known != world:
        product = f" = {known}" if len(shown) > 1 else ""
        raise ValueError(
            f"{arithmetic}{product}, but {world} rank(s) were started; start {known}, or use {_nearest(given, world)}"
        )
    return given


def _nearest(given: Mapping[str, int], world: int) -> str:
    """Configs of `world` ranks that change one degree, those that are in use first; else data parallelism."""
    product = math.prod(given.values())
    fits = [(name, world // (product // degree)) for name, degree in given.items() if not world % (product // degree)]
    # Guidance has two branches, and is not everyone's.
    fits = [(name, degree) for name, degree in fits if name != "cfg" or given["cfg"] > 1 and degree <= 2]
    fits.sort(key=lambda choice: (given[choice[0]] == 1, abs(choice[1] - given[choice[0]])))
    choices = [{**given, name: degree} for name, degree in fits[:3]] or [{"dp": world}]
    shown = (", ".join(f"{name}={degree}" for name, degree in each.items() if degree > 1) for each in choices)
    return " or ".join(dict.fromkeys(f"ParallelConfig({each})" for each in shown))


_meshes: dict[tuple[int, ...], DeviceMesh] = {}
# By the name of the GPUs' group.
_hosts: dict[str, Axis] = {}
_world: list[dist.ProcessGroup | None] = [None]


def mesh_axes(degrees: Mapping[str, int], mesh: DeviceMesh | None = None) -> Axes:
    """The axes named in `degrees`: of all ranks that were started, or of the caller's own `mesh`.

    A mesh is made once in the life of its process group, whatever is parallelised under it: every group costs buffers
    and threads. Its groups have the timeout of the default one; those of the caller's own mesh keep theirs.

    Raises:
        ValueError: no process group, or degrees that do not make the number of ranks.
    """
    forget_former_groups()
    if mesh is not None:
        names = tuple(name for name in mesh.mesh_dim_names if name in degrees)
        return Axes.of_mesh(mesh if names == mesh.mesh_dim_names else mesh[names])
    if not (dist.is_available() and dist.is_initialized()):
        if all(degree == 1 for degree in degrees.values()):
            return Axes.of_mesh(None)
        wanted = " * ".join(f"{name}={degree}" for name, degree in degrees.items())
        ranks = math.prod(degree for degree in degrees.values())
        raise ValueError(
            f"{wanted} needs a process group and there is none: start the ranks with `torchrun "
            f"--nproc_per_node={ranks if ranks > 0 else 'N'}` and call diffusers_rocm.init() first"
        )
    resolved = resolve_degrees(degrees, dist.get_world_size())
    shape = tuple(resolved.values())
    if shape not in _meshes:
        names = tuple(name for name in AXES if resolved[name] > 1)
        if not names:
            return Axes.of_mesh(None)
        sizes = tuple(resolved[name] for name in names)
        _meshes[shape] = init_device_mesh(default_device_type(), sizes, mesh_dim_names=names)
        for name in names:
            _use_default_timeout(_meshes[shape][name])
    return Axes.of_mesh(_meshes[shape])


def of_hosts(axis: Axis) -> Axis:
    """The same ranks, by a group of their CPUs: what they tell each other so waits for no GPU. All of them call it."""
    if axis.device.type == "cpu":
        return axis
    forget_former_groups()
    name = axis.group.group_name
    if name not in _hosts:
        timeout = timeout_of(axis.group, axis.device)
        group = dist.new_group(axis.ranks(), timeout, "gloo", use_local_synchronization=True)
        _hosts[name] = Axis(axis.name, group, axis.rank, axis.size, axis.first, torch.device("cpu"))
    return _hosts[name]


def forget_former_groups() -> None:
    """Meshes of a process group that is gone have none to send by."""
    world = dist.group.WORLD if dist.is_available() else None
    if _world[0] is world:
        return
    _meshes.clear()
    _hosts.clear()
    _world[0] = world
    # torch 2.9 gives a mesh the joined axes of any earlier one that was equal.
    for table in ("root_to_flatten_mapping", "flatten_name_to_root_dims"):
        getattr(getattr(device_mesh, "_mesh_resources", None), table, {}).clear()


def check_mesh(mesh: DeviceMesh, wanted: tuple[str, ...]) -> dict[str, int]:
    """The degrees that a caller's own mesh has on the axes `wanted`.

    Raises:
        ValueError: not a mesh, without names, without any of these axes, or with them in another order.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh; got a {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    present = [name for name in names if name in wanted]
    if not present:
        raise ValueError(
            f"a mesh needs an axis named {' or '.join(map(repr, wanted))}; this one has {names or 'no names'}"
        )
    if present != [name for name in wanted if name in names]:
        raise ValueError(f"the axes of a mesh are nested as {', '.join(wanted)}; the order of this one is {names}")
    return {name: mesh[name].size() for name in present}
