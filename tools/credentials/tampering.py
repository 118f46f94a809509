"""Changed files, for the checks beside it."""


def tampered(data, draw):
    """A copy that differs in one piece."""
    data, at = bytearray(data), draw.randrange(len(data))
    kind = draw.choice(["change", "cut", "add", "remove"])
    if kind == "change":
        data[at] ^= draw.randrange(1, 256)
    elif kind == "cut":
        del data[at:]
    elif kind == "add":
        data[at:at] = draw.randbytes(draw.randrange(1, 40))
    else:
        del data[at : at + draw.randrange(1, 40)]
    return kind, at, bytes(data)
