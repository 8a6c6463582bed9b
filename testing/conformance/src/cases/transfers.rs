//! Fills and copies.

use crate::case::{Case, Need, Outcome, check, check_eq, skipped};
use crate::cases::streams::fill;
use crate::env::{Env, bind, direct, leasehold_on};
use crate::factory::TestKernel;
use leasehold::backend::{Access, Copy2d, Fill, MemoryKind, Op};
use leasehold::{Buffer, Error, Layout, Lease, View};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) const CASES: &[Case] = &[
    Case::hal(60, "fills of 1, 2 and 4 bytes at every offset and length", &[], fills)
        .replayed()
        .sanitizer(),
    Case::hal(61, "copies of parts at all alignments, overlaps refused", &[], parts)
        .replayed()
        .sanitizer(),
    Case::hal(62, "copies and fills reach beyond 4 GiB", &[], beyond_4_gib).replayed(),
    Case::runtime(67, "an upload takes its bytes during the call", &[Need::Hold], upload_captures)
        .sanitizer(),
    Case::runtime(
        68,
        "an asynchronous copy from pageable memory survives its source's change",
        &[],
        pageable_mutated,
    )
    .sanitizer(),
    Case::hal(
        69,
        "views of one buffer keep their hazards",
        &[Need::Kernel(TestKernel::Add)],
        aliases,
    )
    .replayed()
    .sanitizer(),
    Case::hal(73, "copies with pitches are what the host computes", &[], pitched)
        .replayed()
        .sanitizer(),
    Case::hal(74, "a burst of a thousand small copies keeps its order", &[], burst)
        .replayed()
        .sanitizer(),
    Case::hal(
        78,
        "a copy follows a kernel of another stream",
        &[Need::Kernel(TestKernel::Fill), Need::Hold],
        after_kernel,
    )
    .sanitizer(),
    Case::runtime(
        153,
        "an asynchronous upload of any length takes its bytes and never waits",
        &[Need::HostTimelines],
        uploads_never_wait,
    )
    .sanitizer(),
    Case::runtime(
        140,
        "an asynchronous copy from memory that is dropped at once",
        &[Need::Hold],
        dropped_source,
    )
    .sanitizer(),
];

fn fills(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 64)?;
    for width in [1u64, 2, 4] {
        let pattern = [0xd4, 0xc3d4, 0xa1b2_c3d4][width.ilog2() as usize];
        for offset in (0..16).step_by(width as usize) {
            for length in (0..33).step_by(width as usize) {
                let part = Fill {
                    dst: buffer.addr() + offset,
                    native: buffer.native(),
                    bytes: length,
                    pattern,
                    width: width as u8,
                };
                env.submit(&stream, &[fill(&buffer, 0x11, 1), Op::Fill(part)])?;
                let mut expected = [0x11u8; 64];
                for (i, b) in
                    expected[offset as usize..(offset + length) as usize].iter_mut().enumerate()
                {
                    *b = pattern.to_le_bytes()[i % width as usize];
                }
                check_eq!(
                    env.read(&stream, &buffer)?,
                    expected,
                    "{length} bytes of a pattern of {width} at {offset}"
                );
            }
        }
    }
    Ok(())
}

fn parts(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let (from, to) = (env.buffer(&stream, 64)?, env.buffer(&stream, 64)?);
    let source: Vec<u8> = (0..64).collect();
    env.write(&stream, &from, &source)?;
    let part = |src: u64, dst: u64, bytes| {
        Op::Copy(Copy2d::linear(
            (from.addr() + src, from.native()),
            (to.addr() + dst, to.native()),
            bytes,
        ))
    };
    for offset in 0..16u64 {
        for length in 0..=33u64 {
            let at = (offset * 5 + length) % 16;
            env.submit(&stream, &[fill(&to, 0xee, 1), part(offset, at, length)])?;
            let mut expected = [0xeeu8; 64];
            let (o, a, l) = (offset as usize, at as usize, length as usize);
            expected[a..a + l].copy_from_slice(&source[o..o + l]);
            check_eq!(env.read(&stream, &to)?, expected, "{length} bytes from {offset} to {at}");
        }
    }
    let within = |src: u64, dst: u64| {
        let c = Copy2d::linear(
            (from.addr() + src, from.native()),
            (from.addr() + dst, from.native()),
            16,
        );
        direct(&stream, &[Op::Copy(c)])
    };
    for (src, dst) in [(0, 8), (8, 0), (0, 1), (15, 0)] {
        crate::case::expect_error(
            within(src, dst),
            "InvalidArgument",
            "a copy that overlaps itself",
        )?;
    }
    within(0, 16)?;
    env.drain(&stream)
}

