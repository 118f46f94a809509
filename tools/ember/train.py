"""Phases A (128 px) and B (mostly 256 px): rectified flow on the latents, text and edits mixed; the text encoder is trained, too."""

import copy
import math
import random
import time

import torch
import torch.nn.functional as F

import net
from optim import Optimiser, Recorder
from session import Shape, load_parts, save_parts, shape

MATRIX_RATE, OTHER_RATE = 3e-3, 1e-3
CAPTION_DROP, EMA, EMA_EVERY = 0.10, 0.999, 5
SAVE_EVERY, WARMUP = 150, 80
FEW_STEPS = .4
CHECKED, HELPED = 128, .75

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
TOKENS = 82_000
# For a run that starts from a trained model: half of it at the default size, where a lone thing always has the same place; the wide and tall sizes have that size's
# shorter side, so that things have the same pixels in them; other sizes only so much that they are not forgotten.
PHASE_B_SIZES = tuple((share, shape(kind, width, height, pool, TOKENS)) for share, kind, width, height, pool in (
    (.260, "plain", 256, 256, 40_000), (.180, "text", 256, 256, 36_000), (.090, "edit", 256, 256, 14_000), (.030, "edit2", 256, 256, 4_000),
    (.050, "text", 384, 256, 7_000), (.050, "text", 256, 384, 7_000), (.040, "text", 448, 256, 5_000), (.040, "text", 256, 448, 5_000),
    (.020, "text", 336, 192, 5_000), (.020, "text", 192, 336, 5_000), (.015, "text", 320, 208, 4_000), (.015, "text", 208, 320, 4_000),
    (.020, "text", 128, 128, 12_000), (.030, "text", 192, 192, 9_000), (.040, "text", 320, 320, 5_000), (.040, "text", 384, 384, 3_500), (.040, "text", 512, 512, 2_200),
    (.010, "edit", 384, 256, 2_000), (.010, "edit", 192, 192, 3_000),
))

POOLS = {(s.kind, s.width, s.height): s.pool for _, s in PHASE_B_SIZES}


def choose(table, generator):
    return generator.choices([s for _, s in table], [w for w, _ in table])[0]


def noise_levels(count, tokens, device):
    """Samples noise levels: half logit-normal, half uniform, then shifted, as more tokens need more high noise levels. A share lies in the range of the four steps."""
    t = torch.where(torch.rand(count, device=device) < .5, torch.sigmoid(torch.randn(count, device=device) + .3), torch.rand(count, device=device))
    shift = (tokens / 64) ** .424
    t = shift * t / (1 + (shift - 1) * t)
    return torch.where(torch.rand(count, device=device) < FEW_STEPS, .68 + .32 * torch.rand(count, device=device), t).clamp(1e-3, 1.0)


class Trainer:
    def __init__(self, session):
        self.session = session
        torch.manual_seed(0)
        self.model, self.text = net.build(session.pad, session.device)
        for module, stem in ((self.model, "base"), (self.text, "text")):
            saved, word = load_parts(session.out, stem), "resumed"
            if not saved and stem in session.start:
                saved, word = session.start[stem], "started from the given"
            if saved and module is self.model:
                saved = net.grow(saved, len(self.model.single_transformer_blocks))
            if saved:
                module.load_state_dict(saved)
                session.log(word, stem)
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

    @torch.no_grad()
    def check(self, chosen):
        """Fails if the captions don't help the weights that training begins with: then tokenizer, pictures or weights don't belong together."""
        s, (h, w) = self.session, chosen.grid
        latents, ids = s.pool(chosen)
        clean, ids = latents[-1][:CHECKED].float(), ids[:CHECKED].long()
        noise = torch.randn_like(clean)
        x = torch.cat([torch.lerp(clean, noise, .9), *(latents[k][:CHECKED].float() for k in range(chosen.references))], 1)
        t = torch.full((len(x),), .9, device=s.device)
        own, other = (F.mse_loss(self.model(x, self.text(i, s.dtype), t, h, w, chosen.references).float(), noise - clean).item() for i in (ids, ids.roll(1, 0)))
        s.log(f"loss at 0.9 with the right captions {own:.3f}, with others {other:.3f}")
        if own > HELPED * other:
            raise RuntimeError("the captions don't help the model that training begins with: is it the tokenizer's and the data's?")

    def phase(self, name, table, seconds, rate, max_steps=10**9):
        """Trains until the phase has run for `seconds` in all processes together; `rate(fraction)` scales the learning rates."""
        s = self.session
        used = s.progress().get(name, 0.0)
        if used >= seconds:
            return
        for _, shape in table:
            s.pool(shape)
        if s.start and not self.steps:
            self.check(table[0][1])
        generator = random.Random(self.steps + 1)
        begin = saved = time.time()
        elapsed, done, seen, counted = used, 0, 0, 0
        while elapsed < seconds and done < max_steps:
            shape = choose(table, generator)
            warm = min(1, (self.fresh + 1) / WARMUP)
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
        s.log(f"{name} done: {done} steps, {seen} samples, {seen / (time.time() - begin):.0f} images/s, {self.record.seconds:.0f} s for recording, {memory:.0f} GiB")

    def save(self, **progress):
        save_parts(self.ema.state_dict(), self.session.out, "base")
        save_parts(self.ema_text.state_dict(), self.session.out, "text")
        self.session.progress(steps=self.steps, **progress)


def run(session, seconds_a, seconds_b, max_steps=10**9, tables=(PHASE_A, PHASE_B), after_a=lambda model, text: None):
    """Runs both phases, and `after_a` between them. Returns the averaged transformer and text encoder."""
    trainer = Trainer(session)
    trainer.phase("A", tables[0], seconds_a, lambda f: 1.0 if f < .9 else 1.0 - 4 * (f - .9), max_steps)
    after_a(trainer.ema, trainer.ema_text)
    falling = lambda f: .75 * min(1, (1 - min(f, 1)) / .7)
    trainer.phase("B", tables[1], seconds_b, falling if session.start else lambda f: .6 * .5 * (1 + math.cos(math.pi * min(f, 1))) + .01, max_steps)
    return trainer.ema, trainer.ema_text
