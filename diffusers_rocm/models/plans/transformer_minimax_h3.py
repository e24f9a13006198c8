"""MiniMax-H3: video and audio, packed into one sequence with the text."""

from .building_blocks import ATTENTION, ATTENTION_OUT, GATED_FEED_FORWARD
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
            "context_embedder": "replicate:one small Linear; every rank needs the output",
            "proj_in": "replicate:few input channels; every rank needs the output",
            "audio_proj_in": "replicate:few input channels; every rank needs the output",
            "time_embedder": "replicate:few rows a step; every rank needs the output",
            "proj_out": "replicate:few output channels",
            "audio_proj_out": "replicate:few output channels",
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
