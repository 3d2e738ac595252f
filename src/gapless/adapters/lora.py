"""LoRA (Hu et al. 2021): low-rank adapters around the linear layers of a frozen decoder.

A fused layer (qkv, gate_up) carries one adapter per adapted part. Their A matrices are one parameter [P R, in], so that
the input they share is read once; each B is a parameter of its own in its part's shape, placed into the rows of the
fused output when used. Parameters are float32; a forward uses copies in the dtype of the activations and their
gradients come back in float32. Where kernels run, the copies lie in one buffer with the frozen weight, which becomes a
view of it (`kernels.lora.WideWeight`); they are made in every forward, or once for as long as nobody changes the
adapters (`unchanged`): an optimizer step's micro-batches, an evaluation, a generation.

Dropout falls on the adapters' input and is counter-based; the parts of a fused layer share one mask, where PEFT draws
one for each. All else is as in PEFT, whose names and shapes the files have.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gapless.batch import DropoutCounters
from gapless.config import AdapterConfig
from gapless.kernels.dropout import dropout
from gapless.kernels.lora import InputDropout, WideWeight, lora_linear, lora_update, part_blocks, place_parts
from gapless.kernels.runtime import Recipe, runs_kernels
from gapless.models.decoder import Decoder, Embedding
from gapless.models.families import names
from gapless.models.linear import Cut, DenseLinear, Linear, Part
from gapless.models.views import TensorView, sharded_view

ALL_LINEAR = "all-linear"
PEFT_PREFIX = "base_model.model."
SAVEABLE = {"embed_tokens": names.EMBED, "lm_head": "lm_head"}
"""Modules that may be trained in full: leaf name -> full name."""
_LINEARS = {
    "attention.qkv": names.ATTENTION,
    "attention.out": names.ATTENTION,
    "mlp.gate_up": names.MLP,
    "mlp.down": names.MLP,
}
"""Linear layers of a decoder layer, in the order of their dropout sites: path -> module on disk that holds them."""


class LoraLinear(Linear):
    """A linear layer with adapters on some of its parts."""

    trusted = False
    """Whether nobody changes the adapters for now, so that low-precision copies of them need not be made again."""
    copied = False
    """Whether `copy_adapters` makes those copies, before each forward or each replay of a captured one."""
    gathered = False
    """Whether FSDP2 lends the layer its parameters for each forward: memory that is no place for a buffer's view."""
    _wide: WideWeight | None = None

    def __init__(self, base: Linear, adapted: Iterable[Part], config: AdapterConfig, *, layer: int, site: int) -> None:
        """Wrap a layer; A and B are zero until `reset`.

        Args:
            base: the layer; its parameters are left as they are.
            adapted: some of its parts.
            config: rank, scale and dropout.
            layer: index of the decoder layer, for the dropout's counters.
            site: which linear layer in it, likewise.
        """
        super().__init__()
        self.base = base
        self.in_features, self.leading, self.parts = base.in_features, base.leading, base.parts
        self.shard_dim, self.cut = base.shard_dim, base.cut
        self.adapted = tuple(adapted)
        self.config, self.layer, self.site = config, layer, site
        self.r, self.dropout = config.r, config.lora_dropout
        self.scale = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
        device = next(base.parameters()).device
        rows = len(self.adapted) * self.r
        self.lora_a = nn.Parameter(torch.zeros(rows, self.in_features, device=device))
        self.lora_b = nn.ParameterDict(
            {
                part.name: nn.Parameter(torch.zeros(part.features(self.leading), self.r, device=device))
                for part in self.adapted
            }
        )
        self.register_state_dict_post_hook(_dense_weight)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        counters: DropoutCounters | None = None,
        *,
        spare: int = 0,
        value: bool = True,
        recipe: Recipe | None = None,
    ) -> torch.Tensor:
        """Give base(x, residual) + scale * B A dropout(x).

        Args:
            x: [T, in].
            residual: [T, out], added to the result.
            counters: of the batch's tokens; needed when training with dropout.
            spare: see `Linear.forward`.
            value: likewise; for kernels, as is `recipe`.
            recipe: see `value`.
        """
        drop = None
        if self.training and self.dropout:
            assert counters is not None, "dropout takes its bits from the batch: Segments.dropout"
            drop = InputDropout(self.dropout, counters, self.layer, self.site, self.input_range[0])
        base = self._widened(x.dtype)
        if base is not None:
            b = [self.lora_b[part.name] for part in self.adapted]
            bias = None if base.bias is None else base.bias.flatten()
            wide = self._wide_weight(base)
            return lora_linear(
                x,
                wide,
                self.lora_a,
                b,
                self.scale,
                bias=bias,
                residual=residual,
                dropout=drop,
                spare=spare,
                trusted=self.trusted,
                copied=self.copied,
                value=value,
                recipe=recipe,
            )
        y = self.base(x, residual)
        if drop is not None:
            x = dropout(x, *drop)
        return lora_update(y, x, self.lora_a.to(x.dtype), self.placed_b(x.dtype), self.scale)

    @property
    def spare(self) -> int:
        """See `Linear.spare`."""
        base = self._widened(None)
        return 0 if base is None else WideWeight.spare_for(self.in_features, len(self.lora_a))

    def _widened(self, dtype: torch.dtype | None) -> DenseLinear | None:
        """The base, if `lora_linear` can take it and inputs of a dtype (None: of the base's own)."""
        base = self.base
        if not isinstance(base, DenseLinear) or self.gathered or not runs_kernels(base.weight.device):
            return None
        frozen = not base.weight.requires_grad and (base.bias is None or not base.bias.requires_grad)
        if not frozen and self._wide is not None:
            base.weight.data, self._wide = base.weight.data.contiguous(), None
        fits = WideWeight.takes(base.out_features, base.in_features, len(self.lora_a))
        return base if frozen and fits and dtype in (None, base.weight.dtype) else None

    def _wide_weight(self, base: DenseLinear) -> WideWeight:
        """The buffer that the base's weight is a view of; a new one where memory of another kind has taken its place.

        That happens when a layer is copied or moved to another device.
        """
        if self._wide is None or not self._wide.holds(base.weight):
            self._wide = None  # before another is made
            with torch.inference_mode(False), torch.no_grad():  # it outlives an inference mode around it
                self._wide = WideWeight(base.weight.detach(), len(self.lora_a), self.adapted)
                base.weight.data = self._wide.weight
        return self._wide

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LoraLinear:
        super()._apply(fn, recurse)
        if self._wide is not None and not self._wide.holds(next(self.base.parameters())):
            self._wide = None  # the weight has moved
        return self

    def trust(self) -> None:
        """Have the next forward make low-precision copies, and none after it, until `trusted` is False again."""
        self.trusted = True
        if self._wide is not None:
            self._wide.forget()

    def copy_adapters(self) -> None:
        """Make the low-precision copies, where kernels run; see `copied`."""
        base = self._widened(None)
        if base is not None:
            self._wide_weight(base).refresh(self.lora_a, [self.lora_b[part.name] for part in self.adapted])

    def replayed(self) -> None:
        """Count a replay of a CUDA graph that holds `copy_adapters`."""
        if self._wide is not None:
            self._wide.replayed()

    @property
    def input_range(self) -> tuple[int, int]:
        """First of the whole layer's inputs that this piece reads, and how many the whole layer has."""
        return (self.cut.start, self.cut.total) if self.cut and self.cut.dim == 1 else (0, self.in_features)

    def placed_b(self, dtype: torch.dtype) -> torch.Tensor:
        """B of all adapted parts as one matrix [out, P R]: a block per part, zero elsewhere."""
        return place_parts([self.lora_b[part.name] for part in self.adapted], self.leading, self.adapted, dtype)

    def a_part(self, part: Part) -> Part:
        """Where a part's A lies in `lora_a`."""
        return Part("lora_A", 0, self.adapted.index(part) * self.r, self.r)

    @torch.no_grad()
    def delta(self, part: Part) -> torch.Tensor:
        """The update scale * B A of an adapted part: float32 [features of the part, in]."""
        return (self.lora_b[part.name] @ self.a_part(part).select(self.lora_a)).mul_(self.scale)

    @torch.no_grad()
    def reset(self, seed: int, module_names: dict[str, str]) -> None:
        """Draw new adapters: A as PEFT does (He et al. 2015 with a = sqrt 5, that is uniform within 1/sqrt(in)), B = 0.

        Args:
            seed: of the run.
            module_names: Hugging Face name of each adapted part by its leaf name. Each A follows from its name and the
                seed alone, whatever else is adapted; a piece of a layer gets its columns of the whole layer's A.
        """
        start, inputs = self.input_range
        bound = 1 / math.sqrt(inputs)
        for part in self.adapted:
            generator = torch.Generator().manual_seed(_name_seed(seed, module_names[part.name]))
            a = torch.empty(self.r, inputs).uniform_(-bound, bound, generator=generator)
            self.a_part(part).select(self.lora_a).copy_(a[:, start : start + self.in_features])
            self.lora_b[part.name].zero_()

    def dequantize(self) -> torch.Tensor:
        """The effective weight W + scale * B A, [out, in] in the base's dtype."""
        base = self.base.dequantize()
        update = self.placed_b(torch.float32) @ self.lora_a
        return base.float().add(update, alpha=self.scale).to(base.dtype)

    def shard(self, dim: int, rank: int, world: int) -> LoraLinear:
        """See `Linear.shard`. With dim 0 B is cut like its part and A copied, with dim 1 A is cut and B copied.

        With dim 1 the pieces' B A x add up as the base's do.
        """
        base = self.base.shard(dim, rank, world)
        adapted = [part for part in base.parts if part.name in self.lora_b]
        shard = LoraLinear(base, adapted, self.config, layer=self.layer, site=self.site).train(self.training)
        shard.lora_a.requires_grad_(self.lora_a.requires_grad)
        for name, b in self.lora_b.items():
            shard.lora_b[name].requires_grad_(b.requires_grad)
        with torch.no_grad():
            if dim == 0:
                shard.lora_a.copy_(self.lora_a)
                piece = base.leading[self.shard_dim]
                blocks = part_blocks(self.placed_b(torch.float32), self.leading, self.adapted)
                for part, source in zip(self.adapted, blocks, strict=True):
                    cut = source.narrow(self.shard_dim, rank * piece, piece)
                    shard.lora_b[part.name].copy_(cut.reshape(-1, self.r))
            else:
                shard.lora_a.copy_(self.lora_a.narrow(1, rank * base.in_features, base.in_features))
                for name, b in self.lora_b.items():
                    shard.lora_b[name].copy_(b)
        return shard

    def base_layer(self) -> Linear:
        """See `Linear.base_layer`."""
        return self.base.base_layer()


