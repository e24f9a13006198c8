"""JoyImage-Edit-Plus: pictures of any sizes, padded to one length."""

from .context_plan import ContextParallelPlan, gather, split
from .transformer_joyimage import JOYIMAGE


TENSOR_PARALLEL_PLANS = {"JoyImageEditPlusTransformer3DModel": JOYIMAGE}

# diffusers has none. The mask is of the whole sequence, and stays whole.
CONTEXT_PARALLEL_PLANS = {
    "JoyImageEditPlusTransformer3DModel": ContextParallelPlan(
        {
            "double_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
            "double_blocks.*": {"image_rotary_emb": split(1, 3)},
            "proj_out": gather(),
        },
        streams=("hidden_states", "encoder_hidden_states"),
    )
}
