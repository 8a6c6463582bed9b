//! Kernels and sessions.

use crate::case::{Case, Need, Outcome, Stop, check, check_eq, expect_error, failed, skipped};
use crate::env::{Env, bind, direct};
use crate::factory::{Injected, TestKernel};
use leasehold::backend::{Access, Dispatch, KernelDesc, KernelSource, MemoryKind, Op, Pipeline};
use leasehold::kernel::{
    Kernel, KernelSession, Read, ReadWrite, Write, session_ops, session_sync_ops,
};
use leasehold::{KernelBase, Lease, View};

const FILL: Need = Need::Kernel(TestKernel::Fill);
const ADD: Need = Need::Kernel(TestKernel::Add);

pub(crate) const CASES: &[Case] = &[
    Case::hal(
        79,
        "a source that the device cannot take is an error and harmless",
        &[FILL],
        foreign_source,
    ),
    Case::hal(80, "an entry that the source has not got is not found", &[FILL], missing_entry),
    Case::hal(81, "a kernel asked for by sixteen threads is made once", &[FILL], made_once),
    Case::hal(82, "a launch of no blocks runs nothing and completes", &[FILL], no_blocks)
        .replayed()
        .sanitizer(),
    Case::hal(83, "more bindings or parameters than the limit are refused", &[FILL], beyond_limits)
        .sanitizer(),
    Case::hal(84, "parameters of a wrong size never reach the device", &[FILL], wrong_params)
        .sanitizer(),
    Case::hal(85, "a kernel's lease may go while it runs", &[FILL, Need::Hold], drop_in_flight)
        .sanitizer(),
    Case::hal(87, "grids beyond 65,535 blocks are complete", &[FILL], large_grid).sanitizer(),
    Case::runtime(88, "a session that fails to begin leaves nothing behind", &[FILL], failed_begin),
    Case::runtime(89, "a session that is dropped submits nothing", &[FILL], dropped_session)
        .sanitizer(),
    Case::runtime(90, "a second session on a stream is occupied", &[FILL], two_sessions),
    Case::hal(91, "thousands of launches in a row keep their dependencies", &[ADD], many_launches)
        .replayed()
        .sanitizer(),
    Case::hal(92, "a read-back sees all that was launched before", &[FILL], read_back)
        .replayed()
        .sanitizer(),
    Case::hal(135, "a kernel in use outlives a thousand others", &[FILL], hot_kernel),
    Case::hal(
        136,
        "a kernel that fails for sixteen threads fails each time and no longer",
        &[FILL],
        failing_kernel,
    )
    .faulty(),
    Case::hal(137, "a hundred thousand launches keep every pool bounded", &[FILL], bounded_pools),
    Case::runtime(
        149,
        "arguments of a wrong number or size are caught before the launch",
        &[ADD],
        wrong_arguments,
    ),
    Case::runtime(
        240,
        "a typed kernel launches as its base does, and takes no other kernel's signature",
        &[ADD, Need::Graphs],
        typed_kernel,
    )
    .replayed()
    .sanitizer(),
    Case::runtime(
        161,
        "a kernel ends after its last base, its last graph and its last launch",
        &[FILL, Need::Graphs],
        released_kernels,
    )
    .sanitizer(),
];

/// The resources of the device's pools that a kernel may have, by the pools' names.
fn kernels_live(env: &Env) -> Vec<(&'static str, u64)> {
    let mut all = Vec::new();
    env.device().pools(&mut |name, s| {
        if ["pipeline", "module", "library", "compute pipeline state"].contains(&name) {
            all.push((name, s.live));
        }
    });
    all
}

