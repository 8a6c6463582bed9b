#!/usr/bin/env python3
"""Writes the snapshots beside this file: the form of `torch.cuda.memory._dump_snapshot`, in every protocol of pickles.

Device 0 has 1 MiB that is live throughout, 512 KiB from before the history that are freed in it, and a history of four blocks. One of
them is used by a second stream, so its free is completed late. Device 1 has one block. `trace.csv` is device 0's trace by hand.
"""

import os
import pickle

MIB = 1 << 20
BASE = 0x7F48_0000_0000
FRAMES = [
    {"filename": "/srv/Übung/train.py", "line": 7, "name": "step\\n'quoted'"},
    {"filename": "torch/nn/modules/module.py", "line": 1553, "name": "_call_impl"},
]


def event(action, addr, size, time_us, stream=0, device=0):
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": stream,
        "time_us": 1_764_000_000_000_000 + time_us,
        "device": device,
        "compile_context": "N/A",
        "user_metadata": "",
        "frames": FRAMES if action != "snapshot" else [],
    }


def block(address, size, requested, state):
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": []}


def segment(device, address, blocks, stream=0):
    return {
        "device": device,
        "address": address,
        "total_size": sum(b["size"] for b in blocks),
        "allocated_size": sum(b["size"] for b in blocks if b["state"] == "active_allocated"),
        "active_size": sum(b["size"] for b in blocks if b["state"].startswith("active")),
        "requested_size": sum(b["requested_size"] for b in blocks),
        "stream": stream,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": FRAMES,
        "blocks": blocks,
    }


A, B, C = BASE + 2 * MIB, BASE + 8 * MIB, BASE + 16 * MIB
SIDE = 0x5583_0000_1230
HISTORY = [
    event("segment_alloc", A, 20 * MIB, 0),
    event("alloc", A, 4 * MIB - 100, 1),
    event("alloc", B, 2 * MIB, 5, stream=SIDE),
    event("free_requested", BASE + MIB, MIB // 2, 6),
    event("free_completed", BASE + MIB, MIB // 2, 6),
    event("oom", 0, 1 << 40, 7),
    event("free_requested", A, 4 * MIB - 100, 10),
    event("alloc", C, MIB, 15),
    event("free_completed", A, 4 * MIB - 100, 20),
    event("alloc", A, 3 * MIB, 20),
    event("free_requested", B, 2 * MIB, 30, stream=SIDE),
    event("free_completed", B, 2 * MIB, 31, stream=SIDE),
    event("free_requested", C, MIB, 40),
    event("snapshot", 0, 0, 41),
]
OTHER = [event("alloc", BASE, 64 * MIB, 3, device=1)]
LIVE = block(BASE, MIB, MIB - 24, "active_allocated")
SNAPSHOT = {
    "segments": [
        segment(0, BASE, [LIVE, block(BASE + MIB, MIB, 0, "inactive")]),
        segment(
            0,
            A,
            [
                block(A, 4 * MIB, 3 * MIB, "active_allocated"),
                block(A + 4 * MIB, 10 * MIB, 0, "inactive"),
                block(C, MIB, MIB, "active_pending_free"),
                block(C + MIB, 5 * MIB, 0, "inactive"),
            ],
        ),
        segment(1, BASE, [block(BASE, 64 * MIB, 64 * MIB, "active_allocated")]),
    ],
    "device_traces": [HISTORY, OTHER, []],
    "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0, "expandable_segments": False},
    "external_annotations": [],
}
# What contains itself is in no snapshot, and must not loop.
SNAPSHOT["external_annotations"].append(SNAPSHOT["external_annotations"])

TRACE = """t_us,op,id,size,stream
0,a,1,524288,0
0,a,2,1048552,0
1,a,3,4194204,0
5,a,4,2097152,1
6,f,1,524288,0
10,f,3,4194204,0
15,a,5,1048576,0
20,a,6,3145728,0
30,f,4,2097152,1
40,f,5,1048576,0
"""

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    for protocol in range(6):
        with open(os.path.join(here, f"protocol{protocol}.pickle"), "wb") as file:
            pickle.dump(SNAPSHOT, file, protocol=protocol)
    with open(os.path.join(here, "trace.csv"), "w", encoding="ascii") as file:
        file.write(TRACE)
