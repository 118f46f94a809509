"""The whole training on one machine: autoencoder, phases A and B, distillation, metrics.

Every phase writes checkpoints into `--out` and resumes from them; a run may be interrupted anywhere.
"""

import argparse
import json
import os
import tarfile
from dataclasses import replace

import torch

import distil
import net
import train
import vae
from evaluate import Evaluation
from pack import quantized_state, read_delta, read_packed
from scenes import render
from session import Session, Shape, load_parts, save_parts


VAE_SIZES = {False: ((128, 128), (256, 32)), True: ((32, 4), (32, 4))}


def begin_with(session, path, base):
    """Takes all three networks from a packed model, the transformer from its difference `base` if that is given."""
    session.start = {"base": read_delta(path, base) if base else read_packed(path, "transformer"), "text": read_packed(path, "text_encoder")}
    model = vae.Autoencoder().to(session.device)
    model.load_state_dict(read_packed(path, "vae"))
    place(session, model)


def measure_vae(session, model, held_out, size):
    with torch.no_grad():
        truth, session.vae = held_out(size, 128), model
        tokens = torch.cat([model.latents(part, session.dtype) for part in truth.split(32)])
        value = vae.psnr(session.decode(tokens, size // 16, size // 16), truth)
    session.log(f"vae held-out psnr {value:.2f} dB on {len(truth)} scenes")
    session.progress(vae_psnr=value)


def place(session, model):
    model = model.requires_grad_(False).eval()
    session.vae = model.to(memory_format=torch.channels_last) if session.device == "cuda" else model


def autoencoder(session, seconds, max_steps, toy):
    model, done = vae.Autoencoder().to(session.device), session.progress()
    saved = load_parts(session.out, "vae")
    if saved:
        model.load_state_dict(saved)
        session.log("resumed vae")
    if not done.get("vae_ready"):
        draw, scenes_only, held_out = session.vae_draws()
        used = done.get("vae", 0.0)
        model = vae.train(model, draw, session.device, session.dtype, seconds, used, session.log, max_steps=max_steps, sizes=VAE_SIZES[toy])
        few = dict(batches=2, size=32, count=8) if toy else {}
        vae.recolour(model, scenes_only, session.dtype, **few)
        vae.set_statistics(model, scenes_only, session.dtype, **few)
        measure_vae(session, model, held_out, VAE_SIZES[toy][1][0])
        save_parts(model.state_dict(), session.out, "vae")
        session.progress(vae=seconds, vae_ready=True)
    place(session, model)


def made_latents(session, model, text, size, count):
    """Returns a function that draws pairs of latents made by the student and the images that the captions ask for."""
    shape = Shape("plain", size, size, 0, count)
    key = shape.kind, size, size
    session.pool(shape)
    rows, ids = session.rows[key][:count], session.pools[key][1][:count]
    tokens = session.sample(model, text, ids, size, size, seed=21)
    mean, std = session.vae._scale()
    latents = torch.cat([vae.unpatchify(part.float().transpose(1, 2).unflatten(2, shape.grid) * std + mean) for part in tokens.split(512)])

    def draw(number):
        pick = torch.randint(len(latents), (number,), device=session.device)
        z = latents[pick]
        return z.contiguous(memory_format=torch.channels_last) if session.device == "cuda" else z, render(session.pictures, rows[pick], size, size)

    return draw


def polish(session, model, text, seconds, max_steps, toy):
    """Trains the decoder further after the latents are fixed, on encoded images and on what the student makes."""
    if seconds <= session.progress().get("D", 0):
        return
    draw, _, held_out = session.vae_draws()
    sizes = ((32, 4), (64, 4)) if toy else ((128, 96), (256, 32))
    generated = made_latents(session, model, text, sizes[1][0], 16 if toy else 6_000)
    measure_vae(session, session.vae, held_out, sizes[1][0])
    vae.polish(session.vae, draw, generated, session.device, session.dtype, seconds, session.log, max_steps=max_steps, sizes=sizes)
    measure_vae(session, session.vae, held_out, sizes[1][0])
    save_parts(session.vae.state_dict(), session.out, "vae")
    session.progress(D=seconds)


def look(session, evaluation, toy):
    """Logs an early metric of the half-trained model, at 128 px, in time to stop a bad run."""
    if "B" not in session.progress():
        found = evaluation.retrieval(*((64, 4) if toy else (128, 192)))
        session.log("after A, retrieval", {style: (f["top1"], f["top5"]) for style, f in found.items()})


def report(session, name, evaluation, full, toy):
    """Writes the metrics of one model to `report.json`, and its image grids next to it."""
    path = session.path("report.json")
    figures = json.load(open(path)) if os.path.exists(path) else {}
    if name in figures:
        return
    size, few = (64, 4) if toy else (256, 192)
    out = dict(retrieval=evaluation.retrieval(size, None if full and not toy else few))
    if not toy:
        evaluation.grids(session.path(name))
        for kind in ("edit", "edit2"):
            out[kind] = evaluation.edits(kind, 256, session.path(f"{name}_{kind}.webp"))
    if full and not toy:
        out["retrieval_384"] = evaluation.retrieval(256, 192)
        out["retrieval_128px"] = evaluation.retrieval(128, 192)
        out["edit_128px"] = evaluation.edits("edit", 128, None)
        out["held_out"] = evaluation.held_out(session.path(name + "_held_out.webp"))
        evaluation.sizes(session.path(name))
    figures[name] = out
    with open(path, "w") as file:
        json.dump(figures, file, indent=1)
    short = {s: (v["top1"], v["top5"]) for s, v in out["retrieval"].items()}
    session.log(name, "retrieval", short, *(f"{k} {out[k]}" for k in ("edit", "edit2") if k in out),
                *(f"held out {k} {v['right']}" for k, v in out.get("held_out", {}).items()))


def preview(session, name, evaluation, toy):
    """Writes image grids, to see how far a run is; the packed model is judged later."""
    if not toy:
        evaluation.grids(session.path(name))
        session.log(name, "grids written")


def bundle(session):
    """Bundles grids, log and metrics into one file."""
    with tarfile.open(session.path("figures.tar"), "w") as tar:
        for file in sorted(os.listdir(session.out)):
            if file.endswith((".webp", ".json", ".txt")):
                tar.add(session.path(file), file)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder written by fetch.py")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", default="vae=470,a=240,b=420,c=220,d=60", help="training time per phase")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--max-steps", type=int, default=10**9, help="limit for every phase; a few steps test the whole pipeline")
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel separately")
    parser.add_argument("--start", metavar="FILE", help="begin with the weights of a packed model and keep its autoencoder: only phases B (all sizes and ratios) and C")
    parser.add_argument("--base", metavar="FILE", help="with --start, begin with the transformer of this difference from it (see delta.py)")
    parser.add_argument("--pools", type=float, default=1.0, help="scales the number of latents that are computed in advance")
    parser.add_argument("--toy", action="store_true", help="tiny images and batches, for a test without a GPU")
    args = parser.parse_args()
    seconds = {k: float(v) for k, v in (pair.split("=") for pair in args.seconds.split(","))}
    counts = dict(text=200_000, plain=12_000, edit=50_000, edit2=30_000)
    if args.start:
        counts = dict(text=100_000, plain=40_000, edit=20_000, edit2=5_000)
    if args.toy:
        counts = {kind: 240 if kind == "text" else 40 for kind in counts}
    if args.max_steps < 100 and not args.toy:
        counts = {kind: 2_500 for kind in counts}
    session = Session(args.data, args.out, counts, args.workers, graphs=not args.no_graphs, start=args.start)
    if session.compile:
        net.enable_compile()
        vae.enable_compile()
    if args.start:
        begin_with(session, args.start, args.base)
    else:
        autoencoder(session, seconds["vae"], args.max_steps, args.toy)
    tables = train.PHASE_A, train.PHASE_B, distil.PHASE_C
    if args.start:
        tables = (), train.PHASE_B_SIZES, distil.PHASE_C_SIZES
        seconds.update(a=0)
    if args.toy:
        tables = (tuple((1, Shape(kind, 64, 64, 4, 16)) for kind in counts),) * 3
    if args.max_steps < 100 and args.start and not args.toy:
        tables = (), tables[1][::6], tables[2][::6]
    scaled = lambda table: tuple((share, replace(shape, pool=max(16, int(shape.pool * args.pools)))) for share, shape in table)
    tables = tuple(map(scaled, tables))
    glance = lambda model, text: args.start or look(session, Evaluation(session, model, text, distil.GUIDANCE, 24), args.toy)
    base, text = train.run(session, seconds["a"], seconds["b"], args.max_steps, tables[:2], glance)
    if args.start:
        preview(session, "base", Evaluation(session, base, text, distil.GUIDANCE, 24), args.toy)
    else:
        report(session, "base", Evaluation(session, base, text, distil.GUIDANCE, 24), False, args.toy)
    bundle(session)
    open(session.path("BASE_DONE"), "w").close()
    if session.device == "cuda":
        torch.cuda.empty_cache()
    student = distil.Distiller(session, base, text).run(seconds["c"], tables[2], args.max_steps)
    open(session.path("STUDENT_DONE"), "w").close()
    if args.start:
        preview(session, "student", Evaluation(session, student, text), args.toy)
    polish(session, student, text, seconds["d"], args.max_steps, args.toy)
    if args.start:
        preview(session, "polished", Evaluation(session, student, text), args.toy)
        bundle(session)
        open(session.path("ALL_DONE"), "w").close()
        return session.log("all done")
    report(session, "ember", Evaluation(session, student, text), True, args.toy)
    bundle(session)
    with torch.no_grad():
        for part, module in (("transformer", student), ("text_encoder", text), ("vae", session.vae)):
            module.load_state_dict(quantized_state(part, module.state_dict()))
    report(session, "ember_8bit", Evaluation(session, student, text), True, args.toy)
    bundle(session)
    open(session.path("ALL_DONE"), "w").close()
    session.log("all done")


if __name__ == "__main__":
    main()
