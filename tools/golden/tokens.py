"""Encodes the prompts of tokenizer_reference.json with the real Qwen3 tokenizer.

    cd tools/golden && python tokens.py ../../crates/kiln-family/assets/tokenizer.zst ../../testdata/tokenizer_reference.json

Reads the prompts from the file: to add one, add its `name` and `prompt` there, and run this. Needs the `zstd` program.
"""

import json
import sys
from pathlib import Path

import qwen
import tokenizers

TEMPLATE = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
LENGTH, PAD = 512, "<|endoftext|>"


def main(asset, path):
    tokenizer = tokenizers.Tokenizer.from_str(qwen.read(asset))
    pad, prompts = tokenizer.token_to_id(PAD), []
    for entry in json.loads(path.read_text())["prompts"]:
        ids = tokenizer.encode(TEMPLATE.replace("{prompt}", entry["prompt"]), add_special_tokens=False).ids
        kept = ids[:LENGTH]
        prompts.append(
            dict(name=entry["name"], prompt=entry["prompt"], n_tokens_untruncated=len(ids), n_tokens=len(kept),
                 input_ids_512=kept + [pad] * (LENGTH - len(kept)))
        )  # fmt: skip
    head = dict(
        command="cd tools/golden && python tokens.py ../../crates/kiln-family/assets/tokenizer.zst "
        "../../testdata/tokenizer_reference.json",
        versions=dict(tokenizers=tokenizers.__version__), tolerance="exact", template=TEMPLATE, pad_id=pad,
        max_length=LENGTH, padding_side="right", truncation_side="right",
        note="attention_mask = 1 for the first n_tokens positions, 0 after. Truncation cuts the tail, so long prompts "
        "lose <|im_end|> and the assistant suffix.", count=len(prompts),
    )  # fmt: skip
    lines = ",\n".join(json.dumps(p, separators=(",", ":")) for p in prompts)
    path.write_text(json.dumps(head)[:-1] + ',\n"prompts": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
