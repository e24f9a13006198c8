"""Read a checkpoint straight into a sharded model: each rank reads the slices that it keeps, and no more.

diffusers finds the files, builds the model without weights, and brings other names and layouts into its own. What it
would then read whole is read here: the model is sharded first, while it has no weights, and each parameter is filled
with the part that its shard says.
"""

import ctypes
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from diffusers.quantizers.quantization_config import QuantizationMethod
from torch import Tensor, nn

from ..distributed.axis import Axis
from ..hooks.tensor_parallel import resolve, shard_modules, sharded_modules
from ..models.plans import get_tensor_parallel_plan
from .stored_tensor import StoredTensor, checkpoint_entries, some, stored_tensors


# Over which the model that is being loaded is sharded.
_tp: ContextVar[Axis | None] = ContextVar("tp", default=None)


@contextmanager
def sharded_loading(tp: Axis) -> Iterator[None]:
    """What diffusers loads in here is sharded over this axis, if it has several ranks."""
    token = _tp.set(tp if tp.size > 1 else None)
    try:
        yield
    finally:
        _tp.reset(token)


def wrap_load_state_dict(original: Callable) -> Callable:
    """diffusers' own reads a checkpoint that is one file."""

    @functools.wraps(original)
    def load_state_dict(checkpoint_file, *args, **kwargs):
        if _tp.get() is None:
            return original(checkpoint_file, *args, **kwargs)
        if str(checkpoint_file).endswith(".gguf"):
            raise cannot_cut("GGUF", "model")
        return stored_tensors(checkpoint_file)

    return load_state_dict


def wrap_load_pretrained_model(original: classmethod) -> classmethod:
    """diffusers' own fills the model that `from_pretrained` built, from tensors or from several files."""

    @functools.wraps(original.__func__)
    def _load_pretrained_model(cls, model, state_dict, resolved_model_file, name_or_path, loaded_keys, **kwargs):
        tp = _tp.get()
        if tp is None or _holds_quantized(kwargs.get("hf_quantizer")):
            return original.__func__(cls, model, state_dict, resolved_model_file, name_or_path, loaded_keys, **kwargs)
        if state_dict is None:
            state_dict = {name: x for file in resolved_model_file for name, x in stored_tensors(file).items()}
        unexpected = _load_sharded(model, state_dict, tp, **kwargs)
        return model, [], unexpected, [], None, []

    return classmethod(_load_pretrained_model)


def wrap_load_model_dict_into_meta(original: Callable) -> Callable:
    """diffusers' own fills the model that `from_single_file` built."""

    @functools.wraps(original)
    def load_model_dict_into_meta(model, state_dict, **kwargs):
        tp = _tp.get()
        if tp is None:
            return original(model, state_dict, **kwargs)
        _load_sharded(model, state_dict, tp, **kwargs)
        return None, None

    return load_model_dict_into_meta


def _load_sharded(
    model: nn.Module,
    checkpoint: Mapping[str, Tensor],
    tp: Axis,
    dtype: torch.dtype | None = None,
    keep_in_fp32_modules: Sequence[str] | None = None,
    device_map: Mapping[str, Any] | None = None,
    low_cpu_mem_usage: bool = True,
    hf_quantizer: Any = None,
    **kwargs: Any,
) -> list[str]:
    """Shard a model that has no weights and fill it; the arguments are those of diffusers.

    Returns:
        The names in the checkpoint for which the model has no place.

    Raises:
        ValueError: options that go with no sharded model; a tensor that the checkpoint lacks, or has in another shape.
    """
    name = type(model).__name__
    if not low_cpu_mem_usage:
        raise ValueError("low_cpu_mem_usage=False builds the whole model on every rank; leave it out")
    if hf_quantizer is not None and not _is_torchao(hf_quantizer):
        raise cannot_cut(getattr(hf_quantizer.quantization_config.quant_method, "value", "?"), name)
    if device_map is not None and set(device_map) != {""}:
        raise ValueError(f"a {name} that is sharded over ranks is on one device each: device_map={{'': device}}")
    device = torch.device((device_map or {"": "cpu"})[""])
    shard_modules(resolve(model, get_tensor_parallel_plan(type(model)), tp.size), tp)
    wanted = {key: (module, attribute) for key, module, attribute in checkpoint_entries(model)}
    fill(model, wanted, checkpoint, tp, dtype, keep_in_fp32_modules or (), device, hf_quantizer)
    unexpected = [key for key in checkpoint if key not in wanted]
    for pattern in type(model)._keys_to_ignore_on_load_unexpected or ():
        unexpected = [key for key in unexpected if re.search(pattern, key) is None]
    return unexpected


def cannot_cut(method: str, name: str) -> ValueError:
    """The error where a model over ranks is to have weights that were quantised by this method."""
    return ValueError(
        f"weights of {method} cannot be cut: for a {name} over ranks, load the unquantised checkpoint with torchao's "
        "quantisation, TorchAoConfig(Int8WeightOnlyConfig()), say"
    )


