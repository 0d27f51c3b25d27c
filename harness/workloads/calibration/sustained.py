"""How much slower a GPU gets that never rests: its clock follows power and temperature."""

from __future__ import annotations

import statistics
import time

import torch

from harness.config import Decoder, Trainer, Training
from harness.ledger.hardware_points import Sustained
from harness.workloads.calibration import models
from harness.workloads.calibration.clock import Clock, Operation

LAYERS = Trainer.Config(
    model=Decoder.Config(vocab_size=512, dim=2048, n_layers=2, n_heads=32, n_kv_heads=8, ffn_dim=8192),
    training=Training.Config(seq_len=8192, mixed_precision_param="bfloat16"),
)
"""Two layers of Llama 3.2 1B: products, attention and what memory bounds, mixed as in a step, for some 20 ms."""
SQUARE, PRODUCTS = 4096, 40
"""Products of such a square: 7 ms of them."""
REST_S, RESTED = 0.3, 5
SECONDS = 4.0


def sustained(clock: Clock) -> list[Sustained]:
    """On every rank at once, as in a step: GPUs of one host share what cools and feeds them."""
    model = models.plain(LAYERS, clock.device)
    tokens = torch.zeros(1, LAYERS.training.seq_len, dtype=torch.int64, device=clock.device)
    a, b = (torch.randn(SQUARE, SQUARE, device=clock.device, dtype=torch.bfloat16) for _ in range(2))

    def layers() -> None:
        model(tokens).float().sum().backward()
        model.zero_grad(set_to_none=True)

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(a, b)

    return [
        Sustained(kind="layers", factor=_factor(layers), seconds=SECONDS),
        Sustained(kind="products", factor=_factor(products), seconds=SECONDS),
    ]


def _factor(work: Operation) -> float:
    def device_ns() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e6

    rested = []
    for _ in range(1 + RESTED):
        time.sleep(REST_S)
        device_ns()  # from a rest the clock has to rise first
        rested.append(device_ns())
    began, times = time.monotonic(), []
    while (seconds := time.monotonic() - began) < SECONDS:
        times.append((seconds, device_ns()))
    last = statistics.mean(ns for when, ns in times if when > SECONDS - 1)
    return round(last / statistics.median(rested[1:]), 4)
