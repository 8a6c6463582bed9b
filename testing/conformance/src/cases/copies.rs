//! Several copies of one operation.

use crate::case::{Case, Need, Outcome, check, check_eq, expect_error, skipped};
use crate::cases::streams::fill;
use crate::env::{Env, direct, leasehold_on};
use leasehold::backend::{Copies, Copy1d, MemoryKind, Op, OpList, Plan};
use leasehold::{Buffer, BufferView, Context, Error, Layout, Lease, View};

pub(crate) const CASES: &[Case] = &[
    Case::hal(217, "pieces of one operation arrive at every length and alignment", &[], pieces)
        .sanitizer(),
    Case::hal(218, "a plan with several copies in one node is refused", &[Need::Graphs], plan),
    Case::runtime(219, "copies of one call that meet or do not fit are refused", &[], refused)
        .sanitizer(),
    Case::runtime(
        220,
        "copies of one call have one place in the order of all streams",
        &[Need::Hold],
        order,
    )
    .sanitizer(),
    Case::runtime(
        221,
        "copies of one call read host memory after its last write",
        &[Need::Hold],
        written_late,
    )
    .sanitizer(),
    Case::runtime(
        222,
        "a graph's copies of one call are the eager ones",
        &[Need::Graphs],
        replayed,
    )
    .sanitizer(),
    Case::runtime(223, "copies of one call reach another device", &[], peers),
];

/// Bytes that tell each place from its neighbours.
fn bytes(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 11) as u8)
        .collect()
}

/// More pieces than a driver is given at once, with destinations that do not ascend.
const MANY: usize = 1500;
/// Bytes of a piece's place.
const PLACE: usize = 48;

/// The piece in the `i`-th place of the destination: the source's place, its shift in both places,
/// and its bytes.
fn shape(i: usize) -> (usize, [usize; 2], usize) {
    (i * 7 % MANY, [i % 5, i % 3], i % 40)
}

fn pieces(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let len = MANY * PLACE;
    let host = env.device().memory(MemoryKind::Pinned)?;
    let pinned = host.alloc(Layout::new(len as u64), leasehold_on(&stream))?;
    let (one, two) = (env.buffer(&stream, len as u64)?, env.buffer(&stream, len as u64)?);
    let first = bytes(len, 1);
    env.write(&stream, &one, &first)?;
    let mut source = first;
    for (from, to) in [(&one, &two), (&two, &pinned), (&pinned, &one)] {
        // From the last place to the first: a piece of no bytes is among them.
        let list: Vec<Copy1d> = (0..MANY)
            .rev()
            .map(|i| {
                let (at, [src, dst], bytes) = shape(i);
                Copy1d {
                    src: from.addr() + (at * PLACE + src) as u64,
                    src_native: from.native(),
                    dst: to.addr() + (i * PLACE + dst) as u64,
                    dst_native: to.native(),
                    bytes: bytes as u64,
                }
            })
            .collect();
        let clear = match from.same(&two) {
            // Fills are for device memory.
            true => copy_of(&two, &pinned),
            false => fill(to, 0xee, 1),
        };
        let before = if from.same(&two) { source.clone() } else { vec![0xee; len] };
        let last = stream.timeline().submitted();
        let value = direct(&stream, &[clear, Op::Copies(Copies::new(&list)?)])?;
        check_eq!(value, last + 1, "the value of a submission with {MANY} pieces");
        let mut expected = before;
        for i in 0..MANY {
            let (at, [src, dst], bytes) = shape(i);
            let from = &source[at * PLACE + src..][..bytes];
            expected[i * PLACE + dst..][..bytes].copy_from_slice(from);
        }
        if to.same(&pinned) {
            env.wait(&stream, value)?;
            // SAFETY: pinned memory is host memory at its address, and the copies are over.
            let got = unsafe { std::slice::from_raw_parts(pinned.addr() as *const u8, len) };
            check!(got == expected, "what {MANY} pieces brought to host memory");
        } else {
            check!(env.read(&stream, to)? == expected, "what {MANY} pieces brought");
        }
        source = expected;
    }
    let nothing = direct(&stream, &[Op::Copies(Copies::new(&[])?)])?;
    env.wait(&stream, nothing)
}

