//! Memory: kinds, exhaustion, giving memory back, and systems that refuse address space.

use crate::common::*;
use leasehold_alloc::{Backing, HostKind, Layout, On};
use leasehold_core::Error;
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::AtomicU64;
use leasehold_cpu::allocator::device::MmapBacking;
use leasehold_cpu::driver::topology::Topology;
use leasehold_cpu::{CpuConfig, HugePages};
use leasehold_hal::{Fill, MemoryKind, Op};

fn touch(rig: &Rig, kind: MemoryKind, bytes: u64) -> u64 {
    let memory = rig.device.memory(kind).unwrap();
    let on = On { timeline: rig.stream.timeline(), source: &*rig.stream };
    let buffer = memory.alloc(Layout::new(bytes), on).unwrap();
    assert_eq!(buffer.host_kind(), HostKind::Pageable);
    let fill = Fill { dst: buffer.addr(), native: 0, bytes, pattern: 0x5a, width: 1 };
    let p = submit(&rig.stream, &[Op::Fill(fill)]).unwrap();
    // SAFETY: the timepoint is of a submission to this stream that uses the buffer, made in order.
    unsafe { buffer.mark_write(p) };
    finish(&rig.stream).unwrap();
    // SAFETY: the address is within the buffer, which has no other user now.
    let last = unsafe { std::ptr::read_volatile((buffer.addr() + bytes - 1) as *const u8) };
    assert_eq!(last, 0x5a);
    buffer.addr()
}

#[test]
fn both_kinds_of_memory_work() {
    for huge in [HugePages::Advise, HugePages::Never] {
        let rig = rig_with(CpuConfig::threads(2).huge_pages(huge));
        for kind in [MemoryKind::Device, MemoryKind::Pinned] {
            for bytes in [1, 4097, 3 << 20, 20 << 20] {
                assert_eq!(touch(&rig, kind, bytes) % 256, 0);
            }
            let memory = rig.device.memory(kind).unwrap();
            assert!(memory.same(rig.device.memory(kind).unwrap()));
            assert!(memory.trim(0).unwrap() > 0);
            assert_eq!(memory.stats().reserved, 0, "all of it went back");
            touch(&rig, kind, 1 << 20);
        }
    }
}

#[test]
fn more_than_the_machine_has_is_out_of_memory_and_passes() {
    let rig = rig(1);
    let memory = rig.device.memory(MemoryKind::Device).unwrap();
    let on = || On { timeline: rig.stream.timeline(), source: &*rig.stream };
    let total = rig.device.info().memory.total;
    for bytes in [total + (1 << 30), 1 << 50, u64::MAX] {
        let refused = memory.alloc(Layout::new(bytes), on()).unwrap_err();
        assert!(matches!(refused, Error::OutOfMemory(_)), "{refused}");
    }
    // Address space is not memory: untouched blocks cost nothing. The backing refuses a sum of
    // blocks beyond the machine's memory.
    let mut held = Vec::new();
    let refused = loop {
        match memory.alloc(Layout::new(1 << 30), on()) {
            Ok(block) => held.push(block),
            Err(error) => break error,
        }
        assert!(held.len() as u64 <= total >> 30, "more than there is");
    };
    assert!(matches!(refused, Error::OutOfMemory(_)), "{refused}");
    held.clear();
    touch(&rig, MemoryKind::Device, 1 << 20);
}

#[test]
fn a_backing_gives_zeroed_pages_again_after_giving_them_back() {
    let machine = Topology::detect();
    let backing = MmapBacking::new(&machine, HugePages::Advise, Arc::new(AtomicU64::new(0)));
    let granule = backing.caps().granule;
    let base = backing.reserve(granule * 8).unwrap();
    assert_eq!(base % granule, 0);
    for _ in 0..3 {
        // SAFETY: the ranges are this backing's own, and this test alone uses them, in their order.
        let chunk = unsafe { backing.commit(Some(base + granule), granule * 2) }.unwrap();
        let at = (chunk.addr + granule) as *mut u64;
        // SAFETY: the range is committed.
        unsafe {
            assert_eq!(at.read_volatile(), 0);
            at.write_volatile(7);
        }
        // SAFETY: the ranges are this backing's own, and this test alone uses them, in their order.
        unsafe { backing.decommit(chunk) }.unwrap();
    }
    // SAFETY: the ranges are this backing's own, and this test alone uses them, in their order.
    let segment = unsafe { backing.commit(None, granule) }.unwrap();
    assert_eq!(segment.addr % granule, 0);
    // SAFETY: the range is committed.
    unsafe { (segment.addr as *mut u8).write_volatile(1) };
    // SAFETY: the ranges are this backing's own, and this test alone uses them, in their order.
    unsafe { backing.decommit(segment) }.unwrap();
    // SAFETY: the ranges are this backing's own, and this test alone uses them, in their order.
    unsafe { backing.release(base, granule * 8) };
    assert!(backing.driver_calls() >= 9);
}

/// Runs in a child process with a limited address space.
#[cfg(target_os = "linux")]
#[test]
fn a_refused_reservation_falls_back() {
    if let Some(limit) = std::env::var_os("LEASEHOLD_TEST_RLIMIT_AS") {
        let bytes: u64 = limit.to_str().unwrap().parse().unwrap();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let size = status.lines().find_map(|l| l.strip_prefix("VmSize:")).unwrap();
        let kib: u64 = size.trim().trim_end_matches(" kB").parse().unwrap();
        if kib << 10 > bytes {
            eprintln!("skipped: a sanitizer uses more addresses than the limit by itself");
            return;
        }
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
        // SAFETY: the call limits this process, which runs this test alone.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
        let rig = rig(2);
        touch(&rig, MemoryKind::Device, 3 << 20);
        touch(&rig, MemoryKind::Pinned, 20 << 20);
        let memory = rig.device.memory(MemoryKind::Device).unwrap();
        let on = On { timeline: rig.stream.timeline(), source: &*rig.stream };
        assert!(matches!(memory.alloc(Layout::new(bytes), on), Err(Error::OutOfMemory(_))));
        touch(&rig, MemoryKind::Device, 3 << 20);
        return;
    }
    // One limit is below the machine's memory, so that every reservation is refused. The other is
    // several times as large, for a machine with little memory.
    for limit in [1u64 << 30, 4 << 30] {
        let me = std::env::current_exe().unwrap();
        let run = std::process::Command::new(me)
            .args([
                "memory::a_refused_reservation_falls_back",
                "--exact",
                "--nocapture",
                "--test-threads",
                "1",
            ])
            .env("LEASEHOLD_TEST_RLIMIT_AS", limit.to_string())
            .output()
            .unwrap();
        assert!(
            run.status.success(),
            "{}{}",
            String::from_utf8_lossy(&run.stdout),
            String::from_utf8_lossy(&run.stderr)
        );
    }
}
