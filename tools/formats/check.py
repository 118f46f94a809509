"""Checks that Kiln reads files written by other libraries, refuses those it can't read, and that they read Kiln's files.

    python tools/formats/check.py KILN MODEL        (needs torch, safetensors, gguf, numpy)

MODEL is a small FLUX.2 model in diffusers' layout (`testdata/tiny/klein` with `testdata/tokenizer` in it). Its transformer is written as GGUF by the
`gguf` package, and as fp8, int8 and nvfp4 of every convention with torch; Kiln's latents for each must be those for the
dequantized values in f32, within a relative 1e-5. Formats that Kiln does not read must be refused by their name. Then Kiln's
own files are read by `gguf` and `safetensors` and must hold the values that `kiln convert` gives for them.

Where a package is installed, it writes its own files: transformers (fp8), torchao, optimum-quanto, compressed-tensors.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

KILN, MODEL = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
LIMIT = 1e-5
failed = []


def original(tensors):
    """Renames to Black Forest Labs' naming, with q, k and v fused."""
    out = {}
    fixed = {
        "x_embedder": "img_in", "context_embedder": "txt_in", "proj_out": "final_layer.linear",
        "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
        "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
        "single_stream_modulation.linear": "single_stream_modulation.lin",
    }
    double = {
        "attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj", "ff.linear_in": "img_mlp.0",
        "ff.linear_out": "img_mlp.2", "ff_context.linear_in": "txt_mlp.0", "ff_context.linear_out": "txt_mlp.2",
    }
    norms = {
        "attn.norm_q": "img_attn.norm.query_norm", "attn.norm_k": "img_attn.norm.key_norm",
        "attn.norm_added_q": "txt_attn.norm.query_norm", "attn.norm_added_k": "txt_attn.norm.key_norm",
    }
    single = {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if module in fixed:
            out[f"{fixed[module]}.weight"] = value
        elif module == "norm_out.linear":
            scale, shift = value.chunk(2)
            out["final_layer.adaLN_modulation.1.weight"] = torch.cat([shift, scale])
        else:
            kind, number, rest = module.split(".", 2)
            if kind == "single_transformer_blocks":
                if rest in single:
                    out[f"single_blocks.{number}.{single[rest]}.weight"] = value
                else:
                    out[f"single_blocks.{number}.norm.{'query' if rest == 'attn.norm_q' else 'key'}_norm.scale"] = value
            elif rest in double:
                out[f"double_blocks.{number}.{double[rest]}.weight"] = value
            elif rest in norms:
                out[f"double_blocks.{number}.{norms[rest]}.scale"] = value
            elif rest in ("attn.to_q", "attn.add_q_proj"):
                others = ("attn.to_k", "attn.to_v") if rest == "attn.to_q" else ("attn.add_k_proj", "attn.add_v_proj")
                parts = [value] + [tensors[f"{kind}.{number}.{o}.weight"] for o in others]
                stream = "img" if rest == "attn.to_q" else "txt"
                out[f"double_blocks.{number}.{stream}_attn.qkv.weight"] = torch.cat(parts)
    return out


def is_layer(name, value):
    return name.startswith(("double_blocks.", "single_blocks.")) and value.ndim == 2


def command(work, component, file):
    return [KILN, "generate", "a fox", "-m", MODEL, f"--{component}", file, "-W", "64", "-H", "48", "-s", "2", "-S", "1",
            "--max-tokens", "32", "--dtype", "f32", "--no-cache", "-q", "-o", work / "a.png",
            "--latents-out", work / "latents.safetensors"]


def latents(work, file, component="transformer"):
    subprocess.run(command(work, component, file), check=True)
    return load_file(work / "latents.safetensors")["latents"]


def save(tensors, file, metadata=None):
    save_file({k: v.clone().contiguous() for k, v in tensors.items()}, file, metadata)


def report(what, found, expected):
    error = ((found - expected).norm() / expected.norm()).item()
    print(f"{what:38} {error:.1e}")
    if not error < LIMIT:
        failed.append(what)


def compare(what, work, file, dequantized):
    save(dequantized, work / "dequantized.safetensors")
    expected = latents(work, work / "dequantized.safetensors")
    report(what, latents(work, file), expected)


def refuse(what, work, tensors, words, metadata=None, config=None):
    """Checks that Kiln refuses a transformer with these words."""
    file = work / "refused.safetensors"
    if config is not None:
        file = work / "refused"
        shutil.rmtree(file, ignore_errors=True)
        file.mkdir()
        ours = json.loads((MODEL / "transformer/config.json").read_text())
        (file / "config.json").write_text(json.dumps(ours | {"quantization_config": config}))
    save(tensors, file / "diffusion_pytorch_model.safetensors" if config is not None else file, metadata)
    run = subprocess.run(command(work, "transformer", file), capture_output=True, text=True)
    named = run.returncode != 0 and words in run.stderr
    print(f"{what:38} {'refused' if named else 'NOT REFUSED BY NAME: ' + run.stderr.strip()}")
    if not named:
        failed.append(what)


def write_gguf(path, tensors, kind):
    writer = gguf.GGUFWriter(path, "flux")
    dequantized = {}
    for name, value in tensors.items():
        data = value.float().numpy()
        usable = is_layer(name, value) and value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        this = kind if usable else (gguf.GGMLQuantizationType.F32 if value.ndim == 1 else gguf.GGMLQuantizationType.BF16)
        packed = quantize(data, this)
        writer.add_tensor(name, packed, raw_dtype=this)
        dequantized[name] = torch.from_numpy(dequantize(packed, this).reshape(value.shape).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dequantized


def fp8(value, dtype, rows):
    largest = torch.finfo(dtype).max
    amax = value.abs().amax(dim=1, keepdim=True) if rows else value.abs().max()
    scale = (amax / largest).clamp(min=1e-12).float()
    packed = (value / scale).clamp(-largest, largest).to(dtype)
    return packed, scale, packed.float() * scale


def tiles(value, side):
    """fp8 with a scale for each tile of `side` rows and columns; the last ones may be partial."""
    rows, cols = value.shape
    down, across = -(-rows // side), -(-cols // side)
    padded = torch.zeros(down * side, across * side)
    padded[:rows, :cols] = value
    scale = padded.reshape(down, side, across, side).abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448
    spread = scale.repeat_interleave(side, 0).repeat_interleave(side, 1)[:rows, :cols]
    packed = (value / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return packed, scale, packed.float() * spread


def int8(value, rows):
    amax = value.abs().amax(dim=1, keepdim=True) if rows else value.abs().max()
    scale = (amax / 127).clamp(min=1e-12).float()
    packed = (value / scale).round().clamp(-127, 127).to(torch.int8)
    return packed, scale, packed.float() * scale


CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nvfp4(value, comfy):
    rows, cols = value.shape
    global_scale = (value.abs().max() / (448 * 6)).float()
    blocks = value.reshape(rows, cols // 16, 16)
    scale = (blocks.abs().amax(-1) / 6 / global_scale).clamp(max=448).to(torch.float8_e4m3fn)
    step = (scale.float() * global_scale)[..., None]
    ratio = torch.where(step > 0, blocks / step, 0)
    code = (ratio.abs()[..., None] - CODES).abs().argmin(-1)
    dequantized = (CODES[code] * ratio.sign() * step).reshape(rows, cols)
    code = (code + 8 * (ratio < 0)).reshape(rows, cols // 2, 2).to(torch.uint8)
    high, low = (0, 1) if comfy else (1, 0)
    packed = code[..., high] * 16 + code[..., low]
    if comfy:  # tiles of 128 rows by 4 scales
        down, across = -(-rows // 128) * 128, -(-(cols // 16) // 4) * 4
        padded = torch.zeros(down, across, dtype=torch.uint8)
        padded[:rows, : cols // 16] = scale.view(torch.uint8)
        tiles = padded.reshape(down // 128, 4, 32, across // 4, 4).permute(0, 3, 2, 1, 4)
        scale = tiles.reshape(down, across).contiguous().view(torch.float8_e4m3fn)
    return packed, scale, global_scale, dequantized


def with_layers(tensors, quantize):
    """Applies `quantize(name, value)` to each layer; it returns the tensors to store, and their dequantized value."""
    stored, dequantized = {}, {}
    for name, value in tensors.items():
        if is_layer(name, value):
            more, dequantized[name] = quantize(name.removesuffix(".weight"), value.float())
            stored.update(more)
        else:
            stored[name], dequantized[name] = value, value.float()
    return stored, dequantized


def comfy_quant(kind):
    return torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=torch.uint8)


def check_fp8(work, tensors):
    e4, e5 = torch.float8_e4m3fn, torch.float8_e5m2

    def convention(dtype, rows, name, extra):
        def quantize(module, value):
            packed, scale, dequantized = fp8(value, dtype, rows)
            scale = scale.flatten() if rows else scale.reshape(())
            more = {f"{module}.weight": packed, f"{module}.{name}": scale}
            more.update({f"{module}.{k}": v for k, v in extra.items()})
            return more, dequantized
        return quantize

    one = torch.tensor(1.0)
    conventions = {
        "fp8, one scale per layer": (convention(e4, False, "weight_scale", {"input_scale": one}), {}),
        "fp8, ComfyUI's older names": (convention(e4, False, "scale_weight", {"scale_input": one}), {"scaled_fp8": torch.zeros(2).to(e4)}),
        "fp8, comfy_quant": (convention(e4, False, "weight_scale", {"comfy_quant": comfy_quant("float8_e4m3fn")}), {}),
        "fp8, one scale per row": (convention(e4, True, "weight_scale", {}), {}),
        "fp8 e5m2": (convention(e5, False, "weight_scale", {"comfy_quant": comfy_quant("float8_e5m2")}), {}),
        "fp8, plain casts": (lambda m, v: ({f"{m}.weight": v.to(e4)}, v.to(e4).float()), {}),
    }
    # Scales of tiles; 64 and 256 follow from the shapes. 256 rows are no multiple of the rows of q, k and v.
    for side, dtype in [(128, torch.float32), (64, torch.float32), (256, torch.float32), (128, torch.bfloat16)]:
        def tiled(module, value, side=side, dtype=dtype):
            packed, scale, dequantized = tiles(value, side)
            if dtype != torch.float32:
                spread = (scale.to(dtype).float() / scale).repeat_interleave(side, 0).repeat_interleave(side, 1)
                dequantized = dequantized * spread[: value.shape[0], : value.shape[1]]
            return {f"{module}.weight": packed, f"{module}.weight_scale_inv": scale.to(dtype)}, dequantized
        conventions[f"fp8, tiles of {side}, {str(dtype)[6:]}"] = (tiled, {})
    for what, (quantize, more) in conventions.items():
        stored, dequantized = with_layers(tensors, quantize)
        save(stored | more, work / "fp8.safetensors")
        compare(what, work, work / "fp8.safetensors", dequantized)
    save({k: v.to(e4) for k, v in tensors.items()}, work / "fp8.safetensors")
    compare("fp8, a whole file cast", work, work / "fp8.safetensors", {k: v.to(e4).float() for k, v in tensors.items()})


def check_int8(work, tensors):
    for what, rows, shape in [
        ("int8, one scale per layer", False, ()), ("int8, one scale in a vector", False, (1,)),
        ("int8, one scale per row", True, (-1,)), ("int8, a column of scales", True, (-1, 1)),
    ]:
        def quantize(module, value, rows=rows, shape=shape):
            packed, scale, dequantized = int8(value, rows)
            return {f"{module}.weight": packed, f"{module}.weight_scale": scale.reshape(shape),
                    f"{module}.comfy_quant": comfy_quant("int8_tensorwise")}, dequantized
        stored, dequantized = with_layers(tensors, quantize)
        last = "final_layer.adaLN_modulation.1"  # its halves are swapped
        more, dequantized[f"{last}.weight"] = quantize(last, tensors[f"{last}.weight"].float())
        save(stored | more, work / "int8.safetensors")
        compare(what, work, work / "int8.safetensors", dequantized)


def check_text_encoder(work):
    """transformers' fp8 for the text encoder, in a folder whose config.json states the size of tiles."""
    source, side = MODEL / "text_encoder", 16
    tensors = {k: v for shard in sorted(source.glob("*.safetensors")) for k, v in load_file(shard).items()}
    config = json.loads((source / "config.json").read_text())
    quantize = lambda name, value: tiles(value.float(), side)[:2]
    what = "text encoder, fp8 tiles"
    if importlib.util.find_spec("transformers"):
        from transformers.integrations.finegrained_fp8 import Fp8Quantize
        from transformers.utils.quantization_config import FineGrainedFP8Config

        settings = FineGrainedFP8Config(weight_block_size=(side, side))
        op = Fp8Quantize(SimpleNamespace(quantization_config=settings))
        quantize = lambda name, value: tuple(op.convert({name: value}).values())
        what = "text encoder, transformers' fp8"
    stored, dequantized = {}, {}
    for name, value in tensors.items():
        if name.endswith("_proj.weight"):
            packed, scale = quantize(name, value)
            stored |= {name: packed, f"{name}_scale_inv": scale}
            spread = scale.float().repeat_interleave(side, 0).repeat_interleave(side, 1)
            dequantized[name] = packed.float() * spread[: value.shape[0], : value.shape[1]]
        else:
            stored[name], dequantized[name] = value, value.float()
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [side, side]}
    found = []
    for folder, weights, more in [("text", dequantized, {}), ("text-fp8", stored, {"quantization_config": fp8})]:
        (work / folder).mkdir()
        (work / folder / "config.json").write_text(json.dumps(config | more))
        save(weights, work / folder / "model.safetensors")
        found.append(latents(work, work / folder, "text-encoder"))
    report(what, found[1], found[0])


def check_nvfp4(work, tensors, ours):
    def comfy(module, value):
        packed, scale, global_scale, dequantized = nvfp4(value, True)
        return {f"{module}.weight": packed, f"{module}.weight_scale": scale, f"{module}.weight_scale_2": global_scale}, dequantized

    stored, dequantized = with_layers(tensors, comfy)
    layers = {k.removesuffix(".weight_scale_2"): {"format": "nvfp4"} for k in stored if k.endswith(".weight_scale_2")}
    listed = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    save(stored, work / "nvfp4.safetensors", listed)
    compare("nvfp4, Black Forest Labs' order", work, work / "nvfp4.safetensors", dequantized)
    refuse("nvfp4, its order lost", work, stored, "may be in ComfyUI's order or in ModelOpt's")
    modelopt = {"quantization_config": json.dumps({"quant_method": "modelopt", "quant_algo": "NVFP4"})}
    refuse("nvfp4, ModelOpt's for ComfyUI", work, stored, "may be in rows or in tiles", modelopt | listed)

    stored, dequantized = {}, {}
    for name, value in ours.items():
        if "transformer_blocks." in name and value.ndim == 2:
            module = name.removesuffix(".weight")
            packed, scale, global_scale, dequantized[name] = nvfp4(value.float(), False)
            stored.update({name: packed, f"{module}.weight_scale": scale, f"{module}.weight_scale_2": global_scale,
                           f"{module}.input_scale": torch.tensor(1.0)})
        else:
            stored[name], dequantized[name] = value, value.float()
    save(stored, work / "nvfp4.safetensors")
    compare("nvfp4, ModelOpt's order", work, work / "nvfp4.safetensors", dequantized)


def check_refused(work, tensors, ours):
    """Formats that Kiln does not read, written by their own packages where these are installed."""
    one = torch.tensor(1.0)
    layer = "single_blocks.0.linear2"
    for what, leaf, words in [
        ("bitsandbytes nf4", "weight.quant_state.bitsandbytes__nf4", "bitsandbytes nf4"),
        ("bitsandbytes int8", "SCB", "bitsandbytes int8"), ("GPTQ", "qzeros", "GPTQ or AWQ"), ("HQQ", "W_q", "HQQ"),
        ("Nunchaku", "wscales", "SVDQuant"), ("ModelOpt AWQ", "pre_quant_scale", "ModelOpt AWQ"),
        ("ModelOpt in diffusers", "weight_quantizer._scale", "ModelOpt's own quantizers"),
        ("a scale beside bf16", "weight_scale", "has a scale"),
    ]:
        refuse(what, work, tensors | {f"{layer}.{leaf}": 2 * one}, words)
    rotated = torch.tensor(list(b'{"format":"int8_tensorwise","convrot":true}'), dtype=torch.uint8)
    refuse("ComfyUI's rotated int8", work, tensors | {f"{layer}.comfy_quant": rotated}, "rotation")
    for method, words in [("bitsandbytes", "bitsandbytes"), ("torchao", "torchao"), ("sdnq", "sdnq"), ("new", "new")]:
        refuse(f"quantization_config: {method}", work, ours, f"with {words}", config={"quant_method": method})

    name = "single_transformer_blocks.0.attn.to_out"
    linear = torch.nn.Linear(*reversed(ours[f"{name}.weight"].shape), bias=False)
    linear.weight.data = ours[f"{name}.weight"].float()
    rest = {k: v for k, v in ours.items() if not k.startswith(f"{name}.")}
    named = lambda state: {f"{name}.{k}": v for k, v in state.items()}
    if importlib.util.find_spec("torchao"):
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        model = torch.nn.Sequential(linear)
        quantize_(model, Int8WeightOnlyConfig(version=2))
        state = {f"{name}.weight": model[0].weight.data}
        flat, metadata = flatten_tensor_state_dict(state)
        refuse("torchao's own file", work, rest | flat, "torchao", metadata)
        linear = torch.nn.Linear(*reversed(ours[f"{name}.weight"].shape), bias=False)
        linear.weight.data = ours[f"{name}.weight"].float()
    if importlib.util.find_spec("optimum"):
        from optimum.quanto import freeze, qint8, quantize

        model = torch.nn.Sequential(linear)
        quantize(model, weights=qint8)
        freeze(model)
        refuse("quanto's own file", work, rest | named({k[2:]: v for k, v in model.state_dict().items()}), "quanto")
    if importlib.util.find_spec("compressed_tensors"):
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        value = ours[f"{name}.weight"].float()
        packed = pack_to_int32((value / value.abs().max() * 7).round().to(torch.int8), 4)
        state = {"weight_packed": packed, "weight_scale": one, "weight_shape": torch.tensor(value.shape)}
        refuse("compressed-tensors, packed", work, rest | named(state), "compressed-tensors")


def check_written(work):
    """Reads Kiln's GGUF files with the gguf package."""
    for target in ["q8_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k", "q5_1", "q5_0", "q4_1", "q4_0"]:
        ours, dequantized = work / "ours.gguf", work / "ours.safetensors"
        subprocess.run([KILN, "quantize", MODEL, ours, "--to", target, "-q"], check=True)
        subprocess.run([KILN, "convert", ours, dequantized, "--dtype", "f32", "-q"], check=True)
        expected, worst = load_file(dequantized), 0.0
        reader = gguf.GGUFReader(ours)
        kinds = {tensor.tensor_type.name for tensor in reader.tensors}
        assert len(reader.tensors) == len(expected)
        for tensor in reader.tensors:
            found = dequantize(tensor.data, tensor.tensor_type).reshape(expected[tensor.name].shape)
            worst = max(worst, float(np.abs(found - expected[tensor.name].numpy()).max()))
        print(f"written as {target:27} {worst:.1e}  {', '.join(sorted(kinds))}")
        if worst != 0:
            failed.append(f"written as {target}")


def main():
    ours = load_file(MODEL / "transformer/diffusion_pytorch_model.safetensors")
    tensors = original(ours)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        save(tensors, work / "bfl.safetensors")
        compare("one file", work, work / "bfl.safetensors", {k: v.float() for k, v in tensors.items()})
        save({f"model.diffusion_model.{k}": v for k, v in tensors.items()}, work / "comfy.safetensors")
        compare("one file with prefixes", work, work / "comfy.safetensors", {k: v.float() for k, v in tensors.items()})
        for kind in ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]:
            dequantized = write_gguf(work / "a.gguf", tensors, gguf.GGMLQuantizationType[kind])
            compare(f"GGUF {kind}", work, work / "a.gguf", dequantized)
        check_fp8(work, tensors)
        check_int8(work, tensors)
        check_text_encoder(work)
        check_nvfp4(work, tensors, ours)
        check_refused(work, tensors, ours)
        check_written(work)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    print("all passed")


main()