fn released_kernels(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let stream = runtime.create_stream()?;
    let buffer = runtime.alloc(256)?;
    let named = |name: String| -> Outcome<KernelBase> {
        let mut desc = env.desc(TestKernel::Fill)?;
        desc.name = name.into();
        Ok(TestKernel::base(desc)?)
    };
    let launch = |kernel: &KernelBase, value: u32| {
        stream.launch(kernel, &[buffer.write()], &value, (1, TestKernel::BLOCK))
    };
    let holds = |value: u32, what: &str| -> Outcome {
        check_eq!(runtime.to_vec::<u32>(&buffer)?, [value; 64], "{what}");
        Ok(())
    };
    // The device's own resources are there after the first kernel.
    let first = named("conformance_first".into())?;
    launch(&first, 1)?;
    runtime.synchronize()?;
    drop(first);
    runtime.synchronize()?;
    let before = kernels_live(env);
    let rounds = env.rounds(500) as u32;
    for i in 0..rounds {
        let kernel = named(format!("conformance_dropped_{i}"))?;
        kernel.prepare(&runtime)?;
        launch(&kernel, i)?;
        // The launch may be pending.
        drop(kernel);
    }
    stream.synchronize()?;
    holds(rounds - 1, "the last dropped kernel")?;
    runtime.synchronize()?;
    check_eq!(kernels_live(env), before, "kernels after {rounds} were dropped");
    // Two bases of one key are one kernel while either lives.
    let (one, two) = (named("conformance_shared".into())?, named("conformance_shared".into())?);
    one.prepare(&runtime)?;
    let shared = kernels_live(env);
    two.prepare(&runtime)?;
    check_eq!(kernels_live(env), shared, "kernels of one key");
    drop(one);
    launch(&two, 7)?;
    holds(7, "the second base of a key")?;
    drop(two);
    let again = named("conformance_shared".into())?;
    launch(&again, 8)?;
    holds(8, "a base that was made again")?;
    drop(again);
    runtime.synchronize()?;
    check_eq!(kernels_live(env), before, "kernels after both bases were dropped");
    // A graph holds its kernels.
    let recorded = named("conformance_recorded".into())?;
    let graph = runtime.record_graph(|runtime| {
        let operands = [buffer.write()];
        runtime.stream().launch(&recorded, &operands, &9u32, (1, TestKernel::BLOCK)).map(drop)
    })?;
    drop(recorded);
    runtime.synchronize()?;
    for i in 0..3 {
        launch(&named(format!("conformance_between_{i}"))?, i)?;
        stream.synchronize()?;
        graph.launch_on(&stream)?;
        holds(9, "a graph whose kernel has no base")?;
    }
    // The launch may be pending.
    graph.launch_on(&stream)?;
    drop(graph);
    stream.synchronize()?;
    holds(9, "a graph that was dropped")?;
    runtime.synchronize()?;
    check_eq!(kernels_live(env), before, "kernels after the graph was dropped");
    Ok(())
}

fn foreign_source(env: &Env) -> Outcome {
    let mut desc = env.desc(TestKernel::Fill)?;
    desc.name = "conformance_garbage".into();
    desc.source = match desc.source {
        KernelSource::CudaC { .. } => {
            KernelSource::CudaC { source: "this is no program {".into(), options: vec![].into() }
        }
        KernelSource::Msl(_) => KernelSource::Msl("this is no program {".into()),
        _ => KernelSource::Ptx("this is no program {".into()),
    };
    match env.device().pipeline(&desc) {
        Err(e) if matches!(e.kind(), "Compile" | "Unsupported") => {}
        Err(e) => return Err(Stop::Failed(format!("garbage is {}: {e}", e.kind()))),
        Ok(_) => return Err(Stop::Failed("garbage was made ready".into())),
    }
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 256)?;
    env.kernel_fill(&stream, &env.kernel(TestKernel::Fill)?, &buffer, 5)?;
    check_eq!(env.read_u32(&stream, &buffer)?, [5; 64], "a kernel after the garbage");
    Ok(())
}

fn missing_entry(env: &Env) -> Outcome {
    let mut desc = env.desc(TestKernel::Fill)?;
    const MISSING: &str = "conformance_no_such_entry";
    desc.entry = MISSING.into();
    match &mut desc.source {
        KernelSource::Cpu(_) => {
            return skipped("a source that is a function has one entry, whatever it is called");
        }
        KernelSource::Registered(name) => *name = MISSING.into(),
        _ => {}
    }
    desc.name = MISSING.into();
    for _ in 0..3 {
        let e =
            expect_error(env.device().pipeline(&desc), "NotFound", "an entry that does not exist")?;
        check!(e.to_string().contains(MISSING), "the error does not say which entry: {e}");
    }
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 256)?;
    env.kernel_fill(&stream, &env.kernel(TestKernel::Fill)?, &buffer, 5)?;
    check_eq!(env.read_u32(&stream, &buffer)?, [5; 64], "a kernel after the missing one");
    Ok(())
}

