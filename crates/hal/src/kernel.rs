//! The backends' view of kernels: sources, pipelines, bindings, rules of launches, and arguments of
//! CPU kernels.
//!
//! This module must not know which kernels exist.

mod args;
mod check;
mod cubin;
mod params;
mod tensor_map;

pub use args::{CpuArgs, CpuCFn, CpuFn, CpuTile};
pub use check::{KernelCheck, LaunchInfo, Overlap};
pub use cubin::Cubin;
pub use params::FromParams;
pub use tensor_map::{Interleave, MapElement, Swizzle, TensorMap};

use leasehold_core::{Error, Result, Tagged, tags};
use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomPinned;

/// The access of an operation to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Access {
    /// Reads the memory: waits for the last write.
    Read = 1,
    /// Writes every byte that it accesses and reads none: waits for the last write and all reads
    /// since.
    Write = 2,
    /// Reads and writes the memory.
    ReadWrite = 3,
}

impl Access {
    /// Returns whether the access reads.
    #[inline]
    #[must_use]
    pub fn reads(self) -> bool {
        self as u32 & 1 != 0
    }

    /// Returns whether the access writes.
    #[inline]
    #[must_use]
    pub fn writes(self) -> bool {
        self as u32 & 2 != 0
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Read => "read",
            Self::Write => "written",
            Self::ReadWrite => "read and written",
        })
    }
}

/// A range of device memory that an operation uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Binding {
    /// The address of the first byte; a symbolic one (bit 63) while recording.
    pub addr: u64,
    /// Bytes from `addr` that the operation may access.
    pub len: u64,
    /// Metal's spanning buffer; 0 elsewhere.
    pub native: u64,
    /// The operation's access.
    pub access: Access,
}

const _: () = assert!(size_of::<Binding>() == 32);

impl Binding {
    /// Returns whether both share a byte. An empty binding shares none.
    #[inline]
    #[must_use]
    pub fn overlaps(&self, other: &Binding) -> bool {
        let end = |b: &Binding| b.addr.saturating_add(b.len);
        self.addr.max(other.addr) < end(self).min(end(other))
    }
}

/// The source of a kernel's code.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum KernelSource<'a> {
    /// A Rust function.
    Cpu(CpuFn),
    /// A function of C, which the CPU runs.
    CpuC(CpuCFn),
    /// CUDA C++, compiled at run time.
    CudaC {
        /// The source text.
        source: Cow<'a, str>,
        /// Options for the compiler.
        options: Cow<'a, [String]>,
    },
    /// NVIDIA's intermediate code.
    Ptx(Cow<'a, str>),
    /// NVIDIA's machine code of one module for several architectures. The driver compiles nothing
    /// on a device of these architectures.
    Cubins {
        /// The machine code, one image for each architecture.
        images: &'a [Cubin<'a>],
        /// The module's PTX: for devices without an image, and for drivers that refuse theirs.
        ptx: Cow<'a, str>,
    },
    /// The Metal shading language, compiled at run time.
    Msl(Cow<'a, str>),
    /// A function that is registered with the simulated device under this name.
    Registered(Cow<'a, str>),
}

impl KernelSource<'_> {
    /// The kind, for messages.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            KernelSource::Cpu(_) => "a Rust function",
            KernelSource::CpuC(_) => "a C function",
            KernelSource::CudaC { .. } => "CUDA C++",
            KernelSource::Ptx(_) => "PTX",
            KernelSource::Cubins { .. } => "CUDA machine code",
            KernelSource::Msl(_) => "MSL",
            KernelSource::Registered(_) => "a registered function",
        }
    }
}

