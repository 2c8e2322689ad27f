"""Pickles read as data: no class or function that one names is ever looked up, let alone called.

A pickle is a program for a small machine that may name any function and have it called. This machine has only the
instructions that torch's own files need. Where the program names something, the name is what stays: `Name`; where it
would have it called, a `Call` says with which arguments. What they mean is the reader's business.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 256 << 20  # a list costs one byte here and 56 in memory
_NEWEST_PROTOCOL = 5
PERSISTENT = "persistent id"  # the `name` of the Call that stands for an object outside the pickle


class NotPlain(ValueError):
    """This is no pickle, or one that does what plain data does not need."""


@dataclass(frozen=True)
class Name:
    """A class or function that the pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Call:
    """An object as the pickle describes it: what would have made it, from what, and what it was then given."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


def loads(data: bytes) -> Any:
    """The value of a pickle: plain Python values, `Name` and `Call`. Raises NotPlain."""
    if len(data) > MAX_BYTES:
        raise NotPlain(f"it has {len(data)} bytes, and {MAX_BYTES} are the limit")
    machine, at = _Machine(), 0
    try:
        for opcode, argument, at in pickletools.genops(data):
            handler = _HANDLERS.get(opcode.name)
            if handler is None:
                raise NotPlain(f"it has the instruction {opcode.name} at byte {at}, which plain data does not need")
            handler(machine, argument)
        return machine.stack.pop()
    except NotPlain:
        raise
    except (IndexError, KeyError, AttributeError, TypeError, ValueError) as error:
        raise NotPlain(f"it makes no sense after byte {at}: {type(error).__name__}: {error}") from error


class _Machine:
    """A stack, the stacks below its marks, and what the program wants to see again."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def marked(self) -> list[Any]:
        """What stands above the last mark, which goes."""
        items, self.stack = self.stack, self.below.pop()
        return items

    # --- instructions ---

    def protocol(self, version: int) -> None:
        if version > _NEWEST_PROTOCOL:
            raise NotPlain(f"it is of protocol {version}; {_NEWEST_PROTOCOL} is the newest one that is known")

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def tuple_of(self, size: int) -> None:
        if size > len(self.stack):
            raise NotPlain("it takes what is not there")
        items = tuple(self.stack[-size:])
        self.stack[-size:] = [items]

    def append(self) -> None:
        item = self.stack.pop()
        self.extend([item])

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise NotPlain("it appends to what is no list")
        target.extend(items)

    def put(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self.update([key, value])

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise NotPlain("it puts keys into what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int, Call):  # a deep tuple as a key can crash the interpreter
                raise NotPlain(f"a dictionary in it has a {type(key).__name__} as a key")
            target[key] = value

    def named(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise NotPlain("it names something by what is no text")
        self.stack.append(Name(module, name))

    def called(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(args) is not tuple:
            raise NotPlain("it calls what has no name")
        self.stack.append(_plain(str(name), args))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not Call or target.state is not None:
            raise NotPlain("it gives a state to what takes none")
        target.state = state


def _plain(name: str, args: tuple[Any, ...]) -> Any:
    """A plain value that Python's pickles make by a call; any other call stays one."""
    if name == "collections.OrderedDict" and not args:
        return {}
    if name == "_codecs.encode" and len(args) == 2 and type(args[0]) is str and args[1] == "latin1":
        return args[0].encode("latin1")  # bytes, before protocol 3
    return b"" if name == "__builtin__.bytes" and not args else Call(name, args)


def _text(argument: str) -> str:
    argument.encode()  # `pickletools` lets halves of characters pass
    return argument


def _push(make: Callable[[_Machine, Any], Any]) -> Callable[[_Machine, Any], None]:
    def handler(machine: _Machine, argument: Any) -> None:
        value = make(machine, argument)  # first: it may leave the machine another stack
        machine.stack.append(value)

    return handler


_itself = _push(lambda _, argument: argument)
_text_itself = _push(lambda _, argument: _text(argument))
_memo = _push(lambda m, place: m.memo[place])

# By the names that `pickletools` gives them; each takes the machine and its argument.
_HANDLERS: dict[str, Callable[[_Machine, Any], Any]] = {
    "PROTO": _Machine.protocol,
    "FRAME": lambda m, _: None,  # for readers of streams
    "STOP": lambda m, _: None,
    "MARK": lambda m, _: m.mark(),
    "POP": lambda m, _: m.stack.pop(),
    "NONE": _itself,
    "NEWTRUE": _push(lambda *_: True),
    "NEWFALSE": _push(lambda *_: False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINBYTES", "BINBYTES"), _itself),
    **dict.fromkeys(("SHORT_BINSTRING", "BINSTRING"), _itself),  # of Python 2: bytes, as text of latin1
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _text_itself),
    "EMPTY_LIST": _push(lambda *_: []),
    "EMPTY_DICT": _push(lambda *_: {}),
    "EMPTY_TUPLE": _push(lambda *_: ()),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "TUPLE": _push(lambda m, _: tuple(m.marked())),
    "APPEND": lambda m, _: m.append(),
    "APPENDS": lambda m, _: m.extend(m.marked()),
    "SETITEM": lambda m, _: m.put(),
    "SETITEMS": lambda m, _: m.update(m.marked()),
    "MEMOIZE": lambda m, _: m.remember(len(m.memo)),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _memo),
    "GLOBAL": _push(lambda m, pair: Name(*pair.split(" ", 1))),
    "STACK_GLOBAL": lambda m, _: m.named(),
    **dict.fromkeys(("NEWOBJ", "REDUCE"), lambda m, _: m.called()),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.stack.append(Call(PERSISTENT, (m.stack.pop(),))),
}
