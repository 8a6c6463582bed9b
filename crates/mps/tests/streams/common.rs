//! A test bench: a simulated driver, the backend over it, and helper functions of the tests.

use leasehold_alloc::{Buffer, Layout, On};
use leasehold_conformance::TestKernel;
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::{
    Access, Backend, BackendKind, Binding, Copy2d, Device, DeviceId, Dispatch, Download, Fill,
    KeepAlive, KernelCheck, KernelDesc, KernelSource, MemoryKind, Op, Pipeline, Stream, StreamDesc,
    Upload,
};
use leasehold_mps::driver::ops::MpsSlowOps;
use leasehold_mps::driver::sim::{SimDriver, SimDriverConfig};
use leasehold_mps::{MpsBackend, MpsConfig};
use leasehold_sim::{
    FaultAction, FaultRule, KernelBody, KernelRegistry, KernelSpec, MachineConfig, When,
};
use std::task::Poll;

/// The simulated driver and the backend over it.
pub struct Bench {
    pub driver: Arc<SimDriver>,
    pub backend: MpsBackend,
    /// The kernel `hold` runs until this is set.
    gate: Arc<AtomicBool>,
}

/// The kernels that tests launch.
pub fn kernels(gate: &Arc<AtomicBool>) -> KernelRegistry {
    let registry = KernelRegistry::new();
    for kernel in TestKernel::ALL {
        // SAFETY: the tests' launches have elements for each block.
        let body = unsafe { KernelBody::cpu(kernel.function()) };
        let spec = KernelSpec::new(kernel.bindings(), kernel.params(), body);
        registry.register(kernel.name(), spec);
    }
    let fail = KernelBody::run(|_| Err(Error::state("the kernel failed on purpose")));
    registry.register("fail", KernelSpec::new(&[Access::ReadWrite], 0, fail));
    let bump = KernelBody::run(|launch| {
        let (at, len) = launch.pointer::<u32>(0);
        for i in 0..len {
            // SAFETY: the machine checked the binding, which has `len` elements.
            unsafe { *at.add(i) += 1 };
        }
        Ok(())
    });
    let gate = gate.clone();
    let hold = KernelBody::poll(move |_| {
        let open = gate.load(Ordering::Acquire);
        Ok(if open { Poll::Ready(()) } else { Poll::Pending })
    });
    registry.register("hold", KernelSpec::new(&[Access::ReadWrite], 0, hold));
    registry.register("bump", KernelSpec::new(&[Access::ReadWrite], 0, bump));
    registry
}

/// A driver with two devices, without kernels.
pub fn driver_config(seed: u64) -> SimDriverConfig {
    SimDriverConfig::new(MachineConfig::seed(seed).devices(2, 1 << 30))
}

/// The configuration in which all work runs on the calling thread.
pub fn inline() -> MpsConfig {
    MpsConfig::default().inline(true)
}

impl Bench {
    pub fn new(seed: u64) -> Self {
        Self::with(driver_config(seed), inline())
    }

    pub fn with(mut driver: SimDriverConfig, config: MpsConfig) -> Self {
        let gate = Arc::new(AtomicBool::new(false));
        driver.machine = driver.machine.kernels(kernels(&gate));
        let driver = Arc::new(SimDriver::new(driver).unwrap());
        let ops: Arc<dyn MpsSlowOps> = driver.clone();
        Self { backend: MpsBackend::with_ops(ops, config).unwrap(), driver, gate }
    }

    /// Ends the launches of the kernel `hold`.
    pub fn let_go(&self) {
        self.gate.store(true, Ordering::Release);
        // The machine checks such kernels again only if it is told.
        self.driver.machine().ring();
    }

    /// Fails the next driver call with this name.
    pub fn fail(&self, call: &str, action: FaultAction) {
        self.driver.machine().add_fault(FaultRule::on(call, When::Once, action));
    }

    /// The number of driver calls with this name.
    pub fn calls(&self, name: &str) -> u64 {
        let all = self.driver.machine().calls_by_name();
        all.into_iter().find(|(call, _)| call == name).map_or(0, |(_, count)| count)
    }

    pub fn open(&self, ordinal: u32) -> Lease<dyn Device> {
        self.backend.open(DeviceId::new(BackendKind::Mps, ordinal)).unwrap()
    }

    /// The race detector's reports since the last call.
    pub fn reports(&self) -> Vec<String> {
        self.driver.machine().take_reports().iter().map(ToString::to_string).collect()
    }

    /// Ends the backend, and checks that no object is left and no race was reported.
    pub fn close(self) {
        self.backend.shutdown().unwrap();
        assert_eq!(self.reports(), [""; 0]);
        assert_eq!(self.driver.take_broken_rules(), []);
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

/// A kernel over one binding, of the tests' own source.
pub fn kernel(device: &Lease<dyn Device>, name: &'static str) -> Lease<Pipeline> {
    const SOURCE: &str = "kernel void bump(device uint* x [[buffer(0)]]) { x[0] += 1; }
        kernel void hold(device uint* x [[buffer(0)]]) {}
        kernel void fail(device uint* x [[buffer(0)]]) {}";
    let source = KernelSource::Msl(SOURCE.into());
    let any = KernelCheck::new(|_| Ok(()));
    device.pipeline(&KernelDesc::new(name, source, &[Access::ReadWrite], any)).unwrap()
}

/// A launch of one thread over a buffer.
pub fn one<'a>(kernel: &'a Lease<Pipeline>, bindings: &'a [Binding]) -> Op<'a> {
    Op::Dispatch(Dispatch {
        pipeline: kernel,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        bindings,
        params: &[],
    })
}

/// A launch of a test kernel over whole buffers.
#[cfg(feature = "planted-defects")]
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
