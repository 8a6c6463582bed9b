"""All measurements of this folder on one machine: a table, and a JSON line for each result.

    all.py [--seconds N] [--steps N] [--rounds N] [--model NAME] [--out FOLDER] [PART ...]

The defaults are 700 s, 30 steps, 3 rounds of turns, both models, the folder $OUT or ., and all parts.

Parts, in their order:

    driver     pinned memory of the host, device memory that goes while a copy runs (driver.py)
    build      the extension of leasehold.torch
    train      training steps of both models by every allocator (train.py)
    turns      training by PyTorch's allocator and Leasehold's, several times in turns
    sleep      weights that leave the device and come back (sleep.py)
    wake       a region that sleeps and wakes in a loop while the device is full (wake.py)
    plug-in    the interface without a compiler (check.py)
    programs   random programs, PyTorch's allocator beside it (check.py)
    features   the other features (check.py)

Each measurement is a process of its own, one after the other. None begins after N seconds, and one that is longer than the time left
fails. `results.jsonl` in the folder has all lines. The status is the number of failures. Needs PyTorch with CUDA, transformers, and the
package `leasehold` on the path.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = ["gpt2", "llama1b"]
# PyTorch's setting and the options of train.py.
ALLOCATORS = {
    "native": ("", []),
    "expandable": ("expandable_segments:True", []),
    "cudaMallocAsync": ("backend:cudaMallocAsync", []),
    "leasehold, balanced": ("", ["--policy", "balanced"]),
    "leasehold, compact": ("", ["--policy", "compact"]),
}
# The options of wake.py.
WAKES = ["native", "balanced", "compact", "balanced --budget 30GiB"]
PLUGIN = ("", ["--policy", "balanced", "--plugin"])
GIB = 1 << 30


class Run:
    """The processes, and what they said."""

    def __init__(self, seconds, out):
        self.start, self.seconds, self.failed = time.monotonic(), seconds, 0
        os.makedirs(out, exist_ok=True)
        self.environment = {**os.environ, "OUT": out, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
        self.file = open(os.path.join(out, "results.jsonl"), "w")

    def note(self, line):
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def process(self, part, arguments, setting=""):
        """Runs Python with these arguments. Returns the lines that it wrote."""
        left, begun = self.seconds - (time.monotonic() - self.start), time.monotonic()
        if left <= 0:
            print(f"LEFT OUT {part}: no time is left", flush=True)
            self.note({"part": part, "left_out": True})
            return []
        environment = {**self.environment, "PYTORCH_CUDA_ALLOC_CONF": setting}
        if not setting:
            del environment["PYTORCH_CUDA_ALLOC_CONF"]
        # A session of its own, so that its children end with it.
        child = subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            output, errors = child.communicate(timeout=left)
            status = child.returncode
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            output, errors = child.communicate()
            status = f"longer than {left:.0f} s"
        lines, seconds = [line for line in output.splitlines() if line], time.monotonic() - begun
        command = [os.path.basename(word) if word.startswith(HERE) else word for word in arguments]
        self.note({"part": part, "command": command, "setting": setting, "status": status, "seconds": round(seconds, 1), "lines": lines})
        if status != 0:
            self.failed += 1
            self.note({"part": part, "errors": errors[-4000:]})
            print(f"FAIL {part}: status {status}: {errors[-1500:]}", flush=True)
        print(f"-- {part}: {seconds:.0f} s, {time.monotonic() - self.start:.0f} s in all", flush=True)
        return lines

    def show(self, part, *arguments):
        """Runs a program of this folder, and prints what it wrote."""
        for line in self.process(part, [os.path.join(HERE, arguments[0]), *arguments[1:]]):
            print(line[:600], flush=True)


def train(run, steps, models):
    """Training by every allocator. Prints the table."""
    turns = [(model, name, *ALLOCATORS[name]) for model in models for name in ALLOCATORS]
    turns.append((models[0], "leasehold, plug-in", *PLUGIN))
    rows = []
    for model, name, setting, options in turns:
        lines = run.process(f"{model} {name}", [os.path.join(HERE, "train.py"), model, str(steps), *options], setting)
        found = [json.loads(line) for line in lines if line.startswith('{"model"')]
        rows += [(name, line) for line in found]
        for line in found:
            run.note({"part": "train", "name": name, **line})
    print(f"| program, {steps} steps | allocator | allocated, GiB | reserved | reserved by allocated | device used | step on average, ms | median | loss |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, line in rows:
        sizes = [f"{line[key] / GIB:.2f}" for key in ("allocated", "reserved", "device_used")]
        ratio = f"{line['reserved'] / line['allocated']:.3f}"
        times = [f"{line[key]:.1f}" for key in ("step_ms_mean", "step_ms_median")]
        print("| " + " | ".join([line["model"], name, sizes[0], sizes[1], ratio, sizes[2], *times, f"{line['losses']:.4f}"]) + " |", flush=True)


def turns(run, steps, models, rounds):
    """Training in turns. The steps of a process have the same batches, and the host's disturbances only lengthen them: the shortest time of
    each step over the turns, added up, compares allocators."""
    for model in models:
        found = {}
        for turn in range(rounds):
            for name in ("native", "leasehold, balanced"):
                options = [*ALLOCATORS[name][1], *(["--kernels"] if turn == 0 else [])]
                lines = run.process(f"{model} {name}, turn {turn}", [os.path.join(HERE, "train.py"), model, str(steps), *options])
                for line in (json.loads(line) for line in lines if line.startswith('{"model"')):
                    found.setdefault(name, []).append(line)
                    run.note({"part": "turns", "name": name, **line})
        if len(found) < 2:
            continue
        shortest = {name: [min(step) for step in zip(*(line["step_ms"] for line in all))] for name, all in found.items()}
        mean = {name: sum(times) / len(times) for name, times in shortest.items()}
        print(f"| {model}, {steps} steps in turns | step on average, ms, each turn | shortest of each step | by native's | device's work in a step, ms |")
        print("|---|---|---|---|---|")
        for name, all in found.items():
            means = ", ".join(f"{line['step_ms_mean']:.1f}" for line in all)
            print(f"| {name} | {means} | {mean[name]:.1f} | {mean[name] / mean['native']:.3f} | {all[0]['kernels_ms']:.2f} |", flush=True)


def checks(kind):
    """Names of checks in check.py."""
    listed = subprocess.run([sys.executable, os.path.join(HERE, "check.py"), "--list"], stdout=subprocess.PIPE, text=True, check=True)
    names = listed.stdout.splitlines()
    of = {
        "plug-in": [n for n in names if n.startswith("plug-in")],
        "programs": [n for n in names if n.startswith("random programs")],
    }
    return of.get(kind) or [n for n in names if n not in of["plug-in"] + of["programs"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=700)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("parts", nargs="*")
    options = parser.parse_args()
    run = Run(options.seconds, os.path.abspath(options.out))
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    if shutil.which(query[0]):
        machine = subprocess.run(query, stdout=subprocess.PIPE, text=True).stdout.strip()
        print(machine, flush=True)
        run.note({"part": "machine", "text": machine})
    parts = {
        "driver": lambda: run.show("driver", "driver.py"),
        "build": lambda: run.process("build", ["-m", "leasehold.torch", "build"]),
        "train": lambda: train(run, options.steps, options.model or MODELS),
        "turns": lambda: turns(run, options.steps, options.model or MODELS, options.rounds),
        "sleep": lambda: [run.show(f"sleep, {n} layers", "sleep.py", "--layers", n) for n in ("32", "2")],
        "wake": lambda: [run.show(f"wake, {name}", "wake.py", *name.split()) for name in WAKES],
        "plug-in": lambda: run.show("plug-in", "check.py", *checks("plug-in")),
        "programs": lambda: run.show("programs", "check.py", "--seconds", "60", *checks("programs")),
        "features": lambda: run.show("features", "check.py", *checks("features")),
    }
    unknown = [part for part in options.parts if part not in parts]
    if unknown:
        parser.error(f"no part {unknown[0]}: {', '.join(parts)}")
    for part in options.parts or parts:
        parts[part]()
    print(f"{run.failed} failures, {time.monotonic() - run.start:.0f} s", flush=True)
    return run.failed


if __name__ == "__main__":
    sys.exit(main())
