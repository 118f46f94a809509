"""Runs diffusers on the golden models and dumps the intermediate tensors.

    cd tools/golden && python reference.py ../../testdata

Reads `tiny/`, `tokenizer/` and `reference/inputs/` of that folder; writes `reference/<case>.safetensors`,
`<case>.json` and `<case>.N.png` for every case of `cases.py`, `prompts.*` (tokens and text states), `oracles.*`
(schedules, timestep embedding, RoPE, rounding), and `tolerance.json`: every case again in f64, which shows how
much of the tolerance f32 itself uses.
"""

import hashlib
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from diffusers import Flux2KleinInpaintPipeline, Flux2KleinKVPipeline, Flux2KleinPipeline, Flux2Pipeline
from diffusers.pipelines.flux2 import pipeline_flux2_klein
from PIL import Image

from cases import CASES, PROMPT_TOKENS, PROMPTS
from common import generator, save_json, save_json_rows, save_tensors, versions
from model import assemble
from record import Recorder, unpack_final

COMMAND = "cd tools/golden && python reference.py ../../testdata"
TOLERANCE = dict(
    latents_rel_l2=1e-5,
    latents_max_abs=1e-4,
    png_levels=1,
    why="diffusers in f32 is itself about 1e-6 (relative L2) away from f64, see tolerance.json; ten times that tells "
    "rounding from a mistake, and a value beside a rounding boundary may fall to the next level",
)
IMAGES = {"image": "reference_images", "mask_image": "mask", "image_reference": "image_reference"}
DEV_EMBEDS = 2.0 * torch.randn((1, 64, 60), generator=generator(123))


