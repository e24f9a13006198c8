"""Z-Image: Turbo, Base, Omni, and their ControlNets."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEW_INPUTS, FEW_OUTPUTS, ONE_ROW, SMALL_LINEAR
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


_BLOCK = {
    **at("attention", ATTENTION | ATTENTION_OUT),
    "feed_forward.w1": "column:mlp",
    "feed_forward.w3": "column:mlp",
    "feed_forward.w2": "row:mlp",
}
# Of the embedded timestep itself, without SiLU. Omni embeds two in a step.
_MODULATED_BLOCK = {**_BLOCK, "adaLN_modulation.0": "modulation"}
# The modules that embed the timestep are the transformer's.
_REFINER_BLOCK = {**_BLOCK, "adaLN_modulation.0": "gather"}
_CONTROL_BLOCK = {**_REFINER_BLOCK, "before_proj?": "gather", "after_proj?": "gather"}

_HEADS = {"heads": ("n_heads", lambda config: config["dim"] // config["n_heads"])}

TENSOR_PARALLEL_PLANS = {
    "ZImageTransformer2DModel": TensorParallelPlan(
        {
            **at("layers.*", _MODULATED_BLOCK),
            **at("noise_refiner.*", _MODULATED_BLOCK),
            **at("context_refiner.*", _BLOCK),
            **at("siglip_refiner.*", _BLOCK, optional=True),
            "all_final_layer.*.adaLN_modulation.1": "gather",
            "all_final_layer.*.linear": FEW_OUTPUTS,
            "all_x_embedder.*": FEW_INPUTS,
            "cap_embedder": SMALL_LINEAR,
            "siglip_embedder?": SMALL_LINEAR,
            "t_embedder": ONE_ROW,
        },
        heads=_HEADS,
        embedding="t_embedder",
        activated=True,
    ),
    "ZImageControlNetModel": TensorParallelPlan(
        {
            **at("control_layers.*", _CONTROL_BLOCK),
            **at("control_noise_refiner.*", _CONTROL_BLOCK, optional=True),
            "control_all_x_embedder.*": FEW_INPUTS,
            # The rest are the transformer's own modules, which may be sharded already.
            **at("noise_refiner.*", _REFINER_BLOCK, optional=True),
            **at("context_refiner.*", _BLOCK, optional=True),
            "all_x_embedder.*?": FEW_INPUTS,
            "cap_embedder?": SMALL_LINEAR,
            "t_embedder?": ONE_ROW,
        },
        heads=_HEADS,
    ),
}

# diffusers has none. The image is split while it is refined by itself, then joined, and split again with its text. The
# masks are for whole sequences.
_TOKENS = {"freqs_cis": split(1, 3), "noise_mask?": split(1, 2)}

CONTEXT_PARALLEL_PLANS = {
    "ZImageTransformer2DModel": ContextParallelPlan(
        {
            "": {"controlnet_block_samples": split(1, 3)},
            "noise_refiner.0": {"x": split(1, 3)},
            "noise_refiner.*": _TOKENS,
            "noise_refiner.-1": gather(),
            "layers.0": {"x": split(1, 3)},
            "layers.*": _TOKENS,
            "all_final_layer.*": {"noise_mask?": split(1, 2)},
            "all_final_layer.*.linear": gather(),
        },
        streams=("x",),
        main="x",
        whole=("context_refiner.*.attention", "siglip_refiner.*.attention?"),
    ),
    # Each layer adds its hint to those before it. The refiners stay whole: most are the transformer's own.
    "ZImageControlNetModel": ContextParallelPlan(
        {
            "control_layers.0": {"c": split(1, 3)},
            "control_layers.*": {"x": split(1, 3), "freqs_cis": split(1, 3)},
            "control_layers.-1": gather(2, 4),
        },
        streams=("x",),
        main="x",
        whole=(
            "control_noise_refiner.*.attention?",
            "noise_refiner.*.attention?",
            "context_refiner.*.attention?",
        ),
    ),
}
