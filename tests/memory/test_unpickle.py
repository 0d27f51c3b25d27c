"""Pickles from strangers: nothing is executed, and whatever is wrong is one line."""

from __future__ import annotations

import contextlib
import copyreg
import gzip
import os
import pickle
import struct
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.memory.snapshot import read_snapshot
from harness.memory.unpickle import load_plain_pickle
from harness.sources import find_sources

from .build import MIB, Allocator, frame, snapshot_of, write


def small_snapshot() -> dict[str, object]:
    allocator = Allocator()
    allocator.segment(64 * MIB)
    kept = allocator.alloc(4096, frame("forward"), metadata="category=parameter")
    allocator.free(allocator.alloc(1 << 20, frame("all_gather"), stream=5))
    allocator.request(kept)
    return snapshot_of(allocator, annotations=[{"name": "step/1", "stage": "START", "device": 0, "time_us": 1}])


class Call:
    """Pickles as a call of os.mkdir, by REDUCE."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


class ByNewobj(dict):  # type: ignore[type-arg]
    """Pickles by NEWOBJ or NEWOBJ_EX."""


class ByPersistentId(pickle.Pickler):
    def persistent_id(self, obj: object) -> str | None:
        return "outside" if obj == "x" else None


@pytest.mark.parametrize("protocol", range(6))
def test_all_protocols_give_the_same(tmp_path: Path, protocol: int) -> None:
    content = small_snapshot() | {"numbers": [0, -1, 255, 65536, -(2**31), 2**62, 2**70, 1.5, True, None, (1, 2)]}
    assert load_plain_pickle(write(tmp_path / "s.pickle", content, protocol)) == content


def test_compressed_is_the_same_and_whatever_is_wrong_with_it_is_one_line(tmp_path: Path) -> None:
    content = small_snapshot()
    plain = pickle.dumps(content, protocol=4)
    path = tmp_path / "s.pickle.gz"
    path.write_bytes(gzip.compress(plain))
    assert load_plain_pickle(path) == content
    assert [file.path for file in find_sources(tmp_path).snapshots] == [path]
    whole = path.read_bytes()
    for wrong, said in (
        (whole[: len(whole) // 2], "is gzip that ends early"),
        (whole[:20] + b"\xff" * 20 + whole[40:], "is damaged gzip"),
        (gzip.compress(bytes(5_000_000)), "expands to more than a snapshot does"),
        (gzip.compress(b'{"traceEvents": []}'), "not a pickle: HTML or JSON text"),
        (gzip.compress(gzip.compress(plain)), "gzip data; decompress it first"),
        (gzip.compress(pickle.dumps(Call(str(tmp_path / "made")))), "refused: pickle opcode"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(InputError, match=said):
            load_plain_pickle(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("protocol", range(6))
def test_truncated_at_every_byte(tmp_path: Path, protocol: int) -> None:
    whole = pickle.dumps(small_snapshot(), protocol=protocol)
    path = tmp_path / "cut.pickle"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError) as caught:
            read_snapshot(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
        assert caught.value.offset == length


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_every_damaged_byte_is_an_error_or_a_result(tmp_path: Path, protocol: int) -> None:
    whole = pickle.dumps(small_snapshot(), protocol=protocol)
    path = tmp_path / "damaged.pickle"
    for position in range(len(whole)):
        for flip in (0x01, 0x20, 0xFF):
            damaged = bytearray(whole)
            damaged[position] ^= flip
            path.write_bytes(damaged)
            with contextlib.suppress(InputError):
                read_snapshot(path)


@pytest.mark.parametrize("protocol", range(6))
def test_reduce_is_not_executed(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "pwned"
    path = write(tmp_path / "evil.pickle", {"segments": [], "x": Call(str(marker))}, protocol)
    with pytest.raises(InputError, match="GLOBAL"):
        load_plain_pickle(path)
    assert not marker.exists()


HOSTILE = {
    "INST": b"(S'pwned'\niposix\nmkdir\n.",
    "GLOBAL": b"cposix\nmkdir\n(S'pwned'\ntR.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93\x8c\x05pwned\x85R.",
    "OBJ": b"(cposix\nmkdir\nS'pwned'\no.",
    "OBJ without a class": b"(S'posix.mkdir'\nS'pwned'\no.",
    "BUILD": b"}}b.",
    "EXT1": b"\x80\x02\x82\x01.",
    "EXT2": b"\x80\x02\x83\x01\x00.",
    "EXT4": b"\x80\x02\x84\x01\x00\x00\x00.",
    "PERSID": b"Pid\n.",
    "BINPERSID": b"\x80\x02X\x02\x00\x00\x00idQ.",
    "NEWOBJ": pickle.dumps(ByNewobj(), protocol=2),
    "NEWOBJ_EX": b"\x80\x04)})\x92.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "set": pickle.dumps({1, 2}, protocol=4),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_opcodes_that_import_or_call_are_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pickle"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(InputError, match="refused") as caught:
        load_plain_pickle(path)
    assert caught.value.offset is not None
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "pwned").exists()


def test_registered_extensions_are_refused(tmp_path: Path) -> None:
    copyreg.add_extension("os", "getcwd", 241)
    try:
        assert pickle.loads(b"\x80\x02\x82\xf1.") is os.getcwd  # from here on it is in the cache
        path = tmp_path / "extension.pickle"
        path.write_bytes(b"\x80\x02\x82\xf1.")
        with pytest.raises(InputError, match="EXT1"):
            load_plain_pickle(path)
    finally:
        copyreg.remove_extension("os", "getcwd", 241)
        copyreg.clear_extension_cache()


def test_persistent_ids_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "persistent.pickle"
    with path.open("wb") as file:
        ByPersistentId(file, protocol=4).dump({"segments": ["x"]})
    with pytest.raises(InputError, match="BINPERSID"):
        load_plain_pickle(path)


BOMBS = {
    "BINBYTES8": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
    "BYTEARRAY8": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b"x.",
    "BINUNICODE8": b"\x80\x04\x8d" + struct.pack("<Q", (1 << 64) - 1) + b"x.",
    "LONG4": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
    "LONG4 negative": b"\x80\x02\x8b" + struct.pack("<i", -1) + b"x.",
    "FRAME": b"\x80\x04\x95" + struct.pack("<Q", 1 << 50) + b"}.",
    "LONG_BINPUT": b"\x80\x02}r\xff\xff\xff\xff.",
    "PUT": b"(dp99999999999\n.",
    "long text": b"L" + b"9" * 100_000 + b"L\n.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_lengths_and_indices_beyond_the_file_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bomb.pickle"
    path.write_bytes(BOMBS[name])
    with pytest.raises(InputError):
        load_plain_pickle(path)


def test_deep_nesting_neither_overflows_nor_hangs(tmp_path: Path) -> None:
    path = tmp_path / "deep.pickle"
    path.write_bytes(b"\x80\x02}" + b")" + b"\x85" * 2_000_000 + b"Ns.")  # a deep tuple as a key is hashed
    with pytest.raises(InputError, match="nested tuples"):
        load_plain_pickle(path)
    path.write_bytes(b"\x80\x02}" + b")" + b"\x85" * 9_000 + b"Ns.")
    with pytest.raises(InputError, match="no 'segments' key"):
        read_snapshot(path)
    path.write_bytes(b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".")
    with pytest.raises(InputError, match="not a dict"):
        read_snapshot(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
        (b"<!DOCTYPE html><html></html>", "HTML"),
        (b'{"segments": []}', "JSON"),
        (b"hello world, this is a text file\n", "."),
        (b"\x1f\x8b\x08\x00rest", "gzip"),
        (b"PK\x03\x04rest", "zip"),
        (b"\x00\x01\x02", "no opcode"),
        (b"\x80\x63}.", "unsupported pickle protocol"),
    ],
)
def test_other_files_are_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "other.pickle"
    path.write_bytes(content)
    with pytest.raises(InputError, match=reason) as caught:
        load_plain_pickle(path)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder_are_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.pickle", tmp_path):
        with pytest.raises(InputError):
            load_plain_pickle(path)
