//! Kernels: definition and launch.

use super::call::LeaseholdBinding;
use super::convert::{check_out, give, list, text};
use super::operand::{LeaseholdOperand, access, held_all, operands_of, room, with_operands};
use super::point::LeaseholdPoint;
use crate::callback::{Callback, LeaseholdRelease};
use crate::kinds::{KERNELS, RUNTIMES, STREAMS};
use crate::status::{alone, ffi_guard, ffi_guard_release};
use leasehold::kernel::{
    CpuCFn, CpuTile, Cubin, Grid, KernelCheck, KernelDesc, KernelSource, Launch, LaunchInfo,
    Overlap,
};
use leasehold::{Access, Error, KernelBase, Result};
use leasehold_core::sync::{Arc, Mutex};
use std::borrow::Cow;
use std::ffi::{c_char, c_int, c_void};
use std::mem::{offset_of, size_of};

/// A function of C, which the CPU runs.
pub const LEASEHOLD_SOURCE_C_FUNCTION: u32 = 1;
/// CUDA C++, compiled at run time.
pub const LEASEHOLD_SOURCE_CUDA_C: u32 = 2;
/// NVIDIA's intermediate code.
pub const LEASEHOLD_SOURCE_PTX: u32 = 3;
/// NVIDIA's machine code.
pub const LEASEHOLD_SOURCE_CUBIN: u32 = 4;
/// The Metal shading language, compiled at run time.
pub const LEASEHOLD_SOURCE_MSL: u32 = 5;

/// No bindings may share memory if one of them is written.
pub const LEASEHOLD_OVERLAP_REFUSED: u32 = 0;
/// Two bindings may be the same range.
pub const LEASEHOLD_OVERLAP_IN_PLACE: u32 = 1;
/// Bindings may overlap in any way.
pub const LEASEHOLD_OVERLAP_ANY: u32 = 2;

/// The code waits itself for the kernels in front of it in a graph.
pub const LEASEHOLD_KERNEL_DEPENDENT: u32 = 1;
/// All blocks of a launch run at the same time.
pub const LEASEHOLD_KERNEL_COOPERATIVE: u32 = 2;

/// The arguments of one tile of a kernel on the CPU.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdTile {
    /// The tile's number in each direction.
    pub tile: [u32; 3],
    /// Tiles in each direction.
    pub grid: [u32; 3],
    /// The threads of the launch, which mean nothing to a CPU.
    pub threads: [u32; 3],
    /// Bytes at `shared`.
    pub shared_bytes: u32,
    /// Scratch memory of this tile alone, aligned to 64; its contents are not specified.
    pub shared: *mut c_void,
    /// The operands of the launch.
    pub bindings: *const LeaseholdBinding,
    /// How many.
    pub binding_count: usize,
    /// The parameters.
    pub params: *const c_void,
    /// Bytes of the parameters.
    pub params_bytes: usize,
}

const _: () = assert!(
    size_of::<CpuTile>() == size_of::<LeaseholdTile>()
        && offset_of!(CpuTile, tile) == offset_of!(LeaseholdTile, tile)
        && offset_of!(CpuTile, grid) == offset_of!(LeaseholdTile, grid)
        && offset_of!(CpuTile, block) == offset_of!(LeaseholdTile, threads)
        && offset_of!(CpuTile, shared_bytes) == offset_of!(LeaseholdTile, shared_bytes)
        && offset_of!(CpuTile, shared) == offset_of!(LeaseholdTile, shared)
        && offset_of!(CpuTile, bindings) == offset_of!(LeaseholdTile, bindings)
        && offset_of!(CpuTile, binding_count) == offset_of!(LeaseholdTile, binding_count)
        && offset_of!(CpuTile, params) == offset_of!(LeaseholdTile, params)
        && offset_of!(CpuTile, params_bytes) == offset_of!(LeaseholdTile, params_bytes)
);

/// Runs one tile.
pub type LeaseholdTileFunction = unsafe extern "C" fn(tile: *const LeaseholdTile);

/// A launch that a kernel's check is asked about.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdLaunchInfo {
    /// `sizeof` this struct.
    pub size: usize,
    /// Blocks in each direction; none is zero.
    pub blocks: [u32; 3],
    /// Threads of a block in each direction.
    pub threads: [u32; 3],
    /// Bytes of shared memory of a block.
    pub shared_bytes: u32,
    /// How many bindings there are.
    pub binding_count: u32,
    /// Bytes of each binding.
    pub binding_bytes: *const u64,
    /// The parameters.
    pub params: *const c_void,
    /// Bytes of the parameters.
    pub params_bytes: usize,
}

