//! Memory: sizes, alignment, reuse, budgets, imports.

use crate::case::{Case, Need, Outcome, check, check_eq, expect_error};
use crate::cases::streams::{copy, fill};
use crate::env::{Env, direct, leasehold_on};
use leasehold::backend::sync::atomic::{AtomicU32, Ordering};
use leasehold::backend::{MemoryKind, Op, Stream};
use leasehold::pool::{Pool, PoolKind};
use leasehold::share::{self, Export};
use leasehold::{Allocator, Buffer, Error, Layout, Lease, Protection, View};
use std::sync::Arc;
use std::time::Duration;

pub(crate) const CASES: &[Case] = &[
    Case::hal(47, "zero bytes are a valid empty buffer", &[], zero_bytes),
    Case::hal(48, "every size from 1 to 4097 is aligned", &[], alignment),
    Case::hal(49, "a request beyond the device is out of memory and harmless", &[], absurd_size),
    Case::hal(50, "memory runs out and comes back", &[], exhaust),
    Case::hal(
        51,
        "memory freed in use is not reused before the use is over",
        &[Need::Hold, Need::ConcurrentStreams],
        freed_in_use,
    ),
    Case::hal(52, "memory freed on a stream is ordered when reused there", &[], same_stream_reuse)
        .replayed(),
    Case::hal(
        53,
        "memory freed on a stream and reused on another is ordered",
        &[Need::Hold, Need::ConcurrentStreams],
        cross_stream_reuse,
    ),
    Case::hal(54, "trimming gives memory back", &[Need::Pooling], trim),
    Case::hal(55, "no block takes more than twice what was asked for", &[], rounding),
    Case::hal(56, "a storm of allocations never overlaps", &[], storm),
    Case::hal(57, "statistics are exact", &[], statistics),
    Case::hal(58, "beyond the budget is an error of its own", &[], budget),
    Case::hal(59, "fresh memory can be read, whatever is in it", &[], fresh_memory),
    Case::runtime(63, "the host maps what it may touch, and nothing else", &[Need::Hold], maps),
    Case::hal(64, "pinned memory carries copies both ways", &[], pinned).sanitizer(),
    Case::hal(
        65,
        "memory of one's own is imported, released and imported again",
        &[],
        import_again,
    ),
    Case::hal(
        66,
        "an import is released exactly once and after its last use",
        &[Need::Hold],
        import_released_once,
    )
    .sanitizer(),
    Case::hal(72, "after work of every kind nothing lives", &[], nothing_lives).sanitizer(),
    Case::hal(116, "sixteen threads allocate from one pool", &[], threads_allocate),
    Case::hal(129, "a freed block serves only what it satisfies", &[], fitting_reuse),
    Case::hal(133, "a stale handle stays stale", &[], stale_handles),
    Case::hal(151, "what lies in the last free corners of a full memory stays there", &[], full)
        .sanitizer(),
    Case::runtime(
        210,
        "shareable memory is one memory at each of its addresses, or is refused",
        &[],
        shareable,
    ),
    Case::hal(148, "out of memory is out of memory on every kind", &[], oom_kind),
];

fn memory(env: &Env) -> Outcome<&Allocator> {
    Ok(env.device().memory(MemoryKind::Device)?)
}

fn alloc(
    env: &Env,
    stream: &Lease<dyn Stream>,
    layout: Layout,
) -> leasehold::Result<Lease<Buffer>> {
    env.device().memory(MemoryKind::Device)?.alloc(layout, leasehold_on(stream))
}

fn overlap(a: &Lease<Buffer>, b: &Lease<Buffer>) -> bool {
    a.addr() < b.addr() + b.len() && b.addr() < a.addr() + a.len()
}

fn zero_bytes(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let (a, b) = (env.buffer(&stream, 0)?, env.buffer(&stream, 0)?);
    check_eq!((a.addr(), a.len(), b.addr()), (0, 0, 0), "address and length of empty buffers");
    check!(a.handle() != b.handle(), "two empty buffers are one");
    let value = direct(&stream, &[fill(&a, 1, 1), copy(&a, &b)])?;
    env.wait(&stream, value)
}

