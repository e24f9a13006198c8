"""What a pipeline's folder says of itself, read without loading any of it."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path

import diffusers
import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.pipelines.auto_pipeline import AUTO_IMAGE2IMAGE_PIPELINES_MAPPING, _get_task_class
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from ..models.plans import get_context_parallel_plan, get_tensor_parallel_plan
from .denoisers import DENOISERS
from .vae import check_tiles


EMBEDDED_MODEL = Path(__file__).parent.parent / "assets" / "tiny-flux-shapes"


class ModelFolder:
    """A diffusers pipeline, in a local folder or on the Hub.

    Raises:
        ValueError: there is no pipeline there.
    """

    def __init__(self, model: str):
        self.model = model
        index = self._json("model_index.json")
        found = {name: x for name, x in index.items() if isinstance(x, list) and len(x) == 2 and x[1]}
        self._components = tuple(found)
        self._text_encoders = {
            name: cls
            for name, (library, cls) in found.items()
            if name.startswith("text_encoder") and library == "transformers"
        }
        self.pipeline_class: str | None = index.get("_class_name")
        self.vae_class: str | None = found["vae"][1] if "vae" in found else None
        first = next((name for name in ("transformer", "unet") if name in found), None)
        if first is None:
            raise ValueError(f"{model}: its model_index.json names no transformer")
        self._denoisers = [first, *(name for name in DENOISERS if name in found and name != first)]
        self.denoiser_class: str = found[first][1]

    def _json(self, name: str) -> dict:
        here = Path(self.model).exists()
        if not here and "/" not in self.model:
            raise ValueError(f"{self.model}: there is no such folder, and ids on the Hub are OWNER/NAME")
        try:
            file = Path(self.model, name) if here else Path(hf_hub_download(self.model, name))
            found = json.loads(file.read_text())
        except (FileNotFoundError, NotADirectoryError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError):
            raise ValueError(
                f"{self.model}: no {name} there; give a local folder of a diffusers pipeline, or the id of one on the "
                "Hub that can be reached from here"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.model}: its {name} is not JSON ({error})") from None
        if not isinstance(found, dict):
            raise ValueError(f"{self.model}: its {name} holds no names and values")
        return found

    def check_files(self) -> None:
        """Raises ValueError where a file of a local folder is cut off, as by a download that did not end."""
        for file in (file for name in self._components for file in sorted(Path(self.model, name).glob("*"))):
            try:
                if file.suffix == ".json":
                    json.loads(file.read_bytes())
                elif file.suffix == ".safetensors":
                    with safe_open(file, "pt"):  # which compares the header with the file's length
                        pass
            except (ValueError, OSError, SafetensorError) as error:
                raise ValueError(f"{file} cannot be read ({error}): is it all there?") from None

    def config(self, component: str) -> dict:
        """Raises ValueError where the component has none."""
        return self._json(f"{component}/config.json")

    def denoiser_config(self) -> dict:
        """Of the first, where there are two."""
        return self.config(self._denoisers[0])

    def text_encoders(self) -> dict[str, tuple[str, dict]]:
        """Name -> class and config of each text encoder of transformers."""
        return {name: (cls, self.config(name)) for name, cls in self._text_encoders.items()}

    def pipeline(self, from_image: bool) -> type[DiffusionPipeline]:
        """The class of the pipeline, or of the one that begins with a picture and has the same models.

        Raises:
            ValueError: none that has its models begins with a picture.
        """
        cls = getattr(diffusers, str(self.pipeline_class), None)
        if cls is None or not from_image or "image" in inspect.signature(cls.__call__).parameters:
            return cls or DiffusionPipeline
        found = _get_task_class(AUTO_IMAGE2IMAGE_PIPELINES_MAPPING, self.pipeline_class, False)
        if found is None:
            raise ValueError(f"--image: {self.pipeline_class} takes no image, and no other pipeline has its models")
        return found

    def guides_by_negative_prompt(self, from_image: bool) -> bool:
        """Is the model itself guided by a number, and classifier-free guidance there for negative prompts alone?"""
        return "true_cfg_scale" in inspect.signature(self.pipeline(from_image).__call__).parameters

    def check_vae(self, mode: str) -> None:
        """Raises ValueError where `--vae tile` is asked of a VAE whose tiles cannot be shared, or of none."""
        if mode == "tile" and self.vae_class is None:
            raise ValueError(f"--vae tile: {self.model} has no VAE")
        if mode == "tile":
            check_tiles(self.vae_class)

    def denoiser(self) -> type[ModelMixin]:
        """Its class. Raises ValueError where diffusers has none of this name."""
        cls = getattr(diffusers, self.denoiser_class, None)
        if cls is None:
            raise ValueError(
                f"{self.model}: its {self.denoiser_class} is not known to diffusers {diffusers.__version__}"
            )
        return cls

    def denoiser_parameters(self) -> int:
        """How many all denoisers have: Wan 2.2 and Ideogram 4 have two.

        Raises:
            ValueError: diffusers does not know the class, or does not take the config.
        """
        count = 0
        for name in self._denoisers:
            try:
                with torch.device("meta"):
                    model = self.denoiser().from_config(self.config(name))
            except Exception as error:  # classes check little of their configs
                raise ValueError(
                    f"{self.model}: {self.denoiser_class} cannot be had by its config ({error})"
                ) from None
            count += sum(parameter.numel() for parameter in model.parameters())
        return count

    def head_counts(self) -> dict[str, int]:
        """Kinds of heads -> how many the denoiser has; nothing where its class has no tensor-parallel plan.

        Raises:
            ValueError: diffusers does not know the class, or the config does not say it.
        """
        cls = self.denoiser()
        config = {key: each.default for key, each in inspect.signature(cls.__init__).parameters.items()}
        config |= self.denoiser_config()
        try:
            plan = get_tensor_parallel_plan(cls)
        except ValueError:
            return {}
        try:
            counts = plan.head_counts(config)
        except (TypeError, ZeroDivisionError) as error:
            raise ValueError(
                f"{self.model}: the config of its {cls.__name__} says no number of heads ({error})"
            ) from None
        for heads, count in counts.items():
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{self.model}: by its config the {cls.__name__} has {count!r} attention {heads}")
        return counts

    def check_degrees(self, degrees: Mapping[str, int]) -> None:
        """Raises ValueError where the denoiser has no plan for what is asked, or too few heads."""
        tp, ulysses, cls = degrees["tp"], degrees["ulysses"], self.denoiser()
        if degrees["ring"] * ulysses > 1:
            get_context_parallel_plan(cls)
        if tp > 1:
            get_tensor_parallel_plan(cls)
        for heads, count in self.head_counts().items():
            if tp * ulysses > count:
                asked = [f"--{name} {degree}" for name, degree in (("tp", tp), ("ulysses", ulysses)) if degree > 1]
                way_out = f"--tp <= {count // ulysses}" if 1 < tp and ulysses <= count else f"--ulysses <= {count}"
                way_out += ", and --ring for the rest" if tp == 1 else ""
                raise ValueError(
                    f"{' with '.join(asked)} exceeds the {count} attention {heads} of {self.model}; use {way_out}"
                )
