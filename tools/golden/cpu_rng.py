"""Dumps draws of torch's CPU generator, for the tests of `kiln_tensor::rng::TorchCpu`.

    python tools/golden/cpu_rng.py testdata/rng

Writes `torch_rng.safetensors` (the values) and `torch_rng.json` (versions, SHA-256 of the long draws).
Needs torch on an x86-64 CPU with AVX2: the scalar build of torch differs in the last bit.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

SEEDS = [0, 1, 42, 1234567, 2**31 - 1, 2**32 - 1, 2**32, 2**63 - 1]
LENGTHS = [1, 2, 3, 15, 16, 17, 31, 32, 100, 1000]
# The shapes diffusers draws: (batch, 128, height / 16, width / 16).
LATENTS = [(0, (1, 128, 4, 4)), (42, (1, 128, 4, 6)), (42, (2, 128, 4, 4)), (42, (1, 128, 64, 64))]


def generator(seed):
    return torch.Generator("cpu").manual_seed(seed)


def main(out):
    out.mkdir(parents=True, exist_ok=True)
    tensors, latents = {}, []
    for seed in SEEDS:
        for n in LENGTHS if seed in (0, 42) else (3, 16, 17, 100):
            tensors[f"randn.seed{seed}.n{n}"] = torch.randn(n, generator=generator(seed))
    for seed, shape in LATENTS:
        t = torch.randn(shape, generator=generator(seed))
        name = f"latents.seed{seed}." + "x".join(map(str, shape))
        if t.numel() <= 8192:
            tensors[name] = t
        else:
            tensors[name + ".first4096"] = t.flatten()[:4096].clone()
        latents.append(dict(seed=seed, shape=list(shape), sha256_f32le=hashlib.sha256(t.numpy().tobytes()).hexdigest()))
    # Consecutive draws from one generator: the cached half of a short draw outlives a long one.
    g = generator(7)
    for i, n in enumerate([3, 16, 1, 5, 20, 2]):
        tensors[f"sequence.seed7.{i}.n{n}"] = torch.randn(n, generator=g)
    # A list of generators: each image draws its own latents.
    tensors["list_generators.seeds11_12.2x128x4x4"] = torch.cat(
        [torch.randn((1, 128, 4, 4), generator=generator(s)) for s in (11, 12)]
    )
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        tensors[f"{name}.seed42.1x128x4x4"] = torch.randn((1, 128, 4, 4), generator=generator(42), dtype=dtype)
    save_file(tensors, out / "torch_rng.safetensors")
    report = dict(
        command="python tools/golden/cpu_rng.py testdata/rng",
        torch=torch.__version__,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        tolerance="exact: the same operations in the same order",
        latents=latents,
    )
    (out / "torch_rng.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
