"""AdamW with float32 state, float32 gradient accumulation, and an update that a bad step cannot make.

The update is Loshchilov and Hutter 2019 ("Decoupled Weight Decay Regularization", algorithm 2), run by the fused kernel
that is behind `torch.optim.AdamW(fused=True)`; its signature is the same in torch 2.11 and 2.13. Not through the class:
the clip and the skip on the device it takes from attributes that are no more public than the kernel (`grad_scale`,
`found_inf`), it counts steps for every tensor, and making one loads torch's compiler for seconds. Around the kernel:

* Parameters in bf16 have float32 masters (unless `pure_bf16`), since a step of 1e-5 relative to the weight is lost in
  bf16's 8 bits. Moments are float32: in bf16 the second moment cannot decay by 0.999.
* With `optim = "adamw_8bit"` both moments are in 8 bits (`gapless.kernels.quantized_state`), except those of embeddings
  and of parameters of less than 4,096 elements, as Dettmers et al. 2022 have it (section 2.3 and their library).
* Gradients add up in float32 over micro-batches, those of bf16 parameters too.
* A parameter that FSDP2 shards is updated as its local shard; FSDP2 brings its reduced gradient. One that it gathers in
  bf16 is float32 itself, its own master.
* On a GPU the kernels of `gapless.kernels.adamw` do the same in one launch for all parameters.
* The clip factor, the step count and the learning rate stay on the device. `step` reads nothing back: a non-finite
  loss or gradient norm makes the kernel leave every bit as it is, and closes the optimizer, so that a step launched
  before the host has seen the bad one changes nothing either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gapless.config import OptimConfig
from gapless.kernels.adamw import Entry, TensorList, on_device, prepare
from gapless.kernels.quantized_state import QuantizedMoment
from gapless.kernels.runtime import use_triton
from gapless.models.families import names
from gapless.models.views import TensorView, local_tensor

_LEAST_QUANTIZED = 4096
"""Elements of a parameter whose moments may be in 8 bits."""


@dataclass
class _Group:
    """Parameters that are updated by one call, as parallel lists."""

    weight_decay: float
    params: list[nn.Parameter] = field(default_factory=list)
    locals: list[Tensor] = field(default_factory=list)
    masters: list[Tensor] = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)
    """Buffers; None where FSDP2 makes the gradient."""
    exp_avgs: list[Tensor | QuantizedMoment] = field(default_factory=list)
    exp_avg_sqs: list[Tensor | QuantizedMoment] = field(default_factory=list)

    def gradients(self) -> list[Tensor]:
        """Float32, shaped like `locals`."""
        pairs = zip(self.params, self.grads, strict=True)
        return [_sharded_gradient(param) if grad is None else grad for param, grad in pairs]

    def sharded(self) -> Iterator[nn.Parameter]:
        """Those without a buffer."""
        return (param for param, grad in zip(self.params, self.grads, strict=True) if grad is None)

    def entries(self) -> Iterator[Entry]:
        """The same for the kernels."""
        state = zip(self.locals, self.masters, self.gradients(), self.exp_avgs, self.exp_avg_sqs, strict=True)
        for local, master, grad, exp_avg, exp_avg_sq in state:
            copy = None if master is local else local
            yield Entry(grad.contiguous(), master, copy, exp_avg, exp_avg_sq, self.weight_decay > 0)


class AdamW:
    """AdamW over the parameters behind `views`.

    Gradients are the optimizer's: `backward` adds into its float32 buffers, and `step` clears them.
    """

    def __init__(self, views: Iterable[TensorView], config: OptimConfig, device: torch.device | str = "cpu") -> None:
        """Take over the parameters of `views`.

        Args:
            views: every trained tensor by its on-disk name. Tensors of two and more dimensions decay; norms and biases
                do not. A rank may have none.
            config: the settings; the learning rate comes with each step.
            device: of the parameters.
        """
        self.views = list(views)
        self._betas = (config.adam_beta1, config.adam_beta2)
        self._eps = config.adam_epsilon
        self._max_norm = config.max_grad_norm or math.inf
        self._pure_bf16 = config.pure_bf16
        self._8bit = config.optim == "adamw_8bit"
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._groups = [_Group(config.weight_decay), _Group(0.0)]
        self._weight_decay = config.weight_decay
        self._list: TensorList | None = None
        self._counted: dict[tuple[bool, ...], Tensor] = {}
        seen: dict[int, bool] = {}
        for view in self.views:
            decays = len(view.shape) >= 2
            assert seen.get(id(view.parameter), decays) == decays, f"{view.name} shares a parameter with another kind"
            if id(view.parameter) not in seen:
                quantized = self._8bit and view.parameter.numel() >= _LEAST_QUANTIZED and names.EMBED not in view.name
                self._add(self._groups[0 if decays else 1], view.parameter, quantized)
            seen[id(view.parameter)] = decays
        self._params = [param for group in self._groups for param in group.params]
        # Those whose gradients FSDP2 makes anew in each step; the others have theirs, and their own memory, for good.
        self._sharded = [param for group in self._groups for param in group.sharded()]
        self._own = [param for param in self._params if not hasattr(param, "placements")]
        self._pointers = [param.data_ptr() for param in self._own]
        self._bound = [pair for pair in self.buffers() if pair[0].dtype == torch.float32]
        self._moved = [pair for pair in self.buffers() if pair[0].dtype != torch.float32]
        self._step_count = torch.zeros((), dtype=torch.float32, device=device)
        self._open = torch.ones((), dtype=torch.bool, device=device)
        self._gradients = {
            id(param): grad for group in self._groups for param, grad in zip(group.params, group.grads, strict=True)
        }
        self._state = {
            id(param): (local, master, exp_avg, exp_avg_sq)
            for group in self._groups
            for param, local, master, exp_avg, exp_avg_sq in zip(
                group.params, group.locals, group.masters, group.exp_avgs, group.exp_avg_sqs, strict=True
            )
        }

    @property
    def step_count(self) -> Tensor:
        """Updates made so far, a 0-d float32 tensor on the device."""
        return self._step_count

    def update_bytes(self) -> int:
        """What an update reads and writes at least: gradients, masters and moments both, low-precision copies once."""
        total = 0
        for local, master, *moments in self._state.values():
            parts = [part for moment in moments for part in _parts(moment)]
            gradient = 4 * master.numel()
            total += 2 * (gradient + master.nbytes + sum(part.nbytes for part in parts))
            total += 0 if master is local else local.nbytes
        return total

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """The float32 gradient added up since the last step, shaped like this rank's part of the parameter."""
        grad = self._gradients[id(parameter)]
        return _sharded_gradient(parameter) if grad is None else grad

    def buffers(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters whose gradients are added up in buffers here, with these, in the order of `views`."""
        found = {
            id(param): (param, grad)
            for group in self._groups
            for param, grad in zip(group.params, group.grads, strict=True)
            if grad is not None
        }
        order = dict.fromkeys(id(view.parameter) for view in self.views)
        return [found[key] for key in order if key in found]

    @torch.no_grad()
    def bind_gradients(self) -> None:
        """Take in what `zero_grad` or someone else has made of `grad`: to be called before a step's first backward.

        A gradient that is None means zeros, another tensor is what counts. Those of low-precision parameters are None
        between backwards: `model.zero_grad()` does not reach their sums, the optimizer's `zero_grad` does.
        """
        for param, buffer in self._bound:
            if param.grad is None:
                buffer.zero_()
            elif param.grad is not buffer:
                buffer.copy_(param.grad)
            else:
                continue
            param.grad = buffer
        for param, buffer in self._moved:
            if param.grad is not None:
                buffer.copy_(local_tensor(param.grad))
                param.grad = None

    def hooked(self) -> bool:
        """Whether someone has hooks that are called when a parameter's gradient is there; its own do not count."""
        own = {hook.id for hook in self._hooks}
        found = (param._post_accumulate_grad_hooks for param in self._params)
        return any(hooks and hooks.keys() - own for hooks in found)

    @torch.no_grad()
    def zero_grad(self) -> None:
        """Clear the gradients; a step does so itself."""
        for param, buffer in (*self._bound, *self._moved):
            buffer.zero_()
            param.grad = buffer if param.dtype == torch.float32 else None
        for param in self._sharded:
            param.grad = None

    @torch.no_grad()
    def squares(self, counts: Callable[[nn.Parameter], bool] = lambda _: True) -> Tensor:
        """The sum of the squares of the gradients of the parameters that `counts` holds for, 0-d float32.

        Raises:
            RuntimeError: a gradient was replaced since `bind_gradients`: what has been added to it is not reduced.
        """
        if any(param.grad is not buffer for param, buffer in self._bound):
            raise RuntimeError("a gradient was cleared or replaced within a step: leave that to the optimizer")
        if use_triton(self._step_count):
            chosen = tuple([counts(param) for param in self._params])
            if chosen not in self._counted:
                self._counted[chosen] = on_device(torch.tensor(chosen, dtype=torch.int32), self._step_count.device)
            tensors, _kept = self._tensor_list()
            return tensors.squares(self._counted[chosen])
        grads = [
            grad
            for group in self._groups
            for param, grad in zip(group.params, group.gradients(), strict=True)
            if counts(param)
        ]
        if not grads:
            return torch.zeros_like(self._step_count)
        return torch.stack(torch._foreach_norm(grads)).square().sum()

    @torch.no_grad()
    def step(self, loss: Tensor, learning_rate: Tensor, norm: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Clip, update and clear the gradients, without a word to the host.

        Args:
            loss: the step's loss, 0-d.
            learning_rate: 0-d float32 on the device.
            norm: the global gradient norm where other ranks have gradients too, 0-d float32.

        Returns:
            The global gradient norm before the clip (0-d float32), and whether loss and norm are finite (0-d bool). If
            they are not, nothing is changed, now or in later steps.
        """
        if norm is None:
            self.bind_gradients()
            norm = self.squares().sqrt()
        step = self._step_by_kernels if use_triton(self._step_count) else self._step_by_torch
        finite = step(loss, learning_rate, norm)
        # Neither path counts a version of what it changes; whoever has kept a parameter for a backward asks for it.
        torch.autograd.graph.increment_version(self._params)
        for param in self._sharded:
            param.grad = None
        return norm, finite

    def replayed(self) -> None:
        """Count a replay of a CUDA graph that holds a `step`, as `step` itself does."""
        torch.autograd.graph.increment_version(self._params)

    def close(self) -> None:
        """Let go of the parameters: their gradients are autograd's again."""
        for hook in self._hooks:
            hook.remove()
        for group in self._groups:
            for param in group.params:
                param.grad = None

    # ---- state by name ----

    def tensors(
        self, selected: Callable[[TensorView], bool] = lambda _: True
    ) -> Iterator[tuple[str, TensorView, Tensor]]:
        """The state as (kind/name, view, the view's box in the file's dimensions), one at a time.

        Kinds are weight, exp_avg and exp_avg_sq, and master where the weight alone would lose bits. They are the same
        in every layout.
        """
        for view in self.views:
            if selected(view):
                local, master, exp_avg, exp_avg_sq = self._state[id(view.parameter)]
                weight = view.read(local).to(_stored_dtype(view))
                yield f"weight/{view.name}", view, weight
                if master.dtype != weight.dtype:
                    yield f"master/{view.name}", view, view.read(master)
                yield f"exp_avg/{view.name}", view, view.read(_wide(exp_avg))
                yield f"exp_avg_sq/{view.name}", view, view.read(_wide(exp_avg_sq))

    @torch.no_grad()
    def load(self, read: Callable[[str, TensorView], Tensor], step_count: int) -> None:
        """Take over a state that `tensors` yielded, perhaps in another layout.

        Args:
            read: (kind/name, view) -> the view's box of that tensor.
            step_count: updates made.
        """
        last = {id(view.parameter): view for view in self.views}
        wide: dict[int, list[Tensor]] = {}
        for view in self.views:
            local, master, *moments = self._state[id(view.parameter)]
            if master.dtype != _stored_dtype(view):
                view.write(master, read(f"master/{view.name}", view))
            if master is not local or master.dtype == _stored_dtype(view):
                view.write(local, read(f"weight/{view.name}", view))
            # Blocks of 8 bits cross the borders of what is fused, so they are made of all of it.
            values = wide.setdefault(id(view.parameter), [_wide(moment) for moment in moments])
            for kind, value in zip(("exp_avg", "exp_avg_sq"), values, strict=True):
                view.write(value, read(f"{kind}/{view.name}", view))
            if last[id(view.parameter)] is view:
                del wide[id(view.parameter)]
                for moment, value in zip(moments, values, strict=True):
                    if isinstance(moment, QuantizedMoment):
                        moment.write(value)
        self._step_count.fill_(step_count)

    # ---- the parts of a step ----

    def _step_by_torch(self, loss: Tensor, learning_rate: Tensor, norm: Tensor) -> Tensor:
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        self._open &= finite
        # The kernel divides gradients by this scale. Never below 1, so that small gradients are not blown up.
        scale = (norm / self._max_norm).clamp(min=1.0)
        skip = (~self._open).float()
        self._step_count += 1
        for group in self._groups:
            self._update(group, learning_rate, scale, skip)
        self._step_count -= skip
        for group in self._groups:
            if buffers := [grad for grad in group.grads if grad is not None]:
                torch._foreach_zero_(buffers)
        return finite

    def _step_by_kernels(self, loss: Tensor, learning_rate: Tensor, norm: Tensor) -> Tensor:
        control, finite = prepare(loss, norm, learning_rate, self._open, self._step_count, self._max_norm, self._betas)
        tensors, _kept = self._tensor_list()
        tensors.update(control, self._weight_decay, self._eps, self._betas)
        return finite

    def _tensor_list(self) -> tuple[TensorList, list[Entry]]:
        """The table of the tensors where they are now, and what has to live until the kernels are launched."""
        pointers = [param.data_ptr() for param in self._own]
        assert pointers == self._pointers, "a parameter has other memory than when the optimizer was made"
        if self._list is not None and not self._sharded:
            return self._list, []
        # New gradients mostly lie where the last ones were.
        entries = [entry for group in self._groups for entry in group.entries()]
        if self._list is None or self._list.addresses != [entry.addresses() for entry in entries]:
            self._list = TensorList(entries, self._step_count.device)
        return self._list, entries

    def _add(self, group: _Group, param: nn.Parameter, quantized: bool) -> None:
        local = local_tensor(param)
        grad = None
        if param.dtype != torch.float32:
            grad = torch.zeros_like(local, dtype=torch.float32)
            self._hooks.append(param.register_post_accumulate_grad_hook(_move_into(grad)))
        elif not hasattr(param, "placements"):
            param.grad = grad = torch.zeros_like(local)  # autograd adds into it in place
        group.params.append(param)
        group.locals.append(local)
        # A float32 parameter is its own master; so is a bf16 one when asked for.
        own = param.dtype == torch.float32 or self._pure_bf16
        group.masters.append(local if own else local.float())
        group.grads.append(grad)
        for moments, signed in ((group.exp_avgs, True), (group.exp_avg_sqs, False)):
            if quantized:
                moments.append(QuantizedMoment.zeros(local, signed))
            else:
                moments.append(torch.zeros_like(local, dtype=torch.float32))

    def _update(self, group: _Group, learning_rate: Tensor, scale: Tensor, skip: Tensor) -> None:
        state = list(
            zip(group.locals, group.masters, group.gradients(), group.exp_avgs, group.exp_avg_sqs, strict=True)
        )
        together = ([], [], [], [])
        narrow: tuple[list[Tensor], list[Tensor]] = ([], [])
        for local, master, grad, exp_avg, exp_avg_sq in state:
            row = (master.float(), grad, _wide(exp_avg), _wide(exp_avg_sq))
            if row[0] is master and row[2] is exp_avg:
                for tensors, tensor in zip(together, row, strict=True):
                    tensors.append(tensor)
            else:
                # One at a time, so that only one float32 copy lives at any moment.
                alone = ([row[0]], [row[1]], [row[2]], [row[3]])
                self._kernel(group.weight_decay, alone, learning_rate, scale, skip)
                master.copy_(row[0])
                for moment, wide in zip((exp_avg, exp_avg_sq), row[2:], strict=True):
                    if isinstance(moment, QuantizedMoment):
                        moment.write(wide)
            if master is not local:
                narrow[0].append(local)
                narrow[1].append(master)
        if together[0]:
            self._kernel(group.weight_decay, together, learning_rate, scale, skip)
        if narrow[0]:
            torch._foreach_copy_(*narrow)

    def _kernel(
        self,
        weight_decay: float,
        state: tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]],
        learning_rate: Tensor,
        scale: Tensor,
        skip: Tensor,
    ) -> None:
        """Update the first of four parallel lists: masters, gradients, first and second moments."""
        torch._fused_adamw_(
            *state,
            [],
            [self._step_count] * len(state[0]),
            lr=learning_rate,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=skip,
        )


