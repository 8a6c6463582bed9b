//! The test kernels as Rust functions, for backends whose kernels are such: the CPU, a simulated device.
//!
//! This module must not know a backend.

use crate::factory::TestKernel;
use leasehold::core::sync::atomic::{AtomicU32, Ordering};
use leasehold::hal::{CpuArgs, CpuFn, KernelDesc, KernelSource};
use std::time::{Duration, Instant};

/// The elements that a tile serves.
fn part(args: &CpuArgs<'_>, binding: usize) -> (usize, usize) {
    let len = args.pointer::<u32>(binding).1;
    let from = (args.tile[0] * TestKernel::BLOCK) as usize;
    (from.min(len), (TestKernel::BLOCK as usize).min(len.saturating_sub(from)))
}

unsafe fn fill(args: &CpuArgs<'_>) {
    let (from, count) = part(args, 0);
    // SAFETY: each tile has elements of its own.
    unsafe { args.slice_mut::<u32>(0, from, count) }.fill(args.params());
}

unsafe fn add(args: &CpuArgs<'_>) {
    let (from, count) = part(args, 2);
    // SAFETY: the first two are read, and each tile has elements of its own in the third.
    let (a, b, out) = unsafe { (args.slice::<u32>(0), args.slice::<u32>(1), args.slice_mut::<u32>(2, from, count)) };
    for (i, o) in out.iter_mut().enumerate() {
        *o = a[from + i].wrapping_add(b[from + i]);
    }
}

unsafe fn spin(args: &CpuArgs<'_>) {
    // SAFETY: the flag is four aligned bytes that others write atomically while this runs.
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
    // SAFETY: the only tile.
    unsafe { args.slice_mut::<u32>(1, 0, 1) }.fill(seen);
}

unsafe fn trap(_: &CpuArgs<'_>) {
    panic!("the kernel's own trap");
}

unsafe fn out_of_bounds(args: &CpuArgs<'_>) {
    let len = args.pointer::<u32>(0).1;
    // SAFETY: refused before anything is touched: the range is checked against the binding.
    unsafe { args.slice_mut::<u32>(0, len, 1) }.fill(1);
}

impl TestKernel {
    /// The kernel as a Rust function.
    #[must_use]
    pub fn function(self) -> CpuFn {
        match self {
            TestKernel::Fill => fill,
            TestKernel::Add => add,
            TestKernel::SpinUntilFlag => spin,
            TestKernel::Trap => trap,
            TestKernel::OutOfBounds => out_of_bounds,
        }
    }

    /// The kernel's description with a source of one's own.
    #[must_use]
    pub fn with_source(self, source: KernelSource<'static>) -> KernelDesc<'static> {
        KernelDesc {
            name: self.name().into(),
            entry: self.name().into(),
            source,
            bindings: self.bindings().into(),
            params: self.params(),
        }
    }
}
