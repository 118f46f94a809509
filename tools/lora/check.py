#!/usr/bin/env python3
"""Compares Kiln's LoRAs with the programs that write and read them, on a small FLUX.2 model.

    python tools/lora/check.py MODEL_FOLDER KILN_BINARY [PART_OF_A_CASE'S_NAME]

Every case is a file in one trainer's layout. Kiln generates with it (`--latents-out`); the expected latents come from the
diffusers pipeline, with weights changed by one of
  merge    the update's definition, written here in torch, added to the weights in f32
  peft     PEFT's own layers, injected into the transformer
  lycoris  LyCORIS' own modules, as they are trained: what they make of an identity matrix is the weight
  load     diffusers' own LoRA loader (`load_lora_weights`), if it supports the layout
  refuse   none: Kiln must not read the file, and must say why
Needs torch, diffusers, transformers, peft, lycoris-lora, safetensors. Made with torch 2.15, diffusers 0.42.1, peft 0.21.2,
lycoris-lora 4.1.3. MODEL_FOLDER is a copy of testdata/tiny/klein with testdata/tokenizer as its `tokenizer`; LoRAs for
`load` are looked for in `lora` beside it.
"""
import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import peft
import torch
from diffusers import Flux2KleinPipeline
from lycoris.modules import LoConModule, LohaModule, LokrModule
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import load_file, save_file

MODEL, KILN = Path(sys.argv[1]), sys.argv[2]
ONLY = sys.argv[3] if len(sys.argv) > 3 else ""
PROMPT, SEED, SIZE, STEPS, TOKENS = "a red fox", 7, 64, 2, 64
LIMIT = 1e-5
torch.manual_seed(0)

pipe = Flux2KleinPipeline.from_pretrained(MODEL, torch_dtype=torch.float32)
pipe.set_progress_bar_config(disable=True)
plain = copy.deepcopy(pipe.transformer.state_dict())
dim = pipe.transformer.x_embedder.weight.shape[0]


def generate():
    """Returns the packed latents after the last step, as Kiln writes them; the pipeline's result is unpacked already."""
    last = {}

    def keep(_pipe, _step, _time, tensors):
        last.update(tensors)
        return {}

    generator = torch.Generator("cpu").manual_seed(SEED)
    pipe(prompt=PROMPT, height=SIZE, width=SIZE, num_inference_steps=STEPS, generator=generator,
         max_sequence_length=TOKENS, output_type="latent", callback_on_step_end=keep)
    return last["latents"]


def kiln(lora, weight):
    """Returns Kiln's latents, or its message if it refuses the LoRA."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "latents.safetensors"
        ran = subprocess.run([KILN, "generate", PROMPT, "-m", MODEL, "-S", str(SEED), "-W", str(SIZE), "-H", str(SIZE),
                              "-s", str(STEPS), "--max-tokens", str(TOKENS), "--dtype", "f32", "--no-cache", "-q",
                              "--lora", f"{lora}:{weight}", "-o", f"{folder}/x.png", "--latents-out", out],
                             capture_output=True, text=True)
        return load_file(out)["latents"] if ran.returncode == 0 else ran.stderr.strip()


def fused_modules():
    """Returns the modules of Black Forest Labs' naming, each with the diffusers layers whose rows it stacks."""
    out = {"img_in": ["x_embedder"], "txt_in": ["context_embedder"], "final_layer.linear": ["proj_out"],
           "final_layer.adaLN_modulation.1": ["norm_out.linear"],
           "time_in.in_layer": ["time_guidance_embed.timestep_embedder.linear_1"],
           "double_stream_modulation_img.lin": ["double_stream_modulation_img.linear"],
           "single_stream_modulation.lin": ["single_stream_modulation.linear"]}
    for i in range(len(pipe.transformer.transformer_blocks)):
        to, bfl = f"transformer_blocks.{i}.", f"double_blocks.{i}."
        out[bfl + "img_attn.qkv"] = [to + "attn.to_" + x for x in "qkv"]
        out[bfl + "txt_attn.qkv"] = [to + f"attn.add_{x}_proj" for x in "qkv"]
        out[bfl + "img_attn.proj"] = [to + "attn.to_out.0"]
        out[bfl + "txt_mlp.0"] = [to + "ff_context.linear_in"]
        out[bfl + "img_mlp.2"] = [to + "ff.linear_out"]
    for i in range(len(pipe.transformer.single_transformer_blocks)):
        to, bfl = f"single_transformer_blocks.{i}.attn.", f"single_blocks.{i}."
        out[bfl + "linear1"], out[bfl + "linear2"] = [to + "to_qkv_mlp_proj"], [to + "to_out"]
    return out


