"""metrics.jsonl, TensorBoard events, the loss plot."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as reference_crc32c

from gapless.training.metrics import MetricsLog, read_metrics
from gapless.training.plot import loss_plot
from gapless.training.tensorboard import EventWriter, crc32c


def test_metrics_drop_what_comes_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 6):
        log.write({"step": step, "loss": 1 / 3 / step})
    log.close()
    whole = path.read_text()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    log = MetricsLog(path, after_step=3)
    assert [line["step"] for line in log.lines] == [1, 2, 3]
    for step in (4, 5):
        log.write({"step": step, "loss": 1 / 3 / step})
    log.sync()
    log.close()
    assert path.read_text() == whole
    assert read_metrics(path)[2] == {"step": 3, "loss": 1 / 9}


def test_a_new_run_starts_an_empty_log(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    MetricsLog(path).close()
    assert path.read_text() == ""


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nrubbish\n{"step": 3}\n')
    with pytest.raises(ValueError, match="metrics.jsonl:2 is not JSON"):
        read_metrics(tmp_path / "metrics.jsonl")
    for line in ("7", '{"loss": 1.0}', '{"step": null}'):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
        with pytest.raises(ValueError, match="metrics.jsonl:2 has no step"):
            read_metrics(tmp_path / "metrics.jsonl")
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_crc32c():
    assert crc32c(b"123456789") == 0xE3069283  # the check value of the CRC catalogue
    assert crc32c(bytes(range(256)) * 3) == reference_crc32c(bytes(range(256)) * 3)


def read_scalars(folder) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_our_events(tmp_path):
    writer = EventWriter(tmp_path)
    for step in (1, 127, 128, 300, 70000):
        writer.scalars(step, {"train/loss": step / 4, "train/größe": -1.5})
    writer.close()
    found = read_scalars(tmp_path)
    assert found["train/loss"] == [(step, step / 4) for step in (1, 127, 128, 300, 70000)]
    assert found["train/größe"][0] == (1, -1.5)


def test_tensorboard_drops_what_a_run_that_starts_again_repeats(tmp_path):
    for value in (1.0, 2.0):
        writer = EventWriter(tmp_path)
        for step in range(3):
            writer.scalars(step, {"loss": value})
        writer.close()
    assert read_scalars(tmp_path)["loss"] == [(step, 2.0) for step in range(3)]


def test_tensorboard_drops_what_a_resumed_run_repeats(tmp_path):
    writer = EventWriter(tmp_path)
    for step in range(1, 10):
        writer.scalars(step, {"loss": 100.0 + step})
    writer.close()
    writer = EventWriter(tmp_path, first_step=6)
    for step in range(6, 12):
        writer.scalars(step, {"loss": 200.0 + step})
    writer.close()
    expected = [(step, 100.0 + step) for step in range(1, 6)] + [(step, 200.0 + step) for step in range(6, 12)]
    assert read_scalars(tmp_path)["loss"] == expected


def shapes(svg: str) -> tuple[list[str], list[str]]:
    root = ElementTree.fromstring(svg)
    name = "{http://www.w3.org/2000/svg}"
    paths = [element.get("d") for element in root.iter(name + "path") if element.get("fill") == "none"]
    return paths, [element.text for element in root.iter(name + "text")]


def test_plot_places_losses():
    lines = [
        {"step": 0, "eval_loss": 4.0},
        {"step": 1, "loss": 4.0},
        {"step": 2, "loss": 2.0},
        {"step": 2, "eval_loss": 3.0},
    ]
    (train, smooth, evaluation), texts = shapes(loss_plot(lines, "a < b"))
    assert "a < b" in texts
    assert {"0", "1", "2", "4", "3"} <= set(texts)
    (x1, y1), (x2, y2) = [tuple(map(float, point.split())) for point in train[1:].split("L")]
    (ex1, ey1), (ex2, ey2) = [tuple(map(float, point.split())) for point in evaluation[1:].split("L")]
    assert ex1 < x1 < x2 == ex2
    assert y1 == ey1 < ey2 < y2  # a lower loss is lower on the page
    assert ey2 == pytest.approx((y1 + y2) / 2)
    assert smooth.startswith(f"M{x1:.1f} {y1:.1f}")


@pytest.mark.parametrize("count", [0, 1, 25000])
def test_plot_of_any_length_is_small(count):
    svg = loss_plot([{"step": step + 1, "loss": 2.0} for step in range(count)], "run")
    assert len(svg) < 60_000
    shapes(svg)


def test_plot_ignores_a_missing_evaluation():
    shapes(loss_plot([{"step": 0, "eval_loss": None}, json.loads('{"step": 1, "loss": 1e-9}')], "run"))


def test_the_legend_names_what_is_drawn():
    line = {"step": 1, "loss": 2.0}
    assert "eval" not in shapes(loss_plot([line], "run"))[1]
    assert "eval" in shapes(loss_plot([line | {"eval_loss": 1.0}], "run"))[1]
