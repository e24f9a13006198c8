"""Qwen-Image and Qwen-Image-Edit."""

from .context_plan import ContextParallelPlan, gather, split


# diffusers' plan of 0.38 and later, and what a ControlNet adds to the image stream. The plan of 0.37 leaves the text's
# mask whole, which its processor cannot join.
CONTEXT_PARALLEL_PLANS = {
    "QwenImageTransformer2DModel": ContextParallelPlan(
        {
            "": {"controlnet_block_samples": split(1, 3)},
            "transformer_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
            "transformer_blocks.*": {"modulate_index": split(1, 2), "encoder_hidden_states_mask": split(1, 2)},
            "pos_embed": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
            "proj_out": gather(),
        }
    )
}
