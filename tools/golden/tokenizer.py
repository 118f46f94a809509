"""Creates the small tokenizer of the golden models.

    python tools/golden/tokenizer.py testdata/tokenizer

The same pipeline as Qwen3's (NFC, the added tokens, the split expression, byte-level BPE, no BOS or EOS), with 256
byte tokens, a few merges learnt from the text below, and the added tokens after them. Only the ids differ.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

MERGES = 160
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
PLAIN = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip
TEXT = [
    "user\n", "assistant\n", "\n\n", "a cat holding a sign that says hello", "a red apple on a wooden table",
    "replace the background with a snowy mountain", "the light of the morning sun over the river and the trees",
    "a watercolor painting of a lighthouse on a cliff at dusk", "blurry, low quality, jpeg artifacts",
    "make the sky blue and the grass greener", "portrait of an old man with a hat, soft light, detailed photograph",
]  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)


def main(out):
    out.mkdir(parents=True, exist_ok=True)
    tok = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    byte_level = dict(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(**byte_level)]
    )
    tok.post_processor = processors.ByteLevel(**byte_level)
    tok.decoder = decoders.ByteLevel(**byte_level)
    trainer = trainers.BpeTrainer(
        vocab_size=256 + MERGES, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tok.train_from_iterator(TEXT, trainer)
    first = tok.get_vocab_size()
    tok.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    tok.add_tokens([AddedToken(t, normalized=False, special=False) for t in PLAIN])
    (out / "tokenizer.json").write_text(json.dumps(json.loads(tok.to_str()), ensure_ascii=True, separators=(",", ":")) + "\n")

    entry = dict(lstrip=False, normalized=False, rstrip=False, single_word=False)
    added = {str(first + i): dict(content=t, **entry, special=t in SPECIAL) for i, t in enumerate(SPECIAL + PLAIN)}
    config = dict(
        add_bos_token=False, add_prefix_space=False, added_tokens_decoder=added, bos_token=None,
        chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False, eos_token="<|im_end|>", errors="replace",
        model_max_length=131072, pad_token="<|endoftext|>", split_special_tokens=False,
        tokenizer_class="Qwen2Tokenizer", unk_token=None,
    )  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(tok.get_vocab_size(), "tokens,", sum(f.stat().st_size for f in out.iterdir()), "bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
