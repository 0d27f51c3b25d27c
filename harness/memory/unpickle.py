"""Reading a pickle of plain data from a stranger: nothing in it is ever called, imported or looked up.

Two lines of defence. `check_opcodes` walks the opcodes first and refuses, with its byte offset, every one that
could do more than build containers and scalars, and every length or memo index the file cannot back (the C
unpickler would allocate for it). Then the C unpickler loads the file with `find_class` and `persistent_load`
refusing. The walk costs about a second per 100 MB: runs of fixed-length opcodes are one regular expression.
"""

from __future__ import annotations

import copyreg
import io
import mmap
import pickle
import re
import zlib
from pathlib import Path
from typing import Any, NoReturn

from harness.errors import InputError
from harness.garbage import no_garbage_collection

# Opcodes that import, call, or reach outside the file.
REFUSED = {
    b"c": "GLOBAL",
    b"\x93": "STACK_GLOBAL",
    b"R": "REDUCE",
    b"b": "BUILD",
    b"i": "INST",
    b"o": "OBJ",
    b"\x81": "NEWOBJ",
    b"\x92": "NEWOBJ_EX",
    b"\x82": "EXT1",
    b"\x83": "EXT2",
    b"\x84": "EXT4",
    b"P": "PERSID",
    b"Q": "BINPERSID",
    b"\x97": "NEXT_BUFFER",
    b"\x98": "READONLY_BUFFER",
    # Harmless by themselves, but a snapshot holds no set, and hashing is where deep nesting overflows the C stack.
    b"\x8f": "EMPTY_SET",
    b"\x90": "ADDITEMS",
    b"\x91": "FROZENSET",
}

# A tuple of two or three numbers (a pool id) is the only tuple a snapshot holds; others are counted.
_LONG1 = rb"\x8a(?:" + b"|".join(rb"\x%02x.{%d}" % (length, length) for length in range(10)) + rb")"
_NUMBER = rb"(?:K.|M..|J....|N|\x88|\x89|I[^\n]{1,20}\n|" + _LONG1 + rb")"
_FLAT_TUPLE = rb"(?:\((?:" + _NUMBER + rb"){0,3}t|(?:" + _NUMBER + rb"){2}\x86)"
_FIXED = re.compile(
    rb"(?:" + _FLAT_TUPLE + rb"|[(012Nade}\[\]lsu)\x88\x89\x94]|[hqK\x80].|M..|[Jj]....|G.{8}|" + _NUMBER + rb")++",
    re.DOTALL,
)
_COUNTED = {  # opcode -> bytes of the length that follows it
    b"U": 1, b"C": 1, b"\x8c": 1, b"\x8a": 1,
    b"T": 4, b"B": 4, b"X": 4, b"\x8b": 4,
    b"\x8d": 8, b"\x8e": 8, b"\x96": 8,
}  # fmt: skip
_LINES = frozenset({b"I", b"L", b"F", b"S", b"V", b"g", b"p"})
_TUPLES = frozenset({b"t", b"\x85", b"\x86", b"\x87"})
_MAX_NESTED_TUPLES = 10_000
_MAX_LINE_BYTES = 1 << 20
MOST_EXPANSION = 300
"""How many times its size a compressed snapshot may have been; real ones shrink by 20."""