fn beyond_4_gib(env: &Env) -> Outcome {
    const EDGE: u64 = 1 << 32;
    let stream = env.stream()?;
    let limit = env.device().limits().buffer;
    if limit < EDGE + (1 << 20) {
        return skipped(format!("the largest buffer has {limit} bytes"));
    }
    let large = match env
        .device()
        .memory(MemoryKind::Device)?
        .alloc(Layout::new(EDGE + (1 << 20)), leasehold_on(&stream))
    {
        Ok(large) => large,
        Err(Error::OutOfMemory(_) | Error::OverBudget { .. }) => {
            return skipped("4 GiB of memory are not to be had");
        }
        Err(e) => return Err(e.into()),
    };
    let (small, out) = (env.buffer(&stream, 4096)?, env.buffer(&stream, 4096)?);
    let source: Vec<u8> = (0..4096u32).map(|i| (i * 7 % 251) as u8).collect();
    env.write(&stream, &small, &source)?;
    let part = |dst: u64, bytes, pattern| {
        Op::Fill(Fill { dst: large.addr() + dst, native: large.native(), bytes, pattern, width: 1 })
    };
    let copy = |from: &Lease<Buffer>, src: u64, to: &Lease<Buffer>, dst: u64, bytes| {
        Op::Copy(Copy2d::linear(
            (from.addr() + src, from.native()),
            (to.addr() + dst, to.native()),
            bytes,
        ))
    };
    // A truncated offset would hit the low end.
    for at in [EDGE - 2048, EDGE, EDGE + 512, EDGE + (1 << 20) - 4096] {
        let low = at & (EDGE - 1) & !4095;
        let low = if low >= EDGE - 4096 { 0 } else { low };
        env.submit(
            &stream,
            &[part(low, 4096, 0x11), part(at, 4096, 0x22), copy(&small, 0, &large, at, 4096)],
        )?;
        env.submit(&stream, &[fill(&out, 0, 1), copy(&large, at, &out, 0, 4096)])?;
        check!(
            env.read(&stream, &out)? == source,
            "a copy to and from offset {at:#x} brought other bytes"
        );
        if low.abs_diff(at) >= 4096 {
            env.submit(&stream, &[copy(&large, low, &out, 0, 4096)])?;
            let bytes = env.read(&stream, &out)?;
            check!(bytes.iter().all(|&b| b == 0x11), "a copy to offset {at:#x} wrote at {low:#x}");
        }
    }
    // Rows so far apart that the second lies beyond the boundary.
    let rows = Copy2d {
        src: large.addr() + 64,
        src_native: large.native(),
        src_pitch: EDGE,
        dst: out.addr(),
        dst_native: out.native(),
        dst_pitch: 100,
        width: 100,
        rows: 2,
    };
    env.submit(&stream, &[part(64, 100, 0x33), part(EDGE + 64, 100, 0x44), Op::Copy(rows)])?;
    let bytes = env.read(&stream, &out)?;
    check!(bytes[..100].iter().all(|&b| b == 0x33), "the first of two rows 4 GiB apart");
    check!(bytes[100..200].iter().all(|&b| b == 0x44), "the second of two rows 4 GiB apart");
    Ok(())
}

fn upload_captures(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let buffer = runtime.alloc(1000)?;
    let hold = env.hold_runtime(runtime.stream())?;
    let mut source = vec![1u8; 1000];
    runtime.stream().upload(buffer.view(), &source)?;
    source.fill(2);
    hold.release()?;
    check!(
        runtime.to_vec::<u8>(&buffer)?.iter().all(|&b| b == 1),
        "the upload took bytes that came after the call"
    );
    Ok(())
}

