//! The kernels of the scenarios and figures: their code for a device, and the same functions for
//! the simulated device.
//!
//! This module must not know drivers.

use leasehold_cuda::driver::ops::{Launch, NativeFunction};
use leasehold_hal::{Access, Binding};

/// The code as PTX, for any device that a driver of CUDA 13 supports. NVRTC 13.0 compiled it from
/// [`SOURCE`].
pub const PTX: &str = include_str!("kernels.ptx");

/// The source of the code.
pub const SOURCE: &str = include_str!("kernels.cu");

/// A launch's arguments: the addresses, then the parameters.
#[derive(Debug, Clone)]
pub struct Arguments {
    bytes: Vec<u8>,
    bindings: Vec<Binding>,
}

impl Arguments {
    /// The arguments for these memories (address, bytes, access) and parameters.
    #[must_use]
    pub fn new(memories: &[(u64, u64, Access)], params: &[u8]) -> Self {
        let mut bytes = Vec::new();
        let mut bindings = Vec::new();
        for &(addr, len, access) in memories {
            bytes.extend_from_slice(&addr.to_le_bytes());
            bindings.push(Binding { addr, len, native: 0, access });
        }
        bytes.extend_from_slice(params);
        Self { bytes, bindings }
    }

    /// `trace_add`: `out[i] = a[i] + b[i]` for `words` words.
    #[must_use]
    pub fn add(a: u64, b: u64, out: u64, words: u32) -> Self {
        let bytes = u64::from(words) * 4;
        let memories =
            [(a, bytes, Access::Read), (b, bytes, Access::Read), (out, bytes, Access::Write)];
        Self::new(&memories, &words.to_le_bytes())
    }

    /// `trace_store`: `at[i] = value + i * step` for `count` 64-bit words.
    #[must_use]
    pub fn store(at: u64, value: u64, count: u32, step: u32) -> Self {
        let mut params = value.to_le_bytes().to_vec();
        params.extend_from_slice(&count.to_le_bytes());
        params.extend_from_slice(&step.to_le_bytes());
        Self::new(&[(at, u64::from(count) * 8, Access::Write)], &params)
    }

    /// `trace_shared`: `out[0] = 0 + 1 + … + (words - 1)`.
    #[must_use]
    pub fn shared(out: u64, words: u32) -> Self {
        Self::new(&[(out, 4, Access::Write)], &words.to_le_bytes())
    }

    /// A kernel that writes one memory and takes no parameters.
    #[must_use]
    pub fn one(at: u64, bytes: u64) -> Self {
        Self::new(&[(at, bytes, Access::Write)], &[])
    }

    /// A launch with these arguments.
    #[must_use]
    pub fn launch(&self, function: NativeFunction, grid: u32, block: u32) -> Launch<'_> {
        Launch {
            early: None,
            attributes: None,
            function,
            grid: [grid, 1, 1],
            block: [block, 1, 1],
            shared: 0,
            args: &self.bytes,
            bindings: &self.bindings,
        }
    }

    /// Overwrites the buffer that launches were made with.
    pub fn clobber(&mut self) {
        self.bytes.fill(0xff);
    }
}

