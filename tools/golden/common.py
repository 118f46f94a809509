"""Shared by the generators of the golden set: deterministic torch, seeded weights, byte-stable files."""

import json
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
torch.set_grad_enabled(False)

BF16 = torch.bfloat16


def generator(seed):
    return torch.Generator("cpu").manual_seed(seed)


def seed_of(tag):
    """Returns a generator per tensor, so that adding a tensor changes no other."""
    return zlib.crc32(tag.encode())


def draw(tag, shape):
    return torch.randn(tuple(shape), generator=generator(seed_of(tag)))


def bf16_exact(t):
    """Rounds to f32 values that bf16 can hold: a test reads back the exact values of the reference."""
    return t.to(BF16).float()


def save_tensors(tensors, path, metadata=None):
    """`save_file` with a header that is byte-identical in every run."""
    path = Path(path)
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in sorted(tensors.items())}
    save_file(tensors, path, metadata=metadata)
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    path.chmod(0o644)


def save_json(value, path, indent=1):
    Path(path).write_text(json.dumps(value, indent=indent, ensure_ascii=True) + "\n")


def save_json_rows(head, key, rows, path):
    """Returns `head` with one more key, a list or a map, formatted with one line per entry."""
    if isinstance(rows, dict):
        lines, brackets = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items()], "{}"
    else:
        lines, brackets = [json.dumps(r) for r in rows], "[]"
    text = json.dumps(head, indent=1)[:-2]
    text += f",\n {json.dumps(key)}: {brackets[0]}\n  " + ",\n  ".join(lines) + f"\n {brackets[1]}\n}}\n"
    assert json.loads(text) == {**head, key: rows}
    Path(path).write_text(text)


def versions():
    import diffusers
    import peft
    import transformers
    from PIL import Image

    return dict(
        torch=torch.__version__,
        diffusers=diffusers.__version__,
        transformers=transformers.__version__,
        peft=peft.__version__,
        pillow=Image.__version__,
    )
