//! The operation list against a vector of owned operations.

use super::{binding, pipeline};
use crate::kernel::{Access, Binding, Pipeline};
use crate::op::KeepAlive;
use crate::{
    Copies, Copy1d, Copy2d, Dispatch, Download, Fill, ForeignCall, HostCall, Op, OpList, Upload,
};
use leasehold_core::{Lease, TimelineOwner};
use proptest::prelude::*;
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq)]
enum Model {
    Wait(u64),
    Dispatch { grid: [u32; 3], bindings: Vec<Binding>, params: Vec<u8> },
    Copy(Copy2d),
    Copies(Vec<Copy1d>),
    Fill(Fill),
    Upload(usize, u64, u64, bool),
    Download(u64, usize, u64, bool),
    Foreign(Vec<Binding>),
    Host,
}

#[derive(Debug, Clone)]
enum Step {
    Push(Model),
    Truncate(usize),
    /// Keeps the operations whose index is not a multiple of the number.
    Retain(usize),
    Patch(usize, Option<Vec<Binding>>, Option<Vec<u8>>, Option<[u32; 3]>),
    /// Addresses with this remainder by 3 move up by 1,000.
    Rebind(u64),
    Clear,
}

fn bindings() -> impl Strategy<Value = Vec<Binding>> {
    prop::collection::vec(
        (0u64..100, 0u64..100).prop_map(|(a, l)| binding(a, l, Access::ReadWrite)),
        0..4,
    )
}

