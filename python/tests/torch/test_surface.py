"""What PyTorch's own tools see of the extension: histories, profiler, hooks, settings, limits.

Most tests run over a simulated device. Those of `OnDevice` need a GPU.
"""

import ctypes
import os
import time
import unittest
import warnings
from unittest import mock

from common import HAS_TORCH, HERE, MIB, Simulated, run_python, simulated


class ExtensionSurface(Simulated):
    def setUp(self):
        import torch

        self.snapshot = torch.cuda.memory._snapshot
        self.addCleanup(self.t.empty_cache)
        self.addCleanup(self.t.record_history, False, 1)

    def events(self, *actions):
        return [e for e in self.snapshot()["device_traces"][0] if e["action"] in actions]

    def touch(self, bytes=4 * MIB):
        self.t.raw_delete(self.t.raw_alloc(bytes, 0))

    # ---- histories

    def test_times_are_microseconds_from_the_first_event_on(self):
        begin = time.time()
        self.t.record_history(True, 1000)
        self.touch()
        time.sleep(0.05)
        self.touch()
        end = time.time()
        times = [e["time_us"] / 1e6 for e in self.events("alloc")]
        self.assertEqual(len(times), 2)
        for seen in times:
            self.assertTrue(begin - 0.05 <= seen <= end + 0.05, (begin, times, end))
        self.assertGreater(times[1] - times[0], 0.04)

    def test_a_recording_begins_without_the_last_ones_events(self):
        self.t.record_history(True, 1000)
        self.touch(1 * MIB)
        self.t.record_history(False, 1000)
        self.assertEqual(self.events("alloc"), [])
        self.t.record_history(True, 1000, clear=False)
        self.touch(2 * MIB)
        self.assertEqual([e["size"] for e in self.events("alloc")], [2 * MIB])
        # A change of settings meanwhile leaves them.
        self.t.record_history(True, 2000, clear=False)
        self.assertEqual([e["size"] for e in self.events("alloc")], [2 * MIB])

    def test_texts_of_the_program(self):
        import torch

        t = self.t
        t.record_history(True, 1000)
        t.set_metadata("phase 1")
        t.push_region("region 0")
        self.touch()
        t.pop_region()
        t.set_metadata("")
        t.annotate("a range")
        self.touch()
        first, second = self.events("alloc")
        self.assertEqual([first["compile_context"], second["compile_context"]], ["region 0", "N/A"])
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10):
            self.assertEqual([first["user_metadata"], second["user_metadata"]], ["phase 1", ""])
        told = self.snapshot()["external_annotations"]
        self.assertEqual([a["name"] for a in told], ["a range"])
        self.assertAlmostEqual(told[0]["time_us"] / 1e6, time.time(), delta=5)
        t.record_history(False, 1000)
        t.annotate("too late")
        self.assertEqual(self.snapshot()["external_annotations"], [])

    def test_places_of_events(self):
        import torch

        t, pool = self.t, (0, 40)
        t.record_history(True, 1000, context="all")
        t.begin_pool(pool, 0)
        inside = t.raw_alloc(3 * MIB, 0)
        t.end_pool(pool)
        self.touch(20 * MIB)
        with self.assertRaises(torch.OutOfMemoryError):
            t.raw_alloc(100 * MIB, 0)
        t.raw_delete(inside)
        t.release_pool(pool)
        t.empty_cache()
        actions = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
                   "segment_unmap", "oom")
        found = self.events(*actions)
        self.assertEqual({e["action"] for e in found}, set(actions))
        for event in found:
            self.assertIn("test_places_of_events", [f["name"] for f in event["frames"]], event["action"])

    def takes(self, bytes):
        return self.t.raw_alloc(bytes, 0)

    def gives(self, block):
        self.t.raw_delete(block)

    def empties(self):
        self.t.empty_cache()

    def places(self, context):
        """Which of the functions above each event of a block and of its segment names."""
        self.t.record_history(True, 1000, context=context)
        self.gives(self.takes(MIB))
        self.empties()
        found = {}
        for event in self.snapshot()["device_traces"][0]:
            names = {f["name"] for f in event.get("frames", [])} & {"takes", "gives", "empties"}
            found.setdefault(event["action"], names)
        self.t.record_history(False, 1)
        return found

    def test_places_of_each_context(self):
        block = ("alloc", "free_requested", "free_completed", "segment_map", "segment_unmap")
        self.assertEqual(self.places("state"), dict.fromkeys(block, set()))
        # An end has the place of its beginning, if its own is not recorded.
        self.assertEqual(self.places("alloc"), dict.fromkeys(block, {"takes"}))
        self.assertEqual(self.places("all"), {
            "alloc": {"takes"}, "segment_map": {"takes"}, "free_requested": {"gives"}, "free_completed": {"gives"},
            "segment_unmap": {"empties"}})

    def test_memory_that_stays_has_no_event(self):
        # A block of any size keeps the memory around it. PyTorch's test_memory_plots_free_segment_stack expects an
        # event of empty_cache, and finds none while such a block lives.
        other = self.t.raw_alloc(16, 0)
        found = self.places("all")
        self.assertEqual({"segment_map", "segment_unmap"} & set(found), set())
        self.t.raw_delete(other)
        self.empties()
        self.assertEqual(self.places("all")["segment_unmap"], {"empties"})

    def test_places_outlive_a_new_beginning(self):
        self.t.record_history(True, 1000, context="all")
        block = self.takes(MIB)
        self.t.record_history(True, 1000, context="alloc")
        seen = self.snapshot()
        self.assertEqual(seen["device_traces"][0], [])
        segment, live = next((s, b) for s in seen["segments"] for b in s["blocks"] if b["address"] == block)
        for frames in (segment["frames"], live["frames"]):
            self.assertIn("takes", [f["name"] for f in frames])
        self.gives(block)
        self.empties()
        for event in self.events("free_requested", "free_completed", "segment_unmap"):
            self.assertIn("takes", [f["name"] for f in event["frames"]], event["action"])

    def test_a_snapshot_is_an_event_of_the_next_one(self):
        self.t.record_history(True, 1000)
        block = self.t.raw_alloc(3 * MIB, 0)
        self.assertEqual(self.events("snapshot"), [])
        self.t.raw_delete(block)
        first, = self.events("snapshot")
        self.assertEqual((first["size"], "frames" in first), (3 * MIB, False))
        self.assertEqual([e["size"] for e in self.events("snapshot")], [3 * MIB, 0])

    def test_a_restored_state_is_in_the_history(self):
        t, pool = self.t, (0, 45)
        t.record_history(True, 1000, context="all")
        t.begin_pool(pool, 0)
        kept, later = self.takes(MIB), self.takes(2 * MIB)
        t.end_pool(pool)
        t.raw_delete(later)
        state = t.checkpoint(pool)
        t.raw_delete(kept)
        t.restore(state)
        told = [(e["action"], e["size"]) for e in self.events("alloc", "free_completed")]
        self.assertEqual(told, [("alloc", MIB), ("alloc", 2 * MIB), ("free_completed", 2 * MIB),
                                ("free_completed", MIB), ("alloc", MIB)])
        t.raw_delete(kept)
        t.release_pool(pool)

    # ---- profiler and hooks

    def test_profiler(self):
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as told:
            with torch.profiler.record_function("takes"):
                block = self.t.raw_alloc(4 * MIB, 0)
            with torch.profiler.record_function("gives"):
                self.t.raw_delete(block)
        used = {e.key: e.device_memory_usage for e in told.key_averages()}
        self.assertEqual((used["takes"], used["gives"]), (4 * MIB, -4 * MIB))

    def test_sanitizer(self):
        # The hooks stay for good, so they are another process's.
        program = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from torch.cuda import _gpu_trace
