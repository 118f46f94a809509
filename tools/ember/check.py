"""Compares the networks here with diffusers' and transformers' classes on random weights. Needs both packages."""

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from transformers import Qwen3Config, Qwen3ForCausalLM

import export
import net
from vae import Autoencoder


def shake(module):
    """Adds random values everywhere, so that zero-initialised layers are tested, too."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * (.05 if p.ndim < 2 else .3 * p.shape[1:].numel() ** -.5))


def compare(name, ours, theirs):
    error = ((ours - theirs).norm() / theirs.norm()).item()
    print(f"{name}: relative difference {error:.1e}")
    assert error < 1e-4


@torch.no_grad()
def main():
    torch.manual_seed(0)
    plain = lambda config: {k: v for k, v in config.items() if not k.startswith("_")}
    ours = Autoencoder().eval()
    shake(ours)
    theirs = AutoencoderKLFlux2(**plain(export.vae_config())).eval()
    theirs.load_state_dict(ours.state_dict())
    x = torch.rand(1, 3, 96, 64) * 2 - 1
    compare("vae encoder", ours.moments(x)[0], theirs.encode(x).latent_dist.mode())
    z = torch.randn(1, 32, 12, 8)
    compare("vae decoder", ours.decode_raw(z), theirs.decode(z).sample)

    model, text = net.build(4091, "cpu")
    shake(model), shake(text)
    theirs = Flux2Transformer2DModel(**plain(export.transformer_config())).eval()
    theirs.load_state_dict(model.state_dict())
    h, w, length = 4, 6, 16
    x, context, t = torch.randn(2, 3 * h * w, 128), torch.randn(2, length, 384), torch.tensor([.3, .9])
    grid = lambda k: torch.cartesian_prod(torch.tensor([k]), torch.arange(h), torch.arange(w), torch.arange(1))
    ids = torch.cat([grid(0), grid(10), grid(20)])
    text_ids = torch.cartesian_prod(*(torch.arange(1),) * 3, torch.arange(length))
    out = theirs(hidden_states=x, encoder_hidden_states=context, timestep=t, img_ids=ids, txt_ids=text_ids, guidance=None, return_dict=False)[0]
    compare("transformer", model(x, context, t, h, w, 2), out[:, :h * w])

    theirs = Qwen3ForCausalLM(Qwen3Config(**export.text_encoder_config())).eval().float()
    print("text encoder: missing", theirs.load_state_dict(export.with_last_layer(text.state_dict()), strict=False).missing_keys)
    ids = torch.randint(0, 4000, (2, 64))
    ids[0, 20:], ids[1, 33:] = 4091, 4091
    states = theirs(input_ids=ids, attention_mask=(ids != 4091).long(), output_hidden_states=True).hidden_states
    compare("text encoder", text(ids, torch.float32), torch.cat([states[k] for k in (9, 18, 27)], -1))


if __name__ == "__main__":
    main()
