//! Threads.

use crate::case::{Case, Need, Outcome, Stop, check, check_eq};
use crate::cases::kernels::launch;
use crate::env::{Env, bind};
use crate::factory::TestKernel;
use leasehold::backend::Access;
use leasehold::backend::sync::atomic::{AtomicBool, Ordering};
use leasehold::{Runtime, View};

pub(crate) const CASES: &[Case] = &[
    Case::hal(
        115,
        "sixteen threads with a stream each read one buffer",
        &[Need::Kernel(TestKernel::Add)],
        shared_reads,
    )
    .sanitizer(),
    Case::runtime(
        138,
        "a writer waits for the readers on two streams, and so does the memory",
        &[Need::Hold],
        readers_then_writer,
    )
    .sanitizer(),
    Case::runtime(
        152,
        "threads that launch, copy and mark on one stream take turns",
        &[Need::Kernel(TestKernel::Fill)],
        one_stream,
    )
    .sanitizer(),
    Case::runtime(
        160,
        "threads that download on one stream see what it wrote last, also behind held work",
        &[Need::HostCalls],
        downloads,
    )
    .sanitizer(),
];

fn shared_reads(env: &Env) -> Outcome {
    let first = env.stream()?;
    let (shared, n) = (env.buffer(&first, 4096)?, 4096u64);
    let values: Vec<u8> = (0..1024u32).flat_map(u32::to_le_bytes).collect();
    env.write(&first, &shared, &values)?;
    let add = env.kernel(TestKernel::Add)?;
    std::thread::scope(|scope| {
        let work = || -> Outcome {
            let stream = env.stream()?;
            let out = env.buffer(&stream, n)?;
            for _ in 0..20 {
                let bindings = [
                    bind(&shared, Access::Read),
                    bind(&shared, Access::Read),
                    bind(&out, Access::Write),
                ];
                env.dispatch(&stream, &add, 16, &bindings, &[])?;
                let sums = env.read_u32(&stream, &out)?;
                check!(sums.iter().enumerate().all(|(i, &v)| v == 2 * i as u32), "a sum is wrong");
            }
            Ok(())
        };
        let threads: Vec<_> = (0..16).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .try_for_each(|t| t.join().map_err(|_| Stop::Failed("a thread panicked".into()))?)
    })
}

/// The method of the two readers.
#[derive(Debug, Clone, Copy)]
enum Reads {
    /// Copies on a stream.
    Eager,
    /// Graphs that copy.
    Graphs,
    /// Host copies out of the buffer.
    Downloads,
}

fn readers_then_writer(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let caps = env.device().caps();
    let (r1, r2, writer) =
        (runtime.create_stream()?, runtime.create_stream()?, runtime.create_stream()?);
    for round in 0..12u8 {
        let reads = match round % 3 {
            1 if caps.graphs => Reads::Graphs,
            2 => Reads::Downloads,
            _ => Reads::Eager,
        };
        // A separate stream, one of the readers' streams, and a graph.
        let (writer, in_graph) = match round % 4 {
            1 => (&r1, false),
            2 if caps.graphs => (&writer, true),
            _ => (&writer, false),
        };
        let buffer = runtime.upload(&[round; 4096])?;
        let outs = match reads {
            Reads::Downloads => [runtime.alloc_pinned(4096)?, runtime.alloc_pinned(4096)?],
            _ => [r1.runtime().alloc(4096)?, r2.runtime().alloc(4096)?],
        };
        let graphs = match reads {
            Reads::Graphs => outs
                .iter()
                .map(|out| runtime.record_graph(|rt| rt.stream().copy(out.view(), buffer.view())))
                .collect::<leasehold::Result<Vec<_>>>()?,
            _ => Vec::new(),
        };
        let overwrite = |runtime: &Runtime| runtime.stream().fill(buffer.view(), 0xffu8);
        let overwriting = in_graph.then(|| runtime.record_graph(overwrite)).transpose()?;
        let holds = [env.hold_running(r1.raw())?, env.hold_running(r2.raw())?];
        for (i, stream) in [&r1, &r2].into_iter().enumerate() {
            match reads {
                Reads::Eager => stream.copy(outs[i].view(), buffer.view())?,
                Reads::Graphs => _ = graphs[i].launch_on(stream)?,
                Reads::Downloads => stream.copy_pinned(outs[i].view(), buffer.view())?,
            }
        }
        match &overwriting {
            Some(graph) => _ = graph.launch_on(writer)?,
            None => writer.fill(buffer.view(), 0xffu8)?,
        }
        drop((buffer, overwriting, graphs));
        // The next owner of the memory writes it too.
        let next: Vec<_> = (0..4).map(|_| runtime.alloc(4096)).collect::<leasehold::Result<_>>()?;
        for b in &next {
            runtime.stream().fill(b.view(), 0xeeu8)?;
        }
        env.linger(std::time::Duration::from_millis(2));
        for hold in holds {
            hold.release()?;
        }
        for out in &outs {
            let bytes = match reads {
                // SAFETY: no later submission writes the memory.
                Reads::Downloads => unsafe { runtime.stream().map_read(out.view()) }?.to_vec(),
                _ => runtime.to_vec::<u8>(out)?,
            };
            check!(
                bytes.iter().all(|&b| b == round),
                "round {round}, {reads:?}: a reader saw what came later: {}",
                bytes[0]
            );
        }
        for b in &next {
            check!(
                runtime.to_vec::<u8>(b)?.iter().all(|&b| b == 0xee),
                "round {round}, {reads:?}: the writer came after the next owner"
            );
        }
    }
    Ok(())
}

