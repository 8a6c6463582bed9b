//! Copies, fills, calls and mappings.

use crate::common::*;
use leasehold::backend::sync::Mutex;
use leasehold::{Error, View, ops};
use std::sync::Arc;
use std::time::Duration;

#[test]
fn copies_of_every_alignment_and_length() {
    let runtime = runtime();
    let source: Vec<u8> = (0..64).map(|i| i as u8 + 1).collect();
    let from = runtime.upload(&source).unwrap();
    let to = runtime.alloc(64).unwrap();
    for src in 0..16 {
        for dst in 0..16 {
            for len in [0, 1, 3, 15, 16, 17, 33] {
                runtime.stream().fill(to.view(), 0u8).unwrap();
                let (s, d) = (from.part(src..src + len).unwrap(), to.part(dst..dst + len).unwrap());
                runtime.stream().copy(d, s).unwrap();
                let mut expect = [0u8; 64];
                expect[dst..dst + len].copy_from_slice(&source[src..src + len]);
                assert_eq!(
                    runtime.to_vec::<u8>(&to).unwrap(),
                    expect,
                    "{src} to {dst}, {len} bytes"
                );
            }
        }
    }
}

#[test]
fn uploads_and_downloads_of_every_alignment() {
    let runtime = runtime();
    let x = runtime.alloc(64).unwrap();
    for offset in 0..16 {
        for len in 0..33 {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 3 + offset) as u8).collect();
            let part = x.part(offset..offset + len).unwrap();
            match offset % 2 {
                0 => runtime.stream().upload(part, &bytes),
                _ => runtime.stream().upload_blocking(part, &bytes),
            }
            .unwrap();
            assert_eq!(runtime.to_vec::<u8>(part).unwrap(), bytes);
        }
    }
}

#[test]
fn fills_of_every_pattern_offset_and_length() {
    let runtime = runtime();
    let x = runtime.alloc(64).unwrap();
    for (pattern, bytes) in [
        (ops::Pattern::U8(0xab), vec![0xab]),
        (ops::Pattern::U16(0x1234), vec![0x34, 0x12]),
        (ops::Pattern::U32(0x0102_0304), vec![4, 3, 2, 1]),
        (ops::Pattern::from(1.5f32), 1.5f32.to_le_bytes().to_vec()),
    ] {
        let width = bytes.len();
        for offset in 0..16usize {
            for len in 0..20usize {
                runtime.stream().fill(x.view(), 0u8).unwrap();
                let result = runtime.stream().fill(x.part(offset..offset + len).unwrap(), pattern);
                if offset % width != 0 || len % width != 0 {
                    assert_eq!(kind(result), "InvalidArgument");
                    continue;
                }
                result.unwrap();
                let mut expect = [0u8; 64];
                expect[offset..offset + len]
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, b)| *b = bytes[i % width]);
                assert_eq!(runtime.to_vec::<u8>(&x).unwrap(), expect);
            }
        }
    }
}

#[test]
fn rows_are_copied_at_their_pitches() {
    let runtime = runtime();
    let source: Vec<u8> = (0..200).map(|i| i as u8).collect();
    let from = runtime.upload(&source).unwrap();
    let to = runtime.upload(&[0xffu8; 200]).unwrap();
    for (width, rows, src_pitch, dst_pitch) in
        [(1u64, 5u64, 7u64, 11u64), (8, 8, 8, 24), (13, 6, 20, 13), (9, 1, 0, 0)]
    {
        runtime.stream().fill(to.view(), 0xffu8).unwrap();
        let (s, d) = (from.part(3..193).unwrap(), to.part(5..195).unwrap());
        runtime
            .stream()
            .copy_2d(d, s, ops::Rows::new(width, rows).src_pitch(src_pitch).dst_pitch(dst_pitch))
            .unwrap();
        let mut expect = vec![0xffu8; 200];
        for r in 0..rows {
            for i in 0..width {
                expect[(5 + r * dst_pitch + i) as usize] = source[(3 + r * src_pitch + i) as usize];
            }
        }
        assert_eq!(runtime.to_vec::<u8>(&to).unwrap(), expect);
    }
    let copy = |width, rows, pitch| {
        runtime.stream().copy_2d(
            to.view(),
            from.view(),
            ops::Rows::new(width, rows).src_pitch(pitch).dst_pitch(pitch),
        )
    };
    assert_eq!(kind(copy(8, 2, 7)), "InvalidArgument");
    assert_eq!(kind(copy(8, 100, 8)), "InvalidArgument");
    assert_eq!(kind(copy(u64::MAX, 2, u64::MAX)), "InvalidArgument");
    copy(0, 5, 1).unwrap();
    copy(5, 0, 1).unwrap();
}

