//! Copies and fills by the built-in kernels: by their simulated functions, and by their sources,
//! compiled for the host.

use super::bench::*;
use leasehold_alloc::{Buffer, Layout};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Index, Lease, Result};
use leasehold_emulator::{Emulator, Launch, Operand, Program, Source};
use leasehold_hal::kernel::Binding;
use leasehold_hal::{Access, Copy2d, Device, DeviceId, Fill, MemoryKind};
use leasehold_mps::MpsConfig;
use leasehold_mps::driver::ops::*;
use leasehold_mps::manager::device::DeviceState;
use leasehold_mps::transfer::Transfer;
use leasehold_sim::{KernelBody, KernelSpec};

/// Bytes of each of a test's buffers.
const BYTES: u64 = 4096;

struct Pair {
    nobody: Nobody,
    state: Lease<DeviceState>,
}

impl Pair {
    fn open(bench: &Bench, device: DeviceId) -> Self {
        let state = bench.backend.manager().devices().open(device).unwrap();
        Self { nobody: Nobody::new(), state }
    }

    /// A buffer in which each byte is its own index and `salt`.
    fn buffer(&self, salt: u8) -> Lease<Buffer> {
        let device: &dyn Device = &*self.state;
        let memory = device.memory(MemoryKind::Device).unwrap();
        let buffer = memory.alloc(Layout::new(BYTES), self.nobody.on()).unwrap();
        let content: Vec<u8> = (0..BYTES).map(|i| (i % 251) as u8 ^ salt).collect();
        // SAFETY: the memory is the host's too, and nothing else uses it.
        unsafe {
            std::ptr::copy_nonoverlapping(
                content.as_ptr(),
                buffer.addr() as *mut u8,
                content.len(),
            );
        }
        buffer
    }

    /// Runs a transfer in a serial encoder.
    fn run(&self, bench: &Bench, transfer: &Transfer) -> Result<()> {
        let queue = self.state.command_queues().acquire(Index::new(0))?;
        let driver = &*bench.driver;
        // SAFETY: every handle is live, and released once. The work is over when the call returns.
        unsafe {
            let command = driver.command_buffer(queue.native(), CommandBufferDesc::default())?;
            let encoder = driver.compute_encoder(command, &ComputeDesc::default())?;
            let encoded = transfer.encode(driver, encoder);
            driver.end_encoding(encoder.into())?;
            driver.release(encoder.into());
            if encoded.is_ok() {
                driver.commit(command)?;
                driver.wait_completed(command)?;
                assert_eq!(driver.completion(command)?.error, None);
            }
            driver.release(command.into());
            encoded
        }
    }
}

/// A buffer's bytes.
fn bytes(buffer: &Lease<Buffer>) -> Vec<u8> {
    // SAFETY: the memory is the host's too, and nothing writes it now.
    unsafe { std::slice::from_raw_parts(buffer.addr() as *const u8, buffer.len() as usize) }
        .to_vec()
}

/// Offsets, row lengths, pitches and numbers of rows of both alignments.
fn copies() -> Vec<(u64, u64, u64, u64, u64, u64)> {
    let mut all = Vec::new();
    for (src, dst) in [(0, 0), (16, 32), (3, 0), (4, 8), (0, 7)] {
        for (width, src_pitch, dst_pitch, rows) in [
            (1, 1, 1, 1),
            (15, 15, 15, 1),
            (16, 16, 16, 1),
            (1000, 1000, 1000, 1),
            (64, 64, 64, 4),
            (48, 64, 80, 5),
            (5, 7, 9, 11),
            (16, 0, 16, 4),
            (16, 16, 8, 4),
            (5, 3, 2, 6),
        ] {
            all.push((src, dst, width, src_pitch, dst_pitch, rows));
        }
    }
    all
}

/// A driver on which the sources of the kernels run; `None` without a compiler.
fn emulated() -> Option<Bench> {
    let text = include_str!("../../../../../crates/mps/src/transfer.metal");
    let program = match Program::metal(&[Source { name: "transfer.metal", text }]) {
        Err(why) if why.is_skip() => return None,
        program => program.unwrap(),
    };
    let emulator = Arc::new(Emulator::new(program));
    let machine = machine();
    let kernels = machine.machine.kernels.clone();
    let bench = Bench::over(machine, MpsConfig::default());
    let names = kernels.names();
    assert_eq!(names.len(), 6, "the driver registered its own");
    for name in names {
        let (emulator, entry) = (emulator.clone(), name.clone());
        let body = KernelBody::run(move |launch| {
            let operand = |b: &Binding| Operand {
                device: b.addr,
                at: b.addr,
                bytes: b.len,
                reads: b.access.reads(),
                writes: b.access.writes(),
            };
            let operands: Vec<Operand> = launch.bindings().iter().map(operand).collect();
            let run = Launch {
                kernel: &entry,
                operands: &operands,
                params: launch.params_bytes(),
                grid: launch.grid(),
                block: launch.block(),
                shared: 0,
                reverse: false,
                cluster: [1; 3],
                cooperative: false,
            };
            // SAFETY: nothing of the source runs when it is loaded. The machine checked the
            // bindings, and no other code runs meanwhile. The tests check that the kernels stay
            // within them.
            let ran = unsafe { emulator.run(&run) };
            ran.map_err(Error::invalid)
        });
        let fill = name.starts_with("leasehold_fill");
        let bindings = if fill { &[Access::Write][..] } else { &[Access::Read, Access::Write] };
        let spec = KernelSpec::new(bindings, if fill { 16 } else { 24 }, body);
        kernels.register(&name, spec.leaving_gaps());
    }
    Some(bench)
}

