"""Multi-GPU inference for diffusion transformers: an extension of Hugging Face diffusers."""

__version__ = "0.1.0"

from ._requirements import check_requirements


check_requirements()

from .distributed import init  # noqa: E402
from .models._modeling_parallel import (  # noqa: E402
    CFGParallelConfig,
    ContextParallelConfig,
    DataParallelConfig,
    ParallelConfig,
    TensorParallelConfig,
)
from .models.plans.verify import verify_plan  # noqa: E402
from .pipelines import parallelize  # noqa: E402
from .pipelines.load import load_pipeline  # noqa: E402
from .registration import register, unregister  # noqa: E402


register()

__all__ = [
    "CFGParallelConfig",
    "ContextParallelConfig",
    "DataParallelConfig",
    "ParallelConfig",
    "TensorParallelConfig",
    "init",
    "load_pipeline",
    "parallelize",
    "register",
    "unregister",
    "verify_plan",
]
