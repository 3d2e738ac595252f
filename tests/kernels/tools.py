"""Helpers for tests of kernels: the rule of accuracy, poisoned and guarded memory, Triton's interpreter."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

import torch

from gapless.kernels.runtime import forced, triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
"""Where kernels are tested: in the interpreter, or on a GPU where there is one."""
_CANARY = 64  # elements on each side


def repair_interpreter() -> None:
    """Have the interpreter multiply bf16 tiles right, and round to bf16 as hardware does.

    Triton 3.6 to 3.9 keep bf16 as its 16 bits in numpy. They multiply those as integers, and cut float32 to 16 bits
    where a GPU rounds to nearest even.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, *options):
        def wide(x):
            if x.dtype.scalar != tl.bfloat16:
                return x
            return interpreter.TensorHandle((x.data.astype("uint32") << 16).view("float32"), tl.float32)

        return plain(self, wide(a), wide(b), d, *options)

    plain_cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self, source, kind):
        if source.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
            return plain_cast(self, source, kind)
        rounded = torch.tensor(source.data).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.cast_impl = cast_impl


if INTERPRETED and triton is not None:
    repair_interpreter()


def kernels():
    """The kernels' path, whatever the device."""
    return forced("triton")


def reference():
    """The references' path, whatever the device."""
    return forced("reference")


@contextlib.contextmanager
def guarded():
    """Poison all memory that is allocated uninitialised, and check that nobody wrote beside it.

    Covers torch.empty, torch.empty_like, Tensor.new_empty with dense results, which is what launchers use.
    """
    allocated = []
    plain = torch.empty

    def empty(*size, dtype=None, device=None, **options):
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        dtype = dtype or torch.get_default_dtype()
        count = int(torch.Size(shape).numel())
        memory = plain(count + 2 * _CANARY, dtype=dtype, device=device)
        poison = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max
        memory.fill_(1 if dtype == torch.bool else poison)
        memory[:_CANARY] = memory[-_CANARY:] = 77
        allocated.append(memory)
        return memory[_CANARY : _CANARY + count].view(shape)

    def empty_like(x, *, dtype=None, device=None, **options):
        return empty(x.shape, dtype=dtype or x.dtype, device=device or x.device)

    def new_empty(self, *size, dtype=None, device=None, **options):
        return empty(*size, dtype=dtype or self.dtype, device=device or self.device)

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch, "empty_like", empty_like),
        mock.patch.object(torch.Tensor, "new_empty", new_empty),
    ):
        yield
    for memory in allocated:
        for edge in (memory[:_CANARY], memory[-_CANARY:]):
            assert (edge == torch.full_like(edge, 77)).all(), "something was written beside an allocation"


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the sum of squared differences; infinite if x has a NaN or an infinity that `exact` has not."""
    difference = torch.where(x.double() == exact, 0.0, x.double() - exact)
    return float("inf") if difference.isnan().any() else float(difference.square().sum().sqrt())


def assert_accurate(fast, eager, exact, *, eps: float = 1e-6, names=None) -> None:
    """err(fast) <= 2 err(eager) + eps max(|exact|, sqrt(elements)), tensor by tensor; None where there is no gradient.

    Args:
        fast: results of a kernel.
        eager: of the plain operation in the same low precision.
        exact: of the plain operation in float64, on the same inputs.
        eps: relative to the norm of the exact result, or to that of one with elements of size 1.
        names: of the tensors, for messages.
    """
    names = names or [str(index) for index in range(len(exact))]
    for name, ours, theirs, truth in zip(names, fast, eager, exact, strict=True):
        assert (ours is None) == (truth is None), f"{name}: a result is missing"
        if truth is None:
            continue
        assert ours.shape == truth.shape, f"{name}: {ours.shape}, not {truth.shape}"
        assert ours.dtype == theirs.dtype, f"{name}: {ours.dtype}, not {theirs.dtype}"
        size = max(float(truth.norm()), truth.numel() ** 0.5)
        mine, budget = error(ours, truth), 2 * error(theirs, truth) + eps * size
        assert mine <= budget, f"{name}: error {mine:.3g} exceeds {budget:.3g} (norm {float(truth.norm()):.3g})"


def run(function, inputs, upstream):
    """Call `function` on leaf copies of the inputs: its outputs, and the gradients of the floating inputs.

    Args:
        function: tensors -> a tensor or a tuple of them.
        inputs: tensors.
        upstream: gradients of the outputs, cast to their dtypes; None for none.
    """
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    pairs = [(out, grad.to(out)) for out, grad in zip(outs, upstream, strict=True) if grad is not None]
    torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    return [out.detach() for out in outs], [leaf.grad for leaf in leaves]


def check(fast, plain, inputs, upstream, *, eps: float = 1e-6) -> None:
    """Hold a kernel, forward and backward, to the rule, in poisoned and guarded memory.

    Args:
        fast: the public function on low-precision inputs; runs on the kernels' path.
        plain: the operation written with plain torch operations; runs on the inputs as they are, and in float64.
        inputs: tensors, in the precision under test, on `DEVICE`.
        upstream: gradients of the outputs; None for an output without one.
        eps: see `assert_accurate`.
    """
    exact = run(plain, [x.double() if x.is_floating_point() else x for x in inputs], upstream)
    eager = run(plain, inputs, upstream)
    with kernels(), guarded():
        ours = run(fast, inputs, upstream)
    for index, kind in enumerate(("out", "grad")):
        labels = [f"{kind} {place}" for place in range(len(exact[index]))]
        assert_accurate(ours[index], eager[index], exact[index], eps=eps, names=labels)
