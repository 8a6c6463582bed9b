//! Blocks that other processes map: the way there, the pins, what goes wrong.
#![cfg(target_os = "linux")]

use crate::common::*;
use leasehold::pool::{Contents, Pool, PoolKind};
use leasehold::share::{self, Export, SharedBlock};
use leasehold::{
    BackendKind, Buffer, BufferView, Context, DeviceId, Error, Lease, Protection, Result, Runtime,
    View,
};
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_mps::{MpsBackend, MpsConfig};
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{MachineConfig, ReportKind, SimBackend};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

const WORDS: usize = 100_000;
const BYTES: u64 = 4 * WORDS as u64;

/// Exports a block. The tests alone get descriptors.
fn export_of(pool: &Pool, view: BufferView<'_>) -> Result<Export> {
    // SAFETY: the tests order their uses of a block by messages and by waits on the host.
    unsafe { pool.export(view) }
}

/// Contexts of one machine are two of one process.
fn cuda(machine_seed: u64, contexts: usize) -> (Vec<Runtime>, Arc<SimDriver>) {
    let driver = SimDriver::new(SimDriverConfig::new(MachineConfig::seed(machine_seed))).unwrap();
    let driver = Arc::new(driver);
    let open = |_| {
        let backend = CudaBackend::with_ops(driver.clone(), CudaConfig::default()).unwrap();
        let context = Context::with_backends(vec![Arc::new(backend)]);
        context.runtime(DeviceId::new(BackendKind::Cuda, 0)).unwrap()
    };
    ((0..contexts).map(open).collect(), driver)
}

fn sim() -> Runtime {
    let sim = Arc::new(SimBackend::new(MachineConfig::seed(6)).unwrap());
    Context::with_backends(vec![sim]).runtime(DeviceId::new(BackendKind::Sim, 0)).unwrap()
}

fn runtime_of(name: &str) -> Runtime {
    match name {
        "cpu" => runtime(),
        "sim" => sim(),
        _ => cuda(7, 1).0.remove(0),
    }
}

fn words(first: u32) -> Vec<u32> {
    (0..WORDS as u32).map(|i| first.wrapping_add(i.wrapping_mul(2_654_435_761))).collect()
}

fn pair() -> (UnixStream, UnixStream) {
    let (a, b) = UnixStream::pair().unwrap();
    [&a, &b].into_iter().for_each(|end| end.set_read_timeout(Some(LONG)).unwrap());
    (a, b)
}

fn receive(runtime: &Runtime, socket: &UnixStream) -> leasehold::Result<Lease<Buffer>> {
    // SAFETY: the tests order what both sides do by waits and messages.
    unsafe { share::receive(runtime, socket, Protection::ReadWrite) }
}

fn import(runtime: &Runtime, fd: OwnedFd, block: &SharedBlock) -> leasehold::Result<Lease<Buffer>> {
    // SAFETY: the tests order what both sides do by waits and messages.
    unsafe { share::import(runtime, fd, block, Protection::ReadWrite) }
}

/// A block of a new pool with words in it, exported.
fn exported(runtime: &Runtime, first: u32) -> (Pool, Export) {
    let pool = Pool::new(runtime, "shared", PoolKind::Shareable).unwrap();
    let block = pool.alloc(BYTES).unwrap();
    runtime.stream().upload(block.view(), &words(first)).unwrap();
    let export = export_of(&pool, block.view()).unwrap();
    (pool, export)
}

