//! Values that safe code can make up, and the runtime's answers to them.

use crate::between::World;
use crate::common::*;
use leasehold::Growing;
use leasehold::backend::sync::Mutex;
use leasehold::backend::sync::atomic::{AtomicU32, Ordering};
use leasehold::pool::{Contents, Pool, PoolKind};
use leasehold::{
    Access, Allocator, Buffer, BufferHandle, BufferView, GraphUpdate, Lease, Protection, Runtime,
    View, ops,
};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// The leases that the test shows for ever stay in statics, where a leak detector finds them.
static SHOWN: [OnceLock<Lease<Buffer>>; 2] = [OnceLock::new(), OnceLock::new()];

#[test]
fn a_lease_that_shows_another_buffer_than_its_own_is_refused() {
    let (a, b) = (runtime(), runtime());
    let foreign = SHOWN[0].get_or_init(|| b.alloc(64).unwrap());
    let own = SHOWN[1].get_or_init(|| a.alloc(64).unwrap());
    // Bigger than the one whose turn it takes.
    for shown in [foreign, own] {
        let forged: Lease<Buffer> = Lease::map(a.alloc(16).unwrap(), |_| &**shown);
        assert_eq!(kind(a.to_vec::<u8>(&forged)), "InvalidArgument");
        assert_eq!(kind(a.stream().fill(forged.view(), 1u8)), "InvalidArgument");
        assert!(!a.allocator().owns(&forged) && !b.allocator().owns(&forged));
    }
    // The same buffer, mapped, is still that buffer.
    let same: Lease<Buffer> = Lease::map(a.alloc(16).unwrap(), |buffer| buffer);
    assert!(a.allocator().owns(&same));
    a.stream().fill(same.view(), 7u8).unwrap();
    assert_eq!(a.to_vec::<u8>(&same).unwrap(), [7; 16]);
}

/// Words of the program, which no page lets anybody write.
static WEIGHTS: [u32; 4] = [1, 2, 3, 4];

/// The weights where they lie, and the way to them that safe code has: by handle, out of thin air.
fn weights(runtime: &Runtime) -> (Lease<Buffer>, Lease<Buffer>) {
    let (address, bytes) =
        (WEIGHTS.as_ptr().expose_provenance() as u64, size_of_val(&WEIGHTS) as u64);
    // SAFETY: they are there for ever, and nobody writes them.
    let own = unsafe {
        runtime.allocator().import(address, bytes, 0, Protection::ReadOnly, Box::new(()))
    }
    .unwrap();
    let guessed = BufferHandle::from_bits(own.handle().to_bits().get()).unwrap();
    let found = runtime.allocator().lease(guessed).unwrap();
    assert!(
        found.is_imported() && found.is_read_only() && !runtime.alloc(16).unwrap().is_read_only()
    );
    (own, found)
}

#[test]
fn nobody_writes_what_was_imported_read_only() {
    let runtime = runtime();
    let (own, found) = weights(&runtime);
    let (stream, other) = (runtime.stream(), runtime.upload(&[9u32; 4]).unwrap());
    let pinned = runtime.alloc_pinned(16).unwrap();
    let params = 1.0f32.to_ne_bytes();
    let refused = |what: &str, result: leasehold::Result<()>| {
        assert_eq!(kind(result), "InvalidArgument", "{what}")
    };
    refused("fill", stream.fill(found.view(), 1u8));
    refused("fill a part", stream.fill(found.part(4..8).unwrap(), 1u32));
    refused("upload", stream.upload_blocking(found.view(), &[9u32; 4]));
    refused("upload, staged", stream.upload(found.view(), &[9u32; 4]));
    refused("upload, owned", stream.upload_owned(found.view(), vec![9u32; 4]));
    refused("copy", stream.copy(found.view(), other.view()));
    refused(
        "rows",
        stream.copy_2d(found.view(), other.view(), ops::Rows::new(4, 2).src_pitch(8).dst_pitch(8)),
    );
    refused("copy, pinned", stream.copy_pinned(found.view(), pinned.view()));
    refused("memcpy_h2d", runtime.stream().upload(found.view(), &[9u32; 4]));
    let operands = [other.read(), found.read_write()];
    refused("kernel", launch(stream, &axpy(), &operands, &params, 1).map(drop));
    refused("kernel, write", launch(stream, &iota(), &[found.write()], &params, 1).map(drop));
    // SAFETY: nobody else is here.
    refused("map", unsafe { runtime.stream().map_write(found.view()) }.map(drop));
    // SAFETY: it does nothing.
    refused("call", unsafe { stream.foreign_call("writes", &[found.write()], |_, _| Ok(())) });
    let record = |r: &Runtime| r.stream().fill(found.view(), 1u8);
    refused("recording", runtime.record_graph(record).map(drop));

    // Reads are allowed.
    launch(stream, &axpy(), &[found.read(), other.read_write()], &params, 1).unwrap();
    stream.copy(pinned.view(), found.view()).unwrap();
    assert_eq!(runtime.to_vec::<u32>(&pinned).unwrap(), WEIGHTS);
    assert_eq!(runtime.to_vec::<u32>(&own).unwrap(), WEIGHTS);
}

