"""Sound inputs made unsound: bytes as disks, copies and crashes damage them, trees as other versions of engines would.

Everything follows from the `random.Random` that is passed in, so that an input can be made again from its number.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

SECTOR = 512
_BYTES = (0x00, 0x01, 0x7F, 0x80, 0xFF)
_NUMBERS = (0, 1, -1, 2, 7, 8, 127, 255, 2**15, 2**16, 2**24, 2**31 - 1, -(2**31), 2**32 - 1, 2**40, 2**62, -(2**63))


def mutate_bytes(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """`data` with one to four changes; pieces of `others` may get into it."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        random.choice(_BYTE_CHANGES)(random, changed, others)
    return bytes(changed)


def _span(random: Random, data: bytearray) -> tuple[int, int]:
    """Where something happens: a few bytes, or whole sectors."""
    if not data:
        return 0, 0
    if random.random() < 0.3:
        start = random.randrange(len(data)) // SECTOR * SECTOR
        return start, min(start + SECTOR * random.randint(1, 4), len(data))
    start = random.randrange(len(data))
    return start, min(start + random.choice((1, 2, 4, 8, 16, 64, 300)), len(data))


def _flip(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    for _ in range(random.choice((1, 1, 2, 8))):
        if data:
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _byte(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    if data:
        data[random.randrange(len(data))] = random.choice(_BYTES)


def _number(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    """A length, an offset or a count, most likely, since they are aligned."""
    form = random.choice(("<i", "<q", "<h"))
    size = struct.calcsize(form)
    if len(data) < size:
        return
    at = random.randrange(0, len(data) - size + 1, random.choice((1, size)) if len(data) > 2 * size else 1)
    (before,) = struct.unpack_from(form, data, at)
    value = random.choice((*_NUMBERS, before + 1, before - 1, before * 2, before + 8, -before))
    bits = 8 * size
    struct.pack_into(form, data, at, (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1))


def _cut(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    del data[random.randint(0, len(data)) :]


def _grow(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    data += random.choice((bytes(random.randint(1, 2 * SECTOR)), random.randbytes(random.randint(1, 64))))


def _zero(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    start, stop = _span(random, data)
    data[start:stop] = bytes(stop - start)


def _noise(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    start, stop = _span(random, data)
    data[start:stop] = random.randbytes(stop - start)


def _remove(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    start, stop = _span(random, data)
    del data[start:stop]


def _repeat(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    start, stop = _span(random, data)
    data[stop:stop] = data[start:stop]


def _swap(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    start, stop = _span(random, data)
    other = random.randint(0, max(len(data) - (stop - start), 0))
    if other + stop - start <= len(data):
        piece, data[start:stop] = bytes(data[start:stop]), data[other : other + stop - start]
        data[other : other + len(piece)] = piece


def _splice(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    """The place of another file's bytes, or its whole end."""
    other = random.choice(others)
    start, stop = _span(random, data)
    if random.random() < 0.5:
        data[start:stop] = other[start:stop]
    else:
        data[start:] = other[start:]


_BYTE_CHANGES = (
    _flip,
    _flip,
    _byte,
    _number,
    _number,
    _cut,
    _grow,
    _zero,
    _noise,
    _remove,
    _repeat,
    _swap,
    _splice,
)


class Holder:
    """A tree whose root can be changed as any other place can."""

    def __init__(self, tree: Any) -> None:
        self.tree = [tree]

    def places(self) -> list[tuple[Any, Any]]:
        """(container, key) of every place."""
        found: list[tuple[Any, Any]] = []
        waiting: list[Any] = [self.tree]
        while waiting:
            container = waiting.pop()
            entries = list(container.items() if isinstance(container, dict) else enumerate(container))
            found += [(container, key) for key, _ in entries]
            waiting += [entry for _, entry in entries if isinstance(entry, (dict, list))]
        return found


def mutate_tree(random: Random, tree: Any, others: Sequence[Any], bytes_too: bool) -> Any:
    """A copy of `tree` with one to four places changed; pieces of `others` may get into it."""
    holder = Holder(copy.deepcopy(tree))
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        places = holder.places()
        if not places:
            break
        container, key = random.choice(places)
        _change(random, holder, container, key, others, bytes_too)
    return holder.tree[0] if holder.tree else None


def _change(random: Random, holder: Holder, container: Any, key: Any, others: Sequence[Any], bytes_too: bool) -> None:
    how = random.choice(
        ("leaf", "leaf", "near", "near", "remove", "repeat", "shorten", "swap", "graft", "wrap", "rename")
    )
    value = container[key]
    if how == "leaf":
        container[key] = _leaf(random, bytes_too)
    elif how == "near":
        container[key] = _near(random, value)
    elif how == "remove":
        del container[key]
    elif how == "repeat" and isinstance(container, list):
        container.insert(key, copy.deepcopy(value))
    elif how == "shorten" and isinstance(value, list):
        del value[random.randint(0, len(value)) :]
    elif how == "swap":
        other_container, other_key = random.choice(holder.places())
        mine, theirs = copy.deepcopy(value), copy.deepcopy(other_container[other_key])
        container[key] = theirs
        if not _gone(other_container, other_key):
            other_container[other_key] = mine
    elif how == "graft":
        other_container, other_key = random.choice(Holder(random.choice(others)).places())
        container[key] = copy.deepcopy(other_container[other_key])
    elif how == "wrap":
        container[key] = random.choice(([value], {"value": value}, [value, value], str(value)))
    elif how == "rename" and isinstance(container, dict):
        name = random.choice((str(key).upper(), f"{key}s", "token_ids", "logprobs", "", "0", "sampling_mask"))
        container[name] = container.pop(key)


def _gone(container: Any, key: Any) -> bool:
    return key not in container if isinstance(container, dict) else key >= len(container)


def _leaf(random: Random, bytes_too: bool) -> Any:
    leaves = [
        None,
        True,
        False,
        0,
        -0.0,
        1.5,
        float("nan"),
        float("inf"),
        float("-inf"),
        1e-320,
        -9999.0,
        -1e6,
        10**30,
        2**64,
        2**63 - 1,
        2**31,
        2**31 - 1,
        -(2**31) - 1,
        -1,
        23,
        24,
        "",
        "7",
        "token_id:7",
        "token_id:-1",
        "NaN",
        "\ud800",
        "\u0000",
        "AAAA",
        "AAAAAAEAAAA=",
        "é" * 300,
        [],
        {},
        [[]],
        [None],
        [0],
        [0, 0],
        [3, 1, 2],
        [[], [1]],
        {"7": 1},
        list(range(40)),
    ]
    if bytes_too:
        leaves += [b"", b"\x00", b"\xff" * 7, random.randbytes(8), 2**64 - 1]
    return random.choice(leaves)


def _near(random: Random, value: Any) -> Any:
    """Almost what was there: what a check that looks at types alone lets pass."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return random.choice((value + 1, value - 1, -value, float(value), str(value), value + 2**32, value << 20))
    if isinstance(value, float):
        return random.choice((-value, value / 2, value * 1e4, value + 1e-3, int(value) if abs(value) < 1e9 else 0))
    if isinstance(value, str):
        return random.choice((value[:-1], value + value, value.upper(), [value], value.replace("a", "b")))
    if isinstance(value, bytes):
        return random.choice((value[:-1], value + b"\0", bytes(reversed(value)), list(value)))
    if isinstance(value, list):
        again = list(value)
        random.shuffle(again)
        return random.choice(
            (again, value[1:], value + value[-1:], value * 2, {str(n): v for n, v in enumerate(value)})
        )
    if isinstance(value, dict):
        return random.choice((list(value.values()), list(value), {}, [value]))
    return 0
