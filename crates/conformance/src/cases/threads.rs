//! Threads.

use crate::case::{Case, Need, Outcome, Stop, check};
use crate::env::{Env, bind};
use crate::factory::TestKernel;
use leasehold::View;
use leasehold::hal::Access;
use leasehold::ops::{self, Pattern};

pub(crate) const CASES: &[Case] = &[
    Case::hal(
        115,
        "sixteen threads with a stream each read one buffer",
        &[Need::Kernel(TestKernel::Add)],
        shared_reads,
    ),
    Case::runtime(
        138,
        "a writer waits for the readers on two streams, and so does the memory",
        &[Need::Hold],
        readers_then_writer,
    ),
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
                let bindings = [bind(&shared, Access::Read), bind(&shared, Access::Read), bind(&out, Access::Write)];
                env.dispatch(&stream, &add, 16, &bindings, &[])?;
                let sums = env.read_u32(&stream, &out)?;
                check!(sums.iter().enumerate().all(|(i, &v)| v == 2 * i as u32), "a sum is wrong");
            }
            Ok(())
        };
        let threads: Vec<_> = (0..16).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|t| t.join().map_err(|_| Stop::Failed("a thread panicked".into()))?)
    })
}

fn readers_then_writer(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let (r1, r2, writer) = (runtime.create_stream()?, runtime.create_stream()?, runtime.create_stream()?);
    for round in 0..10u8 {
        let buffer = runtime.upload(&[round; 4096])?;
        let outs = [
            runtime.alloc_on(&r1, leasehold::Layout::new(4096))?,
            runtime.alloc_on(&r2, leasehold::Layout::new(4096))?,
        ];
        let holds = [env.hold_runtime(&r1)?, env.hold_runtime(&r2)?];
        ops::copy(&r1, outs[0].view(), buffer.view())?;
        ops::copy(&r2, outs[1].view(), buffer.view())?;
        ops::fill(&writer, buffer.view(), Pattern::U8(0xff))?;
        drop(buffer);
        // Whoever gets the memory next writes it too.
        let next: Vec<_> = (0..4).map(|_| runtime.alloc(4096)).collect::<leasehold::Result<_>>()?;
        for b in &next {
            ops::fill(runtime.stream(), b.view(), Pattern::U8(0xee))?;
        }
        for hold in holds {
            hold.release()?;
        }
        for out in &outs {
            check!(
                runtime.download::<u8>(out)?.iter().all(|&b| b == round),
                "round {round}: a reader saw what came later"
            );
        }
        check!(
            runtime.download::<u8>(&next[0])?.iter().all(|&b| b == 0xee),
            "round {round}: the writer came after the next owner"
        );
    }
    Ok(())
}