/// A plain copy of a whole buffer.
fn copy_of(from: &Lease<Buffer>, to: &Lease<Buffer>) -> Op<'static> {
    let piece = Copy1d {
        src: from.addr(),
        src_native: from.native(),
        dst: to.addr(),
        dst_native: to.native(),
        bytes: from.len(),
    };
    Op::Copy(piece.alone())
}

fn plan(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let (from, to) = (env.buffer(&stream, 64)?, env.buffer(&stream, 64)?);
    let Op::Copy(whole) = copy_of(&from, &to) else { return Ok(()) };
    let piece = Copy1d {
        src: whole.src,
        src_native: whole.src_native,
        dst: whole.dst,
        dst_native: whole.dst_native,
        bytes: 32,
    };
    let mut ops = OpList::new();
    ops.push(&Op::Copies(Copies::new(&[piece])?));
    // SAFETY: the plan's buffers live until the end of this function, and no graph comes of it.
    let made = unsafe { env.device().instantiate(Plan::new(ops)) };
    expect_error(made.map(drop), "Unsupported", "a node with several copies").map(drop)
}

/// The pieces of a copy of `from` to `to` that reverses the order of places of 16 bytes.
fn reversed<'a>(
    from: &'a Lease<Buffer>,
    to: &'a Lease<Buffer>,
) -> Result<Vec<(BufferView<'a>, BufferView<'a>)>, Error> {
    let len = from.len() as usize;
    (0..len / 16)
        .map(|i| Ok((to.part(len - 16 * (i + 1)..len - 16 * i)?, from.part(16 * i..16 * (i + 1))?)))
        .collect()
}

/// The bytes that [`reversed`] makes of bytes.
fn expected(source: &[u8]) -> Vec<u8> {
    source.chunks(16).rev().flatten().copied().collect()
}

fn refused(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let stream = runtime.stream();
    let source = bytes(64, 3);
    let (from, to) = (runtime.upload(&source)?.into_buffer(), runtime.alloc(64)?);
    stream.fill(to.view(), 7u8)?;
    let part = |buffer: &'static str, at: usize, len: usize| (buffer, at..at + len);
    let cases = [
        ([part("to", 0, 8), part("from", 0, 8)], [part("to", 4, 8), part("from", 8, 8)], "0 and 1"),
        (
            [part("to", 0, 8), part("from", 0, 8)],
            [part("from", 7, 8), part("from", 20, 8)],
            "0 and 1",
        ),
        (
            [part("from", 40, 8), part("from", 0, 8)],
            [part("to", 0, 8), part("from", 47, 8)],
            "0 and 1",
        ),
        ([part("to", 0, 8), part("from", 0, 8)], [part("to", 30, 8), part("to", 37, 8)], "piece 1"),
        ([part("to", 0, 8), part("from", 0, 8)], [part("to", 8, 8), part("from", 8, 9)], "piece 1"),
    ];
    let before = stream.now();
    for (first, second, named) in cases {
        let view = |(buffer, range): &(&str, std::ops::Range<usize>)| match *buffer {
            "to" => to.part(range.clone()),
            _ => from.part(range.clone()),
        };
        let pieces = [(view(&first[0])?, view(&first[1])?), (view(&second[0])?, view(&second[1])?)];
        let error = expect_error(
            stream.copy_batch(&pieces),
            "InvalidArgument",
            "copies of one call that meet or do not fit",
        )?;
        check!(error.to_string().contains(named), "{error} does not name {named}");
    }
    stream.copy_batch(&[])?;
    stream.copy_batch(&[(to.part(3..3)?, from.part(9..9)?)])?;
    check_eq!(stream.now(), before, "the stream's end after calls that submit nothing");
    check!(from.part(60..65).is_err(), "a part beyond its buffer");
    check_eq!(runtime.to_vec::<u8>(&to)?, vec![7; 64], "what refused calls left");
    // Two pieces may read the same bytes.
    let twice = from.part(..8)?;
    stream.copy_batch(&[(to.part(8..16)?, twice), (to.part(..8)?, twice)])?;
    check_eq!(
        runtime.to_vec::<u8>(&to)?[..16],
        [&source[..8]; 2].concat()[..],
        "a part read twice"
    );
    Ok(())
}

