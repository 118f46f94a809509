"""Phase C: four steps without guidance.

For each of klein's four segments the student learns the mean velocity of the guided teacher's path across it, so that one
Euler step ends where the teacher's many steps do. An edit has one right result: there, less guidance and fewer teacher steps come closer
to it. Half of the inputs come from the student's own earlier steps. Where the caption fixes the image, half of those learn the way to that image instead of
the teacher's, which repairs what the steps before did wrong. In the second half, a critic sharpens what the last step draws. The text encoder is not trained.
"""

import copy
import math
import random
import time

import torch
import torch.nn.functional as F

import critic
import net
from optim import Optimiser, Recorder
from session import Shape, load_parts, save_parts, shape, sigmas
from train import POOLS
from vae import patchify, unpatchify

MATRIX_RATE, OTHER_RATE, EMA, EMA_EVERY = 4e-4, 3e-4, 0.998, 2
GUIDANCE, EDIT_GUIDANCE = 2.0, 1.5   # a reference image already determines most of what guidance would enforce
STEPS = 4
SUBSTEPS, EDIT_SUBSTEPS = (2, 2, 3, 4), (2, 2, 2, 3)   # of the teacher, per segment
SEGMENT_SHARES = (.2, .2, .25, .35)
SAVE_EVERY = 150

PHASE_C = (
    (.26, Shape("text", 256, 256, 192, 90_000)),
    (.42, Shape("edit", 256, 256, 96, 20_000)),
    (.12, Shape("edit2", 256, 256, 64, 12_000)),
    (.08, Shape("text", 128, 128, 384, 80_000)),
    (.03, Shape("text", 192, 320, 192, 10_000)),
    (.03, Shape("text", 320, 192, 192, 10_000)),
    (.05, Shape("text", 384, 384, 80, 6_000)),
    (.03, Shape("text", 512, 512, 48, 3_000)),
)
TOKENS = 62_000
PHASE_C_SIZES = tuple((share, shape(kind, width, height, POOLS[kind, width, height], TOKENS)) for share, kind, width, height in (
    (.26, "plain", 256, 256), (.20, "text", 256, 256), (.12, "edit", 256, 256), (.04, "edit2", 256, 256), (.01, "edit", 192, 192), (.01, "edit", 384, 256),
    (.04, "text", 384, 256), (.04, "text", 256, 384), (.04, "text", 448, 256), (.04, "text", 256, 448), (.02, "text", 336, 192), (.02, "text", 192, 336),
    (.01, "text", 320, 208), (.01, "text", 208, 320), (.02, "text", 128, 128), (.03, "text", 192, 192), (.03, "text", 320, 320), (.03, "text", 384, 384), (.03, "text", 512, 512),
))
CRITIC_FROM, CRITIC_SHARE = .45, .5   # of the phase; of the regression's gradient
REPAIRED = .5


class Batch:
    """Buffers of one shape that the recorded graphs read and write."""

    def __init__(self, session, shape, context_dim):
        new = lambda *size, dtype=torch.float32: torch.zeros(*size, device=session.device, dtype=dtype)
        count, tokens = shape.batch, shape.tokens
        self.clean, self.x, self.start = (new(count, tokens, 128) for _ in range(3))
        self.references = new(count, tokens * shape.references, 128) if shape.references else None
        self.context, self.null = (new(count, session.null.shape[1], context_dim, dtype=session.dtype) for _ in range(2))
        self.here, self.there, self.from_, self.to = (new(()) for _ in range(4))
        self.segment = new(1, dtype=torch.int64)


