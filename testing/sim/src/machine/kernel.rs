//! Kernels: host functions that are registered by name.
//!
//! A kernel's bindings are host addresses that are valid while the kernel runs; its launch had
//! device addresses. A kernel runs under the machine's lock, so it must not call the machine. A
//! kernel that waits for the host or another queue is a [`KernelBody::Poll`]. The machine polls it
//! repeatedly and runs other work meanwhile.
//!
//! This module must not know queues.

use bytemuck::AnyBitPattern;
use leasehold_core::sync::{Arc, RwLock};
use leasehold_core::{Error, Result};
use leasehold_hal::{Access, Binding, CpuArgs, CpuFn, TensorMap};
use std::collections::BTreeMap;
use std::fmt;
use std::task::Poll;

/// The arguments of a kernel. Only the machine makes them.
#[derive(Debug)]
pub struct Launch<'a> {
    pub(super) name: &'a str,
    pub(super) device: u32,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared: u32,
    pub(super) cluster: [u32; 3],
    pub(super) cooperative: bool,
    pub(super) bindings: &'a [Binding],
    pub(super) given: &'a [Binding],
    pub(super) params: &'a [u8],
}

impl<'a> Launch<'a> {
    /// The kernel's name.
    #[must_use]
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The device on which the kernel runs.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Blocks in each direction; none is zero.
    #[must_use]
    pub fn grid(&self) -> [u32; 3] {
        self.grid
    }

    /// Threads of a block.
    #[must_use]
    pub fn block(&self) -> [u32; 3] {
        self.block
    }

    /// Bytes of shared memory of a block.
    #[must_use]
    pub fn shared(&self) -> u32 {
        self.shared
    }

    /// Blocks of a cluster in each direction.
    #[must_use]
    pub fn cluster(&self) -> [u32; 3] {
        self.cluster
    }

    /// All blocks run at the same time.
    #[must_use]
    pub fn is_cooperative(&self) -> bool {
        self.cooperative
    }

    /// The bindings, with host addresses that are valid until the kernel returns. An empty binding
    /// has address 0.
    #[must_use]
    pub fn bindings(&self) -> &'a [Binding] {
        self.bindings
    }

    /// The bindings, with the addresses that the launch was given.
    #[must_use]
    pub fn given(&self) -> &'a [Binding] {
        self.given
    }

    /// The parameters' bytes.
    #[must_use]
    pub fn params_bytes(&self) -> &'a [u8] {
        self.params
    }

    /// The elements of binding `i`: a pointer to the first one, and the number of whole elements.
    #[must_use]
    pub fn pointer<T>(&self, i: usize) -> (*mut T, usize) {
        let b = &self.bindings[i];
        (
            std::ptr::with_exposed_provenance_mut(b.addr as usize),
            (b.len as usize).checked_div(size_of::<T>()).unwrap_or(0),
        )
    }

    /// The parameters as a plain struct.
    ///
    /// # Errors
    /// `InvalidArgument` if the sizes differ.
    pub fn params<T: AnyBitPattern>(&self) -> Result<T> {
        bytemuck::try_pod_read_unaligned(self.params).map_err(|_| {
            Error::invalid(format!(
                "{} bytes of parameters, want {}",
                self.params.len(),
                size_of::<T>()
            ))
        })
    }
}