fn hot_kernel(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 256)?;
    let hot = env.kernel(TestKernel::Fill)?;
    let handle = hot.handle();
    env.kernel_fill(&stream, &hot, &buffer, 1)?;
    env.drain(&stream)?;
    for i in 0..env.rounds(1_000) {
        let mut desc = env.desc(TestKernel::Fill)?;
        desc.name = format!("conformance_cold_{i}").into();
        let cold = env.device().pipeline(&desc)?;
        check!(cold.handle() != handle, "kernel {i} is another one's");
        let again = env.kernel(TestKernel::Fill)?;
        check_eq!(
            again.handle(),
            handle,
            "the kernel that is used again and again, after {i} others"
        );
        if i % 16 == 0 {
            env.kernel_fill(&stream, &cold, &buffer, i as u32 + 2)?;
            check_eq!(env.read_u32(&stream, &buffer)?, [i as u32 + 2; 64], "kernel {i}");
        }
    }
    env.kernel_fill(&stream, &hot, &buffer, 1)?;
    check_eq!(env.read_u32(&stream, &buffer)?, [1; 64], "the kernel that is used again and again");
    Ok(())
}

/// Requests one kernel from sixteen threads at once.
fn ask(env: &Env, desc: &KernelDesc<'static>) -> Outcome<Vec<leasehold::Result<Lease<Pipeline>>>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..16).map(|_| scope.spawn(|| env.device().pipeline(desc))).collect();
        threads
            .into_iter()
            .map(|t| t.join().map_err(|_| Stop::Failed("a thread panicked".into())))
            .collect()
    })
}

fn failing_kernel(env: &Env) -> Outcome {
    let good = env.desc(TestKernel::Fill)?;
    let mut bad = good.clone();
    bad.name = "conformance_failing".into();
    bad.source = match &good.source {
        KernelSource::Msl(_) => KernelSource::Msl("this is no program {".into()),
        _ => KernelSource::Ptx("this is no program {".into()),
    };
    for round in 0..3 {
        for (i, result) in ask(env, &bad)?.into_iter().enumerate() {
            match result {
                Err(e) if matches!(e.kind(), "Compile" | "Unsupported") => {}
                Err(e) => {
                    return failed(format!("round {round}: thread {i} was told {}: {e}", e.kind()));
                }
                Ok(_) => {
                    return failed(format!(
                        "round {round}: thread {i} was given a kernel made of garbage"
                    ));
                }
            }
        }
    }
    // The name is free, because the key contains the source.
    let right = KernelDesc { name: bad.name.clone(), ..good.clone() };
    let all = ask(env, &right)?.into_iter().collect::<leasehold::Result<Vec<_>>>()?;
    check!(
        all.iter().all(|p| p.same(&all[0])),
        "sixteen threads were given different kernels for one key"
    );
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 256)?;
    env.kernel_fill(&stream, &all[0], &buffer, 5)?;
    check_eq!(env.read_u32(&stream, &buffer)?, [5; 64], "a kernel of a name that failed before");
    // A failure of the driver is returned to the callers at that time, and to no later caller.
    let Ok(faults) = env.faults() else { return Ok(()) };
    let fresh = KernelDesc { name: "conformance_unlucky".into(), ..good };
    if faults.next(Injected::Creation) {
        let results = ask(env, &fresh)?;
        check!(
            results.iter().any(Result::is_err),
            "a creation that the driver refused went unnoticed"
        );
        drop(results);
        let again = env.device().pipeline(&fresh)?;
        env.kernel_fill(&stream, &again, &buffer, 6)?;
        check_eq!(env.read_u32(&stream, &buffer)?, [6; 64], "a kernel whose first creation failed");
    }
    Ok(())
}

fn made_once(env: &Env) -> Outcome {
    let desc = env.desc(TestKernel::Fill)?;
    let made = std::thread::scope(|scope| {
        let make = || env.device().pipeline(&desc);
        let threads: Vec<_> = (0..16).map(|_| scope.spawn(make)).collect();
        threads
            .into_iter()
            .map(|t| {
                t.join().map_err(|_| Stop::Failed("a thread panicked".into()))?.map_err(Stop::from)
            })
            .collect::<Outcome<Vec<_>>>()
    })?;
    check!(
        made.iter().all(|p| p.same(&made[0])),
        "sixteen threads were given different kernels for one key"
    );
    check!(
        env.kernel(TestKernel::Fill)?.same(&made[0]),
        "asked for again, the kernel is another one"
    );
    Ok(())
}

