"""Packs Mistral's tokenizer for the program: `tekken.py TEKKEN.json TOKENIZER.json ../../crates/kiln-family/assets/tekken.zst`.

The vocabulary is the 256 bytes and then tokens, each of which is the concatenation of two earlier ones; its order is that of the merges. So two numbers a token
describe all of it: 24 bits each, in planes of one byte (all highest bytes of the left sides, …, all lowest bytes of the right sides). Of the possible splits of a
token into earlier ones, the one with the smallest sum packs best. Stops if TOKENIZER.json, the published file, has other tokens or merges, and prints the SHA-256 of its merges
(one per line, a space between) for the test. Needs the `zstd` program.
"""

import base64
import hashlib
import json
import subprocess
import sys


def byte_characters():
    """Returns the characters that stand for bytes in `tokenizer.json`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def splits(token, ranks):
    """Returns the ranks of all pairs of tokens whose concatenation a token is, sorted."""
    sides = ((token[:i], token[i:]) for i in range(1, len(token)))
    return sorted((ranks[left], ranks[right]) for left, right in sides if left in ranks and right in ranks)


def main(tekken, tokenizer, asset):
    file = json.load(open(tekken))
    specials = file["config"]["default_num_special_tokens"]
    count = file["config"]["default_vocab_size"] - specials
    characters = byte_characters()
    tokens = ["".join(characters[byte] for byte in base64.b64decode(entry["token_bytes"])) for entry in file["vocab"][:count]]
    assert tokens[:256] == characters
    ranks = {token: rank for rank, token in enumerate(tokens)}
    all_splits = [splits(token, ranks) for token in tokens]

    model = json.load(open(tokenizer))["model"]
    assert all(model["vocab"][token] == specials + rank for token, rank in ranks.items())
    merges = [[tokens[left], tokens[right]] for pairs in all_splits for left, right in pairs]
    assert merges == [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    print(len(merges), hashlib.sha256("\n".join(map(" ".join, merges)).encode()).hexdigest())

    earlier = [[pair for pair in pairs if max(pair) < rank] for rank, pairs in enumerate(all_splits)]
    packed = [min(pairs, key=sum) for pairs in earlier[256:]]
    planes = b"".join(bytes(pair[side] >> shift & 255 for pair in packed) for side in (0, 1) for shift in (16, 8, 0))
    subprocess.run(["zstd", "--ultra", "-22", "-qfo", asset], input=planes, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
