"""Looks a stranger's MessagePack over before hivemind decodes it."""

from __future__ import annotations

from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils.serializer import MSGPackSerializer

from spes_p2p.errors import RecordError

MAX_DEPTH = 8
"""Containers within one another; a DHT's dictionary of records has four."""
MAX_VALUES = 2**15
"""Values in one message, containers counted; looking at so many takes some 10 ms."""
_EXT_CODE = MSGPackSerializer._ext_types[DictionaryDHTValue]
# By lead byte: bytes of a length that follows, and bytes of payload where they are always the same.
_SIZES = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_STRINGS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD4: 0, 0xD5: 0, 0xD6: 0, 0xD7: 0, 0xD8: 0}


class ShallowSerializer(MSGPackSerializer):
    """hivemind's serializer, which decodes nothing that is too deep.

    Stock decodes extension types within one another by recursion, in C, and before any validator has seen the
    message: some 220 of them, 1 KB, end the process by a segmentation fault.
    """

    @classmethod
    def loads(cls, buf: bytes) -> object:
        check_message(buf)
        try:
            return MSGPackSerializer.loads(buf)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:  # guard: decoder-errors
            raise RecordError(f"a message is malformed: {error}") from error


def check_message(data: bytes) -> None:
    """Refuse what is deeper or longer than any message of ours.

    One extension type is known, a DHT's dictionary, and it may only be the whole message.

    Raises:
        RecordError: too deep, too many values, of another type, or cut short.
    """
    place, values, still = 0, 0, [1]  # how many values are still to come of each container that is open
    while still:
        if not still[-1]:
            still.pop()
            continue
        still[-1] -= 1
        values += 1
        if place >= len(data) or values > MAX_VALUES:  # guard: decode-values
            raise RecordError(f"a message of {len(data)} bytes is cut short, or has more than {MAX_VALUES} values")
        place, inside = _after(data, place)
        if inside:
            if len(still) >= MAX_DEPTH:  # guard: decode-depth
                raise RecordError(f"a message is deeper than {MAX_DEPTH}")
            still.append(inside)
    if place != len(data):
        raise RecordError("a message does not end where its content does")


def _after(data: bytes, place: int) -> tuple[int, int]:
    """Return where a value's payload ends, or its content begins, and of how many values that consists."""
    lead = data[place]
    place += 1
    if lead < 0x80 or lead >= 0xE0 or lead in (0xC0, 0xC2, 0xC3):
        return place, 0
    if lead < 0xA0:
        return place, (lead & 0x0F) * (2 if lead < 0x90 else 1)
    if lead < 0xC0:
        return place + (lead & 0x1F), 0
    if lead in _SIZES:
        return place + _SIZES[lead], 0
    if lead in _STRINGS:
        return place + _STRINGS[lead] + _length(data, place, _STRINGS[lead]), 0
    if lead in _CONTAINERS:
        width, each = _CONTAINERS[lead]
        return place + width, each * _length(data, place, width)
    if lead in _EXTENSIONS and place == 1:  # guard: extension-alone
        content = place + _EXTENSIONS[lead] + 1
        if data[content - 1 : content] == bytes([_EXT_CODE]):  # guard: extension-known
            return content, 1
    raise RecordError(f"a message holds a value of unknown type, {lead:#x}")


def _length(data: bytes, place: int, width: int) -> int:
    return int.from_bytes(data[place : place + width])
