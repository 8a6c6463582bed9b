//! Cases of tensor maps in a launch's parameters, over a runtime.

use crate::case::{Case, Need, Outcome, check, check_eq, expect_error, skipped};
use crate::env::Env;
use crate::factory::{BoxAt, TestKernel};
use leasehold::graph::{GraphUpdate, NodeId};
use leasehold::kernel::{MapElement, TensorMap};
use leasehold::pool::{Contents, Pool, PoolKind};
use leasehold::{Access, Array, Error, Growing, KernelBase, Runtime, Stream, View};

const BOX: &[Need] = &[Need::Kernel(TestKernel::Box)];
const REPLAYED: &[Need] = &[Need::Kernel(TestKernel::Box), Need::Graphs];

const GROWING: &[Need] = &[Need::Kernel(TestKernel::LimitedBox), Need::Graphs];

pub(crate) const CASES: &[Case] = &[
    Case::runtime(253, "a box of a tensor is copied, with zeros out of bounds", BOX, boxes)
        .sanitizer(),
    Case::runtime(
        254,
        "a graph makes its tensor maps anew for other memory and parameters",
        REPLAYED,
        updated,
    )
    .sanitizer(),
    Case::runtime(255, "a map of memory that a graph lends is of the lent memory", REPLAYED, lent)
        .sanitizer(),
    Case::runtime(256, "a tensor map that is none never reaches the device", BOX, refused),
    Case::runtime(260, "a map of growing memory has the boxes below its end", GROWING, growing)
        .sanitizer(),
];

const COLUMNS: usize = 100;
const ROWS: usize = 30;
/// Numbers from a row to the next.
const PITCH: usize = 112;

fn map(columns: u32, rows: u32) -> TensorMap {
    TensorMap::new(MapElement::U32, &[COLUMNS as u64, ROWS as u64], &[columns, rows])
        .strides(&[PITCH as u64 * 4])
}

/// The numbers of a tensor, which count up from the first one.
fn numbers(first: u32) -> Vec<u32> {
    (first..).take(PITCH * ROWS).collect()
}

/// The numbers of a box of a tensor.
fn expected(all: &[u32], params: &BoxAt) -> Vec<u32> {
    let [columns, rows] = params.size.map(|n| n as i32);
    let element = |i: i32| {
        let (x, y) = (params.at[0] + i % columns, params.at[1] + i / columns);
        let inside = (0..COLUMNS as i32).contains(&x) && (0..ROWS as i32).contains(&y);
        if inside { all[y as usize * PITCH + x as usize] } else { 0 }
    };
    (0..columns * rows).map(element).collect()
}

/// The kernel on a runtime. A device without tensor maps skips the case.
fn kernel(env: &Env, runtime: &Runtime) -> Outcome<KernelBase> {
    prepared(env, runtime, TestKernel::Box)
}

fn prepared(env: &Env, runtime: &Runtime, kernel: TestKernel) -> Outcome<KernelBase> {
    let kernel = TestKernel::base(env.desc(kernel)?)?;
    match kernel.prepare(runtime) {
        Err(Error::Unsupported(why)) => skipped(why.into_owned()),
        made => Ok(made.map(|()| kernel)?),
    }
}

fn at(columns: u32, rows: u32, at: [i32; 2]) -> BoxAt {
    BoxAt { map: map(columns, rows), at, size: [columns, rows] }
}

fn copy(
    kernel: &KernelBase,
    stream: &Stream,
    (tensor, out): (&impl View, &Array<u32>),
    params: &BoxAt,
) -> leasehold::Result<()> {
    stream.launch(kernel, &[tensor.read(), out.write()], params, (1, TestKernel::BLOCK))
}

