"""A timeline as lines of text: one per rank, one character per slot of time."""

from __future__ import annotations

from harness.pipeline.timeline import Timeline

WIDTH = 96
IDLE = "·"
LEGEND = "0–9 forward of a micro-batch (its last digit), a–j its backward, A–J for the weights alone, · idle"
FIRST = {"F": "0", "B": "a", "I": "a", "W": "A"}


def grid(timeline: Timeline, *, width: int = WIDTH) -> dict[int, str]:
    """Rank -> its line. Units of a planned timeline get whole characters; a longer one is sampled at the middle of
    each slot."""
    spans = [span for row in timeline.values() for span in row]
    if not spans:
        return dict.fromkeys(timeline, "")
    first = min(span.start for span in spans)
    length = max(span.end for span in spans) - first
    slots = length * max(1, min(3, width // length)) if length <= width else width
    lines = {}
    for rank, row in timeline.items():
        line = [IDLE] * slots
        for action, start, end in row:
            # Slots whose middle is in [start, end).
            begin, stop = (-(-(2 * (at - first) * slots - length) // (2 * length)) for at in (start, end))
            for slot in range(max(0, begin), min(slots, stop)):
                number = (action.steps[0].micro_batch or 0) % 10
                line[slot] = chr(ord(FIRST[action.steps[0].kind]) + number)
        lines[rank] = "".join(line)
    return lines
