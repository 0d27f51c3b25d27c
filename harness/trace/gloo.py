"""Which c10d call each of gloo's works belongs to: a work's annotation says neither its group nor its number.

gloo runs a work on a worker thread of its process group, in the order of the group's calls, at or after the call.
So a thread has one group, and a work belongs to the earliest call of that group that has no work yet, has started, and
is of a kind gloo runs under the work's name. Which group a thread has is found by trying: of the groups a thread's
first work fits, the one that called first, unless later works contradict it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# What gloo calls a work, where it is not the call's kind.
ALIASES = {"reduce_scatter": {"all_reduce"}, "send_recv": {"send", "recv"}}
# Works whose call, and calls whose work, may be missing in a capture that is otherwise consistent: this share of the
# works (1 per thread at least, for what was under way when the capture began).
MISSING_SHARE = 0.1
# A search visits each work this often on average before it gives up.
MAX_VISITS = 50


class Call(NamedTuple):
    """A c10d call: its start and end in ns, the host thread, kind and process group."""

    start: int
    end: int
    thread: int
    kind: str
    group: str | None


class Work(NamedTuple):
    """A gloo work: its start in ns, the thread it ran on, and the kind by gloo's name."""

    start: int
    thread: int
    kind: str


def link(calls: Sequence[Call], works: Sequence[Work]) -> list[int | None]:
    """The index of each work's call; None for a work without one. All are None if the capture contradicts itself."""
    found = in_calls(calls, works)
    taken = set(found)
    ours = sorted((i for i in range(len(calls)) if i not in taken), key=lambda i: calls[i].start)
    theirs = sorted((i for i, call in enumerate(found) if call is None), key=lambda i: works[i].start)
    linked = Search([calls[i] for i in ours], [works[i] for i in theirs]).run()
    for work, call in zip(theirs, linked, strict=True):
        found[work] = None if call is None else ours[call]
    return found


def in_calls(calls: Sequence[Call], works: Sequence[Work]) -> list[int | None]:
    """The calls of those works whose annotation opens on the calling thread, within the call: sends and receives."""
    by_thread: dict[int, list[int]] = {}
    for index in sorted(range(len(calls)), key=lambda i: calls[i].start):
        by_thread.setdefault(calls[index].thread, []).append(index)
    starts = {thread: [calls[i].start for i in indices] for thread, indices in by_thread.items()}
    found: list[int | None] = []
    for work in works:
        place = bisect_left(starts.get(work.thread, []), work.start + 1) - 1
        call = by_thread[work.thread][place] if place >= 0 else None
        found.append(call if call is not None and work.start < calls[call].end else None)
    return found


class State:
    """What is known after some of the works: each thread's group, and the calls of each group without a work."""

    def __init__(self, owner: dict[int, str | None], open_calls: dict[str | None, list[int]]) -> None:
        self.owner = owner
        self.open_calls = open_calls
        self.last = dict.fromkeys(open_calls, -1)
        self.strays = 0

    def copy(self) -> State:
        other = State(dict(self.owner), {group: list(calls) for group, calls in self.open_calls.items()})
        other.last, other.strays = dict(self.last), self.strays
        return other

    def missing(self) -> int:
        """Works without a call, and calls without a work although a later call of their group has one."""
        return self.strays + sum(bisect_left(calls, self.last[group]) for group, calls in self.open_calls.items())


class Search:
    """Depth first over the groups of the threads, for as few missing calls and works as possible. Calls and works are
    in order of their starts."""

    def __init__(self, calls: Sequence[Call], works: Sequence[Work]) -> None:
        self.calls, self.works = calls, works
        self.links: list[int | None] = [None] * len(works)
        self.visits = 0

    def run(self) -> list[int | None]:
        threads = len({work.thread for work in self.works})
        groups: dict[str | None, list[int]] = {}
        for index, call in enumerate(self.calls):
            groups.setdefault(call.group, []).append(index)
        for allowed in self.allowances(threads):
            if self.follow(0, State({}, {group: list(calls) for group, calls in groups.items()}), allowed):
                return self.links
        return [None] * len(self.works)

    def allowances(self, threads: int) -> Iterator[int]:
        """How many calls and works may be missing: ever more, from the least possible."""
        least = max(0, len(self.works) - len(self.calls))
        most = max(threads, int(MISSING_SHARE * len(self.works)))
        more = 0
        while least + more <= most:
            yield least + more
            more = max(1, 2 * more)

    def follow(self, index: int, state: State, allowed: int) -> bool:
        """Links the works from `index` on; False if that contradicts `state`."""
        while index < len(self.works):
            self.visits += 1
            work = self.works[index]
            if state.missing() > allowed or self.visits > MAX_VISITS * len(self.works):
                return False
            if work.thread not in state.owner:
                for group in self.groups_of(work, state):
                    trial = state.copy()
                    trial.owner[work.thread] = group
                    if self.follow(index, trial, allowed):
                        return True
            self.links[index] = self.take(work, state)
            state.strays += self.links[index] is None
            index += 1
        return state.missing() <= allowed

    def groups_of(self, work: Work, state: State) -> list[str | None]:
        """The groups that have a call for the work, the one that called first first."""
        places = {group: self.earliest(work, calls) for group, calls in state.open_calls.items()}
        first = [(state.open_calls[group][place], group) for group, place in places.items() if place is not None]
        return [group for _, group in sorted(first, key=lambda item: item[0])]

    def take(self, work: Work, state: State) -> int | None:
        """The call of a work whose thread's group is known, which then has its work."""
        if work.thread not in state.owner:
            return None
        group = state.owner[work.thread]
        place = self.earliest(work, state.open_calls[group])
        if place is None:
            return None
        call = state.open_calls[group].pop(place)
        state.last[group] = max(state.last[group], call)
        return call

    def earliest(self, work: Work, open_calls: Sequence[int]) -> int | None:
        """The place of the first call that started by the work's start and is of its kind."""
        for place, index in enumerate(open_calls):
            call = self.calls[index]
            if call.start > work.start:
                return None
            if work.kind == call.kind or work.kind in ALIASES.get(call.kind, ()):
                return place
        return None
