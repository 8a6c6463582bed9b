//! Sources of the test kernels for each kind of device: Rust functions (the CPU), functions
//! registered by name (a simulated device), CUDA C, PTX and MSL. Entry names are the same for all.
//!
//! This module must not know a backend.

use crate::factory::{BoxAt, TestKernel};
use leasehold::Error;
use leasehold::backend::sync::atomic::{AtomicU32, Ordering};
use leasehold::backend::{Access, CpuArgs, CpuFn, KernelCheck, KernelDesc, KernelSource};
use leasehold::kernel::MapElement;
use std::time::{Duration, Instant};

/// The first element of a tile, and the number of its elements.
fn part(args: &CpuArgs<'_>, binding: usize) -> (usize, usize) {
    let len = args.pointer::<u32>(binding).1;
    let from = (args.tile()[0] * TestKernel::BLOCK) as usize;
    (from.min(len), (TestKernel::BLOCK as usize).min(len.saturating_sub(from)))
}

unsafe fn fill(args: &CpuArgs<'_>) {
    let (from, count) = part(args, 0);
    // SAFETY: each tile has its own elements.
    unsafe { args.slice_mut::<u32>(0, from, count) }.fill(args.params());
}

unsafe fn add(args: &CpuArgs<'_>) {
    let (from, count) = part(args, 2);
    // SAFETY: the first two bindings are read, and each tile has its own elements in the third.
    let (a, b, out) = unsafe {
        (args.slice::<u32>(0), args.slice::<u32>(1), args.slice_mut::<u32>(2, from, count))
    };
    for (i, o) in out.iter_mut().enumerate() {
        *o = a[from + i].wrapping_add(b[from + i]);
    }
}

unsafe fn limited(args: &CpuArgs<'_>) {
    let (from, count) = part(args, 2);
    let (a, len) = args.pointer::<u32>(0);
    // SAFETY: the limit is eight bytes, and nobody writes it during the launch.
    let limit = unsafe { args.pointer::<u64>(1).0.read_unaligned() } as usize / 4;
    // SAFETY: each tile has its own elements.
    let out = unsafe { args.slice_mut::<u32>(2, from, count) };
    for (i, o) in (from..).zip(out) {
        // SAFETY: the element lies in the binding and below the limit.
        *o = if i < limit.min(len) { unsafe { *a.add(i) } } else { u32::MAX };
    }
}

unsafe fn parts(args: &CpuArgs<'_>) {
    let (from, count) = part(args, 2);
    let (a, limits) = (args.pointer::<u32>(0).0, args.pointer::<u64>(1).0);
    let [each, step, value] = args.params::<[u32; 3]>();
    // SAFETY: each tile has its own elements.
    let out = unsafe { args.slice_mut::<u32>(2, from, count) };
    for (i, o) in (from..).zip(out) {
        let at = i * step as usize;
        let (part, own) = (at / each as usize, at % each as usize);
        // SAFETY: there is a limit for each part, and nobody writes it during the launch.
        let limit = unsafe { limits.add(part).read_unaligned() };
        *o = u32::MAX;
        if (own as u64) < limit / 4 {
            // SAFETY: the element lies below its part's limit, and is this tile's own.
            let place = unsafe { &mut *a.add(at) };
            if value != 0 {
                *place = value.wrapping_add(i as u32);
            }
            *o = *place;
        }
    }
}

unsafe fn copy_box(args: &CpuArgs<'_>) {
    // SAFETY: by this function's contract.
    unsafe { boxed(args, 1, true) };
}

unsafe fn limited_box(args: &CpuArgs<'_>) {
    let BoxAt { at: [_, row], size: [columns, rows], .. } = args.params();
    // SAFETY: the limit is eight bytes, and nobody writes it during the launch.
    let limit = unsafe { args.pointer::<u64>(1).0.read_unaligned() };
    let end = (i64::from(row) + i64::from(rows)) * i64::from(columns) * 4;
    // SAFETY: by this function's contract.
    unsafe { boxed(args, 2, row >= 0 && u64::try_from(end).is_ok_and(|end| end <= limit)) };
}

