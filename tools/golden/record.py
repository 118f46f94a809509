"""Records the intermediate tensors of one run of a diffusers FLUX.2 pipeline.

Names: `callK.*` is the K-th transformer call (with guidance: even conditional, odd unconditional), `stepI.*` the
I-th scheduler step, `refI.*` the I-th image encoded by the VAE. The text stream is cut to its first 4 and last 2
tokens (`_first4`, `_last2`); image and reference tokens are complete.
"""

import inspect

import torch
from diffusers import Flux2KleinInpaintPipeline
from diffusers.models.transformers import transformer_flux2

FIRST, LAST = 4, 2


class Recorder:
    """Records a run. Levels: `light` (noise, latents of every step), `mid` (every block of the first call, the last
    block of the other `first_calls`), `full` (also the insides of the first double and single block, and the stages
    of the VAE's decoder)."""

    def __init__(self, pipe, level, first_calls=(0,), text_tokens=512, guided=False, encoder_stages=False):
        self.pipe, self.level, self.first_calls = pipe, level, first_calls
        self.text_tokens, self.guided = text_tokens, guided
        self.tensors, self.facts = {}, {}
        self.calls = self.steps = self.noises = self.encoded = 0
        self._undo, self._hooks = [], []
        self._listen_to_pipeline(inspect.getmodule(type(pipe)))
        self._listen_to_transformer(pipe.transformer)
        self._listen_to_vae(pipe.vae, encoder_stages)

    def close(self):
        for hook in self._hooks:
            hook.remove()
        for owner, name, had, old in reversed(self._undo):
            setattr(owner, name, old) if had else delattr(owner, name)

    # Storing tensors

    def keep(self, name, t):
        self.tensors[name] = t.detach().clone()

    def keep_text(self, name, t):
        self.keep(f"{name}_first{FIRST}", t[:, :FIRST])
        self.keep(f"{name}_last{LAST}", t[:, -LAST:])

    def keep_sequence(self, name, t):
        """Stores text tokens, then image tokens."""
        self.keep_text(f"{name}.txt", t[:, : self.text_tokens])
        self.keep(f"{name}.img", t[:, self.text_tokens :])

    # Hooks

    def _replace(self, owner, name, new):
        self._undo.append((owner, name, name in owner.__dict__, owner.__dict__.get(name)))
        setattr(owner, name, new)

    def _listen_to_pipeline(self, module):
        randn, mu, step = module.randn_tensor, module.compute_empirical_mu, self.pipe.scheduler.step

        def noise(shape, generator=None, device=None, dtype=None, layout=None):
            # Always the f32 draw, so that a run in f64 starts from the same noise.
            t = randn(shape, generator=generator, device=device, dtype=torch.float32)
            self.keep(f"noise.{self.noises}" if self.noises else "noise", t)
            self.noises += 1
            return t.to(dtype)

        def shift(image_seq_len, num_steps):
            value = mu(image_seq_len, num_steps)
            self.facts |= dict(mu=value, mu_image_seq_len=image_seq_len)
            return value

        def euler(model_output, t, sample, **kw):
            out = step(model_output, t, sample, **kw)
            self.keep(f"step{self.steps}.model_output", model_output)
            self.keep(f"step{self.steps}.latents", out[0])
            self.steps += 1
            return out

        self._replace(module, "randn_tensor", noise)
        self._replace(module, "compute_empirical_mu", shift)
        self._replace(self.pipe.scheduler, "step", euler)
        if isinstance(self.pipe, Flux2KleinInpaintPipeline):
            prepare_mask = self.pipe.prepare_mask_latents

            def mask(*a, **kw):
                t = prepare_mask(*a, **kw)
                self.keep("mask_packed", t)
                return t

            self._replace(self.pipe, "prepare_mask_latents", mask)

    def after_step(self, _pipe, i, _t, state):
        """The pipeline's callback, called after inpainting has blended the source into the scheduler's result."""
        if isinstance(self.pipe, Flux2KleinInpaintPipeline):
            self.keep(f"step{i}.latents_after_mask_blend", state["latents"])
        return state

    def last_latents(self):
        i = self.steps - 1
        return self.tensors.get(f"step{i}.latents_after_mask_blend", self.tensors[f"step{i}.latents"])

    def _listen_to_transformer(self, tr):
        def before(_module, _args, kw):
            ids = kw["img_ids"][0].to(torch.int32)
            if self.calls == 0:
                self.keep("img_ids", ids)
                if self.level == "full":
                    self.keep("txt_ids", kw["txt_ids"][0].to(torch.int32))
                if kw.get("guidance") is not None:
                    self.keep("guidance", kw["guidance"])
            elif len(ids) != len(self.tensors["img_ids"]):
                self.keep("img_ids.later_steps", ids)
            self.keep(f"call{self.calls}.timestep_input", kw["timestep"])
            if self.calls in self.first_calls:
                self.keep(f"call{self.calls}.hidden_states_input", kw["hidden_states"])

        def after(_module, _args, _kw, out):
            image_tokens = self.tensors["noise"].shape[-1] * self.tensors["noise"].shape[-2]
            if self.calls in self.first_calls:
                self.keep(f"call{self.calls}.transformer_out", out[0])
            elif self.guided:
                self.keep(f"call{self.calls}.transformer_out", out[0][:, :image_tokens])
            if self.calls == 0 and len(out) == 2 and out[1] is not None:
                for kind, caches in (("double", out[1].double_block_caches), ("single", out[1].single_block_caches)):
                    for i, cache in enumerate(caches):
                        self.keep(f"kv.{kind}{i}.k", cache.k_ref)
                        self.keep(f"kv.{kind}{i}.v", cache.v_ref)
            self.calls += 1

        self._hooks += [tr.register_forward_pre_hook(before, with_kwargs=True),
                        tr.register_forward_hook(after, with_kwargs=True)]  # fmt: skip
        doubles, singles = list(tr.transformer_blocks), list(tr.single_transformer_blocks)
        if self.level == "light":
            return
        self._tap(tr.time_guidance_embed, "temb")
        self._tap(tr.x_embedder, "x_embedder")
        self._tap(tr.context_embedder, "context_embedder", "text")
        self._tap(tr.double_stream_modulation_img, "mod_double_img")
        self._tap(tr.double_stream_modulation_txt, "mod_double_txt")
        self._tap(tr.single_stream_modulation, "mod_single")
        for i, block in enumerate(doubles):
            self._tap(block, f"double{i}", "double")
        for i, block in enumerate(singles):
            self._tap(block, f"single{i}", "sequence", always=block is singles[-1])
        self._tap(tr.norm_out, "norm_out")
        if self.level == "full":
            self._listen_inside(tr, doubles[0], singles[0])

    def _listen_inside(self, tr, double, single):
        self._tap(tr.time_guidance_embed.time_proj, "time_proj")
        for n in ("to_q", "to_k", "to_v", "norm_q", "norm_k"):
            self._tap(getattr(double.attn, n), f"double0.attn.{n}")
        for n in ("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k", "to_add_out"):
            self._tap(getattr(double.attn, n), f"double0.attn.{n}", "text")
        self._tap(double.attn.to_out[0], "double0.attn.to_out")
        self._tap(double.norm1, "double0.norm1")
        self._tap(double.norm1_context, "double0.norm1_context", "text")
        self._tap(double.ff, "double0.ff")
        self._tap(double.ff_context, "double0.ff_context", "text")
        self._tap(single.norm, "single0.norm", "sequence")
        self._tap(single.attn.norm_q, "single0.attn.norm_q", "sequence")
        self._tap(single.attn.norm_k, "single0.attn.norm_k", "sequence")
        self._tap(single.attn, "single0.attn_mlp_out", "sequence")
        rotate, names = transformer_flux2.apply_rotary_emb, iter(["call0.double0.q_rope", "call0.double0.k_rope"])

        def rope(x, freqs, **kw):
            out = rotate(x, freqs, **kw)
            if name := next(names, None):
                self.keep_sequence(name, out)
            return out

        self._replace(transformer_flux2, "apply_rotary_emb", rope)

    def _tap(self, module, name, kind="whole", always=False):
        def hook(_module, _args, out):
            if self.calls not in self.first_calls or (self.calls > 0 and not always):
                return
            key = f"call{self.calls}.{name}"
            if kind == "double":
                self.keep_text(f"{key}.txt", out[0])
                self.keep(f"{key}.img", out[1])
            elif kind == "sequence":
                self.keep_sequence(key, out)
            elif kind == "text":
                self.keep_text(key, out)
            else:  # the KV pipeline evaluates the modulations a second time, at t = 0, for the references
                self.keep(key if key not in self.tensors else f"{key}.ref", out)

        self._hooks.append(module.register_forward_hook(hook))

    def _listen_to_vae(self, vae, encoder_stages):
        encode, decode = getattr(self.pipe, "_encode_vae_image", None), vae.decode

        def encoded(image, generator):
            # The images are channels-last, and torch's channels-last GroupNorm has eight times the rounding error.
            image = image.contiguous()
            out = encode(image=image, generator=generator)
            self.keep(f"ref{self.encoded}.image_tensor", image)
            self.keep(f"ref{self.encoded}.normalised_latents", out)
            self.encoded += 1
            return out

        def decoded(z, *a, **kw):
            out = decode(z, *a, **kw)
            self.keep("vae.decode_input", z)
            self.keep("vae.decoded", out[0])
            return out

        if encode:
            self._replace(self.pipe, "_encode_vae_image", encoded)
        self._replace(vae, "decode", decoded)

        def stage(module, name):
            self._hooks.append(module.register_forward_hook(lambda _m, _a, out: self.keep(name(), out)))

        stage(vae.quant_conv, lambda: f"ref{self.encoded}.vae_moments")
        dec, enc, stages = vae.decoder, vae.encoder, {}
        if self.level == "full":
            stages |= {"post_quant_conv": vae.post_quant_conv, "dec.conv_in": dec.conv_in, "dec.mid": dec.mid_block,
                       "dec.mid.resnet0": dec.mid_block.resnets[0], "dec.mid.attn": dec.mid_block.attentions[0],
                       "dec.up0": dec.up_blocks[0]}  # fmt: skip
        if encoder_stages:
            stages |= {"enc.mid": enc.mid_block, "enc.conv_out": enc.conv_out}
        for name, module in stages.items():
            stage(module, lambda name=name: f"vae.{name}")


def unpack_final(recorder, pipe, height, width):
    """Repeats the steps between the last latents and the VAE, and checks the result against the VAE's input."""
    latents, bn = recorder.last_latents(), pipe.vae.bn
    batch, h, w = latents.shape[0], height // 16, width // 16
    unpacked = latents.transpose(1, 2).reshape(batch, 128, h, w)
    std = torch.sqrt(bn.running_var.view(1, -1, 1, 1) + pipe.vae.config.batch_norm_eps)
    raw = unpacked * std + bn.running_mean.view(1, -1, 1, 1)
    patches = raw.reshape(batch, 32, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(batch, 32, 2 * h, 2 * w)
    assert torch.equal(patches, recorder.tensors["vae.decode_input"])
    recorder.keep("final.unpacked", unpacked)
    recorder.keep("final.bn_denormalised", raw)
