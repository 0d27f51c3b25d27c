"""Samples: the same for every layout, resumable anywhere, and bad files said in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness.config import Data, Decoder, Trainer, Training
from harness.errors import InputError, UsageError
from harness.trainer.data import BOS, EOS, Batches, SyntheticSamples, TextSamples, build_batches
from harness.trainer.loss import IGNORE_INDEX
from harness.validation import validate, validate_inputs

DOCUMENTS = ["abc", "", "größer", "x" * 40, "the end"]
STREAM = [token for text in DOCUMENTS for token in (BOS, *text.encode(), EOS)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "documents.jsonl"
    lines = [json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(DOCUMENTS)]
    file.write_text("\n" + "\n \r\n".join(lines), encoding="utf-8")  # blank lines, no end of the last one
    return file


@pytest.fixture
def text(path):
    samples = TextSamples(path, seq_len=8)
    yield samples
    samples.close()


def synthetic(**changes) -> SyntheticSamples:
    options = {"seed": 1, "seq_len": 32, "vocab_size": 50}
    return SyntheticSamples(Data.Config(ignored_share=0.4), **(options | changes))


def configuration(path: Path, *, micro_batch_size: int, accumulation_steps: int) -> Trainer.Config:
    return Trainer.Config(
        training=Training.Config(seq_len=8, micro_batch_size=micro_batch_size, accumulation_steps=accumulation_steps),
        data=Data.Config(dataset="text", path=str(path)),
    )


def steps_of(path: Path, layout: tuple[int, int, int], count: int, state=None) -> tuple[list[torch.Tensor], dict]:
    """The global batch of each step, put together from its ranks' micro-batches, and the state after them."""
    dp_size, accumulation_steps, micro_batch_size = layout
    config = configuration(path, micro_batch_size=micro_batch_size, accumulation_steps=accumulation_steps)
    ranks = [build_batches(config, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    for rank in ranks:
        if state is not None:
            rank.load_state_dict(state)
    steps = [
        torch.cat([torch.stack(rank.next_batch(), dim=-1) for rank in ranks for _ in range(accumulation_steps)])
        for _ in range(count)
    ]
    states = [rank.state_dict() for rank in ranks]
    assert all(other == states[0] for other in states)
    for rank in ranks:
        rank.close()
    return steps, states[0]


def test_text_is_packed_in_file_order_and_repeated(text):
    tokens, labels = text.take(40)
    assert tokens.dtype == labels.dtype == torch.int64
    assert tokens.shape == labels.shape == (40, 8)
    repeated = STREAM * (40 * 8 // len(STREAM) + 2)
    assert tokens.flatten().tolist() == repeated[:320]
    assert labels.flatten().tolist() == repeated[1:321], "neighbours share one token, across documents and epochs too"


LAYOUTS = [(1, 1, 12), (2, 2, 3), (4, 3, 1), (3, 1, 4)]


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_the_global_batch_does_not_depend_on_the_layout(path, layout):
    expected, state = steps_of(path, LAYOUTS[0], 3)
    found, other = steps_of(path, layout, 3)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert other == state


@pytest.mark.parametrize("done", range(6))
@pytest.mark.parametrize("layout", [(1, 1, 12), (4, 3, 1)])
def test_text_goes_on_where_it_was_on_any_layout(path, layout, done):
    expected, end = steps_of(path, (2, 2, 3), 6)
    _, state = steps_of(path, (2, 2, 3), done)
    rest, other_end = steps_of(path, layout, 6 - done, json.loads(json.dumps(state)))
    assert len(rest) == 6 - done
    assert all(torch.equal(a, b) for a, b in zip(expected[done:], rest, strict=True))
    assert other_end == end
    assert len(json.dumps(end)) < 200, "a position, not what lies between positions"


def test_a_state_is_taken_between_steps(text):
    batches = Batches(text, dp_rank=0, dp_size=1, accumulation_steps=2, micro_batch_size=1)
    batches.next_batch()
    with pytest.raises(RuntimeError, match="1 of the 2 micro-batches of a step were taken"):
        batches.state_dict()
    batches.next_batch()
    assert batches.state_dict()["sample"] == 2


def test_synthetic_samples_do_not_depend_on_how_they_are_split():
    tokens, labels = synthetic().take(4)
    halves = synthetic()
    for half in range(2):
        part_tokens, part_labels = halves.take(2)
        assert torch.equal(part_tokens, tokens[2 * half : 2 * half + 2])
        assert torch.equal(part_labels, labels[2 * half : 2 * half + 2])
    resumed = synthetic()
    resumed.load_state_dict({"dataset": "synthetic", "sample": 3})
    assert torch.equal(resumed.take(1)[0], tokens[3:])
    assert not torch.equal(tokens[0], tokens[1])
    assert not torch.equal(synthetic(seed=2).take(4)[0], tokens)
    synthetic(seed=20_301_231_235_959).take(1)


def test_synthetic_labels_are_the_next_tokens_or_ignored():
    tokens, labels = synthetic().take(16)
    kept = labels != IGNORE_INDEX
    assert torch.equal(labels[:, :-1][kept[:, :-1]], tokens[:, 1:][kept[:, :-1]])
    assert 0.3 < 1 - kept.float().mean() < 0.5
    assert kept.any(dim=1).all()
    assert len(set(kept.sum(dim=1).tolist())) > 1, "valid-token counts must differ between samples"
    assert tokens.min() >= 0
    assert tokens.max() < 50


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "line 3 is not JSON: Input data was truncated"),
        (b"plain words", "line 3 is not JSON: JSON is malformed"),
        (b'{"text": "\xff"}', "line 3 is not JSON: Invalid UTF-8"),
        (b'{"text": "\\ud800"}', "line 3 is not JSON"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "line 3 is nested too deeply to be read"),
        (b'{"txt": "a"}', "line 3 is no JSON object with a string `text`: Object missing required field `text`"),
        (b'{"text": 7}', "line 3 is no JSON object with a string `text`: Expected `str`, got `int`"),
        (b'["a"]', "line 3 is no JSON object with a string `text`: Expected `object`, got `array`"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, reason):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    samples = TextSamples(file, seq_len=8)
    with pytest.raises(InputError) as caught:
        samples.take(10)
    samples.close()
    assert str(caught.value).startswith(f"{file}: {reason}")
    assert "\n" not in str(caught.value)


def test_a_file_without_documents_is_refused(tmp_path):
    file = tmp_path / "blank.jsonl"
    file.write_text("\n \n\n")
    with pytest.raises(InputError, match=r"blank\.jsonl: holds no document"):
        TextSamples(file, seq_len=8)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        TextSamples(tmp_path / "none.jsonl", seq_len=8)


def test_files_are_checked_before_anything_starts(tmp_path, path):
    validate_inputs(configuration(path, micro_batch_size=1, accumulation_steps=1))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for wrong, reason in {
        tmp_path / "none.jsonl": r"data\.path=.*none\.jsonl: there is no such file \(seen from ",
        tmp_path: "is not a file",
        empty: r"empty\.jsonl is empty",
    }.items():
        with pytest.raises(UsageError, match=reason):
            validate_inputs(configuration(wrong, micro_batch_size=1, accumulation_steps=1))
    with pytest.raises(UsageError, match=r"needs --data\.path FILE"):
        validate_inputs(Trainer.Config(data=Data.Config(dataset="text")))
    with pytest.raises(UsageError, match=r"model\.vocab_size=256 must be at least 258 for data\.dataset=text"):
        validate(Trainer.Config(data=Data.Config(dataset="text"), model=Decoder.Config(vocab_size=256)))


def test_the_state_of_other_data_is_refused(text, path):
    state = text.state_dict()
    with pytest.raises(UsageError, match=r"data\.dataset=synthetic, the checkpoint was trained on text"):
        synthetic().load_state_dict(state)
    with pytest.raises(UsageError, match=r"data\.dataset=text, the checkpoint was trained on synthetic"):
        text.load_state_dict(synthetic().state_dict())
    with pytest.raises(UsageError, match=r"has \d+ bytes, the file that the checkpoint was trained on had 9"):
        text.load_state_dict(state | {"file_bytes": 9})
