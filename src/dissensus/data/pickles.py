"""Plain data from a pickle, by a machine of a few instructions: nothing is imported, called or hashed for the file.

Python's own reader would also do what a stranger's file says short of running code: number its memo up to 2³¹ (and take
the memory), or nest what it builds so deeply that hashing it ends the process.
"""

from __future__ import annotations

import pickletools
from typing import Any

PLAIN = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8",
}  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
SHORT_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
MARK = object()


class Record:
    """What a pickle would have built: a name, the arguments it was called with and the state it was given."""

    def __init__(self, name: tuple[str, str], arguments: tuple[Any, ...] | None = None) -> None:
        self.name, self.arguments, self.state = name, arguments, None


def plain_pickle(raw: bytes, names: set[tuple[str, str]]) -> Any:
    """What a pickle of numbers, text, lists, tuples, dictionaries and records of `names` holds; ValueError for another."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(raw):
        name = opcode.name
        if name in PLAIN:
            stack.append(argument.encode("latin1") if "STRING" in name else argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name == "MARK":
            stack.append(MARK)
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name in SHORT_TUPLES:
            stack.append(tuple(_popped(stack, SHORT_TUPLES[name])))
        elif name in ("TUPLE", "LIST", "DICT"):
            above = _above_mark(stack)
            stack.append(tuple(above) if name == "TUPLE" else above if name == "LIST" else _filled({}, above))
        elif name in ("APPEND", "APPENDS"):
            above = _popped(stack, 1) if name == "APPEND" else _above_mark(stack)
            _top(stack, list).extend(above)
        elif name in ("SETITEM", "SETITEMS"):
            above = _popped(stack, 2) if name == "SETITEM" else _above_mark(stack)
            _filled(_top(stack, dict), above)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = _top(stack, object)
        elif name == "MEMOIZE":
            memo[len(memo)] = _top(stack, object)
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            where = tuple(argument.split(" ", 1)) if name == "GLOBAL" else tuple(_popped(stack, 2))
            if len(where) != 2 or not all(isinstance(part, str) for part in where) or where not in names:
                raise ValueError(f"the pickle asks for {'.'.join(map(str, where))[:80]}, which no CIFAR batch contains")
            stack.append(Record(where))
        elif name == "REDUCE":
            record, arguments = _popped(stack, 2)
            if not isinstance(record, Record) or record.arguments is not None or not isinstance(arguments, tuple):
                raise ValueError("a call of something that is no name")
            stack.append(Record(record.name, arguments))
        elif name == "BUILD":
            (state,) = _popped(stack, 1)
            record = _top(stack, Record)
            if record.arguments is None:
                raise ValueError("a state for a name that was not called")
            record.state = state
        elif name == "STOP":
            (result,) = stack
            return result
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"an instruction {name}, which plain data do not need")
    raise ValueError("it ends too early")


def _popped(stack: list[Any], count: int) -> list[Any]:
    if count > len(stack) or any(value is MARK for value in stack[len(stack) - count :]):
        raise ValueError("an instruction without its values")
    taken = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return taken


def _above_mark(stack: list[Any]) -> list[Any]:
    for i in range(len(stack) - 1, -1, -1):
        if stack[i] is MARK:
            taken = stack[i + 1 :]
            del stack[i:]
            return taken
    raise ValueError("an instruction without its mark")


def _top(stack: list[Any], kind: type) -> Any:
    if not stack or stack[-1] is MARK or not isinstance(stack[-1], kind):
        raise ValueError("an instruction on a value of another kind")
    return stack[-1]


def _filled(table: dict[Any, Any], pairs: list[Any]) -> dict[Any, Any]:
    """The table with keys and values that come in turn; keys are text."""
    if len(pairs) % 2 or not all(isinstance(key, str | bytes) for key in pairs[::2]):
        raise ValueError("a dictionary whose keys are no text")
    table.update(zip(pairs[::2], pairs[1::2], strict=True))
    return table
