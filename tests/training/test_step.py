"""The loss and its gradients are those of one large batch, however its rows are cut."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from gapless.adapters.lora import adapter_views, apply_lora
from gapless.batch import BatchLayout, Document, build_batch
from gapless.config import AdapterConfig, OptimConfig, ParallelConfig
from gapless.models.views import hf_views
from gapless.parallel.loss import batch_loss
from gapless.parallel.mesh import Mesh
from gapless.parallel.model import ParallelModel
from gapless.training.optim import AdamW
from gapless.training.step import PendingMetrics, StepMetrics, mean_loss, train_step
from tiny import tiny_model

ROW_TOKENS = 40


def documents(lengths, seed, share=0.6) -> list[Document]:
    random = np.random.default_rng(seed)
    return [
        Document(random.integers(0, 256, length).astype(np.int32), random.random(length) < share) for length in lengths
    ]


def eight_rows() -> list[list[Document]]:
    """Rows of unlike lengths and very unlike numbers of trained tokens, one of them with none."""
    lengths = [(40,), (3, 20, 10), (1,), (17, 17), (2, 30), (11,), (5, 5, 5, 5), (39,)]
    shares = [0.9, 0.1, 0.5, 0.02, 1.0, 0.0, 0.5, 0.3]
    return [documents(row, index, share) for index, (row, share) in enumerate(zip(lengths, shares, strict=True))]


def cut(rows, per_batch, learning_rate=1e-3) -> SimpleNamespace:
    """A training step of all rows in micro-batches of `per_batch`."""
    layout = BatchLayout(rows=per_batch, row_tokens=ROW_TOKENS, row_documents=8)
    trained = sum(int(document.trained[1:].sum()) for row in rows for document in row)
    batches = [
        build_batch(
            layout,
            rows[start : start + per_batch],
            row_ids=range(100 + start, 100 + min(start + per_batch, len(rows))),
            step_trained=trained,
            learning_rate=learning_rate,
            step=3,
            seed=5,
        )
        for start in range(0, len(rows), per_batch)
    ]
    return SimpleNamespace(micro_batches=batches, num_trained=trained)


def alone(model) -> ParallelModel:
    """A whole model in one process."""
    return ParallelModel([model], Mesh.single(), ParallelConfig())


def accumulate(model, step, loss_fn=None) -> torch.Tensor:
    return alone(model).accumulate(step.micro_batches, loss_fn)


def state_of(optimizer) -> dict[str, torch.Tensor]:
    return {name: value for name, _, value in optimizer.tensors()}


def make_model(kind: str, dtype="fp32", dropout=0.2):
    model = tiny_model(dtype=dtype)
    if kind == "full":
        return model, list(hf_views(model))
    config = AdapterConfig(r=4, lora_dropout=dropout, modules_to_save=("lm_head",))
    apply_lora(model, config, seed=1)
    views = list(adapter_views(model))
    with torch.no_grad():
        for view in views:  # B starts at 0, where A would have no gradient
            if "lora_B" in view.name:
                view.parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(view.name)))
    return model, views


def gradients(model, views) -> dict[str, torch.Tensor]:
    found = {view.name: view.read(view.parameter.grad).double() for view in views}
    for view in views:
        view.parameter.grad = None
    return found


def relative_error(found, expected) -> float:
    difference = sum((found[name] - expected[name]).square().sum() for name in expected)
    return float((difference / sum(value.square().sum() for value in expected.values())).sqrt())


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_gradients_and_loss_do_not_depend_on_the_cut(kind):
    model, views = make_model(kind)
    results = []
    for per_batch in (8, 4, 1):
        loss = accumulate(model, cut(eight_rows(), per_batch))
        results.append((loss.item(), gradients(model, views)))
    whole_loss, whole = results[0]
    assert all(value.abs().sum() > 0 for value in whole.values())
    for loss, found in results[1:]:
        assert loss == pytest.approx(whole_loss, rel=1e-6)
        assert relative_error(found, whole) < 1e-6


def test_dropout_is_on_in_that_test():
    model, _ = make_model("lora")
    plain, _ = make_model("lora", dropout=0.0)
    step = cut(eight_rows(), 4)
    assert abs(accumulate(model, step) - accumulate(plain, step)) > 1e-4
    model.eval()
    assert accumulate(model, step) == accumulate(plain, step)


def test_loss_is_the_mean_over_trained_tokens_of_torch():
    model, _ = make_model("full")
    rows = eight_rows()
    losses = []
    for document in [document for row in rows for document in row]:
        alone = build_batch(BatchLayout(rows=1, row_tokens=len(document.tokens), row_documents=1), [[document]])
        logits = model.logits(model(alone.tokens, alone.segments)).double()
        targets = torch.from_numpy(document.tokens[1:]).long()
        losses.append(functional.cross_entropy(logits[:-1], targets, reduction="none")[document.trained[1:]])
    assert accumulate(model, cut(rows, 2)).item() == pytest.approx(torch.cat(losses).mean().item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("factor", [2, 3])
def test_a_multiple_of_the_loss_is_that_multiple_of_the_gradient(kind, factor):
    model, views = make_model(kind)
    batch = cut(eight_rows(), 8).micro_batches[0]
    batch_loss(model, batch).backward()
    once = gradients(model, views)
    loss = batch_loss(model, batch)
    loss *= factor
    loss.backward()
    for name, value in gradients(model, views).items():
        if factor == 2:  # no rounding
            assert torch.equal(value, 2 * once[name]), name
        assert float((value - factor * once[name]).norm() / value.norm()) < 1e-6, name


def test_a_custom_loss_sees_trained_tokens_and_gives_the_same_gradients():
    model, views = make_model("lora")
    step = cut(eight_rows(), 2)
    expected_loss = accumulate(model, step).item()
    expected = gradients(model, views)
    shapes = []

    def loss_fn(logits, labels):
        shapes.append((tuple(logits.shape), logits.dtype, int((labels < 0).sum())))
        return functional.cross_entropy(logits, labels, reduction="sum")

    loss = accumulate(model, step, loss_fn).item()
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert relative_error(gradients(model, views), expected) < 1e-6
    counts = [batch.num_trained for batch in step.micro_batches if batch.num_trained]
    assert shapes == [((count, 256), torch.float32, 0) for count in counts]


@pytest.mark.parametrize("value", [1.0, torch.zeros(3), None])
def test_a_custom_loss_that_is_no_sum_is_refused(value):
    model, _ = make_model("lora")
    with pytest.raises(ValueError, match="loss_fn must return the sum .* not"):
        batch_loss(model, cut(eight_rows(), 8).micro_batches[0], lambda logits, labels: value)


def test_a_custom_loss_without_a_gradient_is_refused():
    model, _ = make_model("lora")
    batch = cut(eight_rows(), 8).micro_batches[0]
    with pytest.raises(ValueError, match="loss_fn returned a loss without a gradient"):
        batch_loss(model, batch, lambda logits, labels: logits.detach().sum())


def test_packed_equals_separate_for_lora_gradients():
    lengths = (5, 1, 70, 7)
    parts = documents(lengths, 9, share=0.7)
    model, views = make_model("lora", dropout=0.0)

    packed = build_batch(BatchLayout(rows=1, row_tokens=96, row_documents=8), [parts])  # a tail of 13
    loss = batch_loss(model, packed)
    loss.backward()
    together = gradients(model, views)
    separate_loss = 0.0
    for part in parts:
        layout = BatchLayout(rows=1, row_tokens=len(part.tokens), row_documents=1)
        alone = batch_loss(model, build_batch(layout, [[part]]))
        if alone is not None:
            alone.backward()
            separate_loss += alone.item()
    separate = gradients(model, views)
    assert loss.item() == pytest.approx(separate_loss, rel=1e-5)
    for name, value in separate.items():
        assert float((together[name] - value).norm() / value.norm()) < 1e-5, name


def test_a_step_without_trained_tokens_changes_nothing():
    model, views = make_model("full")
    optimizer = AdamW(views, OptimConfig(weight_decay=0.5))
    before = state_of(optimizer)
    rows = [documents((20,), 1, share=0.0), documents((9,), 2, share=0.0)]
    assert train_step(alone(model), optimizer, cut(rows, 1)) is None
    assert all(torch.equal(value, before[name]) for name, value in state_of(optimizer).items())
    assert optimizer.step_count == 0
    assert mean_loss(alone(model), cut(rows, 1).micro_batches) is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_train_step_takes_the_batch_s_learning_rate(dtype):
    model, views = make_model("full", dtype)
    optimizer = AdamW(views, OptimConfig(max_grad_norm=0.0, adam_epsilon=1e-20))
    before = state_of(optimizer)
    metrics = train_step(alone(model), optimizer, cut(eight_rows(), 4, learning_rate=0.25))
    assert bool(metrics.finite)
    key = "master/model.norm.weight" if dtype == "bf16" else "weight/model.norm.weight"
    moved = (state_of(optimizer)[key] - before[key]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.25))  # Adam's first step is the learning rate


@pytest.mark.parametrize("finite", [True, False])
def test_metrics_arrive_on_the_host(finite):
    metrics = StepMetrics.of(*map(torch.tensor, (1.25, 0.3, finite, 77.0, 0.0)))
    assert PendingMetrics(metrics).read() == (1.25, torch.tensor(0.3).item(), finite, 77, False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_metrics_do_not_wait_for_what_was_launched_after_them():
    metrics = StepMetrics.of(*(torch.ones((), device="cuda") for _ in range(5)))
    PendingMetrics(metrics).read()  # pinned memory is there from now on
    torch.cuda.synchronize()
    pending = PendingMetrics(metrics)
    torch.cuda._sleep(2_000_000_000)  # about a second
    later = torch.cuda.current_stream().record_event()
    assert pending.read() == (1.0, 1.0, True, 1, True)
    assert not later.query()
    torch.cuda.synchronize()


def test_grad_norm_is_that_of_the_mean_loss():
    model, views = make_model("lora")
    step = cut(eight_rows(), 4)
    accumulate(model, step)
    expected = torch.stack([value.norm() for value in gradients(model, views).values()]).norm()
    optimizer = AdamW(views, OptimConfig())
    assert train_step(alone(model), optimizer, step).grad_norm.item() == pytest.approx(expected.item(), rel=1e-6)


def test_evaluation_is_the_exact_token_mean_without_dropout():
    model, _ = make_model("lora")
    rows = eight_rows()
    model.eval()
    expected = accumulate(model, cut(rows, 8)).item()
    model.train()
    for per_batch in (1, 3, 8):
        found = mean_loss(alone(model), cut(rows, per_batch).micro_batches)
        assert found == pytest.approx(expected, rel=1e-6)
    assert model.training