from leasehold.torch import _build
t = _build.load().testing
t.simulate(sys.argv[2], 64 << 20)
seen = []
torch._C._activate_gpu_trace()
_gpu_trace.register_callback_for_memory_allocation(lambda at: seen.append(("alloc", at)))
_gpu_trace.register_callback_for_memory_deallocation(lambda at: seen.append(("free", at)))
block = t.raw_alloc(1000, 0)
t.raw_delete(block)
assert seen == [("alloc", block), ("free", block)], seen
at, held = t.allocate(1000)
del held
assert seen[2:] == [("alloc", at), ("free", at)], seen
"""
        run_python(self, "-c", program, HERE, simulated())

    # ---- out of memory

    def test_report(self):
        import torch

        t, seen = self.t, []
        t.on_oom(lambda *numbers: seen.append(numbers))
        held = t.raw_alloc(1536 * 1024, 0)
        for bytes, size in ((3 << 40, "3072.00 GiB"), (100 * MIB, "100.00 MiB")):
            with self.assertRaises(torch.OutOfMemoryError) as failed:
                t.raw_alloc(bytes, 0)
            text = str(failed.exception)
            self.assertIn("Tried to allocate %s. GPU 0 has a total capacity of 1024.00 MiB" % size, text)
            self.assertIn("64.00 MiB allowed; Of the allocated memory 1.50 MiB is allocated by PyTorch", text)
            # The request, and the most that the process may have.
            self.assertEqual(seen[-1][:3], (0, bytes, 64 * MIB))
        with self.assertRaisesRegex(torch.OutOfMemoryError, "more than 1EB"):
            t.allocate(1 << 60)
        t.raw_delete(held)

    def test_an_allocation_that_fails_leaves_captures_valid(self):
        import torch

        t, pool, captured, other = self.t, (0, 41), self.stream(), self.stream()
        capture = self.lib.leasehold_sim_capture
        capture.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int]
        region, asleep = self.extension.Region("weights", 0), (0, 44)
        t.region_pool(region, asleep)
        t.set_stream(captured)
        t.begin_pool(pool, captured)
        self.assertEqual(capture(self.device, captured, 2), 0)
        t.set_captured(captured)
        inside = t.raw_alloc(2 * MIB, captured)
        for stream in (captured, other):
            # The other one is a stream of another thread.
            t.set_stream(stream)
            with self.assertRaises(torch.OutOfMemoryError):
                t.raw_alloc(100 * MIB, stream)
            t.empty_cache()
            with self.assertRaisesRegex(RuntimeError, "before or after the capture"):
                region.suspend(True)
        t.set_captured((1 << 64) - 1)
        self.assertEqual(capture(self.device, captured, 0), 0)
        t.end_pool(pool)
        t.set_stream(0)
        t.raw_delete(inside)
        for ended in (pool, asleep):
            t.release_pool(ended)

    # ---- limits and pools

    def test_a_limit_counts_pools_with_an_allocator_of_their_own(self):
        import torch

        t, pool = self.t, (0, 42)
        t.host_pool(pool)
        t.begin_pool(pool, 0)
        own = t.raw_alloc(40 * MIB, 0)
        with self.assertRaises(torch.OutOfMemoryError):
            t.raw_alloc(40 * MIB, 0)
        t.end_pool(pool)
        self.assertEqual(self.reserved(), 40 * MIB)
        with self.assertRaises(torch.OutOfMemoryError):
            t.raw_alloc(40 * MIB, 0)
        self.touch(20 * MIB)
        t.raw_delete(own)
        for _ in range(2):  # the pool, and its use
            t.release_pool(pool)
        t.empty_cache()
        self.assertEqual(self.reserved(), 0)
        self.touch(60 * MIB)

    def test_the_end_of_a_pool_gives_back_its_own_memory(self):
        t, pool = self.t, (0, 43)
        self.touch(20 * MIB)
        before = self.reserved()
        self.assertGreaterEqual(before, 20 * MIB)
        t.begin_pool(pool, 0)
        inside = t.raw_alloc(12 * MIB, 0)
        t.end_pool(pool)
        self.assertGreaterEqual(self.reserved(), before + 12 * MIB)
        t.raw_delete(inside)
        t.release_pool(pool)
        t.empty_cache(pool)
        self.assertEqual((t.pool_uses(pool), self.reserved()), (0, before))

    # ---- settings

    def test_settings(self):
        from leasehold.torch import _settings

        def read(text, extension=True, **others):
            environment = {"PYTORCH_CUDA_ALLOC_CONF": text, **others}
            with mock.patch.dict(os.environ, environment), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                return _settings.read(extension), " ".join(str(w.message) for w in said)

        self.assertEqual(read("per_process_memory_fraction:0.25,expandable_segments:True"), (0.25, ""))
        self.assertEqual(read("pinned_num_register_threads:4,backend:native"), (1.0, ""))
        self.assertEqual(read("", PYTORCH_ALLOC_CONF="per_process_memory_fraction : 0.5")[0], 0.5)
        _, said = read("roundup_power2_divisions:[256:1,>:2],max_split_size_mb:64,backend:cudaMallocAsync")
        self.assertIn(": roundup_power2_divisions, max_split_size_mb, backend. ", said)
        _, said = read("per_process_memory_fraction:0.5", extension=False, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        self.assertIn(": per_process_memory_fraction, PYTORCH_NO_CUDA_MEMORY_CACHING. ", said)

    def test_memory_without_a_cache_is_not_leaseholds(self):
        if has_device():
            self.skipTest("the driver of CUDA has memory here")
        t = self.t
        before = t.statistics()["allocation"]["all"]
        t.enable(False)
        try:
            # Here the driver of CUDA has none.
            with self.assertRaisesRegex(RuntimeError, "CUDA|NVIDIA"):
                t.raw_alloc(MIB, 0)
        finally:
            t.enable(True)
        self.assertEqual(t.statistics()["allocation"]["all"], before)
        self.touch()


def has_device():
    if not HAS_TORCH:
        return False
    import torch

    return torch.cuda.is_available()


@unittest.skipUnless(has_device(), "needs a GPU")
class OnDevice(unittest.TestCase):
    """Programs with `enable`, each in a process of its own."""

    def run_program(self, program, **environment):
        program = "import torch, leasehold.torch\nleasehold.torch.enable()\n" + program
        return run_python(self, "-c", program, **environment)

    def test_a_failure_in_a_capture(self):
        self.run_program("""
