//! A simulated device with a queue, and short names of the calls that tests make.

use leasehold_core::sync::Arc;
use leasehold_core::{Error, Result};
use leasehold_hal::{Access, Binding};
use leasehold_mps::driver::ops::*;
use leasehold_sim::mps::{Effect, SimDriver, SimDriverConfig};
use leasehold_sim::{KernelBody, KernelRegistry, KernelSpec, MachineConfig};

/// Calls an unsafe method of the simulated driver.
macro_rules! call {
    ($driver:expr, $method:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the simulated driver looks every handle up, refuses unknown ones, and checks the
        // ranges. No reference to memory that work touches exists while the work runs.
        unsafe { $driver.$method($($argument),*) }
    }};
}
pub(crate) use call;

pub struct Bench {
    pub driver: Arc<SimDriver>,
    pub device: NativeDevice,
    pub queue: NativeQueue,
}

/// Kernels over 32-bit integers.
pub fn kernels() -> KernelRegistry {
    let registry = KernelRegistry::new();
    let bump = KernelBody::run(|launch| {
        let (at, len) = launch.pointer::<u32>(0);
        for i in 0..len {
            // SAFETY: the machine checked the binding, which has `len` elements.
            unsafe { *at.add(i) += 1 };
        }
        Ok(())
    });
    registry.register("bump", KernelSpec::new(&[Access::ReadWrite], 0, bump));
    let set = KernelBody::run(|launch| {
        let (value, (at, len)) = (launch.params::<u32>()?, launch.pointer::<u32>(0));
        for i in 0..len {
            // SAFETY: the machine checked the binding, which has `len` elements.
            unsafe { *at.add(i) = value };
        }
        Ok(())
    });
    registry.register("set", KernelSpec::new(&[Access::Write], 4, set));
    let fail = KernelBody::run(|_| Err(Error::state("the kernel failed on purpose")));
    registry.register("fail", KernelSpec::new(&[Access::ReadWrite], 0, fail));
    registry
}

/// The source of these kernels, for the simulated compiler.
pub const SOURCE: &str = "kernel void bump(device uint* x [[buffer(0)]]) { x[0] += 1; }
    /* kernel void hidden() {} */
    kernel void set(device uint* x, constant uint& v) { x[0] = v; }
    kernel void fail(device uint* x) {} // kernel void comment()";

pub fn config(seed: u64) -> SimDriverConfig {
    SimDriverConfig::new(MachineConfig::seed(seed).devices(2, 64 << 20).kernels(kernels()))
}

impl Bench {
    pub fn new(seed: u64) -> Self {
        Self::with(config(seed))
    }

    pub fn with(config: SimDriverConfig) -> Self {
        let driver = Arc::new(SimDriver::new(config).unwrap());
        let device = driver.devices().unwrap()[0];
        let queue = call!(driver, queue_create(device, 4, "main")).unwrap();
        Self { driver, device, queue }
    }

    pub fn buffer(&self, bytes: u64) -> NativeBuffer {
        call!(self.driver, buffer_create(self.device, bytes, MemoryOptions::default())).unwrap()
    }

    pub fn private(&self, bytes: u64) -> NativeBuffer {
        let options = MemoryOptions { storage: Storage::Private, ..MemoryOptions::default() };
        call!(self.driver, buffer_create(self.device, bytes, options)).unwrap()
    }

    pub fn pipeline(&self, name: &str) -> NativePipeline {
        self.pipeline_as(name, &PipelineDesc::default())
    }

    pub fn pipeline_as(&self, name: &str, desc: &PipelineDesc) -> NativePipeline {
        let driver = &self.driver;
        let options = CompileOptions::default();
        let library = call!(driver, library_from_source(self.device, SOURCE, &options)).unwrap();
        let function = call!(driver, function(library, name)).unwrap();
        call!(driver, pipeline_create(self.device, function, desc)).unwrap()
    }

