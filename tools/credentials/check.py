#!/usr/bin/env python3
"""Checks signed images with two validators that share no code with Kiln, and with tampered copies.   check.py [TAMPERED]

Needs `pip install c2pa-python encypher-c2pa` and cargo. Signs images in every format (`kiln-credentials/examples/sign.rs`),
then asks: c2pa-python for `Valid` with the root unknown and `Trusted` with it, encypher-c2pa for the same, and for TAMPERED
(default 1000) copies with one changed, cut or added piece that none of them is valid and nothing crashes. Names and lengths of
boxes inside the store are not signed: a byte that changes there may go unnoticed.
"""

import io
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import c2pa
import encypher_c2pa

ROOT = pathlib.Path(__file__).resolve().parents[2]
MEDIA = {".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp"}


def read(data, suffix, root=None):
    """State and problems of a file's credentials."""
    settings = {"verify": {"verify_trust": True}}
    if root:
        settings["trust"] = {"user_anchors": root}
    context = c2pa.Context(c2pa.Settings.from_dict(settings))
    try:
        found = json.loads(c2pa.Reader(MEDIA[suffix], io.BytesIO(data), context=context).json())
    except c2pa.C2paError as error:
        return "unreadable", [str(error)]
    return found.get("validation_state"), [status["code"] for status in found.get("validation_status", [])]


def second_state(file, root=None):
    """The state by a validator that shares no code with the first."""
    report = encypher_c2pa.verify(str(file), trust_pem=root, telemetry=False, online=False)
    return report["validation_state"]


def in_store(data, at):
    """Whether a byte is in the manifest store with its frame, of a file that has it in one piece."""
    start = data.find(b"jumb") - 4
    length = int.from_bytes(data[start : start + 4], "big")
    return start - 12 <= at < start + length


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


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        command = ["cargo", "run", "--quiet", "-p", "kiln-credentials", "--example", "sign", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True)
        root = (folder / "root.pem").read_text()
        files = sorted(file for file in folder.iterdir() if file.suffix in MEDIA)
        for file in files:
            data = file.read_bytes()
            unknown, known = read(data, file.suffix), read(data, file.suffix, root)
            if unknown != ("Valid", ["signingCredential.untrusted"]) or known != ("Trusted", []):
                failed += 1
                print(f"{file.name}: {unknown}, with the root {known}")
            second = second_state(file), second_state(file, root)
            if second != ("Valid", "Trusted"):
                failed += 1
                print(f"{file.name}, by encypher: {second}")
        print(f"{len(files)} files, {failed} not as they should be")
        states, draw = {}, random.Random(1)
        for _ in range(count):
            file = draw.choice(files)
            whole = file.read_bytes()
            kind, at, data = tampered(whole, draw)
            state, problems = read(data, file.suffix, root)
            states[state] = states.get(state, 0) + 1
            if state in ("Valid", "Trusted") and not (kind == "change" and in_store(whole, at)):
                failed += 1
                print(f"{file.name}: {kind} at {at} of {len(data)} stays {state}: {problems}")
        print(f"tampered copies: {states}")
    sys.exit(failed > 0)


main()
