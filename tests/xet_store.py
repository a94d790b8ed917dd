"""The storage behind a Hub's Xet uploads: files are sent as chunks in xorbs, and as lists of those chunks in shards.

Formats: https://huggingface.co/docs/xet (xorb, shard).
"""
import hashlib
import struct

import lz4.frame

HASH, HEADER, ENTRY = 32, 48, 48
BOOKEND = b'\xff' * HASH
WITH_VERIFICATION, WITH_METADATA = 1 << 31, 1 << 30


class XetStore:
    def __init__(self, blobs):
        self.blobs = blobs  # whole files by their SHA-256
        self.xorbs = {}

    def add_xorb(self, name, content):
        """A xorb is chunks one after the other, maybe with a footer."""
        chunks, position = [], 0
        while position < len(content) and content[position] == 0:
            scheme = content[position + 4]
            stored, length = (int.from_bytes(content[position + i:position + i + 3], 'little') for i in (1, 5))
            position += 8
            chunks.append(decompress(content[position:position + stored], scheme))
            assert len(chunks[-1]) == length
            position += stored
        self.xorbs[name] = chunks

    def add_shard(self, content):
        """The files of a shard are whole when all their xorbs are there, which come first."""
        position = HEADER
        while content[position:position + HASH] != BOOKEND:
            flags, num_entries = struct.unpack_from('<II', content, position + HASH)
            position += HEADER
            data = b''
            for _ in range(num_entries):
                _, length, start, end = struct.unpack_from('<IIII', content, position + HASH)
                part = b''.join(self.xorbs[hex_name(content[position:position + HASH])][start:end])
                assert len(part) == length
                data += part
                position += ENTRY
            position += ENTRY * num_entries * bool(flags & WITH_VERIFICATION)
            if flags & WITH_METADATA:
                assert hex_name(content[position:position + HASH]) == hashlib.sha256(data).hexdigest()
                position += ENTRY
            self.blobs[hashlib.sha256(data).hexdigest()] = data


def decompress(stored, scheme):
    if scheme == 0:
        return stored
    data = lz4.frame.decompress(stored)
    if scheme == 1:
        return data
    out, position = bytearray(len(data)), 0  # bytes are grouped by their place in a word of four
    for place in range(4):
        count = len(out[place::4])
        out[place::4] = data[position:position + count]
        position += count
    return bytes(out)


def hex_name(hash_bytes):
    return ''.join(f'{word:016x}' for word in struct.unpack('<4Q', hash_bytes))
