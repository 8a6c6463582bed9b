//! The allocator over placement heaps.

use super::bench::*;
use leasehold_alloc::{DebugOptions, HostKind, Layout};
use leasehold_core::{Error, Result};
use leasehold_hal::{Backend, MemoryKind};
use leasehold_mps::MpsConfig;
use leasehold_mps::driver::ops::Storage;
use leasehold_sim::{FaultAction, FaultPlan, FaultRule, When};

#[test]
fn unified_memory_is_the_hosts_too_and_a_block_is_a_part_of_one_buffer() {
    let bench = Bench::new(MpsConfig::default());
    let device = bench.open();
    assert!(device.caps().host_visible && device.caps().pinned);
    let (nobody, memory) = (Nobody::new(), device.memory(MemoryKind::Device).unwrap());
    let blocks: Vec<_> =
        (1..100).map(|n| memory.alloc(Layout::new(n * 1000), nobody.on()).unwrap()).collect();
    for (n, block) in (1_u8..).zip(&blocks) {
        assert_eq!(block.host_kind(), HostKind::Pinned);
        // SAFETY: the memory is the host's too, and nothing else uses it.
        unsafe { std::ptr::write_bytes(block.addr() as *mut u8, n, block.len() as usize) };
    }
    for (n, block) in (1_u8..).zip(&blocks) {
        // SAFETY: the memory is the host's too, and was written above.
        let bytes =
            unsafe { std::slice::from_raw_parts(block.addr() as *const u8, block.len() as usize) };
        assert!(bytes.iter().all(|&b| b == n), "block {n}");
        assert_eq!(block.native(), blocks[0].native(), "one buffer spans them all");
    }
    // One segment: a heap, a buffer, and the set of its device.
    assert_eq!((bench.driver.census().heaps, bench.driver.census().buffers), (1, 1));
    assert_eq!(bench.driver.census().residency_sets, 1);
    assert_eq!(bench.calls("newHeapWithDescriptor"), 1);
    let (calls, again) = (memory.stats(), memory.alloc(Layout::new(1000), nobody.on()).unwrap());
    assert_eq!(memory.stats().live, calls.live + 1);
    assert!(matches!(bench.backend.shutdown(), Err(Error::LeasesOutstanding { .. })));
    drop((blocks, again));
    drop(device);
    bench.close();
}

#[test]
fn private_storage_is_a_kind_of_its_own() {
    let bench = Bench::new(MpsConfig::default().storage(Storage::Private));
    let device = bench.open();
    assert!(!device.caps().host_visible && device.caps().pinned);
    let nobody = Nobody::new();
    let alloc = |kind| device.memory(kind).unwrap().alloc(Layout::new(4096), nobody.on()).unwrap();
    let (private, pinned) = (alloc(MemoryKind::Device), alloc(MemoryKind::Pinned));
    assert_eq!((private.host_kind(), pinned.host_kind()), (HostKind::None, HostKind::Pinned));
    assert_ne!(private.native(), pinned.native());
    drop((private, pinned, device));
    bench.close();
}

#[test]
fn sizes_that_cannot_be_are_clear_errors_and_nothing_is_lost() {
    let bench = Bench::new(MpsConfig::default());
    let device = bench.open();
    let (nobody, memory) = (Nobody::new(), device.memory(MemoryKind::Device).unwrap());
    let none = memory.alloc(Layout::new(0), nobody.on()).unwrap();
    assert_eq!(none.len(), 0);
    assert_eq!(bench.driver.census().heaps, 0, "no bytes need no heap");
    // The budget is three quarters of the memory: the recommended working set.
    let budget = device.info().memory.total;
    assert_eq!(budget, MEMORY / 4 * 3);
    for bytes in [budget + 1, MEMORY + 1, 1 << 40, u64::MAX / 2, u64::MAX] {
        let refused = memory.alloc(Layout::new(bytes), nobody.on()).map(drop).unwrap_err();
        assert!(
            matches!(
                refused,
                Error::OutOfMemory(_) | Error::InvalidArgument(_) | Error::OverBudget { .. }
            ),
            "{bytes}: {refused:?}"
        );
    }
    // Full memory, and one block more.
    let mut held = Vec::new();
    let full = loop {
        match memory.alloc(Layout::new(16 << 20), nobody.on()) {
            Ok(block) => held.push(block),
            Err(error) => break error,
        }
    };
    assert_eq!(held.len() as u64, budget / (16 << 20), "{full}");
    held.pop();
    held.push(memory.alloc(Layout::new(16 << 20), nobody.on()).unwrap());
    let used = device.memory_info().unwrap();
    assert_eq!(used.free, 0);
    drop(held);
    memory.trim(0).unwrap();
    assert_eq!((bench.driver.census().heaps, bench.driver.census().buffers), (0, 0));
    assert_eq!(device.memory_info().unwrap().free, budget);
    drop((none, device));
    bench.close();
}