#[test]
fn a_block_is_the_same_memory_on_both_sides() {
    let (sides, driver) = cuda(5, 2);
    let (cpu, sim) = (context(), sim());
    let cpu = || cpu.runtime(DeviceId::cpu(0)).unwrap();
    for [owner, other] in [[cpu(), cpu()], [sim.clone(), sim], [sides[0].clone(), sides[1].clone()]]
    {
        let at = owner.device();
        let (here, there) = pair();
        let (pool, export) = exported(&owner, 1);
        export.send(&here).unwrap();
        let received = receive(&other, &there).unwrap();
        assert_eq!((received.len(), received.addr() % 256), (BYTES, 0), "{at}");
        assert_ne!(received.addr(), export.buffer().addr(), "{at}: a mapping of its own");
        assert_eq!(other.to_vec::<u32>(&received).unwrap(), words(1), "{at}");
        // And the other way, ordered by a wait.
        other.stream().upload_blocking(received.view(), &words(2)).unwrap();
        assert_eq!(owner.to_vec::<u32>(export.buffer()).unwrap(), words(2), "{at}");
        // A part of a buffer.
        let part = export_of(&pool, export.buffer().part(400..800).unwrap()).unwrap();
        part.send(&here).unwrap();
        let received = receive(&other, &there).unwrap();
        assert_eq!(other.to_vec::<u32>(&received).unwrap(), words(2)[100..200], "{at}");
        // Read-only is kept by every operation.
        part.send(&here).unwrap();
        // SAFETY: nobody writes it.
        let read = unsafe { share::receive(&other, &there, Protection::ReadOnly) }.unwrap();
        assert!(matches!(other.stream().fill(read.view(), 0u8), Err(Error::InvalidArgument(_))));
    }
    drop(sides);
    assert_eq!(driver.machine().take_reports(), []);
}

/// The machine knows one memory by two addresses: who does not order the two sides is told.
#[test]
fn a_race_between_two_sides_of_one_simulated_machine_is_reported() {
    let (sides, driver) = cuda(9, 2);
    let (here, there) = pair();
    let (_pool, export) = exported(&sides[0], 1);
    export.send(&here).unwrap();
    let received = receive(&sides[1], &there).unwrap();
    sides[0].stream().fill(export.buffer().view(), 1u8).unwrap();
    sides[1].stream().fill(received.view(), 2u8).unwrap();
    sides.iter().for_each(|side| side.synchronize().unwrap());
    let reports = driver.machine().take_reports();
    assert!(reports.iter().any(|r| matches!(r.kind, ReportKind::Unordered)), "{reports:?}");
}

/// The other end of a process's standard input.
struct Peer {
    child: Child,
    socket: UnixStream,
}

