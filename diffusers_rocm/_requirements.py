"""What must be installed, said in one sentence when it is not."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version


DIFFUSERS_WINDOW = ("0.37.1", "0.43")
TORCH_MINIMUM = "2.9"


def check_requirements() -> None:
    """Raises ImportError, with what to install, where torch or diffusers is missing, unsupported or cannot do it."""
    try:
        import torch
    except ImportError:
        raise ImportError(
            f"diffusers_rocm needs torch >= {TORCH_MINIMUM}; install the build for your device: https://pytorch.org"
        ) from None
    if Version(torch.__version__).release < Version(TORCH_MINIMUM).release:
        raise ImportError(f"diffusers_rocm needs torch >= {TORCH_MINIMUM}; this is {torch.__version__}")
    if not torch.distributed.is_available():
        raise ImportError(
            f"this build of torch ({torch.__version__}) has no torch.distributed; install one that has, such as the "
            "ROCm, CUDA or CPU wheels for Linux from https://pytorch.org"
        )
    low, high = DIFFUSERS_WINDOW
    try:
        found = version("diffusers")
    except PackageNotFoundError:
        found = None
    if found is None or not Version(low) <= Version(found) < Version(high):
        raise ImportError(
            f"diffusers_rocm needs diffusers >= {low}, < {high}; {found or 'none'} is installed: "
            f"pip install 'diffusers>={low},<{high}'"
        )
