"""What the documentation says can be typed, followed and found: its commands, manifests, links and rooms."""

import ast
import os
import re
import shlex
import tempfile
import unittest
from pathlib import Path

import yaml
from parameterized import parameterized

from diffusers_rocm import commands
from diffusers_rocm.commands import make_parser
from diffusers_rocm.distributed.mesh import AXES

from .testing_utils import in_process, slow


ROOT = Path(__file__).parents[1]
PAGES = sorted(str(page.relative_to(ROOT)) for folder in (ROOT, ROOT / "docs") for page in folder.glob("*.md"))
OTHER_PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("upstream_pr/**/*.md", "docs/examples/*.md", "tests/**/*.md", ".github/**/*.md")
    for page in ROOT.glob(pattern)
)
CLOUD = "docs/multi_node.md"
PROGRAM = ("diffusers-rocm", "diffusers_rocm")


def blocks(name: str, language: str) -> list[str]:
    text = (ROOT / name).read_text()
    return [code for found, code in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if found == language]


def command_lines(name: str) -> list[list[str]]:
    """The words of every `diffusers-rocm ...`, or `... -m diffusers_rocm ...`."""
    lines = []
    for language in ("", "bash"):
        for block in blocks(name, language):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                starts = (i for i, word in enumerate(words) if word in PROGRAM and words[i - 1 : i] != ["cd"])
                lines += [words[i + 1 :] for i in starts]
    for block in blocks(name, "yaml"):
        for container in containers(yaml.safe_load(block)):
            words = container["command"] + container["args"]
            words = shlex.split(words[2]) if words[0] == "bash" else words
            start = next(i for i, word in enumerate(words) if word in PROGRAM)
            lines.append([word.replace("$NODE_RANK", "0") for word in words[start + 1 :]])
    return lines


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def imported(file: Path) -> set[str]:
    """What a file of the package imports: rooms of the package, `..hooks.caches` say, and packages, by their names."""
    names, room = set(), file.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = room[: len(room) - node.level + 1] if node.level else ()
            path = [*above, *(node.module or "").split(".")]
            path = [*path, *(alias.name for alias in node.names)] if path[-1] in ("", "diffusers_rocm") else path
            names |= set(path[1:] if path[0] == "diffusers_rocm" else path[:1])
    return names


def pods(manifest: dict) -> list[tuple[int, dict]]:
    """How many of each pod, and its spec."""
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        jobs = [each["template"]["spec"] for each in spec["replicatedJobs"]]
        return [(job["completions"], job["template"]["spec"]) for job in jobs]
    return [(each["replicas"], each["template"]["spec"]) for each in spec["pytorchReplicaSpecs"].values()]


def containers(manifest: dict) -> list[dict]:
    return [container for _, pod in pods(manifest) for container in pod["containers"]]


class TestPages(unittest.TestCase):
    """What pages refer to is there."""

    @parameterized.expand([*PAGES, *OTHER_PAGES])
    def test_links_lead_somewhere(self, page):
        for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
            if re.match(r"https?://", target):
                continue
            assert not target.startswith("../") or not page.startswith("docs/"), f"{target} is not on the site"
            path, _, anchor = target.partition("#")
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target

    @parameterized.expand([*PAGES, "upstream_pr/README.md"])
    def test_scripts_are_there(self, page):
        """With the options that they are given."""
        text = (ROOT / page).read_text()
        for script, given in re.findall(r"\b(utils/\w+\.py)\b([^`\n]*)", text):
            source = (ROOT / script).read_text()
            for option in re.findall(r"(?<!\S)--[\w-]+", given):
                assert f'"{option}"' in source, (script, option)

    @parameterized.expand(PAGES)
    def test_targets_of_make_are_there(self, page):
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
        quoted = [*blocks(page, ""), *re.findall(r"`([^`\n]+)`", (ROOT / page).read_text())]
        for target in re.findall(r"^(?:RUN_SLOW=1 )?make ([\w-]+)", "\n".join(quoted), re.M):
            assert target in targets, target

    @parameterized.expand(PAGES)
    def test_python_is_python(self, page):
        for code in blocks(page, "python"):
            ast.parse(code)

    @parameterized.expand(PAGES)
    def test_every_command_line_can_be_parsed(self, page):
        lines = command_lines(page)
        assert len(lines) >= 10 or page != "README.md", lines
        for line in lines:
            if not {"...", "KIND"} & set(line):
                make_parser().parse_args(line)  # exits where it does not know a word

    def test_the_rooms_import_what_they_may(self):
        page = (ROOT / "docs/architecture.md").read_text()
        rooms = re.findall(r"^\| `([\w/]+)/` \|.*\| ((?:`\w+`(?:, )?)+) \|$", page, re.M)
        assert len(rooms) == 9, rooms
        for room, named in rooms:
            forbidden = set(re.findall(r"\w+", named))
            files = sorted((ROOT / "diffusers_rocm" / room).rglob("*.py"))
            assert files, room
            for file in files:
                assert not (wrong := imported(file) & forbidden), (file, wrong)

    def test_the_files_to_read_first(self):
        for page in ("README.md", "docs/architecture.md"):
            section = (ROOT / page).read_text().partition("## Read these six files")[2]
            files = re.findall(r"^\d\. `([^`]+)`", section, re.M)
            assert len(files) == 6 and all((ROOT / file).is_file() for file in files), files


def for_a_cpu() -> list[tuple[str, list[str]]]:
    lines = [line for page in PAGES for line in command_lines(page) if "cpu" in line]
    return [(" ".join(line[:6]), line) for line in lines]


class TestDocs(unittest.TestCase):
    @parameterized.expand(for_a_cpu())
    @slow
    def test_command_line_runs(self, _, line):
        self.addCleanup(os.chdir, os.getcwd())
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            result = in_process(lambda: commands.main(line))
            assert result.returncode == 0, result.stderr
            assert list(Path(folder).rglob("*.png" if line[0] == "generate" else "*.json"))

    @parameterized.expand([("plan_flux_radeon",), ("plan_flux_4x7800xt",)])
    @slow
    def test_plan_answers_so(self, name):
        answers = (ROOT / f"docs/examples/{name}.txt").read_text().split("$ diffusers-rocm ")[1:]
        assert answers
        for answer in answers:
            line, _, text = answer.partition("\n")
            result = in_process(lambda line=line: commands.main(shlex.split(line)))
            assert (result.returncode, result.stdout.strip()) == (0, text.strip()), line

    @parameterized.expand(
        [
            ("docs/quickstart.md", 20, {"bench", "doctor", "generate", "plan", "validate"}),
            (CLOUD, 8, {"bench", "generate"}),
        ]
    )
    def test_every_command_line_is_understood(self, name, at_least, known):
        lines = command_lines(name)
        assert len(lines) >= at_least, lines
        for line in lines:
            args = make_parser().parse_args(line)  # exits where it does not know a word
            assert args.command in known

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