/// Says whether a launch may run: 0 if it may.
pub type LeaseholdCheck =
    unsafe extern "C" fn(context: *mut c_void, launch: *const LeaseholdLaunchInfo) -> c_int;

/// The code of a kernel for one backend.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdKernelSource {
    /// `LEASEHOLD_SOURCE_*`.
    pub kind: u32,
    /// Of machine code: 90 for compute capability 9.0.
    pub capability: u32,
    /// The function, of `LEASEHOLD_SOURCE_C_FUNCTION`.
    pub function: Option<LeaseholdTileFunction>,
    /// The entry in the code; null for the kernel's name.
    pub entry: *const c_char,
    /// The text or the machine code.
    pub code: *const c_void,
    /// Bytes of the code; 0 for a C string.
    pub code_bytes: usize,
    /// Options for the compiler of `LEASEHOLD_SOURCE_CUDA_C`.
    pub options: *const *const c_char,
    /// How many.
    pub option_count: usize,
    /// Of machine code: PTX for other devices, or null.
    pub ptx: *const c_char,
}

/// A kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdKernelDesc {
    /// `sizeof` this struct.
    pub size: usize,
    /// The name in reports.
    pub name: *const c_char,
    /// The code for each of several backends; a device uses the first that it takes.
    pub sources: *const LeaseholdKernelSource,
    /// How many.
    pub source_count: usize,
    /// The kernel's access to each of its bindings.
    pub access: *const u32,
    /// How many bindings there are.
    pub binding_count: usize,
    /// Bytes of the parameters.
    pub params_bytes: u32,
    /// The alignment of each binding; 0 and 1 for any.
    pub alignment: u32,
    /// `LEASEHOLD_OVERLAP_*`.
    pub overlap: u32,
    /// `LEASEHOLD_KERNEL_*`, or 0.
    pub flags: u32,
    /// Is asked before each launch; null if every launch may run.
    pub check: Option<LeaseholdCheck>,
    /// Is called once, when nobody asks the check any more; or null.
    pub release: Option<LeaseholdRelease>,
    /// For `check` and `release`.
    pub context: *mut c_void,
    /// The tensor maps in the parameters.
    pub maps: *const LeaseholdMapPlace,
    /// How many.
    pub map_count: usize,
    /// Blocks of a cluster in each direction; zeros for none.
    pub cluster: [u32; 3],
    /// The bindings that may be read early, bit `i` for binding `i`.
    pub early_reads: u32,
}

/// The place of a tensor map in the parameters of a kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdMapPlace {
    /// The binding of which it is the map.
    pub binding: u32,
    /// Its first byte in the parameters.
    pub offset: u32,
}

/// The blocks of a launch, and the threads of each.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdGrid {
    /// Blocks in each direction.
    pub blocks: [u32; 3],
    /// Threads of a block in each direction.
    pub threads: [u32; 3],
    /// Bytes of shared memory of a block.
    pub shared_bytes: u32,
    /// 0.
    pub reserved: u32,
}

/// One of several launches.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdLaunch {
    /// The kernel.
    pub kernel: u64,
    /// The grid.
    pub grid: LeaseholdGrid,
    /// The operands, in the order of the kernel's bindings.
    pub operands: *const LeaseholdOperand,
    /// How many.
    pub operand_count: usize,
    /// The parameters.
    pub params: *const c_void,
    /// Bytes of the parameters.
    pub params_bytes: usize,
}

/// Images of machine code that kernels were defined with. They stay for the life of the process: a
/// device may load one at any time. Equal images are one.
static IMAGES: Mutex<Vec<&'static [Cubin<'static>]>> = Mutex::new(Vec::new());

/// The image, once for all kernels.
fn image(capability: (u32, u32), bytes: &[u8]) -> &'static [Cubin<'static>] {
    let mut images = IMAGES.lock();
    let same = |kept: &&&[Cubin<'_>]| {
        kept.iter().any(|c| c.compute_capability() == capability && c.image() == bytes)
    };
    if let Some(kept) = images.iter().find(same) {
        return kept;
    }
    // SAFETY: the caller of `leasehold_kernel_define` vouches for the image.
    let cubin = unsafe { Cubin::new(capability, Cow::Owned(bytes.to_owned())) };
    let kept: &'static [Cubin<'static>] = Box::leak(Box::new([cubin]));
    images.push(kept);
    kept
}

