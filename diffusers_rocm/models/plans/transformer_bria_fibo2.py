"""Bria FIBO 2."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


_ATTENTION = ATTENTION | ATTENTION_OUT
_FEED_FORWARD = {"w1": "column:mlp", "w3": "column:mlp", "w2": "row:mlp"}

# Z-Image's; some attend to the text as well. The modulation is of the embedded timestep itself, without SiLU.
_BLOCK = {
    **at("attention", _ATTENTION),
    **at("cross_attention", _ATTENTION, optional=True),
    **at("feed_forward", _FEED_FORWARD),
    "adaLN_modulation.0": "gather",
}

TENSOR_PARALLEL_PLANS = {
    "BriaFibo2Transformer2DModel": TensorParallelPlan(
        {
            **at("layers.*", _BLOCK),
            **at("noise_refiner.*", _BLOCK),
            **at("perceiver.layers.*.cross_attention", _ATTENTION),
            **at("perceiver.layers.*.self_attention", _ATTENTION),
            **at("perceiver.layers.*.ffn", _FEED_FORWARD),
            "final_layer.adaLN_modulation.1": "gather",
            "final_layer.linear": FEW_OUTPUTS,
            "x_embedder": FEW_INPUTS,
            "t_embedder": ONE_ROW,
        },
        heads={"heads": ("n_heads", lambda config: config["dim"] // config["n_heads"])},
    )
}

# diffusers has none. The image is split while it is refined by itself, then joined, and split again with the gist of
# the text, which is made whole. The masks are for whole sequences.
_TOKENS = {"freqs_cis": split(1, 3), "noise_mask": split(1, 2)}

CONTEXT_PARALLEL_PLANS = {
    "BriaFibo2Transformer2DModel": ContextParallelPlan(
        {
            "noise_refiner.0": {"x": split(1, 3)},
            "noise_refiner.*": _TOKENS,
            "noise_refiner.-1": gather(),
            "layers.0": {"x": split(1, 3)},
            "layers.*": _TOKENS,
            "layers.-1": gather(),
        },
        streams=("x",),
        main="x",
        whole=(
            "layers.*.cross_attention",
            "perceiver.layers.*.cross_attention",
            "perceiver.layers.*.self_attention",
        ),
    )
}
