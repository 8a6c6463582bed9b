//! What safe code can make up, and what the runtime says to it.

use crate::common::*;
use leasehold::graph::Update;
use leasehold::{Buffer, BufferHandle, Lease, Protection, Runtime, View, ops};
use std::sync::Arc;
use std::sync::OnceLock;

/// What the test shows for ever stays in a static, where a leak detector finds it.
static SHOWN: [OnceLock<Lease<Buffer>>; 2] = [OnceLock::new(), OnceLock::new()];

#[test]
fn a_lease_that_shows_another_buffer_than_its_own_is_refused() {
    let (a, b) = (runtime(), runtime());
    let foreign = SHOWN[0].get_or_init(|| b.alloc(64).unwrap());
    let own = SHOWN[1].get_or_init(|| a.alloc(64).unwrap());
    // Bigger than the one whose turn it takes.
    for shown in [foreign, own] {
        let forged: Lease<Buffer> = Lease::map(a.alloc(16).unwrap(), |_| &**shown);
        assert_eq!(kind(a.download::<u8>(&forged)), "InvalidArgument");
        assert_eq!(kind(ops::fill(a.stream(), forged.view(), ops::Pattern::U8(1))), "InvalidArgument");
        assert!(!a.allocator().owns(&forged) && !b.allocator().owns(&forged));
    }
    // The same buffer, mapped, is still that buffer.
    let same: Lease<Buffer> = Lease::map(a.alloc(16).unwrap(), |buffer| buffer);
    assert!(a.allocator().owns(&same));
    ops::fill(a.stream(), same.view(), ops::Pattern::U8(7)).unwrap();
    assert_eq!(a.download::<u8>(&same).unwrap(), [7; 16]);
}

/// Words of the program, which no page lets anybody write.
static WEIGHTS: [u32; 4] = [1, 2, 3, 4];

/// The weights where they lie, and the way to them that safe code has: by handle, out of thin air.
fn weights(runtime: &Runtime) -> (Lease<Buffer>, Lease<Buffer>) {
    let (address, bytes) = (WEIGHTS.as_ptr().expose_provenance() as u64, size_of_val(&WEIGHTS) as u64);
    // SAFETY: they are there for ever, and nobody writes them.
    let own = unsafe { runtime.allocator().import(address, bytes, 0, Protection::ReadOnly, Box::new(())) }.unwrap();
    let guessed = BufferHandle::from_bits(own.handle().to_bits().get()).unwrap();
    let found = runtime.allocator().lease(guessed).unwrap();
    assert!(found.is_imported() && found.is_read_only() && !runtime.alloc(16).unwrap().is_read_only());
    (own, found)
}

#[test]
fn nobody_writes_what_was_imported_read_only() {
    let runtime = runtime();
    let (own, found) = weights(&runtime);
    let (stream, other) = (runtime.stream(), runtime.upload(&[9u32; 4]).unwrap());
    let pinned = runtime.alloc_pinned(16).unwrap();
    let params = 1.0f32.to_ne_bytes();
    let refused = |what: &str, result: leasehold::Result<()>| assert_eq!(kind(result), "InvalidArgument", "{what}");
    refused("fill", ops::fill(stream, found.view(), ops::Pattern::U8(1)));
    refused("fill a part", ops::fill(stream, found.part(4..8).unwrap(), ops::Pattern::U32(1)));
    refused("upload", ops::upload(stream, found.view(), &[9u32; 4], false));
    refused("upload, staged", ops::upload(stream, found.view(), &[9u32; 4], true));
    refused("upload, owned", ops::upload_owned(stream, found.view(), Arc::new(vec![9u32; 4])));
    refused("copy", ops::copy(stream, found.view(), other.view()));
    refused("rows", ops::copy_2d(stream, found.view(), 8, other.view(), 8, 4, 2));
    refused("copy, pinned", ops::copy_pinned(stream, found.view(), pinned.view()));
    refused("memcpy_h2d", runtime.memcpy_h2d(found.view(), &[9u32; 4], true));
    let operands = [other.read(), found.read_write()];
    refused("kernel", launch(stream, &axpy(), &operands, &params, 1).map(drop));
    refused("kernel, write", launch(stream, &iota(), &[found.write()], &params, 1).map(drop));
    // SAFETY: nobody else is here.
    refused("map", unsafe { ops::map_write(&runtime, found.view()) }.map(drop));
    // SAFETY: it does nothing.
    refused("call", unsafe { ops::foreign_call(stream, "writes", &[found.write()], |_, _| Ok(())) });
    let record = |r: &Runtime| ops::fill(r.stream(), found.view(), ops::Pattern::U8(1));
    refused("recording", runtime.record_graph(record).map(drop));

    // Whoever reads is welcome.
    launch(stream, &axpy(), &[found.read(), other.read_write()], &params, 1).unwrap();
    ops::copy(stream, pinned.view(), found.view()).unwrap();
    assert_eq!(runtime.download::<u32>(&pinned).unwrap(), WEIGHTS);
    assert_eq!(runtime.download::<u32>(&own).unwrap(), WEIGHTS);
}

#[test]
fn no_update_puts_read_only_memory_where_a_graph_writes() {
    let runtime = runtime();
    let (_own, found) = weights(&runtime);
    let (x, y) = (runtime.upload(&[9u32; 4]).unwrap(), runtime.alloc(16).unwrap());
    let graph = runtime.record_graph(|r| ops::copy(r.stream(), y.view(), x.view())).unwrap();
    assert_eq!(kind(graph.update(&Update::new().buffer(&y, &found))), "InvalidArgument");
    let _ = graph.update(&Update::new().buffer(&x, &found)).unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.download::<u32>(&y).unwrap(), WEIGHTS);
}