impl LeaseholdKernelSource {
    /// The bytes of the code.
    ///
    /// # Safety
    /// - `code` is null, or has `code_bytes` bytes, or is a C string if there are none.
    unsafe fn bytes(&self) -> Result<&[u8]> {
        if self.code_bytes == 0 {
            // SAFETY: by the contract.
            return unsafe { text(self.code.cast(), "the kernel's code").map(str::as_bytes) };
        }
        // SAFETY: by the contract.
        unsafe { list(self.code.cast::<u8>(), self.code_bytes, "the kernel's code") }
    }

    /// The code as text of its own.
    ///
    /// # Safety
    /// - As [`bytes`](Self::bytes).
    unsafe fn text(&self) -> Result<Cow<'static, str>> {
        // SAFETY: by the contract.
        let text = std::str::from_utf8(unsafe { self.bytes()? });
        let text = text.map_err(|_| Error::invalid("the kernel's code is no UTF-8"))?;
        Ok(text.to_owned().into())
    }

    /// The source of a kernel.
    ///
    /// # Safety
    /// - The pointers are as the fields say.
    unsafe fn source(&self) -> Result<KernelSource<'static>> {
        // SAFETY: by the contract.
        unsafe {
            Ok(match self.kind {
                LEASEHOLD_SOURCE_C_FUNCTION => {
                    let function = self.function.ok_or_else(|| {
                        Error::invalid("a kernel of a C function whose function is null")
                    })?;
                    // Both structs have the same layout, which is checked above.
                    KernelSource::CpuC(std::mem::transmute::<LeaseholdTileFunction, CpuCFn>(
                        function,
                    ))
                }
                LEASEHOLD_SOURCE_CUDA_C => {
                    let given = list(self.options, self.option_count, "options")?;
                    let mut options = room(given.len())?;
                    for &option in given {
                        options.push(text(option, "an option")?.to_owned());
                    }
                    KernelSource::CudaC { source: self.text()?, options: options.into() }
                }
                LEASEHOLD_SOURCE_PTX => KernelSource::Ptx(self.text()?),
                LEASEHOLD_SOURCE_CUBIN => {
                    if self.code_bytes == 0 {
                        return Err(Error::invalid("machine code of 0 bytes"));
                    }
                    let capability = (self.capability / 10, self.capability % 10);
                    let ptx = match self.ptx.is_null() {
                        true => String::new(),
                        false => text(self.ptx, "the PTX")?.to_owned(),
                    };
                    KernelSource::Cubins {
                        images: image(capability, self.bytes()?),
                        ptx: ptx.into(),
                    }
                }
                LEASEHOLD_SOURCE_MSL => KernelSource::Msl(self.text()?),
                other => return Err(Error::invalid(format!("{other} is no kind of source"))),
            })
        }
    }
}

/// The check of a kernel.
///
/// # Safety
/// - Any thread may call `check` with `context`, several at a time, until `release` is called. It
///   returns.
unsafe fn checked(check: Option<LeaseholdCheck>, callback: Arc<Callback>) -> KernelCheck {
    let Some(check) = check else {
        return KernelCheck::new(move |_| {
            // The context is kept as long as the kernel, also without a check.
            let _ = &callback;
            Ok(())
        });
    };
    KernelCheck::new(move |launch: &LaunchInfo<'_>| {
        let mut bytes = [0; leasehold::backend::Limits::BINDINGS as usize];
        let count = launch.bindings().min(bytes.len());
        bytes[..count].iter_mut().enumerate().for_each(|(i, len)| *len = launch.len(i));
        let params = launch.params_bytes();
        let info = LeaseholdLaunchInfo {
            size: size_of::<LeaseholdLaunchInfo>(),
            blocks: launch.grid,
            threads: launch.block,
            shared_bytes: launch.shared,
            binding_count: count as u32,
            binding_bytes: bytes.as_ptr(),
            params: params.as_ptr().cast(),
            params_bytes: params.len(),
        };
        // SAFETY: by the contract; the struct and what it points to are valid during the call.
        match alone(|| unsafe { check(callback.context(), &raw const info) }) {
            0 => Ok(()),
            status => Err(Error::invalid(format!(
                "its check returned {status} for a grid {:?} of blocks {:?}",
                launch.grid, launch.block
            ))),
        }
    })
}

