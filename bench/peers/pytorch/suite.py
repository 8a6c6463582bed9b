"""PyTorch's own tests over Leasehold's allocator, beside PyTorch's.

    suite.py TEST_FILE [--part alone|rest] [--jobs N] [--out FOLDER] [PYTEST_OPTION ...]

TEST_FILE is a file of PyTorch's sources, such as test/test_cuda.py of the version that is installed. Each test runs once over each
allocator, in a process that has taken no other. Tests that need much memory, or count all of it, run one after the other: they are the
part `alone`. The part `rest` runs in N processes. The last lines are the tests whose outcomes differ. The status is the number of tests that
pass over PyTorch's allocator, fail over Leasehold's, and have no reason in docs/how-to/pytorch.md. A run of test_cuda.py takes 8 minutes. Needs pytest, pytest-xdist, pytest-timeout and expecttest.
"""

import argparse
import collections
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

HERE = os.path.dirname(os.path.abspath(__file__))
GUIDE = os.path.join(HERE, "../../../docs/how-to/pytorch.md")
ALLOCATORS = ("native", "leasehold")
# Tests that fill the device or count all of its memory.
ALONE = "memory or oom or large or fraction or limit or mempool or pool or stats or capture or plots or snapshot or record_stream or gb"


def pytest_configure(config):
    """In the processes of pytest, of which this file is a plug-in."""
    if os.environ.get("SUITE_ALLOCATOR") == "leasehold":
        import leasehold.torch

        leasehold.torch.enable()


def run(allocator, file, out, part, options):
    """Runs tests. Returns the outcome of each."""
    report = os.path.join(out, f"suite-{allocator}-{part}.xml")
    environment = {
        **os.environ,
        "SUITE_ALLOCATOR": allocator,
        "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cuda",
        "PYTHONPATH": os.pathsep.join([HERE, os.path.dirname(file), os.environ.get("PYTHONPATH", "")]),
    }
    # A test that never ends, or ends its process, costs itself alone.
    limits = ["--timeout", "60", "--timeout-method", "thread", "--max-worker-restart", "1000"]
    command = [sys.executable, "-m", "pytest", "-p", "suite", "-p", "no:cacheprovider", "-q", "--tb", "short", f"--junitxml={report}"]
    with open(os.path.join(out, f"suite-{allocator}-{part}.txt"), "w") as log:
        subprocess.run([*command, *limits, *options, file], env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=out)
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"] = outcome
    return outcomes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--part", choices=["alone", "rest"], action="append")
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options, more = parser.parse_known_args()
    file, out = os.path.abspath(options.file), os.path.abspath(options.out)
    parts = {"rest": ["-n", str(options.jobs), "-k", f"not ({ALONE})"], "alone": ["-n", "1", "-k", ALONE]}
    found = {}
    for allocator in ALLOCATORS:
        found[allocator] = {}
        for part in options.part or parts:
            found[allocator].update(run(allocator, file, out, part, [*parts[part], *more]))
        counts = collections.Counter(found[allocator].values())
        print(f"{allocator}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped", flush=True)
    native, own = (found[allocator] for allocator in ALLOCATORS)
    with open(GUIDE) as guide:
        explained = set(re.findall(r"`(test_\w+)`", guide.read()))
    unexplained = 0
    for name in sorted(native):
        outcome = own.get(name, "missing")
        if native[name] != outcome:
            known = name.partition("::")[2] in explained
            unexplained += native[name] == "passed" and not known
            print(f"{name}: {native[name]} natively, {outcome} here{', as the guide says' if known else ''}")
    print(f"{unexplained} tests pass natively and not here, and the guide does not name them")
    return min(unexplained, 100)


if __name__ == "__main__":
    sys.exit(main())