fn pageable_mutated(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    for n in [1usize, 1000, 65_536, 65_537, 1 << 20] {
        let buffer = runtime.alloc(n as u64)?;
        let mut source = vec![1u8; n];
        runtime.stream().upload(buffer.view(), &source)?;
        source.fill(2);
        check!(
            runtime.to_vec::<u8>(&buffer)?.iter().all(|&b| b == 1),
            "{n} bytes: not those of the call"
        );
    }
    Ok(())
}

fn aliases(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let add = env.kernel(TestKernel::Add)?;
    let (buffer, one) = (env.buffer(&stream, 1024)?, env.buffer(&stream, 512)?);
    let half = |at: u64, access| leasehold::backend::Binding {
        addr: buffer.addr() + at,
        len: 512,
        native: buffer.native(),
        access,
    };
    for round in 0..10u32 {
        let start = [round.to_le_bytes()].concat().repeat(256);
        env.write(&stream, &buffer, &start)?;
        env.write(&stream, &one, &1u32.to_le_bytes().repeat(128))?;
        // The upper half is computed from the lower one, then the lower from the upper: writes
        // after reads and reads after writes.
        let launch = |a: u64, b: u64| {
            [half(a, Access::Read), bind(&one, Access::Read), half(b, Access::Write)]
        };
        let (up, down) = (launch(0, 512), launch(512, 0));
        let op = |bindings| {
            Op::Dispatch(leasehold::backend::Dispatch {
                pipeline: &add,
                grid: [2, 1, 1],
                block: [64.min(add.block_threads), 1, 1],
                shared: 0,
                bindings,
                params: &[],
            })
        };
        env.submit(&stream, &[op(&up), op(&down), op(&up), op(&down)])?;
        let values = env.read_u32(&stream, &buffer)?;
        check!(
            values[..128].iter().all(|&v| v == round + 4),
            "round {round}: the lower half is {}",
            values[0]
        );
        check!(
            values[128..].iter().all(|&v| v == round + 3),
            "round {round}: the upper half is {}",
            values[128]
        );
    }
    Ok(())
}

fn pitched(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let (from, to) = (env.buffer(&stream, 4096)?, env.buffer(&stream, 4096)?);
    let source: Vec<u8> = (0..4096u32).map(|i| (i * 7 % 251) as u8).collect();
    env.write(&stream, &from, &source)?;
    for (width, rows, src_pitch, dst_pitch) in [
        (1u64, 7u64, 3u64, 5u64),
        (13, 20, 64, 13),
        (64, 8, 64, 100),
        (100, 1, 7, 7),
        (33, 16, 40, 130),
        (5, 0, 9, 9),
        (0, 5, 9, 9),
    ] {
        let c = Copy2d {
            src: from.addr() + 3,
            src_native: from.native(),
            src_pitch,
            dst: to.addr() + 11,
            dst_native: to.native(),
            dst_pitch,
            width,
            rows,
        };
        env.submit(&stream, &[fill(&to, 0xee, 1), Op::Copy(c)])?;
        let mut expected = vec![0xeeu8; 4096];
        for row in 0..rows as usize {
            let (s, d, w) =
                (3 + row * src_pitch as usize, 11 + row * dst_pitch as usize, width as usize);
            expected[d..d + w].copy_from_slice(&source[s..s + w]);
        }
        check!(
            env.read(&stream, &to)? == expected,
            "{rows} rows of {width} bytes, pitches {src_pitch} and {dst_pitch}"
        );
    }
    Ok(())
}

