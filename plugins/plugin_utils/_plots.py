# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""Plots as lists of shapes, which the page's template writes as SVG. Pure."""

from __future__ import annotations

import dataclasses
import math
import typing as t

WIDTH, HEIGHT = 820, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 44
ROW_HEIGHT, ROW_LABEL = 26, 190

Shape = dict[str, t.Any]


@dataclasses.dataclass(frozen=True)
class Series:
    """Points (x, y, least, greatest) of one colour. ``form``: bar, line, dot or mark (a short horizontal stroke)."""

    name: str
    form: str
    style: str
    points: tuple[tuple[float, float, float, float], ...]


def ticks(greatest: float, wanted: int = 5) -> list[float]:
    """Round values from 0 up to at least ``greatest``."""
    if greatest <= 0:
        return [0.0, 1.0]
    rough = greatest / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    count = math.ceil(greatest / step * 0.999)
    return [round(step * number, 10) for number in range(count + 1)]


def number(value: float) -> str:
    """A number as short as it can be read."""
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.3g}"


def chart(title: str, unit: str, series: t.Sequence[Series], labels: t.Mapping[float, str], logarithmic: bool = False) -> Shape | None:
    """A plot of series over a common x axis; None when there is no point at all. ``labels``: texts of the x axis by position."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return None
    scale = _scale(list(labels), logarithmic)
    levels = ticks(max(point[3] for one in drawn for point in one.points))
    bottom = HEIGHT - BOTTOM

    def height(value: float) -> float:
        return round(bottom - (bottom - TOP) * value / levels[-1], 1)

    shapes: list[Shape] = []
    for level in levels:
        shapes.append({"kind": "line", "style": "grid", "x1": LEFT, "x2": WIDTH - RIGHT, "y1": height(level), "y2": height(level)})
        shapes.append({"kind": "text", "style": "tick end", "x": LEFT - 8, "y": height(level) + 4, "text": number(level)})
    for position, label in labels.items():
        shapes.append({"kind": "text", "style": "tick middle", "x": scale(position), "y": bottom + 20, "text": label})
    bars = [one for one in drawn if one.form == "bar"]
    slot = 0.6 * (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    for one in drawn:
        place = bars.index(one) if one in bars else 0
        shapes += _shapes_of(one, scale, height, slot, place, max(1, len(bars)), unit)
    return {
        "title": title, "unit": unit, "width": WIDTH, "height": HEIGHT, "shapes": shapes,
        "legend": [{"name": one.name, "style": one.style} for one in drawn],
    }  # fmt: skip


def _scale(positions: t.Sequence[float], logarithmic: bool) -> t.Callable[[float], float]:
    """From a position to its place on the page, half a slot in from either edge."""
    convert = math.log if logarithmic else float
    low, high = convert(min(positions)), convert(max(positions))
    margin = 0.5 * (WIDTH - LEFT - RIGHT) / max(1, len(positions))
    span = WIDTH - LEFT - RIGHT - 2 * margin
    return lambda value: round(LEFT + margin + (span * (convert(value) - low) / (high - low) if high > low else span / 2), 1)


def _shapes_of(
    one: Series, scale: t.Callable[[float], float], height: t.Callable[[float], float], slot: float, place: int, bars: int, unit: str
) -> list[Shape]:
    shapes: list[Shape] = []
    width = round(slot / bars, 1)
    for x, y, least, greatest in one.points:
        title = f"{one.name}: {number(y)} {unit}" + (f" ({number(least)} to {number(greatest)})" if least != greatest else "")
        middle = scale(x)
        if one.form == "bar":
            left = round(middle - slot / 2 + place * width, 1)
            middle = round(left + width / 2, 1)
            shapes.append(
                {"kind": "rect", "style": one.style, "x": left, "y": height(y), "w": round(width - 2, 1), "h": round(height(0) - height(y), 1), "title": title}
            )
        elif one.form == "mark":
            shapes.append(
                {"kind": "line", "style": f"stroke {one.style}", "x1": middle - 18, "x2": middle + 18, "y1": height(y), "y2": height(y), "title": title}
            )
        else:
            shapes.append({"kind": "circle", "style": one.style, "x": middle, "y": height(y), "r": 4, "title": title})
        if least != greatest and one.form != "mark":
            shapes.append({"kind": "line", "style": "whisker", "x1": middle, "x2": middle, "y1": height(greatest), "y2": height(least)})
    if one.form == "line" and len(one.points) > 1:
        path = " L".join(f"{scale(x)},{height(y)}" for x, y, *dummy in one.points)
        shapes.insert(0, {"kind": "path", "style": f"stroke {one.style}", "d": f"M{path}"})
    return shapes


def timeline(rows: t.Sequence[str], spans: t.Sequence[t.Mapping[str, t.Any]], seconds: float) -> Shape | None:
    """Spans {"row", "begun", "ended", "style", "title"} in seconds since the start, one line for each row."""
    if not rows or seconds <= 0:
        return None
    levels = ticks(seconds)
    bottom = TOP + ROW_HEIGHT * len(rows)

    def place(moment: float) -> float:
        return round(ROW_LABEL + (WIDTH - ROW_LABEL - RIGHT) * moment / levels[-1], 1)

    shapes: list[Shape] = []
    for level in levels:
        shapes.append({"kind": "line", "style": "grid", "x1": place(level), "x2": place(level), "y1": TOP, "y2": bottom})
        shapes.append({"kind": "text", "style": "tick middle", "x": place(level), "y": bottom + 18, "text": f"{number(level)} s"})
    for index, row in enumerate(rows):
        shapes.append({"kind": "text", "style": "tick end", "x": ROW_LABEL - 8, "y": TOP + ROW_HEIGHT * index + 17, "text": row})
    for span in spans:
        left, right = place(span["begun"]), place(span["ended"])
        top = TOP + ROW_HEIGHT * list(rows).index(span["row"]) + 4
        # What took no time that can be drawn is still to be seen.
        width = round(max(1.5, right - left), 1)
        shapes.append({"kind": "rect", "style": span["style"], "x": left, "y": top, "w": width, "h": ROW_HEIGHT - 8, "title": span["title"]})
    return {"title": "Stages by node", "unit": "", "width": WIDTH, "height": bottom + 28, "shapes": shapes, "legend": []}