fn alignment(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let least = env.device().limits().alignment.max(256);
    let mut held = Vec::new();
    for size in 1..=4097 {
        let buffer = env.buffer(&stream, size)?;
        check!(
            buffer.addr().is_multiple_of(least),
            "{size} bytes lie at {:#x}, not aligned to {least}",
            buffer.addr()
        );
        check_eq!(buffer.len(), size, "the length of a buffer");
        if size % 7 == 0 {
            held.push(buffer);
        }
    }
    for align in [512, 4096, 1 << 16, 1 << 20] {
        let buffer = match alloc(env, &stream, Layout::aligned(1000, align)) {
            // Directly from the driver, which accepts no alignment.
            Err(Error::Unsupported(_)) if !env.pools_memory()? => continue,
            other => other?,
        };
        check!(
            buffer.addr().is_multiple_of(align),
            "{:#x} is not aligned to {align}",
            buffer.addr()
        );
        held.push(buffer);
    }
    expect_error(
        alloc(env, &stream, Layout::aligned(8, 3)),
        "InvalidArgument",
        "an alignment of 3",
    )?;
    Ok(())
}

fn absurd_size(env: &Env) -> Outcome {
    let stream = env.stream()?;
    for size in [1 << 46, 1 << 62, u64::MAX] {
        let result = alloc(env, &stream, Layout::new(size));
        expect_error(result, "OutOfMemory", "an absurd size")?;
        let buffer = env.buffer(&stream, 4096)?;
        direct(&stream, &[fill(&buffer, 1, 1)])?;
        env.drain(&stream)?;
    }
    Ok(())
}

/// Limits the memory to the bytes reserved now plus `room` bytes.
fn cap(memory: &Allocator, room: u64) -> u64 {
    let limit = memory.stats().reserved + room;
    memory.set_budget(limit);
    limit
}

fn exhaust(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let memory = memory(env)?;
    let limit = cap(memory, 64 << 20);
    for round in 0..3 {
        let mut held = Vec::new();
        let e = loop {
            match alloc(env, &stream, Layout::new(4 << 20)) {
                Ok(buffer) => held.push(buffer),
                Err(e) => break e,
            }
            check!(held.len() < 4096, "round {round}: the budget of {limit} bytes never ends");
        };
        check_eq!(e.kind(), "OutOfMemory", "round {round}: the error at the end");
        check!(held.len() >= 8, "round {round}: only {} blocks of 4 MiB", held.len());
        check!(
            memory.stats().reserved <= limit,
            "round {round}: {} bytes beyond {limit}",
            memory.stats().reserved
        );
        for (i, a) in held.iter().enumerate() {
            check!(
                held[..i].iter().all(|b| !overlap(a, b)),
                "round {round}: two live blocks overlap"
            );
        }
        drop(held);
        let buffer = alloc(env, &stream, Layout::new(4 << 20))?;
        direct(&stream, &[fill(&buffer, 1, 1)])?;
        env.drain(&stream)?;
    }
    Ok(())
}

fn freed_in_use(env: &Env) -> Outcome {
    let (user, other) = (env.stream()?, env.stream()?);
    let size = 1 << 20;
    let held_back = env.buffer(&user, size)?;
    let address = held_back.addr();
    let hold = env.hold(&user)?;
    let point = user.timeline().at(direct(&user, &[fill(&held_back, 1, 1)])?);
    // SAFETY: the timepoint is that of a submission to this stream that uses the buffer, made in
    // order.
    unsafe { held_back.mark_write(point) };
    drop(held_back);
    // Another stream fills all the memory that it gets. A block that the first stream still writes
    // would lose its contents.
    let mut taken = Vec::new();
    for i in 0..16u32 {
        let buffer = env.buffer(&other, size)?;
        let reused = buffer.addr() < address + size && address < buffer.addr() + size;
        check!(
            !reused || other.timeline().knows(point.into()),
            "a block in use was lent without an order"
        );
        if !reused {
            let value = direct(&other, &[fill(&buffer, i + 2, 1)])?;
            env.wait(&other, value)?;
            taken.push((buffer, i + 2));
        }
    }
    hold.release()?;
    env.reached(point)?;
    for (buffer, pattern) in &taken {
        check!(
            env.read(&other, buffer)?.iter().all(|&b| u32::from(b) == *pattern),
            "a freed block's last use wrote into block {pattern}"
        );
    }
    Ok(())
}