/// Defines a kernel.
///
/// # Safety
/// - `desc` is a struct that begins with its size and whose pointers are as its fields say;
///   `kernel` can be written.
/// - The code is as [`KernelBase::with_sources`] asks: for each launch that the check accepts it
///   touches the bindings alone, as their access says, whatever their bytes are. Tiles or blocks
///   share bytes only if they read them or access them atomically.
/// - A function of C may be called by any thread until the process ends. It returns.
/// - Any thread may call `check` with `context`, several at a time, and `release` once. They
///   return.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_kernel_define(
    desc: *const LeaseholdKernelDesc,
    kernel: *mut u64,
) -> c_int {
    const NOTHING: LeaseholdKernelDesc = LeaseholdKernelDesc {
        size: size_of::<LeaseholdKernelDesc>(),
        name: std::ptr::null(),
        sources: std::ptr::null(),
        source_count: 0,
        access: std::ptr::null(),
        binding_count: 0,
        params_bytes: 0,
        alignment: 0,
        overlap: LEASEHOLD_OVERLAP_REFUSED,
        flags: 0,
        check: None,
        release: None,
        context: std::ptr::null_mut(),
        maps: std::ptr::null(),
        map_count: 0,
        cluster: [0; 3],
        early_reads: 0,
    };
    ffi_guard(|| {
        check_out(kernel, "the kernel's place")?;
        // SAFETY: the caller vouches for the struct.
        let desc = unsafe { super::convert::options(desc, NOTHING, "desc")? };
        // SAFETY: the caller vouches for the C string.
        let name = unsafe { text(desc.name, "the kernel's name")? };
        // SAFETY: the caller vouches for the lists.
        let (sources, roles, places) = unsafe {
            let roles = list(desc.access, desc.binding_count, "the accesses")?;
            let places = list(desc.maps, desc.map_count, "the tensor maps")?;
            (list(desc.sources, desc.source_count, "the sources")?, roles, places)
        };
        let mut maps = room(places.len())?;
        maps.extend(places.iter().map(|place| (place.binding, place.offset)));
        let mut bindings: Vec<Access> = room(roles.len())?;
        for &role in roles {
            bindings.push(access(role)?);
        }
        let overlap = match desc.overlap {
            LEASEHOLD_OVERLAP_REFUSED => Overlap::Refused,
            LEASEHOLD_OVERLAP_IN_PLACE => Overlap::InPlace,
            LEASEHOLD_OVERLAP_ANY => Overlap::Any,
            other => return Err(Error::invalid(format!("{other} is no rule of overlaps"))),
        };
        let (dependent, cooperative) = (LEASEHOLD_KERNEL_DEPENDENT, LEASEHOLD_KERNEL_COOPERATIVE);
        if desc.flags & !(dependent | cooperative) != 0 {
            return Err(Error::invalid(format!("{:#x} are no flags of a kernel", desc.flags)));
        }
        // SAFETY: the caller vouches for the functions and their context.
        let callback = unsafe { Callback::new(desc.context, desc.release) };
        // SAFETY: the caller vouches for the check.
        let check = unsafe { checked(desc.check, callback.clone()) };
        let mut descs = room(sources.len())?;
        for source in sources {
            // SAFETY: the caller vouches for the source's pointers.
            let (code, entry) = unsafe {
                let entry = match source.entry.is_null() {
                    true => name,
                    false => text(source.entry, "the entry")?,
                };
                (source.source()?, entry.to_owned())
            };
            let mut one = KernelDesc::new(name.to_owned(), code, &bindings, check.clone());
            one = one.entry(entry).aligned(desc.alignment.max(1)).overlapping(overlap);
            one.params = desc.params_bytes;
            one.maps = maps.clone().into();
            one.dependent_launch = desc.flags & dependent != 0;
            one.cooperative = desc.flags & cooperative != 0;
            one.early_reads = desc.early_reads;
            if desc.cluster != [0; 3] {
                one.cluster = desc.cluster;
            }
            descs.push(one);
        }
        // SAFETY: the caller vouches for the code.
        let handle = KERNELS.add(unsafe { KernelBase::with_sources(descs) }?)?;
        callback.keep();
        // SAFETY: the caller says that it can be written.
        unsafe { give(kernel, handle, "the kernel's place") }
    })
}

