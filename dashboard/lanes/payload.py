"""Header and arrays as the bytes that `assets/payload.js` reads: a u32 length, the header as JSON, then the arrays."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

LIMIT_BYTES = 1_000_000
ALIGNED = 8
TYPES = {"u1": np.uint8, "u2": np.uint16, "i4": np.int32, "f8": np.float64}


class Arrays:
    """Arrays in the order they are added; `add` returns the reference to put into the header."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.length = 0

    def add(self, values: NDArray[Any]) -> list[Any]:
        """[type, offset in bytes, count]. Raises KeyError for a type that the browser is not told of."""
        code = next(code for code, kind in TYPES.items() if values.dtype == kind)
        data = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes()
        reference = [code, self.length, len(values)]
        data += b"\0" * (-len(data) % ALIGNED)
        self.pieces.append(data)
        self.length += len(data)
        return reference


def pack(header: dict[str, Any], arrays: Arrays) -> bytes:
    text = msgspec.json.encode(header)
    start = struct.pack("<I", len(text)) + text
    return b"".join([start, b"\0" * (-len(start) % ALIGNED), *arrays.pieces])


def unpack(data: bytes) -> tuple[dict[str, Any], Any]:
    """The header and a function from a reference to its array, as the browser reads them."""
    (length,) = struct.unpack_from("<I", data)
    first = -(-(4 + length) // ALIGNED) * ALIGNED

    def array(reference: list[Any]) -> NDArray[Any]:
        code, offset, count = reference
        return np.frombuffer(data, TYPES[code], count, first + offset)

    return msgspec.json.decode(data[4 : 4 + length]), array


def shares(part_ns: NDArray[Any], width_ns: NDArray[Any]) -> NDArray[np.uint16]:
    """Shares of columns as sixteen bits: 0 only for nothing at all, 65535 only for everything."""
    scaled = np.floor(part_ns / width_ns * 65535)
    return np.where(part_ns > 0, np.maximum(scaled, 1), 0).astype(np.uint16)