impl Peer {
    fn new(test: &str, role: &str) -> Self {
        let (here, there) = pair();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test])
            .env("LEASEHOLD_SHARE", role)
            .stdin(Stdio::from(OwnedFd::from(there)))
            .stdout(Stdio::null())
            .spawn();
        Self { child: child.unwrap(), socket: here }
    }

    fn end(mut self) {
        assert!(self.child.wait().unwrap().success(), "the other process");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The role of this process, if it is another one's peer.
fn role() -> Option<(String, UnixStream)> {
    use std::os::fd::AsFd;
    let role = std::env::var("LEASEHOLD_SHARE").ok()?;
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let socket = UnixStream::from(socket);
    socket.set_read_timeout(Some(LONG)).unwrap();
    Some((role, socket))
}

fn tell(mut socket: &UnixStream) {
    socket.write_all(b"!").unwrap();
}

fn hear(mut socket: &UnixStream) {
    socket.read_exact(&mut [0]).unwrap();
}

#[test]
fn two_processes_share_a_block() {
    const TEST: &str = "share::two_processes_share_a_block";
    if let Some((device, socket)) = role() {
        let runtime = runtime_of(&device);
        let received = receive(&runtime, &socket).unwrap();
        assert_eq!(runtime.to_vec::<u32>(&received).unwrap(), words(1));
        runtime.stream().upload_blocking(received.view(), &words(2)).unwrap();
        tell(&socket);
        hear(&socket);
        assert_eq!(runtime.to_vec::<u32>(&received).unwrap(), words(3));
        return;
    }
    for device in ["cpu", "sim", "cuda"] {
        let runtime = runtime_of(device);
        let (_pool, export) = exported(&runtime, 1);
        let peer = Peer::new(TEST, device);
        export.send(&peer.socket).unwrap();
        hear(&peer.socket);
        assert_eq!(runtime.to_vec::<u32>(export.buffer()).unwrap(), words(2), "{device}");
        runtime.stream().upload_blocking(export.buffer().view(), &words(3)).unwrap();
        tell(&peer.socket);
        peer.end();
    }
}

#[test]
fn a_block_outlives_the_process_that_made_it() {
    const TEST: &str = "share::a_block_outlives_the_process_that_made_it";
    if let Some((device, socket)) = role() {
        let runtime = runtime_of(&device);
        let (_pool, export) = exported(&runtime, 4);
        export.send(&socket).unwrap();
        hear(&socket);
        // Without a word, as a process that dies.
        std::process::exit(0);
    }
    for device in ["cpu", "sim", "cuda"] {
        let runtime = runtime_of(device);
        let peer = Peer::new(TEST, device);
        let received = receive(&runtime, &peer.socket).unwrap();
        tell(&peer.socket);
        peer.end();
        assert_eq!(runtime.to_vec::<u32>(&received).unwrap(), words(4), "{device}");
        runtime.stream().fill(received.view(), 7u8).unwrap();
        assert_eq!(runtime.to_vec::<u8>(&received).unwrap(), [7; BYTES as usize], "{device}");
    }
}

/// Alone in a process: other tests open files too.
#[test]
fn a_thousand_rounds_leave_no_descriptor_and_no_mapping() {
    const TEST: &str = "share::a_thousand_rounds_leave_no_descriptor_and_no_mapping";
    let Some((device, _)) = role() else {
        for device in ["cpu", "cuda"] {
            Peer::new(TEST, device).end();
        }
        return;
    };
    let runtime = runtime_of(&device);
    let (pool, first) = exported(&runtime, 1);
    let (here, there) = pair();
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let mut before = (0, 0);
    for round in 0..1000 {
        let export = export_of(&pool, first.buffer().view()).unwrap();
        export.send(&here).unwrap();
        let received = receive(&runtime, &there).unwrap();
        runtime.stream().fill(received.view(), round as u8).unwrap();
        runtime.synchronize().unwrap();
        drop((received, export));
        // One that is refused as well.
        let fd = first.descriptor().unwrap();
        let mut wrong = first.block().to_bytes();
        wrong[8] ^= 1;
        assert!(SharedBlock::from_bytes(&wrong).and_then(|b| import(&runtime, fd, &b)).is_err());
        runtime.allocator().drain();
        if round == 10 {
            before = (open(), mapped());
        }
    }
    assert_eq!(open(), before.0);
    assert!(mapped() <= before.1 + 10, "{} mappings after {}", mapped(), before.1);
}

#[test]
fn wrong_descriptors_and_messages_are_refused_by_name() {
    for device in ["cpu", "sim", "cuda"] {
        let runtime = runtime_of(device);
        let (_pool, export) = exported(&runtime, 1);
        let refused = |fd: OwnedFd, block: &SharedBlock, words: &str| {
            let error = import(&runtime, fd, block).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{device}: {error:?}");
            assert!(error.to_string().contains(words), "{device}: {error}");
        };
        let block = export.block();
        // No memory; an ordinary file, which can shrink; memory that can shrink.
        let (pipe, _other) = std::io::pipe().unwrap();
        refused(pipe.into(), block, "no shareable memory");
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        refused(file.into(), block, "no shareable memory");
        // Another segment's size.
        let mut bytes = block.to_bytes();
        bytes[8..16].copy_from_slice(&(2 * block_segment(block)).to_le_bytes());
        let twice = SharedBlock::from_bytes(&bytes).unwrap();
        let said = if device == "cuda" { "another size" } else { "were announced" };
        refused(export.descriptor().unwrap(), &twice, said);
        // Another device.
        let other = runtime_of(if device == "cpu" { "sim" } else { "cpu" });
        let error = import(&other, export.descriptor().unwrap(), block).unwrap_err();
        assert!(error.to_string().contains("on the device of its owner"), "{error}");
        // A block beyond its segment, other bytes, fewer bytes.
        let mut bytes = block.to_bytes();
        bytes[24..32].fill(0xff);
        for wrong in [&bytes[..], &[7; 128], &block.to_bytes()[..127], &[]] {
            assert!(matches!(SharedBlock::from_bytes(wrong), Err(Error::InvalidArgument(_))));
        }
        assert_eq!(&SharedBlock::from_bytes(&block.to_bytes()).unwrap(), block);
    }
}

fn block_segment(block: &SharedBlock) -> u64 {
    u64::from_le_bytes(block.to_bytes()[8..16].try_into().unwrap())
}

#[test]
fn what_goes_wrong_on_the_socket_is_said() {
    let runtime = runtime();
    let (_pool, export) = exported(&runtime, 1);
    // Bytes without a descriptor, other bytes.
    let (mut here, there) = pair();
    here.write_all(&export.block().to_bytes()).unwrap();
    let error = receive(&runtime, &there).unwrap_err();
    assert!(error.to_string().contains("without its descriptor"), "{error}");
    here.write_all(&[3; 128]).unwrap();
    let error = receive(&runtime, &there).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
    // In pieces, it is a message as well.
    let (here, there) = pair();
    export.send(&here).unwrap();
    assert_eq!(runtime.to_vec::<u32>(&receive(&runtime, &there).unwrap()).unwrap(), words(1));
    // Half a message, then the end.
    let (mut here, there) = pair();
    here.write_all(&export.block().to_bytes()[..50]).unwrap();
    drop(here);
    assert!(matches!(receive(&runtime, &there), Err(Error::Unavailable(_))));
    // Nobody there, on both sides.
    let (here, there) = pair();
    drop(here);
    assert!(matches!(receive(&runtime, &there), Err(Error::Unavailable(_))));
    let (here, there) = pair();
    drop(there);
    assert!(matches!(export.send(&here), Err(Error::Unavailable(_))));
    // Nothing comes.
    let (_here, there) = pair();
    there.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    assert!(matches!(receive(&runtime, &there), Err(Error::Timeout(_))));
}

#[test]
fn an_export_waits_for_the_work_before_it_and_says_if_that_failed() {
    let runtime = runtime();
    let (pool, export) = exported(&runtime, 1);
    let late = runtime.create_host_timeline().unwrap();
    let go = late.next();
    runtime.stream().wait(go).unwrap();
    runtime.stream().fill(export.buffer().view(), 5u8).unwrap();
    let (here, there) = pair();
    std::thread::scope(|scope| {
        let sent = scope.spawn(|| export.send(&here));
        there.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert!(matches!(receive(&runtime, &there), Err(Error::Timeout(_))), "before the fill");
        there.set_read_timeout(Some(LONG)).unwrap();
        late.signal(go.value()).unwrap();
        sent.join().unwrap().unwrap();
    });
    let received = receive(&runtime, &there).unwrap();
    assert_eq!(runtime.to_vec::<u8>(&received).unwrap()[..3], [5; 3]);
    let other = runtime.create_stream().unwrap();
    let failing = pool.alloc(64).unwrap();
    other.host_call("fails", || Err(Error::other("on purpose"))).unwrap();
    other.fill(failing.view(), 1u8).unwrap();
    let error = export_of(&pool, failing.view()).unwrap().send(&here).unwrap_err();
    assert!(error.to_string().contains("on purpose"), "{error}");
}

#[test]
fn segments_stay_while_they_are_exported_or_held() {
    for device in ["cpu", "sim", "cuda"] {
        let runtime = runtime_of(device);
        let (pool, export) = exported(&runtime, 1);
        assert_eq!((pool.stats().live, pool.stats().segments), (1, 1), "{device}");
        let reserved = pool.stats().reserved;
        assert_eq!(pool.trim(0).unwrap(), 0, "{device}: it is exported");
        // A library that maps the segment holds it.
        let segment = pool.segments().remove(0);
        assert_eq!((segment.bytes(), segment.addr() % 512), (reserved, 0));
        runtime.synchronize().unwrap();
        drop(export);
        assert_eq!(pool.trim(0).unwrap(), reserved, "{device}: nobody needs it");
        assert_eq!((pool.stats().reserved, pool.stats().segments), (0, 0), "{device}");
        // A segment that was given back stays mapped for its holder.
        // SAFETY: the descriptor is closed at once.
        drop(unsafe { segment.descriptor() }.unwrap());
        // A pool lives on in its blocks.
        let again = pool.alloc(100).unwrap();
        assert!(export_of(&pool, again.view()).is_ok());
        drop(pool);
        runtime.stream().fill(again.view(), 1u8).unwrap();
        runtime.synchronize().unwrap();
    }
}

#[test]
fn only_the_pools_own_memory_is_exported() {
    let runtime = runtime();
    let pool = Pool::new(&runtime, "shared", PoolKind::Shareable).unwrap();
    let own = pool.alloc(100).unwrap();
    for strange in [runtime.alloc(100).unwrap(), runtime.alloc_pinned(100).unwrap()] {
        let error = export_of(&pool, strange.view()).unwrap_err();
        assert!(error.to_string().contains("ordinary memory cannot be exported"), "{error}");
    }
    let second = Pool::new(&runtime, "second", PoolKind::Shareable).unwrap();
    assert!(matches!(export_of(&second, own.view()), Err(Error::InvalidArgument(_))));
    let empty = pool.alloc(0).unwrap();
    assert!(matches!(export_of(&pool, empty.view()), Err(Error::InvalidArgument(_))));
    pool.set_limit(1);
    assert!(
        matches!(pool.alloc(64 << 20), Err(e) if e.is_out_of_memory() || matches!(e, Error::OverBudget { .. }))
    );
}

#[test]
fn devices_without_shareable_memory_say_so() {
    let metal = leasehold_sim::mps::SimDriverConfig::new(MachineConfig::seed(1));
    let metal = leasehold_sim::mps::SimDriver::new(metal).unwrap();
    let metal = MpsBackend::with_ops(Arc::new(metal), MpsConfig::default()).unwrap();
    let metal = Context::with_backends(vec![Arc::new(metal)]);
    let mut config = SimDriverConfig::new(MachineConfig::seed(1));
    config.vmm = false;
    let driver = Arc::new(SimDriver::new(config).unwrap());
    let plain = CudaBackend::with_ops(driver, CudaConfig::default()).unwrap();
    let plain = Context::with_backends(vec![Arc::new(plain)]);
    for (context, id) in [(metal, "mps:0"), (plain, "cuda:0")] {
        let runtime = context.runtime(id.parse().unwrap()).unwrap();
        assert!(!runtime.raw_device().caps().shareable, "{id}");
        let error = Pool::new(&runtime, "shared", PoolKind::Shareable).unwrap_err();
        assert!(matches!(error, Error::Unsupported(_)), "{error:?}");
    }
    assert!(runtime().raw_device().caps().shareable);
}

#[test]
fn what_others_may_map_is_not_suspended() {
    let runtime = runtime();
    let pool = Pool::new(&runtime, "shared", PoolKind::Shareable).unwrap();
    let block = pool.alloc(64).unwrap();
    assert!(matches!(pool.suspend(Contents::Keep), Err(Error::Unsupported(_))));
    assert!(matches!(pool.resume(), Err(Error::InvalidState(_))));
    assert!(matches!(pool.growing::<u32>(1, 4), Err(Error::Unsupported(_))));
    assert!(matches!(pool.growing::<u8>(2, 100), Err(Error::Unsupported(_))));
    runtime.stream().fill(block.view(), 3u8).unwrap();
    assert_eq!(runtime.to_vec::<u8>(&block).unwrap(), [3; 64]);

    let weights = Pool::new(&runtime, "weights", PoolKind::Suspendable).unwrap();
    let own = weights.alloc(64).unwrap();
    assert!(matches!(export_of(&weights, own.view()), Err(Error::InvalidArgument(_))));
    assert!(weights.segments().is_empty());
}
