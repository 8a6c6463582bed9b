"""What the build of the extension says of PyTorch's version and of CUDA's headers. Neither is needed here."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))


class Build(unittest.TestCase):
    def run_with(self, program, version, cuda, headers=()):
        """Runs a program that has the stand-in for PyTorch as `torch` and the build as `_build`."""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(os.path.join(HERE, "fake", "torch"), os.path.join(folder, "torch"))
            for header in headers:
                path = os.path.join(folder, "nvidia", header)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                open(path, "w").close()
            begin = "import torch\ntorch.__version__, torch.version.cuda = %r, %r\n" % (version, cuda)
            begin += "import warnings\nfrom leasehold.torch import _build\n"
            paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PATH": "/usr/bin:/bin"}
            environment["LEASEHOLD_TORCH_CACHE"] = os.path.join(folder, "cache")
            for name in ("CUDA_HOME", "CUDA_PATH", "LEASEHOLD_TORCH_EXTENSION"):
                environment.pop(name, None)
            done = subprocess.run([sys.executable, "-c", begin + program], env=environment, timeout=60,
                                  text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            self.assertEqual(done.returncode, 0, done.stdout)
            return done.stdout.replace(folder, "")

    def test_versions(self):
        program = """
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(3):
        try:
            _build.load()
        except _build.BuildError:
            pass
print(len(said), *(warning.message for warning in said))
"""
        for version in ("2.8.0", "2.11.0+cu130", "2.15.1", "nightly"):
            self.assertEqual(self.run_with(program, version, None), "0\n", version)
        for version in ("2.7.1", "2.16.0.dev1", "3.0"):
            said = self.run_with(program, version, None)
            self.assertRegex(said, r"^1 .*tried with PyTorch 2\.8 to 2\.\d+, and this is " + version)

    @unittest.skipIf(os.path.exists("/usr/local/cuda/include") or shutil.which("nvcc"), "a toolkit is installed")
    def test_headers(self):
        program = """
try:
    print(*_build._cuda_folders())
except _build.BuildError as error:
    print(error)
"""
        runtime, crt = "include/cuda_runtime_api.h", "include/crt/host_config.h"
        of_13 = ["cu13/" + runtime, "cu13/" + crt]
        self.assertEqual(self.run_with(program, "2.15.0", "13.2", of_13), "/nvidia/cu13/include\n")
        self.assertRegex(self.run_with(program, "2.15.0", "13.2", of_13[:1]), "pip install 'nvidia-cuda-crt==13.2")
        of_12 = ["cuda_runtime/" + runtime, "cuda_nvcc/" + crt]
        found = self.run_with(program, "2.8.0", "12.8", of_12 + of_13)
        self.assertEqual(found, "/nvidia/cuda_nvcc/include /nvidia/cuda_runtime/include\n")
        # Headers of another CUDA do not complete those that are there.
        self.assertRegex(self.run_with(program, "2.8.0", "12.8", of_12[:1] + of_13[1:]), "nvidia-cuda-nvcc-cu12")


if __name__ == "__main__":
    unittest.main()