def state_shapes(views: Iterable[TensorView], config: OptimConfig) -> dict[str, tuple[int, ...]]:
    """The names of all the state that `tensors` yields on all ranks together, with their shapes in files.

    Args:
        views: those of the whole model, which may have no memory.
        config: of the optimizer.
    """
    shapes = {}
    for view in views:
        wide = _stored_dtype(view) == torch.float32 or config.pure_bf16
        for kind in ("weight", *(() if wide else ("master",)), "exp_avg", "exp_avg_sq"):
            shapes[f"{kind}/{view.name}"] = view.full_shape
    return shapes


def _parts(moment: Tensor | QuantizedMoment) -> tuple[Tensor, ...]:
    return (moment,) if isinstance(moment, Tensor) else (moment.codes, moment.scales)


def _wide(moment: Tensor | QuantizedMoment) -> Tensor:
    return moment.read() if isinstance(moment, QuantizedMoment) else moment


def _stored_dtype(view: TensorView) -> torch.dtype:
    return view.dtype or view.parameter.dtype


def _sharded_gradient(parameter: nn.Parameter) -> Tensor:
    """What FSDP2 has left in a parameter's gradient; zeros if no backward has been."""
    grad = parameter.grad
    return torch.zeros_like(local_tensor(parameter)) if grad is None else local_tensor(grad)


def _move_into(total: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's low-precision gradient to its float32 total as soon as autograd has made it."""

    def hook(param: Tensor) -> None:
        assert param.grad is not None
        total.add_(local_tensor(param.grad))
        param.grad = None

    return hook
