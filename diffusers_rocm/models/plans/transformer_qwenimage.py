"""Qwen-Image, Qwen-Image-Edit and Qwen-Image-Layered, and their ControlNets."""

from .building_blocks import FEED_FORWARD, FEW_INPUTS, FEW_OUTPUTS, JOINT_ATTENTION, ONE_ROW, SMALL_LINEAR
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


_COMMON = {
    **at("transformer_blocks.*.attn", JOINT_ATTENTION),
    **at("transformer_blocks.*.img_mlp", FEED_FORWARD),
    **at("transformer_blocks.*.txt_mlp", FEED_FORWARD),
    "transformer_blocks.*.img_mod.1": "modulation",
    "transformer_blocks.*.txt_mod.1": "modulation",
    "img_in": FEW_INPUTS,
    "txt_in": SMALL_LINEAR,
    "time_text_embed": ONE_ROW,
}

TENSOR_PARALLEL_PLANS = {
    "QwenImageTransformer2DModel": TensorParallelPlan(
        {**_COMMON, "norm_out.linear": "modulation", "proj_out": FEW_OUTPUTS},
        embedding="time_text_embed",
    ),
    "QwenImageControlNetModel": TensorParallelPlan(
        {
            **_COMMON,
            "controlnet_blocks.*": "gather",
            "controlnet_x_embedder": FEW_INPUTS,
        },
        embedding="time_text_embed",
    ),
}

# diffusers' plan of 0.38 and later. The plan of 0.37 leaves the text's mask whole, which its processor cannot join.
_SPLIT = {
    "transformer_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
    "transformer_blocks.*": {"encoder_hidden_states_mask": split(1, 2)},
    "pos_embed": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
}

CONTEXT_PARALLEL_PLANS = {
    # And what a ControlNet adds to the image stream.
    "QwenImageTransformer2DModel": ContextParallelPlan(
        {
            **_SPLIT,
            "": {"controlnet_block_samples": split(1, 3)},
            "transformer_blocks.*": {**_SPLIT["transformer_blocks.*"], "modulate_index": split(1, 2)},
            "proj_out": gather(),
        }
    ),
    # diffusers has none.
    "QwenImageControlNetModel": ContextParallelPlan({**_SPLIT, "controlnet_blocks.*": gather()}),
}