#[test]
fn the_columns_of_one_matrix_are_copied_to_others_of_the_same() {
    let runtime = runtime();
    let x = runtime.upload(&(0..64u8).collect::<Vec<_>>()).unwrap();
    // 8 rows of 8: columns 0..3 to columns 4..7.
    let (left, right) = (x.part(..60).unwrap(), x.part(4..64).unwrap());
    runtime.stream().copy_2d(right, left, ops::Rows::new(3, 8).src_pitch(8).dst_pitch(8)).unwrap();
    let got = runtime.to_vec::<u8>(&x).unwrap();
    for r in 0..8usize {
        let row = [0, 1, 2, 3, 0, 1, 2, 7].map(|c| (r * 8 + c) as u8);
        assert_eq!(got[r * 8..r * 8 + 8], row);
    }
    let close = x.part(2..64).unwrap();
    assert_eq!(
        kind(runtime.stream().copy_2d(close, left, ops::Rows::new(3, 7).src_pitch(8).dst_pitch(8))),
        "InvalidArgument"
    );
}

#[test]
fn overlaps_and_unequal_lengths_are_refused() {
    let runtime = runtime();
    let x = runtime.upload(&[0u8; 64]).unwrap();
    let part = |offset| x.part(offset..offset + 16).unwrap();
    for offset in [0, 1, 15] {
        assert_eq!(kind(runtime.stream().copy(part(offset), part(0))), "InvalidArgument");
        assert_eq!(kind(runtime.stream().copy(part(0), part(offset))), "InvalidArgument");
    }
    runtime.stream().copy(part(16), part(0)).unwrap();
    assert_eq!(kind(runtime.stream().copy(x.part(..8).unwrap(), part(16))), "InvalidArgument");
    assert_eq!(kind(runtime.stream().upload(part(0), &[0u8; 15])), "InvalidArgument");
    assert_eq!(kind(runtime.stream().download(&mut [0u8; 17], part(0))), "InvalidArgument");
    assert_eq!(kind(runtime.to_vec::<u32>(x.part(..7).unwrap())), "InvalidArgument");
    assert_eq!(kind(x.part(60..65)), "InvalidArgument");
    assert_eq!(kind(x.part(usize::MAX..)), "InvalidArgument");
    assert_eq!(kind(x.part(1..=usize::MAX)), "InvalidArgument");
    assert_eq!(x.view().narrowed(60, 100).len(), 4);
    assert_eq!(x.view().narrowed(100, 1).len(), 0);
}

#[test]
fn memory_that_is_handed_over_is_kept_until_it_was_copied() {
    let runtime = runtime();
    let x = runtime.alloc(200_000).unwrap();
    let held = hold(runtime.stream());
    let bytes = Arc::new((0..200_000u32).map(|i| i as u8).collect::<Vec<u8>>());
    runtime.stream().upload_owned(x.view(), bytes.clone()).unwrap();
    assert_eq!(Arc::strong_count(&bytes), 2, "never waits, keeps it");
    open(held);
    assert_eq!(runtime.to_vec::<u8>(&x).unwrap(), *bytes);
    assert_eq!(Arc::strong_count(&bytes), 1);
    let values: Arc<Box<[f32]>> = Arc::new(vec![1.5f32; 10].into());
    runtime.stream().upload_owned(x.part(..40).unwrap(), values).unwrap();
    assert_eq!(runtime.to_vec::<f32>(x.part(..40).unwrap()).unwrap(), [1.5; 10]);
    let shared: Arc<[u16]> = Arc::from([7u16; 4]);
    runtime.stream().upload_owned(x.part(..8).unwrap(), shared).unwrap();
    runtime.stream().upload_owned(x.part(8..12).unwrap(), &[1u8, 2, 3, 4][..]).unwrap();
    assert_eq!(
        runtime.to_vec::<u8>(x.part(..12).unwrap()).unwrap(),
        [7, 0, 7, 0, 7, 0, 7, 0, 1, 2, 3, 4]
    );
}

