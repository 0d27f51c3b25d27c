"""What the documents say is so: their commands and snippets are run in a folder like a fresh clone."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import cli, errors

ROOT = Path(cli.__file__).parent.parent
README = (ROOT / "README.md").read_text()
# The console script, whether or not one is installed, and the Python that runs the tests.
SHELL = """
meshscope() { "$PYTHON" -P -c 'from harness.cli import entry_point; entry_point()' "$@"; }
python() { "$PYTHON" "$@"; }
"""


@dataclass(frozen=True)
class Block:
    document: str
    language: str
    text: str


def blocks(document: str) -> list[Block]:
    found = re.findall(r"^( *)```(\w*)\n(.*?)^ *```$", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    return [
        Block(document, language, "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True)))
        for indent, language, text in found
    ]


BLOCKS = [*blocks("README.md"), *blocks("runs/README.md")]
LINES = [line for block in BLOCKS if block.language == "sh" for line in block.text.replace("\\\n", "").splitlines()]
RUNS = [line for line in LINES if line.startswith("meshscope run ")]
SERVING = "meshscope dashboard"  # tests/dashboard starts it
READING = [line for line in LINES if line.startswith("meshscope ") and line not in RUNS and SERVING not in line]
SNIPPETS = [block.text for block in BLOCKS if block.language == "python"]
SHOWN = [block.text for block in BLOCKS if block.language == ""]


def make_clone(folder: Path) -> None:
    """The documents, and the files that they tell the reader to write."""
    shutil.copy(ROOT / "README.md", folder)
    for snippet in SNIPPETS:
        if named := re.match(r"# (\S+\.py)\n", snippet):
            path = folder / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(snippet)


def execute(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"{SHELL}\n{line}"],
        cwd=folder,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def clone(tmp_path):
    make_clone(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", RUNS)
def test_run_that_is_shown_is_one_that_can_be(clone, line):
    done = execute(line if "--print-config" in line else f"{line} --print-config", clone)
    assert (done.returncode, done.stderr) == (0, "")


def test_text_that_is_trained_on_is_made(clone):
    (line,) = [line for line in LINES if line.startswith("python -c")]
    assert execute(line, clone).returncode == 0
    assert any("--data.path my.jsonl" in run for run in RUNS)
    assert (clone / "my.jsonl").stat().st_size > len(README)


def test_recorder_snippet_records_and_says_what_to_do_the_second_time(clone):
    (snippet,) = [snippet for snippet in SNIPPETS if "Recorder(" in snippet]
    (clone / "train.py").write_text(snippet)

    first = execute("python train.py", clone)
    assert first.returncode == 0, first.stderr
    report = execute("meshscope report out/my_run", clone)
    assert (report.returncode, report.stderr) == (0, "")
    second = execute("python train.py", clone)
    assert "out/my_run already holds a recording of rank 0" in second.stderr.splitlines()[-1]
    assert "give each run a new folder" in second.stderr.splitlines()[-1]


def test_refusal_that_is_shown_is_what_is_said(clone):
    (shown,) = [text for text in SHOWN if text.startswith("meshscope run: error: ")]
    done = execute("meshscope run --module debug --config tiny --nproc 3", clone)
    assert (done.returncode, done.stderr) == (2, shown)


def test_commands_and_exit_codes_are_those_there_are():
    assert re.findall(r"^\| `meshscope (\w+)", README, re.MULTILINE) == list(cli.COMMANDS)
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)} == codes


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CHANGELOG.md",
        "runs/README.md",
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
    ],
)
def test_links_lead_somewhere(document):
    path = ROOT / document
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """The README's first run, and a folder as it leaves it."""
    folder = tmp_path_factory.mktemp("clone")
    make_clone(folder)
    done = execute("meshscope run --module debug --config tiny --mode cpu", folder)
    assert done.returncode == 0, done.stderr
    for name in ("before", "after"):
        shutil.copytree(folder / "runs" / "out" / "latest", folder / "runs" / "out" / name)
    return done, folder


def without_figures(line: str) -> str:
    """Times and sizes differ from run to run, and why a mode is chosen from machine to machine."""
    line = re.sub(r"mode cpu \([^)]*\)", "mode cpu", line)
    return " ".join(re.sub(r"-?[\d,.]*\d", "#", line).replace("# to #", "#").split())


@pytest.mark.distributed
def test_first_run_prints_what_is_shown(first_run):
    done, _ = first_run
    (shown,) = [text for text in SHOWN if text.startswith("tiny: ")]
    printed = {without_figures(line) for line in (done.stderr + done.stdout).splitlines()}
    assert [line for line in shown.splitlines() if line != "…" and without_figures(line) not in printed] == []


@pytest.mark.distributed
@pytest.mark.parametrize("line", READING)
def test_reading_command_that_is_shown_reads_the_first_run(first_run, line):
    done = execute(line, first_run[1])
    assert done.returncode == 0, done.stderr
