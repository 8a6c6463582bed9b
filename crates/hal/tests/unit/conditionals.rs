//! Loops and branches in plans: what they touch, what they may have, and the plans of their bodies.

use super::{EARLY, binding, pipeline};
use crate::kernel::Access;
use crate::{Conditional, ConditionalKind, Dispatch, Fill, HostCall, Op, OpList, Plan};
use leasehold_core::{Error, Name};

const FLAG: u64 = 0x1000;

fn fill(dst: u64, bytes: u64) -> Op<'static> {
    Op::Fill(Fill { dst, native: 0, bytes, pattern: 0, width: 4 })
}

fn list(ops: &[Op<'_>]) -> OpList {
    let mut all = OpList::new();
    for op in ops {
        all.push(op);
    }
    all
}

fn part(kind: ConditionalKind, ops: &[Op<'_>]) -> Result<Conditional, Error> {
    Conditional::new(kind, Some(Name::new("part")), binding(FLAG, 4, Access::Write), list(ops))
}

fn accesses(op: &Op<'_>) -> Vec<(u64, u64, Access)> {
    let mut all = Vec::new();
    op.for_each_access(|addr, len, access| all.push((addr, len, access)));
    all
}

#[test]
fn a_part_touches_its_flag_and_what_its_body_touches() {
    let inner = part(ConditionalKind::If, &[fill(0x2000, 8)]).unwrap();
    let outer = [fill(FLAG, 4), Op::Conditional(&inner)];
    let outer = part(ConditionalKind::While, &outer).unwrap();
    let (read, both) = (Access::Read, Access::ReadWrite);
    // A body may not run, so its writes may leave the former bytes.
    let expect = [(FLAG, 4, read), (FLAG, 4, both), (FLAG, 4, read), (0x2000, 8, both)];
    assert_eq!(accesses(&Op::Conditional(&outer)), expect);
    let whole = [fill(0x2000, 64), Op::Conditional(&outer), fill(0x2004, 4), fill(0x3000, 4)];
    let plan = Plan::new(list(&whole));
    assert_eq!(
        [0, 1, 2, 3].map(|i| plan.predecessors(i).to_vec()),
        [vec![], vec![0], vec![1], vec![]]
    );
    assert_eq!((plan.len(), plan.total()), (4, 7));
    assert!(plan.check().is_ok());
    assert_eq!(Op::Conditional(&outer).name(), "loop \"part\"");
}

#[test]
fn parts_that_cannot_be_are_refused() {
    let refused = |made: Result<Conditional, Error>| made.map(drop).unwrap_err().to_string();
    let flag = |addr, len| {
        let flag = binding(addr, len, Access::Read);
        refused(Conditional::new(ConditionalKind::If, None, flag, list(&[fill(FLAG, 4)])))
    };
    for (text, why) in [
        (flag(FLAG + 2, 4), "one u32"),
        (flag(FLAG, 8), "one u32"),
        (refused(part(ConditionalKind::If, &[])), "empty"),
        (refused(part(ConditionalKind::While, &[fill(FLAG + 4, 4)])), "never end"),
        (
            refused(part(
                ConditionalKind::While,
                &[fill(FLAG, 4), Op::Host(&HostCall::new("h", || Ok(())))],
            )),
            "host call",
        ),
    ] {
        assert!(text.contains(why), "{why} is not in: {text}");
    }
    // A loop whose flag is written by a branch alone may end.
    let inner = part(ConditionalKind::If, &[fill(FLAG, 4)]).unwrap();
    assert!(part(ConditionalKind::While, &[Op::Conditional(&inner)]).is_ok());
}

#[test]
fn a_body_is_planned_again_where_its_buffers_lie() {
    let body = [fill(FLAG, 4), fill(0x2000, 8), fill(0x3000, 8)];
    let outer = part(ConditionalKind::While, &body).unwrap();
    let mut ops = list(&[Op::Conditional(&outer)]);
    let of = |ops: &OpList| match ops.get(0) {
        Some(Op::Conditional(c)) => (*c).clone(),
        _ => unreachable!("the one operation"),
    };
    assert!((0..3).all(|i| of(&ops).body().predecessors(i).is_empty()));
    // Two of them get the same memory.
    ops.rebind(|addr| match addr {
        FLAG => Some((0x9000, 5)),
        _ => Some((0x8000, 6)),
    });
    let now = of(&ops);
    assert_eq!((now.flag().addr, now.flag().native), (0x9000, 5));
    assert_eq!(now.body().predecessors(2), [1]);
    assert!(now.check().is_ok());
}

#[test]
fn nothing_reads_early_what_a_body_writes() {
    let kernel = pipeline();
    let bindings = [0x2000, 0x4000, 0x3000].map(|addr| binding(addr, 4, Access::Read));
    let reader = Op::Dispatch(Dispatch {
        pipeline: &kernel,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        bindings: &bindings,
        params: &[],
    });
    let inner = part(ConditionalKind::If, &[fill(0x2000, 8), reader]).unwrap();
    let plan = Plan::new(list(&[reader, Op::Conditional(&inner), fill(0x3000, 4)]));
    assert_eq!(EARLY & 0b111, 0b101);
    assert_eq!(plan.early_reads(0), 0, "both are written by nodes of the plan");
    assert_eq!(inner.body().early_reads(1), 0b100, "one of them is written in the body");
}
