"""Muon for the matrices, AdamW for the rest, and whole training steps replayed as CUDA graphs.

Launching a step's few thousand small kernels one by one takes longer than running them. Every value that changes from step to
step (rates, random numbers, data) therefore lives on the device, and each kind of step is recorded once.
"""

import time

import torch

COEFFICIENTS = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))


def orthogonalise(g):
    """Newton–Schulz towards the nearest orthogonal matrix, batched over the first axis."""
    x = g.to(torch.bfloat16) if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in COEFFICIENTS:
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return (x.mT if tall else x).float()


class Optimiser:
    """Call `set_rates` before a step and `update` inside it. Gradients are allocated once, at fixed addresses."""

    def __init__(self, matrices, embedding, rest, device, momentum=0.95):
        self.momentum = momentum
        shapes = {}
        for p in matrices:
            shapes.setdefault(tuple(p.shape), []).append(p)
        self.groups = list(shapes.values())
        self.averages = [torch.zeros(len(g), *g[0].shape, device=device) for g in self.groups]
        self.rest = rest + embedding
        self.all = matrices + self.rest
        for p in self.all:
            p.grad = torch.zeros_like(p)
        self.matrix_rate = torch.zeros((), device=device)
        cuda = device == "cuda"
        rate = lambda: torch.zeros((), device=device) if cuda else 0.0
        groups = [dict(params=rest, lr=rate(), factor=1.0)] + ([dict(params=embedding, lr=rate(), factor=3.0)] if embedding else [])
        self.adam = torch.optim.AdamW(groups, betas=(.9, .95), weight_decay=0.0, fused=cuda, capturable=cuda)

    def set_rates(self, matrix, other):
        self.matrix_rate.fill_(matrix)
        for group in self.adam.param_groups:
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(other * group["factor"])
            else:
                group["lr"] = other * group["factor"]

    def zero(self):
        torch._foreach_zero_([p.grad for p in self.all])

    @torch.no_grad()
    def update(self):
        torch.nn.utils.clip_grad_norm_(self.rest, 1.0, foreach=True)
        self.adam.step()
        for params, average in zip(self.groups, self.averages):
            g = torch.stack([p.grad for p in params])
            average.lerp_(g, 1 - self.momentum)
            u = orthogonalise(g.lerp(average, self.momentum))
            # update size in AdamW's units: root mean square 0.2
            u *= 0.2 * max(u.shape[-2:]) ** .5 * self.matrix_rate
            torch._foreach_sub_(params, list(u.unbind(0)))


class Recorder:
    """Records functions without arguments as CUDA graphs on first use, then replays them; if disabled, calls them.

    All graphs share one memory pool: they run one at a time and keep nothing in it. The pool lives as long as its graphs.
    """

    def __init__(self, enabled, warmup=2):
        self.enabled, self.warmup, self.graphs, self.pool, self.calls = enabled, warmup, {}, None, {}
        self.seconds = 0.0  # spent on first uses and recording

    def __call__(self, key, function):
        if not self.enabled:
            return function()
        if key in self.graphs:
            return self.graphs[key].replay()
        begin = time.time()
        try:
            return self._first(key, function)
        finally:
            torch.cuda.synchronize()
            self.seconds += time.time() - begin

    def _first(self, key, function):
        self.calls[key] = self.calls.get(key, 0) + 1
        if self.calls[key] <= self.warmup:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                function()
            torch.cuda.current_stream().wait_stream(side)
            return None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                function()
        except RuntimeError as error:
            # the random generator stays in capture mode after a failure, so this process can't continue
            raise RuntimeError(f"recording {key} failed; restart with --no-graphs, training resumes from the checkpoints") from error
        self.pool = self.pool or graph.pool()
        self.graphs[key] = graph
        return graph.replay()
