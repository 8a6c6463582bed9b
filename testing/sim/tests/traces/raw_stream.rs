//! The raw stream makes legal calls, whose effects are there, and leaves no objects behind.

use leasehold_core::{Error, Result};
use leasehold_cuda::driver::ops::{
    ContextOps, CopyKind, CudaSlowOps, DeviceOps, NativeCopy, NativeFill, NativeStream, StreamOps,
};
use leasehold_sim::MachineConfig;
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::traces::raw_stream::RawStream;

const BYTES: u64 = 4096;

/// Bytes of device memory, by a copy on a raw stream.
fn read(ops: &dyn CudaSlowOps, raw: &RawStream<'_>, at: u64) -> Vec<u8> {
    let host = vec![0xEE_u8; BYTES as usize];
    let to = host.as_ptr() as u64;
    let copy = NativeCopy::linear(CopyKind::DeviceToHost, to, at, BYTES);
    // SAFETY: both sides have as many bytes, and live until the stream is waited for.
    unsafe { ops.copy(NativeStream(raw.word()), &copy) }.unwrap();
    raw.synchronize().unwrap();
    host
}

#[test]
fn a_captured_graph_does_what_was_enqueued_and_nothing_is_left() {
    let machine = MachineConfig::seed(1).devices(2, 1 << 26);
    let driver = SimDriver::new(SimDriverConfig::new(machine)).unwrap();
    driver.init().unwrap();
    {
        let raw = RawStream::new(&driver, 0, BYTES).unwrap();
        assert_eq!(read(&driver, &raw, raw.memory()), vec![0; BYTES as usize], "zero at first");
        let fill = |value| -> Result<()> {
            let fill = NativeFill { dst: raw.memory(), value, width: 1, count: BYTES };
            // SAFETY: the memory lives as long as the stream.
            unsafe { driver.fill(NativeStream(raw.word()), &fill) }
        };
        let graph = raw.capture(|| fill(7)).unwrap();
        assert_eq!(read(&driver, &raw, raw.memory())[0], 0, "captured, and not made");
        graph.launch().unwrap();
        assert_eq!(read(&driver, &raw, raw.memory()), vec![7; BYTES as usize]);
        // A capture that fails ends, and the stream goes on.
        let refused = raw.capture(|| fill(8).and(Err(Error::other("no"))));
        assert!(refused.is_err_and(|e| e.to_string() == "no"));
        fill(9).unwrap();
        let peer = raw.peer(1).unwrap();
        peer.copy(BYTES).unwrap();
        raw.synchronize().unwrap();
        assert_eq!(read(&driver, &raw, raw.memory()), vec![9; BYTES as usize]);
    }
    assert!(driver.current().unwrap().is_null());
    assert!(driver.census().is_nothing() && driver.take_leaks().is_empty());
    assert!(driver.machine().memory_in_use().is_nothing());
    assert!(driver.machine().take_reports().is_empty());
}
