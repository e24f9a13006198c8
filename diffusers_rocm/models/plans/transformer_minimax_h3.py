"""MiniMax-H3: video and audio, packed into one sequence with the text."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEW_INPUTS, FEW_OUTPUTS, GATED_FEED_FORWARD, SMALL_LINEAR
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


TENSOR_PARALLEL_PLANS = {
    "MiniMaxH3Transformer3DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn", ATTENTION | ATTENTION_OUT),
            **at("transformer_blocks.*.ff", GATED_FEED_FORWARD),
            "transformer_blocks.*.adaln_proj.linear": "modulation",
            **at("token_refiner.refiner_blocks.*.attn", ATTENTION | ATTENTION_OUT),
            **at("token_refiner.refiner_blocks.*.ff", GATED_FEED_FORWARD),
            "norm_out.linear": "modulation",
            "context_embedder": SMALL_LINEAR,
            "proj_in": FEW_INPUTS,
            "audio_proj_in": FEW_INPUTS,
            "time_embedder": "replicate:few rows a step; every rank needs the output",
            "proj_out": FEW_OUTPUTS,
            "audio_proj_out": FEW_OUTPUTS,
        },
        embedding="time_embedder",
    )
}

# As diffusers' own. The text is refined whole, before the model packs it.
CONTEXT_PARALLEL_PLANS = {
    "MiniMaxH3Transformer3DModel": ContextParallelPlan(
        {
            "rope": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
            "transformer_blocks.0": {"hidden_states": split(1, 3)},
            "transformer_blocks.*": {"adaln_indices": split(0, 1)},
            "norm_out": {"timestep_indices": split(0, 1)},
            "proj_out": gather(),
            "audio_proj_out": gather(),
        },
        streams=("hidden_states",),
        whole=("token_refiner.refiner_blocks.*.attn",),
    )
}
