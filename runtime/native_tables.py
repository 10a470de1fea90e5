"""Tables that a native call is settled to, which `native_call` fills and `native_entry` reads."""

from __future__ import annotations

WORD_BYTES = 8


def _fields(text: str) -> dict[str, int]:
    return {name: place for place, name in enumerate(text.split())}


# Tables, in words of 8 bytes: counts, addresses of further tables, of functions and of objects.
PLAN = _fields(
    "positional named names outs out_is_tuple arguments records like made makers results slot_count slots map_count maps "
    "launch_count launches device_type device describe stream_of current_context context encode_map launch refused "
    "is_negative none false tuple missed"
)
RECORD = _fields("type is_number is_float value device kind shape strides low_bits first end is_written")
"""An argument: its Python type; a number's value (of a float its bits); a tensor's device, element type and rank as DLPack
has them, its address modulo 16, and the bytes that it covers."""
MAKER = _fields("function argument type")
SLOT = _fields("place tensor")
MAP = _fields("current place rank sizes steps box every tensor")
LAUNCH = _fields("function shape stream parameters")
VIEW = _fields("data device kind shape strides offset")
"""`DLTensor`: device type and number share a word, and so do rank, type code, bits and lanes."""
