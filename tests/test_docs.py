"""Command lines and manifests in the documentation are such that the commands, and Kubernetes, know their words."""

import re
import shlex
import unittest
from pathlib import Path

import yaml
from parameterized import parameterized

from diffusers_rocm.commands import make_parser
from diffusers_rocm.distributed.mesh import AXES


DOCS = Path(__file__).parents[1] / "docs"
CLOUD = "multi_node.md"
PROGRAM = ("diffusers-rocm", "diffusers_rocm")


def blocks(name: str, language: str) -> list[str]:
    text = (DOCS / name).read_text()
    return [code for found, code in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if found == language]


def command_lines(name: str) -> list[list[str]]:
    """The words of every `diffusers-rocm ...`, or `... -m diffusers_rocm ...`."""
    lines = []
    for language in ("", "bash"):
        for block in blocks(name, language):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                lines += [
                    words[i + 1 :] for i, word in enumerate(words) if word in ("diffusers-rocm", "diffusers_rocm")
                ]
    for block in blocks(name, "yaml"):
        for container in containers(yaml.safe_load(block)):
            words = container["command"] + container["args"]
            words = shlex.split(words[2]) if words[0] == "bash" else words
            start = next(i for i, word in enumerate(words) if word in PROGRAM)
            lines.append([word.replace("$NODE_RANK", "0") for word in words[start + 1 :]])
    return lines


def pods(manifest: dict) -> list[tuple[int, dict]]:
    """How many of each pod, and its spec."""
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        jobs = [each["template"]["spec"] for each in spec["replicatedJobs"]]
        return [(job["completions"], job["template"]["spec"]) for job in jobs]
    return [(each["replicas"], each["template"]["spec"]) for each in spec["pytorchReplicaSpecs"].values()]


def containers(manifest: dict) -> list[dict]:
    return [container for _, pod in pods(manifest) for container in pod["containers"]]


class TestDocs(unittest.TestCase):
    @parameterized.expand([("quickstart.md", 20), (CLOUD, 8)])
    def test_every_command_line_is_understood(self, name, at_least):
        lines = command_lines(name)
        assert len(lines) >= at_least, lines
        for line in lines:
            args = make_parser().parse_args(line)  # exits where it does not know a word
            assert args.command in ("generate", "bench")

    def test_the_manifests_are_of_their_kinds(self):
        jobset, pytorchjob = (yaml.safe_load(block) for block in blocks(CLOUD, "yaml"))
        assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        assert (pytorchjob["apiVersion"], pytorchjob["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
        (job,) = jobset["spec"]["replicatedJobs"]
        spec = job["template"]["spec"]
        assert spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"
        # <jobset>-<job>-<its index>-<pod's index>.<subdomain>
        first = f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
        assert f"--master-addr {first} " in containers(jobset)[0]["args"][0]
        # The operator looks for a container of this name, and its variables are read by torchrun.
        assert {container["name"] for container in containers(pytorchjob)} == {"pytorch"}
        assert {container["command"][0] for container in containers(pytorchjob)} == {"torchrun"}

    def test_the_manifests_ask_for_as_many_gpus_as_ranks(self):
        for block, words in zip(blocks(CLOUD, "yaml"), command_lines(CLOUD)[-3::2], strict=True):
            manifest, args = yaml.safe_load(block), make_parser().parse_args(words)
            ranks = 1
            for axis in AXES:
                ranks *= getattr(args, axis)
            gpus = sum(
                count * container["resources"]["limits"]["amd.com/gpu"]
                for count, pod in pods(manifest)
                for container in pod["containers"]
            )
            assert gpus == ranks == 24
            for _, pod in pods(manifest):
                volumes = {volume["name"] for volume in pod["volumes"]}
                assert all({mount["name"] for mount in each["volumeMounts"]} == volumes for each in pod["containers"])


if __name__ == "__main__":
    unittest.main()
