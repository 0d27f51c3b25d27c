"""Several ranks on one GPU: which NCCL, how many blocks, and what is refused before anything starts."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.config import Parallelism, Trainer
from harness.doctor import checks, shared_gpu
from harness.doctor.facts import CudaFacts, TorchFacts, ask_torch
from harness.doctor.shared_gpu import (
    Nccl,
    choose_nccl,
    find_nccl,
    max_ctas,
    preloading,
    require_few_connections,
    share,
    wheel_library,
)
from harness.errors import UnavailableError, UsageError

OWN = "/site/nvidia/nccl/lib/libnccl.so.2"


@pytest.mark.parametrize(
    ("multiprocessors", "ranks", "ctas"),
    [(132, 8, 4), (132, 4, 8), (132, 2, 16), (132, 33, 1), (132, 3, 11), (528, 2, 64), (108, 8, 3)],
)
def test_kernels_of_all_ranks_fit_together(multiprocessors, ranks, ctas):
    assert max_ctas(multiprocessors, ranks) == ctas
    assert ctas * ranks * shared_gpu.FEWEST_KERNELS_AT_ONCE <= multiprocessors


def config_of(world_size: int = 8, separate: bool = False, **degrees: int) -> Trainer.Config:
    group = "separate" if separate else "shared"
    layout = Parallelism.Config(fsdp_reduce_scatter_group=group, **degrees)
    return Trainer.Config(world_size=world_size, parallelism=layout)


@pytest.mark.parametrize(
    ("config", "kernels"),
    [
        (config_of(), 4),  # one group, of the world: never more room than with four
        (config_of(tp=2), 4),
        (config_of(32, dp_replicate=2, tp=2, pp=2), 5),
        (config_of(4, cp=2, tp=2), 4),
        (config_of(8, cp=2, tp=2, pp=2), 5),
        (config_of(16, cp=2, tp=2, pp=2, dp_replicate=2), 6),
        (config_of(16, separate=True, cp=2, tp=2, pp=2, dp_replicate=2), 7),
        (Trainer.Config(world_size=8, workload="point_to_point"), 4),
    ],
)
def test_every_communicator_of_a_layout_has_room(config, kernels):
    assert shared_gpu.kernels_at_once(config) == kernels
    assert max_ctas(132, 8, kernels) * 8 * kernels <= 132


def test_more_ranks_than_fit_are_refused():
    with pytest.raises(UnavailableError, match=r"34 ranks on a GPU of 132 multiprocessors, .* at most 33 fit"):
        max_ctas(132, 34)
    with pytest.raises(UnavailableError, match="at most 22 fit"):
        max_ctas(132, 23, kernels=6)


def torch_with(loaded: str | None, **facts: object) -> TorchFacts:
    built = {"version": "2.11.0+cu130", "cuda": "13.0", "nccl": True, "nccl_built": "2.28.9", "nccl_loaded": loaded}
    return TorchFacts(**{**built, "libraries": {"libnccl": OWN}, **facts})


def asking(answers: dict[Path | None, TorchFacts]):
    """Torch as it is with a library preloaded (None: as it is); a library that is not there changes nothing."""
    return lambda preload: answers.get(preload, answers[None])


def test_torchs_own_library_is_used_if_it_is_recent():
    assert choose_nccl(None, asking({None: torch_with("2.30.7")})) == Nccl("2.30.7", None)
    assert choose_nccl(None, asking({None: torch_with("3.0.1")})) == Nccl("3.0.1", None)


def test_library_that_is_named_goes_first_and_must_be_recent(tmp_path):
    named, old = tmp_path / "new.so", tmp_path / "old.so"
    ask = asking({None: torch_with("2.30.7"), named: torch_with("2.31.0"), old: torch_with("2.28.9")})

    assert choose_nccl(named, ask) == Nccl("2.31.0", named)
    with pytest.raises(UnavailableError, match=f"NCCL 2.30 or later; with {old} preloaded torch has 2.28.9"):
        choose_nccl(old, ask)


def test_library_of_the_wheel_replaces_an_older_one(tmp_path, monkeypatch):
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    old = torch_with("2.28.9")

    assert choose_nccl(None, asking({None: old, library: torch_with("2.30.7")})) == Nccl("2.30.7", library)
    with pytest.raises(UnavailableError, match=r"torch has 2.28.9: pip install 'nvidia-nccl-cu13>=2.30'"):
        choose_nccl(None, asking({None: old, library: torch_with("2.29.1")}))


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        (torch_with("2.28.9"), "torch has 2.28.9: pip install 'nvidia-nccl-cu13>=2.30', or name a library"),
        (torch_with(None), "NCCL 2.28.9 is linked into torch"),
        (torch_with("2.30.7", nccl=False), "torch is a CPU build"),
        (TorchFacts(error="ImportError: libtorch.so"), "torch does not load: ImportError: libtorch.so"),
    ],
)
def test_what_is_missing_is_one_line(torch, reason):
    with pytest.raises(UnavailableError, match=reason) as caught:
        choose_nccl(None, asking({None: torch}))
    assert "\n" not in str(caught.value)
    if wheel_library() is None:  # else it is looked at, too
        nccl = find_nccl(torch, {})
        assert shared_gpu.missing(nccl, CudaFacts(multiprocessors=[132]), usable=1) == str(caught.value)


def test_doctor_names_the_first_thing_that_is_missing(monkeypatch, tmp_path):
    nccl, cuda = find_nccl(torch_with("2.30.7"), {}), CudaFacts(multiprocessors=[132])
    monkeypatch.setenv("PATH", str(tmp_path))

    assert shared_gpu.missing(nccl, cuda, usable=0) == "no usable CUDA device"
    assert shared_gpu.missing(nccl, CudaFacts(error="no libcuda"), usable=1) == (
        "CUDA's driver does not answer: no libcuda"
    )
    assert shared_gpu.missing(nccl, cuda, usable=1).startswith("nvidia-cuda-mps-control is not on PATH")
    (tmp_path / "nvidia-cuda-mps-control").touch(mode=0o755)
    assert shared_gpu.missing(nccl, cuda, usable=1) is None


def test_doctor_sees_the_library_that_the_environment_names(monkeypatch, tmp_path):
    library = tmp_path / "libnccl.so.2"
    library.touch()
    environment = {"MESHSCOPE_NCCL": str(library), "LD_PRELOAD": "/usr/lib/libjemalloc.so"}
    asked = []

    def ask(environment):
        asked.append(environment["LD_PRELOAD"])
        return torch_with("2.31.0")

    monkeypatch.setattr(shared_gpu, "ask_torch", ask)
    old = torch_with("2.28.9")
    assert find_nccl(old, environment) == Nccl("2.31.0", library)
    assert asked == [f"{library}:/usr/lib/libjemalloc.so"]
    assert find_nccl(old, {"MESHSCOPE_NCCL": f"{library}.gone"}) == f"the NCCL library {library}.gone is not a file"


@pytest.mark.parametrize(
    ("found", "environment", "state", "value", "fix"),
    [
        (Nccl("2.30.7", None), {}, "ok", "several, with NCCL_MULTI_RANK_GPU_ENABLE=1", None),
        (Nccl("2.31.0", Path("/n.so")), {}, "ok", "NCCL 2.31.0 of /n.so preloaded", None),
        ("it is old", {}, "optional", "one: several need NCCL 2.30", "pip install 'nvidia-nccl-cu13>=2.30'"),
        ("it is old", {"MESHSCOPE_NCCL": "/n.so"}, "optional", "one: it is old", "MESHSCOPE_NCCL=/n.so, or unset it"),
    ],
)
def test_how_many_ranks_a_gpu_can_have(found, environment, state, value, fix):
    check = checks._nccl(torch_with("2.28.9"), found, environment)[1]
    assert (check.name, check.state) == ("ranks per GPU", state)
    assert value in check.value
    assert (check.fix is None) if fix is None else (fix in check.fix)


@pytest.mark.parametrize(
    ("value", "ranks", "refused"),
    [("32", 4, True), ("32", 8, True), ("64", 4, True), ("32", 2, False), ("8", 8, False), ("", 8, False)],
)
def test_connections_that_fail_under_mps_are_refused(value, ranks, refused):
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": value}
    if refused:
        with pytest.raises(UsageError, match=f"CUDA_DEVICE_MAX_CONNECTIONS={value}: .* {ranks} ranks"):
            require_few_connections(ranks, environment)
    else:
        require_few_connections(ranks, environment)


def test_what_cannot_be_shared_is_refused(tmp_path):
    with pytest.raises(UsageError, match="8 usable CUDA devices for 8 ranks, none is shared: use --mode real"):
        share(config_of(), 8, None, {})
    with pytest.raises(UsageError, match=r"the NCCL library .*missing.so is not a file"):
        share(config_of(), 1, tmp_path / "missing.so", {})
    with pytest.raises(UsageError, match=r"the NCCL library .*named.so is not a file"):
        share(config_of(), 1, None, {"MESHSCOPE_NCCL": str(tmp_path / "named.so")})
    with pytest.raises(UsageError, match="CUDA_DEVICE_MAX_CONNECTIONS=32"):
        share(config_of(), 2, None, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"})


def test_preloaded_library_comes_before_those_of_the_user(tmp_path):
    library = tmp_path / "libnccl.so.2"
    assert preloading(library, {"LD_PRELOAD": "/usr/lib/libjemalloc.so"})["LD_PRELOAD"] == (
        f"{library}:/usr/lib/libjemalloc.so"
    )
    assert preloading(library, {})["LD_PRELOAD"] == str(library)
    assert preloading(None, {"A": "b"}) == {"A": "b"}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to make a library")
def test_version_asked_for_is_that_of_the_preloaded_library(tmp_path):
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int *version) { *version = 23007; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)

    facts = ask_torch(preloading(library, os.environ))

    assert facts.error is None
    assert (facts.nccl_loaded, facts.libraries["libnccl"]) == ("2.30.7", str(library))