#[test]
fn pinned_memory_is_copied_in_both_directions_without_waiting() {
    let runtime = runtime();
    let (there, back) = (runtime.alloc_pinned(256).unwrap(), runtime.alloc_pinned(256).unwrap());
    let x = runtime.alloc(256).unwrap();
    // SAFETY: nobody else touches the buffer.
    unsafe { runtime.stream().map_write(there.view()) }.unwrap().fill(0x5a);
    let held = hold(runtime.stream());
    runtime.stream().copy_pinned(x.view(), there.view()).unwrap();
    runtime.stream().copy_pinned(back.view(), x.view()).unwrap();
    open(held);
    // SAFETY: nobody writes it any more.
    assert_eq!(unsafe { runtime.stream().map_read(back.view()) }.unwrap(), [0x5a; 256]);
    // Between two of the host's, in stream order.
    runtime.stream().fill(there.view(), 3u8).unwrap();
    runtime.stream().copy_pinned(back.view(), there.view()).unwrap();
    runtime.stream().fill(there.view(), 4u8).unwrap();
    // SAFETY: as before.
    assert_eq!(unsafe { runtime.stream().map_read(back.view()) }.unwrap(), [3; 256]);
    let y = runtime.alloc(256).unwrap();
    assert_eq!(kind(runtime.stream().copy_pinned(y.view(), x.view())), "InvalidArgument");
    assert_eq!(
        kind(runtime.stream().copy_pinned(x.part(..1).unwrap(), there.view())),
        "InvalidArgument"
    );
}

#[test]
fn mapping_waits_for_who_uses_the_memory() {
    let runtime = runtime();
    let stream = runtime.create_stream().unwrap();
    let (x, y) = (runtime.upload(&[0u32; 4]).unwrap(), runtime.alloc(16).unwrap());
    runtime.stream().synchronize().unwrap();
    let held = hold(&stream);
    stream.fill(x.view(), 6u32).unwrap();
    stream.copy(y.view(), x.view()).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(Duration::from_millis(10));
            open(held);
        });
        // SAFETY: nobody writes it any more.
        let seen = unsafe { runtime.stream().map_read(x.part(4..8).unwrap()) }.unwrap();
        assert_eq!(seen, [6, 0, 0, 0]);
    });
    // SAFETY: nobody else touches it.
    unsafe { runtime.stream().map_write(x.view()) }.unwrap().fill(1);
    assert_eq!(runtime.to_vec::<u8>(x.view()).unwrap(), [1; 16]);
    let empty = runtime.alloc(0).unwrap();
    // SAFETY: as above.
    assert!(unsafe { runtime.stream().map_read(empty.view()) }.unwrap().is_empty());
}

#[test]
fn host_calls_run_once_and_in_order() {
    let runtime = runtime();
    let seen = Arc::new(Mutex::new(Vec::new()));
    for i in 0..100 {
        let seen = seen.clone();
        runtime
            .stream()
            .host_call("notes", move || {
                seen.lock().push(i);
                Ok(())
            })
            .unwrap();
    }
    let token = Box::new(100);
    let last = seen.clone();
    runtime
        .stream()
        .host_call_once("consumes", move || {
            last.lock().push(*token);
            Ok(())
        })
        .unwrap();
    runtime.stream().synchronize().unwrap();
    assert_eq!(*seen.lock(), (0..=100).collect::<Vec<_>>());
    assert_eq!(Arc::strong_count(&seen), 1, "what ran is given up");
}

#[test]
fn a_host_call_may_submit_to_its_own_stream() {
    let runtime = runtime();
    let x = runtime.upload(&[1u32; 4]).unwrap();
    let (again, to) = (runtime.clone(), x.clone());
    runtime
        .stream()
        .host_call("submits", move || {
            again.stream().fill(to.view(), 8u32)?;
            again.stream().upload(to.part(..4)?, &[9u32])
        })
        .unwrap();
    runtime.stream().synchronize().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [9, 8, 8, 8]);
}

#[test]
fn a_host_call_that_submits_while_the_queue_is_full_does_not_deadlock() {
    let runtime = runtime();
    let x = runtime.upload(&[0u32]).unwrap();
    let (again, to) = (runtime.clone(), x.clone());
    let (started, flooded) = std::sync::mpsc::channel::<()>();
    let ready = Mutex::new(Some(started));
    runtime
        .stream()
        .host_call("submits late", move || {
            drop(ready.lock().take());
            std::thread::sleep(Duration::from_millis(30));
            for _ in 0..100 {
                again.stream().fill(to.view(), 1u32)?;
            }
            Ok(())
        })
        .unwrap();
    assert!(flooded.recv().is_err(), "it runs");
    for _ in 0..50_000 {
        runtime.stream().fill(x.view(), 2u32).unwrap();
    }
    runtime.stream().synchronize_timeout(LONG).unwrap();
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [2]);
}