fn same_stream_reuse(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let out = env.buffer(&stream, 1 << 16)?;
    for round in 0..env.rounds(500).max(20) as u32 {
        let a = env.buffer(&stream, 1 << 16)?;
        let value = env.submit(&stream, &[fill(&a, round % 251, 1), copy(&a, &out)])?;
        // SAFETY: the timepoint is that of a submission to this stream that uses the buffer, made
        // in order.
        unsafe { a.mark_write(stream.timeline().at(value)) };
        drop(a);
        let b = env.buffer(&stream, 1 << 16)?;
        let value = env.submit(&stream, &[fill(&b, 255, 1)])?;
        // SAFETY: the timepoint is that of a submission to this stream that uses the buffer, made
        // in order.
        unsafe { b.mark_write(stream.timeline().at(value)) };
        drop(b);
        if round % 16 == 0 {
            check!(
                env.read(&stream, &out)?.iter().all(|&x| u32::from(x) == round % 251),
                "round {round}: the reused block's fill overtook the copy"
            );
        }
    }
    env.drain(&stream)
}

fn cross_stream_reuse(env: &Env) -> Outcome {
    let (a, b) = (env.stream()?, env.stream()?);
    let size = 1 << 20;
    // With a budget for little more than one block, the second stream must reuse the first one's.
    let x = env.buffer(&a, size)?;
    let out = env.buffer(&a, size)?;
    let hold = env.hold(&a)?;
    let point = a.timeline().at(direct(&a, &[fill(&x, 7, 1), copy(&x, &out)])?);
    // SAFETY: the timepoint is that of a submission to this stream that uses the buffer, made in
    // order.
    unsafe { x.mark_write(point) };
    let address = x.addr();
    drop(x);
    a.flush()?;
    let y = env.buffer(&b, size)?;
    let reused = y.addr() == address;
    check!(
        !reused || b.timeline().knows(point.into()),
        "a block in use was lent to another stream without an order"
    );
    let value = direct(&b, &[fill(&y, 9, 1)])?;
    b.flush()?;
    hold.release()?;
    env.wait(&b, value)?;
    env.reached(point)?;
    check!(
        env.read(&a, &out)?.iter().all(|&x| x == 7),
        "the second stream's fill overtook the first one's copy"
    );
    check!(
        env.read(&b, &y)?.iter().all(|&x| x == 9),
        "the first stream's fill came after the second one's"
    );
    Ok(())
}

fn trim(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let memory = memory(env)?;
    let buffers: Vec<_> = (0..16).map(|_| env.buffer(&stream, 8 << 20)).collect::<Outcome<_>>()?;
    let with = memory.stats().reserved;
    drop(buffers);
    env.drain(&stream)?;
    let freed = memory.trim(0)?;
    let after = memory.stats().reserved;
    check!(after + (100 << 20) <= with, "of {with} bytes, trimming left {after}");
    check!(freed >= with - after, "trimming says {freed} and gave {}", with - after);
    drop(env.buffer(&stream, 8 << 20)?);
    Ok(())
}

/// A small generator; the storm must be equal in every run.
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn storm(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let memory = memory(env)?;
    let before = memory.stats();
    let mut state = 0x9E37_79B9_7F4A_7C15;
    let mut live: Vec<Lease<Buffer>> = Vec::new();
    let mut ranges = std::collections::BTreeMap::new();
    for i in 0..env.rounds(100_000) {
        if live.len() > 200 || (!live.is_empty() && random(&mut state).is_multiple_of(3)) {
            let at = random(&mut state) as usize % live.len();
            let gone = live.swap_remove(at);
            ranges.remove(&gone.addr());
        } else {
            let size = 1 + random(&mut state) % (1 << (4 + random(&mut state) % 15));
            let buffer = env.buffer(&stream, size)?;
            let (start, end) = (buffer.addr(), buffer.addr() + size);
            let below = ranges.range(..end).next_back().map(|(_, &e)| e);
            check!(
                below.is_none_or(|e| e <= start),
                "allocation {i} of {size} bytes overlaps a live block"
            );
            ranges.insert(start, end);
            live.push(buffer);
        }
    }
    let stats = memory.stats();
    check_eq!(stats.live - before.live, live.len() as u64, "live blocks");
    check_eq!(
        stats.live_bytes - before.live_bytes,
        live.iter().map(|b| b.len()).sum::<u64>(),
        "live bytes"
    );
    drop(live);
    check_eq!(memory.stats().live, before.live, "live blocks at the end");
    Ok(())
}

