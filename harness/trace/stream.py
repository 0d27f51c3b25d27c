"""Chrome traces as a stream of typed events: any size in bounded memory, plain or gzip by content.

The events of a trace lie in one long JSON list. The text is cut where one event ends and the next begins, and each
piece is decoded on its own; a piece that does not decode was cut in a wrong place (a cut inside a string or a nested
value always leaves something open), so another cut is tried. What remains at the end of the file, with any keys after
the list, is decoded as a document.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from harness.errors import InputError
from harness.sources import GZIP_MAGIC, UTF8_BOM, reason_of

BLOCK_BYTES = 1 << 20
CHUNK_BYTES = 4 << 20
CUT_WINDOW_BYTES = 1 << 16
CUTS_TRIED = 6

LIST_START = re.compile(rb'"traceEvents"\s*:\s*\[')
EVENT_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
BYTE_IN_MESSAGE = re.compile(r"\(byte (\d+)\)")
# A JSON string, or one of the number-like words that C++ and Python print and JSON does not have.
STRING_OR_WORD = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|-?\b(?:inf|infinity|nan)\b', re.IGNORECASE | re.DOTALL)
ESCAPE = re.compile(rb'\\(u[0-9a-fA-F]{4}|["\\/bfnrt])|\\')
CONTROL_CHARACTER = re.compile(rb"[\x00-\x1f]")

T = TypeVar("T", bound=msgspec.Struct)


class Document(msgspec.Struct, Generic[T]):
    """The top level of a trace; every other key is skipped."""

    traceEvents: list[T]  # noqa: N815 - the format's own name
    baseTimeNanoseconds: Any = None  # noqa: N815
    distributedInfo: Any = None  # noqa: N815


class EventStream(Generic[T]):
    """Iterates over a trace's events in lists of type `event_type`; `header` is whole only after the last.

    Raises InputError with the byte at which the data ends or stops being JSON. `repaired` counts what was read
    although it is not JSON (non-finite numbers as null, strings with illegal escapes), `dropped` what was not read.
    """

    def __init__(self, path: Path, event_type: type[T]) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.repaired: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._event_type = event_type
        self._events = msgspec.json.Decoder(list[event_type])  # type: ignore[valid-type]
        self._event = msgspec.json.Decoder(event_type)
        self._document = msgspec.json.Decoder(Document[event_type])  # type: ignore[valid-type]
        self._text = TextReader(path)

    def __iter__(self) -> Iterator[list[T]]:
        try:
            yield from self._batches()
        except RecursionError as error:
            raise InputError(self.path, "is nested too deeply to be a trace") from error
        except OSError as error:
            raise InputError(self.path, reason_of(error)) from error
        finally:
            self._text.close()

    def _batches(self) -> Iterator[list[T]]:
        buffer = bytearray()
        start = self._find_list(buffer)
        if start is None:
            yield self._whole(buffer)
            return
        opening, position = start
        del buffer[:position]
        wanted = CHUNK_BYTES
        while True:
            while len(buffer) < wanted and (block := self._text.read()):
                buffer += block
            if len(buffer) < wanted:
                yield self._rest(buffer, position, opening)
                return
            piece = self._piece(buffer, position)
            if piece is None:
                wanted *= 2
                continue
            events, consumed = piece
            del buffer[:consumed]
            position += consumed
            wanted = CHUNK_BYTES
            yield events

    def _find_list(self, buffer: bytearray) -> tuple[bytes, int] | None:
        """Fills `buffer` up to the event list; (what stands for the opening, where the first event begins)."""
        while block := self._text.read():
            searched = len(buffer)
            buffer += block
            if not searched:
                skipped = len(UTF8_BOM) if buffer.startswith(UTF8_BOM) else 0
                if buffer[skipped:].lstrip().startswith(b"["):
                    return b"", buffer.index(b"[", skipped) + 1
            match = LIST_START.search(buffer, max(0, searched - 64))
            if match is None:
                continue
            try:
                head = msgspec.json.decode(bytes(buffer[: match.end()]).removeprefix(UTF8_BOM) + b"]}")
            except msgspec.DecodeError:
                continue  # inside a string or a nested object
            self.header |= {key: value for key, value in head.items() if key != "traceEvents"}
            return b'{"traceEvents":[', match.end()
        return None

    def _piece(self, buffer: bytearray, position: int) -> tuple[list[T], int] | None:
        """The events up to a boundary near the end of `buffer` and the bytes they took; None: read on."""
        window = max(0, len(buffer) - CUT_WINDOW_BYTES)
        cuts = [match.span() for match in EVENT_BOUNDARY.finditer(buffer, window)]
        for cut, after in list(reversed(cuts))[:CUTS_TRIED]:
            text = b"[" + bytes(buffer[: cut + 1]) + b"]"
            try:
                return self._decode(text), after
            except msgspec.DecodeError as error:
                if "trailing" in str(error):
                    return None  # the list ends in here: what follows is the rest of the document
                place = BYTE_IN_MESSAGE.search(str(error))
                cut_wrongly = place is None or int(place[1]) >= len(text) - 1
                if cut_wrongly and "UTF-8" not in str(error):
                    continue
                return self._decode_repaired(text, position - 1), after
        return None

    def _rest(self, buffer: bytearray, position: int, opening: bytes) -> list[T]:
        prefix = opening or b'{"traceEvents":['
        text = prefix + bytes(buffer) + (b"" if opening else b"}")
        try:
            document = self._decode_document(text)
        except msgspec.DecodeError:
            document = self._decode_document_repaired(text, position - len(prefix))
        self._keep_header(document)
        return document.traceEvents

    def _whole(self, buffer: bytearray) -> list[T]:
        """A file in which no event list was found on the way: says what it is, or decodes it at once."""
        text = bytes(buffer).removeprefix(UTF8_BOM)
        skipped = len(buffer) - len(text)
        try:
            top = msgspec.json.decode(text)
        except msgspec.DecodeError:
            text, self.repaired = self._repair(text)
            try:
                top = msgspec.json.decode(text)
            except msgspec.DecodeError as error:
                raise self._not_json(error, skipped) from error
        events = top.get("traceEvents") if isinstance(top, dict) else None
        if isinstance(events, list):
            document = self._decode_document(text)
            self._keep_header(document)
            return document.traceEvents
        if isinstance(top, dict) and "traceEvents" in top:
            raise InputError(self.path, f"traceEvents is {json_type(events)}, not a list: no events")
        raise InputError(self.path, f"has no traceEvents ({json_type(top)} of {len(text)} bytes)")

    def _keep_header(self, document: Document[T]) -> None:
        after = {"baseTimeNanoseconds": document.baseTimeNanoseconds, "distributedInfo": document.distributedInfo}
        self.header |= {key: value for key, value in after.items() if value is not None}

    def _decode(self, text: bytes) -> list[T]:
        try:
            return self._events.decode(text)
        except msgspec.ValidationError:
            return self._one_by_one(msgspec.json.decode(text, type=list[msgspec.Raw]))

    def _decode_repaired(self, text: bytes, position: int) -> list[T]:
        repaired, counts = self._repair(text)
        try:
            events = self._decode(repaired)
        except msgspec.DecodeError as error:
            raise self._not_json(error, position) from error
        self.repaired.update(counts)
        return events

    def _decode_document(self, text: bytes) -> Document[T]:
        try:
            return self._document.decode(text)
        except msgspec.ValidationError:
            raw = msgspec.json.decode(text, type=RawDocument)
            return Document(self._one_by_one(raw.traceEvents), raw.baseTimeNanoseconds, raw.distributedInfo)

    def _decode_document_repaired(self, text: bytes, position: int) -> Document[T]:
        repaired, counts = self._repair(text)
        try:
            document = self._decode_document(repaired)
        except msgspec.DecodeError as error:
            raise self._not_json(error, position) from error
        self.repaired.update(counts)
        return document

    def _one_by_one(self, texts: list[msgspec.Raw]) -> list[T]:
        """Events of which one has a value of an unexpected type: only that value is left out."""
        events = []
        for text in texts:
            try:
                events.append(self._event.decode(text))
            except msgspec.ValidationError:
                try:
                    value = json.loads(bytes(text).decode("utf-8", "replace"))
                except ValueError:  # an integer of thousands of digits
                    self.dropped["unreadable number"] += 1
                    continue
                if isinstance(value, dict):
                    events.append(relaxed(value, self._event_type))
                else:
                    self.dropped["event is not an object"] += 1
        return events

    def _repair(self, text: bytes) -> tuple[bytes, Counter[str]]:
        """`text` with what JSON does not allow but tracers write made legal, and how often that was done."""
        counts: Counter[str] = Counter()

        def legal(match: re.Match[bytes]) -> bytes:
            token = match[0]
            if not token.startswith(b'"'):
                counts["inf or nan read as null"] += 1
                return b"null"
            fixed = CONTROL_CHARACTER.sub(b" ", ESCAPE.sub(lambda e: e[0] if e[1] else b"\\\\", token))
            fixed = fixed.decode("utf-8", "replace").encode()
            counts["string with illegal characters"] += fixed != token
            return fixed

        return STRING_OR_WORD.sub(legal, text), +counts

    def _not_json(self, error: msgspec.DecodeError, position: int) -> InputError:
        place = BYTE_IN_MESSAGE.search(str(error))
        what = BYTE_IN_MESSAGE.sub("", str(error)).strip().removeprefix("JSON is malformed: ")
        ends_early = "truncated" in what
        offset = self._text.position if ends_early or place is None else position + int(place[1])
        reason = "the text ends early (truncated JSON)" if ends_early else f"is not JSON: {what}"
        if self._text.compressed:
            return InputError(self.path, f"{reason}, byte {offset} of the decompressed text")
        return InputError(self.path, reason, offset)


class RawDocument(msgspec.Struct):
    traceEvents: list[msgspec.Raw]  # noqa: N815
    baseTimeNanoseconds: Any = None  # noqa: N815
    distributedInfo: Any = None  # noqa: N815


class TextReader:
    """The text of a plain or gzip file in blocks. `position` counts the bytes of text given out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        try:
            self._file = path.open("rb")
            self.compressed = self._file.read(2) == GZIP_MAGIC
            self._file.seek(0)
        except OSError as error:
            raise InputError(path, reason_of(error)) from error
        self._inflate = zlib.decompressobj(wbits=31)
        self._pending = b""

    def read(self) -> bytes:
        """The next block, empty at the end. Raises InputError at the stored byte where gzip data ends or breaks."""
        text = self._inflated() if self.compressed else self._file.read(BLOCK_BYTES)
        self.position += len(text)
        return text

    def close(self) -> None:
        self._file.close()

    def _inflated(self) -> bytes:
        while True:
            if self._inflate.eof:
                # Members may follow one another; zero padding and what else may follow is no data.
                rest = self._inflate.unused_data + self._file.read(BLOCK_BYTES)
                if not rest.startswith(GZIP_MAGIC):
                    return b""
                self._inflate, self._pending = zlib.decompressobj(wbits=31), rest
            data = self._pending or self._file.read(BLOCK_BYTES)
            if not data:
                raise InputError(self.path, "compressed data ends early (truncated gzip)", self._file.tell())
            try:
                text = self._inflate.decompress(data, BLOCK_BYTES)
            except zlib.error as error:
                raise InputError(self.path, f"is damaged gzip ({error})", self._file.tell() - len(data)) from error
            self._pending = self._inflate.unconsumed_tail
            if text:
                return text


def relaxed(value: dict[str, Any], struct: type[T]) -> T:
    """`value` as a struct, every field of an unexpected type left at its default."""
    fields = {}
    for info in msgspec.structs.fields(struct):
        if info.encode_name not in value:
            continue
        given = value[info.encode_name]
        try:
            fields[info.name] = msgspec.convert(given, info.type)
        except msgspec.ValidationError:
            nested = struct_in(info.type)
            if nested is not None and isinstance(given, dict):
                fields[info.name] = relaxed(given, nested)
    return struct(**fields)


def struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    """The struct among the members of a union."""
    members = getattr(annotation, "__args__", (annotation,))
    return next((m for m in members if isinstance(m, type) and issubclass(m, msgspec.Struct)), None)


def json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
    return names.get(type(value), "a number")
