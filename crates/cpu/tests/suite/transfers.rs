//! Copies and fills at every alignment and size.

use crate::common::*;
use leasehold_core::Error;
use leasehold_core::sync::Arc;
use leasehold_hal::{Copy2d, Fill, KeepAlive, Op, Upload};

#[test]
fn fills_of_all_widths_at_all_offsets() {
    let rig = rig(2);
    for width in [1u8, 2, 4] {
        let pattern = 0x8877_6655u32;
        for offset in 0..16usize {
            for patterns in 0..24usize {
                let bytes = patterns * usize::from(width);
                let mut memory = vec![0u8; 160];
                let dst = memory.as_mut_ptr() as u64 + offset as u64;
                submit(
                    &rig.stream,
                    &[Op::Fill(Fill { dst, native: 0, bytes: bytes as u64, pattern, width })],
                )
                .unwrap();
                finish(&rig.stream).unwrap();
                std::hint::black_box(&mut memory);
                for (i, &b) in memory.iter().enumerate() {
                    let inside = (offset..offset + bytes).contains(&i);
                    let expected = if inside {
                        pattern.to_le_bytes()[(i - offset) % usize::from(width)]
                    } else {
                        0
                    };
                    assert_eq!(
                        b, expected,
                        "width {width}, offset {offset}, {bytes} bytes, at {i}"
                    );
                }
            }
        }
    }
}

#[test]
fn copies_at_all_alignments() {
    let rig = rig(2);
    let from: Vec<u8> = (0..64).map(|i| i as u8 + 1).collect();
    for src in 0..16u64 {
        for dst in 0..16u64 {
            for bytes in [0u64, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33] {
                let mut to = vec![0u8; 64];
                let copy = Copy2d::linear(
                    (from.as_ptr() as u64 + src, 0),
                    (to.as_mut_ptr() as u64 + dst, 0),
                    bytes,
                );
                submit(&rig.stream, &[Op::Copy(copy)]).unwrap();
                finish(&rig.stream).unwrap();
                std::hint::black_box(&mut to);
                let (d, s, n) = (dst as usize, src as usize, bytes as usize);
                assert_eq!(to[d..d + n], from[s..s + n]);
                assert!(to[..d].iter().chain(&to[d + n..]).all(|&b| b == 0));
            }
        }
    }
}

#[test]
fn strided_copies_equal_a_reference() {
    for threads in [1, 3] {
        let rig = rig(threads);
        for (width, rows, from_pitch, to_pitch) in [
            (5u64, 7u64, 9u64, 6u64),
            (64, 100, 64, 64),
            (700, 3000, 1024, 900),
            (300_001, 5, 300_100, 300_001),
            (3, 1, 0, 0),
            (4, 0, 8, 8),
        ] {
            let size = |pitch: u64| (pitch * rows + width) as usize;
            let from: Vec<u8> = (0..size(from_pitch)).map(|i| (i * 31 % 251) as u8).collect();
            let mut to = vec![0u8; size(to_pitch)];
            let copy = Copy2d {
                src: from.as_ptr() as u64,
                src_native: 0,
                src_pitch: from_pitch,
                dst: to.as_mut_ptr() as u64,
                dst_native: 0,
                dst_pitch: to_pitch,
                width,
                rows,
            };
            submit(&rig.stream, &[Op::Copy(copy)]).unwrap();
            finish(&rig.stream).unwrap();
            std::hint::black_box(&mut to);
            let mut expected = vec![0u8; size(to_pitch)];
            for row in 0..rows as usize {
                let (f, t, w) =
                    (row * from_pitch as usize, row * to_pitch as usize, width as usize);
                expected[t..t + w].copy_from_slice(&from[f..f + w]);
            }
            assert!(to == expected, "{width} x {rows}, pitches {from_pitch} and {to_pitch}");
        }
    }
}

#[test]
fn big_copies_and_fills_are_spread_and_right() {
    let rig = rig(3);
    let n = (5 << 20) + 13;
    let from: Vec<u8> = (0..n).map(|i| (i % 253) as u8).collect();
    let mut to = vec![0u8; n];
    let at = to.as_mut_ptr() as u64;
    submit(&rig.stream, &[Op::Copy(Copy2d::linear((from.as_ptr() as u64, 0), (at, 0), n as u64))])
        .unwrap();
    finish(&rig.stream).unwrap();
    std::hint::black_box(&mut to);
    assert!(to == from);
    let bytes = (n - 1) as u64 / 4 * 4;
    submit(
        &rig.stream,
        &[Op::Fill(Fill { dst: at + 1, native: 0, bytes, pattern: 0x0403_0201, width: 4 })],
    )
    .unwrap();
    finish(&rig.stream).unwrap();
    std::hint::black_box(&mut to);
    assert_eq!(to[0], from[0]);
    assert!(to[1..=bytes as usize].iter().enumerate().all(|(i, &b)| usize::from(b) == i % 4 + 1));
    assert_eq!(to[bytes as usize + 1..], from[bytes as usize + 1..]);
}

#[test]
fn a_copy_that_overlaps_itself_is_refused() {
    let rig = rig(1);
    let memory = [0u8; 64];
    let at = memory.as_ptr() as u64;
    let copy = |src, dst, bytes| {
        submit(&rig.stream, &[Op::Copy(Copy2d::linear((src, 0), (dst, 0), bytes))])
    };
    assert!(matches!(copy(at, at + 8, 9), Err(Error::InvalidArgument(_))));
    assert!(matches!(copy(at + 8, at, 9), Err(Error::InvalidArgument(_))));
    copy(at, at + 8, 8).unwrap();
    finish(&rig.stream).unwrap();
}

#[test]
fn host_memory_is_kept_up_to_its_point_and_no_longer() {
    let rig = rig(1);
    let host_timeline = rig.device.host_timeline().unwrap();
    let opens = host_timeline.timeline().completed() + 1;
    let mut to = [0u8; 16];
    let from: Arc<Vec<u8>> = Arc::new((0..16).collect());
    let keep: KeepAlive = from.clone();
    let upload = Upload {
        src: from.as_ptr(),
        dst: to.as_mut_ptr() as u64,
        native: 0,
        bytes: 16,
        keep: Some(&keep),
    };
    let first =
        submit(&rig.stream, &[Op::Wait(host_timeline.timeline().at(opens)), Op::Upload(upload)])
            .unwrap();
    // A wait that stays pending behind the copy.
    rig.stream.wait(host_timeline.timeline().at(opens + 1)).unwrap();
    let weak = Arc::downgrade(&from);
    drop((keep, from));
    assert!(weak.upgrade().is_some(), "a pending copy keeps its source");
    host_timeline.signal_host(opens).unwrap();
    rig.stream.wait_host(first.value(), LONG).unwrap();
    assert!(weak.upgrade().is_none(), "who sees the value finds everything given up");
    std::hint::black_box(&mut to);
    assert_eq!(to.to_vec(), (0..16).collect::<Vec<u8>>());
    host_timeline.signal_host(opens + 1).unwrap();
    finish(&rig.stream).unwrap();
}