a = torch.ones(100, device="cuda")
total = torch.cuda.mem_get_info()[1]
def capture(caught):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        b = a + 1
        try:
            torch.empty(2 * total, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            if not caught:
                raise
        b = b + 1
    graph.replay()
    return float(b.sum())
assert capture(True) == 300
try:
    capture(False)
    raise SystemExit("no error")
except torch.OutOfMemoryError:
    pass
torch.rand(10, device="cuda")
""")

    def test_a_failure_beside_another_threads_capture(self):
        self.run_program("""
import threading
a = torch.ones(100, device="cuda")
total = torch.cuda.mem_get_info()[1]
def fail():
    try:
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
        raise SystemExit("no error")
    except torch.OutOfMemoryError:
        pass
    torch.cuda.empty_cache()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    b = a + 1
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    b = b + 1
graph.replay()
assert float(b.sum()) == 300
""")

    def test_a_limit_in_the_environment(self):
        self.run_program("""
assert torch.cuda.get_per_process_memory_fraction() == 0.01
try:
    torch.empty(torch.cuda.mem_get_info()[1] // 50, dtype=torch.uint8, device="cuda")
    raise SystemExit("no limit")
except torch.OutOfMemoryError as error:
    assert " allowed; " in str(error), error
""", PYTORCH_CUDA_ALLOC_CONF="per_process_memory_fraction:0.01")

    def test_memory_without_a_cache(self):
        program = """
def held():
    x = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
    x.fill_(1)
    assert torch.cuda.memory_reserved() == 0
    del x
"""
        self.run_program(program + "held()", PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        self.run_program(program + """
torch.cuda.init()
torch.cuda.caching_allocator_enable(False)
held()
at = torch.cuda.caching_allocator_alloc(1000)
torch.cuda.caching_allocator_delete(at)
torch.cuda.caching_allocator_enable(True)
x = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_reserved() >= 100 << 20
""")

    def test_the_memory_of_processes_in_a_report(self):
        said = self.run_program("""
held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
try:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)
""")
        self.assertRegex(said, r"has [0-9.]+ GiB memory in use\. |is free\. Of the allocated memory 1\.00 GiB")


if __name__ == "__main__":
    unittest.main()
