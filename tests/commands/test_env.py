"""`diffusers-rocm env`: what it prints is fit to be pasted, and names nobody."""

import contextlib
import io
import json
import os
import stat
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import diffusers
import torch

from diffusers_rocm import commands
from diffusers_rocm.doctor import privacy


def printed(*options: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert commands.main(["env", *options]) == 0
    return output.getvalue()


SETTINGS = {
    "NCCL_P2P_DISABLE": "1",
    "HSA_OVERRIDE_GFX_VERSION": "11.0.0",
    "TORCH_HOME": "/home/somebody/models on thatbox",
    "DIFFUSERS_ATTN_BACKEND": "aiter",
    "HF_HUB_OFFLINE": "1",
    "LD_LIBRARY_PATH": "/home/somebody/lib:/opt/rocm/lib",
    "NCCL_API_KEY": "hf_secret",
    "HF_TOKEN": "hf_secret",
    "USER_NOTES": "private",
}


@mock.patch.object(privacy.getpass, "getuser", lambda: "somebody")
@mock.patch.object(privacy.socket, "gethostname", lambda: "thatbox")
@mock.patch.object(privacy.Path, "home", lambda: Path("/home/somebody"))
class TestEnv(unittest.TestCase):
    def test_text(self):
        with mock.patch.dict(os.environ, SETTINGS):
            text = printed()
        for line in (
            f"  torch: {torch.__version__}",
            f"  diffusers: {diffusers.__version__}",
            "  NCCL_P2P_DISABLE: 1",
        ):
            assert line in text.splitlines(), text
        assert "  HSA_OVERRIDE_GFX_VERSION: 11.0.0" in text and "  TORCH_HOME: ~/models on HOST" in text, text
        for line in ("DIFFUSERS_ATTN_BACKEND: aiter", "HF_HUB_OFFLINE: 1", "LD_LIBRARY_PATH: ~/lib:/opt/rocm/lib"):
            assert f"  {line}" in text.splitlines(), text
        for private in ("hf_secret", "private", "somebody", "thatbox"):
            assert private not in text, text
        assert "collectives: Gloo" in text and "None" not in text, text

    def test_json(self):
        found = json.loads(printed("--json"))
        assert found["packages"]["torch"] == torch.__version__ and len(found["gpus"]) == torch.cuda.device_count()
        assert found["memory GiB"] > 0 and "lo" in found["network"]

    def test_tools_that_show_links(self):
        """What a tool prints is there without colours and names; one that fails is no error."""
        with tempfile.TemporaryDirectory() as folder:
            tool = Path(folder, "rocm-smi")
            tool.write_text("#!/bin/sh\nprintf '\\033[1mGPU0\\033[0m XGMI thatbox\\n'\n")
            tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
            with mock.patch.dict(os.environ, {"PATH": f"{folder}:/bin"}):
                assert "  $ rocm-smi --showtopo\n  GPU0 XGMI HOST" in printed()
                tool.write_text("#!/no/such/interpreter\n")
                assert "topology: rocm-smi --showtopo: FileNotFoundError" in printed()

    def test_gpus(self):
        gpu = mock.Mock(gcnArchName="gfx1101", total_memory=16 * 2**30, major=11, minor=0)
        gpu.name = "AMD Radeon RX 7800 XT"
        with (
            mock.patch.object(torch.cuda, "device_count", lambda: 2),
            mock.patch.object(torch.cuda, "get_device_properties", lambda index: gpu),
            mock.patch.object(torch.cuda, "can_device_access_peer", lambda index, other: index == 0),
            mock.patch.object(torch.version, "hip", "6.4.1"),
        ):
            text = printed()
        assert "torch build: ROCm 6.4.1" in text
        assert "  0: name AMD Radeon RX 7800 XT, architecture gfx1101, memory GiB 16.0, peer access [1]" in text
        assert "  1: name AMD Radeon RX 7800 XT, architecture gfx1101, memory GiB 16.0, peer access []" in text


if __name__ == "__main__":
    unittest.main()