fn full(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let memory = memory(env)?;
    memory.trim(0)?;
    cap(memory, 16 << 20);
    let mut state = 0x9E37_79B9_7F4A_7C15;
    let mut live: Vec<(Lease<Buffer>, u8)> = Vec::new();
    let holds = |(buffer, byte): &(Lease<Buffer>, u8)| -> Outcome {
        let wrong = env.read(&stream, buffer)?.iter().position(|b| b != byte);
        check!(
            wrong.is_none(),
            "byte {wrong:?} of {} at {:#x} was overwritten",
            buffer.len(),
            buffer.addr()
        );
        Ok(())
    };
    let mut refused = 0;
    for i in 0..200u32 {
        let size = 256 * (1 + random(&mut state) % (12 << 10));
        match alloc(env, &stream, Layout::new(size)) {
            Ok(buffer) => {
                let byte = (i % 251) as u8;
                direct(&stream, &[fill(&buffer, byte.into(), 1)])?;
                live.push((buffer, byte));
            }
            Err(Error::OutOfMemory(_)) if !live.is_empty() => {
                refused += 1;
                let gone = live.swap_remove(random(&mut state) as usize % live.len());
                holds(&gone)?;
            }
            Err(e) => return Err(e.into()),
        }
    }
    live.iter().try_for_each(holds)?;
    check!(refused > 20, "the memory was full {refused} times only");
    drop(live);
    env.drain(&stream)?;
    memory.trim(0)?;
    Ok(())
}

fn shareable(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    if !env.device().caps().shareable {
        let refused = Pool::new(&runtime, "shared", PoolKind::Shareable).map(drop);
        expect_error(refused, "Unsupported", "a pool that the capabilities rule out")?;
        return Ok(());
    }
    let pool = Pool::new(&runtime, "shared", PoolKind::Shareable)?;
    let words: Vec<u32> = (0..10_000).collect();
    let block = pool.alloc(4 * words.len() as u64)?;
    runtime.stream().upload(block.view(), &words)?;
    // SAFETY: this case alone gets the descriptor, and orders what it does by the host.
    let export = unsafe { pool.export(block.view()) }?;
    // SAFETY: the case waits for the work at one address before it begins work at another.
    let take = |export: &Export| unsafe {
        share::import(&runtime, export.descriptor()?, export.block(), Protection::ReadWrite)
    };
    let received = take(&export)?;
    check!(received.addr() != block.addr(), "an import at the address of its owner");
    check_eq!(runtime.to_vec::<u32>(&received)?, words, "the bytes of an import");
    runtime.stream().fill(received.view(), 7u32)?;
    runtime.synchronize()?;
    check_eq!(runtime.to_vec::<u32>(&block)?, [7; 10_000], "what was written by an import");
    // Another mapping of the segment, and the memory after its owner.
    let segment = pool.segments().remove(0);
    let alias = segment.alias()?;
    check_eq!(alias.bytes(), segment.bytes(), "bytes of an alias");
    check!(alias.addr() != segment.addr(), "an alias at the address of its segment");
    drop((block, export, alias, segment));
    pool.trim(0)?;
    check_eq!(pool.stats().reserved, 0, "memory of a pool without buffers");
    drop(pool);
    check_eq!(runtime.to_vec::<u32>(&received)?, [7; 10_000], "an import without its owner");
    // A descriptor of no memory.
    let sharing = env.device().sharing()?;
    let (pipe, _end) = std::io::pipe().map_err(Error::from)?;
    let wrong = sharing.import(pipe.into(), sharing.granule()).map(drop);
    expect_error(wrong, "InvalidArgument", "a descriptor of a pipe")?;
    Ok(())
}

