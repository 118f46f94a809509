"""Phases A (128 px) and B (mostly 256 px): rectified flow on the latents, text and edits mixed; the text encoder is trained, too."""

import copy
import math
import random
import time

import torch
import torch.nn.functional as F

import net
from optim import Optimiser, Recorder
from session import Shape, load_parts, save_parts

MATRIX_RATE, OTHER_RATE = 3e-3, 1e-3
CAPTION_DROP, EMA, EMA_EVERY = 0.10, 0.999, 5
SAVE_EVERY = 150

# (share of the steps, shape)
PHASE_A = (
    (.70, Shape("text", 128, 128, 512, 200_000)),
    (.19, Shape("edit", 128, 128, 320, 50_000)),
    (.11, Shape("edit2", 128, 128, 224, 30_000)),
)
PHASE_B = (
    (.57, Shape("text", 256, 256, 256, 90_000)),
    (.14, Shape("edit", 256, 256, 160, 20_000)),
    (.07, Shape("edit2", 256, 256, 112, 12_000)),
    (.07, Shape("text", 128, 128, 512, 80_000)),
    (.02, Shape("edit", 128, 128, 320, 20_000)),
    (.03, Shape("text", 192, 320, 256, 10_000)),
    (.03, Shape("text", 320, 192, 256, 10_000)),
    (.04, Shape("text", 384, 384, 112, 6_000)),
    (.03, Shape("text", 512, 512, 64, 3_000)),
)
# For a final run: half of the steps keep text to image at its level while edits improve.
PHASE_B_EDITS = (
    (.30, Shape("text", 256, 256, 256, 60_000)),
    (.39, Shape("edit", 256, 256, 160, 40_000)),
    (.10, Shape("edit2", 256, 256, 112, 8_000)),
    (.05, Shape("text", 128, 128, 512, 30_000)),
    (.03, Shape("edit", 128, 128, 320, 12_000)),
    (.03, Shape("text", 192, 320, 256, 4_000)),
    (.03, Shape("text", 320, 192, 256, 4_000)),
    (.04, Shape("text", 384, 384, 112, 3_000)),
    (.03, Shape("text", 512, 512, 64, 2_000)),
)


def choose(table, generator):
    return generator.choices([s for _, s in table], [w for w, _ in table])[0]


def noise_levels(count, tokens, device):
    """Samples noise levels: half logit-normal, half uniform, then shifted, as more tokens need more high noise levels."""
    t = torch.where(torch.rand(count, device=device) < .5, torch.sigmoid(torch.randn(count, device=device) + .3), torch.rand(count, device=device))
    shift = (tokens / 64) ** .424
    return (shift * t / (1 + (shift - 1) * t)).clamp(1e-3, 1.0)


