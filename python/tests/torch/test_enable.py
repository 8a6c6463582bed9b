"""The errors of `import leasehold.torch` and `enable` where PyTorch or CUDA is missing."""

import subprocess
import sys
import unittest

from common import HAS_TORCH


class Enable(unittest.TestCase):
    @unittest.skipIf(HAS_TORCH, "PyTorch is installed")
    def test_without_pytorch(self):
        with self.assertRaisesRegex(ImportError, "needs PyTorch"):
            import leasehold.torch  # noqa: F401

    @unittest.skipIf(HAS_TORCH, "PyTorch is installed")
    def test_runner_without_pytorch(self):
        done = subprocess.run([sys.executable, "-m", "leasehold.torch", "script.py"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("needs PyTorch", done.stdout)

    @unittest.skipUnless(HAS_TORCH, "needs PyTorch")
    def test_without_cuda(self):
        import leasehold.torch
        import torch

        with self.assertRaisesRegex(ValueError, "policy"):
            leasehold.torch.enable(policy="fast")
        for budget in ("many", 0, -1, 1 << 64):
            with self.assertRaisesRegex(leasehold.InvalidArgumentError, "budget"):
                leasehold.torch.enable(budget=budget)
        with self.assertRaisesRegex(leasehold.InvalidArgumentError, "plug-in"):
            leasehold.torch.enable(shareable=True, plugin=True)
        self.assertEqual(leasehold.torch._bytes("1.5GiB"), 3 << 29)
        with self.assertRaises(KeyError):
            leasehold.torch.suspend("none")
        if torch.version.cuda is None or torch.cuda.device_count() == 0:
            with self.assertRaisesRegex(RuntimeError, "has no CUDA|no CUDA device"):
                leasehold.torch.enable()
            self.assertFalse(leasehold.torch.enabled())


if __name__ == "__main__":
    unittest.main()
