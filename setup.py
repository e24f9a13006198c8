import re
from pathlib import Path

from setuptools import find_packages, setup


here = Path(__file__).parent
version = re.search(r'__version__ = "([^"]+)"', (here / "diffusers_rocm" / "__init__.py").read_text()).group(1)

video = ["imageio", "imageio-ffmpeg", "ftfy"]
quantization = ["torchao>=0.16", "peft"]
bench = ["matplotlib"]
tests = ["pytest", "pytest-timeout", "pytest-xdist", "parameterized", "hypothesis"]

extras = {
    "test": [*tests, "gguf", *quantization, *video, *bench],
    "video": video,
    "quality": ["ruff"],
    "bench": bench,
    "quantization": quantization,
}

setup(
    name="diffusers_rocm",
    version=version,
    description="Multi-GPU inference for diffusion transformers: an extension of Hugging Face diffusers",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["diffusers_rocm", "diffusers_rocm.*"]),
    package_data={"diffusers_rocm": ["assets/**/*"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.9",
        "diffusers>=0.37.1,<0.43",
        "transformers",
        "accelerate",
        "safetensors",
        "huggingface_hub",
        "numpy",
        "psutil",
        "sentencepiece",
        "protobuf",
        "packaging",
        "pillow",
    ],
    extras_require=extras,
    entry_points={"console_scripts": ["diffusers-rocm=diffusers_rocm.commands:main"]},
)
