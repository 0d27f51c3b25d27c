"""Float8 linear layers: which are converted, that they multiply what float8 can hold, and that nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import util
from pathlib import Path

import pytest
import torch
from saving import tensors_of

from harness.checkpoints import find_checkpoint
from harness.cli import main
from harness.config import Checkpoint, Decoder, Parallelism, Pipeline, Recorder, Trainer, Training, Window
from harness.errors import UnavailableError, UsageError
from harness.float8 import LINEARS, Float8, Recipe, conversion
from harness.ledger import predict
from harness.trainer import float8 as implementation
from harness.trainer.float8 import convert_linears
from harness.trainer.model.decoder import Decoder as Model
from harness.trainer.seed import write_seed_checkpoint
from harness.validation import validate_device

needs_torchao = pytest.mark.skipif(
    util.find_spec("torchao") is None, reason="torchao is not installed: pip install 'meshscope[float8]'"
)
MODEL = Decoder.Config(vocab_size=64, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96)
CPU = torch.device("cpu")


def configuration(
    recipe: Recipe = "rowwise", *, emulate: bool = True, linears: Sequence[str] = LINEARS, steps: int = 2, seed: int = 0
) -> Trainer.Config:
    return Trainer.Config(
        model=MODEL,
        float8=Float8.Config(recipe=recipe, emulate=emulate, linears=list(linears)),
        training=Training.Config(device="cpu", seq_len=32, steps=steps, seed=seed, mixed_precision_param="float32"),
        recorder=Recorder.Config(trace=Window(), memory=Window()),
    )


def decoder(config: Trainer.Config) -> Model:
    torch.manual_seed(0)
    model = config.model.build(seq_len=config.training.seq_len)
    convert_linears(model, config, CPU)
    return model


def tp(config: Trainer.Config, degree: int) -> Trainer.Config:
    return replace(config, world_size=degree, parallelism=Parallelism.Config(dp_shard=1, tp=degree))


def test_which_layers_can_be_converted() -> None:
    assert conversion(configuration()).converted == LINEARS
    assert conversion(configuration("none")).converted == ()
    some = conversion(configuration(linears=["wq", "w2"]))
    assert (some.converted, set(some.left.values())) == (("wq", "w2"), {"not in float8.linears"})
    # 32 rows of wk and wv, and 96 of w1, by four tensor-parallel ranks.
    by_four = conversion(tp(configuration(), 4))
    assert by_four.left == {
        **dict.fromkeys(("wk", "wv"), "8 is no multiple of 16"),
        **dict.fromkeys(("w1", "w2", "w3"), "24 is no multiple of 16"),
    }


@needs_torchao
def test_conversion_keeps_names_and_parameters_and_says_what_it_did() -> None:
    config = configuration(linears=["wq", "w1"])
    model = config.model.build(seq_len=32)
    before = dict(model.named_parameters())
    outcome = convert_linears(model, config, CPU)
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert after.keys() == before.keys()
    assert outcome is not None
    assert outcome["converted"] == {"wq": 2, "w1": 2}
    assert outcome["left"]["w2"] == {"count": 2, "reason": "not in float8.linears"}
    assert outcome["left"]["lm_head"]["count"] == 1
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("Float8Linear") == 4
    assert convert_linears(model, configuration("none"), CPU) is None


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_products_are_of_what_float8_can_hold(recipe: Recipe) -> None:
    """Of operands rounded with a scale a tensor, or a power of 2 a row."""
    torch.manual_seed(0)
    linear = decoder(configuration(recipe)).layers["0"].attention.wq
    x = torch.randn(4, 64)

    def rounded(operand: torch.Tensor) -> torch.Tensor:
        by_row = recipe != "tensorwise"
        largest = operand.abs().amax(dim=1, keepdim=True) if by_row else operand.abs().max()
        scale = 448 / largest
        scale = scale.log2().floor().exp2() if by_row else scale
        return (operand * scale).to(torch.float8_e4m3fn).float() / scale

    expected = rounded(x) @ rounded(linear.weight).T
    torch.testing.assert_close(linear(x), expected, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(linear(x), x @ linear.weight.T, rtol=1e-3, atol=1e-4)


@needs_torchao
def test_checkpoints_of_either_kind_load_into_the_other(tmp_path: Path) -> None:
    """A seed checkpoint into a run with float8, its checkpoint into one without, and that one's back: with no learning
    rate the weights stay what they are, and so do the names of all that is saved."""
    write_seed_checkpoint(configuration(seed=3), tmp_path / "seed")
    load, names = tmp_path / "seed", set()
    begun = tensors_of(find_checkpoint(load))
    for steps, recipe in enumerate(("rowwise", "none", "tensorwise"), start=1):
        config = configuration(recipe, emulate=recipe != "none", steps=steps)
        config.optimizer.lr = 0.0
        config.checkpoint = Checkpoint.Config(interval=1, load=str(load))
        load = tmp_path / recipe
        config.build(load).train()
        after = tensors_of(find_checkpoint(load))
        names.add(tuple(sorted(after)))
        assert all(torch.equal(after[name], tensor) for name, tensor in begun.items())
    assert len(names) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "none"}, "float8.emulate has no effect with float8.recipe=none"),
        ({"recipe": "none", "emulate": False, "linears": ["wq"]}, "float8.linears has no effect"),
        ({"linears": []}, "float8.linears=: name some of wq, wk, wv"),
        ({"linears": ["wq", "lm_head"]}, "float8.linears=wq,lm_head: name some of"),
        ({"linears": ["wq", "wq"]}, "each once"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, object], message: str) -> None:
    config = configuration()
    config.float8 = replace(config.float8, **changes)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        config.validate()


def test_kernels_need_multiples_of_16_tokens() -> None:
    config = configuration()
    config.training.seq_len = 24
    config.validate()
    config.float8.emulate = False
    with pytest.raises(UsageError, match="add up over the 24 tokens of a rank"):
        config.validate()
    config.float8.recipe = "rowwise_with_gw_hp"
    config.validate()


def test_a_backward_in_two_parts_is_refused() -> None:
    config = replace(configuration(), world_size=2, parallelism=Parallelism.Config(dp_shard=1, pp=2))
    config.model = replace(MODEL, n_layers=4)
    config.pipeline = Pipeline.Config(schedule="1F1B")
    config.validate()
    config.pipeline = Pipeline.Config(schedule="ZBVZeroBubble")
    with pytest.raises(UsageError, match=r"float8\.recipe=rowwise: the schedule has backward in two parts"):
        config.validate()


def test_a_cpu_emulates_or_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--module", "debug", "--config", "tiny", "--float8.recipe", "rowwise"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "float8.recipe=rowwise: this trainer multiplies float8 on GPUs only" in line
    assert "set float8.emulate to true" in line


def test_without_torchao_the_command_for_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.float8.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"needs torchao: pip install 'meshscope\[float8\]'"):
        validate_device(configuration(), "cpu")
    validate_device(replace(configuration(), float8=Float8.Config()), "cpu")
    offloaded = configuration()
    offloaded.training.cpu_offload = True
    assert predict(offloaded, "cuda").host_copies  # which needs nothing of this machine


def test_a_gpu_that_cannot_multiply_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    config = configuration()
    config.float8.emulate = False
    model = config.model.build(seq_len=32)
    with pytest.raises(UnavailableError, match=r"A100-SXM4-80GB has compute capability 8.0, float8 products need 8.9"):
        convert_linears(model, config, torch.device("cuda"))


@needs_torchao
def test_its_import_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    implementation._torchao()
    assert capfd.readouterr() == ("", "")


@needs_torchao
def test_a_recording_has_no_mfu_and_says_why(tmp_path: Path) -> None:
    configuration().build(tmp_path).train()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["peak_tflops"] is None
    assert "no datasheet has a peak" in manifest["peak_tflops_source"]
    document = json.loads((tmp_path / "ranks" / "rank0.json").read_text())
    assert sum(document["float8"]["converted"].values()) == 14