/// Copies a box to binding `out`, or sets it to zero.
unsafe fn boxed(args: &CpuArgs<'_>, out: usize, is_there: bool) {
    let BoxAt { map, at, size } = args.params();
    let [columns, rows] = size.map(|n| n as usize);
    // SAFETY: one tile reads the tensor and writes the output.
    let (from, out) =
        unsafe { (args.pointer::<u8>(0).0, args.slice_mut::<u32>(out, 0, columns * rows)) };
    for (i, o) in out.iter_mut().enumerate() {
        let place = [i % columns, i / columns];
        let place: [i64; 2] = std::array::from_fn(|d| i64::from(at[d]) + place[d] as i64);
        let is_inside =
            is_there && (0..2).all(|d| u64::try_from(place[d]).is_ok_and(|p| p < map.size(d)));
        *o = 0;
        if is_inside {
            let byte = place[0] as u64 * 4 + place[1] as u64 * map.stride(1);
            // SAFETY: the launch has checked that the tensor lies in the binding.
            *o = unsafe { from.add(byte as usize).cast::<u32>().read_unaligned() };
        }
    }
}

/// The number of a tile, or of another one of its launch, and the elements that are a tile's own.
fn number(args: &CpuArgs<'_>, [x, y, z]: [u32; 3]) -> (u32, usize) {
    let [across, down, _] = args.grid();
    let number = x + across * (y + down * z);
    (number, (number * TestKernel::BLOCK) as usize)
}

unsafe fn cluster(args: &CpuArgs<'_>) {
    // Ranks of a cluster count x first too.
    let (of, tile) = (TestKernel::CLUSTER, args.tile());
    let [x, y, z]: [u32; 3] = std::array::from_fn(|i| tile[i] % of[i]);
    let next = (x + of[0] * (y + of[1] * z) + 1) % of.iter().product::<u32>();
    let place = [next % of[0], next / of[0] % of[1], next / of[0] / of[1]];
    let found = number(args, std::array::from_fn(|i| tile[i] / of[i] * of[i] + place[i])).0;
    let own = number(args, tile).1;
    // SAFETY: each tile has its own elements.
    unsafe { args.slice_mut::<u32>(0, own, TestKernel::BLOCK as usize) }.fill(found);
}

/// The kernel counts all tiles as there: a device that runs tiles one by one cannot wait for them.
unsafe fn together(args: &CpuArgs<'_>) {
    let blocks = args.grid().iter().product();
    let own = number(args, args.tile()).1;
    // SAFETY: tiles change the first binding atomically, and have elements of their own.
    unsafe {
        (*args.pointer::<AtomicU32>(0).0).fetch_add(1, Ordering::Relaxed);
        args.slice_mut::<u32>(1, own, TestKernel::BLOCK as usize).fill(blocks);
    }
}

unsafe fn spin(args: &CpuArgs<'_>) {
    // SAFETY: the flag is four aligned bytes, which other code writes atomically during the call.
    let flag = unsafe { &*args.pointer::<AtomicU32>(0).0 };
    let end = Instant::now() + Duration::from_millis(u64::from(args.params::<u32>()));
    let seen = loop {
        if flag.load(Ordering::Acquire) != 0 {
            break 1;
        }
        if Instant::now() >= end {
            break 2;
        }
        std::thread::yield_now();
    };
    // SAFETY: the launch has one tile only.
    unsafe { args.slice_mut::<u32>(1, 0, 1) }.fill(seen);
}

unsafe fn trap(_: &CpuArgs<'_>) {
    panic!("the kernel's own trap");
}

unsafe fn out_of_bounds(args: &CpuArgs<'_>) {
    let len = args.pointer::<u32>(0).1;
    // SAFETY: `slice_mut` checks the range against the binding and panics before any access.
    unsafe { args.slice_mut::<u32>(0, len, 1) }.fill(1);
}

