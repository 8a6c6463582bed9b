//! Kernels as backends see them: sources, pipelines, bindings, and what a CPU kernel is given.
//!
//! This module must not know which kernels exist.

use leasehold_core::{Error, Result, Tagged, tags};
use std::borrow::Cow;
use std::fmt;

/// What an operation does with memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Access {
    /// Reads it: waits for the last write.
    Read = 1,
    /// Writes all that it touches and reads none of it: waits for the last write and all reads since.
    Write = 2,
    /// Reads and writes it.
    ReadWrite = 3,
}

impl Access {
    /// Whether it reads.
    #[inline]
    #[must_use]
    pub fn reads(self) -> bool {
        self as u32 & 1 != 0
    }

    /// Whether it writes.
    #[inline]
    #[must_use]
    pub fn writes(self) -> bool {
        self as u32 & 2 != 0
    }
}

/// A piece of device memory that an operation uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Binding {
    /// The address of the first byte; a symbolic one (bit 63) while recording.
    pub addr: u64,
    /// Bytes from there on that the operation may touch.
    pub len: u64,
    /// Metal's spanning buffer; 0 elsewhere.
    pub native: u64,
    /// What the operation does with it.
    pub access: Access,
}

const _: () = assert!(size_of::<Binding>() == 32);

/// The entry of a CPU kernel: runs one tile (one block of the grid). Tiles of one dispatch run in any order and at the same
/// time on several threads; a panic poisons the stream.
///
/// # Safety
/// A caller supplies bindings that lie in memory valid for their accesses, and parameters of the size that the kernel declares.
pub type CpuFn = unsafe fn(&CpuArgs<'_>);

/// What one tile of a CPU kernel is given.
#[derive(Debug, Clone, Copy)]
pub struct CpuArgs<'a> {
    /// Which tile.
    pub tile: [u32; 3],
    /// How many tiles.
    pub grid: [u32; 3],
    /// The block size that the dispatch asked for; a hint on the CPU.
    pub block: [u32; 3],
    /// The bindings.
    pub bindings: &'a [Binding],
    /// The parameters.
    pub params: &'a [u8],
    /// Scratch memory of this tile alone, uninitialised, aligned to 64; `shared_len` bytes.
    pub shared: *mut u8,
    /// Bytes of scratch memory.
    pub shared_len: u32,
}

// SAFETY: `shared` belongs to the tile; the arguments are handed to the one thread that runs it.
unsafe impl Send for CpuArgs<'_> {}
// SAFETY: as above.
unsafe impl Sync for CpuArgs<'_> {}

impl<'a> CpuArgs<'a> {
    /// Binding `i` as a slice to read.
    ///
    /// # Safety
    /// - Binding `i` is read by this kernel, holds initialised `T`s, and no tile writes it meanwhile.
    #[must_use]
    pub unsafe fn slice<T: Copy>(&self, i: usize) -> &'a [T] {
        let b = &self.bindings[i];
        if b.len == 0 {
            return &[];
        }
        debug_assert!((b.addr as usize).is_multiple_of(align_of::<T>()));
        // SAFETY: by the contract; the length is rounded down to whole elements.
        unsafe { std::slice::from_raw_parts(b.addr as *const T, b.len as usize / size_of::<T>()) }
    }

    /// Binding `i` as a raw pointer to write, and the number of elements: several tiles share it, each writes its own part.
    #[must_use]
    pub fn pointer<T>(&self, i: usize) -> (*mut T, usize) {
        let b = &self.bindings[i];
        (b.addr as *mut T, b.len as usize / size_of::<T>())
    }

    /// Elements `from..from + count` of binding `i`, to write.
    ///
    /// # Safety
    /// - Binding `i` is written by this kernel, and this tile alone touches these elements.
    ///
    /// # Panics
    /// When the range does not lie in the binding; the stream is poisoned then.
    #[must_use]
    pub unsafe fn slice_mut<T: Copy>(&self, i: usize, from: usize, count: usize) -> &'a mut [T] {
        let (at, len) = self.pointer::<T>(i);
        assert!(from <= len && count <= len - from, "binding {i} has {len} elements, not {from}..{from}+{count}");
        if count == 0 {
            return &mut [];
        }
        // SAFETY: by the contract, within the binding.
        unsafe { std::slice::from_raw_parts_mut(at.add(from), count) }
    }

    /// The parameters as a plain struct.
    ///
    /// # Panics
    /// When the sizes differ; sessions check that before a launch.
    #[must_use]
    pub fn params<T: Copy>(&self) -> T {
        assert_eq!(self.params.len(), size_of::<T>(), "parameters of another size");
        // SAFETY: the bytes were made from a `T` by the session's typed setter, whose size is checked here.
        unsafe { std::ptr::read_unaligned(self.params.as_ptr().cast()) }
    }
}