fn rounding(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let memory = memory(env)?;
    let caps = memory.caps();
    // The unit of memory from the driver, which is also the initial size of the smallest blocks'
    // tables.
    let piece = 2 * caps.granule.max(caps.segment).max(2 << 20);
    for size in [1u64, 100, 256, 257, 1000, 2049, 5000, 40_000, 65_537, 300_000, (1 << 20) + 1] {
        let count = ((24 << 20) / size.max(256)).min(20_000);
        memory.trim(0)?;
        let before = memory.stats().reserved;
        let held: Vec<_> = (0..count).map(|_| env.buffer(&stream, size)).collect::<Outcome<_>>()?;
        let taken = memory.stats().reserved.saturating_sub(before);
        let most = count * (2 * size).max(256) + piece;
        check!(
            taken <= most,
            "{count} blocks of {size} bytes took {taken} bytes, more than {most}"
        );
        drop(held);
        env.drain(&stream)?;
    }
    Ok(())
}

fn statistics(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let memory = memory(env)?;
    let before = memory.stats();
    let buffers: Vec<_> =
        [100, 70_000, 3 << 20].iter().map(|&n| env.buffer(&stream, n)).collect::<Outcome<_>>()?;
    let with = memory.stats();
    check_eq!(with.live - before.live, 3, "live blocks");
    check_eq!(with.live_bytes - before.live_bytes, 100 + 70_000 + (3 << 20), "live bytes");
    check!(
        with.reserved >= with.live_bytes,
        "{} reserved for {} live",
        with.reserved,
        with.live_bytes
    );
    check!(
        with.live_peak + (1 << 22) >= with.live_bytes && with.reserved_peak >= with.reserved,
        "peaks below the present"
    );
    drop(buffers);
    let after = memory.stats();
    check_eq!(
        (after.live, after.live_bytes),
        (before.live, before.live_bytes),
        "what lives after the drop"
    );
    Ok(())
}

fn budget(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let memory = memory(env)?;
    memory.set_budget(8 << 20);
    for size in [(8 << 20) + 1, 1 << 30] {
        expect_error(
            alloc(env, &stream, Layout::new(size)),
            "OverBudget",
            "a request larger than the budget",
        )?;
    }
    memory.set_budget(u64::MAX);
    drop(env.buffer(&stream, (8 << 20) + 1)?);
    Ok(())
}

fn fresh_memory(env: &Env) -> Outcome {
    let stream = env.stream()?;
    memory(env)?.trim(0)?;
    for size in [1u64, 63, 4096, 1 << 20, 5 << 20] {
        let buffer = env.buffer(&stream, size)?;
        check_eq!(env.read(&stream, &buffer)?.len() as u64, size, "bytes of fresh memory");
        let whole = env.buffer(&stream, size)?;
        let value = env.submit(&stream, &[copy(&buffer, &whole)])?;
        env.wait(&stream, value)?;
        direct(&stream, &[fill(&buffer, 3, 1)])?;
        check!(
            env.read(&stream, &buffer)?.iter().all(|&b| b == 3),
            "a fill of {size} bytes after they were read"
        );
    }
    Ok(())
}