def _is_torchao(quantizer: Any) -> bool:
    return quantizer.quantization_config.quant_method == QuantizationMethod.TORCHAO


def _holds_quantized(quantizer: Any) -> bool:
    """Does the checkpoint hold what torchao has quantised? diffusers reads it, whole, and it is cut then."""
    return quantizer is not None and quantizer.pre_quantized and _is_torchao(quantizer)


def shard_additions(model: nn.Module) -> None:
    """Shard what was added, whole, to a model that is sharded: adapters; what has no plan's rule stays."""
    if next(sharded_modules(model), None) is not None:
        tp = model.parallelism.axes.tp
        shard_modules(resolve(model, get_tensor_parallel_plan(type(model)), tp.size), tp)


def _stays_plain(quantizer: Any, whole: Sequence[int]) -> bool:
    """May torchao leave such a weight as it is, in one process too: of no whole number of groups, or of no rule?"""
    kind = quantizer.quantization_config.quant_type
    group = getattr(kind, "group_size", None) or 1
    return whole[-1] % group != 0 or type(kind).__name__ == "FqnToConfig"


def _not_quantized(key: str, own: Sequence[int], whole: Sequence[int], why: str = "") -> str:
    return (
        f"torchao cannot quantise this rank's {[*own]} of {key}, {[*whole]} in all{why}: another group size or tp may "
        "fit, or name it in modules_to_not_convert"
    )


# Bytes that are read before the host gets back what it was read through.
_TRIM_AFTER = 16 * 2**20


@functools.cache
def _trim() -> Callable[[int], int]:
    """glibc's: without it freed slices stay with the process, as long as something small lies between them."""
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda padding: 0)


@torch.no_grad()
def fill(
    model: nn.Module,
    wanted: Mapping[str, tuple[nn.Module, str]],
    checkpoint: Mapping[str, Tensor],
    tp: Axis,
    dtype: torch.dtype | None,
    keep_in_fp32_modules: Sequence[str],
    device: torch.device,
    quantizer: Any = None,
) -> None:
    """Give each tensor of a model without weights, sharded or not, its values: what this rank keeps of them.

    Args:
        wanted: name in the checkpoint -> the module and the attribute that it is for.
        dtype: of tensors with floating point; None keeps the model's.
        keep_in_fp32_modules: parts of names whose tensors are in float32 all the same.
        quantizer: diffusers', which makes of each weight that it is for a quantised one, before the next is read.

    Raises:
        ValueError: a tensor that the checkpoint lacks, or has in another shape, or as integers.
    """
    name = type(model).__name__
    missing = [key for key in wanted if key not in checkpoint]
    if missing:
        raise ValueError(f"the checkpoint of this {name} lacks {some(missing)}")
    read = 0
    for key, (module, attribute) in wanted.items():
        was = getattr(module, attribute)
        if was is None:  # a bias that the first rank has
            continue
        kept = dtype if dtype is not None and was.is_floating_point() else was.dtype
        if was.is_floating_point() and set(keep_in_fp32_modules) & set(key.split(".")):
            kept = torch.float32
        sharding = getattr(module, "sharding", None)
        shard = sharding.shards.get(attribute) if sharding is not None else None
        shape = was.shape if shard is None else sharding.shapes[attribute]
        source = checkpoint[key]
        if source.shape != shape:
            raise ValueError(f"{key} is {[*source.shape]} in the checkpoint, and {[*shape]} in this {name}")
        if was.is_floating_point() and not source.dtype.is_floating_point:
            raise ValueError(
                f"{key} is {str(source.dtype).removeprefix('torch.')} in the checkpoint, quantised it seems, and of "
                f"floating point in this {name}"
            )
        if read > _TRIM_AFTER:
            _trim()(0)
            read = 0
        tensor = torch.empty(was.shape, dtype=kept, device=device)
        read += tensor.nbytes
        if not isinstance(source, StoredTensor):  # a conversion had to read it
            tensor.copy_(source if shard is None else shard.take(source, tp.rank, tp.size))
        elif shard is None or shard.dim is None:
            source.read(tensor, 0, [(0, shape[0] if shape else 0)])
        else:
            source.read(tensor, shard.dim, shard.runs(tp.rank, tp.size))
        if quantizer is not None and quantizer.check_if_quantized_param(model, tensor, key, {}):
            try:
                quantizer.create_quantized_param(model, tensor, key, device, {}, [])
            except torch.OutOfMemoryError:
                raise
            except (AssertionError, ValueError, RuntimeError) as error:
                raise ValueError(_not_quantized(key, was.shape, shape, f" ({error})")) from error
            if type(getattr(module, attribute).data) is Tensor and not _stays_plain(quantizer, shape):
                raise ValueError(_not_quantized(key, was.shape, shape))
            continue
        if isinstance(was, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=was.requires_grad)
        setattr(module, attribute, tensor)