/// A description of a kernel: its code, and the rules of its launches.
///
/// ```
/// use leasehold_hal::{Access, CpuArgs, KernelCheck, KernelDesc, KernelSource};
///
/// /// A tile sets 1,024 floats.
/// unsafe fn fill(args: &CpuArgs<'_>) {
///     // SAFETY: the kernel writes binding 0. The grid has one dimension, so each tile has
///     // elements of its own.
///     let from = args.tile()[0] as usize * 1024;
///     unsafe { args.slice_mut::<f32>(0, from, 1024) }.fill(args.params());
/// }
///
/// let check = KernelCheck::new(|launch| {
///     let [tiles, 1, 1] = launch.grid else {
///         return Err(leasehold_core::Error::invalid("a grid of one dimension"));
///     };
///     launch.want(0, u64::from(tiles) * 4096)
/// });
/// let desc = KernelDesc::new("fill", KernelSource::Cpu(fill), &[Access::Write], check)
///     .params_of::<f32>()
///     .aligned(4);
/// desc.validate().unwrap();
/// ```
#[derive(Debug, Clone)]
pub struct KernelDesc<'a> {
    /// The name in reports and, with the source's identity, the key of the pipeline.
    pub name: Cow<'a, str>,
    /// The entry point in the source.
    /// Default: the name.
    pub entry: Cow<'a, str>,
    /// The code.
    pub source: KernelSource<'a>,
    /// The kernel's access to each of its bindings.
    pub bindings: Cow<'a, [Access]>,
    /// Bytes of its parameters.
    /// Default: 0.
    pub params: u32,
    /// The rule that decides which launches may run.
    pub check: KernelCheck,
    /// The alignment of each binding in bytes, a power of two. Empty: 1 for all; one number: for
    /// all; otherwise one number for each.
    /// Default: empty.
    pub alignment: Cow<'a, [u32]>,
    /// The rule for bindings that share memory if one of them is written.
    /// Default: [`Overlap::Refused`].
    pub overlap: Overlap,
    /// Whether the code itself waits for the kernels in front of it (CUDA: programmatic dependent
    /// launch). Its blocks may then begin in a graph while the previous kernel still runs. Such
    /// code keeps this rule where it is compiled for compute capability 9.0 or newer: every block
    /// executes `griddepcontrol.wait`, and a thread reads and writes bindings only after this, but
    /// for [`early_reads`](Self::early_reads). A prefetch into the L2 cache is no read. Other
    /// backends and devices ignore the field.
    /// Default: `false`.
    pub dependent_launch: bool,
    /// The bindings that the code can read before it waits, bit `i` for binding `i`. Only a kernel
    /// with [`dependent_launch`](Self::dependent_launch) has any, and it only reads them.
    ///
    /// The code reads such a binding early only if a launch grants it. A graph grants those that
    /// none of its operations writes ([`Plan::early_reads`](crate::Plan::early_reads)). An eager
    /// launch grants none. On CUDA, a kernel with this field takes one word more, behind its
    /// parameters: the bits of the grant. Its parameters have a multiple of four bytes then. Other
    /// backends ignore the field.
    /// Default: 0.
    pub early_reads: u32,
    /// Bindings that may be the whole reservation of a growing buffer, each with the binding that
    /// has the buffer's limits, which it only reads: two words of 64 bits for each of equal parts
    /// of the buffer, which is one part as a rule. First come the limits of all parts, then their
    /// numbers of shared bytes. The code touches the bytes of a part only below the part's limit,
    /// and writes none of the shared bytes at its beginning. It reads the words on the device, at
    /// each launch. Bytes that a first limit covers, as if it were the only one, have memory too. A
    /// binding with empty limits has all of its memory.
    /// Default: empty.
    pub limits: Cow<'a, [(u32, u32)]>,
    /// The [tensor maps](TensorMap) in the parameters, each with its binding and its offset, which
    /// is a multiple of 64. The first parameter of a CUDA function with maps is one of them, or a
    /// structure that is aligned to 64 bytes. A launch checks each map against its operand.
    /// Default: empty.
    pub maps: Cow<'a, [(u32, u32)]>,
    /// Blocks of a cluster in each dimension, of which each launch is made: 8 in all, or 16 where a
    /// device has room. Blocks of a cluster run at the same time, and access each other's shared
    /// memory. CUDA has clusters from compute capability 9.0 on. A grid is a multiple of the
    /// cluster, as a launch checks. Sources of other backends refuse clusters.
    /// Default: `[1, 1, 1]`.
    pub cluster: [u32; 3],
    /// All blocks of a launch run at the same time, so that they can wait for each other. A launch
    /// checks that the device has room for all of them
    /// ([`Device::resident_blocks`](crate::Device::resident_blocks)). Such a kernel does not begin
    /// before the one in front of it is over. Sources of other backends than CUDA refuse the field.
    /// Default: `false`.
    pub cooperative: bool,
}

