"""A short stretch of training for the few-step model itself, from the weights that ship: `stretch.py --data DATA --out OUT --start ember.safetensors`.

Since a caption fixes the image, the way from any noise level leads to one image, and four steps need no teacher: two thirds of the time is the flow's own regression, mostly
at the noise levels of the four steps; the rest repairs what the student's own earlier steps did, with a critic against softness (see `distil.py` for the longer way).
The set-up takes about two minutes on an H200: kernels compile while a thread waits for the pictures (the file DATA/READY) and encodes them. Ends at the time in OUT/deadline (seconds since 1970).
Returns int8 weights, as they ship, in files of 15 MiB: `base`, `text`, `student`.
"""

import argparse
import copy
import os
import random
import threading
import time

import torch

import critic
import net
import train
import vae
from distil import CRITIC_SHARE
from optim import Recorder
from pack import packed, read_delta, read_packed
from run import place
from session import Session, save_parts, shape, sigmas
from vae import patchify, unpatchify

TOKENS = 56_000
TABLE = tuple((share, shape(kind, width, height, pool, TOKENS)) for share, kind, width, height, pool in (
    (.33, "plain", 256, 256, 20_000), (.23, "text", 256, 256, 20_000), (.09, "edit", 256, 256, 6_000), (.02, "edit2", 256, 256, 1_500),
    (.06, "text", 384, 256, 2_000), (.06, "text", 256, 384, 2_000), (.05, "text", 448, 256, 2_000), (.05, "text", 256, 448, 2_000),
    (.02, "text", 128, 128, 4_000), (.03, "text", 192, 192, 3_000), (.02, "text", 320, 320, 2_000), (.02, "text", 384, 384, 1_200), (.02, "text", 512, 512, 800),
))
TOY = tuple((share, shape(kind, 64, 64, 16, 600)) for share, kind in ((.5, "plain"), (.5, "edit")))
COUNTS = dict(text=40_000, plain=20_000, edit=6_000, edit2=1_500)
FINISH, STEPS = .33, 4            # share of the time for the second part; steps of the student
LEVEL_SHARES = (.1, .15, .2, .55)
EMA = .998


def save_packed(state, part, folder, stem):
    """Saves int8 weights with their scales, as they ship."""
    save_parts(packed(part, {n: v.detach().cpu() for n, v in state.items()}), folder, stem, half=False)


class Stretch(train.Trainer):
    def warm_up(self, table):
        """Compiles the kernels with random inputs; the weights stay."""
        s = self.session
        for references in (0, 1):
            for grid in ((4, 4), (4, 6)):
                tokens = grid[0] * grid[1]
                x, t = torch.randn(8, tokens * (1 + references), 128, device=s.device), torch.rand(8, device=s.device)
                self.optimiser.zero()
                self.model(x, self.text(s.null.expand(8, -1).long(), s.dtype), t, *grid, references).float().square().mean().backward()
        self.optimiser.zero()
        s.sync()
        s.log("kernels compiled")

    def flow(self, table, until):
        """The regression of `train.py`, until the given time."""
        s, begin, done, counted = self.session, time.time(), 0, 0
        generator = random.Random(5)
        while (now := time.time()) < until:
            fraction = (now - begin) / (until - begin)
            factor = min(1, (done + 1) / 60) * .75 * min(1, .12 + (1 - fraction) / .7)
            self.optimiser.set_rates(train.MATRIX_RATE * factor, train.OTHER_RATE * factor)
            chosen = train.choose(table, generator)
            self.record(chosen, lambda: self.step(chosen))
            done, counted = done + 1, counted + 1
            self.average(done)
            if done % 10 == 0:
                s.sync()
            if done % 250 == 0 or done == 20:
                s.log(f"flow step {done} loss {self.loss.item() / counted:.4f} rate {factor:.3f}")
                self.loss.zero_()
                counted = 0
        s.sync()
        s.log(f"flow done: {done} steps, {self.record.seconds:.0f} s for recording")

    def average(self, done):
        if done % 2 == 0:
            with torch.no_grad():
                torch._foreach_lerp_(self.averaged, self.live, 1 - min(EMA, (done + 1) / (done + 10)) ** 2)

    def finish(self, table, until):
        """Learns the way to the image from the student's own steps, and with a critic after the first part. The text encoder stays."""
        s, begin, done, counted = self.session, time.time(), 0, [1e-9] * STEPS
        losses, told, generator = torch.zeros(STEPS, device=s.device), torch.zeros(2, device=s.device), random.Random(6)
        judge, graphs, buffers = critic.for_latents(s.device), Recorder(s.graphs, warmup=1), {}
        often = {chosen for share, chosen in table if share >= .05}  # recording the others takes longer than it saves
        with torch.no_grad():
            torch._foreach_copy_(self.live, self.averaged)
        self.optimiser = train.Optimiser(*net.parameters_for(self.model), s.device)
        while (now := time.time()) < until:
            fraction = (now - begin) / (until - begin)
            factor = min(1, (done + 1) / 40) * .12 * (1 - fraction) + .002
            self.optimiser.set_rates(train.MATRIX_RATE * factor, train.OTHER_RATE * factor)
            chosen = train.choose(table, generator)
            levels = sigmas(chosen.tokens, STEPS)
            k = generator.choices(range(STEPS), LEVEL_SHARES)[0]
            if chosen not in buffers:
                buffers[chosen] = Buffers(s, chosen)
            b, record = buffers[chosen], graphs if chosen in often else lambda _, function: function()
            record((chosen, "draw"), lambda: self.draw(chosen, b))
            # a caption without a background allows many, so those start from their own image
            if k and chosen.kind != "text" and generator.random() < .6:
                for here, there in zip(levels[:k], levels[1:k + 1]):
                    b.here.fill_(here), b.there.fill_(there)
                    record((chosen, "own"), lambda: self.advance(chosen, b))
            else:
                b.x.copy_(torch.lerp(b.clean, b.x, levels[k]))
            b.here.fill_(levels[k]), b.level.fill_(k)
            if k == STEPS - 1 and fraction > .2:
                self.repair(chosen, b, losses, judge, told)
            else:
                record((chosen, "learn"), lambda: self.repair(chosen, b, losses))
            counted[k] += 1
            done += 1
            self.average(done)
            if done % 5 == 0:
                s.sync()
            if done % 200 == 0 or done == 20:
                means = [round(x / n, 4) for x, n in zip(losses.tolist(), counted)]
                s.log(f"finish step {done} loss per level {means}, critic right {(told[0] / told[1].clamp_min(1)).item():.2f}")
                losses.zero_(), told.zero_()
                counted = [1e-9] * STEPS
        s.sync()

    def draw(self, chosen, b):
        latents, ids = self.session.pool(chosen)
        pick = torch.randint(latents.shape[1], (chosen.batch,), device=b.x.device)
        b.clean.copy_(latents[-1][pick])
        b.x.normal_()
        for k in range(chosen.references):
            b.references[k].copy_(latents[k][pick])
        b.context.copy_(self.text(ids[pick].long(), self.session.dtype).detach())

    def velocity(self, chosen, b):
        # with gradients even where none are needed: the kernels are compiled for that alone
        x, t = torch.cat([b.x, *b.references], 1), b.here.expand(chosen.batch)
        return self.model(x, b.context, t, *chosen.grid, chosen.references).float()

    def advance(self, chosen, b):
        v = self.velocity(chosen, b).detach()
        b.x.add_((b.there - b.here) * v)

    def repair(self, chosen, b, losses, judge=None, told=None):
        self.optimiser.zero()
        v = self.velocity(chosen, b)
        gap = v.detach() - (b.x - b.clean) / b.here
        slope = gap * (2 / gap.numel())
        if judge:
            images = lambda tokens: unpatchify(tokens.transpose(1, 2).unflatten(2, chosen.grid))
            real, fake = images(b.clean), images(b.x - b.here * v.detach())
            right = judge.learn(real, fake)
            change = -b.here * patchify(judge.gradient(real, fake)).flatten(2).transpose(1, 2)
            slope = critic.mixed(slope, change, CRITIC_SHARE)
            told += torch.stack([right, torch.ones_like(right)])
        v.backward(slope)
        self.optimiser.update()
        losses.scatter_add_(0, b.level, gap.square().mean()[None])