fn model() -> impl Strategy<Value = Model> {
    let dispatch = (any::<[u32; 3]>(), bindings(), prop::collection::vec(any::<u8>(), 0..6))
        .prop_map(|(grid, bindings, params)| Model::Dispatch { grid, bindings, params });
    let copy = (0u64..100, 0u64..100, 0u64..9)
        .prop_map(|(s, d, n)| Model::Copy(Copy2d::linear((s, 0), (d, 0), n)));
    // Sources lie below the destinations, which ascend.
    let copies = prop::collection::vec((0u64..99, 1u64..9), 0..4).prop_map(|pieces| {
        let piece = |(i, (src, bytes)): (u64, (u64, u64))| Copy1d {
            src,
            src_native: 0,
            dst: 200 + 10 * i,
            dst_native: 0,
            bytes,
        };
        Model::Copies((0..).zip(pieces).map(piece).collect())
    });
    let fill = (0u64..100)
        .prop_map(|dst| Model::Fill(Fill { dst, native: 0, bytes: 4, pattern: 7, width: 4 }));
    prop_oneof![
        1 => (0u64..9).prop_map(Model::Wait),
        5 => dispatch,
        1 => copy,
        1 => copies,
        1 => fill,
        1 => (1usize..99, 0u64..100, 0u64..9, any::<bool>()).prop_map(|(s, d, n, k)| Model::Upload(s, d, n, k)),
        1 => (0u64..100, 1usize..99, 0u64..9, any::<bool>()).prop_map(|(s, d, n, k)| Model::Download(s, d, n, k)),
        1 => bindings().prop_map(Model::Foreign),
        1 => Just(Model::Host),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let patch = (
        0usize..20,
        prop::option::of(bindings()),
        prop::option::of(prop::collection::vec(any::<u8>(), 0..6)),
        prop::option::of(any::<[u32; 3]>()),
    );
    prop_oneof![
        12 => model().prop_map(Step::Push),
        1 => (0usize..20).prop_map(Step::Truncate),
        1 => (1usize..5).prop_map(Step::Retain),
        4 => patch.prop_map(|(i, b, p, g)| Step::Patch(i, b, p, g)),
        1 => (0u64..3).prop_map(Step::Rebind),
        1 => Just(Step::Clear),
    ]
}

struct Objects {
    timeline: TimelineOwner,
    kernel: Lease<Pipeline>,
    keep: KeepAlive,
}

fn push(ops: &mut OpList, m: &Model, o: &Objects) -> usize {
    let keep = |k: bool| k.then_some(&o.keep);
    match m {
        Model::Wait(v) => ops.push(&Op::Wait(o.timeline.timeline().at(*v))),
        Model::Dispatch { grid, bindings, params } => ops.push(&Op::Dispatch(Dispatch {
            pipeline: &o.kernel,
            grid: *grid,
            block: [1; 3],
            shared: 9,
            bindings,
            params,
        })),
        Model::Copy(c) => ops.push(&Op::Copy(*c)),
        Model::Copies(pieces) => ops.push(&Op::Copies(Copies::new(pieces).unwrap())),
        Model::Fill(f) => ops.push(&Op::Fill(*f)),
        Model::Upload(s, d, n, k) => ops.push(&Op::Upload(Upload {
            src: *s as *const u8,
            dst: *d,
            native: 0,
            bytes: *n,
            keep: keep(*k),
        })),
        Model::Download(s, d, n, k) => ops.push(&Op::Download(Download {
            src: *s,
            native: 0,
            dst: *d as *mut u8,
            bytes: *n,
            keep: keep(*k),
        })),
        Model::Foreign(b) => ops.push(&Op::Foreign(&ForeignCall::new("f", b.clone(), |_| Ok(())))),
        Model::Host => ops.push(&Op::Host(&HostCall::new("h", || Ok(())))),
    }
}

fn read(op: &Op<'_>, o: &Objects) -> Model {
    match op {
        Op::Wait(p) => Model::Wait(p.value()),
        Op::Dispatch(d) => {
            assert!(d.pipeline.same(&o.kernel) && d.block == [1; 3] && d.shared == 9);
            Model::Dispatch {
                grid: d.grid,
                bindings: d.bindings.to_vec(),
                params: d.params.to_vec(),
            }
        }
        Op::Copy(c) => Model::Copy(*c),
        Op::Copies(c) => Model::Copies(c.pieces().to_vec()),
        Op::Fill(f) => Model::Fill(*f),
        Op::Upload(u) => Model::Upload(u.src as usize, u.dst, u.bytes, u.keep.is_some()),
        Op::Download(d) => Model::Download(d.src, d.dst as usize, d.bytes, d.keep.is_some()),
        Op::Foreign(f) => Model::Foreign(f.accesses.to_vec()),
        Op::Host(_) => Model::Host,
        Op::WriteTimestamp(_) | Op::Graph(_) | Op::Conditional(_) => {
            unreachable!("the model makes none")
        }
    }
}

fn rebind(m: &mut Model, remainder: u64) {
    let swap = |a: &mut u64, n: &mut u64| {
        if *a % 3 == remainder {
            *a += 1000;
            *n = 5;
        }
    };
    match m {
        Model::Dispatch { bindings, .. } | Model::Foreign(bindings) => {
            bindings.iter_mut().for_each(|b| swap(&mut b.addr, &mut b.native));
        }
        Model::Copy(c) => {
            swap(&mut c.src, &mut c.src_native);
            swap(&mut c.dst, &mut c.dst_native);
        }
        Model::Copies(pieces) => pieces.iter_mut().for_each(|piece| {
            swap(&mut piece.src, &mut piece.src_native);
            swap(&mut piece.dst, &mut piece.dst_native);
        }),
        Model::Fill(f) => swap(&mut f.dst, &mut f.native),
        Model::Upload(_, d, _, _) => swap(d, &mut 0),
        Model::Download(s, _, _, _) => swap(s, &mut 0),
        Model::Wait(_) | Model::Host => {}
    }
}

/// Applies a patch to the model; `false` if the list must refuse it.
fn patch(
    m: Option<&mut Model>,
    b: &Option<Vec<Binding>>,
    p: &Option<Vec<u8>>,
    g: Option<[u32; 3]>,
) -> bool {
    let Some(Model::Dispatch { grid, bindings, params }) = m else { return false };
    if b.as_ref().is_some_and(|b| b.len() != bindings.len())
        || p.as_ref().is_some_and(|p| p.len() != params.len())
    {
        return false;
    }
    *bindings = b.clone().unwrap_or(bindings.clone());
    *params = p.clone().unwrap_or(params.clone());
    *grid = g.unwrap_or(*grid);
    true
}

proptest! {
    #[test]
    fn list_and_model_agree(steps in prop::collection::vec(step(), 0..40)) {
        let objects = Objects { timeline: TimelineOwner::take().unwrap(), kernel: pipeline(), keep: Arc::new(()) };
        let (mut ops, mut model) = (OpList::new(), Vec::<Model>::new());
        for s in steps {
            match s {
                Step::Push(m) => {
                    prop_assert_eq!(push(&mut ops, &m, &objects), model.len());
                    model.push(m);
                }
                Step::Truncate(n) => {
                    ops.truncate(n);
                    model.truncate(n);
                }
                Step::Retain(n) => {
                    ops.retain(|i| i % n != 0);
                    let mut i = 0;
                    model.retain(|_| {
                        i += 1;
                        (i - 1) % n != 0
                    });
                }
                Step::Patch(i, b, p, g) => {
                    let done = ops.patch(i, b.as_deref(), p.as_deref(), g).is_ok();
                    prop_assert_eq!(done, patch(model.get_mut(i), &b, &p, g));
                }
                Step::Rebind(r) => {
                    ops.rebind(|a| (a % 3 == r).then_some((a + 1000, 5)));
                    model.iter_mut().for_each(|m| rebind(m, r));
                }
                Step::Clear => {
                    ops.clear();
                    model.clear();
                }
            }
            prop_assert_eq!(ops.len(), model.len());
            prop_assert_eq!(ops.is_empty(), model.is_empty());
            let read_back: Vec<_> = ops.iter().map(|op| read(&op, &objects)).collect();
            prop_assert_eq!(&read_back, &model);
            prop_assert!(ops.get(model.len()).is_none());
        }
        drop(ops);
        prop_assert_eq!(Arc::strong_count(&objects.keep), 1);
        prop_assert_eq!(objects.kernel.strong_count(), 1);
    }
}

/// Regression: `retain` kept the bindings and parameters of dropped operations in the list for
/// ever.
#[test]
fn retain_gives_up_the_parts_of_what_goes() {
    let kernel = pipeline();
    let bindings = [binding(1, 1, Access::Read); 20];
    let mut ops = OpList::new();
    for round in 0..200 {
        for _ in 0..10 {
            ops.push(&Op::Dispatch(Dispatch {
                pipeline: &kernel,
                grid: [1; 3],
                block: [1; 3],
                shared: 0,
                bindings: &bindings,
                params: &[0; 40],
            }));
        }
        ops.retain(|i| i == 0);
        assert_eq!(ops.len(), 1, "round {round}");
    }
    assert!(ops.bytes() < 64 << 10, "{} bytes for one operation", ops.bytes());
}
