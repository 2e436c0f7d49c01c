"""A tiny training in numpy that writes the traces that ranks would: any number of ranks and
micro-batches, sharded or split parameters, and errors of every stage. Computed in float32; noise of
a part of an ulp stands for rounding."""

import base64
import binascii
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

K, VOCABULARY, TOKENS, WIDTH, HIDDEN, LAYERS = 8, 13, 4, 6, 10, 2
CLIP = 0.5


def signs(indices):
    """Return K signs for each index: 8 bits of a counter hash."""
    x = np.asarray(indices, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return 1.0 - 2.0 * ((x[None] >> np.arange(K, dtype=np.uint64)[:, None]) & np.uint64(1))


def sketch(rows, indices=None):
    """Return rows x (K + 1): the inner products of each row, and its sum of squares."""
    rows = np.asarray(rows, np.float64).reshape(len(rows), -1)
    table = signs(np.arange(rows.shape[1]) if indices is None else indices)
    return np.concatenate([rows @ table.T, (rows * rows).sum(axis=1, keepdims=True)], axis=1)


def encode(table):
    return base64.b64encode(np.ascontiguousarray(table, "<f8").tobytes()).decode()


@dataclass
class Run:
    """How a training is run, and what is wrong with it: ``plant`` (name, step, rank)."""

    world: int = 1
    micro: int = 1
    kind: str = "DDP"  # DDP, shard, TP
    noise: int | None = None
    order: int = 0  # seed of another order of the samples
    batch: int = 8
    steps: int = 3
    rename: dict = field(default_factory=dict)  # beginnings of names
    plant: str = ""
    step: int = 0
    rank: int = 1
    plain: bool = False  # TP: slices are plain tensors of which nothing says where they lie
    seed: int = 0
    layers: int = LAYERS
    strength: float = 1.0
    dropout: bool = False


class Simulation:
    def __init__(self, run: Run):
        self.run, self.groups = run, 1 if run.kind == "TP" else run.world
        self.lines = defaultdict(list)  # rank -> events
        rng = np.random.default_rng(run.seed)
        self.data = rng.integers(0, VOCABULARY, (run.steps + 1, run.batch, TOKENS))
        self.counts = rng.integers(
            1, TOKENS + 1, (run.steps + 1, run.batch)
        )  # labels of each sample
        shapes = {"embed": (VOCABULARY, WIDTH)}
        for layer in range(run.layers):
            shapes[f"layers.{layer}.norm"] = (WIDTH,)
            shapes[f"layers.{layer}.up"] = (HIDDEN, WIDTH)
            shapes[f"layers.{layer}.down"] = (WIDTH, HIDDEN)
        shapes["head"] = (VOCABULARY, WIDTH)
        self.weights = {
            f"{n}.weight": (np.ones(s) if len(s) == 1 else rng.normal(0, 0.5, s)).astype(np.float32)
            for n, s in shapes.items()
        }
        self.buffer = rng.normal(0, 1, WIDTH).astype(np.float32)
        self.moments = {n: [np.zeros_like(w), np.zeros_like(w)] for n, w in self.weights.items()}
        self.rounding = np.random.default_rng(
            1000 + (run.noise if run.noise is not None else run.world * 7 + run.micro)
        )
        self.drawing = np.random.default_rng(run.noise if run.plant == "other draws" else 5)
        self.previous = {}

    # What the ranks write.

    def name(self, name):
        for old, new in self.run.rename.items():
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    def write(self, rank, kind, /, **fields):
        if "n" in fields and kind != "clip":
            fields["n"] = self.name(fields["n"])
        self.lines[rank].append({"k": kind, "s": self.step, **fields})

    def record(self, kind, rank, name, value, p="full", indices=None, /, **fields):
        """Write a parameter-like tensor: one sketch. ``indices``: where a slice lies in the
        whole."""
        table = sketch(np.asarray(value).reshape(1, -1), indices)
        self.write(
            rank,
            kind,
            n=name,
            v=encode(table),
            p=p,
            shape=list(self.weights[name].shape) if name in self.weights else [int(np.size(value))],
            dtype="float32",
            **fields,
        )

    def record_parameter(self, kind, name, values, **fields):
        """``values``: by rank; slices of it where the parameters are sharded."""
        for rank, value in enumerate(values):
            if self.run.kind == "shard":
                indices = np.array_split(np.arange(value.size), self.run.world)[rank]
                self.record(
                    kind, rank, name, value.reshape(-1)[indices], "shard", indices, **fields
                )
            else:
                self.record(kind, rank, name, value, **fields)

    def rows(self, kind, rank, micro, name, value, p="full", indices=None, shape=None, b=None):
        """Write a tensor with one sketch per sample."""
        table = sketch(value, indices)
        shape = list(value.shape[1:]) if shape is None else shape
        self.write(
            rank,
            kind,
            m=micro,
            n=name,
            i=0,
            t=0,
            v=encode(table),
            b=len(value) if b is None else b,
            p=p,
            shape=shape,
            dtype="float32",
        )

    def round(self, value):
        """Change a value as another order of additions might; by a whole ulp in a noise run."""
        part = 0.25 if self.run.noise is None else 1.0
        change = self.rounding.integers(-1, 2, np.shape(value)) * part
        return (value + change * np.spacing(np.abs(value))).astype(np.float32)

    def planted(self, plant, rank=None):
        run = self.run
        return run.plant == plant and self.step >= run.step and (rank is None or rank == run.rank)

    def frozen(self, name):
        return self.run.plant == "frozen" and name == "layers.1.up.weight"

    # One training.

    def train(self, folder):
        run = self.run
        self.step = 0
        for rank in range(run.world):
            self.write(
                rank,
                "start",
                version=1,
                rank=rank,
                world=run.world,
                argv=["train.py"],
                versions={},
                noise=run.noise,
                device="cpu",
                side="",
            )
            modules = (
                ["", "positions", "embed"]
                + [
                    f"layers.{i}{part}"
                    for i in range(self.run.layers)
                    for part in ("", ".norm", ".up", ".act", ".down")
                ]
                + ["head"]
            )
            wrapper = {"DDP": "DDP" if run.world > 1 else "none", "shard": "FSDP2", "TP": "TP"}[
                run.kind
            ]
            self.write(
                rank,
                "model",
                root=0,
                names=[[self.name(m), m.rpartition(".")[2].title()] for m in modules],
                parameters=[
                    [self.name(n), list(w.shape), "float32", not self.frozen(n)]
                    for n, w in self.weights.items()
                ],
                strategy={"wrapper": wrapper, "sharded": 0, "whole": 8},
            )
        if run.noise is not None:
            self.weights = {n: self.round(w) for n, w in self.weights.items()}
        if run.plant == "initial weights":
            self.weights["layers.0.up.weight"][1, 2] += 1e-3
        if run.plant == "buffer":
            self.buffer *= np.float32(1.02)
        ended = "window"
        for self.step in range(run.steps):
            if run.plant == "edited weight" and self.step == run.step:
                self.weights["layers.0.up.weight"][1, 2] *= 1.01
            for name, weight in self.weights.items():
                self.record_parameter("state", name, [weight] * run.world)
            for rank in range(run.world):
                self.record("buffer", rank, "rotary", self.buffer, w="before")
            if run.plant in ("exception", "killed") and self.step == run.step:
                self.forward_all(stop=True)
                ended = "exception" if run.plant == "exception" else ""
                break
            self.forward_all()
            self.optimize()
            for rank in range(run.world):
                self.write(rank, "step")
            if run.plant == "ends" and self.step == run.step:
                ended = "exit"
                break
        if ended:
            for rank in range(run.world):
                self.write(rank, "end", steps=run.steps, reason=ended)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for rank, events in self.lines.items():
            path = folder / f"trace-{rank}.jsonl"
            path.write_text("".join(json.dumps(event) + "\n" for event in events))
        return folder

    def batches(self):
        """Yield group, micro-batch, and the numbers of its samples: a permutation of the step's,
        divided."""
        run = self.run
        order = (
            np.random.default_rng([run.order, self.step]).permutation(run.batch)
            if run.order
            else np.arange(run.batch)
        )
        parts = np.array_split(order, self.groups * run.micro)
        for group in range(self.groups):
            for micro in range(run.micro):
                yield group, micro, parts[group * run.micro + micro]

    def forward_all(self, stop=False):
        run = self.run
        self.local = {}  # group, micro -> name -> gradient
        total = self.counts[self.step].sum()
        for group, micro, samples in self.batches():
            step = self.step
            if self.planted("data", group) and step > 0:
                step -= 1
            if self.planted("repeated micro-batch", group) and micro == 1:
                samples = next(s for g, m, s in self.batches() if g == group and m == 0)
            if self.planted("same data"):
                samples = next(s for g, m, s in self.batches() if g == 0 and m == micro)
            ids, counts = self.data[step][samples], self.counts[step][samples]
            scale = self.groups / total
            if self.planted("own count"):
                scale = 1 / counts.sum() / run.micro
            if self.planted("loss not divided"):
                scale *= run.micro
            ranks = range(run.world) if run.kind == "TP" else [group]
            self.local[group, micro] = self.pass_through(ranks, micro, ids, counts, scale, stop)

    def pass_through(self, ranks, micro, ids, counts, scale, stop):
        """Compute forward and backward passes of a micro-batch; return the gradients by
        parameter."""
        run, w, split = self.run, self.weights, self.run.kind == "TP"
        crcs = [binascii.crc32(row.tobytes()) for row in ids]
        labels = [binascii.crc32(row.tobytes()) for row in ids + 1]
        labels[0] += any(self.planted("labels", rank) for rank in ranks)
        for rank in ranks:
            self.write(
                rank,
                "batch",
                m=micro,
                samples=crcs,
                labels=labels,
                inputs={},
                root=0,
                training=True,
            )
            self.write(
                rank,
                "random",
                m=micro,
                v=int(self.step * 100 + micro + 50 * rank if run.dropout else 1),
            )

        def out(kind, name, value, part=None, shape=None):
            """Every rank writes the whole, its slice of the last dimension, or its addend."""
            for rank in ranks:
                if part is None or not split:
                    self.rows(kind, rank, micro, name, value)
                elif part == "slice":
                    columns = np.array_split(np.arange(value.shape[-1]), run.world)[rank]
                    if run.plain and name.endswith(".act"):
                        self.rows(kind, rank, micro, name, value[..., columns])
                        continue
                    indices = (
                        np.arange(value[0].size).reshape(value[0].shape)[..., columns].reshape(-1)
                    )
                    self.rows(
                        kind,
                        rank,
                        micro,
                        name,
                        value[..., columns],
                        "shard",
                        indices,
                        list(value.shape[1:]),
                    )
                else:
                    self.rows(kind, rank, micro, name, part[rank], "partial")

        def rank_planted(plant):
            return any(self.planted(plant, rank) for rank in ranks)

        positions = np.cos(
            np.arange(TOKENS) * self.buffer[0] * np.float32(1.1 if rank_planted("positions") else 1)
        )
        for rank in ranks:  # belongs to no sample
            self.rows("fwd", rank, micro, "positions", self.round(positions)[None], b=0)
        x = self.round(w["embed.weight"][ids])
        out("fwd", "embed", x)
        kept = []
        for layer in range(self.run.layers):
            if stop and layer == 1:
                return {}
            pre = f"layers.{layer}"
            eps = 1e-3 if self.planted("norm eps") and layer == 1 else 1e-6
            rms = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
            normed = self.round(x * rms * w[f"{pre}.norm.weight"])
            out("fwd", f"{pre}.norm", normed)
            up = self.round(normed @ w[f"{pre}.up.weight"].T)
            out("fwd", f"{pre}.up", up, "slice")
            if self.planted("functional") and layer == 1:
                up = up * np.float32(1.01)
                out("in", f"{pre}.act", up)
            act = self.round(np.tanh(up))
            if run.dropout:
                act = act * np.float32(self.drawing.random(act.shape) > 0.2)
            if self.planted("nan") and layer == 1:
                act[:] = np.nan
            inner = np.float32(
                2 if self.planted("refactored") else 1
            )  # which the functional code after it undoes
            out("fwd", f"{pre}.act", act * inner, "slice")
            columns = np.array_split(np.arange(HIDDEN), run.world if split else 1)
            addends = [act[..., c] @ w[f"{pre}.down.weight"][:, c].T for c in columns]
            down = self.round(act @ w[f"{pre}.down.weight"].T)
            out("fwd", f"{pre}.down", down, addends)
            if self.planted("addend left out") and split and layer == 1:
                down = addends[0]
            if rank_planted("activation") and layer == 1:
                down = down * np.float32(1 + 0.01 * run.strength)
            y = self.round(x + down)
            kept.append((x, rms, normed, act))
            out("fwd", pre, y)
            x = y
        logits = self.round(x @ w["head.weight"].T)
        out("fwd", "head", logits)
        mask = np.arange(TOKENS)[None] < counts[:, None]
        grown = np.exp(logits - logits.max(axis=-1, keepdims=True))
        soft = grown / grown.sum(axis=-1, keepdims=True)
        labels = np.eye(VOCABULARY, dtype=np.float32)[(ids + 1) % VOCABULARY]
        dlogits = self.round((soft - labels) * mask[..., None] * np.float32(scale))
        out("bwd", "head", dlogits)
        grads = {"head.weight": np.einsum("btv,btd->vd", dlogits, x)}
        dx = self.round(dlogits @ w["head.weight"])
        for layer in reversed(range(self.run.layers)):
            pre = f"layers.{layer}"
            x, rms, normed, act = kept[layer]
            out("bwd", pre, dx)
            detached = self.planted("detach") and layer == 1
            ddown = np.zeros_like(dx) if detached else dx
            if rank_planted("gradient flow") and layer == 1:
                ddown = ddown * np.float32(1 + 0.01 * run.strength)
            if not detached:
                out("bwd", f"{pre}.down", ddown)
            grads[f"{pre}.down.weight"] = np.einsum("btd,bth->dh", ddown, act)
            dact = self.round(ddown @ w[f"{pre}.down.weight"])
            if not detached:
                inner = np.float32(2 if self.planted("refactored") else 1)
                out("bwd", f"{pre}.act", dact / inner, "slice")
            dup = self.round(dact * (1 - act * act))
            if not detached:
                out("bwd", f"{pre}.up", dup, "slice")
            grads[f"{pre}.up.weight"] = np.einsum("bth,btd->hd", dup, normed)
            dnormed = self.round(dup @ w[f"{pre}.up.weight"])
            if not detached:
                out("bwd", f"{pre}.norm", dnormed)
            dscaled = dnormed * w[f"{pre}.norm.weight"]
            grads[f"{pre}.norm.weight"] = (dnormed * x * rms).sum(axis=(0, 1))
            inner = (dscaled * x).mean(axis=-1, keepdims=True)
            dx = self.round(dx + dscaled * rms - x * rms**3 * inner)
        out("bwd", "embed", dx)
        grads["embed.weight"] = np.zeros_like(w["embed.weight"])
        np.add.at(grads["embed.weight"], ids, dx)
        grads = {name: self.round(grad) for name, grad in grads.items()}
        if rank_planted("local gradient"):
            grads["layers.1.up.weight"] = grads["layers.1.up.weight"] * np.float32(
                1 + 0.01 * run.strength
            )
        grads = {name: grad for name, grad in grads.items() if not self.frozen(name)}
        for name, grad in grads.items():
            if self.planted("detach") and name.startswith("layers.1.") and name != "layers.1":
                continue
            for rank in ranks:
                if split and ".up." in name:
                    indices = np.array_split(np.arange(grad.size), run.world)[rank]
                    self.record(
                        "lgrad", rank, name, grad.reshape(-1)[indices], "shard", indices, m=micro
                    )
                else:
                    self.record("lgrad", rank, name, grad, m=micro)
        return grads

    def optimize(self):
        run, names = (
            self.run,
            [name for name in self.weights if name in next(iter(self.local.values()))],
        )
        reduced, local = {}, {}
        for name in names:
            sums = [
                sum(self.local[g, m][name] for m in range(run.micro)) for g in range(self.groups)
            ]
            if self.planted("micro-batch discarded"):
                sums = [self.local[g, run.micro - 1][name] for g in range(self.groups)]
            mean = self.round(sum(sums) / self.groups)
            ranks = [mean] * run.world
            sums = sums * (run.world // self.groups)
            if self.planted("not reduced") and name == "head.weight":
                ranks = sums
            if self.planted("late flag"):  # only the first micro-batch is reduced
                first = [self.local[g, 0][name] for g in range(self.groups)]
                ranks = [sum(first) / self.groups + own - one for own, one in zip(sums, first)]
            if self.planted("nothing reduced"):
                ranks = sums
            if self.planted("summed"):
                ranks = [mean * self.groups] * run.world
            if self.planted("rank left out"):
                ranks = [
                    sum(s for g, s in enumerate(sums) if g != run.rank) / self.groups
                ] * run.world
            reduced[name] = ranks
            by_script = (
                sums if run.plant in ("reduced by the script", "clipped, then reduced") else ranks
            )
            self.record_parameter("rgrad", name, by_script, m=run.micro - 1)
            local[name] = sums
        if run.plant in ("ends", "skipped step") and self.step == run.step:
            for name, weight in self.weights.items():
                self.record_parameter("param", name, [weight] * run.world)
            return
        received = {}
        norms = [
            np.sqrt(sum(float((reduced[n][rank] ** 2).sum()) for n in names))
            for rank in range(run.world)
        ]
        if self.planted("own norm"):
            norms[run.rank] *= 1.2
        if self.planted("clipped, then reduced"):
            norms = [
                np.sqrt(sum(float((local[n][rank] ** 2).sum()) for n in names))
                for rank in range(run.world)
            ]
        factors = [np.float32(min(1.0, CLIP / norm)) for norm in norms]
        if self.planted("not clipped"):
            factors = [np.float32(1)] * run.world
        for rank in range(run.world):
            self.write(
                rank, "clip", norm=float(norms[rank]), max=CLIP, n="clip_grad_norm_", kind=2.0
            )
        for name in names:
            received[name] = [
                self.round(grad * factors[rank]) for rank, grad in enumerate(reduced[name])
            ]
            if self.planted("clipped, then reduced"):
                received[name] = [
                    sum(grad * each for grad, each in zip(local[name], factors)) / run.world
                ] * run.world
            if self.planted("left out") and name == "layers.0.down.weight":
                continue
            if (
                self.planted("stale gradient")
                and name == "layers.0.up.weight"
                and name in self.previous
            ):
                received[name] = self.previous[name]
            self.record_parameter("ograd", name, received[name])
        self.previous = received
        eps = 1e-6 if self.planted("eps") else 1e-8
        steps = self.step + self.planted("scheduler")
        group = {
            "lr": 1e-2 * 0.9**steps,
            "betas": [0.9, 0.999],
            "eps": eps,
            "weight_decay": 0.01,
            "foreach": run.world > 1,
        }
        for rank in range(run.world):
            self.write(rank, "opt", **{"class": "AdamW"}, groups=[group], at=steps)
        for name in self.weights:
            if name in received:
                grad = received[name][0]
                m, v = self.moments[name]
                m[:] = 0.9 * m + 0.1 * grad
                v[:] = 0.999 * v + 0.001 * grad * grad
                t = self.step + 1
                change = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + eps)
                if not (self.planted("not updated") and name == "layers.0.down.weight"):
                    self.weights[name] = (
                        self.weights[name] * np.float32(1 - 1e-4) - np.float32(1e-2) * change
                    ).astype(np.float32)
            if self.planted("left out") and name == "layers.0.down.weight":
                continue
            values = [self.weights[name]] * run.world
            self.record_parameter("param", name, values)


def train(folder, **settings):
    return Simulation(Run(**settings)).train(folder)