impl<'a> KernelDesc<'a> {
    /// The most blocks of a cluster.
    pub const CLUSTER: u32 = 16;
    /// The most blocks of a cluster that each device with clusters has room for.
    pub const PORTABLE_CLUSTER: u32 = 8;

    /// A kernel whose entry has the kernel's name. It has no parameters, and its bindings may have
    /// any alignment but must not overlap.
    pub fn new(
        name: impl Into<Cow<'a, str>>,
        source: KernelSource<'a>,
        bindings: &[Access],
        check: KernelCheck,
    ) -> Self {
        let name = name.into();
        Self {
            entry: name.clone(),
            name,
            source,
            bindings: bindings.to_vec().into(),
            params: 0,
            check,
            alignment: Cow::Borrowed(&[]),
            overlap: Overlap::Refused,
            dependent_launch: false,
            early_reads: 0,
            limits: Cow::Borrowed(&[]),
            maps: Cow::Borrowed(&[]),
            cluster: [1; 3],
            cooperative: false,
        }
    }

    /// Sets the name of the entry.
    #[must_use]
    pub fn entry(mut self, entry: impl Into<Cow<'a, str>>) -> Self {
        self.entry = entry.into();
        self
    }

    /// Sets the type of the parameters to `T`.
    #[must_use]
    pub fn params_of<T>(mut self) -> Self {
        self.params = u32::try_from(size_of::<T>()).unwrap_or(u32::MAX);
        self
    }

    /// Sets the alignment of all bindings to `bytes`.
    #[must_use]
    pub fn aligned(mut self, bytes: u32) -> Self {
        self.alignment = vec![bytes].into();
        self
    }

    /// Allows bindings to overlap by the rule `overlap`.
    #[must_use]
    pub fn overlapping(mut self, overlap: Overlap) -> Self {
        self.overlap = overlap;
        self
    }

    /// Says that the code itself waits for the kernels in front of it, by the rule of
    /// [`dependent_launch`](Self::dependent_launch).
    #[must_use]
    pub fn dependent_launch(mut self) -> Self {
        self.dependent_launch = true;
        self
    }

    /// Says that the code can read these bindings before it waits, by the rule of
    /// [`early_reads`](Self::early_reads).
    #[must_use]
    pub fn reading_early(mut self, bindings: &[u32]) -> Self {
        // A number that is no binding stays one: bit 31 is beyond the limit of 30.
        self.early_reads = bindings.iter().fold(self.early_reads, |all, &i| all | 1 << i.min(31));
        self
    }

    /// Says that the code keeps to the limit in binding `limit` when it touches `binding`, by the
    /// rule of [`limits`](Self::limits).
    #[must_use]
    pub fn limited_by(mut self, binding: u32, limit: u32) -> Self {
        self.limits.to_mut().push((binding, limit));
        self
    }

    /// Says that the parameters have a [`TensorMap`] of `binding` at `offset`, by the rule of
    /// [`maps`](Self::maps).
    #[must_use]
    pub fn map(mut self, binding: u32, offset: u32) -> Self {
        self.maps.to_mut().push((binding, offset));
        self
    }

