#!/usr/bin/env python3
"""Makes the pictures of README.md and the book from real output.

    cargo build --release -p leasehold-cli -p leasehold-workbench
    docs/images/make.py [--programs target/release] [--only NAME]

report.png  a screenshot of `leasehold-workbench replay TRACE --report`, by a headless chromium
trace.svg   the first kernels of `leasehold run --trace`, and their submissions
program-trace.svg  streams, memory and host of the example quickstart, by LEASEHOLD_TRACE
decode.svg  the 8 B shape of bench/runs/2026-11-25-h200/decode.txt

`decode.svg` needs no binary, `program-trace.svg` needs cargo. `report.png` is left as it is where there is no chromium.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RUN = ROOT / "bench/runs/2026-11-25-h200/decode.txt"
TRACE = ROOT / "testing/sim/workloads/resnet50_train.csv.gz"
COLOURS = ["#3b6ea8", "#d0803a", "#5a9a5a", "#a3558f", "#8a8a3a", "#4aa0a0", "#b05a5a", "#7a6ab0"]
GREY, INK = "#8a8f98", "#22262c"


class Svg:
    """Shapes on a white ground, in a font that every system has."""

    def __init__(self, width: int, height: int) -> None:
        self.size = (width, height)
        self.parts = [f'<rect width="{width}" height="{height}" fill="#ffffff"/>']

    def rect(self, x: float, y: float, width: float, height: float, fill: str, title: str = "") -> None:
        inside = f"<title>{html.escape(title)}</title>" if title else ""
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}">{inside}</rect>')

    def line(self, points: list[tuple[float, float]], colour: str, dash: str = "") -> None:
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>')

    def text(self, x: float, y: float, text: str, size: int = 12, anchor: str = "start", colour: str = INK) -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{html.escape(text)}</text>')

    def write(self, path: pathlib.Path) -> None:
        width, height = self.size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="sans-serif">'
        path.write_text("\n".join([head, *self.parts, "</svg>\n"]), encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size} bytes")


def decode(path: pathlib.Path) -> None:
    """Tokens per second by length of the text, eager and as a graph, beside the memory's limit."""
    rows: list[tuple[int, float, float, float]] = []
    for part in RUN.read_text(encoding="utf-8").split("== ")[1:]:
        shape, length = part.split("\n", 1)[0].split()
        eager, graph = (float(re.search(rf"^{mode} .*?(\d+) tokens/s", part, re.M)[1]) for mode in ("eager", "graph"))
        share = float(re.search(r"([\d.]+) % of a device copy", part)[1])
        if shape == "8b":
            rows.append((int(length), eager, graph, graph / share * 100))
    svg = Svg(560, 300)
    left, right, top, bottom, most = 60, 540, 40, 240, 300.0
    svg.text(20, 22, "tokens/s, 8 B shape, bf16, one sequence, one H200", 13)
    for value in range(0, int(most) + 1, 50):
        y = bottom - value / most * (bottom - top)
        svg.line([(left, y), (right, y)], "#e6e8eb")
        svg.text(left - 8, y + 4, str(value), 11, "end", GREY)
    group = (right - left) / len(rows)
    for i, (length, eager, graph, limit) in enumerate(rows):
        x = left + i * group + group / 2
        for value, offset, colour in ((eager, -36, COLOURS[1]), (graph, 4, COLOURS[0])):
            height = value / most * (bottom - top)
            svg.rect(x + offset, bottom - height, 32, height, colour)
            svg.text(x + offset + 16, bottom - height - 4, f"{value:.0f}", 11, "middle")
        y = bottom - limit / most * (bottom - top)
        svg.line([(x - 44, y), (x + 44, y)], INK, "5 3")
        svg.text(x, bottom + 16, f"{length} tokens", 11, "middle", GREY)
    for x, colour, text in ((left, COLOURS[1], "launch by launch"), (left + 140, COLOURS[0], "replayed graph")):
        svg.rect(x, 268, 12, 12, colour)
        svg.text(x + 18, 278, text)
    svg.line([(left + 262, 274), (left + 290, 274)], INK, "5 3")
    svg.text(left + 296, 278, "if reads were as fast as a copy")
    svg.write(path)


def trace(programs: pathlib.Path, path: pathlib.Path, folder: pathlib.Path) -> None:
    """The first kernels of a token on the device's track, their submissions on the host's."""
    file = folder / "token.json"
    subprocess.run([programs / "leasehold", "run", "--tokens", "8", "--mode", "eager", "--trace", str(file)], check=True, capture_output=True)
    events = json.loads(file.read_text(encoding="utf-8"))
    events = events["traceEvents"] if isinstance(events, dict) else events
    spans = [e for e in events if e["ph"] == "X" and (e["pid"] == 1 or e["cat"] == "submission")]
    tracks = {1: "device", 2: "host"}
    first = min(e["ts"] for e in spans)
    device = [e for e in spans if e["pid"] == 1][:20]
    last = max(e["ts"] + e["dur"] for e in device)
    svg = Svg(920, 190)
    left, right = 70, 885
    scale = (right - left) / (last - first)
    svg.text(20, 20, f"a token of the bundled model on cpu:0: the first {len(device)} kernels and their submissions", 13)
    colours: dict[str, str] = {}
    for pid, y in ((1, 40), (2, 100)):
        svg.text(left - 8, y + 22, tracks[pid], 12, "end", GREY)
        svg.rect(left, y, right - left, 36, "#f3f4f6")
        for event in spans:
            if event["pid"] != pid or event["ts"] >= last:
                continue
            name = event["name"].split()[0]
            colour = colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
            x, end = left + (event["ts"] - first) * scale, left + (min(event["ts"] + event["dur"], last) - first) * scale
            svg.rect(x, y, max(end - x, 0.5), 36, colour, f"{event['name']}: {event['dur']:.1f} µs")
    for i in range(6):
        at = (last - first) * i / 5
        svg.text(left + at * scale, 152, f"{at:.0f} µs", 11, "middle", GREY)
    x = float(left)
    for name, colour in colours.items():
        svg.rect(x, 168, 10, 10, colour)
        svg.text(x + 14, 177, name, 11)
        x += 26 + 6.4 * len(name)
    svg.write(path)