/// A kernel that runs to its end.
pub type RunFn = dyn Fn(&Launch<'_>) -> Result<()> + Send + Sync;
/// A kernel that the machine polls until it is ready.
pub type PollFn = dyn Fn(&Launch<'_>) -> Result<Poll<()>> + Send + Sync;

/// The function of a kernel. An error or a panic is a fault of the device.
#[derive(Clone)]
pub enum KernelBody {
    /// Runs to its end, under the machine's lock.
    Run(Arc<RunFn>),
    /// Polled until it is ready; other queues run meanwhile. Memory that it writes before it is
    /// ready stays written.
    Poll(Arc<PollFn>),
}

impl KernelBody {
    /// A function that runs to its end.
    pub fn run(f: impl Fn(&Launch<'_>) -> Result<()> + Send + Sync + 'static) -> Self {
        KernelBody::Run(Arc::new(f))
    }

    /// A function that the machine polls until it is ready.
    pub fn poll(f: impl Fn(&Launch<'_>) -> Result<Poll<()>> + Send + Sync + 'static) -> Self {
        KernelBody::Poll(Arc::new(f))
    }

    /// A CPU kernel, which runs over all tiles of the launch's grid, one after the other.
    ///
    /// # Safety
    /// - `f` is a kernel for every launch that the machine gets for this body. The machine checks
    ///   only three conditions: the bindings lie in live memory, and their number and the size of
    ///   the parameters match the [`KernelSpec`].
    #[must_use]
    pub unsafe fn cpu(f: CpuFn) -> Self {
        Self::run(move |launch| {
            // SAFETY: `f` accepts every launch (this function's contract), and only the machine
            // makes launches.
            unsafe { run_tiles(f, launch) };
            Ok(())
        })
    }
}

/// Runs a CPU kernel over all tiles of a launch.
///
/// # Safety
/// - `f` is a kernel for this launch.
unsafe fn run_tiles(f: CpuFn, launch: &Launch<'_>) {
    #[repr(C, align(64))]
    #[derive(Clone, Copy)]
    struct Line([u8; 64]);
    let mut scratch = vec![Line([0; 64]); (launch.shared as usize).div_ceil(64)];
    let shared = (scratch.as_mut_ptr().cast(), launch.shared);
    // SAFETY: the machine translated the bindings for the duration of the call. The scratch memory
    // belongs to this call.
    let mut args = unsafe {
        CpuArgs::new((launch.grid, launch.block), launch.bindings, launch.params, shared)
    };
    for z in 0..launch.grid[2] {
        for y in 0..launch.grid[1] {
            for x in 0..launch.grid[0] {
                args.set_tile([x, y, z]);
                // SAFETY: `f` is a kernel for this launch, by this function's contract. Tiles run
                // one after the other.
                unsafe { f(&args) };
            }
        }
    }
}

/// The properties of a kernel beside its name.
#[derive(Clone)]
pub struct KernelSpec {
    /// The kernel's access to each of its bindings.
    pub bindings: Vec<Access>,
    /// Bytes of its parameters.
    pub params: u32,
    /// The most threads of a block.
    pub block_threads: u32,
    /// The kernel leaves some bytes of its output bindings unchanged.
    pub gaps: bool,
    /// The kernel may write what it also reads before it reads it. So a read of such a binding's
    /// unwritten memory stays undetected.
    pub writes_first: bool,
    /// The kernel can read bindings early, and a CUDA function takes the word of the grant behind
    /// its parameters. The function here gets no such word.
    pub early: bool,
    /// Bindings whose bytes the kernel touches only below a limit, each with the binding that has
    /// the limit: a word of 64 bits, which the machine reads when the kernel begins. The function
    /// here gets such a binding with that length at most.
    pub limits: Vec<(u32, u32)>,
    /// The parameters have tensor maps, by which the arguments of a CUDA function are aligned.
    pub maps: bool,
    /// The function.
    pub body: KernelBody,
}

impl KernelSpec {
    /// A kernel with blocks of up to 1,024 threads.
    #[must_use]
    pub fn new(bindings: &[Access], params: u32, body: KernelBody) -> Self {
        Self {
            bindings: bindings.to_vec(),
            params,
            block_threads: 1024,
            gaps: false,
            writes_first: false,
            early: false,
            limits: Vec::new(),
            maps: false,
            body,
        }
    }

    /// The first byte of the parameters in the arguments of a CUDA function. Tensor maps are
    /// aligned on the device, where the arguments begin 16 bytes behind a multiple of 64.
    #[must_use]
    pub fn params_at(&self) -> usize {
        let addresses = self.bindings.len() * 8;
        let on_device = (addresses + 16).next_multiple_of(TensorMap::ALIGNMENT as usize);
        if self.maps { on_device - 16 } else { addresses }
    }

    /// Marks a kernel that leaves bytes of its output bindings unchanged, such as those between
    /// padded rows. The machine cannot distinguish these bytes from others. So it poisons nothing
    /// before such a kernel, and a kernel that reads its output stays undetected.
    #[must_use]
    pub fn leaving_gaps(mut self) -> Self {
        self.gaps = true;
        self
    }

    /// Marks a kernel that can read bindings early.
    #[must_use]
    pub fn reading_early(mut self) -> Self {
        self.early = true;
        self
    }

    /// Marks a kernel that touches `binding` only below the limit in the binding `limit`.
    #[must_use]
    pub fn limited_by(mut self, binding: u32, limit: u32) -> Self {
        self.limits.push((binding, limit));
        self
    }
}

/// A kernel of a registry.
pub struct Kernel {
    /// Its name.
    pub name: Arc<str>,
    /// The rest.
    pub spec: KernelSpec,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Kernel({}, {} bindings, {} bytes)",
            self.name,
            self.spec.bindings.len(),
            self.spec.params
        )
    }
}

/// Kernels by name. A clone is the same registry.
///
/// ```
/// use leasehold_hal::Access;
/// use leasehold_sim::{KernelBody, KernelRegistry, KernelSpec};
/// let kernels = KernelRegistry::new();
/// let set = KernelBody::run(|launch| {
///     let (at, len) = launch.pointer::<u8>(0);
///     // SAFETY: the machine checked the binding.
///     unsafe { at.write_bytes(7, len) };
///     Ok(())
/// });
/// kernels.register("set", KernelSpec::new(&[Access::Write], 0, set));
/// assert!(kernels.get("set").is_some());
/// ```
#[derive(Clone, Default)]
pub struct KernelRegistry(Arc<RwLock<BTreeMap<Arc<str>, Arc<Kernel>>>>);

impl KernelRegistry {
    /// A registry without kernels.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a kernel. A kernel of the same name is replaced; existing launches keep the old
    /// one.
    pub fn register(&self, name: &str, spec: KernelSpec) -> Arc<Kernel> {
        let kernel = Arc::new(Kernel { name: name.into(), spec });
        self.0.write().insert(kernel.name.clone(), kernel.clone());
        kernel
    }

    /// The kernel of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<Kernel>> {
        self.0.read().get(name).cloned()
    }

    /// The names, in order.
    #[must_use]
    pub fn names(&self) -> Vec<Arc<str>> {
        self.0.read().keys().cloned().collect()
    }
}

impl fmt::Debug for KernelRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KernelRegistry").field(&self.names()).finish()
    }
}
