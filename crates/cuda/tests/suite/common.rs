//! A test bench: a simulated driver, the backend over it, and helper functions of the tests.

use leasehold_alloc::{Buffer, Layout, On};
use leasehold_conformance::TestKernel;
use leasehold_core::sync::Arc;
use leasehold_core::{Lease, Result};
use leasehold_cuda::driver::ops::CudaSlowOps;
use leasehold_cuda::driver::sim::{SimDriver, SimDriverConfig};
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_hal::{
    Access, Backend, Binding, Copy2d, Device, DeviceId, Dispatch, Download, Fill, KeepAlive,
    MemoryKind, Op, Pipeline, Stream, StreamDesc, Upload,
};
use leasehold_sim::{KernelBody, KernelRegistry, KernelSpec, MachineConfig};
use std::collections::HashMap;

/// The simulated driver and the backend over it.
pub struct Bench {
    pub driver: Arc<SimDriver>,
    pub backend: CudaBackend,
}

/// The kernels that tests launch.
pub fn kernels() -> KernelRegistry {
    let registry = KernelRegistry::new();
    for kernel in TestKernel::ALL {
        // SAFETY: the tests' launches have elements for each block.
        let body = unsafe { KernelBody::cpu(kernel.function()) };
        let spec = KernelSpec::new(kernel.bindings(), kernel.params(), body);
        registry.register(kernel.name(), spec);
    }
    registry
}

/// A driver with two devices.
pub fn driver_config(seed: u64) -> SimDriverConfig {
    SimDriverConfig::new(MachineConfig::seed(seed).devices(2, 1 << 30).kernels(kernels()))
}

/// The configuration in which all work runs on the calling thread.
pub fn inline() -> CudaConfig {
    CudaConfig::default().inline(true)
}

impl Bench {
    pub fn new(seed: u64) -> Self {
        Self::with(driver_config(seed), inline())
    }

    pub fn with(driver: SimDriverConfig, config: CudaConfig) -> Self {
        let driver = Arc::new(SimDriver::new(driver).unwrap());
        let ops: Arc<dyn CudaSlowOps> = driver.clone();
        Self { backend: CudaBackend::with_ops(ops, config).unwrap(), driver }
    }

    pub fn open(&self, ordinal: u32) -> Lease<dyn Device> {
        self.backend.open(DeviceId::cuda(ordinal)).unwrap()
    }

    /// The number of driver calls with this name.
    pub fn calls(&self, name: &str) -> u64 {
        let calls: HashMap<String, u64> =
            self.driver.machine().calls_by_name().into_iter().collect();
        calls.get(name).copied().unwrap_or(0)
    }

    /// The race detector's reports since the last call.
    pub fn reports(&self) -> Vec<String> {
        self.driver.machine().take_reports().iter().map(ToString::to_string).collect()
    }

    /// Ends the backend, and checks that no object is left and no race was reported.
    pub fn close(self) {
        self.backend.shutdown().unwrap();
        assert_eq!(self.reports(), [""; 0]);
        assert_eq!(self.driver.take_leaks(), [""; 0]);
        assert!(self.driver.census().is_nothing(), "{:?}", self.driver.census());
    }
}

pub fn stream(device: &Lease<dyn Device>) -> Lease<dyn Stream> {
    device.stream(&StreamDesc::default()).unwrap()
}

pub fn try_buffer(
    device: &Lease<dyn Device>,
    stream: &Lease<dyn Stream>,
    bytes: u64,
) -> Result<Lease<Buffer>> {
    let on = On { timeline: stream.timeline(), source: &**stream };
    device.memory(MemoryKind::Device)?.alloc(Layout::new(bytes), on)
}

pub fn buffer(device: &Lease<dyn Device>, stream: &Lease<dyn Stream>, bytes: u64) -> Lease<Buffer> {
    try_buffer(device, stream, bytes).unwrap()
}

pub fn submit(stream: &Lease<dyn Stream>, ops: &[Op<'_>]) -> Result<u64> {
    // SAFETY: the tests' operations are of the stream's device. The tests keep buffers until their
    // last use is over, or mark them. The submission or the test keeps host memory.
    unsafe { stream.submit(ops) }
}

pub fn wait(stream: &Lease<dyn Stream>, value: u64) -> Result<()> {
    stream.wait_host(value, Some(std::time::Duration::from_secs(20)))
}

pub fn fill(buffer: &Lease<Buffer>, pattern: u32) -> Op<'static> {
    Op::Fill(Fill {
        dst: buffer.addr(),
        native: buffer.native(),
        bytes: buffer.len(),
        pattern,
        width: 1,
    })
}

pub fn copy(from: &Lease<Buffer>, to: &Lease<Buffer>) -> Op<'static> {
    Op::Copy(Copy2d::linear((from.addr(), 0), (to.addr(), 0), from.len().min(to.len())))
}

pub fn bind(buffer: &Lease<Buffer>, access: Access) -> Binding {
    Binding { addr: buffer.addr(), len: buffer.len(), native: 0, access }
}

pub fn dispatch<'a>(
    kernel: &'a Lease<Pipeline>,
    bindings: &'a [Binding],
    params: &'a [u8],
) -> Op<'a> {
    let blocks =
        bindings.last().map_or(1, |b| (b.len / 4).div_ceil(u64::from(TestKernel::BLOCK)) as u32);
    Op::Dispatch(Dispatch {
        pipeline: kernel,
        grid: [blocks, 1, 1],
        block: [TestKernel::BLOCK, 1, 1],
        shared: 0,
        bindings,
        params,
    })
}

/// Host memory that a submission keeps.
pub struct Host {
    pub keep: KeepAlive,
    at: *mut u8,
    len: usize,
}

impl Host {
    pub fn new(bytes: Vec<u8>) -> Self {
        let mut boxed = bytes.into_boxed_slice();
        let (at, len) = (boxed.as_mut_ptr(), boxed.len());
        Self { keep: Arc::new(Cells(boxed)), at, len }
    }

    pub fn up(&self, to: &Lease<Buffer>) -> Op<'_> {
        Op::Upload(Upload {
            src: self.at,
            dst: to.addr(),
            native: 0,
            bytes: self.len as u64,
            keep: Some(&self.keep),
        })
    }

    pub fn down(&self, from: &Lease<Buffer>) -> Op<'_> {
        Op::Download(Download {
            src: from.addr(),
            native: 0,
            dst: self.at,
            bytes: self.len as u64,
            keep: Some(&self.keep),
        })
    }

    pub fn bytes(&self) -> Vec<u8> {
        // SAFETY: the keep owns the bytes. Tests read them after the copies are over, or read bytes
        // that must not have been touched yet.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }.to_vec()
    }
}

// SAFETY: the pointer is into memory that the keep owns.
unsafe impl Send for Host {}
// SAFETY: tests read the bytes only after the copies are over.
unsafe impl Sync for Host {}

struct Cells(#[expect(dead_code, reason = "it is kept, and used by its address")] Box<[u8]>);

pub fn read(stream: &Lease<dyn Stream>, from: &Lease<Buffer>) -> Vec<u8> {
    let host = Host::new(vec![0xa5; from.len() as usize]);
    let value = submit(stream, &[host.down(from)]).unwrap();
    wait(stream, value).unwrap();
    host.bytes()
}
