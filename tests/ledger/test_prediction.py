"""Identities known in closed form, formulas that give their own numbers, the JSON contract, and no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from math import prod
from typing import Literal

import pytest

from harness.allocator import Allocator, Settings
from harness.config import Decoder, Parallelism, Trainer, Training
from harness.errors import UsageError
from harness.ledger import Prediction, predict
from harness.ledger.communication import collectives
from harness.ledger.operators import Target
from harness.ledger.sizes import Quantities
from harness.ledger.tape import ALL_GATHER, COMPUTE, Tape, of_root
from harness.ledger.text import report

LLAMA_8B = Decoder.Config(vocab_size=128_256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336)


def run_of(dp_shard: int, tp: int, *, n_layers: int = 32, seq_len: int = 2048) -> Trainer.Config:
    model = Decoder.Config(vocab_size=128_256, dim=4096, n_layers=n_layers, n_heads=32, n_kv_heads=8, ffn_dim=14_336)
    return Trainer.Config(
        world_size=dp_shard * tp,
        model=model,
        parallelism=Parallelism.Config(dp_shard=dp_shard, tp=tp),
        training=Training.Config(micro_batch_size=1, seq_len=seq_len),
    )


def activation_bytes(config: Trainer.Config) -> int:
    """Held for backward when the loss is computed."""
    (loss,) = [i for i in predict(config, "cuda").ranks[0].timeline if i.name == "forward: loss"]
    return sum(size for category, size in loss.categories.items() if category.startswith("activations"))


@pytest.mark.parametrize(("tp", "expected"), [(1, 168_072), (2, 92_228), (4, 54_306), (8, 35_345)])
def test_activations_of_a_layer(tp: int, expected: int) -> None:
    """Bytes per token of one Llama-3-8B layer, no checkpointing, sequence parallel: 12d+4kv+8f+4H+8, and
    4d+(8d+4kv+8f+4H+8)/t (both counted with DTensor and a storage tracker, bfloat16)."""
    more, less = run_of(2, tp, n_layers=5), run_of(2, tp, n_layers=4)
    assert (activation_bytes(more) - activation_bytes(less)) / 2048 == expected


@pytest.mark.parametrize(
    ("mode", "tp", "expected"),
    [("full", 1, 8192), ("full", 2, 4096), ("selective", 1, 63_616), ("selective", 2, 44_096)],
)
def test_activations_of_a_checkpointed_layer(mode: Literal["full", "selective"], tp: int, expected: int) -> None:
    """2d/t, and 8d+2kv+2f+4H with three projections, 2d+(10d+2kv+2f+4H)/t (counted likewise): selective checkpointing
    keeps the last product too, which no backward needs."""
    more, less = run_of(2, tp, n_layers=5), run_of(2, tp, n_layers=4)
    for config in (more, less):
        config.activation_checkpoint.mode = mode
    assert (activation_bytes(more) - activation_bytes(less)) / 2048 == expected
    more.activation_checkpoint.every = 5
    less.activation_checkpoint.mode = "none"
    assert (activation_bytes(more) - activation_bytes(less)) / 2048 == expected


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_checkpointed_layers_send_again(mode: Literal["full", "selective"]) -> None:
    config = run_of(2, 2, n_layers=5)
    without = {(c.dimension, c.kind): c.count for c in predict(config).communication}
    config.activation_checkpoint.mode, config.activation_checkpoint.every = mode, 2
    counts = {(c.dimension, c.kind): c.count for c in predict(config).communication}
    again = {key: counts[key] - without[key] for key in counts if counts[key] != without[key]}
    assert (
        again
        == {
            "full": {("tp", "all_gather"): 4, ("tp", "reduce_scatter"): 4},
            "selective": {("tp", "all_gather"): 4},
        }[mode]
    )
    config.parallelism.sequence_parallel = False
    replicated = {(c.dimension, c.kind): c.count for c in predict(config).communication}
    assert replicated["tp", "all_reduce"] == 22 + 3 + 1 + 4


def test_resident_bytes_are_16_a_parameter() -> None:
    memory = predict(run_of(8, 1), "cuda").ranks[0]
    parameters = LLAMA_8B.params // 8
    extra = 4 * 2048 * 128 + 4 * memory.quantities["tensors"] + 2 * 32 * 2**20  # rotary table, counters, cuBLAS
    assert memory.resident_bytes == pytest.approx(16 * parameters + extra, abs=2 << 20)  # rounding, rests of segments


def resident(config: Trainer.Config) -> int:
    return predict(config, "cpu").ranks[0].resident_bytes


def test_replicas_hold_what_a_shard_holds() -> None:
    """16 bytes a parameter over dp_shard x tp, whatever dp_replicate is."""
    config = run_of(4, 2, n_layers=2)
    alone = resident(config)
    config.world_size, config.parallelism.dp_replicate = 24, 3
    assert resident(config) == alone
    norms = 5 * 4096  # on every tensor-parallel rank
    parameters = (config.model.params - norms) // 8 + norms // 4
    counters, rotary = 4 * 21, 4 * 2048 * 128
    assert alone == 16 * parameters + counters + rotary


def test_ranks_of_hsdp_are_numbered_replicas_outermost() -> None:
    """10 rows over 4 shards: the fourth has one of them, and its ranks are each replica's last ones."""
    model = Decoder.Config(vocab_size=20, dim=8, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=8)
    config = Trainer.Config(
        world_size=16,
        model=model,
        parallelism=Parallelism.Config(dp_replicate=2, dp_shard=4, tp=2),
        training=Training.Config(seq_len=8),
    )
    prediction = predict(config, "cpu")
    assert [rank.rank for rank in prediction.ranks] == list(range(16))
    assert [rank.alike_rank for rank in prediction.ranks] == 2 * [0, 0, 0, 0, 0, 0, 6, 6]
    assert "ranks 0 to 5, 8 to 13: peak" in report(prediction)
    assert "ranks 6 to 7, 14 to 15: peak" in report(prediction)