/// The registration of a test kernel on a simulated device: its name and its function.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Registration {
    /// The entry's name, the same in every source.
    pub name: &'static str,
    /// The kernel's access to each of its bindings.
    pub bindings: &'static [Access],
    /// Bytes of its parameters.
    pub params: u32,
    /// Runs one block, as a tile of a CPU kernel.
    pub function: CpuFn,
}

impl TestKernel {
    /// All test kernels, compiled from `kernels/cuda/test_kernels.cu` for compute capability 7.5
    /// and later. An entry takes the addresses of the bindings in order, then the parameters.
    pub const PTX: &str = include_str!("kernels/cuda/ptx/test_kernels.ptx");

    /// All test kernels in the Metal shading language, with the bindings in order and then the
    /// parameters. A device of Apple's cannot end [`SpinUntilFlag`](Self::SpinUntilFlag) in time: a
    /// kernel has no clock.
    pub const MSL: &str = include_str!("kernels/mps/test_kernels.metal");

    /// The test kernel with clusters, compiled from `kernels/cuda/cluster.cu` for compute
    /// capability 9.0 and later.
    pub const CLUSTER_PTX: &str = include_str!("kernels/cuda/ptx/cluster.ptx");

    /// The test kernel with a tensor map, compiled from `kernels/cuda/box.cu` for compute
    /// capability 9.0 and later.
    pub const BOX_PTX: &str = include_str!("kernels/cuda/ptx/box.ptx");

    /// All test kernels, for registration on a simulated device. A device that completes one
    /// operation before it begins another's must not offer [`SpinUntilFlag`](Self::SpinUntilFlag)
    /// in [`Factory::kernel`](crate::Factory::kernel).
    pub fn registrations() -> impl Iterator<Item = Registration> {
        Self::ALL.into_iter().map(|kernel| Registration {
            name: kernel.name(),
            bindings: kernel.bindings(),
            params: kernel.params(),
            function: kernel.function(),
        })
    }