#[test]
fn no_update_puts_read_only_memory_where_a_graph_writes() {
    let runtime = runtime();
    let (_own, found) = weights(&runtime);
    let (x, y) = (runtime.upload(&[9u32; 4]).unwrap(), runtime.alloc(16).unwrap());
    let graph = runtime.record_graph(|r| r.stream().copy(y.view(), x.view())).unwrap();
    assert_eq!(kind(graph.update(&GraphUpdate::new().buffer(&y, &found))), "InvalidArgument");
    let _ = graph.update(&GraphUpdate::new().buffer(&x, &found)).unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), WEIGHTS);
}

/// Handles that buffers of these sizes had, and the next generations of their slots.
fn guesses(probes: Vec<Lease<Buffer>>) -> Vec<BufferHandle> {
    let bits: Vec<u64> = probes.iter().map(|p| p.handle().to_bits().get()).collect();
    drop(probes);
    let next = |b: u64| (1..6u64).filter_map(move |g| BufferHandle::from_bits(b + (g << 32)));
    bits.into_iter().flat_map(next).collect()
}

#[test]
fn a_guessed_handle_leads_to_no_memory_of_a_graph() {
    const N: usize = 8 << 20;
    let runtime = runtime();
    let sizes = [256u64, 4096, 1 << 16, 1 << 20, 2 << 20, N as u64];
    let probes = sizes.iter().flat_map(|&s| [s; 20]).map(|s| runtime.alloc(s).unwrap()).collect();
    let guesses = guesses(probes);
    let out = runtime.zeros::<u8>(N).unwrap();
    let graph = runtime
        .record_graph(|runtime| {
            let temporary = runtime.alloc_array::<u8>(N)?;
            runtime.stream().fill(temporary.view(), 1u8)?;
            runtime.stream().copy(out.view(), temporary.view())
        })
        .unwrap();
    for guess in guesses {
        if let Ok(found) = runtime.allocator().lease(guess) {
            let own = found.len() < N as u64 || found.addr() == out.buffer().addr();
            assert!(own, "{} bytes at {:#x}", found.len(), found.addr());
        }
    }
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec(out.slice(..4)).unwrap(), [1; 4]);
}

/// A part's own lease has a record of its own, which no shrink looks at.
#[test]
fn a_guessed_handle_leads_to_no_part_of_what_grows() {
    const MOST: u64 = 64 << 20;
    let runtime = runtime();
    let probes: Vec<_> = (0..64).map(|_| runtime.alloc(0).unwrap()).collect();
    let guesses = guesses(probes);
    let parts = Growing::<u8>::with_parts(&runtime, 4, MOST as usize).unwrap();
    parts.parts(0..4).grow(runtime.stream(), MOST as usize).unwrap();
    let found = guesses.iter().filter_map(|&guess| runtime.allocator().lease(guess).ok());
    let lengths: Vec<_> = found.map(|found| found.len()).collect();
    assert!(!lengths.contains(&MOST), "{lengths:?}");
}

