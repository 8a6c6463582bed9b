//! Debug checks on real memory: the allocator or the processor detects planted defects, and work
//! without defects passes.

use crate::common::*;
use leasehold_alloc::{DebugOptions, FindingKind, Layout, On, POISON_FRESH};
use leasehold_cpu::CpuConfig;
use leasehold_hal::{Fill, MemoryKind, Op};

fn checked(text: &str) -> Rig {
    rig_with(CpuConfig::threads(2).debug(text.parse::<DebugOptions>().unwrap()).trace_events(256))
}

/// Fills `bytes` bytes of a buffer of `len` bytes on the stream, from byte `from` on. Frees the
/// buffer before the stream is done.
fn fill(rig: &Rig, len: u64, from: u64, bytes: u64) -> u64 {
    let memory = rig.device.memory(MemoryKind::Device).unwrap();
    let buffer = memory
        .alloc(Layout::new(len), On { timeline: rig.stream.timeline(), source: &*rig.stream })
        .unwrap();
    buffer.set_tag(5);
    let dst = buffer.addr() + from;
    let p =
        submit(&rig.stream, &[Op::Fill(Fill { dst, native: 0, bytes, pattern: 0x5a, width: 1 })])
            .unwrap();
    // SAFETY: the timepoint is of a submission to this stream that uses the buffer, made in order.
    unsafe { buffer.mark_write(p) };
    buffer.addr()
}

#[test]
fn a_stream_that_writes_too_far_is_found() {
    for text in ["all", "red-zone=128", "red-zone,pass-through"] {
        for len in [100, 70_000] {
            let rig = checked(text);
            let memory = rig.device.memory(MemoryKind::Device).unwrap();
            fill(&rig, len, 0, len);
            finish(&rig.stream).unwrap();
            assert_eq!(memory.findings(), [], "{text}");
            let at = fill(&rig, len, 0, len + 3);
            finish(&rig.stream).unwrap();
            let found = memory.findings();
            assert_eq!(found.len(), 1, "{text}: {found:?}");
            let f = found[0];
            assert_eq!((f.kind, f.addr, f.offset, f.tag), (FindingKind::RedZone, at, len, 5));
            memory.trim(0).unwrap();
            assert_eq!((memory.stats().findings, memory.stats().reserved), (1, 0));
            // The trace holds both allocations and both frees.
            assert_eq!(memory.snapshot().events.iter().filter(|e| e.id != 0).count(), 4);
        }
    }
}

#[test]
fn a_write_after_the_free_is_found_and_fresh_memory_is_poisoned() {
    let rig = checked("all");
    let memory = rig.device.memory(MemoryKind::Device).unwrap();
    let fresh = rig.buffer(1000);
    // SAFETY: the address is within the buffer, which no stream uses.
    assert_eq!(unsafe { std::ptr::read_volatile((fresh.addr() + 999) as *const u8) }, POISON_FRESH);
    let at = fill(&rig, 1000, 0, 1000);
    finish(&rig.stream).unwrap();
    assert_eq!(memory.findings(), []);
    // SAFETY: the allocator keeps this memory in quarantine, so it has no other user. (The write is
    // the planted defect.)
    unsafe { std::ptr::write_volatile((at + 500) as *mut u8, 1) };
    memory.trim(0).unwrap();
    let found = memory.findings();
    assert_eq!(
        found.iter().map(|f| (f.kind, f.addr, f.offset)).collect::<Vec<_>>(),
        [(FindingKind::WriteAfterFree, at, 500)]
    );
}

/// Starts a child process that writes one byte to a wrong place. With `LEASEHOLD_TEST_GUARD` set,
/// this process is the child.
#[cfg(unix)]
#[test]
fn a_guard_stops_the_process_at_the_wrong_byte() {
    if let Ok(defect) = std::env::var("LEASEHOLD_TEST_GUARD") {
        let rig = checked("guard,quarantine=64M");
        let memory = rig.device.memory(MemoryKind::Device).unwrap();
        let buffer = rig.buffer(4096);
        let mut at = buffer.addr();
        match defect.as_str() {
            "none" => at += 4095,
            "end" => at += 4096,
            _ => {
                drop(buffer);
                memory.drain();
            }
        }
        // SAFETY: in two of three cases the address is not writable, and the process ends here, as
        // the test expects.
        unsafe { std::ptr::write_volatile(at as *mut u8, 1) };
        println!("still there");
        return;
    }
    for (defect, survives) in [("none", true), ("end", false), ("freed", false)] {
        let run = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "debug::a_guard_stops_the_process_at_the_wrong_byte",
                "--exact",
                "--nocapture",
                "--test-threads",
                "1",
            ])
            .env("LEASEHOLD_TEST_GUARD", defect)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&run.stdout).into_owned()
            + &String::from_utf8_lossy(&run.stderr);
        assert_eq!(run.status.success(), survives, "{defect}: {text}");
        assert_eq!(text.contains("still there"), survives, "{defect}: {text}");
    }
}

#[test]
fn a_second_source_of_memory_serves_an_allocator_of_ones_own() {
    let rig = rig(1);
    for kind in [MemoryKind::Device, MemoryKind::Pinned] {
        let own =
            leasehold_alloc::Allocator::new(rig.device.backing(kind).unwrap(), Default::default())
                .unwrap();
        let buffer = own
            .alloc(
                Layout::new(5 << 20),
                On { timeline: rig.stream.timeline(), source: &*rig.stream },
            )
            .unwrap();
        // SAFETY: the address is within the buffer, which no stream uses.
        unsafe { std::ptr::write_volatile(buffer.addr() as *mut u8, 1) };
        assert!(!own.same(rig.device.memory(kind).unwrap()));
        assert_eq!(rig.device.memory(kind).unwrap().stats().reserved, 0);
    }
}

/// Memory of the process's heap may hold the bytes of freed objects, which are no values to read.
#[test]
fn pass_through_memory_is_zero_at_first() {
    let rig = checked("pass-through");
    for _ in 0..4 {
        drop(std::hint::black_box(vec![0xabu8; 42_000]));
    }
    let memory = rig.device.memory(MemoryKind::Device).unwrap();
    let on = On { timeline: rig.stream.timeline(), source: &*rig.stream };
    let buffer = memory.alloc(Layout::new(40_000), on).unwrap();
    // SAFETY: the buffer's memory is the process's own, and no work uses it.
    let bytes = unsafe { std::slice::from_raw_parts(buffer.addr() as *const u8, 40_000) };
    assert!(bytes.iter().all(|&b| b == 0));
}