class Trainer:
    def __init__(self, session):
        self.session = session
        torch.manual_seed(0)
        self.model, self.text = net.build(session.pad, session.device)
        for module, stem in ((self.model, "base"), (self.text, "text")):
            saved = load_parts(session.out, stem)
            if saved:
                module.load_state_dict(saved)
                session.log("resumed", stem)
        self.ema, self.ema_text = (copy.deepcopy(m).requires_grad_(False) for m in (self.model, self.text))
        self.optimiser = Optimiser(*net.parameters_for(self.model, self.text), session.device)
        self.live = [*self.model.parameters(), *self.text.parameters()]
        self.averaged = [*self.ema.parameters(), *self.ema_text.parameters()]
        self.record = Recorder(session.graphs)
        self.loss = torch.zeros((), device=session.device)
        self.steps = session.progress().get("steps", 0)
        self.fresh = 0  # steps of this process: the optimiser's averages are not in the checkpoint, so the rate warms up again
        count = lambda m: sum(p.numel() for p in m.parameters()) / 1e6
        session.log(f"transformer {count(self.model):.2f} M, text encoder {count(self.text):.2f} M parameters")

    def step(self, shape):
        """One step, entirely on the device: draw, noise, forward, backward, update."""
        s, (h, w) = self.session, shape.grid
        latents, ids = s.pool(shape)
        pick = torch.randint(latents.shape[1], (shape.batch,), device=s.device)
        clean = latents[-1][pick].float()
        ids = torch.where(torch.rand(shape.batch, 1, device=s.device) < CAPTION_DROP, s.null, ids[pick]).long()
        noise = torch.randn_like(clean)
        t = noise_levels(shape.batch, shape.tokens, s.device)
        x = torch.lerp(clean, noise, t[:, None, None])
        x = torch.cat([x, *(latents[k][pick].float() for k in range(shape.references))], 1)
        self.optimiser.zero()
        v = self.model(x, self.text(ids, s.dtype), t, h, w, shape.references)
        loss = F.mse_loss(v.float(), noise - clean)
        loss.backward()
        self.optimiser.update()
        self.loss += loss.detach()

    def phase(self, name, table, seconds, rate, max_steps=10**9):
        """Trains until the phase has run for `seconds` in all processes together; `rate(fraction)` scales the learning rates."""
        s = self.session
        used = s.progress().get(name, 0.0)
        if used >= seconds:
            return
        for _, shape in table:
            s.pool(shape)
        generator = random.Random(self.steps + 1)
        begin = saved = time.time()
        elapsed, done, seen, counted = used, 0, 0, 0
        while elapsed < seconds and done < max_steps:
            shape = choose(table, generator)
            warm = min(1, (self.fresh + 1) / 150)
            factor = rate(elapsed / seconds) * warm
            self.optimiser.set_rates(MATRIX_RATE * factor, OTHER_RATE * factor)
            self.record(shape, lambda: self.step(shape))
            self.steps, self.fresh, done, seen, counted = self.steps + 1, self.fresh + 1, done + 1, seen + shape.batch, counted + 1
            if self.steps % EMA_EVERY == 0:
                decay = min(EMA, (self.steps + 1) / (self.steps + 20)) ** EMA_EVERY
                with torch.no_grad():
                    torch._foreach_lerp_(self.averaged, self.live, 1 - decay)
            if done % 10 == 0:
                s.sync()
            elapsed = used + time.time() - begin
            if done % 250 == 0 or done == 50:
                loss = self.loss.item() / counted
                s.log(f"{name} step {self.steps} loss {loss:.4f} rate {factor:.3f}, {seen / (time.time() - begin):.0f} images/s")
                self.loss.zero_()
                counted = 0
                if not math.isfinite(loss):
                    raise RuntimeError(f"phase {name} diverged at step {self.steps}")
            if time.time() - saved > SAVE_EVERY:
                self.save(**{name: elapsed})
                saved = time.time()
        s.sync()
        self.loss.zero_()
        self.save(**{name: max(elapsed, seconds)})
        memory = torch.cuda.max_memory_allocated() / 2**30 if s.device == "cuda" else 0
        s.log(f"{name} done: {done} steps, {seen} samples, {seen / (time.time() - begin):.0f} images/s, {memory:.0f} GiB")

    def save(self, **progress):
        save_parts(self.ema.state_dict(), self.session.out, "base")
        save_parts(self.ema_text.state_dict(), self.session.out, "text")
        self.session.progress(steps=self.steps, **progress)


def run(session, seconds_a, seconds_b, max_steps=10**9, tables=(PHASE_A, PHASE_B), after_a=lambda model, text: None):
    """Runs both phases, and `after_a` between them. Returns the averaged transformer and text encoder."""
    trainer = Trainer(session)
    trainer.phase("A", tables[0], seconds_a, lambda f: 1.0 if f < .9 else 1.0 - 4 * (f - .9), max_steps)
    after_a(trainer.ema, trainer.ema_text)
    trainer.phase("B", tables[1], seconds_b, lambda f: .6 * .5 * (1 + math.cos(math.pi * min(f, 1))) + .01, max_steps)
    return trainer.ema, trainer.ema_text
