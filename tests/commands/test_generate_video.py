"""`diffusers-rocm generate` with tiny video pipelines of random weights, and from a picture."""

import contextlib
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import imageio
import numpy as np
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline
from parameterized import parameterized
from PIL import Image
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from diffusers_rocm import commands
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL

from ..models.transformers.test_models_transformer_wan import WanTransformerTesterConfig
from ..testing_utils import in_process, slow


class WanWithImageTesterConfig(WanTransformerTesterConfig):
    """Wan 2.2 I2V: the picture comes with the latents, and no image encoder."""

    def get_init_dict(self) -> dict:
        return {**super().get_init_dict(), "in_channels": 12, "text_dim": 32}


class WanWithTextTesterConfig(WanTransformerTesterConfig):
    def get_init_dict(self) -> dict:
        return {**super().get_init_dict(), "text_dim": 32}


def save_wan(folder: Path, from_image: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL / "tokenizer_2")
    torch.manual_seed(0)
    text = UMT5EncoderModel(
        UMT5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    )
    vae = AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4,
                           latents_std=[1.0] * 4, temperal_downsample=[False, True, True])  # fmt: skip
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    config = WanWithImageTesterConfig() if from_image else WanWithTextTesterConfig()
    parts = (tokenizer, text.eval(), vae.eval(), scheduler)
    if from_image:
        pipe = WanImageToVideoPipeline(*parts, transformer=config.get_model())
    else:
        pipe = WanPipeline(*parts, transformer=config.get_model())
    pipe.save_pretrained(folder)


def generate(*arguments) -> None:
    result = in_process(lambda: commands.main(["generate", *map(str, arguments)]))
    assert result.returncode == 0, result.stderr


def frames(file: Path) -> np.ndarray:
    return np.stack([*imageio.get_reader(file).iter_data()])


class TestGenerateVideo(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_from_an_image(self):
        self.check_wan(True, {"ulysses": 2})

    @slow
    def test_from_an_image_on_four(self):
        self.check_wan(True, {"dp": 2, "ulysses": 2})

    @slow
    def test_from_text(self):
        self.check_wan(False, {"cfg": 2, "tp": 2})

    def check_wan(self, from_image, mesh):
        save_wan(self.folder / "model", from_image)
        common = ["--model", self.folder / "model", "--prompt", "a red circle", "--prompt", "a green star"]
        common += ["--seed", 1, "--height", 32, "--width", 48, "--num-frames", 5, "--fps", 8, "--steps", 2]
        common += ["--max-sequence-length", 16, "--guidance", 5, "--contact-sheet", self.folder / "sheet.png"]
        if from_image:
            Image.new("RGB", (48, 32), "red").save(self.folder / "first.png")
            common += ["--image", self.folder / "first.png"]
        generate(*common, "--out", self.folder / "one")
        options = [word for axis, size in mesh.items() for word in (f"--{axis}", size)]
        generate(*common, *options, "--out", self.folder / "ranks")
        made = {name: sorted((self.folder / name).glob("*.mp4")) for name in ("one", "ranks")}
        assert imageio.get_reader(made["ranks"][0]).get_meta_data()["fps"] == 8
        record = json.loads(made["ranks"][0].with_suffix(".json").read_text())
        assert record["config"]["num_frames"] == 5 and record["config"]["fps"] == 8
        assert (record["config"]["height"], record["config"]["width"]) == (32, 48)
        assert {axis: size for axis, size in record["mesh"].items() if size > 1} == mesh
        videos = {name: [frames(file) for file in files] for name, files in made.items()}
        assert [video.shape for video in videos["ranks"]] == [(5, 32, 48, 3)] * 2
        for video, want in zip(videos["ranks"], videos["one"], strict=True):
            assert np.abs(video.astype(int) - want).mean() < 0.5  # the codec spreads a changed bit
        assert np.abs(videos["one"][0].astype(int) - videos["one"][1]).mean() > 2

    def test_what_a_video_lacks_is_said_before_it_is_made(self):
        for from_image, missing, message in (
            (True, [], "WanImageToVideoPipeline begins with a picture: give --image FILE"),
            (False, ["imageio_ffmpeg"], "videos need imageio-ffmpeg"),
        ):
            folder, stderr = self.folder / str(from_image), io.StringIO()
            save_wan(folder, from_image)
            with mock.patch.dict(sys.modules, dict.fromkeys(missing)), contextlib.redirect_stderr(stderr):
                code = commands.main(["generate", "--model", str(folder), "--prompt", "x", "--device", "cpu"])
            assert code == 2 and message in stderr.getvalue(), stderr.getvalue()

    @slow
    def test_image_to_image(self):
        Image.new("RGB", (128, 128), "blue").save(self.folder / "blue.png")
        common = ["--prompt", "a red circle on a blue background", "--seed", 0, "--steps", 4]
        common += ["--image", self.folder / "blue.png"]
        generate(*common, "--out", self.folder / "1")
        generate(*common, "--tp", 2, "--out", self.folder / "2")
        (one,), (two,) = ((self.folder / name).glob("*.png") for name in "12")
        assert json.loads(one.with_suffix(".json").read_text())["config"]["pipeline"] == "FluxImg2ImgPipeline"
        one, two = (np.asarray(Image.open(file)).astype(int) for file in (one, two))
        assert np.abs(one - two).max() <= 1
        assert one[:4, :4, 2].mean() > 150 > one[:4, :4, 0].mean()

    @parameterized.expand([("text.png", "not a picture"), ("none.png", "No such file or directory")])
    def test_bad_picture(self, name, message):
        (self.folder / "text.png").write_text("no picture")
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            arguments = ["--prompt", "x", "--image", str(self.folder / name), "--out", str(self.folder / "out")]
            assert commands.main(["generate", *arguments]) == 2
        assert stderr.getvalue() == f"diffusers-rocm: --image {self.folder / name}: {message}\n"


if __name__ == "__main__":
    unittest.main()
