"""Uses of the package that mypy checks, and that run too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import leasehold
from leasehold import ops


def main() -> None:
    names: list[str] = leasehold.devices()
    device = leasehold.Device(names[0])
    free, total = device.memory_info()
    assert 0 <= free <= total
    capability: tuple[int, int] | None = device.compute_capability
    assert device.name != "cpu:0" or capability is None
    allocator = leasehold.Allocator(device, policy="compact", budget=64 << 20, trace_events=100)
    with allocator.zeros((4, 8), "float32") as buffer:
        shape: tuple[int, ...] = buffer.shape
        buffer.fill(1.5)
        buffer.view("uint8", shape=16, offset=16).copy_from(bytes(16))
        target = bytearray(buffer.nbytes)
        buffer.copy_to(target)
        view = memoryview(buffer)
        assert view.shape == shape
        view.release()
        same: leasehold.Buffer = leasehold.from_dlpack(buffer, device=device, copy=None)
        assert same.address == buffer.address
        kind, ordinal = buffer.__dlpack_device__()
        assert (kind, ordinal) == (1, 0)
        del same
    try:
        allocator.empty(128 << 20)
    except leasehold.OutOfMemoryError as error:
        text: str = str(error)
        assert text
    statistics: dict[str, int | None] = allocator.statistics()
    assert statistics["blocks"] == 0
    freed: int = allocator.trim(keep=0)
    assert freed >= 0
    allocator.budget = None
    assert leasehold.library_path() and leasehold.include_path()
    runtime(device)


def texts(model: leasehold.Model) -> None:
    one: str = leasehold.generate(model, "import", tokens=4, temperature=0.5)
    several: list[str] = leasehold.generate("directory", ["a", "b"], device="cpu:0")
    for piece in leasehold.stream_text(model, "import", tokens=4):
        one += piece
    for at, piece in leasehold.stream_text(model, ["a", "b"]):
        several[at] += piece


async def awaits(stream: leasehold.Stream, buffer: leasehold.Buffer) -> bytes:
    await stream
    await stream.record()
    return await buffer.download_async(stream)


def runtime(device: leasehold.Device) -> None:
    buffer = device.empty(4, "int32")
    ran: list[int] = []
    with leasehold.Stream(device, priority=1, name="mine") as stream:
        stream.fill(buffer, 7)
        stream.host_call(ran.append, 1)
        event: leasehold.Event = stream.record()
        stream.wait(event)
    assert ran == [1] and event.query() and stream.query()
    with device.record() as recording:
        node: int = recording.next_node
        recording.copy(buffer.view(shape=2), buffer.view(shape=2, offset=8))
    assert node == 0
    graph: leasehold.Graph = recording.graph
    graph.launch(stream)
    names: list[str] = [name for name, _ in graph.nodes]
    assert len(names) == 1
    assert len(stream.download(buffer).result(timeout=10.0)) == 16
    assert len(asyncio.run(awaits(stream, buffer))) == 16
    kernel = leasehold.Kernel("k", ["read", "float32"], ptx="", trusted=True)
    kinds: tuple[str, ...] = kernel.args
    mapped = leasehold.TensorMap("bfloat16", [512, 8], (64, 8), strides=[1024], swizzle=128)
    assert repr(mapped).startswith("TensorMap")
    together = leasehold.Kernel(
        "k", ["read"], ptx="", cluster=(2, 1), cooperative=True, reading_early=[], trusted=True
    )
    blocks: Callable[..., int] = together.resident_blocks
    assert callable(blocks)
    total: leasehold.Buffer = ops.add(stream, buffer.view("float32"), buffer.view("float32"))
    assert total.shape == (4,)
    assert kinds == ("read", "float32")


if __name__ == "__main__":
    main()
