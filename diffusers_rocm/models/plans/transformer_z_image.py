"""Z-Image: Turbo, Base, Omni."""

from .building_blocks import ATTENTION, ATTENTION_OUT
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


BLOCK = {
    **at("attention", ATTENTION | ATTENTION_OUT),
    "feed_forward.w1": "column:mlp",
    "feed_forward.w3": "column:mlp",
    "feed_forward.w2": "row:mlp",
}
# Of the embedded timestep itself, without SiLU.
MODULATED_BLOCK = {**BLOCK, "adaLN_modulation.0": "gather"}

HEADS = {"heads": ("n_heads", lambda config: config["dim"] // config["n_heads"])}

TENSOR_PARALLEL_PLANS = {
    "ZImageTransformer2DModel": TensorParallelPlan(
        {
            **at("layers.*", MODULATED_BLOCK),
            **at("noise_refiner.*", MODULATED_BLOCK),
            **at("context_refiner.*", BLOCK),
            **at("siglip_refiner.*", BLOCK, optional=True),
            "all_final_layer.*.adaLN_modulation.1": "gather",
            "all_final_layer.*.linear": "replicate:few output channels",
            "all_x_embedder.*": "replicate:few input channels; every rank needs the output",
            "cap_embedder": "replicate:one small Linear; every rank needs the output",
            "siglip_embedder?": "replicate:one small Linear; every rank needs the output",
            "t_embedder": "replicate:one row a step; every rank needs the output",
        },
        heads=HEADS,
    )
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
            "noise_refiner.1": gather(),
            "layers.0": {"x": split(1, 3)},
            "layers.*": _TOKENS,
            "all_final_layer.*": {"noise_mask?": split(1, 2)},
            "all_final_layer.*.linear": gather(),
        },
        streams=("x",),
        main="x",
        whole=("context_refiner.*.attention", "siglip_refiner.*.attention"),
    )
}