    /// The kernel for a CPU.
    #[must_use]
    pub fn for_cpu(self) -> KernelDesc<'static> {
        self.with_source(KernelSource::Cpu(self.function()))
    }

    /// The kernel for CUDA, as PTX.
    #[must_use]
    pub fn for_cuda(self) -> KernelDesc<'static> {
        let ptx = match self {
            TestKernel::Box | TestKernel::LimitedBox => Self::BOX_PTX,
            TestKernel::Cluster => Self::CLUSTER_PTX,
            _ => Self::PTX,
        };
        self.with_source(KernelSource::Ptx(ptx.into()))
    }

    /// The kernel for Metal, compiled at run time.
    #[must_use]
    pub fn for_mps(self) -> KernelDesc<'static> {
        self.with_source(KernelSource::Msl(Self::MSL.into()))
    }

    /// The kernel for a device with registered kernels.
    #[must_use]
    pub fn for_sim(self) -> KernelDesc<'static> {
        self.with_source(KernelSource::Registered(self.name().into()))
    }

    /// The kernel as a Rust function.
    #[must_use]
    pub fn function(self) -> CpuFn {
        match self {
            TestKernel::Fill => fill,
            TestKernel::Add | TestKernel::EarlyAdd => add,
            TestKernel::Limited => limited,
            TestKernel::Parts => parts,
            TestKernel::Box => copy_box,
            TestKernel::LimitedBox => limited_box,
            TestKernel::Cluster => cluster,
            TestKernel::Together => together,
            TestKernel::SpinUntilFlag => spin,
            TestKernel::Trap => trap,
            TestKernel::OutOfBounds => out_of_bounds,
        }
    }

    /// The kernel's description with another source.
    #[must_use]
    pub fn with_source(self, source: KernelSource<'static>) -> KernelDesc<'static> {
        KernelDesc {
            params: self.params(),
            dependent_launch: self.early_reads() != 0,
            early_reads: self.early_reads(),
            limits: self.limits().into(),
            maps: self.maps().into(),
            cluster: if self == TestKernel::Cluster { Self::CLUSTER } else { [1; 3] },
            cooperative: self == TestKernel::Together,
            ..KernelDesc::new(self.name(), source, self.bindings(), self.check()).aligned(4)
        }
    }

    /// The launches that the kernel accepts: those whose blocks find their elements.
    /// [`OutOfBounds`](Self::OutOfBounds) is wrong on purpose for every launch; the device reports
    /// a fault.
    fn check(self) -> KernelCheck {
        KernelCheck::new(move |launch| {
            let blocks = launch.grid.iter().map(|&n| u64::from(n)).product::<u64>();
            if matches!(self, TestKernel::Cluster | TestKernel::Together) {
                let out = u32::from(self == TestKernel::Together) as usize;
                launch.want(0, 4)?;
                return launch.want(out, blocks.saturating_mul(u64::from(Self::BLOCK) * 4));
            }
            let [blocks, 1, 1] = launch.grid else {
                return Err(Error::invalid("a grid of one dimension"));
            };
            match self {
                TestKernel::Fill | TestKernel::Add | TestKernel::EarlyAdd => (0..launch.bindings())
                    .try_for_each(|i| {
                        launch.want(i, u64::from(blocks) * u64::from(Self::BLOCK) * 4)
                    }),
                TestKernel::Limited => {
                    let bytes = u64::from(blocks) * u64::from(Self::BLOCK) * 4;
                    launch.want(1, 8).and_then(|()| launch.want(2, bytes))
                }
                TestKernel::Parts => {
                    let elements = u64::from(blocks) * u64::from(Self::BLOCK);
                    let [each, step, _] = launch.params::<[u32; 3]>()?.map(u64::from);
                    if each == 0 || step == 0 {
                        return Err(Error::invalid("parts and a distance of one element or more"));
                    }
                    let last = (elements - 1) * step;
                    launch.want(0, 4 * (last + 1))?;
                    launch.want(1, 8 * (last / each + 1))?;
                    launch.want(2, 4 * elements)
                }
                TestKernel::Box | TestKernel::LimitedBox => {
                    let BoxAt { map, at: [column, _], size: [columns, rows] } = launch.params()?;
                    let is_flat = map.rank() == 2
                        && (map.box_of(0), map.box_of(1)) == (columns, rows)
                        && map.element() == Some(MapElement::U32)
                        && (map.step_of(0), map.step_of(1), map.modes()) == (1, 1, [0; 4]);
                    let elements = columns.saturating_mul(rows);
                    // The instruction takes whole pieces of 16 bytes.
                    if blocks != 1 || !is_flat || elements > BoxAt::ELEMENTS || column % 4 != 0 {
                        return Err(Error::invalid("one block, and a small box of numbers"));
                    }
                    let is_limited = self == TestKernel::LimitedBox;
                    if is_limited && map.stride(1) != u64::from(columns) * 4 {
                        return Err(Error::invalid("rows that are as long as the box's"));
                    }
                    launch.want(1 + usize::from(is_limited), u64::from(elements) * 4)
                }
                TestKernel::SpinUntilFlag if blocks != 1 => {
                    Err(Error::invalid("one block looks at the flag"))
                }
                TestKernel::SpinUntilFlag => launch.want(0, 4).and_then(|()| launch.want(1, 4)),
                _ => Ok(()),
            }
        })
    }

    /// The kernel for launches through a runtime.
    ///
    /// # Errors
    /// As [`KernelBase::new`](leasehold::KernelBase::new).
    pub(crate) fn base(desc: KernelDesc<'static>) -> leasehold::Result<leasehold::KernelBase> {
        // SAFETY: the descriptions are this module's, or have a source that no device runs. The
        // check accepts launches whose blocks find their elements, and each element belongs to one
        // block.
        unsafe { leasehold::KernelBase::new(desc) }
    }
}