def _dense_weight(layer: LoraLinear, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Put a copy in place of a widened weight: who saves a strided view saves all of its buffer, or refuses it."""
    name = f"{prefix}base.weight"
    weight = state.get(name)
    if layer._wide is not None and weight is not None and not isinstance(weight, nn.Parameter):
        state[name] = weight.contiguous()


def _name_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def lora_layers(model: nn.Module) -> Iterator[LoraLinear]:
    """Its adapted layers; of one, itself."""
    modules = [model] if isinstance(model, LoraLinear) else model.modules()
    return (module for module in modules if isinstance(module, LoraLinear))


@contextmanager
def unchanged(*modules: nn.Module) -> Generator[None]:
    """Nobody changes the modules' adapters while entered: their low-precision copies are made once."""
    layers = [layer for module in modules for layer in lora_layers(module)]
    before = [layer.trusted for layer in layers]
    for layer in layers:
        layer.trust()
    try:
        yield
    finally:
        for layer, trusted in zip(layers, before, strict=True):
            layer.trusted = trusted


@contextmanager
def copied(layers: Collection[LoraLinear]) -> Generator[None]:
    """Forwards take the copies that `copy_adapters` has made, while entered."""
    for layer in layers:
        layer.copied = True
    try:
        yield
    finally:
        for layer in layers:
            layer.copied = False


# ---- applying adapters to a decoder ----


def adaptable_modules(model: Decoder) -> Iterator[str]:
    """Hugging Face names of the linear layers that can carry an adapter: those of the decoder layers."""
    for index, _, _, linear, holder in _linears(model):
        for part in linear.parts:
            yield _module_name(index, holder, part)


def adapted_modules(model: Decoder) -> Iterator[tuple[str, LoraLinear, Part]]:
    """Every adapter: the Hugging Face name of its module, the layer that holds it, and its part there."""
    for index, _, _, linear, holder in _linears(model):
        if isinstance(linear, LoraLinear):
            for part in linear.adapted:
                yield _module_name(index, holder, part), linear, part


def apply_lora(model: Decoder, config: AdapterConfig, *, seed: int) -> None:
    """Freezes a decoder and puts new adapters around its linear layers; `modules_to_save` become trainable.

    Args:
        model: without adapters, its weights loaded.
        config: what to adapt and how.
        seed: of the adapters' first values.

    Raises:
        ValueError: a setting out of its range, an unknown module, a model that has adapters already.
    """
    modules = select_modules(model, config.target_modules)
    _check_rank(model, config.r, modules)
    apply_to_modules(model, config, modules)
    reset_adapters(model, seed)


def reset_adapters(model: Decoder, seed: int) -> None:
    """Draw first values for all adapters that have memory and are not sharded.

    Args:
        model: adapted; of a model that is cut each piece gets its values of the whole.
        seed: of the run.
    """
    for index, _, _, linear, holder in _linears(model):
        if isinstance(linear, LoraLinear) and not linear.lora_a.is_meta and not hasattr(linear.lora_a, "placements"):
            linear.reset(seed, {part.name: _module_name(index, holder, part) for part in linear.adapted})


def select_modules(model: Decoder, targets: Collection[str]) -> list[str]:
    """The modules that `target_modules` names: by leaf name, by (the end of) their path, or "all-linear".

    Raises:
        ValueError: no target, or one that names nothing.
    """
    available = list(adaptable_modules(model))
    if not targets:
        raise ValueError(f"target_modules is empty; it takes {ALL_LINEAR!r} or some of {_leaves(available)}")
    if unknown := [target for target in targets if not any(names_module(target, name) for name in available)]:
        raise ValueError(
            f"target_modules: this model has no {', '.join(unknown)} to adapt; possible: {ALL_LINEAR}, "
            f"{_leaves(available)}"
        )
    return [name for name in available if any(names_module(target, name) for target in targets)]


def names_module(target: str, module: str) -> bool:
    """Whether a target means a module, as in PEFT."""
    return target == ALL_LINEAR or module == target or module.endswith(f".{target}")


def apply_to_modules(model: Decoder, config: AdapterConfig, modules: Collection[str]) -> None:
    """`apply_lora` for given modules, with A and B zero and of any rank: files may hold more than a module can use.

    Raises:
        ValueError: see `apply_lora`.
    """
    if any(isinstance(module, LoraLinear) for module in model.modules()):
        raise ValueError("the model has an adapter already; load the base model again to apply another one")
    _check_settings(config)
    wanted = frozenset(modules)
    plan = []
    for index, site, path, linear, holder in _linears(model):
        assert model.layers[index].get_submodule(path) is linear, "adapters come before the layers are cut"
        adapted = [part for part in linear.parts if _module_name(index, holder, part) in wanted]
        if adapted:
            plan.append((index, site, path, linear, adapted))
    saved = [_saved_weight(model, name)[0] for name in config.modules_to_save if _has_module(model, name)]
    model.requires_grad_(False)
    for index, site, path, linear, adapted in plan:
        wrapped = LoraLinear(linear, adapted, config, layer=int(index), site=site).train(model.training)
        model.layers[index].set_submodule(path, wrapped)
    for weight in saved:
        weight.requires_grad_(True)


def adapter_views(model: Decoder) -> Iterator[TensorView]:
    """What is here of every trained tensor of an adapted model, under PEFT's name; a tied embedding only once."""
    parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
    for view in _adapter_views(model, parameter_names):
        here = sharded_view(view)
        if here is not None:
            yield here


def _adapter_views(model: Decoder, parameter_names: dict[int, str]) -> Iterator[TensorView]:
    for module, layer, part in adapted_modules(model):
        name, a, b = f"{PEFT_PREFIX}{module}", layer.lora_a, layer.lora_b[part.name]
        shape = (layer.r, layer.in_features)
        a_view = TensorView(f"{name}.lora_A.weight", a, parameter_names[id(a)], shape, layer.a_part(part))
        b_view = TensorView(f"{name}.lora_B.weight", b, parameter_names[id(b)], tuple(b.shape))
        cut = layer.cut
        if cut is not None and cut.dim == 0:
            rows = part.features(layer.leading) // layer.leading[layer.shard_dim]
            b_view = b_view.cut(Cut(0, cut.start * rows, cut.total * rows), 0)
        else:
            a_view = a_view.cut(cut, 0)
        yield a_view
        yield b_view
    seen = set()
    for leaf in saved_modules(model):
        weight, cut = _saved_weight(model, leaf)
        if id(weight) not in seen:
            seen.add(id(weight))
            name = f"{PEFT_PREFIX}{SAVEABLE['embed_tokens' if model.config.tied else leaf]}.weight"
            view = TensorView(name, weight, parameter_names[id(weight)], tuple(weight.shape), dtype=model.dtype)
            yield view.cut(cut, 0)


def saved_modules(model: Decoder) -> list[str]:
    """The `modules_to_save` of an adapted model that are trained and here; both names of a tied weight."""
    return [leaf for leaf in SAVEABLE if _has_module(model, leaf) and _saved_weight(model, leaf)[0].requires_grad]


def _linears(model: Decoder) -> list[tuple[str, int, str, Linear, str]]:
    """Of every linear layer: decoder layer, place in it, path in it, the layer, and its holder's name on disk."""
    found = []
    for index, layer in model.layers.items():
        for site, (path, holder) in enumerate(_LINEARS.items()):
            linear = layer.get_submodule(path)
            assert isinstance(linear, Linear)
            found.append((index, site, path, linear.local_layer(), holder))
    return found


def _module_name(index: str, holder: str, part: Part) -> str:
    return f"{names.layer_name(index)}.{holder}.{part.name}"


def _leaves(modules: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in modules))