class Golden:
    def __init__(self, data, models):
        self.data, self.models, self.out = data, models, data / "reference"
        self.pipes = {}

    def pipe(self, case, dtype):
        loras = case["call"].get("_loras")
        cls = {"klein-kv": Flux2KleinKVPipeline, "dev": Flux2Pipeline}.get(case["model"], Flux2KleinPipeline)
        if "mask_image" in case["call"]:
            cls = Flux2KleinInpaintPipeline
        key = (cls, case["model"], dtype, str(loras))
        if key not in self.pipes:
            extra = dict(text_encoder=None, tokenizer=None) if cls is Flux2Pipeline else {}
            pipe = cls.from_pretrained(self.models / case["model"], dtype=dtype, **extra)
            pipe.set_progress_bar_config(disable=True)
            for i, (file, _, _) in enumerate(loras or []):
                file = self.models / file
                pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=f"lora{i}")
            if loras:
                pipe.set_adapters([f"lora{i}" for i in range(len(loras))], [weight for _, weight, _ in loras])
            self.pipes[key] = pipe
        return self.pipes[key]

    def image(self, name):
        image = Image.open(self.out / "inputs" / name)
        return image if image.mode == "L" else image.convert("RGB")

    def run(self, case, dtype):
        pipe = self.pipe(case, dtype)
        call = {k: v for k, v in case["call"].items() if not k.startswith("_")}
        for k in IMAGES:
            if k in call:
                call[k] = [self.image(n) for n in call[k]] if isinstance(call[k], list) else self.image(call[k])
        if case["prompts"] is None:
            call["prompt_embeds"] = DEV_EMBEDS.to(dtype)
        else:
            names = case["prompts"]
            call["prompt"] = PROMPTS[names] if isinstance(names, str) else [PROMPTS[n] for n in names]
        if negative := case["call"].get("_negative"):
            call["negative_prompt_embeds"], _ = pipe.encode_prompt(PROMPTS[negative], max_sequence_length=PROMPT_TOKENS[negative])
        seed = case["seed"]
        call["generator"] = [generator(s) for s in seed] if isinstance(seed, list) else generator(seed)
        recorder = Recorder(
            pipe, case["level"], case["first_calls"], text_tokens=64 if case["prompts"] is None else call.get("max_sequence_length", 512),
            guided=case["model"] == "klein-base", encoder_stages=case["call"].get("_encoder_stages", False),
        )  # fmt: skip
        try:
            images = pipe(**call, callback_on_step_end=recorder.after_step, output_type="pil").images
        finally:
            recorder.close()
        return pipe, recorder, images, call

    def facts(self, case, pipe, call):
        """Returns the request as JSON, with images as file names."""
        shown = (int, float, str, bool, list)
        hidden = {"generator", "prompt_embeds", "negative_prompt_embeds", *IMAGES}
        facts = dict(call_kwargs={k: v for k, v in call.items() if k not in hidden and isinstance(v, shown)})
        for key, label in IMAGES.items():
            if key in case["call"]:
                files = case["call"][key]
                files = [f"inputs/{f}" for f in (files if isinstance(files, list) else [files])]
                if key == "image" and "mask_image" in case["call"]:
                    label = "source_image"
                facts[label] = files if label == "reference_images" else files[0]
        if negative := case["call"].get("_negative"):
            facts["negative_prompt"] = f"{negative} (passed as negative_prompt_embeds)"
        if loras := case["call"].get("_loras"):
            one = len(loras) == 1
            for i, key in enumerate(("lora", "lora_weight", "effective_scale")):
                values = [entry[i] for entry in loras]
                facts[key] = values[0] if one else values
        if "padding_mask_crop" in call:
            w, h = (d // 16 * 16 for d in call["image"].size)
            region = pipe.mask_processor.get_crop_region(call["mask_image"], w, h, pad=call["padding_mask_crop"])
            facts["crops_coords_x1y1x2y2"] = list(region)
        return facts

    def wanted(self, case, name):
        """Returns whether a tensor is stored: uninteresting tensors that follow from others are not."""
        if name.endswith(".image_tensor"):
            return case["name"] == "edit_1ref"
        if name == "vae.decoded":
            return case["name"] in ("t2i_64x64", "edit_small_decoder")
        if name.endswith(".vae_moments"):
            return case["name"] in ("edit_1ref", "edit_small_decoder")
        if case["level"] == "light":
            redundant = ("final.", "kv.", "call0.hidden_states_input", "call0.transformer_out")
            return not (name.startswith(redundant) or name.endswith(".model_output"))
        return True

    def dump(self, case):
        pipe, recorder, images, call = self.run(case, torch.float32)
        name, t = case["name"], recorder.tensors
        height, width = (d * 8 for d in t["vae.decode_input"].shape[-2:])
        unpack_final(recorder, pipe, height, width)
        t = {k: v for k, v in t.items() if self.wanted(case, k)}
        if case["prompts"] is None:
            t["prompt_embeds"] = DEV_EMBEDS
        save_tensors(t, self.out / f"{name}.safetensors")
        for i, image in enumerate(images):
            image.save(self.out / f"{name}.{i}.png", optimize=True)
        scheduler = pipe.scheduler
        facts = dict(
            case=name, pipeline=type(pipe).__name__, model=case["model"], prompts=case["prompts"], seed=case["seed"],
            height=height, width=width, **self.facts(case, pipe, call), **recorder.facts,
            sigmas=scheduler.sigmas.tolist(), timesteps=scheduler.timesteps.tolist(),
            transformer_calls=recorder.calls, steps_run=recorder.steps,
            images=[f"{name}.{i}.png" for i in range(len(images))],
            image_sha256=[hashlib.sha256(im.tobytes()).hexdigest() for im in images],
            image_sizes=[list(im.size) for im in images],
            command=COMMAND, versions=versions(), tolerance=TOLERANCE,
        )  # fmt: skip
        rows = {k: dict(shape=list(v.shape), dtype=str(v.dtype)[6:]) for k, v in sorted(t.items())}
        save_json_rows(facts, "tensors", rows, self.out / f"{name}.json")
        return recorder, images

    def compare_with_f64(self, case, recorder, images):
        _, exact, exact_images, _ = self.run(case, torch.float64)
        a, b = recorder.last_latents().double(), exact.last_latents()
        levels = max(np.abs(np.int32(x) - np.int32(y)).max() for x, y in zip(images, exact_images))
        return dict(latents_rel_l2=float((a - b).norm() / b.norm()), latents_max_abs=float((a - b).abs().max()),
                    latents_std=float(b.std()), png_levels=int(levels))  # fmt: skip

    def dump_prompts(self):
        pipe = self.pipe(dict(model="klein", call={}), torch.float32)
        tensors, facts = {}, dict(command=COMMAND, versions=versions(), tolerance="token ids exact; embeds rel. L2 1e-5, max abs 1e-4")
        for name, prompt in PROMPTS.items():
            n = PROMPT_TOKENS[name]
            text = pipe.tokenizer.apply_chat_template([dict(role="user", content=prompt)], tokenize=False, add_generation_prompt=True, enable_thinking=False)
            tokens = pipe.tokenizer(text, return_tensors="pt", padding="max_length", truncation=True, max_length=n)
            real = int(tokens.attention_mask.sum())
            tensors[f"{name}.input_ids"] = tokens.input_ids[0].to(torch.int32)
            tensors[f"{name}.attention_mask"] = tokens.attention_mask[0].to(torch.int32)
            tensors[f"{name}.prompt_embeds"], _ = pipe.encode_prompt(prompt, max_sequence_length=n)
            facts[name] = dict(prompt=prompt, templated=text, n_tokens=real, max_sequence_length=n, input_ids=tokens.input_ids[0, :real].tolist())
            if name == "P0":
                tensors |= self.text_states(pipe.text_encoder, tokens)
        save_tensors(tensors, self.out / "prompts.safetensors")
        save_json(facts, self.out / "prompts.json", indent=None)

    def text_states(self, encoder, tokens):
        """Records every layer's output for the first 32 and last 2 positions, and the insides of layer 0."""
        layer, inside = encoder.model.layers[0], {}
        modules = dict(input_layernorm=layer.input_layernorm, self_attn=layer.self_attn, mlp=layer.mlp,
                       post_attention_layernorm=layer.post_attention_layernorm)  # fmt: skip
        modules |= {n: getattr(layer.self_attn, n) for n in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")}
        def keep(name):
            return lambda _m, _a, out: inside.update({f"P0.layer0.{name}": (out if torch.is_tensor(out) else out[0])[:, :32]})
        hooks = [m.register_forward_hook(keep(n)) for n, m in modules.items()]
        states = encoder(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True, use_cache=False).hidden_states[:-1]
        for hook in hooks:
            hook.remove()
        first, last = (torch.stack([s[0, cut] for s in states]) for cut in (slice(32), slice(-2, None)))
        return inside | {"P0.hidden_states_first32": first, "P0.hidden_states_last2": last}

    def dump_oracles(self):
        """Records formulas that need no weights."""
        pipe = self.pipe(dict(model="klein", call={}), torch.float32)
        schedule = []
        for w, h in [(64, 64), (256, 256), (512, 512), (768, 1360), (1024, 1024), (1040, 1056), (1056, 1056), (2048, 2048)]:
            for n in (1, 2, 3, 4, 8, 20, 28, 50):
                tokens = (w // 16) * (h // 16)
                mu = pipeline_flux2_klein.compute_empirical_mu(tokens, n)
                pipe.scheduler.set_timesteps(n, sigmas=np.linspace(1.0, 1 / n, n), mu=mu)
                entry = dict(width=w, height=h, image_seq_len=tokens, steps=n, mu=mu)
                if n <= 8 or (w, n) == (1024, 50):
                    entry |= dict(sigmas=pipe.scheduler.sigmas.tolist(), timesteps=pipe.scheduler.timesteps.tolist())
                schedule.append(entry)
        times = torch.tensor([1000.0, 997.123, 912.5, 500.0, 250.25, 31.4159, 1.0, 0.0, 4000.0, 3500.0, 1500.0])
        ids = [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 511], [0, 1, 2, 0], [0, 63, 63, 0], [0, 127, 95, 0], [10, 0, 0, 0], [10, 5, 7, 0], [20, 31, 1, 0], [40, 0, 127, 0]]
        ids = torch.tensor(ids)
        cos, sin = pipe.transformer.pos_embed(ids)
        levels = torch.tensor([-1.5, -1.0, -0.999, -0.5, -1 / 255, 0.0, 1e-3, 0.3333, 0.5, 0.996, 1.0, 2.0])
        image = pipe.image_processor.postprocess(levels.view(1, 1, 1, -1).repeat(1, 3, 1, 1), output_type="pil")[0]
        save_tensors({
            "timesteps": times, "timestep_embedding": pipe.transformer.time_guidance_embed.time_proj(times),
            "rope_ids": ids.to(torch.int32), "rope_cos": cos.float(), "rope_sin": sin.float(), "postprocess_in": levels,
        }, self.out / "oracles.safetensors")  # fmt: skip
        save_json(dict(command=COMMAND, versions=versions(), tolerance="sigmas and mu 1e-6 relative; tables 1e-6 absolute; levels exact",
                       schedule=schedule, postprocess_u8=np.asarray(image)[0, :, 0].tolist()), self.out / "oracles.json", indent=None)  # fmt: skip


def main(data, only):
    with tempfile.TemporaryDirectory() as models:
        models = Path(models)
        assemble(data / "tiny", data / "tokenizer", models)
        golden = Golden(data, models)
        if not only:
            for old in [*golden.out.glob("*.*")]:
                old.unlink()
            golden.dump_prompts()
            golden.dump_oracles()
        limits = {}
        for case in CASES:
            if only and case["name"] not in only:
                continue
            recorder, images = golden.dump(case)
            limits[case["name"]] = golden.compare_with_f64(case, recorder, images)
            print(case["name"], (golden.out / f"{case['name']}.safetensors").stat().st_size, limits[case["name"]], flush=True)
        if not only:
            save_json(dict(command=COMMAND, versions=versions(), what="f32 against f64, both by diffusers", **limits), golden.out / "tolerance.json", indent=None)
        for f in golden.out.iterdir():
            if f.is_file():
                f.chmod(0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
