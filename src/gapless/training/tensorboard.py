"""TensorBoard event files, written by hand: a few scalar records do not need a library.

An event file is a sequence of TFRecords, each `length (uint64) | masked CRC-32C of it | data | masked CRC-32C of it`,
little-endian. The data is a protocol buffer message `Event`; the few fields used are encoded here.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from pathlib import Path

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class EventWriter:
    """Appends scalars to a new event file in `folder`."""

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        """Open a file; readers drop what earlier files of the folder hold from `first_step` on (a resumed run)."""
        folder.mkdir(parents=True, exist_ok=True)
        count = len(list(folder.glob("events.out.tfevents.*")))
        # Readers take files in the order of their names; the count keeps files of one second apart.
        self._file = (folder / f"events.out.tfevents.{int(time.time()):010d}.{count:04d}").open("xb")
        self._write(_string(3, "brain.Event:2"))
        if count:
            self._write(_number(2, first_step) + _message(7, _number(1, 1)))  # SessionLog with status START

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Append values by tag."""
        summary = b"".join(
            _message(1, _string(1, tag) + _key(2, _FIXED32) + struct.pack("<f", value)) for tag, value in values.items()
        )
        self._write(_number(2, step) + _message(5, summary))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, fields: bytes) -> None:
        event = _key(1, _FIXED64) + struct.pack("<d", time.time()) + fields
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_crc(length) + event + _masked_crc(event))


# ---- protocol buffers ----


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _number(field: int, value: int) -> bytes:
    return _key(field, _VARINT) + _varint(value)


def _message(field: int, value: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(value)) + value


def _string(field: int, value: str) -> bytes:
    return _message(field, value.encode())


# ---- checksums ----


def _crc_table() -> list[int]:
    """CRC-32C (Castagnoli, RFC 3720 appendix B.4), reflected, one entry a byte."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32C of `data`."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked_crc(data: bytes) -> bytes:
    # TFRecord rotates the checksum and adds a constant, so that checksums of checksums stay apart.
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