fn maps(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let visible = env.device().caps().host_visible;
    let buffer = runtime.upload(&[1u8; 4096])?;
    let pinned = runtime.alloc_pinned(4096)?;
    // SAFETY: no submission accesses the bytes while they are borrowed.
    let mapped = unsafe { runtime.stream().map_read(buffer.view()) }.map(<[u8]>::to_vec);
    if visible {
        check_eq!(mapped?, [1; 4096], "device memory as the host sees it");
        // SAFETY: no submission accesses the bytes while they are borrowed.
        unsafe { runtime.stream().map_write(buffer.view()) }?.fill(2);
        check_eq!(
            env.read(runtime.stream().raw(), &buffer)?,
            [2; 4096],
            "device memory that the host wrote"
        );
    } else {
        expect_error(mapped, "Unsupported", "mapping memory that the host cannot touch")?;
        // SAFETY: no submission accesses the bytes while they are borrowed.
        let written = unsafe { runtime.stream().map_write(buffer.view()) }.map(drop);
        expect_error(
            written,
            "Unsupported",
            "mapping memory that the host cannot touch, to write",
        )?;
    }
    // Host memory always maps, and a map waits for pending uses.
    // SAFETY: no submission accesses the bytes while they are borrowed.
    unsafe { runtime.stream().map_write(pinned.view()) }?.fill(5);
    runtime.stream().copy_pinned(buffer.view(), pinned.view())?;
    check_eq!(
        env.read(runtime.stream().raw(), &buffer)?,
        [5; 4096],
        "what came from mapped host memory"
    );
    let hold = env.hold_runtime(runtime.stream())?;
    runtime.stream().fill(buffer.view(), 6u8)?;
    runtime.stream().copy_pinned(pinned.view(), buffer.view())?;
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            // SAFETY: no submission accesses the bytes while they are borrowed.
            unsafe { runtime.stream().map_read(pinned.view()) }.map(<[u8]>::to_vec)
        });
        env.linger(Duration::from_millis(20));
        let early = reader.is_finished();
        hold.release()?;
        let bytes = reader
            .join()
            .map_err(|_| crate::case::Stop::Failed("the reader panicked".into()))??;
        check!(!early, "host memory was mapped while a copy to it was held back");
        check_eq!(bytes, [6; 4096], "host memory after the copy to it");
        Ok::<_, crate::case::Stop>(())
    })?;
    // Recorded work has not run, so no result exists.
    if env.device().caps().graphs {
        let recording = runtime.start_graph_recording()?;
        // SAFETY: no submission accesses the bytes while they are borrowed.
        let refused = unsafe { recording.stream().map_read(pinned.view()) }.map(drop);
        recording.abandon_graph_recording();
        expect_error(refused, "Recording", "mapping while recording")?;
    }
    Ok(())
}

/// The live objects of the pools and the allocators.
fn living(env: &Env) -> Outcome<Vec<(&'static str, u64)>> {
    let mut all = Vec::new();
    env.backend().pools(&mut |name, s| all.push((name, s.live)));
    env.device().pools(&mut |name, s| all.push((name, s.live)));
    for (name, kind) in
        [("device memory", MemoryKind::Device), ("pinned memory", MemoryKind::Pinned)]
    {
        let stats = env.device().memory(kind)?.stats();
        all.push((name, stats.live + stats.imported + stats.in_graphs));
    }
    Ok(all)
}

fn nothing_lives(env: &Env) -> Outcome {
    let caps = env.device().caps();
    let before = living(env)?;
    for _ in 0..3 {
        let runtime = env.runtime()?;
        let (other, buffer) = (runtime.create_stream()?, runtime.upload(&[1u8; 100_000])?);
        let (pinned, event) = (runtime.alloc_pinned(4096)?, runtime.create_event()?);
        other.fill(buffer.view(), 2u8)?;
        other.record(&event)?;
        runtime.stream().wait_event(&event)?;
        runtime.stream().copy_pinned(pinned.view(), buffer.view().part(..4096)?)?;
        if caps.graphs {
            let graph = runtime.record_graph(|rt| {
                let temporary = rt.alloc(4096)?;
                rt.stream().copy(temporary.view(), buffer.view().part(..4096)?)?;
                rt.stream().copy(buffer.view().part(4096..8192)?, temporary.view())
            })?;
            graph.launch()?;
        }
        if caps.host_timelines {
            let host_timeline = runtime.create_host_timeline()?;
            let next = host_timeline.next();
            other.wait(next)?;
            host_timeline.signal(next.value())?;
            other.synchronize_timeout(env.timeout())?;
        }
        if caps.host_calls {
            other.host_call("counted", || Ok(()))?;
            other.synchronize_timeout(env.timeout())?;
        }
        drop((buffer, pinned, event, other));
        runtime.close(env.timeout())?;
    }
    let mut last = Vec::new();
    let over = env.until("everything is gone", || {
        last = living(env).unwrap_or_default();
        last == before
    });
    check!(over.is_ok(), "lives after everything was dropped: {last:?}; before: {before:?}");
    Ok(())
}

