"""AdamW with float32 state, float32 gradient accumulation, and an update that a bad step cannot make.

The update is Loshchilov and Hutter 2019 ("Decoupled Weight Decay Regularization", algorithm 2), run by the fused kernel
that is behind `torch.optim.AdamW(fused=True)`; its signature is the same in torch 2.11 and 2.13. Not through the class:
the clip and the skip on the device it takes from attributes that are no more public than the kernel (`grad_scale`,
`found_inf`), it counts steps for every tensor, and making one loads torch's compiler for seconds. Around the kernel:

* Parameters in bf16 have float32 masters (unless `pure_bf16`), since a step of 1e-5 relative to the weight is lost in
  bf16's 8 bits. Moments are float32 always: in bf16 the second moment cannot decay by 0.999.
* Gradients add up in float32 over micro-batches, those of bf16 parameters too.
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
from gapless.models.weights import TensorView


@dataclass
class _Group:
    """Parameters that are updated by one call, as parallel lists."""

    weight_decay: float
    params: list[nn.Parameter] = field(default_factory=list)
    masters: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[nn.Parameter, Tensor, Tensor, Tensor, Tensor]]:
        return zip(self.params, self.masters, self.grads, self.exp_avgs, self.exp_avg_sqs, strict=True)


class AdamW:
    """AdamW over the parameters behind `views`.

    Gradients are the optimizer's: `backward` adds into its float32 buffers, and `step` clears them.
    """

    def __init__(self, views: Iterable[TensorView], config: OptimConfig) -> None:
        """Take over the parameters of `views`.

        Args:
            views: every trained tensor by its on-disk name. Tensors of two and more dimensions decay; norms and biases
                do not.
            config: the settings; the learning rate comes with each step.
        """
        self.views = list(views)
        if not self.views:
            raise ValueError("nothing to train: no parameter requires a gradient")
        self._betas = (config.adam_beta1, config.adam_beta2)
        self._eps = config.adam_epsilon
        self._max_norm = config.max_grad_norm or math.inf
        self._pure_bf16 = config.pure_bf16
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._groups = [_Group(config.weight_decay), _Group(0.0)]
        seen: dict[int, bool] = {}
        for view in self.views:
            decays = len(view.shape) >= 2
            assert seen.get(id(view.parameter), decays) == decays, f"{view.name} shares a parameter with another kind"
            if id(view.parameter) not in seen:
                self._add(self._groups[0 if decays else 1], view.parameter)
            seen[id(view.parameter)] = decays
        device = self.views[0].parameter.device
        self._step_count = torch.zeros((), dtype=torch.float32, device=device)
        self._open = torch.ones((), dtype=torch.bool, device=device)
        self._state = {
            id(param): (master, exp_avg, exp_avg_sq)
            for group in self._groups
            for param, master, _, exp_avg, exp_avg_sq in group
        }

    @property
    def step_count(self) -> Tensor:
        """Updates made so far, a 0-d float32 tensor on the device."""
        return self._step_count

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """The float32 gradient added up since the last step, shaped like the parameter."""
        return next(grad for group in self._groups for param, _, grad, _, _ in group if param is parameter)

    @torch.no_grad()
    def step(self, loss: Tensor, learning_rate: Tensor) -> tuple[Tensor, Tensor]:
        """Clip, update and clear the gradients, without a word to the host.

        Args:
            loss: the step's loss, 0-d.
            learning_rate: 0-d float32 on the device.

        Returns:
            The global gradient norm before the clip (0-d float32), and whether loss and norm are finite (0-d bool). If
            they are not, nothing is changed, now or in later steps.
        """
        grads = [grad for group in self._groups for grad in group.grads]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        self._open &= finite
        # The kernel divides gradients by this scale. Never below 1, so that small gradients are not blown up.
        scale = (norm / self._max_norm).clamp(min=1.0)
        skip = (~self._open).float()
        self._step_count += 1
        for group in self._groups:
            self._update(group, learning_rate, scale, skip)
        self._step_count -= skip
        torch._foreach_zero_(grads)
        return norm, finite

    def close(self) -> None:
        """Let go of the parameters: their gradients are autograd's again."""
        for hook in self._hooks:
            hook.remove()
        for param in self._parameters():
            param.grad = None

    # ---- state by name ----

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The state as (kind/name, tensor in its on-disk shape), one at a time.

        Kinds are weight, exp_avg and exp_avg_sq, and master where the weight alone would lose bits.
        """
        for view in self.views:
            for kind, tensor in self._kinds(view.parameter).items():
                yield f"{kind}/{view.name}", view.read(tensor)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names `tensors` yields and `load` needs, with their shapes."""
        return {f"{kind}/{view.name}": view.shape for view in self.views for kind in self._kinds(view.parameter)}

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]], step_count: int) -> None:
        """Take over a state that `tensors` yielded; every name must be in `shapes`."""
        views = {view.name: view for view in self.views}
        for key, value in tensors:
            kind, name = key.split("/", 1)
            views[name].write(self._kinds(views[name].parameter)[kind], value)
        self._step_count.fill_(step_count)

    def _kinds(self, param: nn.Parameter) -> dict[str, Tensor]:
        master, exp_avg, exp_avg_sq = self._state[id(param)]
        masters = {} if master.dtype == param.dtype else {"master": master}
        return {"weight": param.data, **masters, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    # ---- the parts of a step ----

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (param for group in self._groups for param in group.params)

    def _add(self, group: _Group, param: nn.Parameter) -> None:
        grad = torch.zeros_like(param, dtype=torch.float32)
        if param.dtype == torch.float32:
            param.grad = grad  # autograd adds into it in place
        else:
            self._hooks.append(param.register_post_accumulate_grad_hook(_move_into(grad)))
        group.params.append(param)
        # A float32 parameter is its own master; so is a bf16 one when asked for.
        own = param.dtype == torch.float32 or self._pure_bf16
        group.masters.append(param.data if own else param.data.float())
        group.grads.append(grad)
        group.exp_avgs.append(torch.zeros_like(grad))
        group.exp_avg_sqs.append(torch.zeros_like(grad))

    def _update(self, group: _Group, learning_rate: Tensor, scale: Tensor, skip: Tensor) -> None:
        if self._pure_bf16:
            # One parameter at a time, so that only one float32 copy lives at any moment.
            for param, master, grad, exp_avg, exp_avg_sq in group:
                wide = master.float()
                alone = _Group(group.weight_decay, [param], [wide], [grad], [exp_avg], [exp_avg_sq])
                self._kernel(alone, learning_rate, scale, skip)
                param.copy_(wide)
        elif group.params:
            self._kernel(group, learning_rate, scale, skip)
            narrow = [pair for pair in zip(group.params, group.masters, strict=True) if pair[0].dtype != pair[1].dtype]
            if narrow:
                torch._foreach_copy_([param for param, _ in narrow], [master for _, master in narrow])

    def _kernel(self, group: _Group, learning_rate: Tensor, scale: Tensor, skip: Tensor) -> None:
        torch._fused_adamw_(
            group.masters,
            group.grads,
            group.exp_avgs,
            group.exp_avg_sqs,
            [],
            [self._step_count] * len(group.masters),
            lr=learning_rate,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=group.weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=skip,
        )


def _move_into(total: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's low-precision gradient to its float32 total as soon as autograd has made it."""

    def hook(param: Tensor) -> None:
        assert param.grad is not None
        total.add_(param.grad)
        param.grad = None

    return hook
