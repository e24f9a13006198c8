"""Configs, and the one place where a config becomes a validated DeviceMesh."""

from typing import Any

import diffusers
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..distributed import default_device_type
from ..distributed.axis import Axis
from ..registration import TensorParallelConfigBase


_meshes: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}
_meshes_of: list[Any] = [None]


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of all ranks, made once in the life of their process group: every group costs buffers and threads."""
    if _meshes_of[0] is not dist.group.WORLD:
        _meshes.clear()
        _meshes_of[0] = dist.group.WORLD
    if (shape, names) not in _meshes:
        _meshes[shape, names] = init_device_mesh(default_device_type(), shape, mesh_dim_names=names)
    return _meshes[shape, names]


class TensorParallelConfig(TensorParallelConfigBase):
    """Shard every weight matrix over `tp` ranks (Shoeybi et al., 2019), as plain local tensors.

    Args:
        tp: number of ranks; any number up to the model's attention heads, divisor or not.
        tp_degree: diffusers' name for `tp`.
        mesh: a 1-D `DeviceMesh`, or one with an axis named `"tp"`; `tp` follows from it. Without it the mesh is made
            of all ranks.

    Raises:
        ValueError: `tp` and `tp_degree` (or `mesh`) that contradict each other, a degree below 1, a mesh of several
            axes without one named `"tp"`.
    """

    def __init__(self, tp: int | None = None, *, tp_degree: int | None = None, mesh: DeviceMesh | None = None):
        if tp is not None and tp_degree is not None and tp != tp_degree:
            raise ValueError(f"tp={tp} and its alias tp_degree={tp_degree} differ; give one of them")
        degree = tp if tp is not None else tp_degree
        for value in (tp, tp_degree):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"tp must be a whole number of ranks, at least 1; got {value!r}")
        if mesh is not None:
            mesh = _tp_mesh(mesh)
            if degree is not None and degree != mesh.size():
                raise ValueError(f"tp={degree}, but the mesh's tp axis has {mesh.size()} ranks; drop tp")
            degree = mesh.size()
        super().__init__(tp_degree=1 if degree is None else degree, mesh=mesh)

    @property
    def tp(self) -> int:
        """Number of ranks on the axis."""
        return self.tp_degree

    def __repr__(self) -> str:
        return f"TensorParallelConfig(tp={self.tp})"

    def axis(self) -> Axis:
        """The ranks to shard over.

        Raises:
            ValueError: no process group, or `tp` other than the number of ranks that were started.
        """
        if self.mesh is not None:
            return Axis.from_mesh(self.mesh, "tp")
        if self.tp == 1:
            return Axis.single("tp")
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"tp={self.tp} needs a process group and there is none: start {self.tp} ranks with "
                f"`torchrun --nproc_per_node={self.tp}` and call diffusers_rocm.init() first"
            )
        world = dist.get_world_size()
        if self.tp > world:
            raise ValueError(f"tp={self.tp} is more than the {world} rank(s) that were started; use tp <= {world}")
        if self.tp < world:
            raise ValueError(
                f"tp={self.tp} would leave {world - self.tp} of {world} ranks without work; use tp={world}, or pass "
                f'mesh=init_device_mesh(device_type, (n, {self.tp}), mesh_dim_names=("dp", "tp")) with n * {self.tp} '
                f"= {world}"
            )
        return Axis.from_mesh(_mesh((world,), ("tp",)), "tp")


def _tp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh; got a {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return mesh
    if "tp" in names:
        return mesh["tp"]
    raise ValueError(f'a mesh of {mesh.ndim} axes needs one that is named "tp"; this one has {names or "no names"}')


class ContextParallelConfig(diffusers.ContextParallelConfig):
    """Split the sequence over `ring_degree * ulysses_degree` ranks; the weights stay whole.

    Any sequence length and any number of heads work; `ulysses_anything` and `ring_anything` are accepted and change
    nothing.

    Args:
        ring_degree: ranks between which keys and values go round (Liu et al., 2023).
        ulysses_degree: ranks that trade their tokens for heads (Jacobs et al., 2023), inside the ring; at most the
            number of heads.
        rotate_method: `"p2p"` passes keys and values on while the rank computes, and holds two parts of them;
            `"allgather"` gathers those of some heads while it computes with those before.
        mesh: a `DeviceMesh` with axes named `"ring"` and `"ulysses"`, or one of them; the degrees follow from it.
            Without it the mesh is made of all ranks.
        convert_to_fp32: accepted as diffusers does; parts are always merged in float32.

    Raises:
        ValueError: degrees below 1 or both 1, another `rotate_method`, a mesh that contradicts the degrees.
    """

    def __init__(
        self,
        ring_degree: int | None = None,
        ulysses_degree: int | None = None,
        convert_to_fp32: bool = True,
        rotate_method: str = "p2p",
        mesh: DeviceMesh | None = None,
        ulysses_anything: bool = False,
        ring_anything: bool = False,
    ):
        degrees = {"ring": ring_degree, "ulysses": ulysses_degree}
        for name, degree in degrees.items():
            if degree is not None and (not isinstance(degree, int) or isinstance(degree, bool) or degree < 1):
                raise ValueError(f"{name}_degree must be a whole number of ranks, at least 1; got {degree!r}")
        if rotate_method not in ("p2p", "allgather"):
            raise ValueError(f'rotate_method must be "p2p" or "allgather"; got {rotate_method!r}')
        if mesh is not None:
            if not isinstance(mesh, DeviceMesh):
                raise ValueError(f"mesh must be a DeviceMesh; got a {type(mesh).__name__}")
            names = mesh.mesh_dim_names or ()
            if not {"ring", "ulysses"} & set(names):
                raise ValueError(f'a mesh needs an axis named "ring" or "ulysses"; this one has {names or "no names"}')
            if {"ring", "ulysses"} <= set(names) and names.index("ring") > names.index("ulysses"):
                raise ValueError(f"a mesh needs its ring outside its ulysses axis; the order of this one is {names}")
            for name, degree in degrees.items():
                size = mesh[name].size() if name in names else 1
                if degree not in (None, size):
                    raise ValueError(f"{name}_degree={degree}, but the mesh's {name} axis has {size} ranks")
                degrees[name] = size
        self.ring_degree, self.ulysses_degree = degrees["ring"] or 1, degrees["ulysses"] or 1
        if self.ring_degree == self.ulysses_degree == 1:
            raise ValueError("context parallelism over 1 rank does nothing; set ring_degree or ulysses_degree")
        self.rotate_method, self.mesh, self.convert_to_fp32 = rotate_method, mesh, convert_to_fp32
        self.ulysses_anything, self.ring_anything = ulysses_anything, ring_anything

    def __repr__(self) -> str:
        return (
            f"ContextParallelConfig(ring_degree={self.ring_degree}, ulysses_degree={self.ulysses_degree}, "
            f"rotate_method={self.rotate_method!r})"
        )

    def axes(self) -> tuple[Axis, Axis, Axis]:
        """All ranks of the split, the ring and the Ulysses axis.

        Raises:
            ValueError: no process group, or another number of ranks.
        """
        ring, ulysses = self.ring_degree, self.ulysses_degree
        mesh = self.mesh
        if mesh is None:
            degrees = f"ring_degree={ring} * ulysses_degree={ulysses} = {ring * ulysses}"
            if not (dist.is_available() and dist.is_initialized()):
                raise ValueError(
                    f"{degrees} ranks need a process group and there is none: start them with `torchrun "
                    f"--nproc_per_node={ring * ulysses}` and call diffusers_rocm.init() first"
                )
            world = dist.get_world_size()
            if ring * ulysses != world:
                raise ValueError(
                    f"{degrees}, but {world} rank(s) were started; make them equal, or pass a mesh with axes named "
                    '"ring" and "ulysses"'
                )
            mesh = _mesh((ring, ulysses), ("ring", "ulysses"))
        names = [name for name in ("ring", "ulysses") if name in mesh.mesh_dim_names]
        single = {name: Axis.single(name) for name in ("ring", "ulysses")}
        axes = single | {name: Axis.from_mesh(mesh[name], name) for name in names}
        both = mesh["ring", "ulysses"]._flatten("diffusers_rocm_context") if len(names) == 2 else mesh[names[0]]
        return Axis.from_mesh(both, "context"), axes["ring"], axes["ulysses"]


OurConfig = TensorParallelConfig | ContextParallelConfig