/// Makes a kernel ready on a runtime's device.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_kernel_prepare(kernel: u64, runtime: u64) -> c_int {
    ffi_guard(|| KERNELS.get(kernel)?.prepare(&RUNTIMES.get(runtime)?.runtime))
}

/// The blocks of a kernel that a runtime's device runs at the same time.
///
/// # Safety
/// - `blocks` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_kernel_resident_blocks(
    kernel: u64,
    runtime: u64,
    threads: u32,
    shared_bytes: u32,
    blocks: *mut u64,
) -> c_int {
    ffi_guard(|| {
        check_out(blocks, "the number's place")?;
        let (kernel, runtime) = (KERNELS.get(kernel)?, RUNTIMES.get(runtime)?);
        let count = kernel.resident_blocks(&runtime.runtime, threads, shared_bytes)?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(blocks, count, "the number's place") }
    })
}

/// Adds a holder of a kernel.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_kernel_retain(kernel: u64) -> c_int {
    ffi_guard(|| KERNELS.retain(kernel))
}

/// Lets go of a kernel.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_kernel_release(kernel: u64) -> c_int {
    ffi_guard_release(|| KERNELS.release(kernel))
}

/// Launches a kernel on a stream.
///
/// # Safety
/// - `grid` is null or can be read; `operands` is null, or points to `operand_count` operands;
///   `params` has `params_bytes` bytes; `point` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_launch(
    stream: u64,
    kernel: u64,
    grid: *const LeaseholdGrid,
    operands: *const LeaseholdOperand,
    operand_count: usize,
    params: *const c_void,
    params_bytes: usize,
    point: *mut LeaseholdPoint,
) -> c_int {
    ffi_guard(|| {
        // SAFETY: the caller vouches for the struct and the parameters.
        let (grid, params) = unsafe {
            let [grid] = *list(grid, 1, "the grid")? else {
                return Err(Error::invalid("no grid"));
            };
            (grid, list(params.cast::<u8>(), params_bytes, "params")?)
        };
        let shape = grid.shape()?;
        let (held, kernel) = (STREAMS.get(stream)?, KERNELS.get(kernel)?);
        let launch = |operands: &[leasehold::Operand<'_>]| {
            held.stream().launch(&kernel, operands, params, shape)
        };
        // SAFETY: the caller vouches for the operands' list.
        unsafe { with_operands(operands, operand_count, launch) }?;
        // SAFETY: by the contract.
        unsafe { LeaseholdPoint::give(point, held.stream()) };
        Ok(())
    })
}

impl LeaseholdGrid {
    #[inline]
    fn shape(&self) -> Result<Grid> {
        if self.reserved != 0 {
            return Err(Error::invalid("a grid whose reserved field is not 0"));
        }
        Ok(Grid::new(self.blocks).threads(self.threads).shared(self.shared_bytes))
    }
}

/// Launches several kernels on a stream, as one submission.
///
/// # Safety
/// - `launches` is null, or points to `count` launches, whose pointers are as their fields say;
///   `point` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_launch_many(
    stream: u64,
    launches: *const LeaseholdLaunch,
    count: usize,
    point: *mut LeaseholdPoint,
) -> c_int {
    ffi_guard(|| {
        let held = STREAMS.get(stream)?;
        // SAFETY: the caller vouches for the list.
        let launches = unsafe { list(launches, count, "launches")? };
        let (mut kernels, mut buffers) = (room(count)?, room(count)?);
        let mut given = room(count)?;
        for launch in launches {
            // SAFETY: the caller vouches for the lists.
            let operands = unsafe { list(launch.operands, launch.operand_count, "operands")? };
            kernels.push(KERNELS.get(launch.kernel)?);
            buffers.push(held_all(operands)?);
            given.push(operands);
        }
        let mut operands = room(count)?;
        for (given, held) in std::iter::zip(&given, &buffers) {
            operands.push(operands_of(given, held)?);
        }
        let mut all = room(count)?;
        for ((launch, kernel), operands) in launches.iter().zip(&kernels).zip(&operands) {
            // SAFETY: the caller vouches for the parameters.
            let params =
                unsafe { list(launch.params.cast::<u8>(), launch.params_bytes, "params")? };
            all.push(Launch { kernel, operands, params, grid: launch.grid.shape()? });
        }
        held.stream().launch_many(&all)?;
        // SAFETY: by the contract.
        unsafe { LeaseholdPoint::give(point, held.stream()) };
        Ok(())
    })
}
