//! Stream cases: order, overlap, limits, drops.

use crate::case::{Case, Need, Outcome, check, check_eq, expect_error};
use crate::env::{Env, direct, leasehold_on};
use crate::factory::TestKernel;
use leasehold::backend::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use leasehold::backend::{
    Access, Binding, Copy2d, Fill, ForeignCall, MemoryKind, Op, OpList, Plan, StreamDesc,
};
use leasehold::{Buffer, Layout, Lease};
use std::sync::Arc;
use std::time::{Duration, Instant};

const FILL: Need = Need::Kernel(TestKernel::Fill);
const SPIN: Need = Need::Kernel(TestKernel::SpinUntilFlag);

pub(crate) const CASES: &[Case] = &[
    Case::hal(11, "an empty stream is created and destroyed", &[], empty_stream),
    Case::hal(12, "64 streams work and one beyond the limit is an error", &[], many_streams),
    Case::hal(13, "work in one stream behaves in submission order", &[], in_order)
        .replayed()
        .sanitizer(),
    Case::hal(
        14,
        "streams without edges can overlap",
        &[FILL, SPIN, Need::ConcurrentStreams],
        overlap,
    ),
    Case::hal(15, "priorities out of range are clamped and reported", &[], priorities),
    Case::hal(16, "a stream can be used from another thread", &[], other_thread).sanitizer(),
    Case::hal(17, "a stream dropped with pending work completes it", &[Need::Hold], drop_pending)
        .replayed()
        .sanitizer(),
    Case::hal(18, "flushing with nothing pending does nothing", &[], flush_nothing),
    Case::hal(19, "an idle stream is synchronised at once", &[], idle_sync),
    Case::hal(
        20,
        "a query is false while work is pending and never blocks",
        &[Need::Hold],
        query_pending,
    )
    .sanitizer(),
    Case::hal(21, "one thread submits while another synchronises", &[], submit_while_waiting),
    Case::hal(
        22,
        "no stream is the driver's default one and calls beside a held one go on",
        &[Need::Hold, Need::ConcurrentStreams],
        own_streams,
    ),
    Case::hal(
        120,
        "a held queue does not starve another",
        &[Need::Hold, Need::ConcurrentStreams],
        no_starving,
    ),
    Case::hal(
        139,
        "a stream dropped in flight still guards its memory",
        &[Need::Hold, Need::ConcurrentStreams],
        dropped_guards,
    )
    .sanitizer(),
];

pub(crate) fn fill(buffer: &Lease<Buffer>, pattern: u32, width: u8) -> Op<'static> {
    Op::Fill(Fill {
        dst: buffer.addr(),
        native: buffer.native(),
        bytes: buffer.len(),
        pattern,
        width,
    })
}

pub(crate) fn copy(from: &Lease<Buffer>, to: &Lease<Buffer>) -> Op<'static> {
    Op::Copy(Copy2d::linear((from.addr(), from.native()), (to.addr(), to.native()), from.len()))
}

fn empty_stream(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let handle = stream.handle();
    drop(stream);
    let again = env.stream()?;
    check!(again.handle() != handle, "the handle of a dropped stream names a new one");
    Ok(())
}

fn many_streams(env: &Env) -> Outcome {
    let mut streams = Vec::new();
    for i in 0..64u32.min(env.device().limits().streams) {
        let stream = env.stream()?;
        let buffer = env.buffer(&stream, 64)?;
        direct(&stream, &[fill(&buffer, i, 1)])?;
        streams.push((stream, buffer, i));
    }
    for (stream, buffer, i) in &streams {
        check_eq!(env.read(stream, buffer)?, [*i as u8; 64], "stream {i}");
    }
    drop(streams);
    let limit = env.device().limits().streams;
    if limit <= 4096 {
        let mut held = Vec::new();
        for _ in 0..limit {
            held.push(env.device().stream(&StreamDesc::default())?);
        }
        expect_error(
            env.device().stream(&StreamDesc::default()),
            "OverBudget",
            "a stream beyond the limit",
        )?;
        held.pop();
        held.push(env.device().stream(&StreamDesc::default())?);
    }
    Ok(())
}

fn in_order(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffers: Vec<_> = (0..3).map(|_| env.buffer(&stream, 1 << 16)).collect::<Outcome<_>>()?;
    let [a, b, c] = [&buffers[0], &buffers[1], &buffers[2]];
    for round in 0..20u32 {
        // Any other order would leave other bytes.
        env.submit(&stream, &[fill(a, round, 1), copy(a, b), fill(a, round + 100, 1), copy(a, c)])?;
        env.submit(&stream, &[fill(a, round + 50, 1)])?;
        for (buffer, value) in [(a, round + 50), (b, round), (c, round + 100)] {
            let bytes = env.read(&stream, buffer)?;
            check!(
                bytes.iter().all(|&x| u32::from(x) == value),
                "round {round}: {} and not {value}",
                bytes[0]
            );
        }
    }
    Ok(())
}