/// Where a kernel's code comes from.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum KernelSource<'a> {
    /// A Rust function.
    Cpu(CpuFn),
    /// CUDA C++, compiled at run time.
    CudaC {
        /// The source text.
        source: Cow<'a, str>,
        /// Options for the compiler.
        options: Cow<'a, [String]>,
    },
    /// NVIDIA's intermediate code.
    Ptx(Cow<'a, str>),
    /// The Metal shading language, compiled at run time.
    Msl(Cow<'a, str>),
    /// A compiled Metal library.
    Metallib(Cow<'a, [u8]>),
    /// A function that the simulated device knows by this name.
    Registered(Cow<'a, str>),
}

impl KernelSource<'_> {
    /// The kind, for messages.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            KernelSource::Cpu(_) => "a Rust function",
            KernelSource::CudaC { .. } => "CUDA C++",
            KernelSource::Ptx(_) => "PTX",
            KernelSource::Msl(_) => "MSL",
            KernelSource::Metallib(_) => "a Metal library",
            KernelSource::Registered(_) => "a registered function",
        }
    }
}

/// A kernel to be made ready.
#[derive(Debug, Clone)]
pub struct KernelDesc<'a> {
    /// The name in reports and, with the source's identity, the key of the pipeline.
    pub name: Cow<'a, str>,
    /// The entry point in the source.
    pub entry: Cow<'a, str>,
    /// The code.
    pub source: KernelSource<'a>,
    /// What the kernel does with each of its bindings.
    pub bindings: Cow<'a, [Access]>,
    /// Bytes of its parameters.
    pub params: u32,
}

impl KernelDesc<'_> {
    /// Checks the limits that are equal on every backend.
    ///
    /// # Errors
    /// `InvalidArgument` for more than 30 bindings, more than 4,096 bytes of parameters, or an empty name.
    pub fn validate(&self) -> Result<()> {
        use crate::info::Limits;
        if self.name.is_empty() {
            return Err(Error::invalid("a kernel needs a name"));
        }
        if self.bindings.len() > Limits::BINDINGS as usize {
            return Err(Error::invalid(format!(
                "kernel {}: {} bindings, the limit is {}",
                self.name,
                self.bindings.len(),
                Limits::BINDINGS
            )));
        }
        if self.params > Limits::PARAMS {
            return Err(Error::invalid(format!(
                "kernel {}: {} bytes of parameters, the limit is {}",
                self.name,
                self.params,
                Limits::PARAMS
            )));
        }
        Ok(())
    }
}

/// A kernel, ready to be dispatched on its device. Made by [`Device::pipeline`](crate::Device::pipeline).
#[doc(alias = "ComputePipelineState")]
pub struct Pipeline {
    /// The backend's object: a function pointer, a `CUfunction`, a pipeline state.
    pub native: u64,
    /// The name in reports.
    pub name: Box<str>,
    /// What the kernel does with each of its bindings.
    pub bindings: Box<[Access]>,
    /// Bytes of its parameters.
    pub params: u32,
    /// The most threads of a block.
    pub block_threads: u32,
}

impl Tagged for Pipeline {
    type Tag = tags::Pipeline;
}

impl fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pipeline({}, {} bindings, {} bytes)", self.name, self.bindings.len(), self.params)
    }
}