fn burst(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let (ring, out) = (env.buffer(&stream, 1001 * 8)?, env.buffer(&stream, 8)?);
    env.write(&stream, &ring, &[0; 1001 * 8])?;
    let at = |i: u64| (ring.addr() + i * 8, ring.native());
    let start = Instant::now();
    for i in 0..1000u64 {
        let mark =
            Fill { dst: at(i).0, native: ring.native(), bytes: 4, pattern: i as u32, width: 4 };
        env.submit(&stream, &[Op::Copy(Copy2d::linear(at(i), at(i + 1), 8)), Op::Fill(mark)])?;
    }
    env.submit(&stream, &[Op::Copy(Copy2d::linear(at(1000), (out.addr(), out.native()), 8))])?;
    env.drain(&stream)?;
    let took = start.elapsed();
    check!(took < env.timeout().max(Duration::from_secs(5)), "1,000 small copies took {took:?}");
    // Each copy carries bytes that the fill before the last one had not reached: only zeros may
    // arrive.
    check_eq!(env.read(&stream, &out)?, [0; 8], "what the chain of copies carried");
    let marks = env.read_u32(&stream, &ring)?;
    check!((0..1000).all(|i| marks[i * 2] == i as u32), "a fill was overtaken by a copy");
    Ok(())
}

fn after_kernel(env: &Env) -> Outcome {
    let (a, b) = (env.stream()?, env.stream()?);
    let set = env.kernel(TestKernel::Fill)?;
    let (x, y) = (env.buffer(&a, 65_536)?, env.buffer(&b, 65_536)?);
    for round in 0..10 {
        let hold = env.hold_running(&a)?;
        let point = a.timeline().at(env.kernel_fill(&a, &set, &x, round)?);
        a.flush()?;
        b.wait(point)?;
        let value = direct(&b, &[crate::cases::streams::copy(&x, &y)])?;
        b.flush()?;
        hold.release_late(env)?;
        env.wait(&b, value)?;
        check!(
            env.read_u32(&b, &y)?.iter().all(|&v| v == round),
            "round {round}: the copy came before the kernel"
        );
    }
    Ok(())
}

fn uploads_never_wait(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    for bytes in [65_536usize, 65_537, 1 << 20, 64 << 20] {
        let pageable = vec![1u8; bytes];
        let pinned = runtime.alloc_pinned(bytes as u64)?;
        let (first, second) = (runtime.alloc(bytes as u64)?, runtime.alloc(bytes as u64)?);
        runtime.stream().fill(first.view(), 9u8)?;
        runtime.stream().fill(second.view(), 9u8)?;
        // This thread signals the host timeline afterwards, so a call that waits for the stream
        // hangs.
        let host_timeline = runtime.create_host_timeline()?;
        let go = host_timeline.next();
        runtime.stream().wait(go)?;
        let mut source = pageable;
        runtime.stream().upload(first.view(), &source)?;
        source.fill(0xee);
        // SAFETY: no later submission uses the memory.
        let mapped = unsafe { runtime.stream().map_write(pinned.view()) }?;
        mapped.fill(2);
        runtime.stream().upload(second.view(), mapped)?;
        mapped.fill(0xee);
        let third = runtime.upload(&source)?;
        check!(
            !runtime.stream().query()?,
            "the stream of the uploads did not wait for its host timeline"
        );
        host_timeline.signal(go.value())?;
        for (buffer, expected) in [(&first, 1u8), (&second, 2), (&third, 0xee)] {
            check!(
                runtime.to_vec::<u8>(buffer)? == vec![expected; bytes],
                "{bytes} bytes that were not {expected}"
            );
        }
    }
    Ok(())
}

fn dropped_source(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let buffers: Vec<Lease<Buffer>> =
        (0..8).map(|_| runtime.alloc(100_000)).collect::<leasehold::Result<_>>()?;
    let hold = env.hold_runtime(runtime.stream())?;
    for (i, buffer) in buffers.iter().enumerate() {
        let source = Arc::new(vec![i as u8 + 1; 100_000]);
        runtime.stream().upload_owned(buffer.view(), source)?;
    }
    // Memory that the host allocator would return at once if the bytes were free.
    let noise: Vec<Vec<u8>> = (0..8).map(|_| vec![0xff; 100_000]).collect();
    hold.release()?;
    for (i, buffer) in buffers.iter().enumerate() {
        check!(
            runtime.to_vec::<u8>(buffer)?.iter().all(|&b| b == i as u8 + 1),
            "copy {i} read memory that was gone"
        );
    }
    drop(noise);
    Ok(())
}