/// Registers the kernels with a simulated machine, under the same names.
pub fn register(kernels: &crate::KernelRegistry) {
    use crate::{KernelBody, KernelSpec, Launch};
    use leasehold_core::{Error, Result};
    use leasehold_cuda::driver::codes::code;

    /// Element `i` of a binding that the machine has checked. The binding may be misaligned, or
    /// another owner's memory.
    fn at<T>(launch: &Launch<'_>, binding: usize, i: usize) -> *mut T {
        let (first, len) = launch.pointer::<T>(binding);
        assert!(i < len, "beyond binding {binding}");
        first.wrapping_add(i)
    }

    fn add(launch: &Launch<'_>) -> Result<()> {
        let threads = u64::from(launch.grid()[0]) * u64::from(launch.block()[0]);
        let count = (u64::from(launch.params::<u32>()?).min(threads)) as usize;
        for i in 0..count {
            let [a, b, out] = [0, 1, 2].map(|binding| at::<u32>(launch, binding, i));
            // SAFETY: elements of bindings that the machine has checked. Kernels run one at a time.
            unsafe { out.write_unaligned(a.read_unaligned().wrapping_add(b.read_unaligned())) };
        }
        Ok(())
    }

    fn store(launch: &Launch<'_>) -> Result<()> {
        let [low, high, count, step] = launch.params::<[u32; 4]>()?;
        let value = u64::from(high) << 32 | u64::from(low);
        let len = launch.pointer::<u64>(0).1;
        for i in 0..count.min(len as u32) {
            let word = at::<u64>(launch, 0, i as usize);
            // SAFETY: an element of a binding that the machine has checked. Kernels run one at a
            // time.
            unsafe { word.write_unaligned(value.wrapping_add(u64::from(i) * u64::from(step))) };
        }
        Ok(())
    }

    fn shared(launch: &Launch<'_>) -> Result<()> {
        let count = launch.params::<u32>()?;
        if count.checked_mul(4).is_none_or(|bytes| bytes > launch.shared()) {
            return Err(fault("trace_shared", code::ILLEGAL_ADDRESS));
        }
        // SAFETY: an element of a binding that the machine has checked. Kernels run one at a time.
        unsafe { at::<u32>(launch, 0, 0).write_unaligned((0..count).fold(0, u32::wrapping_add)) };
        Ok(())
    }

    fn down(launch: &Launch<'_>) -> Result<()> {
        let left = at::<u32>(launch, 0, 0);
        // SAFETY: an element of a binding that the machine has checked. Kernels run one at a time.
        unsafe { left.write_unaligned(left.read_unaligned().wrapping_sub(1)) };
        Ok(())
    }

    fn fault(api: &'static str, code: i32) -> Error {
        Error::Driver { api, code, name: leasehold_cuda::driver::codes::name_or_number(code) }
    }

    fn body(f: impl Fn(&Launch<'_>) -> Result<()> + Send + Sync + 'static) -> KernelBody {
        KernelBody::run(f)
    }

    let one = &[Access::Write];
    let add_to = &[Access::Read, Access::Read, Access::Write];
    kernels.register("trace_add", KernelSpec::new(add_to, 4, body(add)));
    kernels.register("trace_store", KernelSpec::new(one, 16, body(store)));
    kernels.register("trace_shared", KernelSpec::new(one, 4, body(shared)));
    kernels.register("trace_down", KernelSpec::new(&[Access::ReadWrite], 0, body(down)));
    let nothing = &[Access::ReadWrite; 3];
    kernels.register("trace_nothing", KernelSpec::new(nothing, 0, body(|_| Ok(()))));
    let mut small = KernelSpec::new(
        one,
        0,
        body(|launch| {
            let threads = launch.block()[0] as usize;
            for i in 0..threads.min(launch.pointer::<u32>(0).1) {
                // SAFETY: an element of a binding that the machine has checked. Kernels run one at
                // a time.
                unsafe { at::<u32>(launch, 0, i).write_unaligned(i as u32) };
            }
            Ok(())
        }),
    );
    small.block_threads = 64;
    kernels.register("trace_small", small);
    let illegal = body(|_| Err(fault("trace_illegal", code::ILLEGAL_ADDRESS)));
    kernels.register("trace_illegal", KernelSpec::new(one, 0, illegal));
    let trap = body(|_| Err(fault("trace_trap", code::LAUNCH_FAILED)));
    kernels.register("trace_trap", KernelSpec::new(one, 0, trap));
    let misaligned = body(|_| Err(fault("trace_misaligned", code::MISALIGNED_ADDRESS)));
    kernels.register("trace_misaligned", KernelSpec::new(one, 0, misaligned));
}
