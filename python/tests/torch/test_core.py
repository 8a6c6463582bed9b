"""The core of the extension over a simulated device: threads, streams, captures, contents."""

import os
import shutil
import subprocess
import tempfile
import unittest

from common import CSRC, simulated
from leasehold._library import include


class Core(unittest.TestCase):
    def test_random_programs(self):
        library = simulated()
        compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
        if compiler is None:
            self.skipTest("no C++ compiler")
        here = os.path.dirname(os.path.abspath(__file__))
        sources = [os.path.join(here, "core_test.cpp")]
        sources += [os.path.join(CSRC, name) for name in ("arena.cpp", "core.cpp")]
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "core_test")
            command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
            command += ["-I" + CSRC, "-I" + include(), *sources, "-o", program, "-ldl"]
            subprocess.run(command, check=True)
            for arguments in (["500"], ["wake", "100"], ["wake", "0"]):
                with self.subTest(arguments):
                    done = subprocess.run([program, library, *arguments], timeout=300, text=True,
                                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                    self.assertEqual(done.returncode, 0, done.stdout)
                    self.assertTrue(done.stdout.startswith("ok: "), done.stdout)


if __name__ == "__main__":
    unittest.main()
