"""Packs the Qwen3 tokenizer for the program: `qwen.py TOKENIZER.json ../../crates/kiln-family/assets/tokenizer.zst`.

The vocabulary is 256 characters followed by the result of each merge, in order, so the merges alone determine it, in a third of the size. The packed text has three
lines of JSON (the file up to the end of those characters, the part between vocabulary and merges, and the rest) and then one merge per line, escaped as in JSON.
Needs the `zstd` program.
"""

import json
import subprocess
import sys

BETWEEN = '},"merges":['


def pack(text):
    """Returns the packed text of a `tokenizer.json`."""
    file = json.loads(text)
    model = file["model"]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.pop("merges")]
    vocab = model.pop("vocab")
    names = sorted(vocab, key=vocab.get)
    characters = names[: len(names) - len(pairs)]
    assert [vocab[name] for name in names] == list(range(len(names))), "ids with gaps"
    assert names[len(characters) :] == [left + right for left, right in pairs], "names in another order than their pairs"
    file["model"] = {**model, "vocab": {name: vocab[name] for name in characters}, "merges": []}
    head, tail = json.dumps(file, ensure_ascii=False, separators=(",", ":")).split(BETWEEN)
    escaped = [[json.dumps(name, ensure_ascii=False)[1:-1] for name in pair] for pair in pairs]
    assert not any(" " in name for pair in escaped for name in pair)
    return "\n".join([head, BETWEEN, tail, *map(" ".join, escaped)])


def unpack(text):
    """Returns the `tokenizer.json` of a packed text."""
    head, between, tail, *lines = text.split("\n")
    pairs = [line.split(" ") for line in lines]
    first = len(json.loads(head + between + tail)["model"]["vocab"])
    names = "".join(f',"{left}{right}":{first + i}' for i, (left, right) in enumerate(pairs))
    return head + names + between + ",".join(f'["{left}","{right}"]' for left, right in pairs) + tail


def read(asset):
    """Returns the `tokenizer.json` of the packed file."""
    return unpack(subprocess.run(["zstd", "-dc", asset], check=True, capture_output=True).stdout.decode())


def main(source, asset):
    text = open(source).read()
    packed = pack(text)
    assert json.loads(unpack(packed)) == json.loads(text)
    subprocess.run(["zstd", "--ultra", "-22", "-qfo", asset], input=packed.encode(), check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