def test_tied_embeddings_hold_one_matrix_and_gather_it_once() -> None:
    config = run_of(4, 1, n_layers=2)
    untied = resident(config)
    config.model.tied_embeddings = True
    matrix = 128_256 * 4096
    assert untied - resident(config) == 16 * matrix // 4 + 4
    memory = predict(config, "cpu").ranks[0]
    assert "N_embedding" not in memory.quantities
    gathered = [i.categories["unsharded parameters"] for i in memory.timeline if i.name.startswith("forward: layers")]
    assert all(size >= 2 * matrix for size in gathered)
    # Where the embedding's gradient meets the head's: both and their sum, beside the matrix itself.
    (end,) = [i for i in memory.timeline if i.name == "backward: embedding"]
    assert end.categories["unsharded gradients"] == 2 * (3 * matrix + 4096)


def test_a_later_micro_batch_adds_to_the_gradients_of_the_first() -> None:
    config = run_of(4, 1, n_layers=2)
    one = predict(config, "cpu").ranks[0]
    config.training.accumulation_steps = 5
    memory = predict(config, "cpu").ranks[0]
    assert memory.resident_bytes == one.resident_bytes
    lines = {entry.category: entry.bytes for entry in memory.entries}
    assert lines["batch"] == 16 * 2048 * 5
    assert lines["reduce-scatter output"] == 4 * 128_256 * 4096 // 4 + 4 * 4096 // 4  # of the head, the largest
    assert "reduce-scatter output" not in {entry.category for entry in one.entries}
    # HSDP holds the output of every unit until backward is done.
    config.world_size, config.parallelism.dp_replicate = 8, 2
    lines = {entry.category: entry.bytes for entry in predict(config, "cpu").ranks[0].entries}
    assert lines["reduce-scatter output"] == 4 * memory.quantities["P"]