def swap(name, x):
    return torch.cat([x[len(x) // 2:], x[:len(x) // 2]]) if "adaLN" in name else x


def weight_of(name, layers):
    """Returns a module's weight, with rows in Black Forest Labs' order."""
    return swap(name, torch.cat([plain[layer + ".weight"] for layer in layers]))


def set_weight(state, name, layers, value):
    for layer, part in zip(layers, swap(name, value).chunk(len(layers))):
        state[layer + ".weight"] = part.contiguous()


def random(*shape, scale=0.1):
    return torch.randn(*shape) * scale


def cases():
    """Yields the name, the tensors of the file, and the changed weights."""
    modules = fused_modules()
    flat = lambda name: name.replace(".", "_")

    def low_rank(stem, ends, rank, alpha):
        tensors, changed = {}, dict(plain)
        for name, layers in modules.items():
            w = weight_of(name, layers)
            a, b = random(rank, w.shape[1]), random(w.shape[0], rank)
            tensors |= {stem(name) + ends[0]: a, stem(name) + ends[1]: b}
            if alpha is not None:
                tensors[stem(name) + ".alpha"] = torch.tensor(float(alpha))
            set_weight(changed, name, layers, w + (1 if alpha is None else alpha / rank) * b @ a)
        return tensors, changed

    ab, ud = (".lora_A.weight", ".lora_B.weight"), (".lora_down.weight", ".lora_up.weight")
    yield "ai-toolkit, rank 5", *low_rank(lambda n: "diffusion_model." + n, ab, 5, None)
    yield "kohya, rank 3, alpha 7", *low_rank(lambda n: "lora_unet_" + flat(n), ud, 3, 7)
    yield "PEFT, rank 1", *low_rank(lambda n: "base_model.model." + n, ab, 1, None)

    def full(stem, update):
        tensors, changed = {}, dict(plain)
        for name, layers in modules.items():
            w = weight_of(name, layers)
            mine, new = update(w)
            tensors |= {stem(name) + key: value for key, value in mine.items()}
            set_weight(changed, name, layers, new)
        return tensors, changed

    def lokr(w):
        c, d = next(k for k in (3, 2, 1) if w.shape[0] % k == 0), 2
        left, a, b = random(c, d, scale=1), random(w.shape[0] // c, 4), random(4, w.shape[1] // d)
        tensors = {".lokr_w1": left, ".lokr_w2_a": a, ".lokr_w2_b": b, ".alpha": torch.tensor(2.0)}
        return tensors, w + 2 / 4 * torch.kron(left, a @ b)

    def loha(w):
        a, b, c, d = (random(*s, scale=0.4) for s in ((w.shape[0], 3), (3, w.shape[1])) * 2)
        tensors = {".hada_w1_a": a, ".hada_w1_b": b, ".hada_w2_a": c, ".hada_w2_b": d, ".alpha": torch.tensor(6.0)}
        return tensors, w + 6 / 3 * (a @ b) * (c @ d)

    def dora(w):
        a, b, m = random(4, w.shape[1]), random(w.shape[0], 4), w.norm(dim=1, keepdim=True) * 1.1
        new = w + b @ a
        tensors = {".lora_down.weight": a, ".lora_up.weight": b, ".dora_scale": m}
        return tensors, m * new / new.norm(dim=1, keepdim=True)

    def dora_of_columns(w):
        a, b, m = random(4, w.shape[1]), random(w.shape[0], 4), w.norm(dim=0, keepdim=True) * 1.1
        new = w + 6 / 4 * b @ a
        tensors = {".lora_down.weight": a, ".lora_up.weight": b, ".dora_scale": m, ".alpha": torch.tensor(6.0)}
        return tensors, m * new / new.norm(dim=0, keepdim=True)

    def full_lokr(w):
        c, d = next(k for k in (3, 2, 1) if w.shape[0] % k == 0), 2
        left, right = random(c, d).half(), random(w.shape[0] // c, w.shape[1] // d).half()
        # Infinite in f16.
        tensors = {".lokr_w1": left, ".lokr_w2": right, ".alpha": torch.tensor(9999999999.0).half()}
        return tensors, w + torch.kron(left.float(), right.float())

    def fp8(dtype):
        def cast(w):
            a, b = random(4, w.shape[1]).to(dtype), random(w.shape[0], 4).to(dtype)
            tensors = {".lora_A.weight": a, ".lora_B.weight": b, ".alpha": torch.tensor(6.0).to(dtype)}
            return tensors, w + 6 / 4 * b.float() @ a.float()
        return cast

    def onetrainer(name):
        layers = modules[name]
        if len(layers) == 1:
            return "transformer." + layers[0]
        return "transformer." + layers[0].replace("to_q", "qkv").replace("add_q_proj", "added_qkv")

    unswapped = {name: layers for name, layers in modules.items() if "adaLN" not in name}

    yield "LoKr over fused layers", *full(lambda n: "diffusion_model." + n, lokr)
    yield "LoHa", *full(lambda n: "lora_unet_" + flat(n), loha)
    yield "DoRA", *full(lambda n: "lora_unet_" + flat(n), dora)
    yield "DoRA of columns over fused layers", *full(lambda n: "diffusion_model." + n, dora_of_columns)
    yield "ai-toolkit's full-rank LoKr in f16", *full(lambda n: "diffusion_model." + n, full_lokr)
    yield "LoRA cast to e4m3", *full(lambda n: "diffusion_model." + n, fp8(torch.float8_e4m3fn))
    yield "LoRA cast to e5m2", *full(lambda n: "unet." + n, fp8(torch.float8_e5m2))
    modules = unswapped
    yield "DoRA of columns in OneTrainer's fused names", *full(onetrainer, dora_of_columns)


def compare(name, how, expected, found):
    if isinstance(found, str):
        print(f"FAIL {how:7} {name}: {found}")
        return False
    error = ((found.flatten() - expected.flatten()).norm() / expected.norm()).item()
    changed = ((expected - BEFORE).norm() / BEFORE.norm()).item()
    good = error < LIMIT < changed
    print(f"{'ok  ' if good else 'FAIL'} {how:7} {name}: off by {error:.1e}, changed by {changed:.1e}")
    return good


def wanted(name):
    return ONLY in name


def linear_layers():
    return [name for name, m in pipe.transformer.named_modules() if isinstance(m, torch.nn.Linear)]


def tamed(key, value):
    """Keeps random updates small, so that errors are not drowned in a broken image."""
    small = (".lora_B.", "lokr_w1", "hada_w1_a")
    if "magnitude" in key:
        return value * 1.05
    return value * 0.2 if any(part in key for part in small) else value


def with_peft(config, adapter="default"):
    """Injects a random adapter of PEFT; returns the latents with it, and its tensors as PEFT and the model name them."""
    model = inject_adapter_in_model(config, copy.deepcopy(pipe.transformer), adapter_name=adapter)
    state = {key: tamed(key, value) for key, value in model.state_dict().items() if f".{adapter}" in key}
    model.load_state_dict(state, strict=False)
    model.eval()
    named = {"base_model.model." + key: value.clone().contiguous() for key, value in state.items()}
    saved = get_peft_model_state_dict(model, adapter_name=adapter)
    saved = {"base_model.model." + key: value.clone().contiguous() for key, value in saved.items()}
    original, pipe.transformer = pipe.transformer, model
    latents = generate()
    pipe.transformer = original
    return latents, saved, named


def settings(config):
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}


def peft_cases():
    """Yields the name and the config."""
    layers = linear_layers()
    lora = dict(target_modules=layers, init_lora_weights=False)
    other = dict(target_modules=layers, init_weights=False)
    patterns = dict(rank_pattern={"to_q": 2, ".*linear_in": 3}, alpha_pattern={"to_q": 5, "^proj_out": 1})
    for use_dora, use_rslora in ((False, False), (False, True), (True, False)):
        yield (f"LoRA, dora {use_dora}, rslora {use_rslora}",
               LoraConfig(r=4, lora_alpha=6, use_dora=use_dora, use_rslora=use_rslora, **lora))
    yield "LoRA with patterns", LoraConfig(r=4, lora_alpha=6, **patterns, **lora)
    yield "LoKr", LoKrConfig(r=4, alpha=6, **other)
    yield "LoKr with patterns", LoKrConfig(r=4, alpha=6, **patterns, **other)
    yield "LoKr of products", LoKrConfig(r=2, alpha=5, decompose_both=True, **other)
    yield "LoKr of full factors", LoKrConfig(r=1000, alpha=500, decompose_factor=8, **other)
    yield "LoKr, trained with dropout", LoKrConfig(r=4, alpha=6, rank_dropout=0.5, rank_dropout_scale=True, **other)
    yield "LoHa", LoHaConfig(r=4, alpha=6, **other)
    yield "LoHa with patterns", LoHaConfig(r=4, alpha=6, use_effective_conv2d=True, **patterns, **other)


def check_peft(folder):
    good = True
    for name, config in peft_cases():
        if not wanted(name):
            continue
        expected, saved, _ = with_peft(config)
        file = folder / "peft.safetensors"
        save_file(saved, file, metadata={"lora_adapter_metadata": json.dumps(settings(config))})
        good &= compare(name + ", settings in the header", "peft", expected, kiln(file, 1))
        save_file(saved, folder / "adapter_model.safetensors")
        config.save_pretrained(folder)
        good &= compare(name + ", adapter_config.json", "peft", expected, kiln(folder / "adapter_model.safetensors", 1))
    for adapter in ("default_0", "my_style"):
        if wanted(adapter):
            config = LoraConfig(r=4, lora_alpha=4, target_modules=linear_layers(), init_lora_weights=False)
            expected, _, named = with_peft(config, adapter)
            save_file(named, folder / "named.safetensors")
            good &= compare(f"adapter named {adapter}", "peft", expected, kiln(folder / "named.safetensors", 1))
    return good


def lycoris_cases():
    """Yields the name, the module's class and its arguments."""
    yield "LoCon", LoConModule, dict(lora_dim=4, alpha=6)
    yield "LoCon, rs_lora", LoConModule, dict(lora_dim=4, alpha=6, rs_lora=True)
    yield "LoHa", LohaModule, dict(lora_dim=4, alpha=2)
    yield "LoKr", LokrModule, dict(lora_dim=4, alpha=6)
    yield "LoKr, alpha is the rank", LokrModule, dict(lora_dim=4, alpha=4)
    yield "LoKr, rs_lora", LokrModule, dict(lora_dim=4, alpha=2, rs_lora=True)
    yield "LoKr of products", LokrModule, dict(lora_dim=2, alpha=5, decompose_both=True)
    yield "LoKr, full", LokrModule, dict(lora_dim=4, alpha=1, full_matrix=True)
    yield "LoKr, a factor of 8", LokrModule, dict(lora_dim=4, alpha=1, factor=8)
    for kind, module in (("LoCon", LoConModule), ("LoHa", LohaModule), ("LoKr", LokrModule)):
        for rows in (True, False):
            yield (f"{kind}, DoRA of {'rows' if rows else 'columns'}", module,
                   dict(lora_dim=4, alpha=6, weight_decompose=True, wd_on_out=rows))


def lycoris_layer(w, module, arguments):
    """Returns a random module's tensors, and the weight that it trains with."""
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    linear.weight.data = w.clone()
    adapter = module("x", linear, 1.0, **arguments)
    size = 0.1 if module is LoConModule else 0.3
    for name, parameter in adapter.named_parameters():
        scaled = parameter.data * 1.1 if "dora" in name else torch.randn_like(parameter) * size
        parameter.data.copy_(scaled)
    adapter.apply_to()
    with torch.no_grad():
        trained = linear(torch.eye(w.shape[1])).T.contiguous()
    return {"." + key: value.detach().float() for key, value in adapter.state_dict().items()}, trained


def check_lycoris(folder):
    """Every case twice: in SimpleTuner's names, and over the fused layers of Black Forest Labs' names."""
    good = True
    split = {name: [name] for name in linear_layers()}
    for names, prefix, modules in (("diffusers' names", "lycoris_", split),
                                   ("BFL's names", "lora_unet_", fused_modules())):
        for name, module, arguments in lycoris_cases():
            name = f"{name}, {names}"
            if not wanted(name):
                continue
            tensors, changed = {}, dict(plain)
            for at, layers in modules.items():
                mine, new = lycoris_layer(weight_of(at, layers), module, arguments)
                tensors |= {prefix + at.replace(".", "_") + key: value for key, value in mine.items()}
                set_weight(changed, at, layers, new)
            good &= check_merge(name, "lycoris", folder, tensors, changed)
    return good


def check_merge(name, how, folder, tensors, changed):
    file = folder / "lora.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, file)
    pipe.transformer.load_state_dict(changed)
    expected = generate()
    pipe.transformer.load_state_dict(plain)
    return compare(name, how, expected, kiln(file, 1))


def check_refused(folder):
    """Adapters that PEFT makes and Kiln doesn't read, with their settings and without."""
    good = True
    layers = [name for name in linear_layers() if name.endswith("to_q")]
    configs = {
        "OFT": peft.OFTConfig(target_modules=layers, oft_block_size=4),
        "BOFT": peft.BOFTConfig(target_modules=layers, boft_block_size=4),
        "IA3": peft.IA3Config(target_modules=layers, feedforward_modules=[]),
        "VERA": peft.VeraConfig(target_modules=layers, r=4),
        "ADALORA": peft.AdaLoraConfig(target_modules=layers, total_step=10),
        "HRA": peft.HRAConfig(target_modules=layers),
        "RANDLORA": peft.RandLoraConfig(target_modules=layers, r=4),
        "SHIRA": peft.ShiraConfig(target_modules=layers, r=4),
        "C3A": peft.C3AConfig(target_modules=layers, block_size=16),
        "FOURIERFT": peft.FourierFTConfig(target_modules=layers, n_frequency=16),
        "GLORA": peft.GloraConfig(target_modules=layers, r=4),
        "HIRA": peft.HiraConfig(target_modules=layers, r=4),
        "MISS": peft.MissConfig(target_modules=layers, r=4),
        "DELORA": peft.DeloraConfig(target_modules=layers, r=4),
        "GRALORA": peft.GraloraConfig(target_modules=layers, r=4, gralora_k=2),
        "ROAD": peft.RoadConfig(target_modules=layers),
        "WAVEFT": peft.WaveFTConfig(target_modules=layers, n_frequency=16),
        "LN_TUNING": peft.LNTuningConfig(target_modules=["norm_q"]),
        "kasa_config": LoraConfig(target_modules=layers, kasa_config=peft.KasaConfig()),
        "pissa": LoraConfig(target_modules=layers, init_lora_weights="pissa"),
        "olora": LoraConfig(target_modules=layers, init_lora_weights="olora"),
        "lora_bias": LoraConfig(target_modules=layers, lora_bias=True),
    }
    for name, config in configs.items():
        if not wanted(name):
            continue
        model = peft.get_peft_model(copy.deepcopy(pipe.transformer), config)
        tensors = {key: value.clone().contiguous() for key, value in get_peft_model_state_dict(model).items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        config.save_pretrained(folder)
        save_file(tensors, folder / "bare.safetensors")
        message = kiln(folder / "adapter_model.safetensors", 1)
        bare = kiln(folder / "bare.safetensors", 1)
        # Without its settings, a PiSSA is a LoRA like any other.
        refused = isinstance(message, str) and (isinstance(bare, str) or name in ("pissa", "olora"))
        refused = refused and name.lower() in message.lower()
        good &= refused
        print(f"{'ok  ' if refused else 'FAIL'} refuse  {name}: {message if isinstance(message, str) else 'read'}"
              f"{'; ' + bare if isinstance(bare, str) else ''}".replace("\n", " "))
    return good


BEFORE = generate()
good = True
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    for name, tensors, changed in cases():
        if wanted(name):
            good &= check_merge(name, "merge", folder, tensors, changed)
    good &= check_peft(folder)
    good &= check_lycoris(folder)
    good &= check_refused(folder)
    for file in sorted((MODEL.parent / "lora").glob("*.safetensors")):
        for weight in (1.0, -0.5) if wanted(file.name) else ():
            pipe.load_lora_weights(file, adapter_name="x")
            pipe.set_adapters(["x"], [weight])
            expected = generate()
            pipe.unload_lora_weights()
            good &= compare(f"{file.name}, weight {weight}", "load", expected, kiln(file, weight))
sys.exit(0 if good else 1)
