"""What inductor makes of a training on a CPU, and what of it is noticed when it does not happen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.compilation import Compile, compiler
from harness.config import Decoder, Parallelism, Recorder, Trainer, Training, Window
from harness.errors import UsageError
from harness.report import build
from harness.trainer.compiled import Compiled


def one_layer(**compiled: bool) -> Trainer.Config:
    return Trainer.Config(
        model=Decoder.Config(vocab_size=64, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=48),
        parallelism=Parallelism.Config(dp_shard=1),
        compile=Compile.Config(**compiled),
        training=Training.Config(device="cpu", steps=3, seq_len=16, mixed_precision_param="float32"),
        recorder=Recorder.Config(trace=Window(start=2, steps=1), memory=Window()),
    )


@pytest.mark.distributed
@pytest.mark.skipif(compiler() is None, reason="inductor needs a C++ compiler on CPUs: apt-get install g++")
def test_inductor_trains_as_eager_does(tmp_path: Path, pool) -> None:
    reports = {}
    for name, config in (("eager", one_layer()), ("inductor", one_layer(blocks=True, loss=True))):
        (tmp_path / name).mkdir()
        pool.train(config, tmp_path / name)
        reports[name] = build(tmp_path / name)
    found = reports["inductor"].compilation
    assert (found.backend, found.layer_graphs, found.loss_graphs, found.ran_eagerly) == ("inductor", 1, 1, {})
    for expected, actual in zip(reports["eager"].steps, reports["inductor"].steps, strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert reports["eager"].compilation is None


# Of torch.compile itself, which looks at tensors of a graph and means to ignore it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_that_run_without_having_been_compiled_are_counted() -> None:
    config = one_layer(blocks=True)
    config.compile.backend = "aot_eager"
    model, compiled = config.model.build(seq_len=16), Compiled(config, torch.device("cpu"))
    compiled.layers(model, set())
    tokens = torch.arange(16)[None]
    with torch.compiler.set_stance("force_eager"):
        model(tokens)
    assert compiled.has_news()
    facts = compiled.facts()
    assert (facts["layer_graphs"], facts["ran_eagerly"]) == (0, {"layers.0": 1})
    model(tokens)
    assert compiled.has_news()
    facts = compiled.facts()
    assert (facts["layer_graphs"], facts["ran_eagerly"]) == (1, {"layers.0": 1})
    assert not compiled.has_news()


def test_a_memory_budget_is_set_for_one_training_and_gone_with_the_next() -> None:
    budget = one_layer(blocks=True)
    budget.activation_checkpoint.mode, budget.activation_checkpoint.memory_budget = "memory_budget", 0.25
    settings = torch._functorch.config
    Compiled(budget, torch.device("cpu"))
    assert settings.activation_memory_budget == 0.25
    Compiled(one_layer(blocks=True), torch.device("cpu"))
    assert settings.activation_memory_budget == 1.0


def test_torch_compile_that_the_environment_switches_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.config, "disable", True)
    with pytest.raises(UsageError, match="TORCH_COMPILE_DISABLE=1") as caught:
        Compiled(one_layer(loss=True), torch.device("cpu"))
    assert "TORCHDYNAMO_DISABLE" not in str(caught.value)