#[test]
fn a_host_call_must_not_wait_for_its_own_stream_and_is_told_so() {
    let runtime = runtime();
    let x = runtime.upload(&vec![7u8; 100_000]).unwrap();
    let (again, to) = (runtime.clone(), x.clone());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let notes = seen.clone();
    runtime
        .stream()
        .host_call("waits", move || {
            let mut bytes = vec![0u8; 100_000];
            let mut notes = notes.lock();
            notes.push(kind(again.stream().download(&mut bytes, to.view())));
            notes.push(kind(again.stream().upload_blocking(to.view(), &bytes)));
            notes.push(kind(again.stream().synchronize()));
            notes.push(kind(
                again
                    .stream()
                    .copy(to.part(..4)?, to.part(8..12)?)
                    .and_then(|()| again.stream().synchronize()),
            ));
            // Too large to be staged elsewhere; here it is, since it cannot be waited for.
            notes.push(kind(again.stream().upload(to.view(), &bytes)));
            Ok(())
        })
        .unwrap();
    runtime.stream().synchronize_timeout(LONG).unwrap();
    assert_eq!(
        *seen.lock(),
        ["InvalidState", "InvalidState", "InvalidState", "InvalidState", "ok"]
    );
    assert_eq!(runtime.to_vec::<u8>(&x).unwrap(), vec![0u8; 100_000]);
}

#[test]
fn a_host_call_that_fails_or_panics_poisons_its_stream() {
    let runtime = runtime();
    let failing = runtime.create_stream().unwrap();
    failing.host_call("reads a file", || Err(Error::state("no such file"))).unwrap();
    let error = failing.synchronize_timeout(LONG).unwrap_err();
    assert!(
        error.to_string().contains("reads a file") && error.to_string().contains("no such file"),
        "{error}"
    );
    let panicking = runtime.create_stream().unwrap();
    panicking.host_call("panics", || panic!("on purpose")).unwrap();
    assert!(panicking.synchronize_timeout(LONG).unwrap_err().to_string().contains("on purpose"));
    runtime.stream().synchronize().unwrap();
}

#[test]
fn a_library_call_runs_in_stream_order_with_its_operands() {
    let runtime = runtime();
    let x = runtime.upload(&[1u32, 2, 3, 4]).unwrap();
    let run = |first: u32| {
        let add = move |_: u64, bindings: &[leasehold::backend::Binding]| {
            let at = bindings[0].addr as *mut u32;
            for i in 0..bindings[0].len as usize / 4 {
                // SAFETY: within the operand.
                unsafe { *at.add(i) += first };
            }
            Ok(())
        };
        // SAFETY: it touches its operand alone.
        unsafe { runtime.stream().foreign_call("add", &[x.part(4..12).unwrap().read_write()], add) }
    };
    let held = hold(runtime.stream());
    run(10).unwrap();
    run(100).unwrap();
    open(held);
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [1, 112, 113, 4]);
}

#[test]
fn a_copy_orders_itself_after_the_streams_that_used_its_operands() {
    let runtime = runtime();
    let streams: Vec<_> = (0..3).map(|_| runtime.create_stream().unwrap()).collect();
    let x = runtime.upload(&[0u32; 1024]).unwrap();
    let y = runtime.upload(&[0u32; 1024]).unwrap();
    runtime.synchronize().unwrap();
    for round in 1..200u32 {
        // Write on one, read on the next, overwrite on the third: RAW, WAR and WAW.
        streams[round as usize % 3].fill(x.view(), ops::Pattern::U32(round)).unwrap();
        streams[(round as usize + 1) % 3].copy(y.view(), x.view()).unwrap();
        let got = runtime.to_vec::<u32>(&y).unwrap();
        assert!(got.iter().all(|&v| v == round), "round {round}: {:?}", &got[..4]);
    }
}

#[test]
fn a_stream_may_be_given_to_other_threads() {
    let runtime = runtime();
    let x = runtime.upload(&[0u32; 8]).unwrap();
    std::thread::scope(|s| {
        for i in 0..8 {
            let (runtime, x) = (&runtime, &x);
            s.spawn(move || {
                for n in 0..200 {
                    runtime
                        .stream()
                        .fill(x.part(i * 4..i * 4 + 4).unwrap(), ops::Pattern::U32(n))
                        .unwrap();
                }
            });
        }
    });
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [199; 8]);
}
