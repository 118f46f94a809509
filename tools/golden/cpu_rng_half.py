"""Dumps bf16 and f16 draws of torch's CPU generator up to 2.11, for the tests of `TorchCpu::randn_half`.

    python tools/golden/cpu_rng_half.py testdata/rng/torch_rng_half.json

Needs torch 2.11 or older (`pip install torch==2.11.0`): later ones draw in f32 and round. Values are written as the
hexadecimal digits of their bits; long draws as the SHA-256 of their bits in little-endian order.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
SEEDS = [0, 42, 77, 2**32 + 5, 2**63 - 1]
# Short draws, one group, groups with every tail length.
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 47, 100]
# The shapes diffusers draws: (batch, 128, height / 16, width / 16). The last one holds every radius and every angle.
LATENTS = [(0, (1, 128, 4, 6)), (42, (2, 128, 4, 4)), (42, (1, 128, 64, 64)), (77, (1, 128, 64, 64))]


def generator(seed):
    return torch.Generator("cpu").manual_seed(seed)


def bits(values):
    return values.view(torch.int16).flatten().numpy().astype("<u2")


def digits(values):
    return "".join(f"{word:04x}" for word in bits(values))


def main(out):
    if tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11):
        sys.exit(f"torch {torch.__version__} draws in f32; requires 2.11 or older")
    draws, latents, sequences = [], [], []
    for name, dtype in DTYPES.items():
        for seed in SEEDS:
            for n in LENGTHS if seed == 42 else (3, 20, 32):
                values = torch.randn(n, generator=generator(seed), dtype=dtype)
                draws.append(dict(dtype=name, seed=seed, n=n, bits=digits(values)))
        for seed, shape in LATENTS:
            values = torch.randn(shape, generator=generator(seed), dtype=dtype)
            sha256 = hashlib.sha256(bits(values).tobytes()).hexdigest()
            latents.append(dict(dtype=name, seed=seed, shape=shape, first=digits(values.flatten()[:16]), sha256=sha256))
        # Consecutive draws from one generator: the cached half of a short draw outlives a long one.
        g, parts = generator(7), []
        for n in [3, 16, 1, 5, 20, 2]:
            parts.append(dict(n=n, bits=digits(torch.randn(n, generator=g, dtype=dtype))))
        sequences.append(dict(dtype=name, seed=7, draws=parts))
    report = dict(
        command="python tools/golden/cpu_rng_half.py testdata/rng/torch_rng_half.json",
        torch=torch.__version__,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        tolerance="exact: the same operations in the same order",
        draws=draws,
        latents=latents,
        sequences=sequences,
    )

    def lines(key):
        return ",\n".join("  " + json.dumps(entry) for entry in report[key])

    head = "".join(f' "{key}": {json.dumps(value)},\n' for key, value in report.items() if isinstance(value, str))
    lists = ",\n".join(f' "{key}": [\n{lines(key)}\n ]' for key in ("draws", "latents", "sequences"))
    out.write_text("{\n" + head + lists + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