def program(path: pathlib.Path, folder: pathlib.Path) -> None:
    """The quickstart's streams, memory and host threads, from its allocations to the last replay."""
    file = folder / "program.json"
    command = ["cargo", "run", "--quiet", "--release", "-p", "leasehold", "--example", "quickstart"]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env={**os.environ, "LEASEHOLD_TRACE": str(file)})
    page = json.loads(file.read_text(encoding="utf-8"))
    events = page["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    samples = [e for e in events if e["ph"] == "C"]
    first, last = min(e["ts"] for e in spans), max(e["ts"] + e["dur"] for e in spans)
    left, right, height = 130, 895, 34
    scale = (right - left) / (last - first)
    rows = sorted({(e["pid"], e["tid"]) for e in spans})
    svg = Svg(920, 60 + (height + 16) * (len(rows) + 1) + 56)
    svg.text(20, 20, f"examples/quickstart.rs on {page['otherData']['device']}, traced", 13)
    colours: dict[str, str] = {}
    tops = {row: 40 + i * (height + 16) for i, row in enumerate(rows)}
    for row, y in tops.items():
        kind = "device" if row[0] == 1 else "host"
        svg.text(left - 8, y + 14, kind, 12, "end", GREY)
        svg.text(left - 8, y + 28, names[row], 12, "end", GREY)
        svg.rect(left, y, right - left, height, "#f3f4f6")
    # Longer ones first: a slice within another one is drawn over it.
    for event in sorted(spans, key=lambda e: -e["dur"]):
        name = event["name"]
        fill = colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
        x = left + (event["ts"] - first) * scale
        svg.rect(x, tops[event["pid"], event["tid"]], max(event["dur"] * scale, 0.8), height, fill, f"{name}: {event['dur']:.1f} µs")
    y = 40 + len(rows) * (height + 16)
    most = max(s["args"]["live_bytes"] for s in samples)
    points = []
    for sample in samples:
        x = left + min(max(sample["ts"] - first, 0), last - first) * scale
        level = y + height - height * sample["args"]["live_bytes"] / most
        points += [(x, points[-1][1] if points else y + height), (x, level)]
    svg.text(left - 8, y + 14, "memory", 12, "end", GREY)
    svg.text(left - 8, y + 28, f"to {most / 2**20:.0f} MiB", 12, "end", GREY)
    svg.rect(left, y, right - left, height, "#f3f4f6")
    svg.line(points, COLOURS[0])
    for i in range(6):
        at = (last - first) * i / 5
        svg.text(left + at * scale, y + height + 18, f"{at / 1000:.0f} ms", 11, "middle", GREY)
    x = float(left)
    for name, fill in colours.items():
        svg.rect(x, y + height + 32, 10, 10, fill)
        svg.text(x + 14, y + height + 41, name, 11)
        x += 26 + 6.4 * len(name)
    svg.write(path)


def report(programs: pathlib.Path, path: pathlib.Path, folder: pathlib.Path) -> None:
    """The top of the page about the memory of a recorded training."""
    page, picture = folder / "memory.html", folder / "report.png"
    # The page's heading shows the command, which has no path of this machine.
    shutil.copy(TRACE, folder)
    command = [programs.resolve() / "leasehold-workbench", "replay", TRACE.name, "--report", page.name]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("report.png: left as it is, no chromium")
        return
    # The budget of virtual time lets the page be drawn to its foot.
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000", f"--user-data-dir={folder}/profile"]
    subprocess.run([browser, *options, "--window-size=1200,770", f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True)
    shutil.copyfile(picture, path)
    print(f"{path.name}: {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the pictures of README.md and the book.")
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "target/release", help="the folder of the commands")
    parser.add_argument("--only", metavar="NAME", help="one picture, by its file's name")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        pictures = {
            "decode.svg": decode,
            "program-trace.svg": lambda path: program(path, folder),
            "trace.svg": lambda path: trace(parsed.programs, path, folder),
            "report.png": lambda path: report(parsed.programs, path, folder),
        }
        if parsed.only not in (None, *pictures):
            parser.error(f"{parsed.only}: one of {', '.join(pictures)}")
        for picture, make in pictures.items():
            if parsed.only in (None, picture):
                make(HERE / picture)


if __name__ == "__main__":
    main()
