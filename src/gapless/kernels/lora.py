"""Linear layers with a low-rank update: y = x W^T + scale (x A^T) B^T, W frozen, the update's products all skinny.

LoRA (Hu et al. 2021, section 4.1). The adapters of a fused layer's parts stand side by side in A, one block of R rows
a part, and B is zero outside its part's rows and columns, so that a fused layer takes two products, not two per part.

On a GPU base and update are one GEMM over longer rows: [W | B] on [x | scale x A^T]. W lies in a buffer that is some
columns wider (`WideWeight`), and x in rows with as many columns of scratch memory behind each
(`runtime.empty_rows`), into which a skinny GEMM puts scale x A^T. Where x has none, the update (with residual and bias)
is written first and the base GEMM adds to it. The backward makes no gradient of W, and none of the dropped x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gapless.batch import DropoutCounters
from gapless.kernels.dropout import check_dropout, is_identity
from gapless.kernels.dropout import dropout as drop_out
from gapless.kernels.runtime import Recipe, cdiv, is_captured, spare_columns, use_triton
from gapless.kernels.skinny import InputDropout, outer, project, spread

# ---- parts of a fused output ----


class Rows(Protocol):
    """Which rows of a fused output a part is: `models.linear.Part`."""

    def select(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Those of a tensor whose leading dimensions begin at axis `dim`, as a view."""
        ...


