"""Try the patches of upstream_pr on diffusers' own source distribution, with this package out of reach.

Each applies alone (to a tree that has what it depends on and nothing else), diffusers' own ruff settings find nothing
in it, and its tests fail without the rest of it. All apply in their order, and on that tree all tests pass. This
package is tried there too: where diffusers does what we do, neither may be in the other's way.

Of patches that are named, the tests are run on the tree that has each alone; PR.md has to say how many pass. Without
names, the table of the README is compared with what each meta.json says. With `--in-order` none is tried alone.

python utils/check_upstream_patches.py [--in-order] [FOLDER ...]    needs the network, and minutes
"""

import argparse
import atexit
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


ROOT = Path(__file__).parent.parent
PATCHES = ROOT / "upstream_pr"
TIMEOUT = 900
# Of this package, those that meet what the patches change; and those of each model that they change.
OWN_TESTS = (
    "tests/test_registration.py",
    "tests/hooks/test_first_block_cache.py",
    "tests/models/test_attention_lse.py",
    "tests/models/test_modeling_parallel.py",
    "tests/models/test_context_parallel.py",
)


@dataclass(frozen=True)
class Patch:
    """A folder of upstream_pr.

    Attributes:
        depends_on: names of folders whose patches come first.
        base: the version of diffusers that it applies to.
    """

    name: str
    order: int
    base: str
    depends_on: tuple[str, ...]

    @property
    def file(self) -> Path:
        return PATCHES / self.name / "patch.diff"

    @property
    def paths(self) -> list[str]:
        lines = self.file.read_text().splitlines()
        return [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")]

    @property
    def tests(self) -> list[str]:
        return [path for path in self.paths if Path(path).name.startswith("test_")]


class Failed(Exception):
    """What is wrong with a patch."""


def read_patches() -> dict[str, Patch]:
    found = []
    for file in PATCHES.glob("*/meta.json"):
        meta = json.loads(file.read_text())
        found.append(Patch(file.parent.name, meta["order"], meta["diffusers"], tuple(meta["depends_on"])))
    return {patch.name: patch for patch in sorted(found, key=lambda patch: patch.order)}


def download(version: str, folder: Path) -> Path:
    """The sdist of diffusers."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "diffusers"]
    subprocess.run([*command, "--dest", str(folder), f"diffusers=={version}"], check=True)
    return next(folder.glob(f"diffusers-{version}.tar.gz"))


def unpack(sdist: Path, folder: Path) -> Path:
    """A tree in a repository of its own, so that `git apply` sees no other."""
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(folder)], check=True)  # which leaves no path out of it
    (tree,) = folder.iterdir()
    subprocess.run(["git", "init", "--quiet", str(tree)], check=True)
    return tree


def apply(tree: Path, patch: Patch, *options: str) -> None:
    result = subprocess.run(["git", "apply", *options, str(patch.file)], cwd=tree, capture_output=True, text=True)
    if result.returncode:
        raise Failed(f"does not apply: {result.stderr.strip()}")
    for path in patch.paths:  # packages in diffusers' repository, of which the sdist has no tests
        for parent in Path(path).parents:
            if parent.parts[:1] == ("tests",) and (tree / parent).is_dir():
                (tree / parent / "__init__.py").touch()


def test(tree: Path, tests: list[str], *options: str) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "diffusers_rocm.py").write_text("raise ImportError('diffusers is tried without it')\n")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(tree / "src")])}
        run = functools.partial(subprocess.run, cwd=tree, env=environment, capture_output=True, text=True)
        found = run([sys.executable, "-c", "import diffusers; print(diffusers.__file__)"])
        if found.stdout.strip() != str(tree / "src" / "diffusers" / "__init__.py"):
            raise Failed(f"another diffusers is imported: {found.stdout}{found.stderr}")
        return run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests], timeout=TIMEOUT)


def check_tests(tree: Path, tests: list[str]) -> str:
    result = test(tree, tests)
    if result.returncode:
        raise Failed(f"tests fail:\n{result.stdout[-3000:]}")
    return summary(result)


def summary(result: subprocess.CompletedProcess) -> str:
    """The line in which pytest sums up."""
    return result.stdout.strip().splitlines()[-1]


@functools.cache
def ruff_of(release: str) -> Path:
    """The release of ruff that diffusers pins: another one would format some of its files otherwise."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, f"ruff=={release}"]
    subprocess.run(command, check=True)
    return Path(folder, "bin", "ruff")


def check_alone(sdist: Path, patch: Patch, every: dict[str, Patch], passes: bool) -> str:
    """Its tests, which fail without the rest of it, are run with it too where they must be seen to pass."""
    with tempfile.TemporaryDirectory() as folder:
        tree = unpack(sdist, Path(folder))
        for name in patch.depends_on:
            apply(tree, every[name])
        apply(tree, patch, "--include=tests/*")
        without = test(tree, patch.tests)
        if without.returncode != 1:
            raise Failed(f"without the rest of it, its tests end with exit code {without.returncode}, and not with 1")
        apply(tree, patch, "--exclude=tests/*")
        python = [path for path in patch.paths if path.endswith(".py")]
        release = re.search(r'"ruff==([\d.]+)"', (tree / "setup.py").read_text())[1]
        for options in (["check"], ["format", "--check"]):
            ruff = [ruff_of(release), *options, "--no-cache", *python]
            result = subprocess.run(ruff, cwd=tree, capture_output=True, text=True)
            if result.returncode:
                raise Failed(f"ruff {' '.join(options)}: {result.stdout}{result.stderr}")
        alone = "applies alone"
        if passes:
            alone = f"alone: {check_tests(tree, patch.tests)}"
            passed = re.search(r"\d+ passed", alone)[0]
            if not re.search(rf"\b{passed}", " ".join(patch.file.with_name("PR.md").read_text().split())):
                raise Failed(f"{passed}, and PR.md does not say so")
        return f"{alone}; without the rest of it: {summary(without)}"


def check_readme(every: dict[str, Patch]) -> str:
    """Its table has each patch at its place, with the places of those that it builds on."""
    rows = re.findall(r"^\| (\d+) \| \[`(\w+)`\].* \| ([^|]*)\|$", (PATCHES / "README.md").read_text(), re.M)
    found = {}
    for place, name, builds_on in rows:
        ranges = re.findall(r"(\d+)(?: to (\d+))?", builds_on)
        found[name] = int(place), {i for a, b in ranges for i in range(int(a), int(b or a) + 1)}
    newest = max(every.values(), key=lambda patch: patch.order).base
    said = {
        name: (patch.order, {every[other].order for other in patch.depends_on})
        for name, patch in every.items()
        if patch.base == newest
    }
    if wrong := [name for name in {**said, **found} if said.get(name) != found.get(name)]:
        raise Failed(f"the table and meta.json differ on {', '.join(wrong)}")
    return f"{len(found)} rows as each meta.json says"


def check_in_order(sdist: Path, patches: list[Patch]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tree = unpack(sdist, Path(folder))
        for patch in patches:
            try:
                apply(tree, patch)
            except Failed as error:
                raise Failed(f"{patch.name}, after those before it: {error}") from None
        # A test that a later patch changes counts once.
        found = check_tests(tree, list(dict.fromkeys(path for patch in patches for path in patch.tests)))
        if patches[0].base == metadata.version("diffusers"):  # what an older one imports may not be here
            models = {Path(path).stem for patch in patches for path in patch.paths if "/transformer_" in path}
            found += f"; ours: {check_own_tests(tree, sorted(models))}"
        return found


def check_own_tests(tree: Path, models: list[str]) -> str:
    """This package's tests on a patched diffusers."""
    tests = [f"tests/models/transformers/test_models_{model}.py" for model in models]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(ROOT)])}
    spread = ("-n", "2", "--dist", "loadfile")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *spread, *OWN_TESTS, *tests]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    if result.returncode:
        raise Failed(f"tests of this package fail on it:\n{result.stdout[-3000:]}")
    return summary(result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="default: all")
    parser.add_argument("--in-order", action="store_true", help="all of them, one after the other, and none alone")
    args = parser.parse_args()
    if args.folders and args.in_order:
        parser.error("--in-order is for all of them; leave out either it or the folders")
    every = read_patches()
    if unknown := set(args.folders) - set(every):
        parser.error(f"no such folder with a meta.json: {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    chosen, wrong = [every[name] for name in every if name in args.folders or not args.folders], 0
    with tempfile.TemporaryDirectory() as folder:
        sdists = {base: download(base, Path(folder)) for base in {patch.base for patch in chosen}}
        named = bool(args.folders)
        checks = [] if named else [("README", functools.partial(check_readme, every))]
        for base in [] if named else sorted(sdists):
            those = [patch for patch in chosen if patch.base == base]
            checks.append((f"all for {base}", functools.partial(check_in_order, sdists[base], those)))
        for patch in [] if args.in_order else chosen:
            checks.append((patch.name, functools.partial(check_alone, sdists[patch.base], patch, every, named)))
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # most of it is one process that imports
            found = [(name, pool.submit(check)) for name, check in checks]
            for name, check in found:
                try:
                    print(f"{name}: {check.result()}", flush=True)
                except (Failed, subprocess.TimeoutExpired) as error:
                    print(f"{name}: {error}", flush=True)
                    wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
