"""One run of a model without data, in which its calls are written down."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config
from torch.overrides import TorchFunctionMode

from schemas.errors import BadModel
from workers.graph.interception import intercepted
from workers.graph.model_graph import AutocastRegion, Call, ModelGraph, called_name
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
_UNSEEN = frozenset(
    {"__set__", "__delete__", "backward", "register_hook", "register_post_accumulate_grad_hook"}
)
"""Functions that return nothing, and change what is computed later."""
Constants = dict[int, tuple[Tensor, Tensor]]
"""id of a tensor on `meta` → itself, and the tensor of the model's that it stands for."""
WHOLE_BATCH = "*"
"""In place of a name of the batch: all of it, as a dictionary."""
_DRAWN = "drawn"
"""Key of the number that stands for all that is drawn from [0, 1)."""
_OWN_FILES = tuple(
    f"graph/{name}.py" for name in ("interception", "recorder", "recording", "sizes", "values")
)
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
        constants: Constants,
    ) -> None:
        super().__init__()
        self._constants = constants
        self._model = model
        self._taken = taken
        self._names = {id(module): name for name, module in model.named_modules()}
        self._modules = dict(model.named_modules())
        self._is_leaf = is_leaf
        self._whole = whole
        self._buffers = dict(model.named_buffers())
        self._weights = {id(w): n for n, w in [*model.named_parameters(), *self._buffers.items()]}
        self._wires: dict[int, Wire] = {}
        self._tensors: dict[str, Tensor] = {}  # of wires; kept, so that no id is used twice
        self._calls: list[RecordedCall] = []
        self._count = 0
        self._inside = 0  # depth inside of a layer, where nothing is recorded
        self._stack: list[str] = []
        self._sizes: set[str] = set()
        self._size_of: dict[tuple[str, int], Size] = {}
        self._size_value: dict[str, int] = {}
        self._made: dict[str, RecordedCall] = {}
        self._changed: set[int] = set()  # storages that were changed in place so far
        self.regions: list[AutocastRegion] = []
        self.joined: set[tuple[int, int]] = set()
        """Pairs of layers that must be one, with all between them; known after the run."""
        self.failed_in = ""

    # --- the run ----------------------------------------------------------------------------------------
    def run(self, batch: Mapping[str, Tensor]) -> ModelGraph:
        arguments = self._bind(batch)
        with intercepted(self), torch.enable_grad(), self:
            try:
                outputs = self._model(**arguments)
            except Unrecordable:
                raise
            except BadModel:
                raise
            except Exception as error:  # user code may raise anything
                self.failed_in = self.failed_in or (self._stack[-1] if self._stack else "")
                raise Unrecordable(f"can't be recorded: {_place(error)}") from error
        self._check_buffers()
        return self._graph(self._named_outputs(outputs))

    def _bind(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """What the model's forward takes, by parameter: tensors on `meta`, or all of them as a dictionary."""
        names = [*batch] if WHOLE_BATCH in self._taken.values() else [*self._taken.values()]
        self._batch_names = tuple(names)
        for name in names:
            tensor = self._tensors[name] = batch[name].to("meta")
            self._wires[id(tensor)] = Wire(name)
        return {
            parameter: dict(self._tensors) if name == WHOLE_BATCH else self._tensors[name]
            for parameter, name in self._taken.items()
        }

    def module_called(
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

    def function_applied(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._inside:
            return function(*args, **kwargs)
        if any(callable(leaf) and not isinstance(leaf, type) for leaf in leaves((args, kwargs))):
            raise Unrecordable(f"passes code to {called_name(function)} at {_caller()}")
        return self._record(function, function, args, kwargs, None)

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
        if name in _UNSEEN:
            owner = getattr(func, "__self__", None)
            what = f"calls {name}" if owner is None else f"sets {owner.__name__}"
            raise Unrecordable(f"{what} of a tensor at {_caller()}, which no call after it shows")
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
        # Within a layer rows may be chosen by values: what matters here is its results, not theirs.
        choosing = _config.patch(meta_nonzero_assume_all_nonzero=True) if module else nullcontext()
        try:
            with choosing:
                result = function(*args, **kwargs)
        finally:
            self._inside -= 1
        changed = [t for t, version in zip(tensors, versions, strict=True) if t._version != version]
        if any(id(tensor) not in self._weights and id(tensor) not in self._wires for tensor in changed):
            raise Unrecordable(
                f"changes a tensor in place at {_caller()} that is no parameter or buffer, so that it would "
                "depend on who computes what"
            )
        if module is None and not changed and not any(isinstance(leaf, Tensor) for leaf in leaves(result)):
            return result  # a question about a tensor, whose answer does not depend on its values
        if not changed:
            result = self._distinct(result, tensors)
        call = Call(
            target,
            self._referenced(args, weights, target),
            self._referenced(kwargs, weights, target),
            self._bound(result, target),
            gradients=torch.is_grad_enabled(),
            autocast=tuple(self.regions),
        )
        touched = [leaf for leaf in leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        recorded = RecordedCall(call, module, weights, _storages(changed), _storages(touched))
        self._calls.append(recorded)
        self._changed.update(recorded.changed)
        self._made |= {wire: recorded for wire in named_wires(call.result) if wire not in self._made}
        return result

    def _distinct(self, result: Any, given: Sequence[Tensor]) -> Any:
        """The result, with tensors of its own in place of arguments that were returned as they are.

        At another type or size the function may return something else: `x.float()` is x only where x is
        float32.
        """
        same = {id(tensor) for tensor in given if id(tensor) not in self._weights}
        if not any(id(leaf) in same for leaf in leaves(result)):
            return result
        self._inside += 1
        try:
            with torch.enable_grad():
                return replaced(result, lambda leaf: leaf.view_as(leaf) if id(leaf) in same else leaf)
        finally:
            self._inside -= 1

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
                if known := self._constants.get(id(leaf)):
                    return known[1]
                if leaf.device.type == "meta":
                    raise Unrecordable(self._unknown(leaf))
                return leaf
            if isinstance(leaf, _PLAIN) or callable(leaf):
                return leaf
            raise Unrecordable(f"passes a {type(leaf).__name__} to {called_name(target)} at {_caller()}")

        return replaced(value, reference)

    def _unknown(self, tensor: Tensor) -> str:
        """Why a tensor came from no recorded call, and what to do about it."""
        for module in self._model.modules():
            for name, held in vars(module).items():
                if any(leaf is tensor for leaf in leaves(held)):
                    return (
                        f"uses {name} of its {type(module).__name__} at {_caller()}, a tensor that is no "
                        f"parameter or buffer: say self.register_buffer({name!r}, …, persistent=False)"
                    )
        return (
            f"uses a tensor at {_caller()} that no call of torch or of a module made, such as within "
            "torch.func: put that code into an nn.Module of its own, which is a layer as a whole"
        )

    def _bound(self, result: Any, target: Any) -> Any:
        """Names the tensors in a result."""

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
        self._tensors[wire.name] = tensor
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
            if recorded.module or recorded.weights or not self._changed.isdisjoint(recorded.touched):
                raise KeyError(wire)
            call = recorded.call

            def value(leaf: Any) -> Any:
                if isinstance(leaf, Wire):
                    size = self._size_value.get(leaf.name)
                    return self._value(leaf.name, known) if size is None else size
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
        size = Size.of(int(value), wire, self)
        self._size_value[wire.name] = int(value)
        call = Call(function, self._referenced(args, {}, function), {}, wire)
        self._calls.append(RecordedCall(call, None, {}, (), ()))
        return size

    # --- buffers ----------------------------------------------------------------------------------------
    def _check_buffers(self) -> None:
        """Refuses a model that keeps what it has computed of the data in a buffer: no call says so.

        Layers do it themselves, and what depends on sizes alone is computed again.
        """
        layers = [recorded.call.target for recorded in self._calls if recorded.module is not None]
        for name, buffer in self._model.named_buffers():
            if name not in self._buffers or id(buffer) in self._weights:
                continue
            if any(name.startswith(f"{layer}.") for layer in layers):
                continue
            wire = self._wires.get(id(buffer))
            if wire is not None and self._free_of_data((buffer,)) is None:
                raise BadModel(
                    f"{type(self._model).__name__} assigns its buffer {name} in its forward pass, which "
                    "would depend on who computes what; use torch's batch normalisation, or leave it out"
                )

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
        self.joined = joined(grouped)
        read = {name for layer in layers for name in layer.reads}.union(outputs.values())
        constant = {name for name, tensor in self._tensors.items() if not tensor.requires_grad}
        return ModelGraph(
            model=self._model,
            layers=layers,
            inputs=tuple(name for name in self._batch_names if name in read),
            taken=self._batch_names,
            outputs=outputs,
            sizes=frozenset(self._sizes),
            constant=frozenset(constant | self._sizes),
        )


def _is_drawn(target: Callable[..., Any]) -> bool:
    """Whether a function draws random numbers."""
    name = called_name(target)
    return name.startswith(("rand", "bernoulli", "multinomial", "normal", "poisson", "dropout")) or (
        name.endswith(("uniform_", "normal_", "random_", "exponential_", "bernoulli_"))
    )


def _storages(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple({tensor.untyped_storage()._cdata: None for tensor in tensors})


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
    if isinstance(error, NotImplementedError) and "data-independent" in str(error):
        return f"the size of a result depends on the values of tensors{where}"
    return f"{type(error).__name__}: {text[0] if text else ''}{where}"
