"""A whole pipeline from its folder, no rank holding more than it has to at any time."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from diffusers import DiffusionPipeline, ModelMixin, PipelineQuantizationConfig, TorchAoConfig
from diffusers.utils import logging
from torch import nn
from transformers import PreTrainedModel

from ..distributed import init
from ..distributed.agreement import agree, fail_together
from ..distributed.axis import Axis
from ..distributed.collectives import on_all_ranks
from ..distributed.mesh import Axes
from ..hooks.disk_offload import DiskOffload, Turn
from ..loaders.load import sharded_loading
from ..loaders.text_encoder import load_sharded_text_encoder
from ..loaders.whole import checkpoint_files, load_whole, read_json, variant_in
from ..models._modeling_parallel import OurConfig
from ..registration import DTYPE_ARGUMENT
from . import parallelize
from .choices import check_choices
from .denoisers import DENOISERS
from .load_arguments import PASSED_ON, check_kinds, check_known, check_names, check_place, quantized_by
from .peaks import weight_bytes
from .room import host_room
from .text_encoders import load_text_encoder


logger = logging.get_logger(__name__)


def load_pipeline(
    model: str | Path,
    parallel_config: OurConfig,
    torch_dtype: torch.dtype = torch.float32,
    text_encoders: str | Mapping[str, str] = "auto",
    vae: str = "replicate",
    rank_check: str = "first",
    offload: str = "auto",
    quantization_config: TorchAoConfig | PipelineQuantizationConfig | None = None,
    graph: bool = False,
    device: str | None = None,
    pipeline: type = DiffusionPipeline,
    **kwargs: Any,
) -> DiffusionPipeline:
    """A parallel pipeline, each rank reading what it keeps of the denoisers and, where they are sharded, the encoders.

    Args:
        model: a local folder of a diffusers pipeline, or the id of one on the Hub.
        parallel_config: any of this package.
        torch_dtype: of the weights.
        text_encoders: how the ranks that share a picture hold the text encoders: `"shard"`, each a part, by tensor
            parallelism; `"first-rank"`, the first one all, which sends the others what it encodes; `"replicate"`, each
            all. `"auto"` takes what fits with the least traffic: the last, else the second, else the first; the choice
            is logged, and is in the pipeline's `text_encoder_modes`. A mapping says it by the component's name.
        vae, rank_check, graph: as of `parallelize`.
        offload: what waits elsewhere for its turn. `"model"`: components, in the host's memory, each on the device
            while it works, so that the peak there is that of the largest stage (encoding, denoising, decoding), not of
            all together; `"disk"`: components, each read when it works and given up when the next one does, so that
            the host's peak is that of the largest too; `"group"`: layers, in the host's memory; `"none"`. `"auto"` is
            `"none"` where all weights would take at most half of the device's memory, else `"model"`, or `"disk"` if
            the hosts have no room for all weights of their ranks. On a CPU only `"disk"` does anything.
        quantization_config: of the denoisers, each slice quantised as it is read, on the device; or diffusers' mapping
            of the components' names to such.
        device: `"cuda"` or `"cpu"`; by default what there is.
        pipeline: its class, where it is not to be the folder's own (`FluxImg2ImgPipeline`, say).
        kwargs: for the `from_pretrained` of that: components in place of those in the folder, `variant`, ...

    Returns:
        The pipeline, to be called on every rank with the same arguments.

    Raises:
        ValueError: what `parallelize` or the loading of a component cannot have; another component to be quantised.
        RuntimeError: another rank failed.
    """
    check_place(parallel_config, device)
    here, variant = init(device), kwargs.get("variant")
    axes = parallel_config.axes()
    choices = {"text_encoders": text_encoders, "vae": vae, "rank_check": rank_check, "offload": offload}
    choices |= {"graph": graph, "dtype": torch_dtype, "variant": variant}
    choices["pipeline"] = getattr(pipeline, "__name__", type(pipeline).__name__)
    choices |= {name: type(each).__name__ for name, each in kwargs.items() if name not in PASSED_ON}
    agree("arguments of load_pipeline()", choices, axes.world)
    check_kinds(torch_dtype, text_encoders, quantization_config, pipeline)
    check_choices(vae=vae, rank_check=rank_check, offload=offload)
    if graph and offload == "disk":
        raise ValueError("graph=True records where weights are, and offload='disk' reads them anew: use 'model'")
    with fail_together("find the pipeline", axes.world):
        folder = _local(model, kwargs)
        entries = _entries(model, folder, pipeline, kwargs)
    encoders = {
        name: getattr(transformers, cls)
        for name, (library, cls) in entries.items()
        if library == "transformers" and name.startswith("text_encoder") and name not in kwargs
    }
    asked = _asked_modes(model, text_encoders, encoders)
    models = {
        name: getattr(diffusers, cls)
        for name, (library, cls) in entries.items()
        if library == "diffusers" and name not in kwargs and issubclass(getattr(diffusers, cls), ModelMixin)
    }
    denoisers = {name: cls for name, cls in models.items() if name in DENOISERS}
    quantized = quantized_by(quantization_config, entries, denoisers, kwargs)
    # What this rank will load: of the encoders that come later the smallest part that it may get.
    parted = dict.fromkeys(denoisers, axes.tp.size) | dict.fromkeys(encoders, axes.replica.size)
    with fail_together("find the weights", axes.world):
        beside = {
            name: sum(file.stat().st_size for file in checkpoint_files(folder / name, variant)) // parted.get(name, 1)
            for name in (*models, *encoders)
        }
    if offload == "auto":
        offload = _past_the_host(sum(beside.values()), here, axes.world)
        if offload == "disk" and graph:
            offload = "model"
        if offload == "disk":
            logger.warning(f"the weights of {model} wait on disk: this host has no room for those of all its ranks")
    reader = _Reader(folder, variant, torch_dtype, here, axes, quantized, offload == "disk")
    modes, on_disk = {}, {}

    def keep(name: str, component: nn.Module, read: Callable[[], nn.Module]) -> None:
        kwargs[name] = component
        if offload == "disk":
            on_disk[name] = DiskOffload(component, read, here, axes.model if name in denoisers else None)
        if name in denoisers:
            component.enable_parallelism(config=parallel_config)
        if offload == "disk":
            on_disk[name].give_up()
        if offload == "none":
            with fail_together(f"bring the {type(component).__name__} to its device", axes.world):
                component.to(here)

    for name, cls in encoders.items():
        mode = asked.get(name, "auto")
        del beside[name]
        others = 0 if offload == "disk" else sum(beside.values())
        encoder, modes[name] = load_text_encoder(
            cls, folder / name, mode, axes.replica, here, torch_dtype, variant, others
        )
        keep(name, encoder, functools.partial(reader.encoder, name, cls, modes[name]))
        if mode == "auto" and axes.replica.size > 1:
            why = "" if modes[name] == "replicate" else ", as there is no room for a whole one on each rank"
            log = logger.warning if why and axes.world.rank == 0 else logger.info  # which diffusers hides
            log(f"text_encoders='auto': {name} ({cls.__name__}) is {modes[name]!r}{why}")
    for name, cls in models.items():
        read = functools.partial(reader.denoiser if name in denoisers else reader.model, name, cls)
        with fail_together(f"load the {cls.__name__}", axes.world):
            component = read()
        keep(name, component, read)
    with fail_together("load the rest of the pipeline", axes.world):
        pipe = pipeline.from_pretrained(folder, use_safetensors=True, **{DTYPE_ARGUMENT: torch_dtype}, **kwargs)
    pipe.text_encoder_modes = modes
    parallelize(pipe, parallel_config, rank_check=rank_check, vae=vae, graph=graph)
    with fail_together("bring the pipeline to its device", axes.world):
        _place(pipe, offload, on_disk, here)
    return pipe


@dataclass(frozen=True)
class _Reader:
    """Reads the models of a pipeline's folder: once, or for each use where they wait on disk.

    Attributes:
        quantized: denoiser -> what it is quantised by, on the device.
        on_disk: whether models wait there; denoisers are then read onto the device.
    """

    folder: Path
    variant: str | None
    dtype: torch.dtype
    device: torch.device
    axes: Axes
    quantized: Mapping[str, TorchAoConfig]
    on_disk: bool

    def encoder(self, name: str, cls: type[PreTrainedModel], mode: str) -> PreTrainedModel:
        """One whose mode is settled, again."""
        if mode == "shard":
            return load_sharded_text_encoder(cls, self.folder / name, self.axes.replica, self.dtype, self.variant)
        together = self.axes.replica if mode == "replicate" else Axis.single("the first rank")
        with fail_together(f"read the {cls.__name__}", together):
            return load_whole(cls, self.folder / name, self.dtype, self.variant)

    def denoiser(self, name: str, cls: type[ModelMixin]) -> ModelMixin:
        """This rank's slices."""
        how = {DTYPE_ARGUMENT: self.dtype}
        if name in self.quantized or self.on_disk:
            how["device_map"] = {"": self.device}
        if name in self.quantized:
            how["quantization_config"] = self.quantized[name]
        variant = variant_in(self.folder / name, self.variant)
        with fail_together(f"read the {cls.__name__}", self.axes.model), sharded_loading(self.axes.tp):
            return cls.from_pretrained(self.folder, subfolder=name, variant=variant, use_safetensors=True, **how)

    def model(self, name: str, cls: type[ModelMixin]) -> ModelMixin:
        """Any other, whole."""
        return load_whole(cls, self.folder / name, self.dtype, self.variant)