fn no_blocks(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 256)?;
    let kernel = env.kernel(TestKernel::Fill)?;
    env.write(&stream, &buffer, &[1; 256])?;
    let value =
        env.dispatch(&stream, &kernel, 0, &[bind(&buffer, Access::Write)], &7u32.to_le_bytes())?;
    env.wait(&stream, value)?;
    check_eq!(env.read(&stream, &buffer)?, [1; 256], "a launch of no blocks");
    let value = env.submit(&stream, &[])?;
    env.wait(&stream, value)
}

fn beyond_limits(env: &Env) -> Outcome {
    let limits = *env.device().limits();
    let mut desc = env.desc(TestKernel::Fill)?;
    desc.name = "conformance_many_bindings".into();
    desc.bindings = vec![Access::Read; limits.bindings as usize + 1].into();
    expect_error(
        env.device().pipeline(&desc),
        "InvalidArgument",
        "a kernel with a binding too many",
    )?;
    desc.bindings = TestKernel::Fill.bindings().into();
    desc.params = limits.params + 1;
    expect_error(
        env.device().pipeline(&desc),
        "InvalidArgument",
        "a kernel with a byte of parameters too many",
    )?;
    desc.name = "".into();
    desc.params = 4;
    expect_error(env.device().pipeline(&desc), "InvalidArgument", "a kernel without a name")?;
    Ok(())
}

fn wrong_params(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 256)?;
    env.write(&stream, &buffer, &[1; 256])?;
    let kernel = env.kernel(TestKernel::Fill)?;
    let before = stream.timeline().submitted();
    let bindings = [bind(&buffer, Access::Write), bind(&buffer, Access::Read)];
    for (bindings, params) in [
        (&bindings[..1], &[0u8; 3][..]),
        (&bindings[..1], &[0; 5]),
        (&bindings[..0], &[0; 4]),
        (&bindings[..], &[0; 4]),
    ] {
        let op = Dispatch {
            pipeline: &kernel,
            grid: [4, 1, 1],
            block: [1; 3],
            shared: 0,
            bindings,
            params,
        };
        let what = format!("{} bindings and {} bytes", bindings.len(), params.len());
        expect_error(direct(&stream, &[Op::Dispatch(op)]), "InvalidArgument", &what)?;
    }
    check_eq!(stream.timeline().submitted(), before, "values after refused submissions");
    check_eq!(env.read(&stream, &buffer)?, [1; 256], "the buffer after refused submissions");
    Ok(())
}

fn drop_in_flight(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 4096)?;
    let hold = env.hold(&stream)?;
    let value = env.kernel_fill(&stream, &env.kernel(TestKernel::Fill)?, &buffer, 11)?;
    hold.release()?;
    env.wait(&stream, value)?;
    check!(
        env.read_u32(&stream, &buffer)?.iter().all(|&v| v == 11),
        "the kernel whose lease was dropped"
    );
    Ok(())
}

fn large_grid(env: &Env) -> Outcome {
    let blocks = 70_000u32;
    if env.device().limits().grid[0] < blocks {
        return Err(Stop::Skipped(format!("grids end at {}", env.device().limits().grid[0])));
    }
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, u64::from(blocks) * 256)?;
    let value = env.kernel_fill(&stream, &env.kernel(TestKernel::Fill)?, &buffer, 77)?;
    env.wait(&stream, value)?;
    let wrong = env.read_u32(&stream, &buffer)?.iter().position(|&v| v != 77);
    check_eq!(wrong, None, "the first element that no block wrote");
    Ok(())
}

fn base(env: &Env, kernel: TestKernel) -> Outcome<KernelBase> {
    Ok(TestKernel::base(env.desc(kernel)?)?)
}

fn failed_begin(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let mut desc = env.desc(TestKernel::Fill)?;
    desc.name = "conformance_foreign".into();
    desc.source = match desc.source {
        KernelSource::Ptx(_) => KernelSource::Msl("".into()),
        _ => KernelSource::Ptx("".into()),
    };
    let (bad, good) = (TestKernel::base(desc)?, base(env, TestKernel::Fill)?);
    let buffer = runtime.alloc(256)?;
    let before = runtime.stream().now();
    for _ in 0..10 {
        let begun = KernelSession::begin(&bad, runtime.stream());
        check!(begun.is_err(), "a session began with a kernel of another backend");
    }
    check_eq!(runtime.stream().now(), before, "the stream's end after sessions that did not begin");
    launch(&runtime, &good, &buffer, 3)?;
    check_eq!(runtime.to_vec::<u32>(&buffer)?, [3; 64], "a session after those that failed");
    Ok(())
}