/// The leases that these handles lead to.
fn found(memory: &Allocator, rows: Range<u32>, generations: Range<u32>) -> Vec<Lease<Buffer>> {
    let bits = rows.flat_map(|row| {
        let rows = generations.clone();
        rows.map(move |generation| u64::from(generation) << 32 | u64::from(row))
    });
    bits.filter_map(|bits| memory.lease(BufferHandle::from_bits(bits)?).ok()).collect()
}

/// With everything in use that takes memory of its own.
#[test]
fn all_handles_lead_to_what_was_given_out() {
    const ROWS: u32 = 1024;
    const N: usize = 1 << 20;
    let world = World::new(21);
    for (name, other) in [("cpu:0", "sim:0"), ("sim:0", "cpu:0"), ("cuda:0", "cpu:0")] {
        let (runtime, other) = (world.runtime(name), world.runtime(other));
        let stream = runtime.stream();
        let caps = runtime.raw_device().caps();
        // Rows that were asked for a handle are found by one in all later generations.
        let empty = |_| (runtime.alloc(0).unwrap(), runtime.alloc_pinned(0).unwrap());
        let asked: Vec<_> = (0..ROWS / 2).map(empty).collect();
        let first = asked.iter().map(|(a, b)| [a.handle(), b.handle()].map(|h| h.generation()));
        let from = first.reduce(|a, b| [a[0].min(b[0]), a[1].min(b[1])]).unwrap();
        drop(asked);

        let mut given: Vec<Lease<Buffer>> = Vec::new();
        let lease = |view: BufferView<'_>| view.buffer().clone();
        let [x, y, z] = [(); 3].map(|()| runtime.zeros::<u8>(N).unwrap().into_buffer());
        let far = other.alloc(N as u64).unwrap();
        let flag = runtime.upload(&[0u32]).unwrap().into_buffer();
        let array = runtime.alloc_pinned_array::<u32>(100).unwrap();
        given.extend([&x, &y, &z, &flag].map(Lease::clone));
        given.extend([
            runtime.alloc_pinned(4096).unwrap(),
            lease(array.view()),
            weights(&runtime).0,
        ]);

        let cache = Growing::<u32>::new(&runtime, N).unwrap();
        cache.grow(stream, 1000).unwrap();
        let fork = caps.forks.then(|| cache.fork(stream, 500).unwrap());
        for cache in std::iter::once(&cache).chain(&fork) {
            given.extend([cache.view(), cache.limit().view()].map(lease));
        }
        let pools = ["used", "asleep"]
            .map(|name| Pool::new(&runtime, name, PoolKind::Suspendable).unwrap());
        let grown = pools.each_ref().map(|pool| {
            given.push(pool.alloc(N as u64).unwrap());
            let parts = pool.growing::<u8>(4, N).unwrap();
            (Some(pool.growing::<u32>(1, N).unwrap()), parts)
        });
        let parts = Growing::<u8>::with_parts(&runtime, 4, N).unwrap();
        for (cache, parts) in grown.iter().chain([&(None, parts)]) {
            parts.parts(1..3).grow(stream, N / 2).unwrap();
            let whole = parts.reservation(Access::Read);
            given.extend([whole.view(), parts.limit().view()].map(lease));
            if let Some(cache) = cache {
                cache.grow(stream, 1000).unwrap();
                given.extend([cache.view(), cache.limit().view()].map(lease));
            }
        }
        for pool in &pools {
            pool.suspend(Contents::Keep).unwrap();
        }
        pools[0].resume().unwrap();
        #[cfg(target_os = "linux")]
        given.push(Pool::new(&runtime, "shared", PoolKind::Shareable).unwrap().alloc(64).unwrap());

        let graph = runtime.record_graph(|recorded| {
            let temporaries = [recorded.alloc(N as u64)?, recorded.alloc(N as u64)?];
            let stream = recorded.stream();
            stream.fill(temporaries[0].view(), 1u8)?;
            stream.copy(temporaries[1].view(), temporaries[0].view())?;
            stream.copy(y.view(), temporaries[1].view())?;
            stream.inspect("a look", y.view(), |_| Ok(()))?;
            stream.record_while(&flag, |body| {
                let temporary = body.alloc(N as u64)?;
                body.stream().copy(temporary.view(), x.view())?;
                body.stream().copy(z.view(), temporary.view())?;
                body.stream().fill(flag.view(), 0u32)
            })
        });
        let graph = graph.unwrap();
        graph.launch().unwrap();

        // Work that is pending keeps what is its own.
        let busy = runtime.create_stream().unwrap();
        let (gate, go) = hold(&busy);
        busy.upload(x.view(), &vec![1u8; N]).unwrap();
        busy.inspect("a look", x.view(), |_| Ok(())).unwrap();
        busy.copy(far.view(), y.view()).unwrap();
        #[cfg(feature = "future")]
        let download = busy.download_async::<u8>(x.part(..N / 2).unwrap());

        let pinned = runtime.raw_device().memory(leasehold::MemoryKind::Pinned).unwrap();
        let told: Vec<_> = given.iter().map(|given| given.handle()).collect();
        let (mut strange, mut seen) = (Vec::new(), 0);
        for (memory, from) in std::iter::zip([runtime.allocator(), pinned], from) {
            for found in found(memory, 0..ROWS, from..from + 64) {
                match given.iter().any(|given| given.same(&found)) {
                    true => seen += 1,
                    false => strange.push(found),
                }
            }
        }
        assert!(strange.is_empty(), "{name}: {strange:?}");
        assert_eq!(seen, told.len(), "{name}: the walk sees what was given out");
        gate.signal(go.value()).unwrap();
        busy.synchronize_timeout(LONG).unwrap();
        #[cfg(feature = "future")]
        drop(download);
    }
}

