"""The quantisations that the command line has names for, as torchao's."""

import importlib.util

from diffusers import TorchAoConfig


# Name -> a class of torchao.quantization and its arguments.
_OF_TORCHAO = {
    "int8": ("Int8WeightOnlyConfig", {"version": 2}),
    "int8-dynamic": ("Int8DynamicActivationInt8WeightConfig", {"version": 2}),
    "fp8": ("Float8WeightOnlyConfig", {}),
    "fp8-dynamic": ("Float8DynamicActivationFloat8WeightConfig", {}),
    "int4": ("Int4WeightOnlyConfig", {"group_size": 128, "int4_packing_format": "tile_packed_to_4d"}),
}
QUANTIZATIONS = tuple(_OF_TORCHAO)


def check_quantization(name: str, on_gpus: bool) -> None:
    """Raises ValueError where this machine has no such quantisation."""
    if importlib.util.find_spec("torchao") is None:
        raise ValueError("--quantization needs torchao: pip install torchao")
    if name in ("fp8-dynamic", "int4") and not on_gpus:
        raise ValueError(f"--quantization {name} needs a GPU; int8, int8-dynamic and fp8 run anywhere")


def torchao_config(name: str) -> TorchAoConfig:
    """Of one of `QUANTIZATIONS`."""
    import torchao.quantization

    cls, arguments = _OF_TORCHAO[name]
    return TorchAoConfig(getattr(torchao.quantization, cls)(**arguments))