fn one_stream(env: &Env) -> Outcome {
    let rounds = env.rounds(2_000) as u32;
    let runtime = env.runtime()?;
    let kernel = TestKernel::base(env.desc(TestKernel::Fill)?)?;
    for threads in [2u32, 4, 8] {
        let before = runtime.stream().now().value();
        let work = |thread: u32| -> Outcome {
            let (mine, copy) = (runtime.upload(&[0u32; 64])?, runtime.alloc(256)?);
            let event = runtime.create_event()?;
            for round in 1..=rounds {
                launch(&runtime, &kernel, &mine, thread << 16 | round)?;
                if round % 16 == 0 || round == rounds {
                    runtime.stream().copy(copy.view(), mine.view())?;
                    runtime.stream().record(&event)?;
                    runtime.stream().wait_event(&event)?;
                    runtime.stream().fill(mine.view(), 0u8)?;
                }
            }
            let last = thread << 16 | rounds;
            check_eq!(
                runtime.to_vec::<u32>(&copy)?,
                [last; 64],
                "what thread {thread} of {threads} launched last"
            );
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|t| scope.spawn(move || work(t))).collect();
            threads
                .into_iter()
                .try_for_each(|t| t.join().map_err(|_| Stop::Failed("a thread panicked".into()))?)
        })?;
        let submitted = runtime.stream().now().value() - before;
        check!(
            submitted >= u64::from(threads * rounds),
            "{submitted} submissions of {threads} times {rounds} launches"
        );
    }
    Ok(())
}

/// One thread writes buffers on the default stream, and holds the stream back for moments. One
/// frees pinned memory that work of the stream still uses, and the others download.
fn downloads(env: &Env) -> Outcome {
    const BUFFERS: u32 = 8;
    const WORDS: u64 = 64;
    let rounds = env.rounds(4_000) as u32;
    let runtime = env.runtime()?;
    let stream = runtime.stream();
    let value = |buffer: u32, round: u32| buffer << 24 | round;
    let buffers = (0..BUFFERS)
        .map(|b| runtime.upload(&[value(b, 0); WORDS as usize]))
        .collect::<leasehold::Result<Vec<_>>>()?;
    let over = AtomicBool::new(false);
    let write = || -> Outcome {
        for round in 1..=rounds {
            if round % 4 == 0 {
                stream.host_call("pause", || {
                    std::thread::yield_now();
                    Ok(())
                })?;
            }
            let b = round % BUFFERS;
            stream.fill(buffers[b as usize].view(), value(b, round))?;
            if round % 16 == 0 {
                stream.synchronize()?;
            }
        }
        Ok(())
    };
    let free = || -> Outcome {
        let out = runtime.alloc(WORDS * 4)?;
        let mut round = 0;
        while !over.load(Ordering::Relaxed) {
            round += 1;
            let sent = value(BUFFERS, round);
            let pinned = runtime.alloc_pinned(WORDS * 4)?;
            stream.fill(pinned.view(), sent)?;
            stream.copy(out.view(), pinned.view())?;
            drop(pinned);
            let got = runtime.to_vec::<u32>(&out)?;
            check_eq!(got, [sent; WORDS as usize], "what went through freed memory");
        }
        Ok(())
    };
    let read = |thread: u32| -> Outcome {
        let (mut seen, mut turn) = ([0; BUFFERS as usize], thread);
        while !over.load(Ordering::Relaxed) {
            turn += 1;
            let b = turn % BUFFERS;
            let from = u64::from(turn) % (WORDS - 1);
            let to = from + 1 + u64::from(turn / 3) % (WORDS - from);
            let got = runtime.to_vec(buffers[b as usize].slice(from as usize..to as usize))?;
            let last = &mut seen[b as usize];
            check!(
                got.iter().all(|&word| word == got[0]) && got[0] >> 24 == b && got[0] >= *last,
                "words {from} to {to} of buffer {b} are {got:x?}, after {last:x}"
            );
            *last = got[0];
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let (read, over) = (&read, &over);
        let readers: Vec<_> = (0..6).map(|t| scope.spawn(move || read(t))).collect();
        let freeing = scope.spawn(free);
        let wrote = write();
        over.store(true, Ordering::Relaxed);
        let ends = readers.into_iter().chain([freeing]).map(|t| t.join());
        let ends: Vec<_> = ends.collect();
        wrote?;
        ends.into_iter()
            .try_for_each(|end| end.map_err(|_| Stop::Failed("a thread panicked".into()))?)
    })
}
