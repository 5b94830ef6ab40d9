"""Runs a training script as it is, and records its samples in their order, its losses and its first weights.

    python benchmarks/public_scripts/recorder.py FOLDER SCRIPT ARGUMENTS…

It watches torch alone and knows no script: calls of modules that train, `Tensor.backward`, and steps of
optimizers. It writes into FOLDER

    first/model.safetensors     the model as its first training call finds it
    samples.safetensors         what was called with: name → (samples, …), in the order of training
    losses.json                 each step's loss: the sum over what `backward` was called on
"""

from __future__ import annotations

import inspect
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class Recorder:
    """What a script does with torch while it trains."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: list[float] = []
        self._call, self._backward = nn.Module.__call__, Tensor.backward
        self._depth = 0
        self._loss = 0.0
        self._taken: dict[str, Tensor] = {}
        self._samples: dict[str, list[Tensor]] = {}

    def watch(self) -> None:
        """From here on, all that this process does with torch."""
        recorder = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if recorder._depth == 0 and module.training and torch.is_grad_enabled():
                recorder._called(module, args, kwargs)
            recorder._depth += 1
            try:
                return recorder._call(module, *args, **kwargs)  # type: ignore[no-untyped-call]
            finally:
                recorder._depth -= 1

        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            recorder._backward(loss, *args, **kwargs)
            recorder._finished(loss)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        Tensor.backward = backward  # type: ignore[method-assign, assignment]
        register_optimizer_step_post_hook(self._stepped)

    def write(self) -> None:
        samples = {name: torch.cat(parts).contiguous() for name, parts in self._samples.items()}
        save_file(samples, self.folder / "samples.safetensors")
        (self.folder / "losses.json").write_text(json.dumps(self.losses))

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(True for _ in module.parameters()):
            self._taken = {}  # transforms of samples are modules, too: what counts begins with the model
            first = self.folder / "first"
            if not first.exists():
                first.mkdir(parents=True)
                own = {
                    id(value): (name, value)
                    for name, value in reversed(module.state_dict(keep_vars=True).items())
                }
                save_file({name: value.detach() for name, value in own.values()}, first / "model.safetensors")
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        for name, value in (arguments | arguments.get("kwargs", {})).items():
            # what requires a gradient comes from the model: the loss is called with its outputs
            if isinstance(value, Tensor) and value.dim() and not value.requires_grad:
                self._taken[name] = value.detach().clone()

    def _finished(self, loss: Tensor) -> None:
        self._loss += loss.item()
        for name, value in self._taken.items():
            self._samples.setdefault(name, []).append(value)
        self._taken = {}

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.losses.append(self._loss)
        self._loss = 0.0


def main() -> None:
    folder, script = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).resolve().parent)
    if (Path(__file__).with_name("operators.py")).exists() and "torchvision" in Path(script).read_text():
        runpy.run_path(str(Path(__file__).with_name("operators.py")))
    recorder = Recorder(folder)
    recorder.watch()
    runpy.run_path(script, run_name="__main__")
    recorder.write()


if __name__ == "__main__":
    main()
