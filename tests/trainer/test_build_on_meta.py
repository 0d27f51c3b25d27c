"""A rank's model of any size, built without memory for it: 405 billion parameters on 64 simulated ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from harness import recipes
from harness.config import Parallelism
from harness.ledger import predict
from harness.pipeline.plan import plan
from harness.trainer.build import build_on_meta
from harness.trainer.parallel_dims import ParallelDims

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "meta_build.py"


def test_a_405b_model_builds_on_meta_for_every_kind_of_64_ranks(fake_world):
    config = recipes.load_config("llama3", "llama3_405b")
    config.world_size, config.parallelism = 64, Parallelism.Config(pp=4, tp=8)
    config.training.device = "cpu"
    config.validate()
    kinds = [rank for rank in predict(config, "cuda").ranks if rank.rank == rank.alike_rank]
    assert [kind.rank for kind in kinds] == [0, 16, 32, 48]
    for kind in kinds:
        with fake_world(kind.rank, 64):
            mesh = ParallelDims.from_config(config).build_mesh("cpu")
            built = build_on_meta(config, mesh, torch.device("cpu"), plan=plan(config))
            parameters = dict(built.model.named_parameters())
            assert all(parameter.is_meta for parameter in parameters.values())
            assert sum(p.to_local().numel() for p in parameters.values()) == kind.quantities["P"]
            assert ("tok_embeddings.weight" in parameters, "lm_head.weight" in parameters) == (
                kind.rank == 0,
                kind.rank == 48,
            )


def test_the_benchmark_measures_a_kind_in_a_process_of_its_own_and_says_where_a_limit_is_broken():
    command = [sys.executable, str(BENCHMARK), "dp8_tp8", "--json", "--limit-mib", "50"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stderr) == (1, "")
    (found,) = json.loads(done.stdout)
    (kind,) = found["kinds"]
    assert kind["ranks"] == 64
    assert 50 * 2**20 < kind["peak_rss_bytes"] < 1536 * 2**20
