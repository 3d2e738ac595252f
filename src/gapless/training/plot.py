"""The loss plot of a run folder: one small SVG, no plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gapless.training.metrics import Metrics

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 28, 40
MAX_POINTS = 1000

Point = tuple[float, float]


def loss_plot(lines: Sequence[Metrics], title: str) -> str:
    """The SVG of the losses by step.

    Args:
        lines: the lines of metrics.jsonl; training losses are drawn faint with their moving average, evaluation
            losses as dots.
        title: drawn above.
    """
    train = _thin([(line["step"], line["loss"]) for line in lines if "loss" in line])
    evaluation = [(line["step"], line["eval_loss"]) for line in lines if line.get("eval_loss") is not None]
    points = train + evaluation or [(0.0, 0.0)]
    last = max(max(x for x, _ in points), 1)
    low, high = min(y for _, y in points), max(y for _, y in points)
    step = _round_step((high - low) / 5 or 1.0)
    low, high = math.floor(low / step) * step, max(math.ceil(high / step) * step, low + step)

    def place(point: Point) -> Point:
        x = LEFT + point[0] / last * (WIDTH - LEFT - RIGHT)
        return x, TOP + (high - point[1]) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [*_axes(last, low, high, step, place), _text(LEFT, 18, _escape(title), "start", 14)]
    parts += [_line([place(point) for point in train], "#9db8d9", 1)]
    parts += [_line([place(point) for point in _smooth(train)], "#1f5fa8", 2)]
    parts += [_line([place(point) for point in evaluation], "#d1495b", 1.5)]
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#d1495b"/>' for x, y in map(place, evaluation)]
    parts.append(_text(WIDTH - RIGHT, 18, "train", "end", 12, "#1f5fa8"))
    if evaluation:
        parts.append(_text(WIDTH - 56, 18, "eval", "end", 12, "#d1495b"))
    body = "\n".join(part for part in parts if part)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _axes(last: float, low: float, high: float, step: float, place) -> list[str]:
    parts = []
    for index in range(round((high - low) / step) + 1):
        value = low + index * step
        _, y = place((0, value))
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{value:.4g}", "end"))
    stride = max(1, round(_round_step(last / 6)))
    for value in range(0, int(last) + 1, stride):
        x, _ = place((value, low))
        parts.append(_text(x, HEIGHT - BOTTOM + 18, str(value), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "step", "middle"))
    return parts


def _round_step(size: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `size`."""
    power = 10.0 ** math.floor(math.log10(size))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= size), 10 * power)


def _thin(points: list[Point]) -> list[Point]:
    """Means of neighbours, so that a long run does not make a huge file."""
    size = -(-len(points) // MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size or 1)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _smooth(points: list[Point]) -> list[Point]:
    """Exponential moving average over about a thirtieth of the points, unbiased at the start."""
    keep = 1 - 1 / max(1.0, len(points) / 30)
    total = weight = 0.0
    smooth = []
    for x, y in points:
        total, weight = keep * total + y, keep * weight + 1
        smooth.append((x, total / weight))
    return smooth


def _line(points: list[Point], color: str, width: float) -> str:
    if len(points) < 2:
        return ""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str, size: int = 11, color: str = "#444") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}">{text}</text>'


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