#[test]
fn the_allocator_of_a_second_source_is_its_holders() {
    let bench = Bench::new(MpsConfig::default());
    let device = bench.open();
    let source = device.backing(MemoryKind::Device).unwrap();
    // SAFETY: at no address in particular.
    let chunk = unsafe { source.commit(None, 1 << 20) }.unwrap();
    assert_ne!((chunk.addr, chunk.native), (0, 0));
    // SAFETY: the chunk is in nobody's use.
    unsafe { source.fill(chunk.addr, 1 << 20, 7) }.unwrap();
    // SAFETY: the chunk was filled above.
    assert_eq!(unsafe { source.verify(chunk.addr, 1 << 20, 7) }.unwrap(), None);
    drop(device);
    assert!(bench.backend.shutdown().is_err(), "the holder has a heap");
    // SAFETY: the chunk is given back once, and nobody uses it.
    unsafe { source.decommit(chunk) }.unwrap();
    // SAFETY: the call refuses an address where no segment begins.
    unsafe { source.decommit(chunk) }.unwrap_err();
    drop(source);
    bench.close();
}

#[test]
fn debug_aids_work_in_shared_storage() {
    let bench = Bench::new(
        MpsConfig::default().debug(DebugOptions { poison: true, ..DebugOptions::default() }),
    );
    let device = bench.open();
    let (nobody, memory) = (Nobody::new(), device.memory(MemoryKind::Device).unwrap());
    let block = memory.alloc(Layout::new(4096), nobody.on()).unwrap();
    // SAFETY: the memory is the host's too, and the allocator has filled it.
    let first = unsafe { *(block.addr() as *const u8) };
    assert_eq!(first, leasehold_alloc::POISON_FRESH);
    drop((block, device));
    bench.close();
}

/// Opens a device, allocates both kinds of memory, trims, and ends.
fn life(bench: &Bench) -> Result<()> {
    let device = bench.backend.open(mps(1))?;
    let nobody = Nobody::new();
    for kind in [MemoryKind::Device, MemoryKind::Pinned] {
        let memory = device.memory(kind)?;
        let small = memory.alloc(Layout::new(1000), nobody.on())?;
        let large = memory.alloc(Layout::new(48 << 20), nobody.on())?;
        device.memory_info()?;
        drop((small, large));
        memory.trim(0)?;
        drop(memory.alloc(Layout::new(1 << 20), nobody.on())?);
    }
    drop(device);
    bench.backend.shutdown()
}

#[test]
fn a_failing_driver_call_at_every_index_loses_no_memory() {
    for residency_sets in [true, false] {
        let make = || {
            let mut machine = machine();
            machine.residency_sets = residency_sets;
            Bench::over(machine, MpsConfig::default())
        };
        let whole = make();
        life(&whole).unwrap();
        let calls = whole.driver.machine().calls();
        for action in [FaultAction::Fail(9), FaultAction::OutOfMemory] {
            for index in 0..calls {
                let bench = make();
                let rule = FaultRule::any(When::At(index), action.clone());
                bench.driver.machine().set_faults(FaultPlan::none().with(rule));
                drop(life(&bench));
                bench.close();
            }
        }
    }
}
