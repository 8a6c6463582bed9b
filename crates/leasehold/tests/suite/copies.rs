//! Several copies in one call.

use crate::common::*;
use leasehold::backend::{Protection, Traced, Validated};
use leasehold::{Context, DeviceId, Growing, Runtime, View};
use std::sync::Arc;

/// The call fails with this kind, and with this in its text.
#[track_caller]
fn refused(result: leasehold::Result<()>, kind: &str, text: &str) {
    let error = result.expect_err(text);
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(text), "{error}");
}

#[test]
fn a_wrong_piece_is_named_and_none_is_copied() {
    static WORDS: [u8; 16] = [7; 16];
    let (runtime, other) = (runtime(), runtime_of(&context()));
    let stream = runtime.stream();
    let (from, to) = (runtime.upload(&[5u8; 32]).unwrap(), runtime.zeros::<u8>(32).unwrap());
    let good = (to.view().part(..16).unwrap(), from.view().part(..16).unwrap());

    let stranger = other.upload(&[1u8; 16]).unwrap();
    refused(
        stream.copy_batch(&[good, (to.view().part(16..).unwrap(), stranger.view())]),
        "InvalidArgument",
        "piece 1",
    );
    let address = WORDS.as_ptr().expose_provenance() as u64;
    // SAFETY: the words are there for ever, and nobody writes them.
    let fixed =
        unsafe { runtime.allocator().import(address, 16, 0, Protection::ReadOnly, Box::new(())) }
            .unwrap();
    refused(
        stream.copy_batch(&[good, (fixed.view(), from.view().part(16..).unwrap())]),
        "InvalidArgument",
        "piece 1",
    );
    let cache = Growing::<u8>::new(&runtime, 1 << 20).unwrap();
    cache.grow(stream, 4096).unwrap();
    let beyond = cache.slice(4000..4016);
    cache.shrink(stream, 100).unwrap();
    let head = cache.slice(..16);
    refused(
        stream.copy_batch(&[(head.view(), good.1), (beyond.view(), good.1)]),
        "InvalidArgument",
        "a growing buffer that has 100 now",
    );
    refused(stream.copy_batch(&[(good.0, good.1), (good.0, good.1)]), "InvalidArgument", "0 and 1");
    assert_eq!(runtime.to_vec(&to).unwrap(), [0; 32]);
    // A read-only buffer may be the source of several pieces.
    stream
        .copy_batch(&[good, (to.view().part(16..).unwrap(), fixed.view())])
        .and_then(|()| stream.copy_batch(&[(head.view(), fixed.view())]))
        .unwrap();
    assert_eq!(runtime.to_vec(&to).unwrap(), [[5u8; 16], [7; 16]].concat());
    assert_eq!(runtime.to_vec(head).unwrap(), [7; 16]);
}

fn runtime_of(context: &Context) -> Runtime {
    context.runtime(DeviceId::cpu(0)).unwrap()
}

/// Pieces that are all of a buffer overwrite it, so the failure of who wrote it before ends. Pieces
/// with a gap between them leave it.
#[test]
fn pieces_that_are_all_of_a_buffer_end_the_failure_of_its_writer() {
    let runtime = runtime();
    let good = runtime.upload(&[1u32, 2, 3, 4]).unwrap();
    for whole in [false, true] {
        let x = runtime.upload(&[0u32; 4]).unwrap();
        let failing = runtime.create_stream().unwrap();
        launch(&failing, &trap(), &[x.read_write()], &[], 1).unwrap();
        failing.synchronize_timeout(LONG).unwrap_err();
        let stream = runtime.create_stream().unwrap();
        // The last piece comes first; without the third one a gap is left.
        let pieces: Vec<_> = [3usize, 2, 0, 1]
            .into_iter()
            .filter(|&i| whole || i != 2)
            .map(|i| (x.slice(i..=i).view(), good.slice(i..=i).view()))
            .collect();
        let copied = stream.copy_batch(&pieces).and_then(|()| stream.synchronize_timeout(LONG));
        assert_eq!(copied.is_ok(), whole, "{copied:?}");
        if whole {
            assert_eq!(runtime.to_vec(&x).unwrap(), [1, 2, 3, 4]);
        }
    }
}

/// Buffers in turns: each is several operands, and is locked once.
#[test]
fn pieces_of_many_buffers_in_turns_are_ordered_as_one() {
    for backend in [0, 1] {
        let cpu = leasehold::cpu::CpuBackend::new();
        let context = match backend {
            0 => Context::with_backends(vec![Arc::new(Validated::new(cpu).unwrap())]),
            _ => Context::with_backends(vec![Arc::new(Traced::new(cpu).unwrap())]),
        };
        let runtime = runtime_of(&context);
        let (one, two) = (runtime.create_stream().unwrap(), runtime.create_stream().unwrap());
        let sources: Vec<_> = (0..3u8).map(|i| runtime.upload(&[i + 1; 300]).unwrap()).collect();
        let targets: Vec<_> = (0..3).map(|_| runtime.zeros::<u8>(300).unwrap()).collect();
        for round in 0..50usize {
            let pieces: Vec<_> = (0..300usize)
                .map(|i| {
                    let (to, from) = (&targets[i % 3], &sources[(i + round) % 3]);
                    let at = i / 3..i / 3 + 1;
                    Ok((to.view().part(at.clone())?, from.view().part(at)?))
                })
                .collect::<leasehold::Result<_>>()
                .unwrap();
            let stream = if round % 2 == 0 { &one } else { &two };
            let before = stream.now().value();
            stream.copy_batch(&pieces).unwrap();
            assert!(stream.now().value() > before);
            for (i, to) in targets.iter().enumerate() {
                let expected = ((i + round) % 3 + 1) as u8;
                assert_eq!(runtime.to_vec(to).unwrap()[..100], [expected; 100], "round {round}");
            }
        }
    }
}

/// Threads whose calls share buffers, in opposite orders.
#[test]
fn calls_of_threads_with_common_buffers_never_wait_for_each_other() {
    let runtime = runtime();
    let buffers: Vec<_> = (0..4).map(|_| runtime.zeros::<u8>(64).unwrap()).collect();
    std::thread::scope(|scope| {
        for thread in 0..2usize {
            let (stream, buffers) = (runtime.create_stream().unwrap(), &buffers);
            scope.spawn(move || {
                for _ in 0..300 {
                    let order = if thread == 0 { [0, 1, 2, 3] } else { [3, 2, 1, 0] };
                    let part = |i: usize, at: usize| buffers[order[i]].view().part(at..at + 8);
                    let pieces = [0usize, 1, 2, 3]
                        .map(|i| (part(i, 8 * thread).unwrap(), part((i + 1) % 4, 32).unwrap()));
                    stream.copy_batch(&pieces).unwrap();
                }
                stream.synchronize_timeout(LONG).unwrap();
            });
        }
    });
}
