"""What a person sees."""

import io
from dataclasses import dataclass, field

import pytest
from rich.console import Console

from gapless.training.display import BarDisplay, Clock, PlainDisplay, duration, make_display, short, step_line

METRICS = {
    "step": 12,
    "loss": 1.23456,
    "grad_norm": 0.5123,
    "learning_rate": 1.98e-4,
    "tokens_per_second": 312.4,
    "trained_tokens": 12345,
    "memory_gib": 1.26,
}


def test_line():
    assert step_line(METRICS, 200, 192.4) == (
        "step 12/200  loss 1.2346  3:12 left  312 tokens/s  grad 0.512  lr 0.000198  12.3k trained  1.3 GiB"
    )
    assert "left" not in step_line(METRICS, 200, None)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1k"), (12345, "12.3k"), (999_600, "1000k"), (4_560_000, "4.56M"), (2e9, "2G")],
)
def test_short(count, text):
    assert short(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (7322, "2:02:02")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_clock_leaves_out_warm_up_and_pauses(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("gapless.training.display.time.perf_counter", lambda: now[0])
    clock = Clock(seconds=5.0)
    clock.resume()
    assert clock.step(110.0) == 10.0
    assert clock.step(130.0) == 20.0
    assert clock.remaining(7) is None  # two steps of warm-up
    assert clock.step(131.0) == 1.0
    now[0] = 500.0  # an evaluation
    clock.resume()
    assert clock.step(503.0) == 3.0
    assert clock.remaining(7) == pytest.approx(7 * 2.0)
    assert clock.seconds == 5 + 10 + 20 + 1 + 3


def test_plain_lines_without_a_terminal(capsys):
    display = make_display()
    assert isinstance(display, PlainDisplay)
    display.message("hello [bold]")
    display.step(METRICS, 200, 5.0)
    display.close()
    assert capsys.readouterr().out.splitlines() == ["hello [bold]", step_line(METRICS, 200, 5.0)]


def test_bar_on_a_terminal():
    screen = io.StringIO()
    display = BarDisplay(Console(file=screen, force_terminal=True, width=160))
    display.message("hello [bold]")
    display.step(METRICS, 200, 5.0)
    display.close()
    assert "hello [bold]" in screen.getvalue()
    assert step_line(METRICS, 200, 5.0) in screen.getvalue()


@pytest.mark.parametrize("width", [40, 80, 119])
def test_a_narrow_terminal_cuts_what_matters_least(width):
    screen = io.StringIO()
    display = BarDisplay(Console(file=screen, force_terminal=True, width=width))
    display.step(METRICS, 200, 5.0)
    display.close()
    assert step_line(METRICS, 200, 5.0)[: width - 1] in screen.getvalue()


@dataclass
class FakeWorld:
    rank: int
    size: int
    lines: list[str] = field(default_factory=list)

    def log(self, text):
        self.lines.append(text)


@pytest.mark.parametrize(("rank", "shown"), [(0, True), (1, False)])
def test_every_rank_has_a_log_and_one_the_screen(capsys, rank, shown):
    world = FakeWorld(rank, 2)
    display = make_display(world)
    display.message("hello")
    display.step(METRICS, 200, 5.0)
    display.close()
    assert world.lines == ["hello", step_line(METRICS, 200, 5.0)]
    assert capsys.readouterr().out.splitlines() == (world.lines if shown else [])


def test_one_process_has_no_log(capsys):
    assert isinstance(make_display(FakeWorld(0, 1)), PlainDisplay)
