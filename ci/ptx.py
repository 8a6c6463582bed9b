"""Compiles the operator library's and the conformance suite's CUDA sources to PTX with NVIDIA's run-time compiler, the operator library's also to machine code, and compares the result with what is committed.

Run by ci/ptx.sh with the interpreter of an environment that has the compiler's wheel. `--bless` writes instead of comparing. The
operator library's images are in its folder: a packed file for each, and the SHA-256 of what it unpacks to in kernels.lock.
"""

import concurrent.futures
import ctypes
import difflib
import hashlib
import importlib.metadata
import lzma
import os
import pathlib
import re
import sys

import nvidia.cu13

# The lowest virtual architecture that CUDA 13 compiles for (Turing). The kernels use no instruction
# beyond it (shuffles and votes with masks, f16 conversions), and the driver translates PTX for
# every later one.
ARCHITECTURE = "compute_75"
# Sources that need the instructions of a later one.
LATER = {"attention_decode.cu": "compute_80", "attention_tiles.cu": "compute_80", "attention_warpgroups.cu": "compute_90a", "box.cu": "compute_90", "cluster.cu": "compute_90", "linear_boxes.cu": "compute_90", "linear_row.cu": "compute_90", "linear_tiles.cu": "compute_80"}
# Sources that need instructions of one architecture alone, and its name with them.
ALONE = {"attention_warpgroups.cu": "sm_90a", "linear_boxes.cu": "sm_90", "linear_row.cu": "sm_90"}
# The first architecture of each major number from 8 on: later ones with this number run its code.
MACHINES = ["sm_80", "sm_90", "sm_100", "sm_120"]
# Compiled to see that the sources compile; these devices run the code for sm_80.
COMPILED = ["sm_86", "sm_89"]
# No product is fused with a sum but where the source says so, division and roots round correctly,
# denormals are kept.
OPTIONS = [
    "--std=c++17",
    "--fmad=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--ftz=false",
    "--no-source-include",
    # For the functions that have no name to mark.
    "--device-as-default-execution-space",
]

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A folder may have a common.cuh, prepended to each of its sources. A tensor.cuh follows it in front
# of those that need a later architecture, then a bulk.cuh where one architecture alone has the
# instructions, and a decode.cuh in front of attention for a row of each of several sequences.
FOLDERS = [ROOT / f"{crate}/src/kernels/cuda" for crate in ("models/operators", "testing/conformance", "testing/stress")]
# The others' kernels are a few, and show that PTX works.
WITH_MACHINE_CODE = FOLDERS[0]
DECODE = ["attention.cu", "attention_decode.cu"]
# What users write, and what the emulator runs: compiled to see that it is CUDA C++.
NEWEST = "compute_90a"
PROGRAMS = [*sorted(ROOT.glob("examples/*.cu")), *sorted(ROOT.glob("testing/emulator/tests/*.cu"))]
IMAGES = ROOT / "models/operators/images"
LOCK = ROOT / "models/operators/kernels.lock"