# What the C unpickler raises on data that is damaged or hostile.
_LOAD_ERRORS = (
    pickle.PickleError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"refuses to import {module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("refuses a persistent id")


def load_plain_pickle(path: Path) -> Any:
    """The object in `path`: dicts, lists, tuples, strings, bytes, numbers, None and nothing else.

    Protocols 0 to 5, as they are or as gzip. Raises InputError (one line, with the byte offset where there is one)
    when the file cannot be opened, is empty, is no pickle, ends early, expands beyond `MOST_EXPANSION`, or holds
    anything that would import, call or look up.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise InputError(path, "empty file", 0)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                plain = _expanded(path, data) if data[:2] == b"\x1f\x8b" else None
                check_opcodes(path, data if plain is None else plain)
            # Codes registered in this process would be taken from the cache without asking find_class.
            copyreg.clear_extension_cache()
            with no_garbage_collection():
                return _PlainUnpickler(file if plain is None else io.BytesIO(plain)).load()
    except OSError as error:
        raise InputError(path, error.strerror or type(error).__name__) from error
    except _LOAD_ERRORS as error:
        detail = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(path, f"not a readable pickle: {detail}") from error


def _expanded(path: Path, data: mmap.mmap) -> bytes:
    """The content of gzip `data`; raises InputError for damaged data, and for more than a snapshot can have shrunk."""
    reader, most = zlib.decompressobj(wbits=31), MOST_EXPANSION * len(data)
    try:
        plain = reader.decompress(data, most)
    except zlib.error as error:
        raise InputError(path, f"is damaged gzip ({error})", 0) from error
    if not reader.eof:
        what = "expands to more than a snapshot does" if len(plain) >= most else "is gzip that ends early"
        raise InputError(path, f"{what} ({len(plain)} bytes so far)", len(data))
    return plain


def check_opcodes(path: Path, data: mmap.mmap | bytes) -> None:
    """Walks `data` up to its STOP opcode; raises InputError with the offset at the first opcode that is refused,
    unknown, cut off, or claims a length or memo index beyond the size of the file."""
    size = len(data)
    if text := _other_format(bytes(data[:64])):
        raise InputError(path, f"not a pickle: {text}", 0)
    position = 0
    nested_tuples = 0
    while True:
        if run := _FIXED.match(data, position):
            position = run.end()
        if position >= size:
            raise InputError(path, "pickle ends early: no STOP opcode", size)
        opcode = data[position : position + 1]
        if opcode == b".":
            return
        if opcode in REFUSED:
            raise InputError(path, f"refused: pickle opcode {REFUSED[opcode]}{_target(data, position)}", position)
        if opcode in _COUNTED:
            width = _COUNTED[opcode]
            start = position + 1 + width
            end = start + int.from_bytes(data[position + 1 : start], "little")
        elif opcode in _LINES:
            end = data.find(b"\n", position, position + _MAX_LINE_BYTES) + 1 or size + 1
            if opcode == b"p" and end <= size:
                _check_memo_index(path, data[position + 1 : end - 1], position, size)
        elif opcode == b"r":
            end = position + 5
            _check_memo_index(path, b"%d" % int.from_bytes(data[position + 1 : end], "little"), position, size)
        elif opcode == b"\x95":  # FRAME: its content follows as ordinary opcodes
            end = position + 9
            if end + int.from_bytes(data[position + 1 : end], "little") > size:
                raise InputError(path, "pickle ends early: a frame runs past the end of the file", size)
        elif opcode in _TUPLES:
            end = position + 1
            nested_tuples += 1
            if nested_tuples > _MAX_NESTED_TUPLES:
                raise InputError(path, "refused: more nested tuples than any snapshot holds", position)
        elif opcode in b"hqKMJjG\x80":
            end = size + 1  # a fixed-length opcode the run did not take has lost its argument
        else:
            raise InputError(path, _not_a_pickle(data, position, opcode), position)
        if end > size:
            hint = f" ({text})" if (text := _looks_like(bytes(data[:512]))) else ""
            raise InputError(path, f"pickle ends early inside an opcode{hint}", size)
        position = end


def _check_memo_index(path: Path, digits: bytes, position: int, size: int) -> None:
    # The unpickler sizes its memo by the largest index; a file of n bytes cannot have memoised n objects.
    if not digits.isdigit() or len(digits) > 18 or int(digits) >= size:
        raise InputError(path, "refused: memo index larger than the file", position)


def _target(data: mmap.mmap | bytes, position: int) -> str:
    if data[position : position + 1] not in b"ci":
        return ""
    words = bytes(data[position + 1 : position + 200]).split(b"\n")[:2]
    return f" ({'.'.join(word.decode('ascii', 'replace') for word in words)})" if len(words) == 2 else ""


def _not_a_pickle(data: mmap.mmap | bytes, position: int, opcode: bytes) -> str:
    what = f"not a pickle: byte 0x{opcode[0]:02x} is no opcode"
    return f"{what} ({text})" if (text := _looks_like(bytes(data[:512]))) else what


def _other_format(head: bytes) -> str:
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer; fetch the file itself"
    if head.startswith(b"\x1f\x8b"):
        return "gzip data; decompress it first"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive, as torch.save writes"
    if head.lstrip()[:1] in (b"<", b"{"):
        return "HTML or JSON text"
    return ""


def _looks_like(head: bytes) -> str:
    if head.isascii() and head.decode("ascii").translate({9: None, 10: None, 13: None}).isprintable():
        return "plain text"
    return ""