    /// Sets the blocks of a cluster, by the rule of [`cluster`](Self::cluster). NVIDIA:
    /// [thread block clusters][page].
    ///
    /// [page]: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#thread-block-clusters
    #[doc(alias("cudaLaunchAttributeClusterDimension", "__cluster_dims__"))]
    #[must_use]
    pub fn cluster(mut self, blocks: [u32; 3]) -> Self {
        self.cluster = blocks;
        self
    }

    /// Says that all blocks of a launch run at the same time, by the rule of
    /// [`cooperative`](Self::cooperative). NVIDIA: [`cuLaunchCooperativeKernel`][page].
    ///
    /// [page]: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__EXEC.html
    #[doc(alias("cudaLaunchAttributeCooperative", "grid.sync"))]
    #[must_use]
    pub fn cooperative(mut self) -> Self {
        self.cooperative = true;
        self
    }

    /// Returns whether launches have clusters, or are cooperative.
    #[must_use]
    pub fn has_attributes(&self) -> bool {
        self.cooperative || self.cluster != [1; 3]
    }

    /// The alignment that binding `i` must have.
    #[must_use]
    pub fn alignment_of(&self, i: usize) -> u32 {
        match &*self.alignment {
            [all] => *all,
            each => each.get(i).copied().unwrap_or(1),
        }
    }

