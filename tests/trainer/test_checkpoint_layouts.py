"""What one layout saved, any other loads bit for bit; a seed checkpoint makes all begin with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from saving import LOSS_TOLERANCE, configuration, losses_of, tensors_of

from harness.checkpoints import Header, checkpoint_path, find_checkpoint, read_header
from harness.cli import main
from harness.config import Trainer
from harness.recipes import debug
from harness.trainer.data import build_batches
from harness.trainer.initialise import initialise
from harness.trainer.seed import write_seed_checkpoint

STEPS = 6


@pytest.fixture(scope="module")
def on_fsdp2_tp2(documents, pool, tmp_path_factory) -> Path:
    """A recording with checkpoints after 3 and 6 steps."""
    directory = tmp_path_factory.mktemp("fsdp2_tp2") / "run"
    pool.train(configuration(documents, "fsdp2_tp2", steps=STEPS, interval=3), directory)
    return directory


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["single", "fsdp4", "fsdp2_tp2", "hsdp2x2", "pp2_fsdp2"])
def test_another_layout_goes_on_with_the_same_losses(documents, pool, tmp_path, on_fsdp2_tp2, layout):
    source = checkpoint_path(on_fsdp2_tp2, 3)
    pool.train(configuration(documents, layout, steps=STEPS, load=source), tmp_path / "on")
    whole, rest = losses_of(on_fsdp2_tp2), losses_of(tmp_path / "on")
    assert list(rest) == [3, 4, 5]
    for step, loss in rest.items():
        same_layout = layout == "fsdp2_tp2"
        assert loss == (whole[step] if same_layout else pytest.approx(whole[step], rel=LOSS_TOLERANCE))


def divisible_by_4(config: Trainer.Config) -> Trainer.Config:
    """With a model whose heads and widths 4 tensor-parallel ranks can share."""
    config.model.vocab_size, config.model.dim, config.model.ffn_dim = 260, 40, 68
    config.model.n_heads = config.model.n_kv_heads = 4
    return config


def assert_saved_again(pool, config: Trainer.Config, source: Path, directory: Path) -> None:
    """Loads `source` and saves it: parameters, optimizer states and data position are what they were."""
    pool.train(config, directory, stands_still=True)
    again = find_checkpoint(directory)
    before, after = tensors_of(source), tensors_of(again)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    assert read_header(again).data == read_header(source).data


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["single", "fsdp4", "hsdp2x2", "pp2_fsdp2", "pp2_tp2", "cp2_tp2"])
def test_another_layout_loads_the_same_bits(documents, pool, tmp_path, on_fsdp2_tp2, layout):
    """And the way back. One of the two saves is in the background."""
    source = checkpoint_path(on_fsdp2_tp2, 3)
    config = configuration(documents, layout, steps=4, load=source)
    config.checkpoint.asynchronous = True
    assert_saved_again(pool, config, source, tmp_path / "there")
    back = configuration(documents, "fsdp2_tp2", steps=5, load=tmp_path / "there")
    assert_saved_again(pool, back, source, tmp_path / "back")


@pytest.mark.distributed
def test_four_tensor_parallel_ranks_load_what_two_by_two_saved(documents, pool, tmp_path):
    pool.train(divisible_by_4(configuration(documents, "fsdp2_tp2", steps=2)), tmp_path / "run")
    source = checkpoint_path(tmp_path / "run", 2)
    config = divisible_by_4(configuration(documents, "tp4", steps=3, load=source))
    assert_saved_again(pool, config, source, tmp_path / "tp4")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("tied", "layout"),
    [
        *((False, layout) for layout in ("single", "fsdp4", "fsdp2_tp2", "hsdp2x2", "pp2_fsdp2")),
        *((True, layout) for layout in ("single", "fsdp4", "fsdp2_tp2", "hsdp2x2", "pp2_fsdp2")),
    ],
)
def test_every_layout_saves_the_whole_model(documents, pool, tmp_path, layout, tied):
    config = configuration(documents, layout, steps=1)
    config.optimizer.lr = 0.0
    config.model.tied_embeddings = tied
    pool.train(config, tmp_path / "run")
    model = config.model.build(seq_len=32)
    initialise(model, config.training.seed)
    found = tensors_of(checkpoint_path(tmp_path / "run", 1))
    parameters = dict(model.named_parameters())
    assert {name for name in found if name.startswith("model.")} == {f"model.{name}" for name in parameters}
    for name, parameter in parameters.items():
        assert torch.equal(found[f"model.{name}"], parameter.detach()), name
        assert found[f"optimizer.{name}.exp_avg"].shape == parameter.shape
        assert found[f"optimizer.{name}.step"] == 1


@pytest.mark.distributed
def test_both_ends_of_a_pipeline_go_on_with_the_matrix_that_one_unit_saved_and_the_way_back(documents, pool, tmp_path):
    """First and last stage on different ranks, and both on the first one (V placement)."""

    def tied(layout: str, steps: int, load: Path | None = None) -> Trainer.Config:
        config = configuration(documents, layout, steps=steps, load=load)
        config.model.tied_embeddings = True
        return config

    pool.train(tied("fsdp2_tp2", 4), tmp_path / "run")
    source, expected = checkpoint_path(tmp_path / "run", 2), losses_of(tmp_path / "run")
    apart, together = tied("pp2_fsdp2", 4, source), tied("pp2_tp2", 4, source)
    together.pipeline.schedule = "ZBVZeroBubble"
    together.pipeline.split = [["tok_embeddings"], ["layers.0"], ["layers.1"], ["norm", "lm_head"]]
    together.pipeline.micro_batches, together.training.accumulation_steps = 4, 1
    for name, config in (("apart", apart), ("together", together)):
        pool.train(config, tmp_path / name)
        back = tied("single", 5, checkpoint_path(tmp_path / name, 4))
        back.checkpoint.interval = 0
        pool.train(back, tmp_path / f"{name}_back")
        found = losses_of(tmp_path / name)
        assert list(found) == [2, 3]
        for step, loss in found.items():
            assert loss == pytest.approx(expected[step], rel=LOSS_TOLERANCE)
    assert losses_of(tmp_path / "apart_back")[4] == pytest.approx(
        losses_of(tmp_path / "together_back")[4], rel=LOSS_TOLERANCE
    )


SEED = 1


def seeded(config: Trainer.Config) -> Trainer.Config:
    """Has other initial weights than a run of it computes itself, of which it has seed 0."""
    config.training.seed = SEED
    return config


@pytest.fixture(scope="module")
def seed(documents, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("seed") / "seed"
    write_seed_checkpoint(seeded(configuration(documents, steps=1)), directory)
    return directory


@pytest.fixture(scope="module")
def loss_of_seed(documents, seed) -> float:
    """Of the first step's samples, by a model that was on the CPU from the beginning: nothing of it, such as the rotary
    table, which no checkpoint holds, was materialised later."""
    config = configuration(documents, steps=1)
    model = config.model.build(seq_len=config.training.seq_len)
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors_of(find_checkpoint(seed)).items()}
    model.load_state_dict(tensors, strict=True)
    batches = build_batches(config, dp_rank=0, dp_size=1)
    losses = []
    with torch.no_grad():
        for _ in range(config.training.accumulation_steps):
            tokens, labels = batches.next_batch()
            losses.append(torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()))
    batches.close()
    return torch.stack(losses).mean().item()


def test_a_seed_checkpoint_holds_the_initial_weights_and_nothing_else(documents, seed):
    checkpoint = find_checkpoint(seed)
    header: Header = read_header(checkpoint)
    assert (header.step, header.data, header.world_size, header.mesh) == (0, None, 1, {})
    config = seeded(configuration(documents, steps=1))
    model = config.model.build(seq_len=config.training.seq_len)
    initialise(model, SEED)
    found = tensors_of(checkpoint)
    expected = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    assert found.keys() == expected.keys()
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, expected[n]) for n, tensor in found.items())


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["single", "tp2", "pp2", "fsdp4", "cp2_tp2"])
def test_every_layout_begins_with_the_seed_checkpoint(documents, pool, tmp_path, seed, loss_of_seed, layout):
    config = configuration(documents, layout, steps=1, load=seed)
    config.optimizer.lr = 0.0  # the step changes no parameter: what is saved after it is what it began with
    pool.train(config, tmp_path / "run")
    assert losses_of(tmp_path / "run") == {0: pytest.approx(loss_of_seed, rel=LOSS_TOLERANCE)}
    begun, after = tensors_of(find_checkpoint(seed)), tensors_of(checkpoint_path(tmp_path / "run", 1))
    for name, tensor in begun.items():
        assert torch.equal(after[name], tensor), name
    assert after["optimizer.norm.weight.step"] == 1, "the optimizer begins here"


def test_the_command_line_writes_a_seed_checkpoint(tmp_path, capsys):
    tiny = ["run", "--module", "debug", "--config", "tiny", "--seed-checkpoint"]
    assert main([*tiny, str(tmp_path / "seed"), "--training.seed", "3"]) == 0
    assert f"of training.seed=3, float32, in {tmp_path}" in capsys.readouterr().out
    config = debug.tiny()
    model = config.model.build(seq_len=config.training.seq_len)
    initialise(model, 3)
    embedding = tensors_of(find_checkpoint(tmp_path / "seed"))["model.tok_embeddings.weight"]
    assert model.tok_embeddings is not None
    assert torch.equal(embedding, model.tok_embeddings.weight)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--out", "x"], 2, "--out: --seed-checkpoint starts no run"),
        (["--mode", "cpu"], 2, "--mode: --seed-checkpoint starts no run"),
        (["--checkpoint.load", "x"], 2, "leave out --checkpoint.load"),
        (["--model.dim", "10000000"], 5, "the whole model in float32 is"),
    ],
)
def test_a_seed_checkpoint_that_cannot_be_is_refused(tmp_path, capsys, arguments, exit_code, message):
    tiny = ["run", "--module", "debug", "--config", "tiny", "--seed-checkpoint", str(tmp_path / "seed")]
    assert main([*tiny, *arguments]) == exit_code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "seed").exists()


def test_a_folder_with_something_in_it_is_not_taken_for_a_seed_checkpoint(tmp_path, capsys):
    (tmp_path / "mine").write_text("kept")
    assert main(["run", "--module", "debug", "--config", "tiny", "--seed-checkpoint", str(tmp_path)]) == 2
    assert "the folder is not empty" in capsys.readouterr().err
