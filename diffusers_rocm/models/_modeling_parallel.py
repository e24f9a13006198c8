"""The configs: what the user asks for, checked when it is written down; `distributed.mesh` makes the mesh of it."""

from collections.abc import Mapping
from typing import Any

import diffusers
from torch.distributed.device_mesh import DeviceMesh

from ..distributed.agreement import agree
from ..distributed.axis import Axis
from ..distributed.compression import COMMUNICATION, EXACT
from ..distributed.mesh import AXES, Axes, check_mesh, mesh_axes
from ..registration import TensorParallelConfigBase


def _check_degree(name: str, degree: Any, rest_allowed: bool = False) -> None:
    whole = isinstance(degree, int) and not isinstance(degree, bool)
    if not whole or degree < 1 and not (rest_allowed and degree == -1):
        rest = ", or -1 for all that are left" if rest_allowed else ""
        raise ValueError(f"{name} must be a whole number of ranks, at least 1{rest}; got {degree!r}")


def _agree_with_mesh(given: Mapping[str, int | None], mesh: DeviceMesh | None, names: Mapping[str, str]) -> dict:
    """The degrees of `mesh`, or the `given` ones, where None is 1; `names` are the arguments' by axis."""
    if mesh is None:
        return {axis: 1 if degree is None else degree for axis, degree in given.items()}
    degrees = dict.fromkeys(given, 1) | check_mesh(mesh, tuple(given))
    for axis, degree in given.items():
        if degree not in (None, -1, degrees[axis]):
            name = names.get(axis, axis)
            raise ValueError(f"{name}={degree}, but the mesh's {axis} axis has {degrees[axis]} ranks; drop {name}")
    return degrees


ROTATE_METHODS = ("p2p", "allgather")


def _check_word(name: str, word: str, words: tuple[str, ...]) -> None:
    if word not in words:
        raise ValueError(f"{name} must be {' or '.join(map(repr, words))}; got {word!r}")


class _Config:
    """What the package asks of every config."""

    mesh: DeviceMesh | None = None
    rotate_method = "p2p"
    communication = EXACT

    def degrees(self) -> dict[str, int]:
        """Axis -> number of ranks, outermost first."""
        raise NotImplementedError

    def axes(self) -> Axes:
        """This rank's place on the mesh.

        Raises:
            ValueError: no process group, degrees whose product is not the number of ranks that were started, or ranks
                with different configs.
        """
        everyone = Axis.of_all() if self.mesh is None else mesh_axes(self.degrees(), self.mesh).world
        # Ranks that make different groups would wait for each other.
        ways = {"rotate_method": self.rotate_method, "communication": self.communication}
        agree("configs", dict.fromkeys(AXES, 1) | self.degrees() | ways, everyone)
        return mesh_axes(self.degrees(), self.mesh).sending(self.communication)

    def __repr__(self) -> str:
        arguments = [f"{name}={degree}" for name, degree in self.degrees().items()]
        arguments += [f"communication={self.communication!r}"] * (self.communication != EXACT)
        return f"{type(self).__name__}({', '.join(arguments)})"


class TensorParallelConfig(_Config, TensorParallelConfigBase):
    """Shard every weight matrix over `tp` ranks (Shoeybi et al., 2019), as plain local tensors.

    Args:
        tp: number of ranks; any number up to the model's attention heads, divisor or not.
        tp_degree: diffusers' name for `tp`.
        mesh: a 1-D `DeviceMesh`, or one with an axis named `"tp"`; `tp` follows from it. Without it the mesh is made
            of all ranks.
        communication: `"exact"`, or `"int8"`: what the ranks send each other of the activations is rounded to 8 bits,
            for links that are slow. Lossy: docs/numerics.md.

    Raises:
        ValueError: `tp` and `tp_degree` (or `mesh`) that contradict each other, a degree below 1, a mesh of several
            axes without one named `"tp"`.
    """

    def __init__(
        self,
        tp: int | None = None,
        *,
        tp_degree: int | None = None,
        mesh: DeviceMesh | None = None,
        communication: str = EXACT,
    ):
        if tp is not None and tp_degree is not None and tp != tp_degree:
            raise ValueError(f"tp={tp} and its alias tp_degree={tp_degree} differ; give one of them")
        degree = tp if tp is not None else tp_degree
        for value in (tp, tp_degree):
            if value is not None:
                _check_degree("tp", value)
        if isinstance(mesh, DeviceMesh) and mesh.ndim == 1 and mesh.mesh_dim_names != ("tp",):
            mesh = DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh_dim_names=("tp",))
        degrees = _agree_with_mesh({"tp": degree}, mesh, {})
        super().__init__(tp_degree=degrees["tp"], mesh=mesh)
        _check_word("communication", communication, COMMUNICATION)
        self.communication = communication

    @property
    def tp(self) -> int:
        """Number of ranks on the axis."""
        return self.tp_degree

    def degrees(self) -> dict[str, int]:
        return {"tp": self.tp}

    def axes(self) -> Axes:
        return super().axes() if self.tp > 1 else Axes.of_mesh(None)  # asks nothing of the other ranks