/// A copy of a suspension knows the memory by a buffer of its own, and keeps what it has in
/// another one.
#[test]
fn a_guessed_handle_leads_to_no_copy_of_a_suspension() {
    const ROUNDS: u32 = 100;
    let runtime = runtime();
    let pool = Pool::new(&runtime, "pool", PoolKind::Suspendable).unwrap();
    let own: Vec<_> = (0..8).map(|_| pool.alloc(1 << 20).unwrap()).collect();
    // The rows that this thread takes next. In each round the copies take them twice.
    let probes: Vec<_> = (0..8).map(|_| runtime.alloc(0).unwrap()).collect();
    let next: Vec<_> = probes.iter().map(|probe| probe.handle()).collect();
    drop(probes);
    let round = AtomicU32::new(0);
    let strange = std::thread::scope(|scope| {
        let walk = scope.spawn(|| {
            let mut strange = Vec::new();
            loop {
                let round = round.load(Ordering::Relaxed);
                for (row, from) in next.iter().map(|h| (h.index(), h.generation())) {
                    let (rows, from) = (row..row + 1, from + 2 * round.min(ROUNDS));
                    strange.extend(found(runtime.allocator(), rows, from..from + 3));
                }
                if round > ROUNDS {
                    return strange;
                }
            }
        });
        for _ in 0..ROUNDS {
            pool.suspend(Contents::Keep).unwrap();
            pool.resume().unwrap();
            round.fetch_add(1, Ordering::Relaxed);
        }
        round.store(u32::MAX, Ordering::Relaxed);
        walk.join().unwrap()
    });
    assert!(strange.is_empty(), "{strange:?}");
    drop(own);
}

