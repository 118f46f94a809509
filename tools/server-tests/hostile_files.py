"""Small image files that ask for much memory, each by another part of its format."""

import struct
import zlib

GIB = 1 << 30


def zeros(count=GIB):
    """A zlib stream of zeros, a thousandth of their size."""
    packer = zlib.compressobj(9)
    part = bytes(1 << 20)
    return b"".join(packer.compress(part) for _ in range(count >> 20)) + packer.flush()


def png(*chunks, size=(16, 16)):
    chunk = lambda kind, raw: struct.pack(">I", len(raw)) + kind + raw + struct.pack(">I", zlib.crc32(kind + raw))
    pixels = zlib.compress((bytes(1) + bytes(3 * size[0])) * size[1])
    header = struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def jpeg(*segments):
    body = b"".join(b"\xff" + bytes([marker]) + struct.pack(">H", len(raw) + 2) + raw for marker, raw in segments)
    return b"\xff\xd8" + body + b"\xff\xd9"


def frame(side):
    return struct.pack(">BHHB", 8, side, side, 3) + bytes([1, 17, 0, 2, 17, 0, 3, 17, 0])


class Bits:
    def __init__(self):
        self.bits = []

    def put(self, value, count):
        self.bits.extend(value >> place & 1 for place in range(count))

    def code(self, value, count):
        self.bits.extend(value >> place & 1 for place in reversed(range(count)))

    def bytes(self):
        text = "".join(map(str, self.bits)).ljust(-len(self.bits) % 8 + len(self.bits), "0")
        return bytes(int(text[at : at + 8][::-1], 2) for at in range(0, len(text), 8))


def vp8l(groups):
    """A lossless WebP of 4x4 pixels with so many groups of Huffman codes: 20 KiB of tables for 60 bytes."""
    bits = Bits()
    for value, count in [(0x2F, 8), (3, 14), (3, 14), (0, 4), (0b100, 3), (0, 3), (0, 1)]:
        bits.put(value, count)
    for symbol in [(groups - 1) & 255, (groups - 1) >> 8, 0, 0, 0]:
        bits.put(0b101, 3)
        bits.put(symbol, 8)
    one = Bits()
    width = lambda length: 3 if length <= 6 else 4
    one.put(0, 1)
    one.put(10, 4)
    for symbol in [17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8, 9, 10]:
        one.put(width(symbol) if 1 <= symbol <= 10 else 0, 3)
    for value, count in [(1, 1), (1, 3), (9, 4)]:
        one.put(value, count)
    for length in [*range(1, 11), 10]:
        one.code(length - 1 if length <= 6 else length + 5, width(length))
    bits.bits += one.bits * (5 * groups) + [0] * 4096
    return bits.bytes()


def webp(*chunks):
    body = b"WEBP" + b"".join(name + struct.pack("<I", len(raw)) + raw + bytes(len(raw) % 2) for name, raw in chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def gif(screen, size):
    head = b"GIF89a" + struct.pack("<HH", screen, screen) + bytes([0x80, 0, 0, 0, 0, 0, 255, 255, 255])
    return head + b"\x2c" + struct.pack("<HHHH", 0, 0, size, size) + bytes([0, 2, 2, 0x44, 1, 0, 0x3B])


def bmp(side):
    head = b"BM" + bytes(8) + struct.pack("<IIiiHHIIIIII", 0x436, 40, side, side, 1, 8, 1, 0, 0, 0, 0, 0)
    return head.ljust(0x436, b"\0") + b"\0\1"


def tiff(tags, data):
    """A TIFF of 16x16 pixels; `None` as a tag's value is the place of the data."""
    base = {256: (4, 1, 16), 257: (4, 1, 16), 258: (3, 1, 8), 259: (3, 1, 1), 262: (3, 1, 1), 273: (4, 1, None), 277: (3, 1, 1),
            278: (4, 1, 16), 279: (4, 1, len(data))} | tags
    place = 8 + 2 + 12 * len(base) + 4
    entries = [struct.pack("<HHII", tag, kind, count, place if value is None else value) for tag, (kind, count, value) in sorted(base.items())]
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(base)) + b"".join(entries) + bytes(4) + data


def files():
    """All of them, by name."""
    bomb = zeros()
    strip = jpeg((0xC0, frame(16000)))
    return {
        "PNG profile": png((b"iCCP", b"p\0\0" + bomb)),
        "PNG text": png((b"zTXt", b"parameters\0\0" + bomb)),
        "PNG recipe": png((b"iTXt", b"kiln\0\1\0\0\0" + bomb)),
        "PNG XMP": png((b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + bomb)),
        "PNG texts": png(*[(b"zTXt", b"a\0\0" + zeros(64 << 20))] * 16),
        "PNG EXIF": png(*[(b"eXIf", bytes(1 << 20))] * 20),
        "JPEG profile": jpeg(*[(0xE2, b"ICC_PROFILE\0" + bytes([n, 255]) + bytes(65000)) for n in range(255)], (0xC0, frame(8))),
        "JPEG frames": jpeg((0xC0, frame(8)), (0xC0, frame(16000))),
        "WebP codes": webp((b"VP8L", vp8l(65536))),
        "WebP fewer codes": webp((b"VP8L", vp8l(8192))),
        "GIF frame": gif(1, 16000),
        "GIF screen": gif(16000, 1),
        "BMP runs": bmp(16000),
        "TIFF values": tiff({338: (1, 8 << 20, None)}, bytes(8 << 20)),
        "TIFF strips": tiff({273: (1, 7 << 20, None), 279: (1, 7 << 20, None)}, bytes(7 << 20)),
        "TIFF JPEG": tiff({259: (3, 1, 7), 262: (3, 1, 2), 277: (3, 1, 3)}, strip),
        "TIFF tile": tiff({322: (4, 1, 1 << 31), 323: (4, 1, 16), 324: (4, 1, None), 325: (4, 1, len(bomb)), 259: (3, 1, 8)}, bomb),
    }