class Compiler:
    def __init__(self):
        lib = pathlib.Path(list(nvidia.cu13.__path__)[0]) / "lib"
        # The compiler loads its built-in functions by name.
        ctypes.CDLL(str(next(lib.glob("libnvrtc-builtins.so.*"))), mode=ctypes.RTLD_GLOBAL)
        self.nvrtc = ctypes.CDLL(str(next(lib.glob("libnvrtc.so.*"))))
        self.nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def check(self, code):
        if code != 0:
            raise RuntimeError(self.nvrtc.nvrtcGetErrorString(code).decode())

    def version(self):
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.check(self.nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return f"{major.value}.{minor.value}"

    def output(self, program, size_of, get):
        size = ctypes.c_size_t()
        self.check(size_of(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self.check(get(program, buffer))
        return buffer.raw

    def compile(self, name, source, architecture):
        """PTX for `compute_…`, machine code for `sm_…`."""
        program = ctypes.c_void_p()
        self.check(
            self.nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        )
        given = [f"--gpu-architecture={architecture}", *OPTIONS]
        options = (ctypes.c_char_p * len(given))(*[o.encode() for o in given])
        code = self.nvrtc.nvrtcCompileProgram(program, len(given), options)
        log = self.output(program, self.nvrtc.nvrtcGetProgramLogSize, self.nvrtc.nvrtcGetProgramLog)
        log = log.rstrip(b"\0").decode().strip()
        if log:
            print(log, file=sys.stderr)
        if code != 0 or log:
            raise RuntimeError(f"{name} does not compile without a message for {architecture}")
        if architecture.startswith("sm_"):
            return self.output(program, self.nvrtc.nvrtcGetCUBINSize, self.nvrtc.nvrtcGetCUBIN)
        return self.output(program, self.nvrtc.nvrtcGetPTXSize, self.nvrtc.nvrtcGetPTX).rstrip(b"\0").decode()


def normalised(text):
    """Lines without space at their ends, and one newline at the end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).strip() + "\n"


def source_of(path):
    common, tensor, bulk, decode = (path.parent / f"{name}.cuh" for name in ("common", "tensor", "bulk", "decode"))
    files = [common] * common.exists() + [tensor] * (path.name in LATER and tensor.exists()) + [bulk] * (path.name in ALONE)
    files += [decode] * (path.name in DECODE) + [path]
    return "\n".join(f'#line 1 "{file.name}"\n{file.read_text()}' for file in files)


def show_difference(old, new):
    difference = difflib.unified_diff(old.splitlines(), new.splitlines(), "committed", "compiled", lineterm="", n=1)
    for _, line in zip(range(40), difference):
        print(line)


def compare_text(committed, ptx, bless):
    """Whether the committed text is the compiled one; prints the difference."""
    ptx = normalised(ptx)
    if bless:
        committed.write_text(ptx)
    old = normalised(committed.read_text()) if committed.exists() else ""
    entries = ptx.count(".visible .entry")
    print(f"{committed.name}: {entries} kernels, {len(ptx)} bytes{'' if old == ptx else ', NOT what is committed'}")
    show_difference(old, ptx)
    return old == ptx


class Lock:
    """The committed images: kernels.lock, and the packed files."""

    def __init__(self):
        lines = LOCK.read_text().splitlines() if LOCK.exists() else []
        # By name and architecture: the compiler and the hash.
        self.old = {tuple(line.split()[:2]): tuple(line.split()[2:]) for line in lines}
        self.new = {}

    def compare(self, name, architecture, image, bless):
        """Whether the committed image is the compiled one, or is it now."""
        key = (name, architecture)
        file = IMAGES / f"{name}.{architecture}.xz"
        self.new[key] = (f"nvrtc-{importlib.metadata.version('nvidia-cuda-nvrtc')}", hashlib.sha256(image).hexdigest())
        unpacked = lzma.decompress(file.read_bytes()) if file.exists() else b""
        # Another release of the packer gives other files: only what is in them counts.
        if bless and unpacked != image:
            file.write_bytes(lzma.compress(image))
            print(f"{file.name}: written, {file.stat().st_size} bytes")
        same = bless or (unpacked == image and self.old.get(key) == self.new[key])
        print(f"{name}.{architecture}: {len(image)} bytes{'' if same else ', NOT what is committed'}")
        if not same and architecture.startswith("compute_"):
            show_difference(unpacked.decode(), image.decode())
        return same

    def finish(self, bless):
        """Whether everything that is committed was compiled, or is it now."""
        wanted = {f"{name}.{architecture}.xz" for name, architecture in self.new}
        left = sorted(file for file in IMAGES.iterdir() if file.name not in wanted)
        for file in left:
            print(f"{file.name}: of no source", file=sys.stderr)
            if bless:
                file.unlink()
        if bless:
            LOCK.write_text("".join(" ".join(key + self.new[key]) + "\n" for key in sorted(self.new)))
        return bless or (not left and self.old.keys() == self.new.keys())


# The first architecture on which a kernel may begin while the one in front runs.
DEPENDENT = "compute_90"


def breaks_the_wait(name, ptx):
    """Whether a kernel breaks the rule of `wait_for_previous`, as far as the text's order shows; prints which."""
    broken = False
    for entry in ptx.split(".visible .entry ")[1:]:
        kernel, wait = entry.split("(")[0], entry.find("griddepcontrol.wait")
        access = re.search(r"\b(ld|st)\.(global|volatile|relaxed|[usfb]\d)|\b(atom|red)\.|cp\.async", entry)
        for wrong, why in (
            (wait < 0, "does not wait for the kernel in front"),
            (wait >= 0 and access is not None and access.start() < wait, "accesses memory before it waits"),
            ("ld.global.nc" in entry, "reads past the coherence of memory that a kernel in front may write"),
        ):
            if wrong:
                print(f"{name}: {kernel} {why}", file=sys.stderr)
                broken = True
    return broken


def main():
    bless = sys.argv[1:] == ["--bless"]
    lock = Lock()
    compiler = Compiler()
    print(f"NVRTC {compiler.version()}, {ARCHITECTURE}, {', '.join(MACHINES + COMPILED)}")
    # The compiler's calls let other threads run.
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    jobs = []
    for path in [path for folder in FOLDERS for path in sorted(folder.glob("*.cu"))]:
        machines = MACHINES + COMPILED if path.parent == WITH_MACHINE_CODE else []
        dependent = [DEPENDENT] if machines else []
        if path.name in ALONE:
            machines, dependent = [ALONE[path.name]], []
        for architecture in [LATER.get(path.name, ARCHITECTURE), *dependent, *machines]:
            job = pool.submit(compiler.compile, path.name, source_of(path), architecture)
            jobs.append((path, architecture, job))
    programs = [(path, pool.submit(compiler.compile, path.name, path.read_text(), NEWEST)) for path in PROGRAMS]
    failed = False
    for path, job in programs:
        print(f"{path.name}: {job.result().count('.visible .entry')} kernels")
    for path, architecture, job in jobs:
        output = job.result()
        if architecture == DEPENDENT and path.parent == WITH_MACHINE_CODE:
            failed |= breaks_the_wait(path.name, output)
        elif isinstance(output, str):
            if path.name in ALONE:
                # Its machine code is all that there is.
                failed |= breaks_the_wait(path.name, output)
                continue
            if path.parent == WITH_MACHINE_CODE:
                failed |= not lock.compare(path.stem, architecture, normalised(output).encode(), bless)
            else:
                failed |= not compare_text(path.parent / "ptx" / f"{path.stem}.ptx", output, bless)
        elif architecture not in COMPILED:
            failed |= not lock.compare(path.stem, architecture.rstrip("a"), output, bless)
    failed |= not lock.finish(bless)
    if failed:
        print("run ci/ptx.sh --bless after a change of the sources", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
