"""Where in the source an allocation was made, from its recorded stack (innermost frame first)."""

from __future__ import annotations

import re

from harness.memory.snapshot import Frames
from harness.text import printable

NO_STACK = "(no stack recorded)"
BEFORE_HISTORY = "(allocated before the history)"

# torch's own Python files, installed or in a checkout, and code that torch generated.
_TORCH_FILE = re.compile(
    r"^torch[/\\]|(?:site|dist)-packages[/\\]torch[/\\]|torchinductor_|^<eval_with_key>"
    r"|[/\\]torch[/\\](?:_\w+|autograd|cuda|distributed|func|fx|library|nn|optim|utils|functional|overrides)(?:[/\\.]|$)"
)
# Stacks with C++ frames start in the recorder and the allocator, which say nothing about the caller.
_RECORDER_OR_ALLOCATOR = re.compile(
    r"^torch::unwind|^torch::CapturedTraceback|gather_with_cpp|^c10::cuda::CUDACachingAllocator|^at::detail::empty"
)


def describe_frame(frame: object) -> str:
    """`file:line:function` of one frame."""
    return f"{_text(frame, 'filename')}:{_text(frame, 'line')}:{_text(frame, 'name')}"


def allocation_site(frames: Frames) -> str:
    """`file:line:function` of the innermost Python frame outside torch, else of the innermost frame.

    Only Python frames can be told apart (C++ ones carry no path); where a stack has none outside torch, the
    recorder's and the allocator's own C++ frames are passed over. NO_STACK without frames.
    """
    python = [frame for frame in frames if _is_python(_text(frame, "filename"))]
    for frame in python:
        if not _TORCH_FILE.search(_text(frame, "filename")):
            return describe_frame(frame)
    for frame in python or frames:
        if not _RECORDER_OR_ALLOCATOR.search(_text(frame, "name")):
            return describe_frame(frame)
    return describe_frame(frames[0]) if frames else NO_STACK


def stack_text(frames: Frames) -> str:
    """The stack as one `file:function` line per frame, innermost first, for rules that search it."""
    return "\n".join(f"{_text(frame, 'filename').replace(chr(92), '/')}:{_text(frame, 'name')}" for frame in frames)


def has_python_frames(frames: Frames) -> bool:
    return any(_is_python(_text(frame, "filename")) for frame in frames)


def _text(frame: object, key: str) -> str:
    """A field of a frame on one line; "?" for anything that is neither text nor a number."""
    value = frame.get(key) if isinstance(frame, dict) else None
    if isinstance(value, str):
        return printable(value)
    return f"{value}" if type(value) is int and abs(value) < 1 << 63 else "?"


def _is_python(filename: str) -> bool:
    return filename.endswith((".py", ".pyx")) or (filename.startswith("<") and filename.endswith(">"))