fn overlap(env: &Env) -> Outcome {
    let (a, b) = (env.stream()?, env.stream()?);
    let pinned = env.device().memory(MemoryKind::Pinned)?;
    let shared = pinned.alloc(Layout::new(512), leasehold_on(&a))?;
    let at = |offset: u64, len: u64, access| Binding {
        addr: shared.addr() + offset,
        len,
        native: shared.native(),
        access,
    };
    // SAFETY: pinned memory is host memory at its address, aligned to 256, as long as its lease
    // lives.
    let seen = unsafe { &*((shared.addr() + 256) as *const AtomicU32) };
    seen.store(0, Ordering::Relaxed);
    // SAFETY: pinned memory is host memory at its address, aligned to 256, as long as its lease
    // lives.
    unsafe { &*(shared.addr() as *const AtomicU32) }.store(0, Ordering::Release);
    let (spin, set) = (env.kernel(TestKernel::SpinUntilFlag)?, env.kernel(TestKernel::Fill)?);
    let limit = u32::try_from(env.timeout().as_millis()).unwrap_or(u32::MAX).to_le_bytes();
    let waiting =
        env.dispatch(&a, &spin, 1, &[at(0, 4, Access::Read), at(256, 4, Access::Write)], &limit)?;
    a.flush()?;
    let setting = env.dispatch(&b, &set, 1, &[at(0, 256, Access::Write)], &1u32.to_le_bytes())?;
    env.wait(&b, setting)?;
    env.wait(&a, waiting)?;
    check_eq!(
        seen.load(Ordering::Acquire),
        1,
        "what the first stream's kernel saw of the second's"
    );
    Ok(())
}

fn priorities(env: &Env) -> Outcome {
    let got = |p| -> Outcome<i32> { Ok(env.device().stream(&StreamDesc::priority(p))?.priority()) };
    let (low, normal, high) = (got(i32::MIN)?, got(0)?, got(i32::MAX)?);
    check!(low <= normal && normal <= high, "priorities {low}, {normal}, {high} are not in order");
    check_eq!(got(high)?, high, "the greatest priority, asked for by its number");
    check!(
        env.device().caps().priorities || (low, high) == (0, 0),
        "priorities without the capability: {low}, {high}"
    );
    Ok(())
}

fn other_thread(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 64)?;
    direct(&stream, &[fill(&buffer, 1, 1)])?;
    std::thread::scope(|scope| {
        let there = scope.spawn(|| {
            direct(&stream, &[fill(&buffer, 2, 1)])?;
            env.read(&stream, &buffer)
        });
        let bytes = there
            .join()
            .map_err(|_| crate::case::Stop::Failed("the other thread panicked".into()))??;
        check_eq!(bytes, [2; 64], "work of the other thread");
        Ok(())
    })?;
    direct(&stream, &[fill(&buffer, 3, 1)])?;
    check_eq!(env.read(&stream, &buffer)?, [3; 64], "work of the first thread afterwards");
    Ok(())
}

fn drop_pending(env: &Env) -> Outcome {
    let (stream, reader) = (env.stream()?, env.stream()?);
    let buffer = env.buffer(&stream, 4096)?;
    env.write(&stream, &buffer, &[1; 4096])?;
    let hold = env.hold(&stream)?;
    let point = stream.timeline().at(env.submit(&stream, &[fill(&buffer, 9, 1)])?);
    drop(stream);
    check!(!point.is_settled(), "the work was over before its stream was let go");
    hold.release()?;
    env.reached(point)?;
    check!(
        env.read(&reader, &buffer)?.iter().all(|&x| x == 9),
        "the dropped stream's work did not run"
    );
    Ok(())
}

fn flush_nothing(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let before = stream.timeline().submitted();
    let took = env.best_of(3, || Ok((0..1000).try_for_each(|_| stream.flush())?))?;
    check_eq!(stream.timeline().submitted(), before, "values after flushes of nothing");
    check!(took < Duration::from_secs(1), "1,000 flushes of nothing took {took:?}");
    Ok(())
}

fn idle_sync(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 64)?;
    direct(&stream, &[fill(&buffer, 1, 1)])?;
    env.drain(&stream)?;
    let took = env.best_of(25, || env.drain(&stream))?;
    check!(
        took < Duration::from_millis(3),
        "an idle stream takes {took:?} to synchronise, at the best of 25 times"
    );
    Ok(())
}

fn query_pending(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 64)?;
    let hold = env.hold(&stream)?;
    let start = Instant::now();
    let value = direct(&stream, &[fill(&buffer, 1, 1)])?;
    for _ in 0..100 {
        check!(stream.refresh()? < value, "complete while it was held back");
        check_eq!(stream.timeline().check(value)?, false, "the query of held work");
    }
    check!(start.elapsed() < env.timeout() / 2, "100 queries took {:?}", start.elapsed());
    hold.release()?;
    env.wait(&stream, value)?;
    check!(stream.refresh()? >= value, "not complete after it was waited for");
    check_eq!(stream.timeline().check(value)?, true, "the query of completed work");
    Ok(())
}