    pub fn command(&self) -> NativeCommandBuffer {
        self.command_of(self.queue)
    }

    pub fn command_of(&self, queue: NativeQueue) -> NativeCommandBuffer {
        call!(self.driver, command_buffer(queue, CommandBufferDesc::default())).unwrap()
    }

    pub fn serial(&self, buffer: NativeCommandBuffer) -> NativeComputeEncoder {
        call!(self.driver, compute_encoder(buffer, &ComputeDesc::default())).unwrap()
    }

    pub fn concurrent(&self, buffer: NativeCommandBuffer) -> NativeComputeEncoder {
        let desc = ComputeDesc { concurrent: true, samples: None };
        call!(self.driver, compute_encoder(buffer, &desc)).unwrap()
    }

    /// Dispatches a kernel over a whole buffer.
    pub fn dispatch(&self, e: NativeComputeEncoder, p: NativePipeline, b: NativeBuffer) {
        call!(self.driver, set_pipeline(e, p)).unwrap();
        call!(self.driver, set_buffer(e, b, 0, 0)).unwrap();
        call!(self.driver, dispatch(e, &grid(&[]))).unwrap();
    }

    pub fn end(&self, encoder: impl Into<NativeEncoder>) {
        let encoder = encoder.into();
        call!(self.driver, end_encoding(encoder)).unwrap();
        self.release(match encoder {
            NativeEncoder::Compute(e) => NativeObject::from(e),
            NativeEncoder::Blit(e) => NativeObject::from(e),
        });
    }

    pub fn commit(&self, buffer: NativeCommandBuffer) {
        call!(self.driver, commit(buffer)).unwrap();
    }

    /// Commits, waits, and returns the error.
    pub fn run(&self, buffer: NativeCommandBuffer) -> Option<(i32, String)> {
        self.commit(buffer);
        self.finish(buffer)
    }

    /// Waits, and returns the error.
    pub fn finish(&self, buffer: NativeCommandBuffer) -> Option<(i32, String)> {
        call!(self.driver, wait_completed(buffer)).unwrap();
        call!(self.driver, completion(buffer)).unwrap().error
    }

    /// A command buffer with one kernel in one encoder.
    pub fn kernel(&self, p: NativePipeline, b: NativeBuffer) -> NativeCommandBuffer {
        let buffer = self.command();
        let encoder = self.serial(buffer);
        self.dispatch(encoder, p, b);
        self.end(encoder);
        buffer
    }

    /// The first integer of a shared buffer.
    pub fn read(&self, buffer: NativeBuffer) -> u32 {
        let at = call!(self.driver, buffer_contents(buffer)).unwrap().unwrap();
        let at = std::ptr::with_exposed_provenance::<u32>(at as usize);
        // SAFETY: the buffer has four bytes at least, and no work runs.
        unsafe { at.read() }
    }

    pub fn release(&self, object: impl Into<NativeObject>) {
        call!(self.driver, release(object.into()));
    }

    pub fn reports(&self) -> Vec<String> {
        self.driver.machine().take_reports().iter().map(ToString::to_string).collect()
    }

    /// The effects of the broken rules since the last call.
    pub fn broken(&self) -> Vec<Effect> {
        self.driver.take_broken_rules().iter().map(|rule| rule.effect).collect()
    }

    /// Checks that a call broke one rule.
    pub fn refused<T: std::fmt::Debug>(&self, effect: Effect, result: Result<T>) {
        let error = result.expect_err("a rule was broken");
        let code = leasehold_sim::mps::BROKEN_RULE;
        assert!(matches!(error, Error::Driver { code: c, .. } if c == code), "{error}");
        assert_eq!(self.broken(), [effect], "{error}");
    }
}

/// One threadgroup of one thread, over these parts of buffers.
pub fn grid(bindings: &[Binding]) -> Dispatch<'_> {
    Dispatch { groups: [1; 3], threads: [1; 3], bindings }
}
