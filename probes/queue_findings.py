"""What the queues of an experiment's arms mean: did each get what it asked for, and do the arms differ at all?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from harness.text import counted
from probes.queues import Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmQueues:
    """The queues that an arm's context has. `value`: the variable in its environment, None where it is not set."""

    arm: str
    value: str | None
    estimate: Estimate

    @property
    def asked(self) -> int | None:
        return asked_for(self.value)


def asked_for(value: str | None) -> int | None:
    """How many queues a value of the variable asks for; None where it is not set, or no number."""
    text = (value or "").strip()
    return int(text) if text.isdecimal() else None


def took_effect(arms: Sequence[ArmQueues]) -> bool | None:
    """Whether the contexts of two arms differ in their queues beyond the intervals; None with fewer than two known."""
    known = [arm.estimate for arm in arms if arm.estimate.count is not None]
    if len(known) < 2:
        return None
    return any(_more(one, other) for one in known for other in known)


def _more(one: Estimate, other: Estimate) -> bool:
    """Whether `one` has more queues, beyond both intervals."""
    if one.low is None or other.high is None or other.at_least:
        return False
    return one.low > other.high


def counts(arms: Sequence[ArmQueues]) -> list[str]:
    """How many queues each arm has."""
    return [f"{arm.arm}: {arm.estimate.words()}" for arm in arms if arm.estimate.count is not None]


def findings(arms: Sequence[ArmQueues], default: str | None) -> list[str]:
    """What the arms' queues mean, in words: whether each has a number and got what it asked for, whether more asked for
    gives more, and which arms are alike. `default`: what an unset variable means."""
    known = [arm for arm in arms if arm.estimate.count is not None]
    lines = [f"{arm.arm}: {arm.estimate.words()}" for arm in arms if arm not in known]
    for arm in known:
        if arm.value is None:
            if default and default.isdecimal() and not _gives(arm.estimate, int(default)):
                lines.append(f"{arm.arm}: not the default of {default}: {arm.estimate.words()}")
        elif arm.asked is None:
            lines.append(f"{arm.arm} is no number of queues")
        elif not _gives(arm.estimate, arm.asked):
            lines.append(f"asked for {arm.asked}, this context has {arm.estimate.number}")
    if known and not lines and not any(arm.estimate.at_least for arm in known):
        lines.append("each context has as many queues as asked for" + _by_default(known, default))
    by_asked = sorted((arm for arm in known if arm.asked is not None), key=lambda arm: arm.asked or 0)
    lines += [
        f"{more.arm} asks for more than {fewer.arm} and has fewer: "
        f"{more.estimate.number} against {fewer.estimate.number}"
        for fewer, more in pairwise(by_asked)
        if fewer.asked != more.asked and _more(fewer.estimate, more.estimate)
    ]
    lines += [line for line in [_alike(known), _effect(known)] if line]
    return lines


def _gives(found: Estimate, asked: int) -> bool:
    """Whether `asked` is within what was found."""
    return found.low is not None and found.low <= asked and (found.at_least or asked <= (found.high or 0))


def _by_default(known: Sequence[ArmQueues], default: str | None) -> str:
    return f" (unset: {default})" if default and any(arm.value is None for arm in known) else ""


def _alike(known: Sequence[ArmQueues]) -> str | None:
    groups: dict[int | None, list[str]] = {}
    for arm in known:
        if not arm.estimate.at_least:
            groups.setdefault(arm.estimate.count, []).append(arm.arm)
    alike = [
        f"{', '.join(names)} ({counted(count or 0, 'queue')})" for count, names in groups.items() if len(names) > 1
    ]
    return (
        f"alike in their queues, so that these make no difference between them: {'; '.join(alike)}" if alike else None
    )


def _effect(known: Sequence[ArmQueues]) -> str | None:
    effect = took_effect(known)
    if effect is None:
        return None
    if effect:
        fewest, *_, most = sorted((arm.estimate for arm in known), key=lambda found: (found.count or 0, found.at_least))
        return f"the setting took effect: contexts have from {fewest.count} to {most.number}"
    return "the arms' contexts do not differ in their queues: the setting has no effect here"
