"""The time and the memory of a denoising step, by mesh: a model of its real size, the peers beside it, in one run."""

import contextlib
import functools
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import diffusers
import torch
import torch.distributed as dist
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from diffusers import ModelMixin
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..distributed import init
from ..distributed.agreement import fail_together
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64, broadcast_from_first
from ..distributed.compression import COMMUNICATION, EXACT
from ..distributed.mesh import AXES
from ..distributed.peer_memory import forget_places
from ..hooks.step_graph import WARM_UP, StepGraph
from ..models._modeling_parallel import ParallelConfig
from ..models.attention_dispatch import preference
from ..models.attention_kernels import platform_of
from ..pipelines.peaks import device_peak
from .distance import FLOAT32_BAR, LOSSY_BAR, bar_of, distance, largest_of
from .known_models import KNOWN_MODELS, Size, build, count_blocks, inputs


T = TypeVar("T")

MODES = ("eager", "compile", "graph", "compile+graph")
PEERS = ("diffusers", "cache-dit", "device-map")
ONE = "one rank"
# What cache-dit has besides, where Ulysses is all there is: fewer bits, and messages beside what is computed.
FLOAT8, ASYNC = "float8", "async"


@dataclass(frozen=True)
class StepRequest:
    """What is measured: every mesh and every peer in every mode, after one rank in that mode.

    Attributes:
        meshes: `parse_mesh` reads them; all of as many ranks, and without spaces.
        guidance: a step is two forwards, with another text in the second.
        in_float32: outputs are compared with float32, of which there must be room for the model on every rank.
        repeats: steps timed in a row; `rounds`: how often all rows are gone through, each time from another one on.
    """

    model: str
    meshes: tuple[str, ...]
    size: Size
    modes: tuple[str, ...] = ("eager",)
    peers: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    guidance: bool = False
    in_float32: bool = False
    dtype: str = "bfloat16"
    device: str | None = None
    warmup: int = 2
    repeats: int = 8
    rounds: int = 2

    @property
    def reference(self) -> str:
        return "float32" if self.in_float32 else ONE


def parse_mesh(text: str) -> dict[str, Any]:
    """`"ring=2,tp=2,int8"` as arguments of `ParallelConfig`.

    Raises:
        ValueError: neither an axis with its degree, nor a way of sending, nor a way round the ring; `dp`, which has
            nothing to measure; an axis twice; a way round a ring that is not there.
    """
    found: dict[str, Any] = {}
    words = [word.strip() for word in text.split(",")]
    names = [word.partition("=")[0] for word in words]
    for word, name in zip(words, names, strict=True):
        degree = word.partition("=")[2]
        if name and names.count(name) > 1:
            raise ValueError(f"--mesh {text} names {name} twice")
        if name == "dp":
            raise ValueError(f"--mesh {text}: replicas exchange nothing, and each takes what it takes without them")
        if name in AXES and degree.removeprefix("-").isdecimal() and int(degree) < 1:
            raise ValueError(f"--mesh {text}: {name} must be at least 1; got {degree}")
        if name in AXES and degree.isdecimal():
            found[name] = int(degree)
        elif word in COMMUNICATION and word != EXACT:
            found["communication"] = word
        elif word == "allgather":
            found["rotate_method"] = word
        else:
            axes = ", ".join(f"{axis}=N" for axis in AXES if axis != "dp")
            ways = ", ".join(["allgather", *(each for each in COMMUNICATION if each != EXACT)])
            raise ValueError(f"--mesh {text}: {word!r} is none of {axes}, {ways}")
    if not found.keys() & set(AXES):
        raise ValueError(f"--mesh {text} names no axis: add tp=2, say")
    if "rotate_method" in found and found.get("ring", 1) == 1:
        raise ValueError(f"--mesh {text}: allgather is a way round a ring, and there is none: add ring=2, say")
    if found.get("cfg", 1) > 2:
        raise ValueError(f"--mesh {text}: guidance is of two forwards, and cfg of one rank or two")
    return found


def ranks_of(mesh: str) -> int:
    return math.prod(degree for name, degree in parse_mesh(mesh).items() if name in AXES)