class ContextParallelConfig(_Config, diffusers.ContextParallelConfig):
    """Split the sequence over `ring_degree * ulysses_degree` ranks; the weights stay whole.

    Any sequence length and any number of heads work; `ulysses_anything` and `ring_anything` are accepted and change
    nothing.

    Args:
        ring_degree: ranks between which keys and values go round (Liu et al., 2023).
        ulysses_degree: ranks that trade their tokens for heads (Jacobs et al., 2023), inside the ring; at most the
            number of heads.
        rotate_method: `"p2p"` passes keys and values on while the rank computes, and holds two parts of them;
            `"allgather"` sends those of some heads to all others while it computes with those before, its own first.
        mesh: a `DeviceMesh` with axes named `"ring"` and `"ulysses"`, or one of them; the degrees follow from it.
            Without it the mesh is made of all ranks.
        communication: as in `TensorParallelConfig`.
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
        communication: str = EXACT,
    ):
        given = {"ring": ring_degree, "ulysses": ulysses_degree}
        for name, degree in given.items():
            if degree is not None:
                _check_degree(f"{name}_degree", degree)
        _check_word("rotate_method", rotate_method, ROTATE_METHODS)
        _check_word("communication", communication, COMMUNICATION)
        self.communication = communication
        degrees = _agree_with_mesh(given, mesh, {name: f"{name}_degree" for name in given})
        self.ring_degree, self.ulysses_degree = degrees["ring"], degrees["ulysses"]
        if self.ring_degree == self.ulysses_degree == 1:
            raise ValueError("context parallelism over 1 rank does nothing; set ring_degree or ulysses_degree")
        self.rotate_method, self.mesh, self.convert_to_fp32 = rotate_method, mesh, convert_to_fp32
        self.ulysses_anything, self.ring_anything = ulysses_anything, ring_anything

    def degrees(self) -> dict[str, int]:
        return {"ring": self.ring_degree, "ulysses": self.ulysses_degree}

    def __repr__(self) -> str:
        lossy = f", communication={self.communication!r}" if self.communication != EXACT else ""
        return (
            f"ContextParallelConfig(ring_degree={self.ring_degree}, ulysses_degree={self.ulysses_degree}, "
            f"rotate_method={self.rotate_method!r}{lossy})"
        )


class CFGParallelConfig(_Config):
    """Give each branch of classifier-free guidance to ranks of its own; exact, one small exchange a step.

    Args:
        cfg: number of groups of ranks; guidance has two branches.

    Raises:
        ValueError: a degree below 1.
    """

    def __init__(self, cfg: int = 2):
        _check_degree("cfg", cfg)
        self.cfg = cfg

    def degrees(self) -> dict[str, int]:
        return {"cfg": self.cfg}


class DataParallelConfig(_Config):
    """Give each replica of the model prompts of its own.

    Args:
        dp: number of replicas.

    Raises:
        ValueError: a degree below 1.
    """

    def __init__(self, dp: int = 2):
        _check_degree("dp", dp)
        self.dp = dp

    def degrees(self) -> dict[str, int]:
        return {"dp": self.dp}


class ParallelConfig(_Config, diffusers.ParallelConfig):
    """Every way of being parallel in one mesh, nested as the arguments are: `dp` outermost, `tp` innermost.

    Args:
        dp: replicas, each with prompts of its own.
        cfg: branches of classifier-free guidance: 2, or 1.
        ring, ulysses, rotate_method: as in `ContextParallelConfig`.
        tp, communication: as in `TensorParallelConfig`.
        mesh: a `DeviceMesh` whose axes have these names, in this order; the degrees follow from it. Without it the
            mesh is made of all ranks, and the product of the degrees must be their number.
        context_parallel_config, tensor_parallel_config: in place of `ring` and `ulysses`, and of `tp`.

    One degree may be -1: it takes the ranks that are left.

    Raises:
        ValueError: degrees below 1, several of -1, a mesh or an inner config that contradicts them.
    """

    def __init__(
        self,
        context_parallel_config: diffusers.ContextParallelConfig | None = None,
        tensor_parallel_config: TensorParallelConfigBase | None = None,
        *,
        dp: int | None = None,
        cfg: int | None = None,
        ring: int | None = None,
        ulysses: int | None = None,
        tp: int | None = None,
        rotate_method: str | None = None,
        communication: str | None = None,
        mesh: DeviceMesh | None = None,
    ):
        given = {"dp": dp, "cfg": cfg, "ring": ring, "ulysses": ulysses, "tp": tp}
        for inner, names in ((context_parallel_config, ("ring", "ulysses")), (tensor_parallel_config, ("tp",))):
            if inner is None:
                continue
            if getattr(inner, "mesh", None) is not None:
                raise ValueError("a mesh belongs to the ParallelConfig, not to a config inside it")
            for name in names:
                degree = getattr(inner, f"{name}_degree")
                if given[name] not in (None, degree):
                    raise ValueError(f"{name}={given[name]}, but {inner} says {degree}; give one of them")
                given[name] = degree
        if rotate_method is None:
            ours = isinstance(context_parallel_config, ContextParallelConfig)
            rotate_method = context_parallel_config.rotate_method if ours else "p2p"
        inner = (getattr(each, "communication", EXACT) for each in (context_parallel_config, tensor_parallel_config))
        lossy = {each for each in inner if each != EXACT}
        if len(said := lossy | ({communication} - {None})) > 1:
            raise ValueError(f"the configs differ in communication: {', '.join(sorted(said))}; say one")
        if communication is None:
            communication = next(iter(lossy), EXACT)
        _check_word("rotate_method", rotate_method, ROTATE_METHODS)
        _check_word("communication", communication, COMMUNICATION)
        for name, degree in given.items():
            if degree is not None:
                _check_degree(name, degree, rest_allowed=True)
        if sum(degree == -1 for degree in given.values()) > 1:
            raise ValueError("only one degree may be -1 and take the ranks that are left")
        degrees = _agree_with_mesh(given, mesh, {})
        self.dp, self.cfg, self.ring, self.ulysses, self.tp = (degrees[name] for name in AXES)
        self.rotate_method, self.communication, self.mesh = rotate_method, communication, mesh

    def degrees(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in AXES}


OurConfig = TensorParallelConfig | ContextParallelConfig | CFGParallelConfig | DataParallelConfig | ParallelConfig
