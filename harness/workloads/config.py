"""What the workloads do, and how much of it; free of torch. The trees are part of `Trainer.Config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WorkloadName = Literal["training", "collectives", "point_to_point"]

MIB = 1 << 20


class Collectives:
    """A step is `iterations` times all-gather, matrix product, reduce-scatter; a buffer is freed once it was read."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        iterations: int = 40
        rows: int = 2048
        """Of this rank's shard [rows, dim]; the default is 16 MiB of bfloat16."""
        dim: int = 4096
        """Width of the shard; the weight is [dim, dim]."""
        api: Literal["functional", "c10d"] = "functional"
        """`functional`: what DTensor and tensor parallelism call; `c10d`: what FSDP2 calls."""
        async_op: bool = True
        """`c10d`: the loop waits for a work; else the call itself is synchronous, as FSDP2's are."""

        def words(self) -> dict[str, str]:
            """The pattern in words, for reports."""
            synchronous = "" if self.async_op else ", synchronous"
            return {
                "pattern": f"{self.iterations} × all-gather, matrix product, reduce-scatter a step",
                "shard": f"{self.rows:,} × {self.dim:,}, {self.api}{synchronous}",
            }


class PointToPoint:
    """A step sends `sends` activations down a line of ranks, as the forward of a pipeline does."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        sends: int = 40
        activation_mib: int = 64
        batched: bool = False
        """Through `batch_isend_irecv`, which torch's pipeline schedules call, else `isend` and `irecv`."""
        buffers: Literal["freed", "held", "reused"] = "freed"
        """What becomes of an activation once it was waited for: `freed` at once; `held` by a reference until the step
        ends; `reused`: every activation lies in one of two buffers."""

        def words(self) -> dict[str, str]:
            """The pattern in words, for reports."""
            calls = "batched" if self.batched else "single"
            return {"pattern": f"{self.sends} × {self.activation_mib} MiB a step, {calls}", "buffers": self.buffers}
