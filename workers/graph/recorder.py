"""One run of a model without data, in which its calls are written down."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schemas.errors import BadModel
from workers.graph.model_graph import Call, ModelGraph, called_name
from workers.graph.recorded_calls import RecordedCall, joined, named_layers, trains
from workers.graph.sizes import Size, size_of
from workers.graph.values import TensorShape, Weight, Wire, leaves, named_wires, replaced

_READS_VALUES = frozenset(
    {
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__contains__",
        "is_nonzero",
        "equal",
    }
    | {"allclose", "__array__", "__complex__"}
)
"""Functions that hand the values of tensors to Python, whose control flow can't be recorded then."""
_DRAWN = "drawn"
"""Key of the number that stands for all that is drawn from [0, 1)."""
_OWN_FILES = tuple(f"graph/{name}.py" for name in ("recorder", "recording", "sizes", "values"))
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), range),
    *(torch.dtype, torch.layout, torch.device, torch.memory_format, torch.Size),
)


class Unrecordable(Exception):
    """What can't be recorded; `path` is the module in whose own code it is."""

    def __init__(self, text: str) -> None:
        super().__init__(text)


class Recorder(TorchFunctionMode):
    """One recording of a model."""

    def __init__(
        self,
        model: nn.Module,
        taken: Mapping[str, str],
        is_leaf: Callable[[str, nn.Module], bool],
        whole: set[str],
    ) -> None:
        super().__init__()
        self._model = model
        self._taken = taken
        self._names = {id(module): name for name, module in model.named_modules()}
        self._modules = dict(model.named_modules())
        self._is_leaf = is_leaf
        self._whole = whole
        self._weights = {id(w): n for n, w in [*model.named_parameters(), *model.named_buffers()]}
        self._wires: dict[int, Wire] = {}
        self._kept: list[Any] = []  # so that no id is used twice
        self._calls: list[RecordedCall] = []
        self._count = 0
        self._inside = 0  # depth inside of a layer, where nothing is recorded
        self._stack: list[str] = []
        self._sizes: set[str] = set()
        self._floating: set[str] = set()
        self._constant: set[str] = set()
        self._size_of: dict[tuple[str, int], Size] = {}
        self._size_value: dict[str, int] = {}
        self._made: dict[str, RecordedCall] = {}
        self.failed_in = ""

    # --- the run ----------------------------------------------------------------------------------------
    def run(self, batch: Mapping[str, Tensor]) -> ModelGraph:
        arguments = self._bind(batch)
        with self._layers_whole(), torch.enable_grad(), self:
            try:
                outputs = self._model(**arguments)
            except Unrecordable:
                raise
            except BadModel:
                raise
            except Exception as error:  # user code may raise anything
                self.failed_in = self.failed_in or (self._stack[-1] if self._stack else "")
                raise Unrecordable(f"can't be recorded: {_place(error)}") from error
        return self._graph(self._named_outputs(outputs))

    def _bind(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The batch's tensors that the model's forward takes, by name, on `meta`."""
        taken = self._taken
        arguments: dict[str, Tensor] = {}
        for parameter, name in taken.items():
            tensor = batch[name].to("meta")
            self._wires[id(tensor)] = Wire(name)
            self._kept.append(tensor)
            if not tensor.requires_grad:
                self._constant.add(name)
            arguments[parameter] = tensor
        self._batch_names = tuple(taken.values())
        return arguments

    @contextmanager
    def _layers_whole(self) -> Iterator[None]:
        """Within, calls of modules come to `_called`."""
        original = nn.Module.__call__
        recorder = self

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return recorder._called(original, module, args, kwargs)

        nn.Module.__call__ = called  # type: ignore[method-assign]  # while it records
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]  # while it records

    def _called(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = self._names.get(id(module))
        if self._inside or name is None or not name:
            return original(module, *args, **kwargs)
        if name not in self._whole and not self._is_leaf(name, module):
            self._stack.append(name)
            try:
                result = original(module, *args, **kwargs)
            except BaseException:
                self.failed_in = self.failed_in or self._stack[-1]
                raise
            self._stack.pop()
            return result
        return self._record(name, lambda *a, **k: original(module, *a, **k), args, kwargs, module)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if args and isinstance(args[0], Tensor):
            if name == "shape" or (name == "size" and len(args) + len(kwargs) == 1):
                return TensorShape(self._size(args[0], dim) for dim in range(args[0].dim()))
            if name == "size":
                return self._size(args[0], kwargs.get("dim", args[-1]))
            if name == "numel":
                return TensorShape(self._size(args[0], dim) for dim in range(args[0].dim())).numel()
        if name in _READS_VALUES and any(isinstance(leaf, Tensor) for leaf in leaves((args, kwargs))):
            if (known := self._free_of_data(args)) is not None:
                return func(*known, **kwargs)
            self.failed_in = self.failed_in or (self._stack[-1] if self._stack else "")
            raise Unrecordable(
                f"reads the values of a tensor ({name}) at {_caller()}, so that its layers depend on the data"
            )
        return self._record(func, func, args, kwargs, None)

    # --- calls ------------------------------------------------------------------------------------------
    def _record(
        self,
        target: str | Callable[..., Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module | None,
    ) -> Any:
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in tensors]
        weights: dict[str, Tensor] = {}
        self._inside += 1
        try:
            result = function(*args, **kwargs)
        finally:
            self._inside -= 1
        changed = [t for t, version in zip(tensors, versions, strict=True) if t._version != version]
        if module is None and not changed and not any(isinstance(leaf, Tensor) for leaf in leaves(result)):
            return result  # a question about a tensor, whose answer does not depend on its values
        call = Call(
            target,
            self._referenced(args, weights, target),
            self._referenced(kwargs, weights, target),
            self._bound(result, target, changed),
            gradients=torch.is_grad_enabled(),
            autocast=_autocast(),
        )
        touched = [leaf for leaf in leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        recorded = RecordedCall(call, module, weights, _storages(changed), _storages(touched))
        self._calls.append(recorded)
        self._made |= {
            wire: recorded for wire in named_wires(call.result) if wire not in self._made or changed
        }
        return result

    def _referenced(self, value: Any, weights: dict[str, Tensor], target: Any) -> Any:
        def reference(leaf: Any) -> Any:
            if isinstance(leaf, Size):
                return leaf.wire
            if isinstance(leaf, nn.Parameter | Tensor):
                if name := self._weights.get(id(leaf)):
                    weights[name] = leaf
                    return Weight(name)
                if wire := self._wires.get(id(leaf)):
                    return wire
                if leaf.device.type == "meta":
                    raise Unrecordable(
                        f"uses a tensor at {_caller()} that is no parameter or buffer: register it as "
                        "a buffer"
                    )
                return leaf
            if isinstance(leaf, _PLAIN) or callable(leaf):
                return leaf
            raise Unrecordable(f"passes a {type(leaf).__name__} to {called_name(target)} at {_caller()}")

        return replaced(value, reference)

    def _bound(self, result: Any, target: Any, changed: Sequence[Tensor]) -> Any:
        """Names the tensors in a result, and again those that were changed in place."""

        def bind(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                if id(leaf) in self._weights:
                    return None
                return self._name(leaf)
            if isinstance(leaf, _PLAIN):
                return None
            raise Unrecordable(f"gets a {type(leaf).__name__} from {called_name(target)} at {_caller()}")

        return replaced(result, bind)

    def _name(self, tensor: Tensor) -> Wire:
        known = self._wires.get(id(tensor))
        if known is not None:
            return known
        wire = Wire(f"%{self._count}")
        self._count += 1
        self._wires[id(tensor)] = wire
        self._kept.append(tensor)
        if not tensor.requires_grad:
            self._constant.add(wire.name)
        return wire

    # --- values that do not depend on the data ----------------------------------------------------------
    def _free_of_data(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The arguments with the values that tensors will have for any data of this size; None: they depend
        on it."""
        self._inside += 1
        try:
            least, most = (
                tuple(
                    self._value(self._wires[id(item)].name, known) if isinstance(item, Tensor) else item
                    for item in args
                )
                for known in ({_DRAWN: 0.0}, {_DRAWN: 1.0 - 2.0**-24})
            )
        except KeyError:
            return None
        finally:
            self._inside -= 1
        same = all(
            torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(least, most, strict=True)
        )
        return least if same else None

    def _value(self, wire: str, known: dict[str, Any]) -> Any:
        """The value of a wire, computed on the CPU from constants and sizes; raises `KeyError` if it has
        others."""
        if wire not in known:
            recorded = self._made[wire]
            if recorded.module is not None or recorded.weights or recorded.changed:
                raise KeyError(wire)
            call = recorded.call

            def value(leaf: Any) -> Any:
                if isinstance(leaf, Wire):
                    return self._size_value.get(leaf.name) or self._value(leaf.name, known)
                return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

            args, kwargs = replaced((call.args, call.kwargs), value)
            assert callable(call.target)
            if _is_drawn(call.target):  # what holds for the least and the most holds for any draw
                if call.target not in (torch.rand, torch.rand_like):
                    raise KeyError(wire)
                result = torch.full_like(call.target(*args, **kwargs), known[_DRAWN])
            else:
                result = call.target(*args, **kwargs)
            for leaf, found in zip(leaves(call.result), leaves(result), strict=True):
                if isinstance(leaf, Wire):
                    known[leaf.name] = found
        return known[wire]

    # --- sizes ------------------------------------------------------------------------------------------
    def _size(self, tensor: Tensor, dim: int) -> int:
        self._inside += 1
        try:
            value = Tensor.size(tensor, dim)
        finally:
            self._inside -= 1
        wire = self._wires.get(id(tensor))
        if wire is None:
            return value  # of a weight: it never changes
        key = (wire.name, dim % tensor.dim())
        if key not in self._size_of:
            self._size_of[key] = self.sized(size_of, (tensor, key[1]), value)
        return self._size_of[key]

    def sized(self, function: Callable[..., int], args: tuple[Any, ...], value: Any) -> Any:
        """Records a number that follows from sizes."""
        if type(value) is not int and not isinstance(value, Size):
            return value
        wire = Wire(f"%{self._count}")
        self._count += 1
        self._sizes.add(wire.name)
        self._constant.add(wire.name)
        size = Size.of(int(value), wire, self)
        self._size_value[wire.name] = int(value)
        call = Call(function, self._referenced(args, {}, function), {}, wire)
        self._calls.append(RecordedCall(call, None, {}, (), ()))
        return size

    # --- outputs ----------------------------------------------------------------------------------------
    def _named_outputs(self, outputs: Any) -> dict[str, str]:
        """Name → wire: by key of a dictionary or model output, `output` for one tensor, else by number.

        The only scalar of a tuple is called `loss`.
        """
        if isinstance(outputs, Tensor):
            named: dict[str, Any] = {"output": outputs}
        elif isinstance(outputs, Mapping):
            named = dict(outputs)
        elif hasattr(outputs, "_asdict"):
            named = outputs._asdict()
        elif isinstance(outputs, tuple | list):
            named = {f"output_{index}": item for index, item in enumerate(outputs)}
            scalars = [name for name, item in named.items() if isinstance(item, Tensor) and not item.dim()]
            if len(scalars) == 1:
                named = {"loss" if name in scalars else name: item for name, item in named.items()}
        else:
            raise BadModel(
                f"{type(self._model).__name__} returns a {type(outputs).__name__}; it must return a "
                "tensor, or a "
                "tuple or dictionary of tensors"
            )
        found = {
            name: self._wires[id(item)].name
            for name, item in named.items()
            if isinstance(item, Tensor) and id(item) in self._wires
        }
        if not found:
            raise BadModel(f"{type(self._model).__name__} returns no tensor that it has computed")
        return found

    # --- the graph --------------------------------------------------------------------------------------
    def _graph(self, outputs: dict[str, str]) -> ModelGraph:
        needed = set(outputs.values())
        live: list[RecordedCall] = []
        for recorded in reversed(self._calls):
            call = recorded.call
            if needed.isdisjoint(named_wires(call.result)) and not recorded.changed:
                continue
            needed.update(named_wires((call.args, call.kwargs)))
            live.append(recorded)
        live.reverse()
        grouped: list[list[RecordedCall]] = []
        for recorded in live:
            if not grouped or (trains(recorded) and any(trains(other) for other in grouped[-1])):
                grouped.append([])
            grouped[-1].append(recorded)
        layers = named_layers(grouped)
        read = {name for layer in layers for name in layer.reads}
        return ModelGraph(
            model=self._model,
            layers=layers,
            inputs=tuple(name for name in self._batch_names if name in read),
            taken=self._batch_names,
            outputs=outputs,
            sizes=frozenset(self._sizes),
            constant=frozenset(self._constant),
            joined=joined(grouped),
        )


def _is_drawn(target: Callable[..., Any]) -> bool:
    """Whether a function draws random numbers."""
    name = called_name(target)
    return name.startswith(("rand", "bernoulli", "multinomial", "normal", "poisson", "dropout")) or (
        name.endswith(("uniform_", "normal_", "random_", "exponential_", "bernoulli_"))
    )


def _storages(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple({tensor.untyped_storage()._cdata: None for tensor in tensors})


def _autocast() -> tuple[bool, torch.dtype] | None:
    return (True, torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else None


def _caller() -> str:
    """file:line of the user's code that is running."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and not frame.filename.endswith(_OWN_FILES):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "an unknown place"


def _place(error: Exception) -> str:
    text = str(error).strip().splitlines()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    frames = [f for f in frames if not f.filename.endswith(_OWN_FILES)]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text[0] if text else ''}{where}"
