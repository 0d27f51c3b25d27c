"""`meshscope doctor`: what it asks in other processes may be missing, broken or stuck, and each is one line."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.doctor import checks, gpu_checks
from harness.doctor.checks import libraries
from harness.doctor.facts import CudaFacts, Facts, Question, TorchaoFacts, TorchFacts, gather
from harness.nvml import Gpu, Machine, MigDevice, Process

UUIDS = ["GPU-11111111-aaaa-0000-0000-000000000000", "GPU-22222222-aaaa-0000-0000-000000000001"]


def doctor(*arguments: str, torch: str | None = None, folder: Path, **environment: str):
    """Runs the command; with `torch`, that text is the module that `import torch` finds."""
    if torch is not None:
        (folder / "torch").mkdir()
        (folder / "torch" / "__init__.py").write_text(torch)
        environment["PYTHONPATH"] = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", "doctor", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_json_is_complete(tmp_path):
    done = doctor("--json", folder=tmp_path, NCCL_DEBUG="INFO", NCCL_API_KEY="abc")

    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert set(report) == {"schema_version", "mode", "checks", "variables", "gpus", "modes", "errors"}
    assert report["schema_version"] == 1
    assert report["mode"] in ("cpu", "real")
    assert set(report["modes"]) == {"cpu", "real", "shared-gpu", "rehearsal"}
    assert report["modes"]["cpu"] == {"available": True, "max_ranks": None, "reason": None}
    assert report["modes"]["rehearsal"] == {"available": True, "max_ranks": None, "reason": None}
    for mode in report["modes"].values():
        assert mode["available"] == (mode["reason"] is None)
    assert {check["group"] for check in report["checks"]} >= {"software", "torch", "GPUs", "host", "optional"}
    for check in report["checks"]:
        assert set(check) == {"group", "name", "state", "value", "fix"}
        assert check["state"] == "ok" or check["fix"], check
    variables = {variable["name"]: variable for variable in report["variables"]}
    assert variables["NCCL_DEBUG"]["value"] == "INFO"
    assert variables["NCCL_API_KEY"]["value"] == "***"
    assert variables["TORCH_DISTRIBUTED_DEBUG"]["state"] == "live"
    (torchao,) = [check for check in report["checks"] if check["name"] == "torchao"]
    assert (torchao["state"] == "ok") == (find_spec("torchao") is not None)
    assert report["errors"] == []


def test_text_has_a_section_for_each_group_and_the_variables(tmp_path):
    done = doctor(folder=tmp_path, NCCL_MAX_CTA="4", CUDA_VISIBLE_DEVICES="")

    assert done.returncode == 0, done.stdout
    for heading in ("software:", "torch:", "GPUs:", "host:", "environment:", "optional:", "modes:"):
        assert f"{heading}\n" in done.stdout
    assert "did you mean NCCL_MAX_CTAS?" in done.stdout
    assert "NCCL_MAX_CTA=4: unknown" in done.stdout
    assert "no        mode shared-gpu no usable CUDA device\n" in done.stdout
    assert "holistictraceanalysis" not in done.stdout, "no command uses it"


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        ("raise ImportError('libtorch.so: undefined symbol')", "ImportError: libtorch.so: undefined symbol"),
        ("raise OSError('libcudart.so.13: cannot open')", "OSError: libcudart.so.13: cannot open"),
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first second"),
        ("import os\nos.kill(os.getpid(), 11)", "ended by signal 11"),
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("", "No module named 'torch.cuda'"),
    ],
)
def test_broken_torch_is_one_line(tmp_path, torch, reason):
    done = doctor("--json", torch=torch, folder=tmp_path)

    assert (done.returncode, done.stderr) == (5, "")
    report = json.loads(done.stdout)
    checks = [check for check in report["checks"] if check["group"] == "torch"]
    assert [(check["name"], check["state"]) for check in checks] == [("torch", "missing")]
    assert reason in checks[0]["value"]
    assert checks[0]["fix"].startswith("pip install")
    nothing = {"available": False, "max_ranks": None, "reason": "see the checks that are not ok"}
    assert (report["mode"], report["modes"]) == (None, dict.fromkeys(report["modes"], nothing))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ImportError('_C.abi3.so: undefined symbol')", "ImportError: _C.abi3.so: undefined symbol"),
        ("import os\nos.kill(os.getpid(), 11)", "ended by signal 11"),
    ],
)
def test_torchao_that_is_there_and_does_not_load_is_not_ok(tmp_path, monkeypatch, text, reason):
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    facts = gather(with_torch=False, with_torchao=True)
    facts.torch = TorchFacts(version="2.11.0")
    check = checks._torchao(facts)

    assert check.state == "optional"
    assert check.value.startswith(f"import fails: {reason}")
    assert check.fix.startswith("pip install --force-reinstall --no-deps 'torchao")


@pytest.mark.parametrize(
    ("torchao", "torch", "state", "value"),
    [
        (None, TorchFacts(version="2.11.0"), "optional", "none: a run with float8.recipe needs it"),
        (TorchaoFacts(version="0.18.0"), TorchFacts(version="2.11.0"), "ok", "0.18.0"),
        (TorchaoFacts(error="x"), TorchFacts(error="OSError: y"), "optional", "not tried: torch does not load"),
    ],
)
def test_torchao_elsewise(torchao, torch, state, value):
    asked = Facts(torch=torch, cuda=CudaFacts(), machine=None, nvml_error="none", torchao=torchao)
    check = checks._torchao(asked)
    assert (check.state, check.value, check.fix is None) == (state, value, state == "ok")


def program(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def test_program_that_hangs_is_given_up_and_what_it_said_is_kept(tmp_path):
    path = program(tmp_path, 'import time\nprint(\'{"cuda": "13.0"}\', flush=True)\ntime.sleep(600)')
    began = time.monotonic()

    answer = Question(path, timeout_s=3.0).answer()

    assert answer == {"cuda": "13.0", "error": "no answer within 3 s"}
    assert time.monotonic() - began < 60


def test_what_libraries_print_is_no_answer(tmp_path):
    path = program(tmp_path, "print('NCCL version 2.30')\nprint('[1]')\nprint('{\"a\": 1}')\nprint('{\"b\": ')")

    assert Question(path, timeout_s=60.0).answer() == {"a": 1}


def h200(index: int, **values: object) -> Gpu:
    return Gpu(
        **{
            "index": index,
            "name": "NVIDIA H200",
            "uuid": UUIDS[index],
            "memory_bytes": 143771 << 20,
            "compute_capability": "9.0",
            "compute_mode": "default",
            "persistence": True,
            "processes": [],
            **values,
        }
    )


def facts(*gpus: Gpu, torch: TorchFacts | None = None, cuda: CudaFacts | None = None) -> Facts:
    return Facts(
        torch=torch or TorchFacts(version="2.11.0+cu130", cuda="13.0", nccl=True, architectures=["sm_80", "sm_90"]),
        cuda=cuda or CudaFacts(identifiers=[uuid.removeprefix("GPU-") for uuid in UUIDS]),
        machine=Machine(driver="580.159.04", cuda="13.0", gpus=list(gpus)),
        nvml_error=None,
    )


def found(facts: Facts, environment: dict[str, str] | None = None) -> dict[str, tuple[str, str]]:
    """Name -> (state, value) of the checks on GPUs."""
    # A folder that is not there, so that a daemon on the machine that runs the tests is not seen.
    environment = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent", **(environment or {})}
    return {check.name: (check.state, check.value) for check in gpu_checks.examine(facts, environment)}


def test_calibration_that_fits_each_kind_of_gpu():
    found = checks._calibrations(facts(h200(0), h200(1, name="NVIDIA L4")))

    assert [(check.state, check.value) for check in found] == [
        ("ok", "NVIDIA H200: h200, shipped"),
        ("optional", "NVIDIA L4: none shipped: its times are not predicted"),
    ]
    assert found[1].fix == "meshscope calibrate --out FILE"


def test_two_gpus_in_order():
    checks = found(facts(h200(0), h200(1)))

    assert {name: state for name, (state, _) in checks.items() if name != "MPS"} == dict.fromkeys(
        ("GPUs", "driver", "GPU 0", "GPU 1", "settings", "clocks", "visible"), "ok"
    )
    assert checks["GPUs"][1] == "2 × NVIDIA H200, 140.4 GiB"
    assert checks["visible"][1] == "CUDA_VISIBLE_DEVICES is not set: cuda:0 = GPU 0, cuda:1 = GPU 1"


@pytest.mark.parametrize(
    ("values", "name", "state", "part"),
    [
        ({"compute_mode": "prohibited"}, "compute mode", "missing", "no process may use it"),
        ({"persistence": False}, "persistence", "warning", "off"),
        ({"ecc_uncorrected_errors": 2}, "ECC", "warning", "2 uncorrected"),
        ({"clock_reasons": ["GPU idle"]}, "clocks", "ok", "limits: GPU idle"),
        ({"clock_reasons": ["software power cap"]}, "clocks", "warning", "held down by software power cap"),
        ({"compute_capability": "6.1"}, "architecture", "missing", "6.1, torch was built for sm_80, sm_90"),
        (
            {"processes": [Process(pid=77, kind="compute", name=None, memory_bytes=3 << 30)]},
            "other process",
            "warning",
            "GPU 0: in use by process 77 (not in this namespace, compute, 3.00 GiB)",
        ),
        ({"processes": None}, "settings", "ok", "processes unknown"),
    ],
)
def test_state_of_a_gpu(values, name, state, part):
    checks = found(facts(h200(0, **values), cuda=CudaFacts(identifiers=[UUIDS[0].removeprefix("GPU-")])))

    assert checks[name][0] == state
    assert part in checks[name][1]


@pytest.mark.parametrize(
    ("capability", "architectures", "supported"),
    [
        ("9.0", ["sm_90"], True),
        ("9.0", ["sm_90a"], True),
        ("8.9", ["sm_80", "sm_90"], True),
        ("8.0", ["sm_86"], False),
        ("12.1", ["sm_100", "sm_120"], True),
        ("12.0", ["sm_90", "compute_90"], True),
        ("7.5", ["compute_90"], False),
        ("7.5", [], True),
    ],
)
def test_architectures(capability, architectures, supported):
    torch = TorchFacts(version="2.11.0", cuda="13.0", architectures=architectures)

    assert ("architecture" not in found(facts(h200(0, compute_capability=capability), torch=torch))) == supported


def test_order_of_the_driver_is_told_where_it_differs():
    reverse = CudaFacts(identifiers=[uuid.removeprefix("GPU-") for uuid in reversed(UUIDS)])
    two = (h200(0), h200(1))

    state, value = found(facts(*two, cuda=reverse))["visible"]
    assert state == "warning"
    assert "cuda:0 = GPU 1, cuda:1 = GPU 0 (CUDA_DEVICE_ORDER=FASTEST_FIRST" in value

    state, value = found(facts(*two, cuda=reverse), {"CUDA_VISIBLE_DEVICES": "1,0"})["visible"]
    assert (state, value) == ("ok", "CUDA_VISIBLE_DEVICES=1,0: cuda:0 = GPU 1, cuda:1 = GPU 0")

    fewer = CudaFacts(identifiers=[UUIDS[1].removeprefix("GPU-")])
    assert found(facts(*two, cuda=fewer))["visible"] == (
        "warning",
        "CUDA_VISIBLE_DEVICES is not set: cuda:0 = GPU 1, which is not what NVML lists",
    )

    unknown = CudaFacts(identifiers=["33333333-aaaa-0000-0000-000000000000"])
    assert "does not list" in found(facts(*two, cuda=unknown))["visible"][1]


def test_hidden_gpus_are_no_fault_of_the_driver():
    none = CudaFacts(error="cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected")
    checks = found(facts(h200(0), cuda=none), {"CUDA_VISIBLE_DEVICES": ""})

    assert checks["driver"][0] == "ok"
    assert checks["visible"] == ("warning", "CUDA_VISIBLE_DEVICES=: none is left")


def test_mig_device_is_followed_to_its_gpu():
    half = MigDevice(uuid="MIG-33333333-aaaa-0000-0000-000000000000", name="MIG 3g.71gb", memory_bytes=71 << 30)
    split = h200(0, mig=True, mig_devices=[half])
    asked = facts(split, cuda=CudaFacts(identifiers=[half.uuid.removeprefix("MIG-")]))

    for environment in ({}, {"CUDA_VISIBLE_DEVICES": half.uuid}, {"CUDA_VISIBLE_DEVICES": "0"}):
        assert found(asked, environment)["visible"][0] == "ok"
        assert found(asked, environment)["visible"][1].endswith("cuda:0 = GPU 0")
    assert found(asked)["MIG"][0] == "warning"


def test_driver_that_is_too_old_or_does_not_start():
    torch = TorchFacts(version="2.11.0+cu130", cuda="13.0")
    old = Facts(
        torch=torch,
        cuda=CudaFacts(),
        machine=Machine(driver="550.54", cuda="12.4", gpus=[h200(0)]),
        nvml_error=None,
    )
    assert found(old)["driver"] == ("missing", "550.54, CUDA up to 12.4; torch needs 13.0")

    broken = CudaFacts(error="cuInit: CUDA_ERROR_SYSTEM_NOT_READY: system not yet initialized")
    [check] = [c for c in gpu_checks.examine(facts(h200(0), cuda=broken), {}) if c.name == "driver"]
    assert check.state == "missing"
    assert check.fix is not None
    assert "fabricmanager" in check.fix


def test_nvml_that_fails_where_cuda_works():
    blind = Facts(
        torch=TorchFacts(), cuda=CudaFacts(identifiers=["a", "b"]), machine=None, nvml_error="Driver Not Loaded"
    )

    assert found(blind)["GPUs"][0] == "warning"
    assert found(blind)["GPUs"][1].startswith("CUDA sees 2")
    assert "NVML: Driver Not Loaded" in found(blind)["GPUs"][1]


def test_daemon_of_mps(tmp_path):
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}

    def mps() -> tuple[str, str]:
        return found(facts(h200(0)), environment)["MPS"]

    assert mps()[0] == "optional"
    (tmp_path / "control").touch()
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text("torn")
    assert mps()[0] == "warning", "its pipe without its process"
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    assert mps() == ("ok", f"running (process {os.getpid()}, {tmp_path})")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text(str(ended.pid))
    assert mps()[0] == "warning"


def test_libraries_are_those_in_the_process_else_those_on_disk(tmp_path):
    folder = tmp_path / "torch"
    for path in (folder / "lib" / "libtorch_cuda.so", tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"):
        path.parent.mkdir(parents=True)
        path.touch()
    loaded = TorchFacts(version="2.11.0+cu130", cuda="13.0", libraries={"libnccl": "/preloaded/libnccl.so.2"})
    asked = Facts(torch=loaded, cuda=CudaFacts(library="/usr/lib/libcuda.so.1"), machine=None, nvml_error="none")

    paths = {library.name: library.path for library in libraries(asked, folder)}
    assert paths["libnccl"] == Path("/preloaded/libnccl.so.2")
    assert paths["libtorch_cuda"] == folder / "lib" / "libtorch_cuda.so"
    assert paths["libcuda"] == Path("/usr/lib/libcuda.so.1")
    assert paths["libc10"] is None

    asked.torch = TorchFacts(error="OSError: libcudart.so.13")
    assert {library.name: library.path for library in libraries(asked, folder)}["libnccl"] == (
        tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    )
