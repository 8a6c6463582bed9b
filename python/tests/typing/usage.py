"""Uses of the package that mypy checks, and that run too."""

from __future__ import annotations

import leasehold


def main() -> None:
    names: list[str] = leasehold.devices()
    device = leasehold.Device(names[0])
    free, total = device.memory_info()
    assert 0 <= free <= total
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
    assert leasehold.library_path()


if __name__ == "__main__":
    main()