fn order(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let (one, two) = (runtime.create_stream()?, runtime.create_stream()?);
    let source = bytes(4096, 5);
    let (from, to) = (runtime.alloc(4096)?, runtime.alloc(4096)?);
    one.fill(from.view(), 1u8)?;
    two.fill(to.view(), 2u8)?;
    runtime.synchronize()?;
    let hold = env.hold_running(one.raw())?;
    one.upload(from.view(), &source)?;
    let before = two.now().value();
    two.copy_batch(&reversed(&from, &to)?)?;
    check_eq!(two.now().value(), before + 1, "one call has one timepoint");
    // Later writes of the sources and the destinations come after all pieces.
    one.fill(from.view(), 9u8)?;
    let copied = runtime.alloc(4096)?;
    two.copy(copied.view(), to.view())?;
    one.fill(to.view(), 8u8)?;
    hold.release_late(env)?;
    check!(runtime.to_vec::<u8>(&copied)? == expected(&source), "what came after the upload");
    check!(runtime.to_vec::<u8>(&to)? == [8; 4096], "what was written after the copies");
    Ok(())
}

fn written_late(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let (one, two) = (runtime.create_stream()?, runtime.create_stream()?);
    let source = bytes(4096, 6);
    let from = runtime.upload(&source)?.into_buffer();
    let old = runtime.zeros::<u8>(4096)?.into_buffer();
    let (host, to) = (runtime.alloc_pinned(4096)?, runtime.alloc(4096)?);
    // The host memory is written by the same stream, by another one, and by nobody any more.
    for (writer, reader) in [(&one, &one), (&one, &two), (&two, &one)] {
        runtime.stream().copy(host.view(), old.view())?;
        runtime.synchronize()?;
        let hold = env.hold_runtime(writer)?;
        writer.copy(host.view(), from.view())?;
        reader.copy_batch(&reversed(&host, &to)?)?;
        hold.release_late(env)?;
        check!(
            runtime.to_vec::<u8>(&to)? == expected(&source),
            "host memory that was written late"
        );
        runtime.stream().fill(to.view(), 0u8)?;
        runtime.synchronize()?;
        reader.copy_batch(&reversed(&host, &to)?)?;
        // A later write of the source does not reach the copies.
        writer.copy(host.view(), old.view())?;
        check!(runtime.to_vec::<u8>(&to)? == expected(&source), "host memory that is settled");
    }
    Ok(())
}

fn replayed(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let source = bytes(1024, 8);
    let (from, to) = (runtime.upload(&source)?.into_buffer(), runtime.alloc(1024)?);
    let graph = runtime.record_graph(|r| {
        let between = r.alloc(1024)?;
        r.stream().copy_batch(&reversed(&from, &between)?)?;
        r.stream().copy_batch(&reversed(&between, &to)?)
    })?;
    for _ in 0..2 {
        runtime.stream().fill(to.view(), 0u8)?;
        graph.launch()?;
        check!(runtime.to_vec::<u8>(&to)? == source, "what two recorded calls brought");
    }
    let refused = runtime.record_graph(|r| {
        r.stream()
            .copy_batch(&[(to.part(..8)?, from.part(..8)?), (to.part(4..12)?, from.part(..8)?)])
    });
    expect_error(refused.map(drop), "InvalidArgument", "recorded copies that meet").map(drop)
}

fn peers(env: &Env) -> Outcome {
    let other = env.other()?;
    let id = other.device.info().id;
    if id == env.id() {
        return skipped(format!("both backends have a {id}"));
    }
    let mut backends = vec![env.backend().clone()];
    if !other.same_backend {
        backends.push(other.backend.clone());
    }
    let context = Context::with_backends(backends);
    let (ours, theirs) = (env.runtime_of(&context, env.id())?, env.runtime_of(&context, id)?);
    let source = bytes(2048, 9);
    for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
        let (src, dst) = (from.upload(&source)?.into_buffer(), to.alloc(2048)?);
        from.synchronize()?;
        let copied = ours.stream().copy_batch(&reversed(&src, &dst)?);
        if other.same_backend {
            copied?;
            check!(to.to_vec::<u8>(&dst)? == expected(&source), "what came to {}", to.device());
        } else {
            let error = expect_error(copied, "Unsupported", "copies of one call between backends")?;
            check!(error.to_string().contains("piece 0"), "{error} names no piece");
        }
    }
    Ok(())
}