class Buffers:
    def __init__(self, session, chosen):
        new = lambda *size, dtype=torch.float32: torch.zeros(*size, device=session.device, dtype=dtype)
        self.clean, self.x = (new(chosen.batch, chosen.tokens, 128) for _ in range(2))
        self.references = [new(chosen.batch, chosen.tokens, 128) for _ in range(chosen.references)]
        self.context = new(chosen.batch, session.null.shape[1], net.TRANSFORMER["joint_dim"], dtype=session.dtype)
        self.here, self.there, self.level = new(()), new(()), new(1, dtype=torch.int64)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--start", required=True, metavar="FILE", help="packed model")
    parser.add_argument("--base", metavar="FILE", help="begin with the transformer of this difference from it (see delta.py)")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    table, counts = (TOY, dict(plain=16, edit=16)) if args.toy else (TABLE, COUNTS)
    session = Session(args.data, args.out, counts, args.workers, pictures_later=True, start=args.start)
    if session.compile:
        net.enable_compile()
    vae.enable_native()
    train.FEW_STEPS = .7
    model = vae.Autoencoder().to(session.device)
    model.load_state_dict(read_packed(args.start, "vae"))
    place(session, model)
    base = read_delta(args.start, args.base) if args.base else read_packed(args.start, "transformer")
    session.start = {"base": base, "text": read_packed(args.start, "text_encoder")}

    def prepare():
        while not os.path.exists(os.path.join(args.data, "READY")):
            time.sleep(.2)
        session.load_pictures(args.workers)
        for _, chosen in table:
            session.pool(chosen)

    failed = []
    def guarded():
        try:
            prepare()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    stretch = Stretch(session)
    stretch.warm_up(table)
    thread.join()
    if failed:
        raise failed[0]
    with open(os.path.join(args.out, "deadline")) as file:
        deadline = float(file.read())
    now = time.time()
    session.log(f"{deadline - now:.0f} s left")
    stretch.check(table[0][1])
    stretch.flow(table, deadline - FINISH * (deadline - now))
    save_packed(stretch.ema.state_dict(), "transformer", args.out, "base")
    save_packed(stretch.ema_text.state_dict(), "text_encoder", args.out, "text")
    session.log("base saved")
    stretch.finish(table, deadline)
    save_packed(stretch.ema.state_dict(), "transformer", args.out, "student")
    open(session.path("ALL_DONE"), "w").close()
    session.log("all done")


if __name__ == "__main__":
    main()