/// A whole session with a fill kernel.
pub(crate) fn launch(
    runtime: &leasehold::Runtime,
    kernel: &KernelBase,
    buffer: &leasehold::Lease<leasehold::Buffer>,
    value: u32,
) -> leasehold::Result<Option<leasehold::Timepoint>> {
    let blocks = (buffer.len() / 4).div_ceil(u64::from(TestKernel::BLOCK)) as u32;
    let operands = [buffer.write()];
    let session = KernelSession::begin(kernel, runtime.stream())?;
    let session = session_sync_ops::wait(session, &operands)?;
    let session = session_ops::bind(session)?;
    let session = session_ops::params(session, &value)?;
    let session = session_ops::dispatch_1d(session, blocks, 1)?;
    session_sync_ops::update_tokens(session).finish()
}

fn dropped_session(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let kernel = base(env, TestKernel::Fill)?;
    let buffer = runtime.upload(&[1u32; 64])?;
    let before = runtime.stream().now();
    for stage in 0..4 {
        let operands = [buffer.write()];
        let session = KernelSession::begin(&kernel, runtime.stream())?;
        if stage == 0 {
            continue;
        }
        let session = session_sync_ops::wait(session, &operands)?;
        if stage == 1 {
            continue;
        }
        let session = session_ops::params(session_ops::bind(session)?, &9u32)?;
        if stage == 2 {
            continue;
        }
        drop(session_sync_ops::update_tokens(session_ops::dispatch_1d(session, 1, 1)?));
    }
    check_eq!(runtime.stream().now(), before, "the stream's end after dropped sessions");
    check_eq!(runtime.to_vec::<u32>(&buffer)?, [1; 64], "the buffer after dropped sessions");
    launch(&runtime, &kernel, &buffer, 2)?;
    check_eq!(runtime.to_vec::<u32>(&buffer)?, [2; 64], "a session after dropped ones");
    Ok(())
}

fn two_sessions(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let kernel = base(env, TestKernel::Fill)?;
    let first = KernelSession::begin(&kernel, runtime.stream())?;
    expect_error(
        KernelSession::begin(&kernel, runtime.stream()).map(drop),
        "Occupied",
        "a second session on the stream",
    )?;
    let other = runtime.create_stream()?;
    drop(KernelSession::begin(&kernel, &other)?);
    drop(first);
    drop(KernelSession::begin(&kernel, runtime.stream())?);
    Ok(())
}

fn many_launches(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let add = env.kernel(TestKernel::Add)?;
    let (one, mut a, mut b) =
        (env.buffer(&stream, 512)?, env.buffer(&stream, 512)?, env.buffer(&stream, 512)?);
    env.write(&stream, &one, &1u32.to_le_bytes().repeat(128))?;
    env.write(&stream, &a, &[0; 512])?;
    let n = 2000u32;
    for i in 0..n {
        env.dispatch(
            &stream,
            &add,
            2,
            &[bind(&a, Access::Read), bind(&one, Access::Read), bind(&b, Access::Write)],
            &[],
        )?;
        std::mem::swap(&mut a, &mut b);
        if i % 500 == 499 {
            let values = env.read_u32(&stream, &a)?;
            check!(values.iter().all(|&v| v == i + 1), "after {} launches: {}", i + 1, values[0]);
        }
    }
    Ok(())
}

fn read_back(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let kernel = env.kernel(TestKernel::Fill)?;
    let buffers: Vec<_> = (0..8).map(|_| env.buffer(&stream, 4096)).collect::<Outcome<_>>()?;
    for launches in [1u32, 49, 50, 51, 63, 64, 65, 130] {
        for i in 0..launches {
            env.kernel_fill(&stream, &kernel, &buffers[i as usize % 8], launches * 1000 + i)?;
        }
        for (at, buffer) in buffers.iter().enumerate().take(launches as usize) {
            let last = (0..launches).rev().find(|i| *i as usize % 8 == at).unwrap_or(0);
            let values = env.read_u32(&stream, buffer)?;
            check!(
                values.iter().all(|&v| v == launches * 1000 + last),
                "{launches} launches: buffer {at} has {}",
                values[0]
            );
        }
    }
    Ok(())
}

