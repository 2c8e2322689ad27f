"""Pickles read as data: no class or function that one names is ever looked up, let alone called.

A pickle is a program for a small machine that may name any function and have it called. This machine has only the
instructions that torch's own files need. Where the program names something, the name is what stays: `Name`; where it
would have it called, a `Call` says with which arguments. What they mean is the reader's business.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 256 << 20  # a list costs one byte here and 56 in memory
_NEWEST_PROTOCOL = 5
_LONGEST_NUMBER = 16  # bytes
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
    machine = _Machine(data)
    try:
        return machine.run()
    except (IndexError, KeyError, AttributeError, TypeError, struct.error, UnicodeError) as error:
        raise NotPlain(f"it makes no sense at byte {machine.at}: {type(error).__name__}") from error


class _Machine:
    """A stack, the stacks below its marks, and what the program wants to see again."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, handlers = self.data, _HANDLERS
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack.pop()
            handler = handlers.get(code)
            if handler is None:
                raise NotPlain(
                    f"it has the instruction {code:#04x} at byte {self.at - 1}, which plain data does not need"
                )
            handler(self)

    def take(self, size: int) -> bytes:
        """The next bytes of the program."""
        end = self.at + size
        if end > len(self.data):
            raise NotPlain("it is cut off")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, layout: str) -> Any:
        """The next number, as `struct` calls it."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def line(self) -> str:
        """Up to the next end of a line."""
        end = self.data.index(b"\n", self.at) if b"\n" in self.data[self.at : self.at + 512] else None
        if end is None:
            raise NotPlain("a name in it does not end")
        return self.take(end + 1 - self.at)[:-1].decode()

    def marked(self) -> list[Any]:
        """What stands above the last mark, which goes."""
        items, self.stack = self.stack, self.below.pop()
        return items

    # --- instructions ---

    def protocol(self) -> None:
        version = self.number("<B")
        if version > _NEWEST_PROTOCOL:
            raise NotPlain(f"it is of protocol {version}; {_NEWEST_PROTOCOL} is the newest one that is known")

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def long(self) -> None:
        size = self.number("<B")
        if size > _LONGEST_NUMBER:
            raise NotPlain(f"it has a number of {size} bytes")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

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


_STOP = ord(".")


def _push(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def handler(machine: _Machine) -> None:
        value = make(machine)  # first: it may leave the machine another stack
        machine.stack.append(value)

    return handler


# By their one-byte codes, named as Python's `pickletools` names them.
_HANDLERS: dict[int, Callable[[_Machine], None]] = {
    ord(code): handler
    for code, handler in {
        "\x80": _Machine.protocol,
        "\x95": lambda m: m.number("<Q"),  # FRAME: for readers of streams
        "(": _Machine.mark,
        "0": lambda m: m.stack.pop(),  # POP
        "N": _push(lambda _: None),
        "\x88": _push(lambda _: True),
        "\x89": _push(lambda _: False),
        "K": _push(lambda m: m.number("<B")),  # BININT1
        "M": _push(lambda m: m.number("<H")),  # BININT2
        "J": _push(lambda m: m.number("<i")),  # BININT
        "\x8a": _Machine.long,  # LONG1
        "G": _push(lambda m: m.number(">d")),  # BINFLOAT
        "\x8c": _push(lambda m: m.take(m.number("<B")).decode()),  # SHORT_BINUNICODE
        "X": _push(lambda m: m.take(m.number("<I")).decode()),  # BINUNICODE
        "\x8d": _push(lambda m: m.take(m.number("<Q")).decode()),  # BINUNICODE8
        "C": _push(lambda m: m.take(m.number("<B"))),  # SHORT_BINBYTES
        "B": _push(lambda m: m.take(m.number("<I"))),  # BINBYTES
        "]": _push(lambda _: []),
        "}": _push(lambda _: {}),
        ")": _push(lambda _: ()),
        "\x85": lambda m: m.tuple_of(1),
        "\x86": lambda m: m.tuple_of(2),
        "\x87": lambda m: m.tuple_of(3),
        "t": _push(lambda m: tuple(m.marked())),
        "a": _Machine.append,
        "e": lambda m: m.extend(m.marked()),
        "s": _Machine.put,
        "u": lambda m: m.update(m.marked()),
        "\x94": lambda m: m.remember(len(m.memo)),  # MEMOIZE
        "q": lambda m: m.remember(m.number("<B")),  # BINPUT
        "r": lambda m: m.remember(m.number("<I")),  # LONG_BINPUT
        "h": _push(lambda m: m.memo[m.number("<B")]),  # BINGET
        "j": _push(lambda m: m.memo[m.number("<I")]),  # LONG_BINGET
        "c": _push(lambda m: Name(m.line(), m.line())),  # GLOBAL
        "\x93": _Machine.named,  # STACK_GLOBAL
        "\x81": _Machine.called,  # NEWOBJ
        "R": _Machine.called,  # REDUCE
        "b": _Machine.build,
        "Q": lambda m: m.stack.append(Call(PERSISTENT, (m.stack.pop(),))),
    }.items()
}