    /// Checks the limits that are equal on every backend.
    ///
    /// # Errors
    /// `InvalidArgument` for more than 30 bindings, more than 4,096 bytes of parameters, or an
    /// empty name or entry. The same for alignments that are no powers of two, and for another
    /// number of alignments than none, one, or one for each binding. The same for early reads of
    /// what is no binding or is written, of a kernel that does not wait itself, and of one whose
    /// parameters do not have a multiple of four bytes. The same for limits of no binding, or by
    /// one that is not only read. The same for tensor maps of no binding, beyond the parameters or
    /// at an offset that is no multiple of 64, and for clusters of no or more than 16 blocks.
    pub fn validate(&self) -> Result<()> {
        use crate::info::Limits;
        if self.name.is_empty() {
            return Err(Error::invalid("a kernel needs a name"));
        }
        if self.entry.is_empty() {
            return Err(Error::invalid(format!("kernel {}: its entry has no name", self.name)));
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
        if self.alignment.len() > 1 && self.alignment.len() != self.bindings.len() {
            return Err(Error::invalid(format!(
                "kernel {}: {} alignments for {} bindings",
                self.name,
                self.alignment.len(),
                self.bindings.len()
            )));
        }
        if let Some(odd) = self.alignment.iter().find(|a| !a.is_power_of_two()) {
            return Err(Error::invalid(format!(
                "kernel {}: an alignment of {odd} is no power of two",
                self.name
            )));
        }
        let read = |i: usize| matches!(self.bindings.get(i), Some(Access::Read));
        if let Some(i) = (0..32).find(|&i| self.early_reads >> i & 1 != 0 && !read(i)) {
            return Err(Error::invalid(format!(
                "kernel {}: it cannot read {i} early, which is no binding that it only reads",
                self.name
            )));
        }
        let outside = |&&(i, limit): &&(u32, u32)| {
            i == limit || i as usize >= self.bindings.len() || !read(limit as usize)
        };
        if let Some((i, limit)) = self.limits.iter().find(outside) {
            return Err(Error::invalid(format!(
                "kernel {}: {limit} cannot have the limit of binding {i}; name two bindings, of which the second is only read",
                self.name
            )));
        }
        if self.early_reads != 0 && !self.dependent_launch {
            return Err(Error::invalid(format!(
                "kernel {}: it cannot read early, because it does not wait itself (dependent_launch)",
                self.name
            )));
        }
        if self.early_reads != 0 && !self.params.is_multiple_of(4) {
            return Err(Error::invalid(format!(
                "kernel {}: it has {} bytes of parameters, and the word of its early reads needs a multiple of four in front",
                self.name, self.params
            )));
        }
        let wrong = |&&(i, offset): &&(u32, u32)| {
            i as usize >= self.bindings.len()
                || !offset.is_multiple_of(TensorMap::ALIGNMENT)
                || self.params.checked_sub(TensorMap::BYTES).is_none_or(|last| offset > last)
        };
        if let Some((i, offset)) = self.maps.iter().find(wrong) {
            return Err(Error::invalid(format!(
                "kernel {}: no tensor map of binding {i} is at byte {offset} of {} bytes of parameters; name a binding, and a multiple of 64 with 128 bytes behind it",
                self.name, self.params
            )));
        }
        let blocks = self.cluster.iter().fold(1_u32, |all, &n| all.saturating_mul(n));
        if !(1..=Self::CLUSTER).contains(&blocks) {
            return Err(Error::invalid(format!(
                "kernel {}: a cluster of {:?} is {blocks} blocks, and may have 1 to {}",
                self.name,
                self.cluster,
                Self::CLUSTER
            )));
        }
        Ok(())
    }
}

/// A kernel that is ready for dispatch on its device. Made by
/// [`Device::pipeline`](crate::Device::pipeline).
#[doc(alias = "ComputePipelineState")]
pub struct Pipeline {
    /// The backend's object: a function pointer, a `CUfunction`, a pipeline state.
    pub native: u64,
    /// The name in reports.
    pub name: Box<str>,
    /// The kernel's access to each of its bindings.
    pub bindings: Box<[Access]>,
    /// Bytes of its parameters.
    pub params: u32,
    /// The most threads of a block.
    pub block_threads: u32,
    /// Whether the code waits itself for the kernels in front of it on this device
    /// ([`KernelDesc::dependent_launch`]). Default: `false`, which a backend may change.
    pub dependent_launch: bool,
    /// The bindings that the code can read before it waits ([`KernelDesc::early_reads`]).
    pub early_reads: u32,
    /// The bindings that may have memory in part: the code keeps to their
    /// [limits](KernelDesc::limits).
    pub limited: u32,
    /// The tensor maps in its parameters ([`KernelDesc::maps`]).
    pub maps: Box<[(u32, u32)]>,
    /// The first byte of the parameters in a CUDA function's arguments. Default: behind the
    /// addresses of the bindings, which a backend may change.
    pub params_at: u32,
    /// Blocks of a cluster in each dimension ([`KernelDesc::cluster`]).
    pub cluster: [u32; 3],
    /// All blocks of a launch run at the same time ([`KernelDesc::cooperative`]).
    pub cooperative: bool,
    /// A CUDA function is given more than addresses and parameters: tensor maps, the word
    /// of its early reads, or attributes of its launches.
    pub is_given_more: bool,
    /// A pipeline must not be moved out of its manager's pool.
    _place: PhantomPinned,
}

impl Pipeline {
    /// The pipeline of a described kernel, with the name, bindings and parameters of its
    /// description.
    #[must_use]
    pub fn new(desc: &KernelDesc<'_>, native: u64, block_threads: u32) -> Self {
        Self {
            native,
            name: desc.name.as_ref().into(),
            bindings: desc.bindings.as_ref().into(),
            params: desc.params,
            block_threads,
            dependent_launch: false,
            early_reads: desc.early_reads,
            limited: desc.limits.iter().fold(0, |all, &(i, _)| all | 1 << i.min(31)),
            maps: desc.maps.as_ref().into(),
            params_at: 8 * desc.bindings.len() as u32,
            cluster: desc.cluster,
            cooperative: desc.cooperative,
            is_given_more: desc.early_reads != 0 || !desc.maps.is_empty() || desc.has_attributes(),
            _place: PhantomPinned,
        }
    }
}

impl Tagged for Pipeline {
    type Tag = tags::Pipeline;
}

impl fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Pipeline({}, {} bindings, {} bytes)",
            self.name,
            self.bindings.len(),
            self.params
        )
    }
}
