"""The extension over a simulated device: PyTorch's interface without CUDA."""

import importlib.util
import os
import tempfile
import unittest

from common import HERE, MIB, Simulated, run_python, simulated


def memory_viz():
    """The check of snapshots in `ci`."""
    path = os.path.join(HERE, "..", "..", "..", "ci", "memory_viz.py")
    spec = importlib.util.spec_from_file_location("memory_viz", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Extension(Simulated):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.stream(1)
        cls.side = cls.stream()

    def test_statistics(self):
        t = self.t
        a, b = t.raw_alloc(MIB, 0), t.raw_alloc(5 * MIB, 0)
        s = t.statistics()
        self.assertEqual(s["allocated_bytes"]["all"][0], 6 * MIB)
        self.assertEqual((s["allocation"]["small"][0], s["allocation"]["large"][0]), (1, 1))
        self.assertGreaterEqual(s["reserved_bytes"]["all"][0], 6 * MIB)
        self.assertEqual(t.base(b), (b, 5 * MIB))
        t.record(b, self.side)
        t.raw_delete(a)
        t.raw_delete(b)
        self.assertEqual(t.statistics()["allocated_bytes"]["all"][0], 0)
        t.reset_peaks()
        self.assertEqual(t.statistics()["allocated_bytes"]["all"][1], 0)
        t.empty_cache()
        self.assertEqual(self.reserved(), 0)
        with self.assertRaisesRegex(RuntimeError, "freed twice"):
            t.raw_delete(a)

    def test_static_library(self):
        """A compiler that links the C++ library statically: texts with numbers are whole."""
        if os.environ.get("LEASEHOLD_TORCH_CACHE", "").endswith("static"):
            self.skipTest("this is the process that the test starts")
        with tempfile.TemporaryDirectory() as folder:
            compiler = os.path.join(folder, "g++")
            with open(compiler, "w") as file:
                file.write('#!/bin/sh\nexec %s "$@" -static-libstdc++\n' % os.environ.get("CXX", "g++"))
            os.chmod(compiler, 0o755)
            tests = ["Extension.test_statistics", "Extension.test_out_of_memory"]
            said = run_python(self, os.path.abspath(__file__), *tests, CXX=compiler,
                              LEASEHOLD_TORCH_CACHE=os.path.join(folder, "static"))
        self.assertNotIn("skipped", said)

    def test_out_of_memory(self):
        import torch

        t, seen = self.t, []
        t.on_oom(lambda *numbers: seen.append(numbers))
        with self.assertRaisesRegex(torch.OutOfMemoryError, "CUDA out of memory"):
            t.raw_alloc(100 * MIB, 0)
        self.assertEqual(len(seen), 1)
        held = [t.raw_alloc(16 * MIB, 0) for _ in range(4)]
        with self.assertRaisesRegex(torch.OutOfMemoryError, "16.00 MiB"):
            t.raw_alloc(16 * MIB, 0)
        for block in held:
            t.raw_delete(block)
        t.raw_delete(t.raw_alloc(40 * MIB, 0))

    def test_other_processes(self):
        block = self.t.raw_alloc(MIB, 0)
        with self.assertRaisesRegex(RuntimeError, "granules without handles.*share_memory_"):
            self.t.share(block)
        with self.assertRaisesRegex(RuntimeError, "without its descriptor.*share_memory_"):
            self.t.open_shared("a handle")
        self.t.raw_delete(block)

    def test_shared_block(self):
        """A block is the same memory in two processes, whose allocators are shareable."""
        self.assertIn("ok: shared", run_python(self, os.path.join(HERE, "share_program.py"), simulated()))

    def test_pools(self):
        t, pool = self.t, (0, 5)
        t.begin_pool(pool, 0)
        a, b = t.raw_alloc(3 * MIB, 0), t.raw_alloc(1000, 0)
        other = t.raw_alloc(1000, self.side)
        t.end_pool(pool)
        self.assertEqual(t.pool_uses(pool), 1)
        self.assertTrue(t.live(pool, [a, b]))
        self.assertFalse(t.live(pool, [a]))
        state = t.checkpoint(pool)
        t.raw_delete(a)
        self.assertTrue(t.live(pool, [b]))
        freed, allocated = t.restore(state)
        self.assertEqual((freed, sorted(allocated)), ([b], sorted([a, b])))
        self.assertTrue(t.live(pool, [a, b]))
        found = t.segments(pool)
        self.assertTrue(found and all(s["pool"] == pool for s in found))
        for block in (a, b, other):
            t.raw_delete(block)
        t.release_pool(pool)
        t.empty_cache()
        self.assertEqual(t.pool_uses(pool), 0)
        self.assertEqual(self.reserved(), 0)

    def test_pools_of_one_graph(self):
        """`use_mem_pool` within a capture: PyTorch 2.14 begins a pool while the graph's takes memory."""
        t, graph, inner = self.t, (0, 7), (0, 8)
        t.begin_pool(graph, 0)
        before = t.raw_alloc(1000, 0)
        t.begin_pool(inner, 0)
        within = t.raw_alloc(1000, 0)
        t.end_pool(inner)
        after = t.raw_alloc(1000, 0)
        t.end_pool(graph)
        self.assertTrue(t.live(graph, [before, after]))
        self.assertTrue(t.live(inner, [within]))
        # The graph retains both.
        t.raw_delete(within)
        self.assertEqual((t.pool_uses(graph), t.pool_uses(inner)), (1, 1))
        for block in (before, after):
            t.raw_delete(block)
        for pool in (inner, graph):
            t.release_pool(pool)
        t.empty_cache()
        self.assertEqual(self.reserved(), 0)

    def test_region(self):
        t, pool = self.t, (0, 6)
        region = self.extension.Region("weights", 0)
        t.region_pool(region, pool)
        t.begin_pool(pool, 0)
        blocks = [t.raw_alloc(size, 0) for size in (1000, 20 * MIB)]
        t.end_pool(pool)
        reserved = self.reserved()
        for keep in (True, False):
            freed = region.suspend(keep)
            self.assertGreaterEqual(freed, 20 * MIB)
            self.assertEqual(self.reserved(), reserved - freed)
            with self.assertRaisesRegex(RuntimeError, "suspended already"):
                region.suspend(keep)
            # Others have the memory meanwhile.
            guest = t.raw_alloc(60 * MIB, 0)
            with self.assertRaisesRegex(RuntimeError, "out of memory"):
                region.resume()
            self.assertTrue(region.suspended())
            t.raw_delete(guest)
            t.empty_cache()
            region.resume()
            self.assertEqual(self.reserved(), reserved)
        with self.assertRaisesRegex(RuntimeError, "is not suspended"):
            region.resume()
        for block in blocks:
            t.raw_delete(block)
        # Once for the use as a region's pool, once for the beginning.
        t.release_pool(pool)
        t.release_pool(pool)
        # The other tests begin without memory.
        region.suspend(False)

    def test_snapshot_and_history(self):
        t = self.t
        t.record_history(True, 3)
        block, held = t.allocate(4 * MIB)
        segments = t.segments((0, 0))
        for s in segments:
            self.assertEqual(sum(b[0] for b in s["blocks"]), s["total_size"])
        self.assertIn((4 * MIB, True), [(b[1], b[2]) for s in segments for b in s["blocks"]])
        del held
        events = t.events()
        self.assertEqual([size for action, size in events if action in (1, 2)], [4 * MIB] * 2)
        self.assertLessEqual(len(events), 3)
        t.record_history(False, 1)
        self.assertGreater(t.cache_info(), 0)

    def test_history_of_segments(self):
        import torch

        t = self.t
        t.empty_cache()
        t.record_history(True, 100_000)
        for turn in range(3):
            pool = (0, 7 + turn)
            t.begin_pool(pool, 0)
            inside = [t.raw_alloc(size, 0) for size in (1000, 3 * MIB, 12 * MIB)]
            t.end_pool(pool)
            outside = [t.raw_alloc(size, 0) for size in (500, 5 * MIB, 20 * MIB)]
            for block in inside[:2] + outside[1:]:
                t.raw_delete(block)
            if turn == 1:
                t.empty_cache()
            for block in (inside[2], outside[0]):
                t.raw_delete(block)
            t.release_pool(pool)
        held = t.raw_alloc(9 * MIB, 0)
        snapshot = torch.cuda.memory._snapshot()
        events = snapshot["device_traces"][0]
        actions = {event["action"] for event in events}
        self.assertLessEqual({"segment_map", "segment_unmap", "segment_alloc", "segment_free"}, actions)
        # The viewer plays the history backwards, to a time without memory.
        snapshot["allocator_settings"]["events_lost"] = 0
        memory_viz().play_backwards(snapshot, events)
        t.raw_delete(held)
        t.record_history(False, 1)
        t.empty_cache()


if __name__ == "__main__":
    unittest.main()