fn boxes(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let kernel = kernel(env, &runtime)?;
    let all = numbers(1);
    let tensor = runtime.upload(&all)?;
    let out = runtime.zeros::<u32>(BoxAt::ELEMENTS as usize)?;
    let places = [[0, 0], [16, 5], [-4, 2], [92, 28], [-64, -8], [104, 0], [i32::MIN, 1 << 30]];
    for (columns, rows) in [(4, 1), (64, 8), (256, 16), (16, 256), (8, 8)] {
        for place in places {
            let params = at(columns, rows, place);
            copy(&kernel, runtime.stream(), (&tensor, &out), &params)?;
            let found = runtime.to_vec(out.slice(..(columns * rows) as usize))?;
            check!(found == expected(&all, &params), "the box {columns}x{rows} at {place:?}");
        }
    }
    // A part of a buffer is a tensor too.
    let params = BoxAt { at: [4, 1], ..at(8, 4, [0, 0]) };
    let long = runtime.upload(&[&[0; 64][..], &all].concat())?;
    copy(&kernel, runtime.stream(), (&long.part(256..)?, &out), &params)?;
    let found = runtime.to_vec(out.slice(..32))?;
    check!(found == expected(&all, &params), "a box of a part");
    Ok(())
}

fn updated(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let kernel = kernel(env, &runtime)?;
    let (first, second) = (numbers(1), numbers(1_000_000));
    let tensors = [runtime.upload(&first)?, runtime.upload(&second)?];
    let out = runtime.zeros::<u32>(512)?;
    let params = at(64, 8, [72, 25]);
    let graph =
        runtime.record_graph(|r| copy(&kernel, r.stream(), (&tensors[0], &out), &params))?;
    let holds = |all: &[u32], params: &BoxAt, what: &str| -> Outcome {
        graph.launch()?;
        check!(runtime.to_vec(&out)? == expected(all, params), "{what}");
        Ok(())
    };
    holds(&first, &params, "the recorded box")?;
    let swap = GraphUpdate::new().buffer(tensors[0].buffer(), tensors[1].buffer());
    let _ = graph.update(&swap)?;
    holds(&second, &params, "the box of another tensor")?;
    let other = at(64, 8, [4, 4]);
    let _ = graph.update(&GraphUpdate::new().params(NodeId::new(0), &other))?;
    holds(&second, &other, "another box")?;
    let beyond = BoxAt { map: map(64, 8).strides(&[1 << 20]), ..other };
    let update = graph.update(&GraphUpdate::new().params(NodeId::new(0), &beyond));
    expect_error(update, "InvalidArgument", "an update by a map beyond its operand")?;
    holds(&second, &other, "the box after a refused update")?;
    [PoolKind::Suspendable, PoolKind::Shareable]
        .into_iter()
        .try_for_each(|kind| pooled(&runtime, &kernel, kind))
}

/// Maps of a pool's memory. While it is away their launches are refused, and later they are right.
fn pooled(runtime: &Runtime, kernel: &KernelBase, kind: PoolKind) -> Outcome {
    let pool = match Pool::new(runtime, "tensors", kind) {
        Err(Error::Unsupported(_)) => return Ok(()),
        pool => pool?,
    };
    let all = numbers(3);
    let tensor = pool.alloc(all.len() as u64 * 4)?;
    let (stream, out) = (runtime.stream(), runtime.zeros::<u32>(512)?);
    stream.upload(tensor.view(), &all)?;
    let params = at(64, 8, [20, 20]);
    let eager = || copy(kernel, stream, (&tensor, &out), &params);
    let graph = runtime.record_graph(|r| copy(kernel, r.stream(), (&tensor, &out), &params))?;
    for round in 0..3 {
        if kind == PoolKind::Suspendable {
            pool.suspend(Contents::Keep)?;
            expect_error(eager(), "Suspended", "a box of memory that is away")?;
            expect_error(graph.launch(), "Suspended", "a graph's box of memory that is away")?;
            pool.resume()?;
        }
        for replayed in [false, true] {
            stream.fill(out.view(), 0u32)?;
            if replayed { graph.launch().map(drop) } else { eager() }?;
            let found = runtime.to_vec(&out)? == expected(&all, &params);
            check!(found, "{kind:?}, round {round}, replayed {replayed}");
        }
    }
    Ok(())
}

