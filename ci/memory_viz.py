#!/usr/bin/env python3
"""Checks a memory snapshot for PyTorch's memory_viz: that it loads, its schema in every block and every trace event, and that the
viewer can play the trace backwards from the snapshot as it does.

    ci/memory_viz.py SNAPSHOT.pickle [MORE.pickle ...]
"""

import pickle
import pickletools
import sys

# What the viewer's own reader knows.
OPCODES = set(
    "APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST EMPTY_TUPLE FRAME "
    "LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS SHORT_BINUNICODE STOP "
    "TUPLE TUPLE1 TUPLE2 TUPLE3".split()
)
SNAPSHOT = {"segments": list, "device_traces": list, "allocator_settings": dict, "external_annotations": list}
SEGMENT = {
    "device": int,
    "address": int,
    "total_size": int,
    "allocated_size": int,
    "active_size": int,
    "requested_size": int,
    "stream": int,
    "segment_type": str,
    "segment_pool_id": tuple,
    "is_expandable": bool,
    "frames": list,
    "blocks": list,
}
BLOCK = {"address": int, "size": int, "requested_size": int, "state": str, "frames": list}
FRAME = {"name": str, "filename": str, "line": int}
EVENT = {"action": str, "addr": int, "size": int, "stream": int, "time_us": int, "frames": list}
OOM = {"action": str, "device_free": int, "size": int, "stream": int, "time_us": int, "frames": list}
ACTIONS = {"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"}


def need(condition, what):
    if not condition:
        raise SystemExit(f"memory_viz.py: {what}")


def typed(value, schema, where):
    need(isinstance(value, dict), f"{where} is no dictionary: {value!r}")
    need(value.keys() == schema.keys(), f"{where} has the keys {sorted(value)}, not {sorted(schema)}")
    for key, kind in schema.items():
        need(type(value[key]) is kind, f"{where}[{key!r}] is {value[key]!r}, no {kind.__name__}")
        need(kind is not int or value[key] >= 0, f"{where}[{key!r}] is negative")
    for i, frame in enumerate(value.get("frames", [])):
        typed(frame, FRAME, f"{where}['frames'][{i}]")


def check_segment(segment, where):
    typed(segment, SEGMENT, where)
    need(segment["segment_type"] in ("small", "large"), f"{where} is of no known type")
    at = segment["address"]
    for i, block in enumerate(segment["blocks"]):
        here = f"{where}['blocks'][{i}]"
        typed(block, BLOCK, here)
        need(block["state"] in ("active_allocated", "active_pending_free", "inactive"), f"{here} has no known state")
        # The viewer adds sizes up and asks no block for its address.
        need(block["address"] == at, f"{here} does not begin where the one before ends")
        need(block["size"] > 0 and block["requested_size"] <= block["size"], f"{here} is too small")
        need((block["state"] == "inactive") == (block["requested_size"] == 0), f"{here}: state and requested size differ")
        at += block["size"]
    need(at == segment["address"] + segment["total_size"], f"{where}: its blocks do not tile it")
    active = [b for b in segment["blocks"] if b["state"] == "active_allocated"]
    for key, value in (("allocated_size", "size"), ("active_size", "size"), ("requested_size", "requested_size")):
        need(segment[key] == sum(b[value] for b in active), f"{where}[{key!r}] is not the sum of its blocks")


def play_backwards(snapshot, events):
    """What the viewer does when somebody clicks on an event: undo, from the last one on."""
    segments = {s["address"]: s["total_size"] for s in snapshot["segments"]}
    blocks = {b["address"] for s in snapshot["segments"] for b in s["blocks"] if b["state"] != "inactive"}
    for i in reversed(range(len(events))):
        event, where = events[i], f"event {i}"
        action, addr, size = event["action"], event.get("addr"), event["size"]
        if action == "free_completed":
            need(addr not in blocks, f"{where} frees a block that is live afterwards")
            need(any(a <= addr and addr + size <= a + n for a, n in segments.items()), f"{where}: no memory lay there")
            blocks.add(addr)
        elif action == "free_requested":
            need(addr in blocks, f"{where} has no completion")
        elif action == "alloc":
            need(addr in blocks, f"{where} allocates a block that is neither freed nor live")
            blocks.remove(addr)
        elif action in ("segment_free", "segment_unmap"):
            need(all(addr + size <= a or a + n <= addr for a, n in segments.items()), f"{where}: something is mapped there")
            segments[addr] = size
            for low, high in ((addr, addr + size), *((a, addr) for a, n in segments.items() if a + n == addr)):
                if action == "segment_unmap" and low in segments and high in segments:
                    segments[low] += segments.pop(high)
        elif action == "segment_alloc":
            need(segments.pop(addr, None) == size, f"{where}: there is no such segment")
        elif action == "segment_map":
            inside = [a for a, n in segments.items() if a <= addr and addr + size <= a + n]
            need(len(inside) == 1, f"{where}: nothing is mapped there")
            low = inside[0]
            end = low + segments.pop(low)
            if low < addr:
                segments[low] = addr - low
            if addr + size < end:
                segments[addr + size] = end - addr - size
    if snapshot["allocator_settings"]["events_lost"] == 0:
        need(not blocks and not segments, f"before the first event there were {len(blocks)} blocks, {len(segments)} segments")


def check(path):
    with open(path, "rb") as file:
        data = file.read()
    for opcode, _, position in pickletools.genops(data):
        need(opcode.name in OPCODES, f"{path}: the viewer does not know {opcode.name} (at {position})")
    snapshot = pickle.loads(data)
    typed({k: v for k, v in snapshot.items() if k != "frames"}, SNAPSHOT, path)
    for i, segment in enumerate(snapshot["segments"]):
        check_segment(segment, f"{path}: segments[{i}]")
    need(len(snapshot["device_traces"]) == 1, f"{path}: want one device")
    events = snapshot["device_traces"][0]
    last = 0
    for i, event in enumerate(events):
        where = f"{path}: event {i}"
        typed(event, OOM if event.get("action") == "oom" else EVENT, where)
        need(event["action"] in ACTIONS, f"{where} is of no known kind")
        need(event["time_us"] + 1000 >= last, f"{where} goes back in time")
        last = max(last, event["time_us"])
        if event["action"] == "free_requested":
            after = events[i + 1] if i + 1 < len(events) else {}
            same = after.get("action") == "free_completed" and after.get("addr") == event["addr"]
            need(same, f"{where}: the completion does not follow")
    play_backwards(snapshot, events)
    blocks = sum(len(s["blocks"]) for s in snapshot["segments"])
    print(f"{path}: {len(snapshot['segments'])} segments, {blocks} blocks, {len(events)} events")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    for name in sys.argv[1:]:
        check(name)