def evaluate(formula: str, quantities: dict[str, int]) -> int:
    total = 0
    for term in formula.split(" + "):
        if "B: blocks" in term:
            total += int(term.split("·")[0].replace(",", ""))
            continue
        numerator, *divisors = term.split("/")
        coefficient, *names = numerator.split("·")
        elements = prod(1 if name == "1" else quantities[name] for name in names)
        total += int(coefficient.replace(",", "")) * (elements // prod(quantities[name] for name in divisors))
    return total


def several(tp: int) -> Trainer.Config:
    config = run_of(4, tp, n_layers=3)
    config.world_size, config.parallelism.dp_replicate = 8 * tp, 2
    config.model.tied_embeddings, config.training.accumulation_steps = True, 2
    config.activation_checkpoint.mode, config.activation_checkpoint.every = "selective", 2
    return config


def in_chunks(tp: int) -> Trainer.Config:
    config = several(tp)
    config.training.loss_chunks, config.training.reduce_every_micro_batch = 8, False
    return config


@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("config", [run_of(4, 1, n_layers=3), run_of(4, 2, n_layers=3), several(1), in_chunks(2)])
def test_formulas_give_their_bytes(target: Target, config: Trainer.Config) -> None:
    memory = predict(config, target).ranks[0]
    assert len(memory.entries) > 12
    for entry in memory.entries:
        assert evaluate(entry.formula, memory.quantities) == entry.bytes, entry
        assert 0 <= entry.at_peak_bytes <= entry.bytes
    assert sum(entry.at_peak_bytes for entry in memory.entries) == memory.peak_allocated_bytes
    assert max(instant.bytes for instant in memory.timeline) == memory.peak_allocated_bytes


@pytest.mark.parametrize("config", [run_of(2, 2, n_layers=2), several(2), in_chunks(1)])
def test_nothing_leaks_from_step_to_step(config: Trainer.Config) -> None:
    from harness.ledger.step import Implementation, Step

    step = Step(config, target="cuda", implementation=Implementation())
    step.run()
    after_first = step.tape.total
    for _ in range(3):
        step.run()
    assert step.tape.total == after_first


def test_communication_by_hand() -> None:
    """2 layers, FSDP3 x TP2, T 4, d 6: every count and size worked out by hand."""
    model = Decoder.Config(vocab_size=10, dim=8, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=12)
    config = Trainer.Config(
        world_size=6,
        model=model,
        parallelism=Parallelism.Config(dp_shard=3, tp=2),
        training=Training.Config(micro_batch_size=1, seq_len=4),
    )
    # Rows of a rank's tensor-parallel part, padded to multiples of 3, times columns.
    embedding = 6 * 8  # 10/2 = 5 rows
    norm = 9
    layer = 2 * norm + 6 * 8 + 2 * (3 * 8) + 9 * 4 + 2 * (6 * 8) + 9 * 6  # wq 4 rows, wk wv 2, wo 8, w1 w3 6, w2 8
    head = norm + embedding
    found = {(c.dimension, c.kind): (c.count, c.bytes) for c in predict(config).communication}
    assert found == {
        ("dp_shard", "all_gather"): (2 + 4 + 1, 2 * (2 * embedding + 4 * layer + head)),
        ("dp_shard", "reduce_scatter"): (4, 4 * (embedding + 2 * layer + head)),
        ("dp_shard", "all_reduce"): (3, 8 + 4 + 4),
        ("tp", "all_gather"): (10, 10 * 4 * 8 * 2),
        ("tp", "reduce_scatter"): (10, 10 * 4 * 8 * 2),
        ("tp", "all_reduce"): (5 + 3 + 1, 5 * 8 * 2 + 3 * 4 * 4 + 4),
    }
    config.parallelism.sequence_parallel = False
    replicated = {(c.dimension, c.kind): (c.count, c.bytes) for c in predict(config).communication}
    assert replicated[("tp", "all_reduce")] == (10 + 3 + 1, 10 * 4 * 8 * 2 + 3 * 4 * 4 + 4)
    assert ("tp", "all_gather") not in replicated


def test_communication_of_hsdp_tied_and_accumulated_by_hand() -> None:
    """2 layers, HSDP2x3 x TP2, tied, 4 micro-batches: counts of the parts of a step times what repeats them."""
    model = Decoder.Config(vocab_size=10, dim=8, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=12, tied_embeddings=True)
    config = Trainer.Config(
        world_size=12,
        model=model,
        parallelism=Parallelism.Config(dp_replicate=2, dp_shard=3, tp=2),
        training=Training.Config(micro_batch_size=1, seq_len=4, accumulation_steps=4),
    )
    norm, matrix = 9, 6 * 8
    layer = 2 * norm + 6 * 8 + 2 * (3 * 8) + 9 * 4 + 2 * (6 * 8) + 9 * 6
    ends = norm + matrix
    found = {(c.dimension, c.kind): (c.count, c.bytes) for c in predict(config).communication}
    assert found == {
        # Layers twice, the ends once: they stay gathered from the embedding to the last reduction.
        ("dp_shard", "all_gather"): (4 * (4 + 1), 4 * 2 * (4 * layer + ends)),
        ("dp_shard", "reduce_scatter"): (4 * 3, 4 * 4 * (2 * layer + ends)),
        ("dp_shard", "all_reduce"): (3, 8 + 4 + 4),
        ("dp_replicate", "all_reduce"): (4 * 3 + 3, 4 * 4 * (2 * layer + ends) // 3 + 16),
        ("tp", "all_gather"): (4 * 10, 4 * 10 * 4 * 8 * 2),
        ("tp", "reduce_scatter"): (4 * 10, 4 * 10 * 4 * 8 * 2),
        ("tp", "all_reduce"): (4 * (5 + 3) + 1, 4 * (5 * 8 * 2 + 3 * 4 * 4) + 4),
    }


def test_one_shard_and_replicas_all_reduce_whole_gradients() -> None:
    config = run_of(1, 1, n_layers=2)
    config.world_size, config.parallelism.dp_replicate = 3, 3
    found = {(c.dimension, c.kind): (c.count, c.bytes) for c in predict(config).communication}
    assert found == {("dp_replicate", "all_reduce"): (4 + 3, 4 * config.model.params + 16)}


@pytest.mark.parametrize("policy", ["always", "default", "never"])
def test_gathers_of_tied_embeddings(policy: str) -> None:
    config = run_of(2, 1, n_layers=3)
    config.model.tied_embeddings = True
    config.parallelism.reshard_after_forward = policy  # type: ignore[assignment]
    gathers = sum(c.count for c in collectives(config) if c.kind == "all_gather")
    assert gathers == {"always": 6 + 2, "default": 6 + 1, "never": 3 + 1}[policy]


@pytest.mark.parametrize(("tied", "layers"), [(False, 2), (True, 2)])
def test_a_head_in_chunks_is_gathered_three_times_and_reduced_twice(tied: bool, layers: int) -> None:
    config = run_of(4, 1, n_layers=layers)
    config.model.tied_embeddings, config.training.loss_chunks = tied, 8
    of_head = [(c.kind, c.count, c.bytes) for c in collectives(config) if "head" in c.purpose]
    matrix, norm = 128_256 * 4096, 4096
    assert of_head == [
        ("all_gather", 3, 3 * 2 * (matrix + norm)),
        ("reduce_scatter", 1, 4 * matrix),
        ("reduce_scatter", 1, 4 * (norm + matrix if tied else norm)),
    ]
    config.parallelism.reshard_after_forward = "never"
    assert [c.count for c in collectives(config) if c.kind == "all_gather" and "head" in c.purpose] == [1]


def test_more_chunks_leave_the_matrix() -> None:
    """12·T·V/k shrinks with k; 10·V·d, the gathered matrix, its gradient and what that is reduced from, does not."""
    config = run_of(8, 1, n_layers=1, seq_len=8192)

    def at_loss() -> int:
        return max(i.bytes for i in predict(config, "cpu").ranks[0].timeline if i.name.startswith("backward: loss"))

    peaks = []
    for config.training.loss_chunks in (1, 2, 4):
        peaks.append(at_loss())
    tokens, vocabulary = 8192, 128_256
    assert peaks[1] - peaks[2] == pytest.approx(12 * tokens * vocabulary / 4, rel=1e-2)
    config.training.loss_chunks = 8192
    last = [i for i in predict(config, "cpu").ranks[0].timeline if i.name.startswith("backward: head, chunk 8192")]
    held = ("unsharded parameters", "accumulated gradients", "reduce-scatter input")
    assert sum(last[0].categories[name] for name in held) == pytest.approx(10 * vocabulary * 4096, rel=1e-3)


@pytest.mark.parametrize(("policy", "gathers"), [("always", 8), ("default", 7), ("never", 4)])
def test_gathers_by_policy(policy: str, gathers: int) -> None:
    config = run_of(2, 1, n_layers=2)
    config.parallelism.reshard_after_forward = policy  # type: ignore[assignment]
    assert sum(c.count for c in collectives(config) if c.kind == "all_gather") == gathers


def test_one_rank_sends_nothing() -> None:
    alone = predict(run_of(1, 1, n_layers=1))
    assert alone.communication == []
    assert report(alone).endswith("\nNo communication: one rank.")


def test_uneven_ranks() -> None:
    """10 rows over 4 ranks: 3, 3, 3, 1; 8 rows over 5 ranks: 2, 2, 2, 2, none."""
    model = Decoder.Config(vocab_size=10, dim=8, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=4)
    for dp_shard, rows in ((4, [3, 3, 3, 1]), (5, [2, 2, 2, 2, 2])):
        config = Trainer.Config(world_size=dp_shard, model=model, training=Training.Config(seq_len=8))
        ranks = predict(config, "cpu").ranks
        assert [rank.rank for rank in ranks] == list(range(dp_shard))
        held = [rank.quantities["P"] for rank in ranks]
        assert sum(held) == model.params
        assert held[0] - held[-1] >= 2 * 8 * (rows[0] - rows[-1])


def as_json(prediction: Prediction) -> dict[str, object]:
    tree: dict[str, object] = json.loads(json.dumps(prediction.to_json(), allow_nan=False))
    return tree


def test_json_contract() -> None:
    tree = as_json(predict(run_of(2, 2, n_layers=2)))
    assert {"schema_version", "mode", "world_size", "ranks", "communication", "time"} <= tree.keys()
    ranks = tree["ranks"]
    assert isinstance(ranks, list)
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    assert ranks[0]["peak_reserved_bytes"] == sum(pool["reserved_bytes"] for pool in ranks[0]["pools"])
    assert ranks[0]["pools"][0].keys() == {"stream", "reserved_bytes", "unused_at_peak_bytes"}
    for entry in ranks[3]["entries"]:
        assert entry.keys() == {"category", "formula", "bytes", "at_peak_bytes", "measured_bytes", "error_pct"}
    assert {"at", "bytes"} <= ranks[0]["timeline"][0].keys()
    communication = tree["communication"]
    assert isinstance(communication, list)
    assert all(item.keys() == {"dimension", "kind", "count", "bytes"} for item in communication)


def test_text_names_every_line_and_quantity() -> None:
    prediction = predict(run_of(2, 2, n_layers=2))
    text = report(prediction)
    assert f"{prediction.ranks[0].peak_allocated_bytes / 2**30:.4f} GiB at {prediction.ranks[0].at}" in text
    for entry in prediction.ranks[0].entries:
        assert entry.category in text
        assert entry.formula in text
    legend = text.split("  where ")[1].split("\n")[0]
    explained = set(re.findall(r"(\w+) = ", legend))
    used = {n for e in prediction.ranks[0].entries for n in re.findall(r"N_\w+|\b(?:kv|hd|[TBSdfHVtWP])\b", e.formula)}
    assert used - {"B"} <= explained


def test_refuses_what_cannot_run() -> None:
    config = run_of(2, 2)
    config.world_size = 3
    with pytest.raises(UsageError, match="world_size=3"):
        predict(config)


def test_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from harness.recipes.llama3 import llama3_1b\n"
        "import harness.commands.ledger\n"
        "from harness.ledger import predict\n"
        "print(predict(llama3_1b()).ranks[0].peak_allocated_bytes)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert int(out) > 2**30


def test_reserved_is_null_with_a_reason_where_it_is_not_known() -> None:
    for section, name, value, reason in (
        ("compile", "blocks", True, "inductor"),
        ("float8", "recipe", "rowwise", "float8"),
        ("training", "collective_memory", "record_stream", "record_stream"),
    ):
        config = run_of(2, 1, n_layers=2)
        setattr(getattr(config, section), name, value)
        prediction = predict(config, "cuda")
        assert [rank.peak_reserved_bytes for rank in prediction.ranks] == [None, None]
        assert all(not rank.pools for rank in prediction.ranks)
        (note,) = (note for note in prediction.notes if note.startswith("reserved bytes: "))
        assert reason in note
    prediction = predict(run_of(2, 1, n_layers=2), "cpu")
    assert prediction.ranks[0].peak_reserved_bytes is None
    assert prediction.notes == []


def test_reserved_bytes_by_stream() -> None:
    """What FSDP2's streams reserve is theirs: at least a gathered unit and what it was made of, and all gradients."""
    rank = predict(run_of(8, 1, n_layers=4), "cuda").ranks[0]
    pools = {pool.stream: pool for pool in rank.pools}
    assert pools.keys() == {"compute", "all-gather", "reduce-scatter"}
    matrix = 2 * 128_256 * 4096
    assert pools["all-gather"].reserved_bytes >= matrix + matrix // 8
    gradients = {entry.category: entry.bytes for entry in rank.entries}["gradients"]
    assert pools["reduce-scatter"].reserved_bytes >= gradients
    assert rank.peak_reserved_bytes is not None
    used = sum(pool.reserved_bytes - pool.unused_at_peak_bytes for pool in rank.pools)
    assert used == rank.peak_allocated_bytes
    assert rank.peak_reserved_bytes > rank.peak_allocated_bytes


def test_asynchronous_gathers_are_of_the_compute_stream() -> None:
    config = run_of(8, 1, n_layers=2)
    config.parallelism.fsdp_async_unshard = True
    assert [pool.stream for pool in predict(config, "cuda").ranks[0].pools] == ["compute", "reduce-scatter"]


def test_every_stage_has_streams_of_its_own() -> None:
    """Two stages of a rank share none of their pools: what one has gathered and let go does not serve the other."""
    tape = Tape(Allocator(Settings()))
    size = Quantities({"N": 20 << 20}).size(1, "N")
    for root in (0, 1):
        gathered = tape.allocate("all-gather output", size, stream=of_root(root, ALL_GATHER))
        del gathered
        tape.allocate("logits", size, stream=of_root(root, COMPUTE)).free()
    assert tape.reserved_bytes == 3 * (20 << 20)
