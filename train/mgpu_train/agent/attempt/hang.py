"""Where the ranks of a hung attempt are, and which of them the others wait for. Pure: texts and values in, words out.

Three things tell it, the surest first: torch's flight recorder (who was in which collective last), the stacks of the
ranks (who stands in one), and the steps that they have told of.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple

_FRAME = re.compile(r'\s*File "(.+)", line (\d+|\?\?\?) in (.+)')
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_AUTOGRAD = "torch/autograd/graph.py"
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
_NAMED = 4  # ranks that a reason names


class Frame(NamedTuple):
    """One call: the innermost is the first of a stack."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{self.line} ({self.function})"


Stack = tuple[Frame, ...]


class Collective(NamedTuple):
    """The last collective of a rank in one group of ranks, by the flight recorder."""

    number: int
    name: str  # nccl:all_reduce
    state: str  # scheduled, started, completed


@dataclass(frozen=True)
class Rank:
    """What is known of one rank when it hangs."""

    stack: Stack = ()
    collectives: Mapping[str, Collective] = field(default_factory=dict)  # by the name of the group
    done: tuple[int, ...] = ()  # how far it is: greater is further
    silent: bool = False  # it was asked for its stacks, and has shown none: it is stopped, or stands in the kernel


@dataclass(frozen=True)
class Hang:
    """Which rank the others wait for, where one can be told, and the whole in words."""

    words: str = ""
    missing: int | None = None


def main_stack(text: str) -> Stack:
    """Of the main thread, in what Python's faulthandler has written last; empty: there is none."""
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if found := _FRAME.match(line):
            if stacks:
                stacks[-1].append(Frame(*found.groups()))
        else:
            stacks.append([])
    mains = [stack for stack in stacks if any(frame.function == "<module>" for frame in stack)]
    return tuple(mains[-1]) if mains else ()


def collectives(dump: Any) -> dict[str, Collective]:
    """The newest one of each group, from a dump of the flight recorder as plain values; what is no dump has none."""
    newest: dict[str, Collective] = {}
    for entry in dump.get("entries") or () if isinstance(dump, dict) else ():
        try:
            group, number = str(entry["process_group"][0]), entry["collective_seq_id"]
            seen = Collective(number, str(entry["profiling_name"]), str(entry["state"]))
        except (KeyError, IndexError, TypeError):
            continue
        if type(number) is int and not entry.get("is_p2p") and (group not in newest or number >= newest[group].number):
            newest[group] = seen
    return newest


def judge(ranks: Mapping[int, Rank], *, alone: bool) -> Hang:
    """What the ranks of one node say. `alone`: the attempt has no others."""
    missing, words = _by_collectives(ranks) or _by_stacks(ranks, alone=alone) or _by_steps(ranks) or (None, "")
    if missing is not None:
        return Hang(_and_where(words, missing, ranks[missing].stack), missing)
    shown = {rank: each.stack for rank, each in ranks.items() if each.stack}
    if words or len(shown) != 1:
        return Hang(words)
    ((rank, stack),) = shown.items()
    return Hang(f"rank {rank} is in {_place(stack)}")


def _by_collectives(ranks: Mapping[int, Rank]) -> tuple[int, str] | None:
    for group in sorted({name for each in ranks.values() for name in each.collectives}):
        last = {rank: each.collectives[group] for rank, each in ranks.items() if group in each.collectives}
        furthest = max(each.number for each in last.values())
        behind = [rank for rank, each in last.items() if each.number < furthest]
        if behind:
            there = [rank for rank in last if rank not in behind]
            name = last[there[0]].name
            return behind[0], f"{_ranks(behind)} did not come to {name}, number {furthest}, where {_do(there, 'wait')}"
    return None


def _by_stacks(ranks: Mapping[int, Rank], *, alone: bool) -> tuple[int | None, str] | None:
    shown = {rank: each.stack for rank, each in ranks.items() if each.stack}
    waiting = {rank: name for rank, stack in shown.items() if (name := _waits_in(stack))}
    silent = [rank for rank, each in ranks.items() if each.silent]
    if not waiting and len(shown) + len(silent) > 1:  # gradients are exchanged in there, below Python
        waiting = {rank: "the backward pass" for rank, stack in shown.items() if any(map(_is_backward, stack))}
    if silent:
        others = [f"{_do(waiting, 'wait')} in {next(iter(waiting.values()))}"] if waiting else []
        return silent[0] if waiting else None, " and ".join([*others, f"{_ranks(silent)} showed no stacks"])
    if not waiting:
        return None
    elsewhere, name = [rank for rank in shown if rank not in waiting], next(iter(waiting.values()))
    if elsewhere:
        return elsewhere[0], f"{_do(waiting, 'wait')} in {name}, and not {_ranks(elsewhere)}"
    return None if alone and len(waiting) < 2 else (None, f"{_do(waiting, 'wait')} in {name}")


def _by_steps(ranks: Mapping[int, Rank]) -> tuple[int, str] | None:
    known = {rank: each.done for rank, each in ranks.items() if each.done}
    if len(known) < 2:
        return None
    least = min(known.values())
    behind = [rank for rank, done in known.items() if done == least]
    if len(behind) == len(known):
        return None
    return behind[0], f"{_ranks(behind)} fell behind the others, at step {least[0]}"


def _waits_in(stack: Stack) -> str | None:
    """The collective that a rank stands in: the outermost call of torch's own module for them."""
    inside = [frame for frame in stack if frame.file.endswith(_COLLECTIVES)]
    return inside[-1].function if inside else None


def _is_backward(frame: Frame) -> bool:
    return frame.file.endswith(_AUTOGRAD) and frame.function == "_engine_run_backward"


def _and_where(words: str, rank: int, stack: Stack) -> str:
    return f"{words}: rank {rank} is in {_place(stack)}" if stack else words


def _place(stack: Stack) -> str:
    """Where a rank is: in the newest call that is not a library's."""
    own = [frame for frame in stack if not any(part in frame.file for part in _LIBRARIES)]
    return str(next(iter(own), stack[0]))


def _ranks(numbers: Collection[int]) -> str:
    numbers = sorted(numbers)
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers[:_NAMED]))}{more}"


def _do(numbers: Collection[int], verb: str) -> str:
    return f"{_ranks(numbers)} {verb}{'s' if len(numbers) == 1 else ''}"