class Distiller:
    def __init__(self, session, teacher, text):
        self.session, self.teacher, self.text = session, teacher, text
        self.student = copy.deepcopy(teacher).requires_grad_(True)
        saved = load_parts(session.out, "student")
        if saved:
            self.student.load_state_dict(saved)
            session.log("resumed student")
        self.ema = copy.deepcopy(self.student).requires_grad_(False)
        self.optimiser = Optimiser(*net.parameters_for(self.student), session.device)
        self.record = Recorder(session.graphs, warmup=1)
        self.batches, self.loss = {}, torch.zeros(STEPS, device=session.device)
        self.critic, self.told = critic.for_latents(session.device), torch.zeros(2, device=session.device)
        self.sharpen = False

    def draw(self, shape, b):
        s = self.session
        latents, ids = s.pool(shape)
        pick = torch.randint(latents.shape[1], (shape.batch,), device=s.device)
        b.clean.copy_(latents[-1][pick])
        b.x.normal_()
        if shape.references:
            b.references.copy_(torch.cat([latents[k][pick] for k in range(shape.references)], 1))
        b.context.copy_(self.text(ids[pick].long(), s.dtype))
        b.null.copy_(self.text(s.null.long().expand(2, -1), s.dtype)[:1].expand_as(b.context))

    def advance(self, model, guidance, shape, b):
        v = self.session.velocity(model, b.x, b.here, b.context, b.null, guidance, shape.grid, b.references)
        b.x.add_((b.there - b.here) * v)

    def learn(self, shape, b, sharpen):
        target = (b.x - b.start) / (b.to - b.from_)
        t = (b.from_ + (torch.rand(shape.batch, device=b.x.device) - .5) * .006).clamp(max=1.0)
        x = b.start if b.references is None else torch.cat([b.start, b.references], 1)
        self.optimiser.zero()
        v = self.student(x, b.context, t, *shape.grid, shape.references).float()
        gap = v.detach() - target
        slope = gap * (2 / gap.numel())
        if sharpen:
            images = lambda tokens: unpatchify(tokens.transpose(1, 2).unflatten(2, shape.grid))
            with torch.no_grad():
                real, fake = images(b.clean), images(b.start - b.from_ * v.detach())
            told = self.critic.learn(real, fake)
            change = self.critic.gradient(real, fake)
            # the image is start − level · velocity
            change = -b.from_ * patchify(change).flatten(2).transpose(1, 2)
            slope = critic.mixed(slope, change, CRITIC_SHARE)
            self.told += torch.stack([told, torch.ones_like(told)])
        v.backward(slope)
        self.optimiser.update()
        self.loss.scatter_add_(0, b.segment, gap.square().mean()[None])

    def step(self, shape, generator):
        if shape not in self.batches:
            self.batches[shape] = Batch(self.session, shape, self.text.model.embed_tokens.weight.shape[1] * 3)
        b, levels = self.batches[shape], sigmas(shape.tokens, STEPS)
        segment = generator.choices(range(STEPS), SEGMENT_SHARES)[0]
        with torch.no_grad():
            self.record((shape, "draw"), lambda: self.draw(shape, b))
            own = generator.random() < .5 or segment == 0
            if own:
                for k in range(segment):
                    b.here.fill_(levels[k]), b.there.fill_(levels[k + 1])
                    self.record((shape, "own"), lambda: self.advance(self.ema, 1, shape, b))
            else:
                b.x.copy_(torch.lerp(b.clean, b.x, levels[segment]))
            b.start.copy_(b.x)
            guidance, substeps = (EDIT_GUIDANCE, EDIT_SUBSTEPS) if shape.references else (GUIDANCE, SUBSTEPS)
            low, high, parts = levels[segment + 1], levels[segment], substeps[segment]
            if own and segment and shape.kind != "text" and generator.random() < REPAIRED:
                b.x.copy_(b.clean)
                low, parts = 0.0, 0
            for k in range(parts):
                b.here.fill_(high + (low - high) * k / parts), b.there.fill_(high + (low - high) * (k + 1) / parts)
                self.record((shape, "teacher"), lambda: self.advance(self.teacher, guidance, shape, b))
        b.from_.fill_(high), b.to.fill_(low), b.segment.fill_(segment)
        sharpen = self.sharpen and segment == STEPS - 1
        if sharpen:
            self.learn(shape, b, True)
        else:
            self.record((shape, "learn"), lambda: self.learn(shape, b, False))
        return segment

    def run(self, seconds, table=PHASE_C, max_steps=10**9):
        s = self.session
        used = s.progress().get("C", 0.0)
        if used >= seconds:
            return self.ema
        for _, shape in table:
            s.pool(shape)
        generator = random.Random(11)
        begin = saved = time.time()
        elapsed, done, seen, counts = used, 0, 0, [0] * STEPS
        live, averaged = list(self.student.parameters()), list(self.ema.parameters())
        while elapsed < seconds and done < max_steps:
            shape = generator.choices([x for _, x in table], [w for w, _ in table])[0]
            factor = min(1, (done + 1) / 50) * (.5 * (1 + math.cos(math.pi * min(1, elapsed / seconds))) + .02)
            self.optimiser.set_rates(MATRIX_RATE * factor, OTHER_RATE * factor)
            if elapsed >= CRITIC_FROM * seconds and not self.sharpen:
                self.sharpen = True
                save_parts(self.ema.state_dict(), s.out, "soft")
                s.log("the critic joins")
            counts[self.step(shape, generator)] += 1
            done, seen = done + 1, seen + shape.batch
            if done % EMA_EVERY == 0:
                with torch.no_grad():
                    torch._foreach_lerp_(averaged, live, 1 - min(EMA, (done + 1) / (done + 10)) ** EMA_EVERY)
            if done % 5 == 0:
                s.sync()
            elapsed = used + time.time() - begin
            if done % 200 == 0 or done == 50:
                means = [round(x / max(1, n), 4) for x, n in zip(self.loss.tolist(), counts)]
                told = (self.told[0] / self.told[1].clamp_min(1)).item()
                self.told.zero_()
                s.log(f"C step {done} loss per segment {means}, critic right {told:.2f}, {seen / (time.time() - begin):.0f} images/s")
                self.loss.zero_()
                counts = [0] * STEPS
                if not all(map(math.isfinite, means)):
                    raise RuntimeError("distillation diverged")
            if time.time() - saved > SAVE_EVERY:
                self.save(elapsed)
                saved = time.time()
        s.sync()
        self.save(max(elapsed, seconds))
        s.log(f"C done: {done} steps, {seen} samples")
        return self.ema

    def save(self, elapsed):
        save_parts(self.ema.state_dict(), self.session.out, "student")
        self.session.progress(C=elapsed)
