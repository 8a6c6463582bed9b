//! The steady state allocates nothing: a kernel session from begin to finish, `Runtime::alloc` and
//! drop, launching a graph and waiting for it. Counted by the global allocator over all threads, by
//! the runtime's own count of driver calls, and by the process's map.
//!
//! A test binary of its own, without the test harness, so that nothing else allocates meanwhile.

use leasehold::backend::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use leasehold::kernel::{
    CpuArgs, KernelCheck, KernelDesc, KernelSource, session_ops, session_sync_ops,
};
use leasehold::{
    Access, Context, DeviceId, KernelBase, KernelSession, Operand, Result, Stream, View,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, Stats, StatsAlloc};
use std::alloc::System;
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

unsafe fn increment(args: &CpuArgs<'_>) {
    // SAFETY: each tile has an element of its own.
    let values = unsafe { args.slice_mut::<u32>(0, args.tile()[0] as usize, 1) };
    let by: u32 = args.params();
    values[0] += by;
}

fn launch(stream: &Stream, kernel: &KernelBase, operands: &[Operand<'_>], by: u32) -> Result<()> {
    let session = KernelSession::begin(kernel, stream)?;
    let session = session_sync_ops::wait(session, operands)?;
    let session = session_ops::bind(session)?;
    let session = session_ops::params(session, &by)?;
    let session = session_ops::dispatch_1d(session, 4, 1)?;
    session_sync_ops::update_tokens(session).finish().map(drop)
}

/// Ranges of addresses with their rights and files: what `mmap`, `munmap` and `brk` change.
fn map() -> String {
    std::fs::read_to_string("/proc/self/maps").unwrap_or_default()
}

/// Waits until every other thread of the process sleeps. The device's threads are made with the
/// runtime; one that the system has not run yet allocates when it starts (its name, its signal
/// stack), however late that is.
fn threads_have_started() {
    let own = std::process::id().to_string();
    // The state is the first field behind the name, which ends at the last parenthesis.
    let asleep = |stat: &str| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'));
    let sleeps = |task: std::io::Result<std::fs::DirEntry>| {
        task.is_ok_and(|task| {
            task.file_name().to_str() == Some(&own)
                || std::fs::read_to_string(task.path().join("stat")).is_ok_and(|stat| asleep(&stat))
        })
    };
    while std::fs::read_dir("/proc/self/task").is_ok_and(|mut tasks| !tasks.all(sleeps)) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn main() -> Result<()> {
    let runtime = Context::new().runtime(DeviceId::cpu(0))?;
    let source = KernelSource::Cpu(increment);
    let desc = KernelDesc::new("increment", source, &[Access::ReadWrite], KernelCheck::grid_1d())
        .params_of::<u32>();
    // SAFETY: a tile touches an element of its own, within bounds that are checked.
    let kernel = unsafe { KernelBase::new(desc.aligned(4)) }?;
    let x = runtime.upload(&[0u32; 4])?;
    let y = runtime.upload(&[0u32; 4])?;
    let other = runtime.create_stream()?;
    let graph = runtime.record_graph(|runtime| {
        let t = runtime.alloc(16)?;
        runtime.stream().copy(t.view(), x.view())?;
        launch(runtime.stream(), &kernel, &[t.read_write()], 1)?;
        runtime.stream().copy(x.view(), t.view())
    })?;
    let operands = [y.read_write()];
    // Both lists that a queue takes in turns, its pending one and its worker's, grow as far ahead
    // as the rounds ever get; so that no luck is in it, the streams are held until all is
    // submitted, and a call alone makes the lists change places in between.
    let run_ahead = |round: &dyn Fn() -> Result<()>| -> Result<()> {
        for _ in 0..2 {
            let (open, held) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
            for stream in [runtime.stream(), &other] {
                let (open, held) = (open.clone(), held.clone());
                stream.host_call_once("held", move || {
                    held.fetch_add(1, Ordering::AcqRel);
                    while !open.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                    Ok(())
                })?;
            }
            while held.load(Ordering::Acquire) < 2 {
                std::thread::yield_now();
            }
            let result = (0..100).try_for_each(|_| round());
            open.store(true, Ordering::Release);
            result?;
            for stream in [runtime.stream(), &other] {
                stream.synchronize()?;
                stream.host_call_once("alone", || Ok(()))?;
                stream.synchronize()?;
            }
        }
        Ok(())
    };
    let check = |what: &str, round: &dyn Fn() -> Result<()>| -> Result<()> {
        // A host that runs ahead makes the queue's lists grow; at a hundred rounds it waits, as a
        // program that reads results does.
        let rounds = |n: u32| -> Result<()> {
            for i in 0..n {
                round()?;
                if i % 100 == 99 {
                    runtime.stream().synchronize()?;
                    other.synchronize()?;
                }
            }
            Ok(())
        };
        rounds(200)?;
        let before = map();
        let (calls, driver) = (ALLOCATOR.stats(), runtime.allocator().stats().driver_calls);
        rounds(2000)?;
        let heap = ALLOCATOR.stats() - calls;
        let driver = runtime.allocator().stats().driver_calls - driver;
        assert_eq!(
            (heap, driver),
            (Stats::default(), 0),
            "{what}: heap calls and driver calls in 2,000 rounds"
        );
        // A sanitizer maps memory of its own.
        let sanitized = std::env::var_os("LEASEHOLD_SANITIZED").is_some();
        assert!(sanitized || before == map(), "{what}: the process's map changed");
        println!("{what}: nothing allocated, nothing mapped");
        Ok(())
    };
    let session = || launch(runtime.stream(), &kernel, &operands, 1);
    run_ahead(&session)?;
    threads_have_started();
    check("session", &session)?;
    let in_turn = || {
        launch(runtime.stream(), &kernel, &operands, 1)?;
        launch(&other, &kernel, &operands, 1)
    };
    run_ahead(&in_turn)?;
    check("session on two streams in turn", &in_turn)?;
    check("alloc and drop", &|| runtime.alloc(4096).map(drop))?;
    let used = || {
        let t = runtime.alloc(1 << 20)?;
        runtime.stream().fill(t.part(..16)?, 1u32)
    };
    run_ahead(&used)?;
    check("alloc, use and drop", &used)?;
    check("launch and wait", &|| runtime.wait_for(graph.launch()?))?;
    let graphs = || {
        graph.launch()?;
        graph.launch_on(&other).map(drop)
    };
    run_ahead(&graphs)?;
    check("launch on two streams in turn", &graphs)?;
    let event = runtime.create_event()?;
    check("record and wait for an event", &|| {
        runtime.stream().record(&event)?;
        event.synchronize()
    })?;
    let mut word = [0u8; 16];
    let word = std::cell::RefCell::new(&mut word);
    check("read back", &|| runtime.stream().download(*word.borrow_mut(), x.view()))?;
    assert_eq!(runtime.to_vec::<u32>(&y)?, [3 * 2400; 4]);
    assert_eq!(runtime.to_vec::<u32>(&x)?, [2200 + 2 * 2400; 4]);
    Ok(())
}