fn lent(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let kernel = kernel(env, &runtime)?;
    let all = numbers(7);
    let (tensor, out) = (runtime.upload(&all)?, runtime.zeros::<u32>(512)?);
    let params = at(64, 8, [52, 20]);
    let graph = runtime.record_graph(|r| {
        let temporary = r.alloc_array::<u32>(PITCH * ROWS)?;
        r.stream().copy(temporary.view(), tensor.view())?;
        copy(&kernel, r.stream(), (&temporary, &out), &params)
    })?;
    for launch in 0..3 {
        graph.launch()?;
        check!(runtime.to_vec(&out)? == expected(&all, &params), "launch {launch}");
    }
    Ok(())
}

fn refused(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let kernel = kernel(env, &runtime)?;
    let tensor = runtime.upload(&numbers(1))?;
    let out = runtime.zeros::<u32>(512)?;
    let good = at(64, 8, [0, 0]);
    let before = runtime.stream().now();
    for (map, what) in [
        (map(64, 8).strides(&[PITCH as u64 * 8]), "a tensor that is longer than its operand"),
        (map(64, 8).strides(&[404]), "a stride that is no multiple of 16"),
        (map(64, 8).steps(&[1, 9]), "a step above 8"),
        (TensorMap::new(MapElement::U32, &[8; 6], &[8; 6]), "six dimensions"),
        (bytemuck::Zeroable::zeroed(), "no map"),
    ] {
        let params = BoxAt { map, ..good };
        let launch = copy(&kernel, runtime.stream(), (&tensor, &out), &params);
        expect_error(launch, "InvalidArgument", what)?;
    }
    let odd = tensor.part(8..)?;
    let short = BoxAt { map: TensorMap::new(MapElement::U32, &[64, 8], &[64, 8]), ..good };
    let launch = copy(&kernel, runtime.stream(), (&odd, &out), &short);
    expect_error(launch, "InvalidArgument", "a misaligned operand")?;
    check_eq!(runtime.stream().now(), before, "the stream's end after refused launches");
    copy(&kernel, runtime.stream(), (&tensor, &out), &good)?;
    check_eq!(runtime.to_vec(&out)?[..2], [1, 2], "a box after refused ones");
    Ok(())
}

fn growing(env: &Env) -> Outcome {
    const WIDTH: usize = 256;
    const MOST: usize = 4096;
    let runtime = env.runtime()?;
    let kernel = prepared(env, &runtime, TestKernel::LimitedBox)?;
    let cache = Growing::<u32>::new(&runtime, MOST * WIDTH)?;
    let out = [runtime.zeros::<u32>(8 * WIDTH)?, runtime.zeros::<u32>(8 * WIDTH)?];
    // The map is of all rows that the memory may have.
    let map = TensorMap::new(MapElement::U32, &[WIDTH as u64, MOST as u64], &[WIDTH as u32, 8]);
    let copy = |stream: &Stream, out: &Array<u32>, row: usize| {
        let params = BoxAt { map, at: [0, row as i32], size: [WIDTH as u32, 8] };
        let operands = [cache.reservation(Access::Read), cache.limit(), out.write()];
        stream.launch(&kernel, &operands, &params, (1, TestKernel::BLOCK))
    };
    let graph = runtime.record_graph(|r| copy(r.stream(), &out[0], 2000))?;
    let values = |from: usize, to: usize| -> Vec<u32> { (from as u32..to as u32).collect() };
    for rows in [0, 2000, 2007, 2008, 4096, 2008, 9] {
        let before = cache.len();
        match rows * WIDTH {
            len if len < before => cache.shrink(runtime.stream(), len)?,
            len => {
                cache.grow(runtime.stream(), len)?;
                if len > before {
                    runtime.stream().upload(cache.slice(before..).view(), &values(before, len))?;
                }
            }
        }
        graph.launch()?;
        let eager = rows.saturating_sub(8);
        copy(runtime.stream(), &out[1], eager)?;
        for (out, row) in std::iter::zip(&out, [2000, eager]) {
            let is_there = row + 8 <= rows;
            let wanted = values(row * WIDTH, (row + 8) * WIDTH);
            let wanted = if is_there { wanted } else { vec![0; 8 * WIDTH] };
            check!(runtime.to_vec(out)? == wanted, "row {row} of {rows}");
        }
    }
    Ok(())
}
