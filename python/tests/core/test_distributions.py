"""One of the package's two distributions may be installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest

import leasehold


class Distributions(unittest.TestCase):
    def imported(self, *distributions: str) -> subprocess.CompletedProcess[str]:
        """Imports the package from a folder that says that these are installed."""
        with tempfile.TemporaryDirectory() as folder:
            os.symlink(os.path.dirname(leasehold.__file__), os.path.join(folder, "leasehold"))
            for name in distributions:
                os.mkdir(os.path.join(folder, f"{name}.dist-info"))
            code = f"import sys; sys.path.insert(0, {folder!r}); import leasehold; print(leasehold.__file__)"
            return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    def test_one_is_imported(self) -> None:
        for names in (["leasehold_runtime-0.1.0"], ["leasehold_runtime_sim-0.1.0", "leasehold_other-1"], []):
            said = self.imported(*names)
            self.assertEqual(said.returncode, 0, said.stderr)
            self.assertIn("/leasehold/__init__.py", said.stdout)

    def test_both_are_refused_with_the_cure(self) -> None:
        said = self.imported("leasehold_runtime-0.1.0", "leasehold_runtime_sim-0.1.0")
        self.assertEqual(said.returncode, 1)
        self.assertIn("ImportError: leasehold-runtime and leasehold-runtime-sim are both installed in ", said.stderr)
        self.assertIn("pip uninstall leasehold-runtime leasehold-runtime-sim, then", said.stderr)


if __name__ == "__main__":
    unittest.main()
