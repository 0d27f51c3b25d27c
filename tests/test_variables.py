"""Which variables the libraries read, over small files laid out as a linker lays them out."""

import struct
from pathlib import Path

import pytest

from harness.variables import KNOWN, Library, Strings, configuration_files, examine

SENTENCE = "TORCH_NCCL_AVOID_RECORD_STREAMS is the default now, this environment variable is thus deprecated."


def elf(constants: bytes, code: bytes) -> bytes:
    """A 64-bit little-endian ELF file with the sections .text and .rodata."""
    names = b"\0.text\0.rodata\0.shstrtab\0"
    contents = [code, constants, names]
    offsets = [64 + sum(map(len, contents[:place])) for place in range(3)]
    table = 64 + sum(map(len, contents))
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 4, 3)
    sections = [bytes(64)]
    for name, offset, content in zip((".text", ".rodata", ".shstrtab"), offsets, contents, strict=True):
        fields = (names.index(name.encode()), 1, 2, 0, offset, len(content))
        sections.append(struct.pack("<IIQQQQ", *fields).ljust(64, b"\0"))
    return header + b"".join(contents) + b"".join(sections)


def library(folder: Path, name: str, *strings: str, code: bytes = b"\xc3") -> Library:
    path = folder / f"{name}.so.2"
    # Switch tables lie between the strings, so that a name follows bytes of any value.
    path.write_bytes(elf(b"\xff\xa2P\xff" + b"".join(text.encode() + b"\0" for text in strings), code))
    return Library(name=name, path=path)


def states(libraries, environment=None, torch_version=None):
    return {found.name: found for found in examine(libraries, environment or {}, torch_version)[0]}


def test_name_in_its_library_is_live(tmp_path):
    found = states([library(tmp_path, "libnccl", "NCCL_ALGO", "NCCL_PROTO=%s")], {"NCCL_ALGO": "Ring"})

    assert (found["NCCL_ALGO"].state, found["NCCL_ALGO"].library) == ("live", "libnccl")
    assert found["NCCL_ALGO"].value == "Ring"
    assert found["NCCL_PROTO"].state == "not in this build"
    assert found["NCCL_PROTO"].value is None


def test_name_in_another_library_or_in_code_proves_nothing(tmp_path):
    other = library(tmp_path, "libtorch_cpu", "NCCL_DEBUG", "TORCH_NCCL_BLOCKING_WAIT")
    own = library(tmp_path, "libnccl", "nothing", code=b"NCCL_DEBUG\0")

    assert states([other, own])["NCCL_DEBUG"].state == "not in this build"


def test_sentence_in_the_library_says_that_a_variable_is_ignored(tmp_path):
    name = "TORCH_NCCL_AVOID_RECORD_STREAMS"
    newer = states([library(tmp_path, "libtorch_cuda", name, SENTENCE)], {name: "1"})[name]
    assert (newer.state, newer.evidence, newer.value) == ("ignored", SENTENCE, "1")

    silent = [library(tmp_path, "libtorch_cuda", name)]
    assert states(silent, torch_version=(2, 7))[name].state == "live"
    assert states(silent, torch_version=(2, 8))[name].state == "ignored"
    assert states(silent)[name].state == "live"

    removed = states([library(tmp_path, "libtorch_cuda", "nothing")], torch_version=(2, 15))[name]
    assert removed.state == "not in this build"


