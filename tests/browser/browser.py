# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A real browser for pages on this disk: what it made of them, and what it painted."""

from __future__ import annotations

import html.parser
import json
import os
import shutil
import struct
import subprocess
import tempfile
import zlib

import numpy

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT, SCALE = 1000, 4200, 0.5
MEASURE = """<script>
document.body.insertAdjacentHTML("beforeend", "<pre id=boxes></pre>");
document.getElementById("boxes").textContent = JSON.stringify([...document.querySelectorAll("svg.plot")].map(
  (one) => { const box = one.getBoundingClientRect(); return {name: one.getAttribute("aria-label"), x: box.x, y: box.y, w: box.width, h: box.height}; }));
</script>"""


def browser() -> str:
    return next((path for name in NAMES if (path := shutil.which(name))), "")


def run(page: str, *arguments: str) -> str:
    """Open a file. Every name resolves to nothing, so a page that needs another source shows it."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={profile}",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={WIDTH},{HEIGHT}", f"--force-device-scale-factor={SCALE}", *arguments, f"file://{page}",
        ]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def dom(page: str) -> str:
    """The document as the browser holds it after it has read the page."""
    return run(page, "--dump-dom")


def boxes(page: str, folder: str) -> list[dict]:
    """Where the plots are, in pixels of a screenshot; asked in a copy of the page."""
    with open(page, encoding="utf-8") as stream:
        text = stream.read()
    copy = os.path.join(folder, "measured.html")
    with open(copy, "w", encoding="utf-8") as stream:
        stream.write(text.replace("</body>", f"{MEASURE}</body>"))
    found = json.loads(cells(dom(copy), "id")["boxes"])
    return [{**box, **{name: int(box[name] * SCALE) for name in "xywh"}} for box in found]


def screenshot(page: str, folder: str) -> numpy.ndarray:
    """The painted page: rows, columns, red green blue."""
    path = os.path.join(folder, "page.png")
    run(page, f"--screenshot={path}")
    with open(path, "rb") as stream:
        return read_png(stream.read())


class _Cells(html.parser.HTMLParser):
    """Texts of the elements that have an attribute."""

    def __init__(self, attribute: str) -> None:
        super().__init__()
        self.attribute, self.found, self.inside = attribute, {}, None

    def handle_starttag(self, tag: str, attrs: list) -> None:
        value = dict(attrs).get(self.attribute)
        if value:
            self.inside, self.found[value] = (value, tag), ""

    def handle_endtag(self, tag: str) -> None:
        if self.inside and self.inside[1] == tag:
            self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.found[self.inside[0]] += data


def cells(document: str, attribute: str) -> dict[str, str]:
    parser = _Cells(attribute)
    parser.feed(document)
    return parser.found


def read_png(data: bytes) -> numpy.ndarray:
    """An 8-bit PNG with three or four channels, which is what a browser writes."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, header, packed = 8, None, b""
    while place < len(data):
        length, kind = struct.unpack(">I4s", data[place : place + 8])
        body = data[place + 8 : place + 8 + length]
        if kind == b"IHDR":
            header = struct.unpack(">IIBBBBB", body)
        elif kind == b"IDAT":
            packed += body
        place += 12 + length
    width, height, depth, colour, *dummy = header
    assert depth == 8 and colour in (2, 6)
    channels = 3 if colour == 2 else 4
    raw = numpy.frombuffer(zlib.decompress(packed), dtype=numpy.uint8).reshape(height, 1 + width * channels)
    image = numpy.zeros((height, width, channels), dtype=numpy.uint8)
    above = numpy.zeros((width, channels), dtype=numpy.uint8)
    for number in range(height):
        above = unfilter(int(raw[number, 0]), raw[number, 1:].reshape(width, channels), above)
        image[number] = above
    return image[:, :, :3]


def unfilter(kind: int, row: numpy.ndarray, above: numpy.ndarray) -> numpy.ndarray:
    """One line of a PNG from its filtered bytes and the line above it."""
    if kind == 0:
        return row
    if kind == 1:
        return numpy.cumsum(row, axis=0, dtype=numpy.uint8)
    if kind == 2:
        return row + above
    left, corner = [0] * row.shape[1], [0] * row.shape[1]
    lines = []
    for pixel, upper in zip(row.tolist(), above.tolist()):
        if kind == 3:
            left = [(value + (one + up) // 2) & 255 for value, one, up in zip(pixel, left, upper)]
        else:
            left = [(value + nearest(one, up, diagonal)) & 255 for value, one, up, diagonal in zip(pixel, left, upper, corner)]
        corner = upper
        lines.append(left)
    return numpy.array(lines, dtype=numpy.uint8)


def nearest(left: int, up: int, corner: int) -> int:
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))


def painted(image: numpy.ndarray, box: dict) -> dict[str, int]:
    """Of a plot's box: how many pixels there are, and how many have a colour that is no grey, as only the marks have."""
    part = image[box["y"] : box["y"] + box["h"], box["x"] : box["x"] + box["w"]].astype(int)
    spread = part.max(axis=2) - part.min(axis=2)
    return {"pixels": int(spread.size), "coloured": int((spread > 60).sum())}
