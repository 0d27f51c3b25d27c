"""Collectives into one tensor, under the names that this torch does not warn of."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_c10d: Any = dist
# torch 2.13 gave them other names and warns of the older ones.
all_gather_single = getattr(_c10d, "all_gather_single", None) or _c10d.all_gather_into_tensor
reduce_scatter_single = getattr(_c10d, "reduce_scatter_single", None) or _c10d.reduce_scatter_tensor
