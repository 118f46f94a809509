"""Prints what bitsandbytes' 8-bit AdamW makes of 1024 parameters in 20 steps, for `kiln-ops/tests/training.rs`.

    TORCHDYNAMO_DISABLE=1 python adamw8bit.py            (bitsandbytes 0.50.2, torch 2.15)

It runs bitsandbytes' own PyTorch form of the blockwise update, which needs no GPU.
"""
import torch
from bitsandbytes.backends.triton.kernels_optim import optimizer_update_8bit_blockwise_pytorch as update
from bitsandbytes.functional import create_dynamic_map

COUNT, STEPS = 1024, 20


def randn(seed):
    return torch.randn(COUNT, generator=torch.Generator("cpu").manual_seed(seed))


def gradient(step):
    """Magnitudes over two decades, none of which bitsandbytes rounds to a second moment of 0."""
    draws = randn(100 + step)
    scales = torch.tensor([10 ** (-(i * 37 % 101) / 50) for i in range(COUNT)])
    return scales * draws.sign() * (0.5 + draws.abs())


def main():
    param = randn(7)
    signed, unsigned = create_dynamic_map(True), create_dynamic_map(False)
    m, v = (torch.zeros(COUNT, dtype=torch.uint8) for _ in range(2))
    m_scale, v_scale = (torch.zeros(COUNT // 256) for _ in range(2))
    for step in range(1, STEPS + 1):
        update(
            param, gradient(step), m, v, 0.9, 0.999, 0.0, 0.0, 1e-8, step, 1e-2, signed, unsigned, m_scale, v_scale,
            0.01, 1.0, False, optimizer_name="adam",
        )  # fmt: skip
    print("moved", (param - randn(7)).norm().item())
    print("params", [f"{value:.7f}" for value in param[::64].tolist()])


if __name__ == "__main__":
    main()