def part_blocks(placed: torch.Tensor, leading: Sequence[int], parts: Sequence[Rows]) -> list[torch.Tensor]:
    """The block of each part in a matrix like B of all parts, as views.

    Args:
        placed: [out, R], any strides; every part has as many columns.
        leading: dimensions of the output, whose product is `out`.
        parts: in the order of their columns.

    Returns:
        Of each part [*its dimensions, R / parts].
    """
    columns = placed.view(*leading, placed.shape[1]).split(placed.shape[1] // len(parts), dim=-1)
    return [part.select(block) for part, block in zip(parts, columns, strict=True)]


def _fill(blocks: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> None:
    for block, part in zip(blocks, b, strict=True):
        block.copy_(part.reshape(block.shape))


class _PlaceParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, leading: Sequence[int], parts: Sequence[Rows], dtype: torch.dtype, *b: torch.Tensor
    ) -> torch.Tensor:
        ctx.leading, ctx.parts, ctx.dtypes = leading, parts, [part.dtype for part in b]
        placed = b[0].new_zeros(math.prod(leading), sum(part.shape[1] for part in b), dtype=dtype)
        _fill(part_blocks(placed, leading, parts), b)
        return placed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore
        (grad,) = grads
        blocks = part_blocks(grad, ctx.leading, ctx.parts)
        parts = zip(blocks, ctx.dtypes, ctx.needs_input_grad[3:], strict=True)
        found = (block.to(dtype).reshape(-1, block.shape[-1]) if needed else None for block, dtype, needed in parts)
        return None, None, None, *found


def place_parts(
    b: Sequence[torch.Tensor], leading: Sequence[int], parts: Sequence[Rows], dtype: torch.dtype
) -> torch.Tensor:
    """B of all parts as one matrix [out, R] in a dtype: a block per part, zero elsewhere.

    Args:
        b: of each part [features of the part, its R], whose gradients come back in their own dtypes.
        leading: dimensions of the output.
        parts: of it.
        dtype: of the result.
    """
    return _PlaceParts.apply(tuple(leading), tuple(parts), dtype, *b)


# ---- reference ----


class _LoraUpdate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> torch.Tensor:
        inner = x @ a.t()
        _, needs_x, needs_a, needs_b, _ = ctx.needs_input_grad
        ctx.save_for_backward(
            x if needs_a else None,
            a if needs_x else None,
            b if needs_x or needs_a else None,
            inner if needs_b else None,
        )
        ctx.scale = scale
        ctx.mark_dirty(y)
        return y.addmm_(inner, b.t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore
        (grad,) = grads
        x, a, b, inner = ctx.saved_tensors
        grad_x = grad_a = grad_b = None
        if b is not None:
            grad_inner = (grad @ b) * ctx.scale
            grad_x = None if a is None else grad_inner @ a
            grad_a = None if x is None else grad_inner.t() @ x
        if inner is not None:
            grad_b = (grad.t() @ inner) * ctx.scale
        return grad, grad_x, grad_a, grad_b, None


def lora_update(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Adds the low-rank update to `y` in place.

    Args:
        y: [T, out], the base layer's output; overwritten, so nothing else may need its old value.
        x: [T, in].
        a: [R, in], R counting all parts.
        b: [out, R].
        scale: lora_alpha / r, or alpha / sqrt(r) (rsLoRA, Kalajdzievski 2023).

    Returns:
        y, all tensors in its dtype.
    """
    return _LoraUpdate.apply(y, x, a, b, scale)


# ---- what a layer is ----


class WideWeight:
    """A frozen weight and low-precision copies of its adapters in one buffer [out + S, in + S].

    W is in the top left corner, the copy of B in the columns behind it, that of A in the rows below; the rest is zero.
    Rows are whole multiples of 64 elements, so that all begin at addresses that suit the matrix units. The views below
    are made once: every call reads some, and to make one takes microseconds.
    """

    weight: torch.Tensor
    """W, a view [*leading, in]."""
    flat: torch.Tensor
    """W, a view [out, in]."""
    rows: torch.Tensor
    """[W | B | 0], a view [out, in + S]."""
    a: torch.Tensor
    """The copy of A, a view [R, in]."""
    b: torch.Tensor
    """The copy of B, a view [out, R]."""
    b_shapes: list[tuple[int, int]]
    """Of each part's B."""

    changes = 0
    """How often `refresh` has brought other adapters than the ones before, as their versions tell."""
    _stale = True
    _sources: tuple[tuple[torch.Tensor, int], ...] = ()
    _places: Sequence[tuple[Any, ...]] = ()

    def __init__(self, weight: torch.Tensor, rank: int, parts: Sequence[Rows]) -> None:
        """Copy a weight into a new buffer; the adapters are zero until `refresh`.

        Args:
            weight: [*leading, in]; afterwards `weight` of this object may take its place.
            rank: R of all adapted parts together.
            parts: of the output, in the order of their columns of B and rows of A.

        Raises:
            ValueError: the rank is not a multiple of the number of parts.
        """
        if not parts or rank < 1 or rank % len(parts):
            raise ValueError(
                f"the rank of all parts together must be a multiple of their number, {len(parts)}, not {rank}"
            )
        self.leading, self.channels, self.rank, self.parts = weight.shape[:-1], weight.shape[-1], rank, tuple(parts)
        self.out = weight[..., 0].numel()
        self.spare = self.spare_for(self.channels, rank)
        buffer = weight.new_zeros(self.out + self.spare, self.channels + self.spare)
        self.dtype, self.rows = buffer.dtype, buffer[: self.out]
        self.flat = self.rows[:, : self.channels]
        self.weight = self.flat.unflatten(0, self.leading)
        self.a = buffer[self.out : self.out + rank, : self.channels]
        self.b = self.rows[:, self.channels : self.channels + rank]
        self._strides = self.weight.stride()
        self.b_shapes = [
            (block[..., 0].numel(), block.shape[-1]) for block in part_blocks(self.b, self.leading, self.parts)
        ]
        self.weight.copy_(weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a layer makes a buffer of its own."""
        return

    @staticmethod
    def spare_for(channels: int, rank: int) -> int:
        """S: at least the rank, and so that rows are multiples of 64 elements."""
        return cdiv(channels + rank, 64) * 64 - channels

    @staticmethod
    def takes(out: int, channels: int, rank: int) -> bool:
        """Whether a buffer of such a layer is small enough: kernels count its elements in 32 bits."""
        spare = WideWeight.spare_for(channels, rank)
        return (out + spare) * (channels + spare) < 2**31

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether a tensor is `weight`, rather than one that has come into its place."""
        return weight.data_ptr() == self.weight.data_ptr() and weight.stride() == self._strides

    def forget(self) -> None:
        """Have the next `refresh` copy the adapters also if it is told that they are as they were."""
        self._stale = True

    def refresh(self, a: torch.Tensor, b: Sequence[torch.Tensor], *, trusted: bool = False) -> None:
        """Copy the adapters into the buffer.

        Args:
            a: [R, in].
            b: of each part [features, columns of the part].
            trusted: nobody has changed them since the last call or `forget`, so that there is nothing to do. While a
                CUDA graph is captured the copy is made all the same: replays are of other steps.
        """
        captured = is_captured(self.rows.device)
        if trusted and not self._stale and not captured:
            return
        with torch.no_grad():
            self.a.copy_(a)
            _fill(part_blocks(self.b, self.leading, self.parts), b)
        self._stale = captured  # then nothing is copied before the first replay
        # A backward must find what its forward has had. That the same values are copied once more (by an evaluation in
        # between, say) is no change, and values are not to be compared; so versions tell, as for all that autograd
        # saves. The sources are held, so that no other tensor can come to lie where one has been.
        sources = tuple((tensor.detach(), 0 if tensor.is_inference() else tensor._version) for tensor in (a, *b))
        places = [(tensor.data_ptr(), tensor.shape, tensor.stride(), version) for tensor, version in sources]
        if places != self._places:
            self.changes += 1
        self._sources, self._places = sources, places

    def replayed(self) -> None:
        """Count a replay of a graph that holds a `refresh`: it may have brought other adapters."""
        self.changes += 1
        self._stale = True


# ---- autograd ----


class _Layer(NamedTuple):
    """What `_LoraLinear` takes beside tensors with gradients."""

    wide: WideWeight
    scale: float
    bias: torch.Tensor | None
    drop: InputDropout | None
    recorded: bool
    """Whether there may be a backward."""
    spare: int
    """Columns behind x's rows that may be overwritten."""
    value: bool
    """Whether the result's values are needed."""
    recipe: Recipe | None
    """Of x."""

    @property
    def whole_scale(self) -> float:
        """Of the update, that of dropout included."""
        return self.scale if self.drop is None else self.scale / (1 - self.drop.p)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: _Layer,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        a: torch.Tensor,
        *b: torch.Tensor,
    ) -> torch.Tensor:
        wide, bias = layer.wide, layer.bias
        row = wide.rows.shape[1]
        fits = layer.spare == spare_columns(x) == wide.spare
        trained_b = layer.recorded and any(ctx.needs_input_grad[4:])
        inner = None
        if layer.value or trained_b:
            spare = wide.spare if fits and layer.value else 0
            inner = project(x, wide.a, layer.whole_scale, layer.drop, spare=spare, copy=trained_b or not fits)
        if not layer.value:
            y = x.new_empty(()).expand(len(x), wide.out)
        elif fits:
            rows = x.as_strided((len(x), row), x.stride())
            if residual is None:
                y = functional.linear(rows, wide.rows, bias)
            else:
                y = torch.addmm(residual if bias is None else residual + bias, rows, wide.rows.t())
        else:
            assert inner is not None
            y = spread(inner, wide.b.t(), None, residual, bias)
            y.addmm_(x, wide.flat.t())
        drop = (
            () if layer.drop is None else (layer.drop.counters.key, layer.drop.counters.row, layer.drop.counters.column)
        )
        source = (x,) if layer.recipe is None else layer.recipe.kept
        kept = (inner if trained_b else None, *(source if ctx.needs_input_grad[3] else ()))
        ctx.save_for_backward(*drop, *kept)
        # Not the recipe's tensors: those that are saved are watched, and freed.
        recipe = None if layer.recipe is None else layer.recipe._replace(kept=())
        ctx.layer, ctx.changes = layer._replace(recipe=recipe), wide.changes
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore
        (grad,), layer = grads, ctx.layer
        wide = layer.wide
        if wide.changes != ctx.changes:
            raise RuntimeError("an adapter was changed, and used, between a forward and its backward")
        saved = list(ctx.saved_tensors)
        drop = None
        if layer.drop is not None:
            drop, saved = layer.drop._replace(counters=DropoutCounters(*saved[:3])), saved[3:]
        inner, *source = saved
        _, needs_x, needs_residual, needs_a, *needs_b = ctx.needs_input_grad
        grad_residual = grad if needs_residual else None
        if grad.stride(1) != 1:
            grad = grad.contiguous()
        grad_x = grad_a = None
        if needs_x or needs_a:
            grad_inner = project(grad, wide.b.t(), layer.whole_scale, None)
            assert grad_inner is not None
            if needs_x:
                # The update's part first: the large GEMM adds to it and rounds last.
                grad_x = spread(grad_inner, wide.a, drop)
                grad_x.addmm_(grad, wide.flat)
            if needs_a:
                x = source[0] if layer.recipe is None else layer.recipe.make(*source)
                grad_a = outer(grad_inner, x, drop, rank_first=True)
        grad_b: list[torch.Tensor | None] = [None] * len(needs_b)
        if any(needs_b):
            blocks = part_blocks(outer(inner, grad, None, rank_first=False), wide.leading, wide.parts)
            grad_b = [
                block.reshape(-1, block.shape[-1]) if needed else None
                for block, needed in zip(blocks, needs_b, strict=True)
            ]
        return None, grad_x, grad_residual, grad_a, *grad_b


def _check_dtypes(wide: WideWeight, x: torch.Tensor, others: dict[str, torch.Tensor | None]) -> None:
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        raise ValueError("lora_linear computes in the weight's dtype: leave torch.autocast out")
    for name, tensor in {"x": x, **others}.items():
        if tensor is not None and (tensor.dtype != wide.dtype or tensor.device != wide.rows.device):
            raise ValueError(
                f"{name} must be {wide.dtype} on {wide.rows.device} as the weight is, not {tensor.dtype} on "
                f"{tensor.device}"
            )


def _check_shapes(
    wide: WideWeight,
    x: torch.Tensor,
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    if x.ndim != 2 or x.shape[1] != wide.channels:
        raise ValueError(f"x must be [T, {wide.channels}], not {list(x.shape)}")
    if a.shape != (wide.rank, wide.channels):
        raise ValueError(f"a must be {[wide.rank, wide.channels]}, not {list(a.shape)}")
    shapes = [tuple(part.shape) for part in b]
    if shapes != wide.b_shapes:
        raise ValueError(f"b must be of shapes {wide.b_shapes}, one for each part, not {shapes}")
    if bias is not None and bias.shape != (wide.out,):
        raise ValueError(f"bias must be {[wide.out]}, not {list(bias.shape)}")
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        raise ValueError("bias requires a gradient, but lora_linear makes none of it; add a trained bias to the result")
    if residual is not None and residual.shape != (len(x), wide.out):
        raise ValueError(f"residual must be {[len(x), wide.out]}, not {list(residual.shape)}")


def lora_linear(
    x: torch.Tensor,
    wide: WideWeight,
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    scale: float,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dropout: InputDropout | None = None,
    spare: int = 0,
    trusted: bool = False,
    copied: bool = False,
    value: bool = True,
    recipe: Recipe | None = None,
) -> torch.Tensor:
    """The layer x W^T (+ bias) (+ residual) + scale * dropout(x) A^T B^T.

    Args:
        x: [T, in].
        wide: the frozen weight; takes in the adapters.
        a: A, float32 [R, in], R counting all adapted parts.
        b: B of each adapted part, float32 [features of the part, its R].
        scale: lora_alpha / r, or alpha / sqrt(r) (rsLoRA, Kalajdzievski 2023).
        bias: [out], not trained.
        residual: [T, out], in x's dtype.
        dropout: on the update's input.
        spare: columns of scratch memory that x was made with (`runtime.empty_rows`, `rms_norm(..., spare=)`, ...). If
            they are `wide.spare` many they are overwritten, which autograd does not see: of x cut out of longer rows,
            whose values are needed, leave it 0.
        trusted: see `WideWeight.refresh`.
        copied: a `refresh` comes before this call and, where this call is captured in a CUDA graph, before its replays.
        value: whether the result's values are needed; without, the kernels leave out the large product, and the result
            is there to be differentiated alone.
        recipe: of x, which is then made again for the gradient of A, rather than kept.

    Returns:
        [T, out] in x's dtype, which is the weight's. On a GPU the gradients of A and B are not rounded before they are
        float32.

    Raises:
        ValueError: a shape or dtype that does not fit the weight's; a bias that is trained; dropout with a number out
            of its range, or counters that are not int32 or not one a token; torch.autocast is on.
        RuntimeError: in the backward, if the buffer holds other adapters by then.
    """
    _check_shapes(wide, x, a, b, bias, residual)
    _check_dtypes(wide, x, {"bias": bias, "residual": residual})
    if dropout is not None:
        check_dropout(x, *dropout)
        dropout = None if is_identity(dropout.p) else dropout
    if use_triton(x):
        if not copied:
            wide.refresh(a, b, trusted=trusted)
        if x.stride(1) != 1:
            x = x.contiguous()
        layer = _Layer(wide, scale, bias, dropout, torch.is_grad_enabled(), spare, value, recipe)
        return _LoraLinear.apply(layer, x, residual, a, *b)
    y = functional.linear(x, wide.flat, bias)
    y = y if residual is None else y + residual
    placed = place_parts(b, wide.leading, wide.parts, x.dtype)
    return lora_update(y, x if dropout is None else drop_out(x, *dropout), a.to(x.dtype), placed, scale)