fn stale_handles(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let memory = memory(env)?;
    let first = env.buffer(&stream, 1000)?;
    let handle = first.handle();
    check!(
        memory.is_alive(handle) && memory.lease(handle)?.same(&first),
        "the handle of a live buffer"
    );
    drop(first);
    // More rounds than 8 and 16 bits of generations can count.
    for i in 0..70_000u32 {
        let buffer = env.buffer(&stream, 1000)?;
        check!(buffer.handle() != handle, "buffer {i} has the handle of a dropped one");
        if i % 4096 < 4 || i == 255 || i == 65_535 {
            check!(!memory.is_alive(handle), "after {i} buffers a stale handle is alive");
            expect_error(
                memory.lease(handle).map(drop),
                "StaleHandle",
                "a lease by a stale handle",
            )?;
        }
    }
    let stream = env.stream()?;
    let handle = stream.handle();
    drop(stream);
    for i in 0..300 {
        check!(env.stream()?.handle() != handle, "stream {i} has the handle of a dropped one");
    }
    if env.device().caps().timestamps {
        let timestamp = env.device().timestamp()?;
        let weak = timestamp.downgrade();
        drop(timestamp);
        for i in 0..300 {
            let held = env.device().timestamp()?;
            check!(weak.upgrade().is_none(), "after {i} timestamps a weak lease finds another one");
            drop(held);
        }
    }
    Ok(())
}

fn pinned(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let pool = env.device().memory(MemoryKind::Pinned)?;
    let n = 100_000u64;
    let host = pool.alloc(Layout::new(n), leasehold_on(&stream))?;
    check!(host.host_kind() != leasehold::HostKind::None, "pinned memory is not host memory");
    check_eq!(
        host.host_kind() == leasehold::HostKind::Pinned,
        env.device().caps().pinned,
        "pinning and its capability"
    );
    let device = env.buffer(&stream, n)?;
    // SAFETY: host memory of `n` bytes that only this thread accesses while no submission uses it.
    let bytes = unsafe { std::slice::from_raw_parts_mut(host.addr() as *mut u8, n as usize) };
    bytes.iter_mut().enumerate().for_each(|(i, b)| *b = i as u8);
    let up = leasehold::backend::Upload {
        src: host.addr() as *const u8,
        dst: device.addr(),
        native: device.native(),
        bytes: n,
        keep: None,
    };
    let value = direct(&stream, &[Op::Upload(up)])?;
    env.wait(&stream, value)?;
    bytes.fill(0);
    let down = leasehold::backend::Download {
        src: device.addr(),
        native: device.native(),
        dst: host.addr() as *mut u8,
        bytes: n,
        keep: None,
    };
    let value = direct(&stream, &[Op::Download(down)])?;
    env.wait(&stream, value)?;
    check!(bytes.iter().enumerate().all(|(i, &b)| b == i as u8), "bytes through pinned memory");
    Ok(())
}

/// Counts its drops.
struct Bomb(Arc<AtomicU32>);

