"""What a pipeline's folder says of itself, read without loading any of it."""

import inspect
import json
from pathlib import Path

import diffusers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from ..models.plans import TENSOR_PARALLEL_PLANS


EMBEDDED_MODEL = Path(__file__).parent.parent / "assets" / "tiny-flux-shapes"


class ModelFolder:
    """A diffusers pipeline, in a local folder or on the Hub.

    Raises:
        ValueError: there is no pipeline there, or its denoiser has no plan.
    """

    def __init__(self, model: str):
        self.model = model
        index = self._json("model_index.json")
        if not isinstance(index, dict):
            raise ValueError(f"{model}: its model_index.json is not that of a pipeline")
        entries = {name: index.get(name) for name in ("transformer", "unet")}
        named = (name for name, entry in entries.items() if isinstance(entry, list) and len(entry) == 2 and entry[1])
        name = next(named, None)
        if name is None:
            raise ValueError(f"{model}: its model_index.json names no transformer")
        self.denoiser_class: str = index[name][1]
        self._denoiser = name
        if self.denoiser_class not in TENSOR_PARALLEL_PLANS:
            planned = ", ".join(TENSOR_PARALLEL_PLANS)
            raise ValueError(f"{model}: its {self.denoiser_class} has no tensor-parallel plan; planned: {planned}")

    def _json(self, name: str) -> dict:
        try:
            file = Path(self.model, name) if Path(self.model).exists() else Path(hf_hub_download(self.model, name))
            return json.loads(file.read_text())
        except (FileNotFoundError, NotADirectoryError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError):
            raise ValueError(
                f"{self.model}: no {name} there; give a local folder of a diffusers pipeline, or the id of one on the "
                "Hub that can be reached from here"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.model}: its {name} is not JSON ({error})") from None

    def denoiser_config(self) -> dict:
        return self._json(f"{self._denoiser}/config.json")

    def check_degree(self, tp: int) -> None:
        """Raises ValueError where the denoiser has fewer heads than ranks."""
        defaults = inspect.signature(getattr(diffusers, self.denoiser_class).__init__).parameters
        config = {name: each.default for name, each in defaults.items()} | self.denoiser_config()
        for name, count in TENSOR_PARALLEL_PLANS[self.denoiser_class].head_counts(config).items():
            if tp > count:
                raise ValueError(
                    f"--tp {tp} exceeds the {count} attention {name} of {self.model}; use --tp <= {count}"
                )
