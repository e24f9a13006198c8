"""Configs, and the one place where a config becomes a validated DeviceMesh."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..distributed import default_device_type
from ..distributed.axis import Axis
from ..registration import TensorParallelConfigBase


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
        return Axis.from_mesh(init_device_mesh(default_device_type(), (world,), mesh_dim_names=("tp",)), "tp")


def _tp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh; got a {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return mesh
    if "tp" in names:
        return mesh["tp"]
    raise ValueError(f'a mesh of {mesh.ndim} axes needs one that is named "tp"; this one has {names or "no names"}')
