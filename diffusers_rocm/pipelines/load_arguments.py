"""What `load_pipeline` is given, checked before anything is read."""

import difflib
import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline, PipelineQuantizationConfig, TorchAoConfig

from ..models._modeling_parallel import OurConfig


# Of what `from_pretrained` takes, besides components.
PASSED_ON = (
    "cache_dir", "custom_pipeline", "custom_revision", "force_download", "local_files_only", "proxies", "revision",
    "token", "trust_remote_code", "variant",
)  # fmt: skip


def check_place(parallel_config: Any, device: Any) -> None:
    """Raises ValueError where an argument by which the ranks find each other is not of its kind."""
    if not isinstance(parallel_config, OurConfig):
        raise ValueError(
            f"parallel_config must be a config of diffusers_rocm, ParallelConfig(tp=2), say; got {parallel_config!r}"
        )
    if device is not None and not isinstance(device, str):
        raise ValueError(f"device must be 'cuda' or 'cpu', and each rank takes its own of them; got {device!r}")


def check_kinds(torch_dtype: Any, text_encoders: Any, quantization_config: Any, pipeline: Any) -> None:
    """Raises ValueError where another argument is not of its kind."""
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise ValueError(f"torch_dtype must be of floating point, torch.bfloat16, say; got {torch_dtype!r}")
    if not isinstance(text_encoders, (str, Mapping)):
        raise ValueError(f"text_encoders must be a word, or a mapping of names to words; got {text_encoders!r}")
    _check_torchao(quantization_config)
    if not isinstance(quantization_config, (TorchAoConfig, PipelineQuantizationConfig, type(None))):
        raise ValueError(
            "quantization_config must be a TorchAoConfig, TorchAoConfig(Int8WeightOnlyConfig()), say, or a "
            f"PipelineQuantizationConfig; got {quantization_config!r}"
        )
    if not hasattr(pipeline, "from_pretrained"):
        raise ValueError(f"pipeline must be a class of pipelines, FluxImg2ImgPipeline, say; got {pipeline!r}")


def _check_torchao(config: Any) -> None:
    """Raises ValueError for a config of another way of quantising, by its name."""
    method = getattr(config, "quant_method", None) or getattr(config, "quant_backend", None)
    name = str(getattr(method, "value", method))
    if method is not None and name != "torchao":
        raise ValueError(
            f"load_pipeline quantises by torchao, TorchAoConfig(Int8WeightOnlyConfig()), say, and not by {name}"
        )


def quantized_by(
    config: TorchAoConfig | PipelineQuantizationConfig | None,
    entries: Mapping[str, list[str]],
    denoisers: Collection[str],
    given: Collection[str],
) -> dict[str, TorchAoConfig]:
    """What each denoiser is quantised by.

    Args:
        entries: of the folder, by name: library and class.
        denoisers: names of those that are read.
        given: names of what was passed in.

    Raises:
        ValueError: anything else would be quantised, or nothing, or by other means than torchao.
    """
    if config is None:
        return {}
    if isinstance(config, PipelineQuantizationConfig):
        models = [name for name, (library, _) in entries.items() if library in ("diffusers", "transformers")]
        found = {}
        for name in config.quant_mapping or config.components_to_quantize or models:
            if name not in entries:
                raise ValueError(f"quantization_config names {name!r}, and there are {', '.join(entries)}")
            found[name] = config._resolve_quant_config(entries[name][0] == "diffusers", name)
            _check_torchao(found[name])
    else:
        found = dict.fromkeys(denoisers or ("transformer",), config)
    passed = [name for name in found if name in given]
    if passed:
        raise ValueError(
            f"quantization_config is for what is read, and {passed[0]} was passed in: quantise it before, or leave it "
            "out"
        )
    others = [name for name in found if name not in denoisers]
    if others:
        raise ValueError(f"of a parallel pipeline transformers can be quantised, not its {', '.join(others)}")
    return found


def check_known(model: str | Path, entries: Mapping[str, list[str]], kwargs: Collection[str]) -> None:
    """Raises ValueError where a model, or a scheduler, is of a class that the library here lacks."""
    for name, (library, cls) in entries.items():
        of = {"diffusers": diffusers, "transformers": transformers}.get(library)
        ours = library == "diffusers" or name.startswith("text_encoder")
        if of is not None and ours and name not in kwargs and not hasattr(of, cls):
            raise ValueError(f"{model}: its {name} is a {cls}, which {library} {of.__version__} does not have")


def check_names(model: str | Path, pipeline: type, name: str, kwargs: Collection[str], ours: Collection[str]) -> None:
    """Raises ValueError for an argument that nothing takes: diffusers ignores it, and after all is read.

    Args:
        ours: names of the arguments of `load_pipeline`, of which one may be meant.
    """
    cls = getattr(diffusers, str(name), None) if pipeline is DiffusionPipeline else pipeline
    if "custom_pipeline" in kwargs:
        return
    if cls is None:
        raise ValueError(f"{model} is a {name}, which diffusers {diffusers.__version__} does not have")
    known = inspect.signature(cls.__init__).parameters
    if any(each.kind == each.VAR_KEYWORD for each in known.values()):
        return
    for given in kwargs:
        if given not in (*known, *PASSED_ON):
            near = difflib.get_close_matches(given, ours, 1)
            meant = f"; {near[0]} is meant, perhaps" if near else ""
            raise ValueError(f"neither load_pipeline nor a {cls.__name__} takes an argument {given}{meant}")
