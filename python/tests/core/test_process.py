"""The module and its process: interpreters beside the main one, children, and the end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import unittest
import warnings

import leasehold

INTERPRETERS = """
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters

CODE = '''
try:
    import leasehold
except ImportError as e:
    assert "interpreter" in str(e), e
else:
    raise SystemExit("it was loaded")
'''

def inside():
    try:
        made = interpreters.create("legacy")
    except Exception:
        made = interpreters.create()
    failed = interpreters.run_string(made, CODE)
    assert not failed, failed
    interpreters.destroy(made)

inside()
import leasehold
b = leasehold.Device("cpu:0").zeros(64)
assert type(b) is leasehold.Buffer
inside()
b.fill(3)
assert isinstance(b, leasehold.Buffer) and b.tobytes() == bytes([3]) * 64
with memoryview(b) as view:
    view[0] = 1
b.free()
print("ok")
"""

DAEMONS = """
import threading, time
import leasehold
d = leasehold.Device("cpu:0")
b, c = d.zeros(8 << 20), d.zeros(8 << 20)
def go():
    while True:
        c.copy_from(b)
        b.tobytes()
        d.zeros(1 << 20)
for _ in range(4):
    threading.Thread(target=go, daemon=True).start()
time.sleep(0.2)
print("ok", flush=True)
"""

# An object of `sys` ends late, and finds no other thread then.
LAST = """
import os, sys, threading, time
import leasehold
d = leasehold.Device("cpu:0")
b, c = d.zeros(8 << 20), d.zeros(8 << 20)
def go():
    while True:
        c.copy_from(b)
for _ in range(8):
    threading.Thread(target=go, daemon=True).start()
class Late:
    def __del__(self, threads=os.listdir, write=os.write):
        others = len(threads("/proc/self/task")) - 1
        write(1, b"%d threads\\n" % others if others else b"ok\\n")
sys.late = Late()
time.sleep(0.1)
"""

STREAMS = """
import threading, time, sys
import leasehold
device = leasehold.Device("cpu:0")
stream = leasehold.Stream(device)
x = device.zeros(1000, "float32")
began = threading.Event()
def slow():
    began.set()
    time.sleep(0.1)
for _ in range(50):
    stream.host_call(slow)
    stream.fill(x, 1.0)
held = [stream.record(), x.download_async(), device.record()]
with device.record() as recording:
    recording.host_call(slow)
recording.graph.launch(stream)
def go():
    other = leasehold.Stream(device)
    while True:
        other.host_call(lambda: None)
        other.synchronize()
threading.Thread(target=go, daemon=True).start()
began.wait()
print("ok", flush=True)
"""

FORK = """
import os, sys, warnings
import leasehold
warnings.simplefilter("ignore")
device = leasehold.Device("cpu:0")
stream = leasehold.Stream(device)
x, y = device.zeros(1000, "float32"), device.zeros(8)
event = stream.record()
stream.fill(x, 1.0)
stream.host_call(lambda: None)
with device.record() as recording:
    recording.fill(x, 2.0)
graph = recording.graph
download = x.download_async()
stream.synchronize()
child = os.fork()
if child == 0:
    for call in (
        lambda: leasehold.Stream(device), lambda: stream.fill(x, 1.0), stream.synchronize, stream.query,
        lambda: graph.launch(stream), event.synchronize, device.record, download.result, x.tobytes,
        lambda: device.zeros(4),
    ):
        try:
            call()
        except leasehold.InvalidStateError as error:
            assert "fork" in str(error), error
        else:
            os.write(2, b"no error")
            os._exit(1)
    # Objects end, and so does the interpreter.
    del stream, x, event, graph, download, recording
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print("ok", flush=True)
"""


FORK_END = """
import os, sys, time, warnings
import leasehold
warnings.simplefilter("ignore")
stream = leasehold.Stream("cpu:0")
for _ in range(3):
    stream.host_call(time.sleep, 0.3)
    time.sleep(0.1)
    child = os.fork()
    if child == 0:
        try:
            stream.host_call(print, "in the child")
        except leasehold.InvalidStateError:
            sys.exit(7)
    end = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert time.monotonic() < end, "the child does not end"
        time.sleep(0.01)
    stream.synchronize()
print("ok", flush=True)
"""


class Process(unittest.TestCase):
    def succeed(self, code: str) -> None:
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", code],
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.assertEqual((done.returncode, done.stdout), (0, "ok\n"), done.stderr)

    def test_a_sub_interpreter_is_refused_and_the_main_one_is_not(self) -> None:
        self.succeed(INTERPRETERS)

    def test_the_end_finds_daemon_threads_inside_calls(self) -> None:
        # Several times: the threads are stopped at other places.
        for _ in range(5):
            self.succeed(DAEMONS)

    @unittest.skipUnless(sys.version_info[:2] == (3, 10) and sys.platform == "linux", "no such end")
    def test_the_end_outlasts_threads_that_wait_for_the_interpreter(self) -> None:
        for _ in range(5):
            self.succeed(LAST)

    def test_the_end_finds_work_of_streams(self) -> None:
        for _ in range(5):
            self.succeed(STREAMS)

    @unittest.skipUnless(hasattr(os, "fork"), "no fork")
    def test_a_child_is_told_that_streams_stay_behind(self) -> None:
        self.succeed(FORK)

    @unittest.skipUnless(hasattr(os, "fork"), "no fork")
    def test_a_child_ends_while_a_function_runs_in_its_parent(self) -> None:
        self.succeed(FORK_END)

    @unittest.skipUnless(hasattr(os, "fork"), "no fork")
    def test_a_child_uses_the_cpu(self) -> None:
        device = leasehold.Device("cpu:0")
        b = device.zeros(1 << 16)
        b.fill(5)
        stop = threading.Event()

        def busy() -> None:
            while not stop.is_set():
                device.zeros(4096).free()
                device.allocator.statistics()

        threads = [threading.Thread(target=busy) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                with warnings.catch_warnings():
                    # Python warns of threads in the parent, which the test has on purpose.
                    warnings.simplefilter("ignore")
                    child = os.fork()
                if child == 0:
                    status = 1
                    try:
                        device.synchronize()
                        device.synchronize(timeout=1.0)
                        b.synchronize()
                        assert b.tobytes() == b"\5" * (1 << 16)
                        x = device.zeros(4096)
                        x.copy_from(b.view("uint8", (4096,)))
                        assert memoryview(x)[7] == 5
                        x.free()
                        assert leasehold.Allocator(device).zeros(64).tobytes() == bytes(64)
                        assert device.memory_info()[1] > 0
                        device.allocator.trim()
                        device.allocator.snapshot()
                        assert "cpu:0" in leasehold.devices()
                        assert leasehold.from_dlpack(b).address == b.address
                        status = 0
                    finally:
                        os._exit(status)
                self.assertEqual(os.waitpid(child, 0)[1], 0)
        finally:
            stop.set()
            for thread in threads:
                thread.join()


if __name__ == "__main__":
    unittest.main()