@dataclass
class Row:
    """One way to run a step.

    Attributes:
        distance: of its output from that of one rank in the first mode, or from that in float32, relative L2: the
            largest of all rounds. One rank's own is not 0 where a later round has other kernels.
        note: why there are no times.
    """

    name: str
    mode: str
    milliseconds: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    distance: float | None = None
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds) if self.milliseconds else math.nan


class Clock:
    """Times work on the device by its events; on a CPU by the host's clock."""

    def __init__(self, device: torch.device):
        self._module = torch.get_device_module(device) if device.type != "cpu" else None

    def sync(self) -> None:
        if self._module is not None:
            self._module.synchronize()

    def milliseconds(self, work: Callable[[], Any]) -> float:
        if self._module is None:
            start = time.perf_counter()
            work()
            return (time.perf_counter() - start) * 1000
        start, stop = (self._module.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        self._module.synchronize()
        return start.elapsed_time(stop)


def measure_step(request: StepRequest, told: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """All rows; every rank calls it. `told` hears of each row when a round of it is over.

    Raises:
        torch.OutOfMemoryError: there is no room for the model in float32, which was asked for.
    """
    device = init(request.device, timeout=timedelta(minutes=10))
    runner, backends = _Runner(request, device), _Backends()
    rows = [Row(name, mode) for mode in request.modes for name in (ONE, *request.meshes, *_peer_names(request))]
    # cache-dit changes classes of diffusers for good where messages are asynchronous: after all rounds of the others.
    changing = [row for row in rows if row.name.endswith(ASYNC)]
    others = [row for row in rows if row not in changing]
    # One rank is the first of the first round: the others' outputs are compared with its.
    for row in (*in_turns(others, request.rounds), *in_turns(changing, request.rounds)):
        if not row.note:
            with backends.of("cache-dit" if row.name.startswith("cache-dit") else "all others"):
                runner.run(row)
        told(row)
    return rows


def in_turns(rows: list[T], rounds: int) -> Iterator[T]:
    """All of them in each round, which begins with another one each time, the first with the first."""
    for turn in range(rounds):
        start = turn * len(rows) // rounds
        yield from rows[start:] + rows[:start]


def _peer_names(request: StepRequest) -> Iterator[str]:
    for peer in request.peers:
        if peer == "device-map":
            yield peer
            continue
        for mesh in request.meshes:
            degrees = parse_mesh(mesh)
            if set(degrees) <= set(AXES):
                yield f"{peer} {mesh}"
            elif peer == "cache-dit" and set(degrees) == {"ulysses", "communication"}:
                yield f"{peer} ulysses={degrees['ulysses']},{FLOAT8}"
            if peer == "cache-dit" and set(degrees) == {"ulysses"}:
                yield f"{peer} {mesh},{ASYNC}"


class _Backends:
    """diffusers' table of attention backends, which cache-dit fills with its own, once and for the whole process."""

    def __init__(self):
        self._tables = [table for table in vars(_AttentionBackendRegistry).values() if isinstance(table, dict | set)]
        self._active = _AttentionBackendRegistry.get_active_backend()[0]
        self._first = [table.copy() for table in self._tables]
        self._of: dict[str, list[dict | set]] = {}

    @contextlib.contextmanager
    def of(self, peer: str) -> Iterator[None]:
        """As that peer left it; afterwards as it was at first, and so is the active one, which peers set for all."""
        self._put(self._of.get(peer, self._first))
        try:
            yield
        finally:
            self._of[peer] = [table.copy() for table in self._tables]
            self._put(self._first)
            _AttentionBackendRegistry.set_active_backend(self._active)

    def _put(self, tables: list[dict | set]) -> None:
        for table, kept in zip(self._tables, tables, strict=True):
            table.clear()
            table.update(kept)


class _Runner:
    def __init__(self, request: StepRequest, device: torch.device):
        self._request, self._device, self._clock = request, device, Clock(device)
        self._known = KNOWN_MODELS[request.model]
        self._dtype = getattr(torch, request.dtype)
        # On the host: a message that waits on a GPU takes time from the one process that has all of them.
        self._world = replace(Axis.of_all(), device=torch.device("cpu"))
        self._wanted: Tensor | None = None
        self._blocks = 0
        self._from_float32: dict[str, float] = {}  # mode -> one rank's own distance
        if request.in_float32:
            with fail_together("make the model in float32", self._world):
                self._wanted = self._in_float32()
            free(self._device)

    @torch.no_grad()
    def run(self, row: Row) -> None:
        """Build the model as the row says, time its steps, and compare what comes out."""
        flags = row.mode.split("+")
        alone = row.name == "device-map"  # one process that has all GPUs
        here = not alone or self._world.rank == 0
        step = graph = output = None
        with noted(row, self._world):
            config = self._config(row.name)
            tp = None if config is None else config.axes().tp
            with fail_together("make the model", self._world):  # before any rank waits for it
                model = self._build(tp) if here else None
            if here:
                step = self._step(model, inputs(self._known, self._request.size, model, self._dtype))
                model = self._enabled(row.name, model, config)
                if "graph" in flags:
                    graph = StepGraph(model)
                if "compile" in flags:
                    model.compile_repeated_blocks(fullgraph=row.name in (ONE, *self._request.meshes))
                for _ in range(self._request.warmup + (WARM_UP if graph is not None else 0)):
                    step()
                if graph is not None and not graph.captured:
                    raise RuntimeError("its steps became no graph")
                self._clock.sync()
        if not row.note:
            self._together()
            self._reset_peaks()
            with noted(row, self._world):
                if here:
                    row.milliseconds += [self._clock.milliseconds(step) for _ in range(self._request.repeats)]
                    output = step().clone()
        if not row.note:
            self._together()
            row.peak = self._peaks(alone)
            self._compare(row, output)
        if graph is not None:
            graph.remove()
        model = step = graph = output = None
        free(self._device)

    @torch.no_grad()
    def _in_float32(self) -> Tensor:
        """The same weights and inputs, all arithmetic in float32."""
        model = self._build()
        given = inputs(self._known, self._request.size, model, self._dtype)
        wide = {name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in given.items()}
        return self._step(model.float(), wide)()

    def _config(self, name: str) -> ParallelConfig | None:
        """Of a row of ours."""
        return ParallelConfig(**parse_mesh(name)) if name in self._request.meshes else None

    def _build(self, tp: Axis | None = None) -> ModelMixin:
        model = build(self._known, self._request.config, self._device, self._dtype, tp)
        self._blocks = count_blocks(model)
        return model

    def _enabled(self, name: str, model: ModelMixin, config: ParallelConfig | None) -> ModelMixin:
        if config is not None:
            model.enable_parallelism(config=config)
        if config is not None or name == ONE:
            return model
        if name == "device-map":
            memory = get_balanced_memory(model, no_split_module_classes=model._no_split_modules)
            places = infer_auto_device_map(model, memory, no_split_module_classes=model._no_split_modules)
            return dispatch_model(model, places)
        peer, _, mesh = name.rpartition(" ")
        degrees = parse_mesh(mesh.removesuffix(f",{FLOAT8}").removesuffix(f",{ASYNC}"))
        if peer == "diffusers":
            _enable_diffusers(model, degrees)
        else:
            besides = {f"ulysses_{way}": True for way in (FLOAT8, ASYNC) if mesh.endswith(way)}
            _enable_cache_dit(model, degrees, besides)
        return model

    def _step(self, model: ModelMixin, given: dict[str, Any]) -> Callable[[], Tensor]:
        def predict(arguments: Mapping[str, Any]) -> Tensor:
            return tree_leaves(model(**arguments))[0]  # of one picture, where a model answers with a list

        if not self._request.guidance:
            return functools.partial(predict, given)
        # With other channels: tokens in another order are the same text to a model that knows no places of it.
        text = self._known.text
        other = given | {text: tree_map_only(Tensor, lambda x: x.flip(-1), given[text])}
        # Compared as they are: in `unguided + scale * (guided - unguided)` rounding of both is, times the scale.
        return lambda: torch.stack([predict(given), predict(other)])

    def _compare(self, row: Row, output: Tensor | None) -> None:
        """On all ranks that have an output, of which the farthest counts."""
        if self._wanted is None:
            if row.name != ONE:  # which had no room
                return
            self._wanted = output
        own = 0.0 if output is None else distance(output, self._wanted)
        row.distance = max(largest_of(own, self._world), row.distance or 0.0)  # NaN, if it is that
        bar = self._bar(row)
        if self._request.in_float32 and row.name == ONE and self._dtype != torch.float32:
            self._from_float32[row.mode] = row.distance
        if not row.distance <= bar:
            row.note = f"wrong: {row.distance:.1e} from {self._request.reference}, more than {bar:.1e}"
            if self._dtype != torch.float32 and not self._request.in_float32:
                row.note += ", unless one rank is as far from float32: see --float32-reference"

    def _bar(self, row: Row) -> float:
        lossy = any(word in row.name for word in (*COMMUNICATION, FLOAT8))
        if row.name != ONE and row.mode in self._from_float32:
            return (LOSSY_BAR if lossy else FLOAT32_BAR) * self._from_float32[row.mode]
        return bar_of(self._blocks, self._dtype, lossy)

    def _together(self) -> None:
        if self._world.size > 1:
            dist.barrier()

    def _reset_peaks(self) -> None:
        if self._device.type != "cpu":
            module = torch.get_device_module(self._device)
            for index in range(module.device_count()):
                module.reset_peak_memory_stats(index)

    def _peaks(self, alone: bool) -> list[int]:
        """Bytes of each rank's device; of all devices by the first rank, if that has them."""
        if not alone:
            return all_gather_int64(torch.tensor([device_peak(self._device)]), self._world).flatten().tolist()
        module = torch.get_device_module(self._device)
        own = [module.max_memory_allocated(index) for index in range(self._world.size)]
        return broadcast_from_first(torch.tensor(own), self._world).tolist()


def free(device: torch.device) -> None:
    """Let go of what a row has left, which would count in the next one's peak."""
    forget_places()
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    torch._dynamo.reset()


@contextlib.contextmanager
def noted(row: Any, world: Axis) -> Iterator[None]:
    """What cannot be had becomes the row's `note`, on all ranks; peers raise all kinds of errors."""
    try:
        with fail_together("have it so", world):
            yield
    except Exception as error:
        row.note = f"not run: {type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _enable_diffusers(model: ModelMixin, degrees: Mapping[str, int]) -> None:
    used = {name for name, degree in degrees.items() if degree > 1}
    if used <= {"ring", "ulysses"}:
        ring, ulysses = (degrees.get(name, 1) for name in ("ring", "ulysses"))
        config = diffusers.ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
        if ring > 1:  # the default kernel gives no log-sum-exp
            kernels = preference(platform_of(model.device.type))
            model.set_attention_backend(next(f"_native_{name}" for name in kernels if name in ("cudnn", "flash")))
    elif used == {"tp"} and hasattr(diffusers, "TensorParallelConfig"):
        config = diffusers.TensorParallelConfig(tp_degree=degrees["tp"])
    else:
        raise ValueError(f"diffusers {diffusers.__version__} has no {' x '.join(sorted(used))}")
    model.enable_parallelism(config=config)


def _enable_cache_dit(model: ModelMixin, degrees: Mapping[str, int], besides: Mapping[str, bool]) -> None:
    with contextlib.redirect_stdout(sys.stderr):  # where its log goes from then on: the table is what is on stdout
        import cache_dit

    used: dict[str, Any] = {f"{name}_size": degree for name, degree in degrees.items() if degree > 1}
    if "cfg_size" in used:
        raise ValueError("cache-dit has no parallel guidance")
    # The only backend that its ring takes.
    config = cache_dit.ParallelismConfig(**used, **besides, attention_backend="native")
    cache_dit.enable_cache(model, parallelism_config=config)


def each_mesh(given: Sequence[str]) -> tuple[str, ...]:
    """Those of a command line, each once, without spaces."""
    return tuple(dict.fromkeys("".join(mesh.split()) for mesh in given))


def check_meshes(meshes: tuple[str, ...]) -> int:
    """The ranks that all of them have.

    Raises:
        ValueError: they differ.
    """
    counts = {mesh: ranks_of(mesh) for mesh in meshes}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{mesh} is of {count}" for mesh, count in counts.items())
        raise ValueError(f"the meshes of one run are of as many ranks, and {shown}")
    return next(iter(counts.values()))