def _has_module(model: Decoder, leaf: str) -> bool:
    """Whether a pipeline stage has one of `SAVEABLE`."""
    if leaf not in SAVEABLE:
        raise ValueError(f"modules_to_save: {leaf} is not possible; possible: {', '.join(SAVEABLE)}")
    return (model.embed if leaf == "embed_tokens" else model.head) is not None


def _saved_weight(model: Decoder, leaf: str) -> tuple[nn.Parameter, Cut | None]:
    module = model.embed if leaf == "embed_tokens" else model.head
    assert module is not None
    stored = module.base_layer() if isinstance(module, Linear) else module
    assert isinstance(stored, DenseLinear | Embedding)
    return stored.weight, stored.cut


def _check_settings(config: AdapterConfig) -> None:
    if config.r < 1:
        raise ValueError(f"r must be at least 1, not {config.r}")
    if not 0 < config.lora_alpha < math.inf:
        raise ValueError(f"lora_alpha must be a positive number, not {config.lora_alpha}")
    if not 0 <= config.lora_dropout < 1:
        raise ValueError(f"lora_dropout must be at least 0 and below 1, not {config.lora_dropout}")


def _check_rank(model: Decoder, r: int, modules: Collection[str]) -> None:
    for index, _, _, linear, holder in _linears(model):
        for part in linear.parts:
            smaller = min(linear.in_features, part.features(linear.leading))
            if r > smaller and _module_name(index, holder, part) in modules:
                raise ValueError(
                    f"r = {r} exceeds the smaller side, {smaller}, of {part.name} in layer {index}; lower r, or leave "
                    f"{part.name} out of target_modules"
                )