def _entries(model: str | Path, folder: Path, pipeline: type, kwargs: Collection[str]) -> dict[str, list[str]]:
    """Name -> library and class of each component of the folder's index.

    Raises:
        ValueError: a class that is not there, an argument that nothing takes, a component that the folder lacks.
    """
    index = read_json(folder / "model_index.json")
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list) and entry[1] is not None}
    check_known(model, entries, kwargs)
    ours = list(inspect.signature(load_pipeline).parameters)
    check_names(model, pipeline, index.get("_class_name"), kwargs, ours)
    _check_complete(folder, entries, kwargs)
    return entries


def _asked_modes(model: str | Path, given: str | Mapping[str, str], encoders: Collection[str]) -> Mapping[str, str]:
    """Text encoder -> its mode, where one is asked for. Raises ValueError for a mode, or a name, that there is not."""
    asked = dict.fromkeys(encoders, given) if isinstance(given, str) else given
    for mode in asked.values():
        check_choices(text_encoders=mode)
    unknown = [name for name in asked if name not in encoders]
    if unknown:
        raise ValueError(f"{model} has no text encoder {unknown[0]!r}, only {', '.join(encoders) or 'none'}")
    return asked


def _place(pipe: DiffusionPipeline, offload: str, on_disk: Mapping[str, DiskOffload], device: torch.device) -> None:
    """Bring a pipeline that is loaded to its device, or have its parts wait for their turn."""
    if offload == "auto" and device.type != "cpu":
        half = torch.get_device_module(device).mem_get_info(device)[1] / 2
        offload = "model" if sum(weight_bytes(pipe)) > half else "none"
    if offload == "disk":
        _take_turns(pipe, on_disk, device)
    elif offload == "model" and device.type != "cpu":
        pipe.enable_model_cpu_offload(device=device)
    elif offload == "group" and device.type != "cpu":
        pipe.enable_group_offload(device, offload_type="leaf_level", use_stream=True)
    else:
        pipe.to(device)


