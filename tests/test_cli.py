"""The command line as a person meets it: a process, its exit code, its two streams."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from written import write_kernels, write_recording, write_snapshot

from harness import cli, recording
from harness.errors import UsageError

ROOT = Path(cli.__file__).parent.parent

# Runs the command line with torch made unimportable: what passes needs none.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from harness.cli import entry_point
entry_point()
"""


@pytest.fixture
def meshscope(tmp_path):
    """Runs `meshscope ARGUMENTS` in an empty folder; without torch unless told otherwise."""

    def run(*arguments: str, torch: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
        program = ["-m", "harness.cli"] if torch else ["-c", WITHOUT_TORCH]
        return subprocess.run(
            [sys.executable, *program, *arguments],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def assert_refused(done: subprocess.CompletedProcess[str], exit_code: int, *parts: str) -> None:
    assert done.returncode == exit_code, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr


TINY = ("run", "--module", "debug", "--config", "tiny")


def test_print_config_is_the_resolved_tree(meshscope, tmp_path):
    done = meshscope(*TINY, "--nproc", "8", "--training.steps=3", "--parallelism.dp_shard", "-1", "--print-config")

    assert (done.returncode, done.stderr) == (0, "")
    tree = json.loads(done.stdout)
    assert (tree["world_size"], tree["training"]["steps"], tree["parallelism"]["dp_shard"]) == (8, 3, -1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--nproc", "3"), ["needs 4 processes, world_size=3: set world_size (--nproc) to 4"]),
        (("--parallelism.tp", "3", "--nproc", "6"), ["model.n_heads=8 is not divisible by parallelism.tp=3"]),
        (("--training.seq_len", "127"), ["training.seq_len=127 is not divisible by parallelism.tp=2", "multiple of 2"]),
        (("--model.dim", "100"), ["model.dim=100 is not divisible by model.n_heads=8"]),
        (("--parallelism.cp_attention", "ring"), ["cp_attention=ring has no effect with parallelism.cp=1"]),
        (("--pipeline.schedule", "GPipe"), ["pipeline.schedule=GPipe has no effect with parallelism.pp=1"]),
        (("--model.dimm", "1"), ["did you mean --model.dim"]),
        (("--training.steps", "some"), ["training.steps"]),
        (("--training.steps",), ["--training.steps needs a value"]),
        (("--timeout", "0"), ["--timeout 0 must be above 0"]),
        (("--timeout", "nan"), ["--timeout nan must be above 0"]),
        (("--optimizer.lr=inf",), ["optimizer.lr=inf must be a finite number"]),
        (("--model.norm_eps=nan",), ["model.norm_eps=nan must be a finite number"]),
        (("--optimizer.beta1=1",), ["optimizer.beta1=1.0 must be in [0, 1)"]),
        (("--model.rope_theta=0",), ["model.rope_theta=0.0 must be above 0"]),
        (("--optimizer.weight_decay=-1",), ["optimizer.weight_decay=-1.0 must be 0 or above"]),
        ((f"--model.dim={10**30}",), ["at most 1,000,000,000,000"]),
        ((f"--training.seed={2**64}",), ["a 64-bit number"]),
        (("--nproc", "200000", "--parallelism.dp_shard=-1"), ["world_size=200000 must be at most 131,072"]),
        (("--model.dim=",), ["model.dim: Expected `int`"]),
        (("--\x1b[31m\n",), ["unrecognized arguments: --?[31m"]),
        (("--module=",), ["no module ''"]),
        (("--out", ""), ["an argument is empty"]),
        (("--module", ".."), ["no module '..'"]),
        (("--module", "a" * 300), ["no module"]),
        (("--module", "b" * 300 + ".py"), ["there is no such file"]),
        (("--module", "a\nb"), ["no module"]),
        (("--nproc", "two"), ["--nproc"]),
        (("--frobnicate",), ["--frobnicate"]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(meshscope, tmp_path, arguments, parts):
    assert_refused(meshscope(*TINY, *arguments), 2, *parts)
    assert list(tmp_path.iterdir()) == [], "something was started"


def test_unknown_names_list_the_candidates(meshscope):
    assert_refused(meshscope("run", "--module", "debug", "--config", "huge"), 2, "tiny, tiny_fsdp4, single")
    assert_refused(meshscope("run", "--module", "nothing", "--config", "tiny"), 2, "debug, llama3", "nothing.py")
    assert_refused(meshscope("run", "--module", "runs.none", "--config", "tiny"), 2, "runs/none.py")
    assert_refused(meshscope("run", "--module", "./none.py", "--config", "tiny"), 2, "there is no such file")
    assert_refused(meshscope("frobnicate"), 2, "run", "doctor")


USERS_FILE = """
from harness.config import Trainer
from sizes import LAYERS

def mine() -> Trainer.Config:
    config = Trainer.Config(name="mine")
    config.model.n_layers = LAYERS
    return config

def raises() -> Trainer.Config:
    return Trainer.Config(model={}["missing"])

def returns_a_number() -> Trainer.Config:
    return 3

def helper(size):
    return size
"""


@pytest.fixture
def users_file(tmp_path) -> Path:
    """runs/mine/small.py, which imports a module that lies beside it."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "sizes.py").write_text("LAYERS = 9\n")
    path = folder / "small.py"
    path.write_text(USERS_FILE)
    return path


@pytest.mark.parametrize("module", ["runs.mine.small", "runs/mine/small.py", "./runs/mine/small.py"])
def test_users_file_is_found_from_the_working_directory(meshscope, users_file, module):
    done = meshscope("run", "--module", module, "--config", "mine", "--print-config")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["n_layers"] == 9


RUN_OF_4_LAYERS = """
from harness.config import Trainer
{}

def mine() -> Trainer.Config:
    config = Trainer.Config(name="mine")
    config.model.n_layers = LAYERS
    return config
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("folder", ["runs", "experiments"])
def test_dotted_name_is_never_that_of_another_checkout(meshscope, tmp_path, folder):
    """An editable install puts its checkout on the path, and with it every folder in it."""
    checkout = tmp_path / "checkout"
    write(checkout / folder / "mine.py", RUN_OF_4_LAYERS.format("LAYERS = 4"))
    dotted = ("run", "--module", f"{folder}.mine", "--config", "mine", "--print-config")

    refused = meshscope(*dotted, PYTHONPATH=f"{ROOT}{os.pathsep}{checkout}")
    assert_refused(refused, 2, f"here: {folder}/mine.py", "another folder" if folder == "runs" else str(checkout))

    write(tmp_path / folder / "mine.py", RUN_OF_4_LAYERS.format("LAYERS = 5"))
    done = meshscope(*dotted, PYTHONPATH=f"{ROOT}{os.pathsep}{checkout}")
    assert json.loads(done.stdout)["model"]["n_layers"] == 5


def test_package_named_runs_is_not_the_folder(meshscope, tmp_path):
    write(tmp_path / "site" / "runs" / "__init__.py", "")
    write(tmp_path / "site" / "runs" / "mine.py", RUN_OF_4_LAYERS.format("LAYERS = 4"))
    path = f"{ROOT}{os.pathsep}{tmp_path / 'site'}"
    assert_refused(
        meshscope("run", "--module", "runs.mine", "--config", "mine", PYTHONPATH=path), 2, "here: runs/mine.py"
    )


@pytest.mark.parametrize("where", ["installed", "."])
def test_module_of_a_users_package_may_import_its_siblings(meshscope, tmp_path, where):
    """Installed, or lying in the working directory."""
    package = tmp_path / where / "my_pkg"
    write(package / "__init__.py", "")
    write(package / "sizes.py", "LAYERS = 4\n")
    write(package / "runs.py", RUN_OF_4_LAYERS.format("from .sizes import LAYERS"))

    path = f"{ROOT}{os.pathsep}{tmp_path / 'installed'}"
    done = meshscope("run", "--module", "my_pkg.runs", "--config", "mine", "--print-config", PYTHONPATH=path)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["n_layers"] == 4
    if where == ".":
        write(package / "runs.py", "x = 1\nfrom .nowhere import y\n")
        done = meshscope("run", "--module", "my_pkg.runs", "--config", "mine", PYTHONPATH=path)
        assert_refused(done, 2, f"{package / 'runs.py'}:2: ModuleNotFoundError")


def test_faults_of_a_users_file_are_one_line_with_the_place(meshscope, users_file):
    module = ("run", "--module", "runs.mine.small", "--config")
    assert_refused(meshscope(*module, "raises"), 2, f"{users_file}:11: KeyError: 'missing'")
    assert_refused(meshscope(*module, "returns_a_number"), 2, "returned int, not a Trainer.Config")
    assert_refused(meshscope(*module, "helper"), 2, "it has: mine, raises, returns_a_number")

    for ends in ("import sys; sys.exit(7)", "raise SystemExit"):
        users_file.write_text(f"x = 1\n{ends}\n")
        assert_refused(meshscope(*module, "mine"), 2, f"{users_file}:2: SystemExit")
    users_file.write_text("async def later(): ...\n")
    assert_refused(meshscope(*module, "later"), 2, "none: it defines no function")
    users_file.write_text("import nowhere_to_be_found\n")
    assert_refused(meshscope(*module, "mine"), 2, f"{users_file}:1: ModuleNotFoundError")
    users_file.write_text("x = 1\ndef broken(:\n")
    assert_refused(meshscope(*module, "mine"), 2, f"{users_file}:2: SyntaxError")
    users_file.write_text("x = 1\n")
    assert_refused(meshscope(*module, "mine"), 2, "none: it defines no function")


def test_folder_with_something_in_it_is_never_recorded_into(meshscope, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    assert_refused(meshscope(*TINY, "--mode", "cpu", "--out", "out", torch=True), 2, "out", "not empty")
    assert_refused(meshscope(*TINY, "--mode", "cpu", "--out", "out/precious", torch=True), 2, "name another folder")


def test_mode_that_this_machine_lacks_is_refused(meshscope, tmp_path):
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert_refused(meshscope(*TINY, "--mode", "real", torch=True, **hidden), 5, "mode real needs", "--mode cpu")
    assert_refused(meshscope(*TINY, "--mode", "shared-gpu", torch=True, **hidden), 5, "mode shared-gpu needs a CUDA")
    llama = ("run", "--module", "llama3", "--config", "llama3_1b")
    assert_refused(meshscope(*llama, torch=True, **hidden), 5, "0 usable CUDA devices for 8 ranks")
    rehearsal = meshscope(*llama, "--mode", "rehearsal", torch=True, **hidden)
    assert_refused(rehearsal, 5, "needs a CUDA device, here is none", "--training.device cpu")
    assert list(tmp_path.iterdir()) == []


def test_rehearsal_that_cannot_be_is_refused(meshscope, tmp_path):
    rehearsal = (*TINY, "--mode", "rehearsal", "--training.device", "cpu")
    for ranks, part in (("0,4", "no rank 4 in world_size=4"), ("0;1", "with commas"), ("-1", "with commas")):
        assert_refused(meshscope(*rehearsal, f"--ranks={ranks}", torch=True), 2, "--ranks", part)
    assert_refused(meshscope(*TINY, "--mode", "cpu", "--ranks", "0", torch=True), 2, "--ranks is for --mode rehearsal")
    assert_refused(meshscope(*TINY, "--nccl", "x.so", torch=True), 2, "--nccl is for --mode shared-gpu only")
    assert_refused(meshscope(*rehearsal, "--checkpoint.interval", "2", torch=True), 2, "checkpoint.interval=2", "to 0")
    large = ("run", "--module", "llama3", "--config", "llama3_405b", "--mode", "rehearsal", "--training.device", "cpu")
    done = meshscope(*large, "--training.micro_batch_size", "100000", torch=True)
    assert_refused(done, 5, "rank 0 of 512 does not fit: its predicted peak is", "this machine has")
    assert list(tmp_path.iterdir()) == []


def test_more_ranks_than_memory_can_hold_are_not_started(meshscope, tmp_path):
    arguments = ("--mode", "cpu", "--nproc", "100000", "--parallelism.dp_shard=-1", "--model.dim=256")
    assert_refused(meshscope(*TINY, *arguments, torch=True), 5, "world_size=100000", "at most", "meshscope ledger")
    assert list(tmp_path.iterdir()) == [], "something was started"


@pytest.mark.parametrize("command", ["report", "overlap", "memory"])
def test_a_path_that_no_file_can_have(meshscope, command):
    assert_refused(meshscope(command, "x" * 5000), 3, "xxx: ", "ile name too long")
    assert_refused(meshscope(command, "red\x1b[31m\nend"), 3, "red?[31m end: no such file or directory")


def program(tmp_path, redirections, **environment):
    """`meshscope doctor` in a shell, with its streams redirected."""
    return subprocess.run(
        ["/bin/sh", "-c", f'"{sys.executable}" -m harness.cli doctor {redirections}'],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent), **environment},
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line(tmp_path):
    done = program(tmp_path, ">/dev/full")
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing(tmp_path, closed):
    done = program(tmp_path, closed)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("mode cpu" in done.stdout) == (">&- 2" not in closed and closed != ">&-")


def test_output_in_an_encoding_that_lacks_characters(tmp_path, meshscope):
    mine = tmp_path / "mine.py"
    mine.write_text("from harness.config import Trainer\ndef é() -> Trainer.Config: return Trainer.Config()\n", "utf-8")
    done = meshscope("run", "--module", "mine.py", "--config", "x", PYTHONIOENCODING="ascii")
    assert_refused(done, 2, "it has: \\xe9")


def test_doctor_says_what_is_missing_without_torch(meshscope):
    done = meshscope("doctor", "--json")

    assert (done.returncode, done.stderr) == (5, "")
    report = json.loads(done.stdout)
    torch = next(check for check in report["checks"] if check["name"] == "torch")
    assert torch["state"] == "missing"
    assert torch["fix"].startswith("pip install")
    assert report["modes"]["cpu"]["available"] is False
    assert "no        mode cpu" in meshscope("doctor").stdout


def test_doctor_with_torch(meshscope):
    done = meshscope("doctor", torch=True)

    assert done.returncode == 0, done.stdout
    assert "yes       mode cpu" in done.stdout
    assert "ok        torch" in done.stdout


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_help_and_reading_need_no_torch(meshscope, command):
    done = meshscope(command, "--help")

    assert done.returncode == 0, done.stderr
    assert f"usage: meshscope {command}" in done.stdout


@pytest.mark.parametrize("command", sorted({"overlap", "memory", "whatif", "report", "compare"} & set(cli.COMMANDS)))
def test_reading_commands_say_without_torch_that_nothing_is_there(meshscope, command):
    done = meshscope(command, *["nowhere"] * (2 if command == "compare" else 1))

    assert done.returncode == 3, done.stderr
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


READING = {
    "report": ("nowhere",),
    "overlap": ("nowhere",),
    "memory": ("nowhere",),
    "whatif": ("nowhere",),
    "ledger": ("--module", "debug", "--config", "tiny", "--against", "nowhere"),
    "compare": ("nowhere", "nowhere"),
}


@pytest.mark.parametrize("command", READING)
def test_json_is_an_object_when_nothing_can_be_read_too(meshscope, command):
    done = meshscope(command, *READING[command], "--json")
    assert done.returncode == 3, done.stderr
    said = json.loads(done.stdout)
    assert (said["schema_version"], said["mode"]) == (1, None)
    (error,) = said["errors"]
    assert (error["file"], error["offset"]) == ("nowhere", None)
    assert error["reason"] in done.stderr
    assert meshscope(command, *READING[command], "--json", "--frobnicate").stdout == "", "usage errors are not data"


def test_compare_prints_an_object_for_files_that_say_nothing(meshscope, tmp_path):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("{}")
    done = meshscope("compare", "a.json", "b.json", "--json")
    assert done.returncode == 3
    assert [error["file"] for error in json.loads(done.stdout)["errors"]] == ["a.json", "b.json"]


@pytest.mark.parametrize("command", ["report", "overlap", "memory"])
def test_reading_commands_keep_no_result_with_or_without_no_cache(tmp_path, monkeypatch, capsys, command):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    run = write_recording(tmp_path / "run")
    write_kernels(recording.trace_path(run, 3, 0), [("allreduce", "mesh_dp", 20, 0, 1000), ("gemm", None, 7, 0, 500)])
    write_snapshot(recording.snapshot_path(run, 3, 0))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    said = []
    for options in ([], ["--no-cache"]):
        assert cli.main([command, str(run), "--json", *options]) in (0, 4)
        said.append(capsys.readouterr().out)

    assert said[0] == said[1]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "changes nothing: of all commands only dashboard keeps" in " ".join(capsys.readouterr().out.split())


def test_overrides_are_taken_out_of_the_command_line_in_order():
    words = ["run", "--out", "a.b", "--x.y", "1", "--x.z=2", "--x.y=-3", "--x.w", "-1", "--out=c.d"]

    assert cli.split_overrides(words) == (
        ["run", "--out", "a.b", "--out=c.d"],
        [("x.y", "1"), ("x.z", "2"), ("x.y", "-3"), ("x.w", "-1")],
    )
    with pytest.raises(UsageError, match=r"--x\.y needs a value"):
        cli.split_overrides(["--x.y"])
