"""A whole pipeline from its folder, no rank holding more than it has to at any time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.utils import logging
from torch import nn

from ..distributed import init
from ..distributed.agreement import fail_together
from ..loaders.load import sharded_loading
from ..models._modeling_parallel import OurConfig
from ..registration import DTYPE_ARGUMENT
from . import parallelize
from .text_encoders import load_text_encoder


logger = logging.get_logger(__name__)


def load_pipeline(
    model: str | Path,
    parallel_config: OurConfig,
    torch_dtype: torch.dtype = torch.float32,
    text_encoders: str | Mapping[str, str] = "auto",
    vae: str = "replicate",
    rank_check: str = "first",
    staged: bool | None = None,
    device: str | None = None,
    pipeline: type = DiffusionPipeline,
    **kwargs: Any,
) -> DiffusionPipeline:
    """A parallel pipeline, each rank reading what it keeps of the denoisers and, where they are sharded, the encoders.

    Staged, a component is on the device while it works, and waits in the host's memory otherwise: the peak on the
    device is that of the largest stage (encoding, denoising, decoding), not of all together. On a CPU nothing moves.

    Args:
        model: a local folder of a diffusers pipeline, or the id of one on the Hub.
        parallel_config: any of this package.
        torch_dtype: of the weights.
        text_encoders: how the ranks that share a picture hold the text encoders: `"shard"`, each a part, by tensor
            parallelism; `"first-rank"`, the first one all, which sends the others what it encodes; `"replicate"`, each
            all. `"auto"` takes what fits with the least traffic: the last, else the second, else the first; the choice
            is logged, and is in the pipeline's `text_encoder_modes`. A mapping says it by the component's name.
        vae, rank_check: as of `parallelize`.
        staged: by default where all components' weights would take more than half of the device's memory.
        device: `"cuda"` or `"cpu"`; by default what there is.
        pipeline: its class, where it is not to be the folder's own (`FluxImg2ImgPipeline`, say).
        kwargs: for the `from_pretrained` of that: components in place of those in the folder, `variant`, ...

    Returns:
        The pipeline, to be called on every rank with the same arguments.

    Raises:
        ValueError: what `parallelize` or the loading of a component cannot have.
        RuntimeError: another rank failed.
    """
    here = init(device)
    axes, folder, variant = parallel_config.axes(), _local(model, kwargs), kwargs.get("variant")
    index = json.loads((folder / "model_index.json").read_text())
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list) and entry[1] is not None}
    encoders = {
        name: getattr(transformers, cls)
        for name, (library, cls) in entries.items()
        if library == "transformers" and name.startswith("text_encoder")
    }
    if isinstance(text_encoders, str):
        text_encoders = dict.fromkeys(encoders, text_encoders)
    unknown = [name for name in text_encoders if name not in encoders]
    if unknown:
        raise ValueError(f"{model} has no text encoder {unknown[0]!r}, only {', '.join(encoders) or 'none'}")
    modes = {}
    for name, cls in encoders.items():
        if name not in kwargs:
            mode = text_encoders.get(name, "auto")
            kwargs[name], modes[name] = load_text_encoder(
                cls, folder / name, mode, axes.replica, here, torch_dtype, variant
            )
            if mode == "auto" and axes.replica.size > 1:
                logger.info(f"{name} ({cls.__name__}): {modes[name]}")
    for name, (library, cls) in entries.items():
        if library == "diffusers" and name.startswith("transformer") and name not in kwargs:
            with fail_together(f"load the {cls}", axes.world), sharded_loading(axes.tp):
                kwargs[name] = getattr(diffusers, cls).from_pretrained(
                    folder, subfolder=name, variant=variant, use_safetensors=True, **{DTYPE_ARGUMENT: torch_dtype}
                )
    with fail_together("load the rest of the pipeline", axes.world):
        pipe = pipeline.from_pretrained(folder, **{DTYPE_ARGUMENT: torch_dtype}, **kwargs)
    pipe.text_encoder_modes = modes
    parallelize(pipe, parallel_config, rank_check=rank_check, vae=vae)
    if staged is None and here.type != "cpu":
        modules = [each for each in pipe.components.values() if isinstance(each, nn.Module)]
        size = sum(x.nbytes for each in modules for x in each.parameters())
        staged = size > torch.get_device_module(here).mem_get_info(here)[1] / 2
    if staged and here.type != "cpu":
        pipe.enable_model_cpu_offload(device=here)
    else:
        pipe.to(here)
    return pipe


def _local(model: str | Path, kwargs: Mapping[str, Any]) -> Path:
    """The folder of a pipeline, fetched from the Hub if it is not here."""
    folder = Path(model)
    if not folder.exists():
        given = {name: kwargs[name] for name in ("cache_dir", "revision", "token", "variant") if name in kwargs}
        folder = Path(DiffusionPipeline.download(str(model), use_safetensors=True, **given))
    if not (folder / "model_index.json").is_file():
        raise ValueError(f"{model} is not the folder of a pipeline: it has no model_index.json")
    return folder