def _past_the_host(mine: int, device: torch.device, world: Axis) -> str:
    """What `"auto"` becomes where a host has no room for `mine` bytes of each of its ranks: `"none"`, which needs it
    for one component at a time, if the devices have room for all, else `"disk"`. The same on all ranks.
    """
    together, room = host_room(mine, world)
    there = 0 if device.type == "cpu" else torch.get_device_module(device).mem_get_info(device)[1]
    fits = on_all_ranks(mine <= there / 2, world)
    if together <= room:
        return "auto"
    return "none" if fits else "disk"


def _take_turns(pipe: DiffusionPipeline, on_disk: Mapping[str, DiskOffload], device: torch.device) -> None:
    """Of the components that work one after the other, one at a time has its weights.

    diffusers' order names these; the others, ControlNets say, work in every step.
    """
    turn = Turn()
    for name in (pipe.model_cpu_offload_seq or "").split("->"):
        if name in on_disk:
            on_disk[name].turn = turn
    for name, component in pipe.components.items():
        if isinstance(component, nn.Module) and name not in on_disk:
            add_hook_to_module(component.to(device), AlignDevicesHook(execution_device=device))
    models = [pipe.components[name] for name in on_disk]
    for each, names in [(pipe, _OF_WEIGHTS_THAT_STAY), *((model, _OF_MODELS_THAT_STAY) for model in models)]:
        for name in names:
            if hasattr(each, name):
                setattr(each, name, functools.partial(_refuse, name))


# What pipelines can be told that is lost, or not possible, where weights are read anew for each use.
_OF_WEIGHTS_THAT_STAY = (
    "to",
    "load_lora_weights",
    "fuse_lora",
    "fuse_qkv_projections",
    "enable_model_cpu_offload",
    "enable_sequential_cpu_offload",
    "enable_group_offload",
    "remove_all_hooks",
    "save_pretrained",
)
_OF_MODELS_THAT_STAY = ("add_adapter", "load_lora_adapter", "enable_group_offload")


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"{name}() goes with weights that stay, and offload='disk' reads them anew for each use: load the pipeline "
        "with another offload"
    )


def _check_complete(folder: Path, entries: Mapping[str, list[str]], kwargs: Collection[str]) -> None:
    """Raises ValueError where a component has no folder, or a model no config: of neither would anything say so."""
    for name, (library, cls) in entries.items():
        if name in kwargs:
            continue
        if not (folder / name).is_dir():
            raise ValueError(f"{folder} has no folder {name}, of which its model_index.json says that it is a {cls}")
        is_model = library == "diffusers" and issubclass(getattr(diffusers, cls), ModelMixin)
        if (is_model or name.startswith("text_encoder")) and not (folder / name / "config.json").is_file():
            raise ValueError(f"{folder / name} has no config.json")


def _local(model: str | Path, kwargs: Mapping[str, Any]) -> Path:
    """The folder of a pipeline, fetched from the Hub if it is not here."""
    folder = Path(model)
    if not folder.exists():
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(model)) is None:
            raise ValueError(f"{model}: there is no such folder, and it is no id on the Hub")
        given = {name: kwargs[name] for name in ("cache_dir", "revision", "token", "variant") if name in kwargs}
        folder = Path(DiffusionPipeline.download(str(model), use_safetensors=True, **given))
    if not (folder / "model_index.json").is_file():
        raise ValueError(f"{model} is not the folder of a pipeline: it has no model_index.json")
    return folder