def test_alias_that_the_linker_stored_inside_its_successor(tmp_path):
    found = states([library(tmp_path, "libtorch_cuda", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_ENABLE_TIMING")])

    assert found["TORCH_NCCL_BLOCKING_WAIT"].state == "live"
    assert found["NCCL_BLOCKING_WAIT"].state == "deprecated alias"
    assert found["NCCL_BLOCKING_WAIT"].alias_of == "TORCH_NCCL_BLOCKING_WAIT"
    assert found["NCCL_ENABLE_TIMING"].state == "live", "its successor is not there yet"
    assert found["NCCL_DESYNC_DEBUG"].state == "not in this build"


def test_allocator_settings_by_version(tmp_path):
    old = states([library(tmp_path, "libc10_cuda", "PYTORCH_CUDA_ALLOC_CONF"), library(tmp_path, "libc10", "x")])
    assert old["PYTORCH_CUDA_ALLOC_CONF"].state == "live"
    assert old["PYTORCH_ALLOC_CONF"].state == "not in this build"

    both = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    new = states([library(tmp_path, "libc10_cuda", "x"), library(tmp_path, "libc10", *both)])
    assert (new["PYTORCH_ALLOC_CONF"].state, new["PYTORCH_ALLOC_CONF"].library) == ("live", "libc10")
    assert new["PYTORCH_CUDA_ALLOC_CONF"].alias_of == "PYTORCH_ALLOC_CONF"


def test_name_that_is_not_stored_whole_is_unknown(tmp_path):
    found = states([library(tmp_path, "libtorch_cuda", "MY_TORCH_NCCL_NAN_CHECK", "TORCH_NCCL_CUDA_", "EVENT_CACHE")])

    assert found["TORCH_NCCL_NAN_CHECK"].state == "unknown"
    assert "longer name" in found["TORCH_NCCL_NAN_CHECK"].evidence
    assert found["TORCH_NCCL_CUDA_EVENT_CACHE"].state == "unknown"
    assert "pieces" in found["TORCH_NCCL_CUDA_EVENT_CACHE"].evidence


def test_variable_of_the_driver_is_live_however_it_is_stored(tmp_path):
    stored = states([library(tmp_path, "libcuda", "CUDA_DEVICE_MAX_CONNECTIONS")])
    assert stored["CUDA_DEVICE_MAX_CONNECTIONS"].evidence == "its name is in the library"
    assert "CUDA context" in stored["CUDA_DEVICE_MAX_CONNECTIONS"].note
    assert stored["CUDA_MODULE_LOADING"].state == "live"
    assert "documented" in stored["CUDA_MODULE_LOADING"].evidence


def test_missing_library_says_whether_that_is_settled(tmp_path):
    found = states(
        [
            Library(name="libnccl", path=None, absent="not in this build", reason="torch is a CPU build"),
            Library(name="libcuda", path=None, reason="no driver"),
        ]
    )

    assert (found["NCCL_ALGO"].state, found["NCCL_ALGO"].evidence) == (
        "not in this build",
        "libnccl: torch is a CPU build",
    )
    assert (found["CUDA_DEVICE_ORDER"].state, found["CUDA_DEVICE_ORDER"].evidence) == ("unknown", "libcuda: no driver")
    assert found["TORCH_NCCL_NAN_CHECK"].state == "unknown"


def test_unreadable_library_is_named(tmp_path):
    empty = tmp_path / "libnccl.so.2"
    empty.touch()
    gone = tmp_path / "libcuda.so.1"

    found, failures = examine([Library(name="libnccl", path=empty), Library(name="libcuda", path=gone)], {})

    assert [path for path, _ in failures] == [empty, gone]
    assert {variable.state for variable in found} == {"unknown"}
    assert any("libcuda: cannot be read: No such file" in variable.evidence for variable in found)


def test_variable_set_here_that_is_not_in_the_table(tmp_path):
    environment = {
        "NCCL_MAX_CTA": "4",
        "NCCL_IB_TC": "106",
        "TORCH_LOGS": "dynamo",
        "NCCL_API_TOKEN": "abc",
        "PATH": "/bin",
    }
    found = states([library(tmp_path, "libnccl", "NCCL_IB_TC", "NCCL_MAX_CTAS")], environment)

    assert found["NCCL_MAX_CTA"].state == "unknown"
    assert "did you mean NCCL_MAX_CTAS?" in found["NCCL_MAX_CTA"].evidence
    assert (found["NCCL_IB_TC"].state, found["NCCL_IB_TC"].library) == ("live", "libnccl")
    assert found["TORCH_LOGS"].state == "unknown"
    assert found["NCCL_API_TOKEN"].value == "***"
    assert "PATH" not in found


@pytest.mark.parametrize("damage", [slice(0, 40), slice(0, 64), slice(0, -100)])
def test_damaged_file_is_searched_as_a_whole(tmp_path, damage):
    path = tmp_path / "libnccl.so"
    path.write_bytes(elf(b"x\0", b"x")[damage] + b"\0NCCL_ALGO\0")

    strings = Strings(path)
    try:
        assert strings.find("NCCL_ALGO") == "whole"
        assert strings.find("NCCL_PROTO") is None
    finally:
        strings.close()


def test_table_names_each_variable_once_and_aliases_lead_somewhere():
    names = [known.name for known in KNOWN]

    assert len(set(names)) == len(names)
    assert {known.alias_of for known in KNOWN if known.alias_of} <= set(names)


def test_configuration_files_of_nccl(tmp_path):
    (tmp_path / ".nccl.conf").write_text("# NCCL_ALGO=Tree\nNCCL_DEBUG=WARN\n  NCCL_PROTO = LL\nother=1\n")
    (tmp_path / "own.conf").write_text("NCCL_ALGO=Ring\n")

    assert configuration_files({}, tmp_path)[tmp_path / ".nccl.conf"] == ["NCCL_DEBUG", "NCCL_PROTO"]
    own = {"NCCL_CONF_FILE": str(tmp_path / "own.conf")}
    assert configuration_files(own, tmp_path)[tmp_path / "own.conf"] == ["NCCL_ALGO"]
    assert tmp_path / ".nccl.conf" not in configuration_files(own, tmp_path)
