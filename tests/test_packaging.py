"""What is installed: the wheel holds the three packages whole, and every module imports."""

import ast
import importlib
import pkgutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import harness

ROOT = Path(__file__).parent.parent
PROBE_COMMAND = ROOT / "harness" / "commands" / "probe.py"  # the door to probes, and the only one
PACKAGES = ("harness", "probes", "dashboard")
# Readable without torch; these are the rooms that run inside a training process.
NEED_TORCH = ("harness.trainer", "harness.record", "harness.workloads")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("meshscope-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def modules_of(package: str) -> list[str]:
    folder = str(ROOT / package)
    return sorted([package, *(module.name for module in pkgutil.walk_packages([folder], f"{package}."))])


def test_top_level_of_the_wheel(wheel_names):
    information = f"meshscope-{harness.__version__}.dist-info"

    assert {name.split("/")[0] for name in wheel_names} == {*PACKAGES, information}
    assert {f"{package}/py.typed" for package in PACKAGES} <= wheel_names


def test_every_file_of_the_packages_is_in_the_wheel(wheel_names):
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True)

    assert set(tracked.stdout.split("\n")) - {""} <= wheel_names


@pytest.mark.parametrize("module", [name for package in PACKAGES for name in modules_of(package)])
def test_module_imports(module):
    importlib.import_module(module)


def test_only_the_training_side_imports_torch():
    """In one process without torch: every module outside the rooms that run inside a training process."""
    readable = [name for name in modules_of("harness") if not name.startswith(NEED_TORCH)]
    program = f"import sys, importlib; sys.modules['torch'] = None; [importlib.import_module(n) for n in {readable}]"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr


def imported_by(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("harness", ("probes", "dashboard")),
        ("probes", ("dashboard",)),
        ("harness/trainer", ("harness.trace", "harness.memory", "harness.ledger", "harness.compare", "harness.report")),
        ("harness/ledger", ("harness.trace", "harness.memory", "harness.record", "harness.recording")),
        ("harness/trace", ("harness.ledger", "harness.compare", "harness.trainer", "harness.record")),
        (
            "harness/memory",
            ("harness.ledger", "harness.compare", "harness.trainer", "harness.record", "harness.whatif"),
        ),
        ("harness/allocator", ("torch", "harness.ledger", "harness.memory", "harness.whatif", "harness.trace")),
        ("harness/whatif", ("torch", "harness.ledger", "harness.compare", "harness.trainer", "harness.record")),
    ],
)
def test_imports_go_one_way(folder, forbidden):
    wrong = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / folder).rglob("*.py")
        if path != PROBE_COMMAND
        for name in imported_by(path)
        if any(name == other or name.startswith(f"{other}.") for other in forbidden)
    }

    assert not wrong


def test_continuous_integration_does_what_the_readme_says():
    readme = (ROOT / "README.md").read_text()
    block = readme.split("```sh\n", 1)[1].split("```", 1)[0]
    script = (ROOT / ".ci" / "run").read_text()

    commands = [command for line in block.splitlines() for command in line.split(" && ") if command]
    assert len(commands) == 5
    for command in commands:
        assert command in script, f".ci/run does not run {command!r}"
