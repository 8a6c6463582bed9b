"""The C++ extension: found, or built from `csrc` with the user's compiler.

The compiler is called directly, since `torch.utils.cpp_extension` needs setuptools and ninja.
"""

import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import List, Optional

import torch

import leasehold
from leasehold._errors import UnavailableError
from leasehold._library import include as header_folder

NAME = "leasehold_torch_extension"
# The oldest and the newest version of PyTorch that the extension was built and run with.
OLDEST, NEWEST = (2, 8), (2, 15)
SOURCES = ("arena.cpp", "core.cpp", "memories.cpp", "allocator.cpp", "module.cpp")
_loaded: Optional[ModuleType] = None
_said = False


class BuildError(UnavailableError):
    """The extension cannot be built here. The text says what is missing."""


def _sources() -> str:
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "csrc")


def key() -> str:
    """Returns what the extension depends on: Python, PyTorch, Leasehold, the sources and this file."""
    digest = hashlib.sha256()
    files = [os.path.join(_sources(), name) for name in sorted(os.listdir(_sources()))]
    for file in files + [os.path.join(header_folder(), "leasehold.h"), os.path.abspath(__file__)]:
        with open(file, "rb") as source:
            digest.update(source.read())
    python = "cp%d%d" % sys.version_info[:2]
    parts = (leasehold.__version__, python, torch.__version__, digest.hexdigest()[:12])
    return "-".join(parts).replace("+", "_")


def cache() -> str:
    """Returns the folder of built extensions: `LEASEHOLD_TORCH_CACHE`, or one in the user's cache."""
    base = os.environ.get("LEASEHOLD_TORCH_CACHE")
    if base:
        return os.path.abspath(base)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "leasehold", "torch")


def path() -> str:
    """Returns the extension's file, which `LEASEHOLD_TORCH_EXTENSION` overrides."""
    other = os.environ.get("LEASEHOLD_TORCH_EXTENSION")
    return os.path.abspath(other) if other else os.path.join(cache(), key(), NAME + ".so")


def _untried() -> Optional[str]:
    """Returns what to say of a version of PyTorch that was not tried, None for the others."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    version = (int(found[1]), int(found[2])) if found else NEWEST
    if OLDEST <= version <= NEWEST:
        return None
    tried = "%d.%d to %d.%d" % (OLDEST + NEWEST)
    return "leasehold.torch was tried with PyTorch %s, and this is %s" % (tried, torch.__version__)


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildError("no C++ compiler was found (g++ 10 or newer; CXX names another one)")


def _cuda_folders() -> List[str]:
    """The folders with CUDA's headers: a toolkit, or the packages that came with PyTorch."""
    major = (torch.version.cuda or "").split(".")[0]
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc")
    if nvcc:
        homes.append(os.path.dirname(os.path.dirname(os.path.realpath(nvcc))))
    toolkits = [[os.path.join(home, "include")] for home in homes if home]
    site = os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "nvidia")
    packages: List[str] = []
    if os.path.isdir(site):
        # From CUDA 13 on, the packages of a version share a folder. Before, each has its own.
        names = [name for name in os.listdir(site) if name == "cu" + major or not re.fullmatch(r"cu\d+", name)]
        packages = [os.path.join(site, name, "include") for name in sorted(names)]
        packages = [folder for folder in packages if os.path.isdir(folder)]
    for folders in [*toolkits, packages]:
        has = [any(os.path.exists(os.path.join(f, header)) for f in folders)
               for header in ("cuda_runtime_api.h", "crt/host_config.h")]
        if all(has):
            return folders
    package = "nvidia-cuda-crt==%s.*" % torch.version.cuda if int(major) >= 13 else "nvidia-cuda-nvcc-cu" + major
    raise BuildError(
        "CUDA's headers were not found: set CUDA_HOME to a toolkit, or: pip install '%s'" % package
    )


def build(verbose: bool = False, force: bool = False) -> str:
    """Builds the extension unless it is there, and returns its file.

    It takes about half a minute. Several processes may do so at once.

    Raises:
        BuildError: there is no compiler, there are no headers, or the compiler failed.
    """
    target = path()
    if os.path.exists(target) and not force:
        return target
    if os.environ.get("LEASEHOLD_TORCH_EXTENSION"):
        raise BuildError("LEASEHOLD_TORCH_EXTENSION names no file: " + target)
    if torch.version.cuda is None:
        raise BuildError("this PyTorch has no CUDA")
    compiler = _compiler()
    root = os.path.dirname(torch.__file__)
    folders = [
        os.path.join(root, "include"),
        os.path.join(root, "include", "torch", "csrc", "api", "include"),
        sysconfig.get_paths()["include"],
        *_cuda_folders(),
    ]
    flags = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-I" + header_folder()]
    flags += ["-DTORCH_EXTENSION_NAME=" + NAME]
    flags += ["-D_GLIBCXX_USE_CXX11_ABI=%d" % torch._C._GLIBCXX_USE_CXX11_ABI]
    # PyTorch's types are known to modules whose pybind11 has the same names for compiler, library and ABI. Later versions
    # of PyTorch do not have these names: their pybind11 finds out alone.
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
        value = getattr(torch._C, "_PYBIND11_" + name, None)
        if value is not None:
            flags.append('-DPYBIND11_%s="%s"' % (name, value))
    for folder in folders:
        flags += ["-isystem", folder]

    def run(command: List[str]) -> None:
        if verbose:
            print(" ".join(command), flush=True)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            untried = _untried()
            why = " (%s)" % untried if untried else ""
            raise BuildError("the extension does not compile%s:\n%s" % (why, done.stdout[-4000:]))

    os.makedirs(os.path.dirname(target), exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(target)) as folder:
        objects = [os.path.join(folder, name + ".o") for name in SOURCES]
        compiles = [
            [compiler, *flags, "-c", os.path.join(_sources(), name), "-o", made]
            for name, made in zip(SOURCES, objects)
        ]
        with ThreadPoolExecutor(min(len(compiles), os.cpu_count() or 1)) as pool:
            list(pool.map(run, compiles))
        made = os.path.join(folder, NAME + ".so")
        libraries = ["-L" + os.path.join(root, "lib")]
        libraries += ["-l" + name for name in
                      ("c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch", "torch_python")]
        # A compiler may link the C++ library statically. If such a copy is not kept inside, parts of it mix with
        # PyTorch's copy, and a number that is written to a stream crashes.
        flags = ["-shared", "-s", "-Wl,--exclude-libs,ALL"]
        run([compiler, *flags, "-o", made, *objects, *libraries, "-ldl"])
        # Other processes see the whole file or none.
        os.replace(made, target)
    return target


def load(verbose: bool = False) -> ModuleType:
    """Returns the extension, which is built if it is not there.

    A version of PyTorch that was not tried is named in a warning, once. If the extension compiles
    against that version and is loaded, it is used.

    Raises:
        BuildError: as for `build`, or the file cannot be loaded.
    """
    global _loaded, _said
    untried = _untried()
    if untried and not _said:
        _said = True
        warnings.warn(untried + ": it goes on if the interface fits", RuntimeWarning, stacklevel=3)
    if _loaded is None:
        file = build(verbose)
        loader = importlib.machinery.ExtensionFileLoader(NAME, file)
        spec = importlib.util.spec_from_file_location(NAME, file, loader=loader)
        assert spec is not None
        try:
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except ImportError as error:
            raise BuildError("the extension %s cannot be loaded: %s" % (file, error)) from error
        _loaded = module
    return _loaded