fn submit_while_waiting(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 64)?;
    let outcome = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| (0..200).try_for_each(|_| env.drain(&stream)));
        for i in 0..200 {
            direct(&stream, &[fill(&buffer, i, 1)])?;
        }
        waiter
            .join()
            .map_err(|_| crate::case::Stop::Failed("the waiting thread panicked".into()))?
    });
    outcome?;
    check_eq!(env.read(&stream, &buffer)?, [199; 64], "the last of 200 fills");
    Ok(())
}

fn own_streams(env: &Env) -> Outcome {
    let streams: Vec<_> = (0..4).map(|_| env.stream()).collect::<Outcome<_>>()?;
    // The words by which drivers name their default streams; all 0 without native streams.
    let words: Vec<u64> = streams.iter().map(|s| s.native()).collect();
    check!(
        words.iter().all(|&w| w == 0) || words.iter().all(|&w| w > 2),
        "native streams {words:?}"
    );
    if env.device().caps().foreign_calls {
        let given = Arc::new(AtomicU64::new(u64::MAX));
        let seen = given.clone();
        let call = ForeignCall::new("looks", Vec::new(), move |word| {
            seen.store(word, Ordering::Release);
            Ok(())
        });
        let value = direct(&streams[0], &[Op::Foreign(&call)])?;
        env.wait(&streams[0], value)?;
        let word = given.load(Ordering::Acquire);
        check!(
            !matches!(word, 1 | 2),
            "a library call was given the driver's default stream {word}"
        );
        check!(
            word != 0 || words[0] == 0,
            "a library call was given no stream, and {} is there",
            words[0]
        );
    }
    // A default stream would implicitly order all work of the device.
    let hold = env.hold(&streams[0])?;
    let held = direct(&streams[0], &[])?;
    streams[0].flush()?;
    let free = &streams[1];
    for i in 0..10u32 {
        let buffer = env.buffer(free, 1 << (10 + i))?;
        direct(free, &[fill(&buffer, i, 1)])?;
        check!(
            env.read(free, &buffer)?.iter().all(|&b| u32::from(b) == i),
            "fill {i} beside a held stream"
        );
        let other = env.stream()?;
        env.write(&other, &buffer, &vec![1; 1 << (10 + i)])?;
        env.device().memory_info()?;
        if env.device().caps().timestamps {
            let timestamp = env.device().timestamp()?;
            let value = direct(free, &[Op::WriteTimestamp(&timestamp)])?;
            env.wait(free, value)?;
        }
        if env.device().caps().graphs {
            let mut list = OpList::new();
            list.push(&fill(&buffer, 9, 1));
            // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
            // outlives the launches.
            let graph = unsafe { env.device().instantiate(Plan::new(list)) }?;
            let value = direct(free, &[Op::Graph(&graph)])?;
            env.wait(free, value)?;
        }
        drop(env.kernel(TestKernel::Fill));
    }
    check_eq!(streams[0].timeline().check(held)?, false, "the held stream's work after all that");
    hold.release()?;
    env.wait(&streams[0], held)
}

fn no_starving(env: &Env) -> Outcome {
    let (held, free) = (env.stream()?, env.stream()?);
    let buffer = env.buffer(&free, 64)?;
    let hold = env.hold(&held)?;
    let value = direct(&held, &[])?;
    held.flush()?;
    for i in 0..20 {
        direct(&free, &[fill(&buffer, i, 1)])?;
        check_eq!(env.read(&free, &buffer)?, [i as u8; 64], "fill {i} beside a held stream");
    }
    hold.release()?;
    env.wait(&held, value)
}

fn dropped_guards(env: &Env) -> Outcome {
    let (stream, other) = (env.stream()?, env.stream()?);
    let buffer = env.buffer(&stream, 1 << 20)?;
    let address = buffer.addr();
    let hold = env.hold(&stream)?;
    let point = stream.timeline().at(direct(&stream, &[fill(&buffer, 1, 1)])?);
    // SAFETY: the timepoint is that of a submission to this stream that uses the buffer, made in
    // order.
    unsafe { buffer.mark_write(point) };
    drop(buffer);
    drop(stream);
    let taken: Vec<_> = (0..8).map(|_| env.buffer(&other, 1 << 20)).collect::<Outcome<_>>()?;
    check!(!point.is_settled(), "the work was over although it was held back");
    check!(
        taken.iter().all(|b| b.addr() != address || other.timeline().knows(point.into())),
        "memory in use by a dropped stream was lent to another without an order between them"
    );
    hold.release()?;
    env.reached(point)
}