fn bounded_pools(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 256)?;
    let kernel = env.kernel(TestKernel::Fill)?;
    let sizes = || {
        let mut all = Vec::new();
        env.backend().pools(&mut |name, s| all.push((name, s.peak, s.live)));
        env.device().pools(&mut |name, s| all.push((name, s.peak, s.live)));
        all
    };
    for i in 0..100 {
        env.kernel_fill(&stream, &kernel, &buffer, i)?;
    }
    env.drain(&stream)?;
    let before = sizes();
    let calls = env.device().memory(MemoryKind::Device)?.stats().driver_calls;
    for i in 0..env.rounds(100_000) as u32 {
        env.kernel_fill(&stream, &kernel, &buffer, i)?;
    }
    env.drain(&stream)?;
    for ((name, was, live), (_, peak, now)) in before.into_iter().zip(sizes()) {
        check!(peak <= was + 64, "pool {name} grew from {was} to {peak}");
        check_eq!(now, live, "live entries of pool {name}");
    }
    let after = env.device().memory(MemoryKind::Device)?.stats().driver_calls;
    check_eq!(after, calls, "the allocator's driver calls");
    Ok(())
}

fn wrong_arguments(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let add = base(env, TestKernel::Add)?;
    let buffers: Vec<_> =
        (0..4).map(|i| runtime.upload(&[i as u32; 64])).collect::<leasehold::Result<_>>()?;
    let before = runtime.stream().now();
    let all = [buffers[0].read(), buffers[1].read(), buffers[2].write(), buffers[3].write()];
    let begin = |operands: &[leasehold::Operand<'_>]| -> leasehold::Result<()> {
        // Of one borrow with the operands.
        let session =
            session_sync_ops::wait(KernelSession::begin(&add, runtime.stream())?, operands)?;
        session_ops::bind(session).map(drop)
    };
    expect_error(begin(&all[..2]), "InvalidArgument", "two operands of three")?;
    expect_error(begin(&all), "InvalidArgument", "four operands of three")?;
    expect_error(
        begin(&[all[0], all[1], buffers[2].read()]),
        "InvalidArgument",
        "a read operand where one is written",
    )?;
    let session = session_sync_ops::wait(KernelSession::begin(&add, runtime.stream())?, &all[..3])?;
    let session = session_ops::bind(session)?;
    expect_error(
        session_ops::params(session, &1u32).map(drop),
        "InvalidArgument",
        "parameters for a kernel without",
    )?;
    check_eq!(runtime.stream().now(), before, "the stream's end after refused launches");
    check_eq!(runtime.to_vec::<u32>(&buffers[2])?, [2; 64], "the buffer after refused launches");
    Ok(())
}

fn typed_kernel(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let base = base(env, TestKernel::Add)?;
    let params = Kernel::<(Read<u32>, Read<u32>, Write<u32>), u32>::try_from(base.clone());
    expect_error(params, "InvalidArgument", "a signature with parameters, of a kernel without")?;
    let access = Kernel::<(Read<u32>, Read<u32>, ReadWrite<u32>)>::try_from(base.clone());
    expect_error(access, "InvalidArgument", "a signature with another access")?;
    let add = Kernel::<(Read<u32>, Read<u32>, Write<u32>)>::try_from(base)?;
    let a = runtime.upload(&[3u32; 64])?;
    let (b, out) = (runtime.upload(&[4u32; 64])?, runtime.upload(&[0u32; 64])?);
    let grid = (1, TestKernel::BLOCK);
    add.launch(runtime.stream(), (&a, &b, &out), &(), grid)?;
    check_eq!(runtime.to_vec(&out)?, [7; 64], "the sums of a launch");
    let graph = runtime.record_graph(|r| add.launch(r.stream(), (&a, &out, &b), &(), grid))?;
    graph.launch()?;
    check_eq!(runtime.to_vec(&b)?, [10; 64], "the sums of a launch of the graph");
    let before = runtime.stream().now();
    let short = add.launch(runtime.stream(), (&a, b.slice(..32), &out), &(), grid);
    expect_error(short, "InvalidArgument", "half of the values")?;
    check_eq!(runtime.stream().now(), before, "the stream's end after a refused launch");
    Ok(())
}
