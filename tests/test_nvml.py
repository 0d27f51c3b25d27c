"""Which GPU a CUDA device index means, row by row."""

import json

import pytest

from harness.nvml import Gpu, Machine, MigDevice, visible_devices, visible_gpus

UUIDS = [
    "GPU-11111111-aaaa-0000-0000-000000000000",
    "GPU-22222222-aaaa-0000-0000-000000000001",
    "GPU-22222222-bbbb-0000-0000-000000000002",
    "GPU-44444444-aaaa-0000-0000-000000000003",
]
MIG = [(1, "MIG-aaaa0000-0000-0000-0000-000000000000"), (1, "MIG-bbbb0000-0000-0000-0000-000000000000")]


def physical(variable: str | None, uuids: list[str] = UUIDS) -> list[int]:
    return [index for index, _ in visible_devices(variable, uuids, MIG)]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("1,0", [1, 0]),
        ("3", [3]),
        (" 2 , 1 ", [2, 1]),
        ("0,-1,2", [0]),
        ("-1", []),
        ("0,1,1", []),
        ("0,-1,0", [0]),  # the list ends before the repetition
        ("0,4,1", [0]),
        ("4", []),
        ("0,4,4", []),  # a repetition counts even of what is not there
        ("9" * 5000, []),
        ("0,,1", [0]),
        (",0", []),
        ("0,", [0]),
        ("+1", [1]),
        ("+", []),
        ("1gpu2,2ampere", [1, 2]),
        ("01,1", []),
        ("all", []),
        ("NoDevFiles", []),
        ("GPU-44444444,GPU-11111111", [3, 0]),
        (UUIDS[2], [2]),
        ("GPU-22222222-b", [2]),
        ("GPU-22222222", []),  # two GPUs
        ("GPU-11111111,GPU-22222222,GPU-44444444", [0]),
        ("GPU-11111111,GPU-11111111", []),
        ("GPU-11111111,GPU-1111", []),  # the same GPU by another prefix
        ("GPU-11111111,GPU-55555555,GPU-44444444", [0]),
        ("GPU-11111111,3", [0]),
        ("3,GPU-11111111", [3]),
        ("GPU-11111111, GPU-44444444", [0]),
        (" GPU-11111111", []),
        ("gpu-11111111", []),
        ("MIG-aaaa", [1]),
        ("MIG-aaaa,MIG-bbbb", [1, 1]),
        ("MIG-cccc", []),
        ("MIG-aaaa,GPU-11111111", [1]),
    ],
)
def test_devices_of_a_visibility_list(variable, expected):
    assert physical(variable) == expected


def test_no_gpus():
    assert [physical(variable, []) for variable in (None, "", "0", "GPU-1")] == [[], [], [], []]


@pytest.mark.shared_data
def test_table_of_the_acceptance_cases(cases):
    table = json.loads((cases / "nvml_map.json").read_text())

    found = [physical(row["CUDA_VISIBLE_DEVICES"], table["uuids"]) for row in table["rows"]]

    assert len(found) >= 8
    assert found == [row["logical_to_physical"] for row in table["rows"]]


def test_mig_devices_belong_to_their_gpu():
    half = MigDevice(uuid=MIG[0][1], name="NVIDIA H200 MIG 3g.71gb", memory_bytes=71 << 30)
    gpus = [
        Gpu(index=0, name="NVIDIA H200", uuid=UUIDS[0], memory_bytes=140 << 30),
        Gpu(index=2, name="NVIDIA H200", uuid=UUIDS[1], memory_bytes=140 << 30, mig=True, mig_devices=[half]),
    ]
    machine = Machine(driver="580.1", cuda="13.0", gpus=gpus, unreadable=["GPU 1: GPU is lost"])

    assert [(gpu.index, uuid) for gpu, uuid in visible_gpus(machine, half.uuid)] == [(2, half.uuid)]
    assert [gpu.index for gpu, _ in visible_gpus(machine, None)] == [0, 2]