#[test]
fn a_guessed_handle_leads_to_no_staging_memory() {
    const N: usize = 1 << 20;
    let sim = leasehold_sim::SimBackend::new(leasehold_sim::MachineConfig::seed(1)).unwrap();
    let context = leasehold::Context::with_backends(vec![std::sync::Arc::new(sim)]);
    let runtime = context.runtime("sim:0".parse().unwrap()).unwrap();
    let pinned = runtime.raw_device().memory(leasehold::MemoryKind::Pinned).unwrap();
    let guesses = guesses(vec![runtime.alloc_pinned(N as u64).unwrap()]);
    let host_timeline = runtime.create_host_timeline().unwrap();
    let dst = runtime.alloc_array::<u8>(N).unwrap();
    let go = host_timeline.next();
    runtime.stream().wait(go).unwrap();
    runtime.stream().upload(dst.view(), &vec![1u8; N]).unwrap();
    let kinds: Vec<_> = guesses.iter().map(|&g| kind(pinned.lease(g))).collect();
    assert!(kinds.contains(&"Occupied") && !kinds.contains(&"ok"), "{kinds:?}");
    host_timeline.signal(go.value()).unwrap();
    assert_eq!(runtime.to_vec(dst.slice(..4)).unwrap(), [1; 4]);
}

#[test]
fn a_guessed_handle_leads_to_no_memory_of_a_copy_between_devices() {
    const PIECE: u64 = 1 << 20;
    let world = World::new(9);
    let (a, b) = (world.runtime("sim:0"), world.runtime("cpu:0"));
    let (x, y) = (a.alloc(4 * PIECE).unwrap(), b.alloc(4 * PIECE).unwrap());
    let pinned = a.raw_device().memory(leasehold::MemoryKind::Pinned).unwrap();
    pinned.set_budget(4 * PIECE);
    let mut probes: Vec<_> = std::iter::from_fn(|| a.alloc_pinned(PIECE).ok()).collect();
    // Room for one of two staging buffers. The second finds none and asks for some: a thread that
    // guesses could come now.
    let guesses = guesses(vec![probes.pop().unwrap()]);
    let (pool, found) = (Mutex::new(Some(pinned.clone())), Arc::new(Mutex::new(Vec::new())));
    let (pool, kinds) = (Arc::new(pool), found.clone());
    let place = pool.clone();
    pinned.add_reclaimer(
        0,
        Box::new(move |_| {
            let pool = place.lock();
            let Some(pool) = &*pool else { return 0 };
            kinds.lock().extend(guesses.iter().map(|&g| kind(pool.lease(g))));
            0
        }),
    );
    assert_eq!(kind(a.stream().copy(y.view(), x.view())), "OutOfMemory");
    let kinds = found.lock();
    assert!(kinds.contains(&"Occupied") && !kinds.contains(&"ok"), "{kinds:?}");
    // The pool has the reclaimer, which must not have the pool.
    pool.lock().take();
}

/// A forged buffer would be the graph's to use, and somebody else's too.
#[test]
fn a_temporary_that_somebody_has_alone_stops_no_recording() {
    let runtime = runtime();
    let out = runtime.zeros::<u8>(64).unwrap();
    let mut kept = None;
    let recorded = runtime.record_graph(|runtime| {
        let temporary = runtime.alloc(64)?;
        runtime.stream().fill(temporary.view(), 1u8)?;
        runtime.stream().copy(out.view(), temporary.view())?;
        kept = Some(temporary.try_unique().expect("the only lease"));
        Ok(())
    });
    assert_eq!(kind(recorded), "Occupied");
    let kept = kept.unwrap().share();
    assert_eq!(kind(runtime.stream().fill(kept.view(), 2u8)), "Recording", "it has no memory");
}

/// The launch would come before what others do with the memory, or beside it.
#[test]
fn a_graph_does_not_run_while_somebody_has_a_temporary_alone() {
    let runtime = runtime();
    let mut kept = None;
    let record = |runtime: &Runtime| {
        let temporary = runtime.alloc(64)?;
        runtime.stream().fill(temporary.view(), 1u8)?;
        kept = Some(temporary);
        Ok(())
    };
    let graph = runtime.record_graph(record).unwrap();
    let unique = kept.unwrap().try_unique().expect("the only lease");
    assert_eq!(kind(graph.launch()), "Occupied");
    let shared = unique.share();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u8>(&shared).unwrap(), [1; 64]);
    drop(shared);
    graph.launch().unwrap();
    runtime.synchronize().unwrap();
}