impl Drop for Bomb {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn import(env: &Env, memory: &[u64], ended: &Arc<AtomicU32>) -> Outcome<Lease<Buffer>> {
    let pool = env.device().memory(MemoryKind::Pinned)?;
    // SAFETY: the memory is host memory that the case keeps to its end.
    Ok(unsafe {
        pool.import(
            memory.as_ptr() as u64,
            size_of_val(memory) as u64,
            0,
            Protection::ReadWrite,
            Box::new(Bomb(ended.clone())),
        )
    }?)
}

fn import_again(env: &Env) -> Outcome {
    let memory = vec![7u64; 1024];
    let ended = Arc::new(AtomicU32::new(0));
    for round in 1..=50 {
        let buffer = import(env, &memory, &ended)?;
        check!(buffer.is_imported(), "an import does not know that it is one");
        check_eq!(
            (buffer.addr(), buffer.len()),
            (memory.as_ptr() as u64, 8192),
            "the imported range"
        );
        drop(buffer);
        check_eq!(ended.load(Ordering::Relaxed), round, "releases after {round} imports");
    }
    Ok(())
}

fn import_released_once(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let memory = vec![7u64; 1024];
    let ended = Arc::new(AtomicU32::new(0));
    let buffer = import(env, &memory, &ended)?;
    let out = env.buffer(&stream, 8192)?;
    let hold = env.hold(&stream)?;
    let up = leasehold::backend::Upload {
        src: buffer.addr() as *const u8,
        dst: out.addr(),
        native: out.native(),
        bytes: 8192,
        keep: None,
    };
    let point = stream.timeline().at(direct(&stream, &[Op::Upload(up)])?);
    // SAFETY: the timepoint is that of a submission to this stream that uses the buffer, made in
    // order.
    unsafe { buffer.mark_read(point) };
    drop(buffer);
    check_eq!(ended.load(Ordering::Relaxed), 0, "releases before the last use");
    hold.release()?;
    env.reached(point)?;
    let pool = env.device().memory(MemoryKind::Pinned)?;
    env.until("the import is released", || {
        let _ = pool.trim(u64::MAX);
        ended.load(Ordering::Relaxed) != 0
    })?;
    env.linger(Duration::from_millis(1));
    check_eq!(ended.load(Ordering::Relaxed), 1, "releases after the last use");
    check!(
        env.read(&stream, &out)?.chunks(8).all(|c| c == 7u64.to_ne_bytes()),
        "the imported bytes"
    );
    Ok(())
}

fn threads_allocate(env: &Env) -> Outcome {
    let memory = memory(env)?;
    let before = memory.stats().live;
    let rounds = env.rounds(20_000);
    std::thread::scope(|scope| {
        let work = |seed: u64| -> Outcome {
            let stream = env.stream()?;
            let (mut state, mut held) = (seed * 77 + 1, Vec::new());
            for _ in 0..rounds {
                held.push(env.buffer(&stream, 1 + random(&mut state) % 100_000)?);
                if held.len() > 20 {
                    drop(held.swap_remove(random(&mut state) as usize % 20));
                }
            }
            Ok(())
        };
        let threads: Vec<_> = (0..16).map(|i| scope.spawn(move || work(i))).collect();
        threads.into_iter().try_for_each(|t| {
            t.join().map_err(|_| crate::case::Stop::Failed("a thread panicked".into()))?
        })
    })?;
    check_eq!(memory.stats().live, before, "live blocks after all threads");
    Ok(())
}

fn fitting_reuse(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let sizes = [1, 100, 256, 257, 4096, 5000, 65_536, 65_537, 1 << 20, (1 << 20) + 1];
    for &small in &sizes {
        for &large in &sizes {
            let address = env.buffer(&stream, small)?.addr();
            let again = env.buffer(&stream, large)?;
            let guard = env.buffer(&stream, small)?;
            check!(
                !overlap(&again, &guard),
                "{large} bytes at {:#x} (freed {small} at {address:#x}) reach into another block",
                again.addr()
            );
        }
        for align in [256, 4096, 1 << 16] {
            drop(env.buffer(&stream, small)?);
            let aligned = alloc(env, &stream, Layout::aligned(small, align))?;
            check!(
                aligned.addr().is_multiple_of(align),
                "a freed block of {small} bytes served an alignment of {align}"
            );
        }
    }
    Ok(())
}

fn oom_kind(env: &Env) -> Outcome {
    let stream = env.stream()?;
    for kind in [MemoryKind::Device, MemoryKind::Pinned] {
        let pool = env.device().memory(kind)?;
        let e = expect_error(
            pool.alloc(Layout::new(1 << 50), leasehold_on(&stream)),
            "OutOfMemory",
            "2^50 bytes",
        )?;
        let asked = matches!(&e, Error::OutOfMemory(report) if report.requested == 1 << 50);
        check!(
            asked && e.to_string().contains("1.00 PiB"),
            "the error does not say how much was asked for: {e}"
        );
        drop(pool.alloc(Layout::new(4096), leasehold_on(&stream))?);
    }
    Ok(())
}
