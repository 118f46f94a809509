"""The Qwen3 tokenizer as it lies in the program: `qwen.py TOKENIZER.json ../../crates/kiln-model/assets/tokenizer.zst`.

Its names are 256 characters and then what each pair makes, in order; so the pairs say everything, in a third of the room. The text that is packed has three
lines of JSON (the file up to the end of those characters, what stands between names and pairs, and what follows) and then a pair a line, escaped as in JSON.
Needs the `zstd` program.
"""

import json
import subprocess
import sys

BETWEEN = '},"merges":['


def pack(text):
    """The packed text of a `tokenizer.json`."""
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
    """The `tokenizer.json` of a packed text."""
    head, between, tail, *lines = text.split("\n")
    pairs = [line.split(" ") for line in lines]
    first = len(json.loads(head + between + tail)["model"]["vocab"])
    names = "".join(f',"{left}{right}":{first + i}' for i, (left, right) in enumerate(pairs))
    return head + names + between + ",".join(f'["{left}","{right}"]' for left, right in pairs) + tail


def read(asset):
    """The `tokenizer.json` of the packed file."""
    return unpack(subprocess.run(["zstd", "-dc", asset], check=True, capture_output=True).stdout.decode())


def main(source, asset):
    text = open(source).read()
    packed = pack(text)
    assert json.loads(unpack(packed)) == json.loads(text)
    subprocess.run(["zstd", "--ultra", "-22", "-qfo", asset], input=packed.encode(), check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
