"""Bounds a remote peer's MessagePack before hivemind decodes it."""

from __future__ import annotations

from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils.serializer import MSGPackSerializer

from spes_p2p.errors import RecordError

MAX_DEPTH = 8
"""Nested containers; a DHT's dictionary of records has four."""
MAX_VALUES = 2**15
"""Values in one message, containers included."""
_EXT_CODE = MSGPackSerializer._ext_types[DictionaryDHTValue]
# By lead byte: the payload's bytes where they are fixed (_SIZES), otherwise the bytes of the length that follows.
_SIZES = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_STRINGS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD4: 0, 0xD5: 0, 0xD6: 0, 0xD7: 0, 0xD8: 0}


class ShallowSerializer(MSGPackSerializer):
    """hivemind's serializer with a bound on depth.

    Stock decodes nested extension types by recursion in C, before any validator sees the message: 220 levels, 1 KB, end
    the process by a segmentation fault.
    """

    @classmethod
    def loads(cls, buf: bytes) -> object:
        check_message(buf)
        try:
            return MSGPackSerializer.loads(buf)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:  # guard: never
            raise RecordError(f"a message is malformed: {error}") from error


def check_message(data: bytes) -> None:
    """Refuse a message that is deeper or longer than any of this program.

    The only extension type allowed is a DHT's dictionary, and only as the whole message.

    Raises:
        RecordError: too deep, too many values, of another type, or cut short.
    """
    offset, num_values, remaining = 0, 0, [1]  # remaining: values still to come of each open container
    while remaining:
        if not remaining[-1]:
            remaining.pop()
            continue
        remaining[-1] -= 1
        num_values += 1
        if offset >= len(data) or num_values > MAX_VALUES:  # guard: operand
            raise RecordError(f"a message of {len(data)} bytes is cut short, or has more than {MAX_VALUES} values")
        offset, num_children = _skip(data, offset)
        if num_children:
            if len(remaining) >= MAX_DEPTH:  # guard: never
                raise RecordError(f"a message is deeper than {MAX_DEPTH}")
            remaining.append(num_children)
    if offset != len(data):
        raise RecordError("a message does not end where its content does")


def _skip(data: bytes, offset: int) -> tuple[int, int]:
    """Return the offset behind a value, or behind a container's header, and the container's number of values."""
    lead = data[offset]
    offset += 1
    if lead < 0x80 or lead >= 0xE0 or lead in (0xC0, 0xC2, 0xC3):
        return offset, 0
    if lead < 0xA0:
        return offset, (lead & 0x0F) * (2 if lead < 0x90 else 1)
    if lead < 0xC0:
        return offset + (lead & 0x1F), 0
    if lead in _SIZES:
        return offset + _SIZES[lead], 0
    if lead in _STRINGS:
        return offset + _STRINGS[lead] + _length(data, offset, _STRINGS[lead]), 0
    if lead in _CONTAINERS:
        width, values_per_item = _CONTAINERS[lead]
        return offset + width, values_per_item * _length(data, offset, width)
    if lead in _EXTENSIONS and offset == 1:  # guard: operand
        content = offset + _EXTENSIONS[lead] + 1
        if data[content - 1 : content] == bytes([_EXT_CODE]):  # guard: always
            return content, 1
    raise RecordError(f"a message holds a value of unknown type, {lead:#x}")


def _length(data: bytes, offset: int, width: int) -> int:
    return int.from_bytes(data[offset : offset + width])
