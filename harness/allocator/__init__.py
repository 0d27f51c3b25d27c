"""A faithful model of torch's CUDA caching allocator, without torch: what a sequence of requests makes it reserve."""

from harness.allocator.blocks import Block, Driver, Pool
from harness.allocator.model import Allocator, OutOfMemoryError, Segment
from harness.allocator.settings import Settings

__all__ = ["Allocator", "Block", "Driver", "OutOfMemoryError", "Pool", "Segment", "Settings"]