#[test]
fn copies_of_every_alignment_and_pitch_equal_the_hosts() {
    equal_copies(Bench::new(MpsConfig::default()));
    emulated().into_iter().for_each(equal_copies);
}

fn equal_copies(bench: Bench) {
    let pair = Pair::open(&bench, mps(0));
    for (src, dst, width, src_pitch, dst_pitch, rows) in copies() {
        let (from, to) = (pair.buffer(0), pair.buffer(0xff));
        let (has, mut want) = (bytes(&from), bytes(&to));
        for row in 0..rows {
            for i in 0..width {
                let byte = has[(src + row * src_pitch + i) as usize];
                want[(dst + row * dst_pitch + i) as usize] = byte;
            }
        }
        let copy = Copy2d {
            src: from.addr() + src,
            src_native: from.native(),
            src_pitch,
            dst: to.addr() + dst,
            dst_native: to.native(),
            dst_pitch,
            width,
            rows,
        };
        let transfer = pair.state.transfers().copy(&copy).unwrap().unwrap();
        pair.run(&bench, &transfer).unwrap();
        assert_eq!(bytes(&to), want, "{copy:?}");
        let nothing = Copy2d { rows: 0, ..copy };
        assert!(pair.state.transfers().copy(&nothing).unwrap().is_none());
    }
    drop(pair);
    bench.close();
}

#[test]
fn fills_of_every_alignment_and_pattern_equal_the_hosts() {
    equal_fills(Bench::new(MpsConfig::default()));
    emulated().into_iter().for_each(equal_fills);
}

fn equal_fills(bench: Bench) {
    let pair = Pair::open(&bench, mps(0));
    let pattern = 0x8765_4321_u32;
    for (dst, bytes_of, width) in [
        (0, 1, 1),
        (0, 33, 1),
        (7, 100, 1),
        (0, 34, 2),
        (2, 66, 2),
        (0, 1024, 4),
        (4, 20, 4),
        (16, 36, 4),
    ] {
        let to = pair.buffer(0);
        let mut want = bytes(&to);
        for i in 0..bytes_of {
            want[dst + i] = pattern.to_le_bytes()[i % width];
        }
        let fill = Fill {
            dst: to.addr() + dst as u64,
            native: to.native(),
            bytes: bytes_of as u64,
            pattern,
            width: width as u8,
        };
        let transfer = pair.state.transfers().fill(&fill).unwrap().unwrap();
        pair.run(&bench, &transfer).unwrap();
        assert_eq!(bytes(&to), want, "{fill:?}");
        let nothing = Fill { bytes: 0, ..fill };
        assert!(pair.state.transfers().fill(&nothing).unwrap().is_none());
    }
    drop(pair);
    bench.close();
}

#[test]
fn another_devices_memory_is_reached_through_one_alias() {
    let bench = Bench::new(MpsConfig::default());
    let (here, there) = (Pair::open(&bench, mps(0)), Pair::open(&bench, mps(1)));
    let device: &dyn Device = &*here.state;
    assert!(device.peer_access(mps(0)).unwrap() && device.peer_access(mps(1)).unwrap());
    for unknown in [mps(2), DeviceId::cpu(0)] {
        assert!(matches!(device.peer_access(unknown), Err(Error::NotFound(_))), "{unknown}");
    }
    let (mine, theirs) = (here.buffer(0), there.buffer(0xff));
    let want = bytes(&theirs);
    for turn in 0..3 {
        let copy =
            Copy2d::linear((theirs.addr(), theirs.native()), (mine.addr(), mine.native()), BYTES);
        let transfer = here.state.transfers().copy(&copy).unwrap().unwrap();
        here.run(&bench, &transfer).unwrap();
        assert_eq!(bytes(&mine), want, "turn {turn}");
    }
    assert_eq!(bench.calls("newBufferWithBytesNoCopy"), 1);
    // The alias ends with the segment.
    let before = bench.driver.census().buffers;
    drop((mine, theirs));
    let device: &dyn Device = &*there.state;
    device.memory(MemoryKind::Device).unwrap().trim(0).unwrap();
    assert_eq!(bench.driver.census().buffers, before - 2);
    drop((here, there));
    bench.close();
}

#[test]
fn memory_that_is_not_metals_is_refused() {
    let bench = Bench::new(MpsConfig::default().storage(Storage::Private));
    let (here, there) = (Pair::open(&bench, mps(0)), Pair::open(&bench, mps(1)));
    let alloc = |pair: &Pair| {
        let device: &dyn Device = &*pair.state;
        let memory = device.memory(MemoryKind::Device).unwrap();
        memory.alloc(Layout::new(BYTES), pair.nobody.on()).unwrap()
    };
    let (mine, theirs) = (alloc(&here), alloc(&there));
    let host = [0_u8; 64];
    let to = (mine.addr(), mine.native());
    for from in [(host.as_ptr() as u64, 0), (theirs.addr(), theirs.native()), (64, 12345)] {
        let refused = here.state.transfers().copy(&Copy2d::linear(from, to, 64)).map(drop);
        assert!(matches!(refused, Err(Error::Unsupported(_))), "{from:x?}: {refused:?}");
    }
    // A range that exceeds the segment.
    let refused = here.state.transfers().copy(&Copy2d::linear(to, to, 1 << 40)).map(drop);
    assert!(matches!(refused, Err(Error::Unsupported(_))), "{refused:?}");
    let device: &dyn Device = &*here.state;
    assert!(matches!(device.peer_access(mps(1)), Err(Error::Unsupported(_))));
    drop((mine, theirs, here, there));
    bench.close();
}
