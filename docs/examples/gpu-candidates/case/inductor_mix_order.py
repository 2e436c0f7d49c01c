"""torch.compile fuses the reductions of a backward and loses gradients of a shared parameter (pytorch#193061)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.instrumentation import watch
from repro_kit.sgd import LR

import torch
from torch import nn

BATCH, WIDTH = 1, 1024
TOLERANCE = 1e-3  # float32 sums in another order are about 1e-6 off; a gradient that is not written is wrong as a whole


class Modulated(nn.Module):
    """Two LayerNorms, each with a scale and a shift: slices of one table, or parameters of their own."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.unbind = pattern == "unbind"
        shapes = [(1, 1, WIDTH)] * 4 if pattern == "separate" else [(1, 4, WIDTH)]
        self.tables = nn.ParameterList(nn.Parameter(torch.randn(shape) / WIDTH**0.5) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(self.tables)
        if len(parts) == 1:
            parts = list(parts[0].unbind(1) if self.unbind else parts[0].chunk(4, dim=1))
        for scale, shift in (parts[:2], parts[2:]):
            x = nn.functional.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
        return x


class Convolution(nn.Module):
    """A convolution whose output receives one number per channel, as in a diffusion model's residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 64, 3, padding=1)
        self.projection = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = x.reshape(BATCH, 8, -1, 64)
        return self.conv(grid) + self.projection(nn.functional.silu(x[:, 0, :64]))[:, :, None, None]


class Whole(nn.Module):
    """A model whose inner part is compiled; hooks on the whole stay outside of the compiled code."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.call = inner, [inner]  # the list hides the compiled part from the parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.call[0](x)
        return (made.square() + made * torch.linspace(-1, 1, made.shape[-1], device=made.device)).mean()


def gradients(run: Run, model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(x).backward()  # <- compiled
    return {name: parameter.grad.detach().clone() for name, parameter in model.named_parameters()}


def body(run: Run) -> None:
    flags = run.flags
    torch.manual_seed(run.seed)
    pattern = flags["pattern"]
    model = Whole(Convolution() if pattern == "conv" else Modulated(pattern)).to(run.device)
    watch(run, model)
    x = torch.randn(BATCH, int(flags["length"]), WIDTH).to(run.device)
    expected = gradients(run, model, x)
    how: dict[str, Any] = {"backend": flags["backend"]}
    if flags["mode"] != "default":
        how["mode"] = flags["mode"]
    run.phase("compiled")
    model.call[0] = torch.compile(model.inner, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    wrong, worst = set(), 0.0
    for _ in range(run.steps):
        for name, found in gradients(run, model, x).items():
            error = float((found - expected[name]).norm() / expected[name].norm())
            worst = max(worst, error) if error == error else error
            wrong |= set() if error <= TOLERANCE else {name}
    run.metric("gradient_error", worst)
    run.check("gradient", actual=len(wrong), expected=0, tolerance=0, subject=compared(expected, wrong))
    optimizer.step()


if __name__ == "__main__":
    main(body)
