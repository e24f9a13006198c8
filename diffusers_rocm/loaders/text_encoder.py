"""A text encoder of transformers whose weights are cut over ranks, each of which reads its part alone."""

from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..distributed.agreement import fail_together
from ..distributed.axis import Axis
from ..hooks.tensor_parallel import Placement, resolve, shard_modules
from ..models.plans.text_encoders import TEXT_ENCODER_PLANS
from .load import fill
from .stored_tensor import checkpoint_entries, stored_tensors
from .whole import checkpoint_files, load_whole


def shard_text_encoder(model: PreTrainedModel, tp: Axis) -> None:
    """Shard a text encoder in place: a whole one, or one without weights.

    Raises:
        ValueError: the class has no plan, or too few heads; the checkpoint holds quantised weights.
    """
    shard_modules(placements_of(model, tp.size), tp)


def placements_of(model: PreTrainedModel, world: int) -> list[Placement]:
    """What becomes of which modules over `world` ranks; reads shapes only, and changes nothing.

    Raises:
        ValueError: as `shard_text_encoder`.
    """
    name = type(model).__name__
    if name not in TEXT_ENCODER_PLANS:
        raise ValueError(f"no plan shards the text encoder {name}, only {', '.join(TEXT_ENCODER_PLANS)}")
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is not None:
        raise ValueError(
            f"the checkpoint of this {name} is quantised ({quantization['quant_method']}), and such weights are not "
            "cut: use text_encoders='first-rank' or 'replicate', or weights that are not quantised"
        )
    plan = TEXT_ENCODER_PLANS[name]
    plan = plan(model.config) if callable(plan) else plan
    owners: dict[int, int] = {}  # of each parameter
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    # What two modules share (words that are read and written by one table) stays whole.
    return [
        placement
        for placement in resolve(model, plan, world)
        if all(owners[id(getattr(placement.module, key))] == 1 for key in placement.shards)
    ]


def empty_text_encoder(cls: type[PreTrainedModel], folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights; what it computes for itself (frequencies of positions) is there."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights(include_buffers=False):
            model = cls(cls.config_class.from_pretrained(folder))
    finally:
        torch.set_default_dtype(before)
    model.tie_weights()
    return model.eval()


def load_sharded_text_encoder(
    cls: type[PreTrainedModel], folder: Path, tp: Axis, dtype: torch.dtype, variant: str | None = None
) -> PreTrainedModel:
    """This rank's part of the text encoder in `folder`, on the CPU.

    Only that part is read, where the checkpoint has the model's names or transformers renames one by one. Where it
    converts more, the ranks load the whole model, one after the other, and keep their parts.

    Raises:
        ValueError: no plan, too few heads, quantised weights, no safetensors; a tensor that is missing or has another
            shape.
        RuntimeError: another rank failed.
    """
    with fail_together(f"load the {cls.__name__}", tp):
        model = empty_text_encoder(cls, folder, dtype)
        shard_modules(placements_of(model, tp.size), tp)
        stored = {name: x for file in checkpoint_files(folder, variant) for name, x in stored_tensors(file).items()}
        checkpoint = _renamed(model, stored)
        wanted = {key: (module, attribute) for key, module, attribute in checkpoint_entries(model)}
        # Of a tensor with several names a checkpoint may have one.
        found = {id(getattr(*wanted[key])) for key in wanted if key in checkpoint}
        wanted = {key: at for key, at in wanted.items() if key in checkpoint or id(getattr(*at)) not in found}
        streams = all(key in checkpoint for key in wanted)
        if streams:
            kept = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
            kept += (getattr(model, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else ()
            fill(model, wanted, checkpoint, tp, dtype, kept, torch.device("cpu"))
            model.tie_weights()
    if not streams:  # by the names alone, which are the same for all ranks
        for turn in range(tp.size):
            with fail_together(f"load the {cls.__name__}", tp):
                if turn == tp.rank:
                    model = load_whole(cls, folder, dtype, variant)
                    shard_text_encoder(model, tp)
    return model


def _renamed(model: nn.Module, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint by the names that the model has now, as far as transformers renames one by one."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:  # transformers 4
        return dict(stored)
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    names = {}
    for name in sorted(stored):
        new = name
        for renaming in renamings:
            new, _ = renaming.rename_source_key(new)
        names[name] = new
    return {names[name]: x for name, x in stored.items()}
