"""Training samples by number: the same ones for every layout, and a position to go on from.

Optimizer step s of D data-parallel ranks, n micro-batches and B sequences takes samples s·D·n·B … (s+1)·D·n·B - 1;
rank r's micro-batch m holds those from s·D·n·B + (r·n + m)·B on. So the samples of a step are the same however
D, n and B split them. The micro-batches of one pass of a pipeline are taken as one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from harness import config
from harness.errors import InputError, UsageError
from harness.trainer.loss import IGNORE_INDEX
from harness.validation import TEXT_TOKENS

Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels, int64 [sequences, seq_len] on the CPU; a label is the token after, or `IGNORE_INDEX`."""


class Samples(Protocol):
    """Samples in order. A state is of plain JSON values."""

    def take(self, count: int) -> Batch: ...

    def skip(self, count: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Batches:
    """The micro-batches of one data-parallel rank, one after the other.

    Every rank goes through all samples, so that between two optimizer steps all have the same state, and a run on
    another layout can go on from it.
    """

    def __init__(
        self, samples: Samples, *, dp_rank: int, dp_size: int, accumulation_steps: int, micro_batch_size: int
    ) -> None:
        self._samples = samples
        self._size = micro_batch_size
        self._per_step = accumulation_steps
        self._before = dp_rank * accumulation_steps * micro_batch_size
        self._after = (dp_size - dp_rank - 1) * accumulation_steps * micro_batch_size
        self._micro_batch = 0

    def next_batch(self) -> Batch:
        if self._micro_batch == 0:
            self._samples.skip(self._before)
        batch = self._samples.take(self._size)
        self._micro_batch += 1
        if self._micro_batch == self._per_step:
            self._samples.skip(self._after)
            self._micro_batch = 0
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the next optimizer step begins; RuntimeError within one, when ranks stand at different samples."""
        if self._micro_batch:
            raise RuntimeError(f"{self._micro_batch} of the {self._per_step} micro-batches of a step were taken")
        return self._samples.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `UsageError` for the state of another data set."""
        self._samples.load_state_dict(state)
        self._micro_batch = 0

    def close(self) -> None:
        self._samples.close()


def build_batches(config: config.Trainer.Config, *, dp_rank: int, dp_size: int) -> Batches:
    """`config.data` for one of `dp_size` data-parallel ranks; raises `InputError` if its file cannot be opened."""
    training, data = config.training, config.data
    samples: Samples
    if data.dataset == "text":
        assert data.path is not None, "refused by harness.validation.validate_inputs"
        samples = TextSamples(Path(data.path), seq_len=training.seq_len)
    else:
        samples = SyntheticSamples(
            data, seed=training.seed, seq_len=training.seq_len, vocab_size=config.model.vocab_size
        )
    return Batches(
        samples,
        dp_rank=dp_rank,
        dp_size=dp_size,
        accumulation_steps=training.accumulation_steps,
        micro_batch_size=training.micro_batch_size * config.pipeline_micro_batches,
    )


class SyntheticSamples:
    """Walks with one stride through the vocabulary, so that the next token follows from the last two.

    A sample depends on the seed and its number only. `config.ignored_share` of the labels, a different number in
    every sample, is `IGNORE_INDEX`.
    """

    def __init__(self, config: config.Data.Config, *, seed: int, seq_len: int, vocab_size: int) -> None:
        self._ignored_share = config.ignored_share
        self._seed = seed
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._number = 0

    def take(self, count: int) -> Batch:
        rows = [self._sample(number) for number in range(self._number, self._number + count)]
        self._number += count
        tokens, labels = (torch.stack(part) for part in zip(*rows, strict=True))
        return tokens[:, :-1].contiguous(), labels[:, 1:].contiguous()

    def _sample(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed((self._seed * 1_000_003_000_003 + number) % (1 << 63))
        start = torch.randint(self._vocab_size, (), generator=generator)
        stride = torch.randint(1, min(17, self._vocab_size), (), generator=generator)
        walk = (start + stride * torch.arange(self._seq_len + 1)) % self._vocab_size
        labels = walk
        if self._ignored_share:
            share = 2 * self._ignored_share * torch.rand((), generator=generator)
            drop = torch.rand(self._seq_len + 1, generator=generator) < share
            drop[1] = False  # one label that always counts
            labels = walk.masked_fill(drop, IGNORE_INDEX)
        return walk, labels

    def skip(self, count: int) -> None:
        self._number += count

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": "synthetic", "sample": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _require_dataset(state, "synthetic")
        self._number = state["sample"]

    def close(self) -> None:
        """There is nothing open."""


BOS, EOS = range(256, TEXT_TOKENS)
"""Tokens before and after every document; those below are the bytes of its UTF-8."""


class _Line(msgspec.Struct):
    text: str


class TextSamples:
    """The documents of a file with one JSON object per line, byte by byte, packed without padding.

    The stream of tokens is BOS, bytes, EOS of every document in file order, over and over; sample k is its tokens
    k·seq_len … (k+1)·seq_len, so that neighbours share one token. Labels across a document's end count. One
    document is held at a time. Its position in the file and the token within it are the whole state.

    Raises `InputError` with the line number for a line that is no such object (blank ones are skipped), and for a
    file that cannot be read or holds no document.
    """

    def __init__(self, path: Path, *, seq_len: int) -> None:
        self._path = path
        self._seq_len = seq_len
        self._number = 0
        self._epoch = 0
        self._line = 0
        """Lines read in this epoch; the last of them is the open document's, and starts at `_offset`."""
        self._offset = 0
        self._document = array("H")
        self._token = 0
        """How many of the document's tokens are used up: always fewer than it has."""
        try:
            self._file = open(path, "rb")  # noqa: SIM115, until `close`
            self._file_bytes = path.stat().st_size
        except OSError as error:
            raise InputError(path, f"cannot be read: {error.strerror}") from None
        try:
            self._next_document()
        except InputError:
            self._file.close()
            raise

    def take(self, count: int) -> Batch:
        tokens = array("H")
        for piece in self._advance(count):
            tokens.extend(piece)
        tokens.append(self._document[self._token])  # of the next sample: its first input, our last label
        stream = torch.frombuffer(tokens, dtype=torch.uint16).to(torch.int64)
        return stream[:-1].view(count, -1), stream[1:].view(count, -1)

    def skip(self, count: int) -> None:
        for _ in self._advance(count):
            continue

    def _advance(self, count: int) -> Iterator[array[int]]:
        """The tokens of `count` samples, in pieces of documents, as they are used up."""
        left = count * self._seq_len
        while left:
            piece = self._document[self._token : self._token + left]
            left -= len(piece)
            self._token += len(piece)
            if self._token == len(self._document):
                self._next_document()
            yield piece
        self._number += count

    def _next_document(self) -> None:
        wrapped = False
        while True:
            self._offset = self._file.tell()
            raw = self._file.readline()
            self._line += 1
            if raw.strip():
                break
            if not raw:
                if wrapped:
                    raise InputError(self._path, "holds no document")
                wrapped = True
                self._epoch += 1
                self._line = 0
                self._file.seek(0)
        self._document = array("H", (BOS, *self._decode(raw), EOS))
        self._token = 0

    def _decode(self, raw: bytes) -> bytes:
        try:
            return msgspec.json.decode(raw, type=_Line).text.encode()
        except msgspec.ValidationError as error:
            reason = f"is no JSON object with a string `text`: {error}"
        except msgspec.DecodeError as error:
            reason = f"is not JSON: {error}"
        except RecursionError:
            reason = "is nested too deeply to be read"
        raise InputError(self._path, f"line {self._line} {reason}")

    def state_dict(self) -> dict[str, Any]:
        return {
            "dataset": "text",
            "sample": self._number,
            "epoch": self._epoch,
            "line": self._line,
            "offset": self._offset,
            "token": self._token,
            "file_bytes": self._file_bytes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _require_dataset(state, "text")
        if state["file_bytes"] != self._file_bytes:
            raise UsageError(
                f"data.path={self._path} has {self._file_bytes:,} bytes, the file that the checkpoint was trained on "
                f"had {state['file_bytes']:,}: go on with that file"
            )
        self._number, self._epoch = state["sample"], state["epoch"]
        self._line = state["line"] - 1
        self._file.seek(state["offset"])
        self._next_document()
        self._token = state["token"]

    def close(self) -> None:
        self._file.close()


def _require_dataset(state: dict[str, Any], dataset: str) -> None:
    if state["dataset"] != dataset:
        raise UsageError(
            f"data.dataset={dataset}, the checkpoint was trained on {state['dataset']}: go on with that data set"
        )
