//! The tracker and the plan against a model that compares every byte of every pair of operations.

use super::{EARLY, binding, pipeline};
use crate::hazard::Tracker;
use crate::kernel::{Access, Binding};
use crate::{Dispatch, HostCall, Op, OpList, Plan};
use proptest::prelude::*;
use std::time::{Duration, Instant};

/// An operation of the model: the ranges that it accesses, or a barrier.
#[derive(Debug, Clone)]
enum Node {
    Touches(Vec<Binding>),
    Barrier,
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![Just(Access::Read), Just(Access::Write), Just(Access::ReadWrite)]
}

fn touches() -> impl Strategy<Value = Vec<Binding>> {
    let range = (0u64..40, 0u64..14, access()).prop_map(|(addr, len, a)| binding(addr, len, a));
    prop::collection::vec(range, 0..4)
}

fn nodes() -> impl Strategy<Value = Vec<Node>> {
    let node = prop_oneof![12 => touches().prop_map(Node::Touches), 1 => Just(Node::Barrier)];
    prop::collection::vec(node, 0..24)
}

/// Returns whether both access a byte that one of them writes.
fn conflict(a: &[Binding], b: &[Binding]) -> bool {
    let hits = |a: &Binding, b: &Binding| {
        (a.addr..a.addr + a.len).any(|byte| (b.addr..b.addr + b.len).contains(&byte))
            && (a.access.writes() || b.access.writes())
    };
    a.iter().any(|x| b.iter().any(|y| hits(x, y)))
}

/// `before[j][i]`: says whether `i` comes before `j`, directly or indirectly.
fn closure(n: usize, direct: impl Fn(usize, usize) -> bool) -> Vec<Vec<bool>> {
    let mut before = vec![vec![false; n]; n];
    for j in 0..n {
        for i in (0..j).rev() {
            if before[j][i] || direct(i, j) {
                before[j][i] = true;
                let (lower, upper) = before.split_at_mut(j);
                upper[0].iter_mut().zip(&lower[i]).for_each(|(j, i)| *j |= i);
            }
        }
    }
    before
}

fn list(nodes: &[Node]) -> OpList {
    let mut ops = OpList::new();
    let (kernel, host) = (pipeline(), HostCall::new("barrier", || Ok(())));
    for node in nodes {
        match node {
            Node::Touches(bindings) => ops.push(&Op::Dispatch(Dispatch {
                pipeline: &kernel,
                grid: [1; 3],
                block: [1; 3],
                shared: 0,
                bindings,
                params: &[],
            })),
            Node::Barrier => ops.push(&Op::Host(&host)),
        };
    }
    ops
}

proptest! {
    #[test]
    fn bindings_overlap_where_they_share_a_byte(a in touches(), b in touches()) {
        for (x, y) in a.iter().flat_map(|x| b.iter().map(move |y| (x, y))) {
            let shared = (x.addr..x.addr + x.len).any(|byte| (y.addr..y.addr + y.len).contains(&byte));
            prop_assert_eq!(x.overlaps(y), shared, "{:?} and {:?}", x, y);
        }
    }

    #[test]
    fn tracker_and_bytes_agree(nodes in prop::collection::vec(touches(), 0..24)) {
        let mut tracker = Tracker::new();
        let mut edges = vec![Vec::new(); nodes.len()];
        for (j, ranges) in nodes.iter().enumerate() {
            for r in ranges {
                tracker.access(j as u32, r.addr, r.len, r.access, |i| edges[j].push(i as usize));
            }
            for &i in &edges[j] {
                prop_assert!(i < j && conflict(&nodes[i], &nodes[j]), "{} before {} for nothing", i, j);
            }
        }
        let naive = closure(nodes.len(), |i, j| conflict(&nodes[i], &nodes[j]));
        prop_assert_eq!(closure(nodes.len(), |i, j| edges[j].contains(&i)), naive);
    }

    #[test]
    fn plan_and_bytes_agree(nodes in nodes()) {
        let direct = |i: usize, j: usize| match (&nodes[i], &nodes[j]) {
            (Node::Touches(a), Node::Touches(b)) => conflict(a, b),
            _ => true,
        };
        let naive = closure(nodes.len(), direct);
        let plan = Plan::new(list(&nodes));
        prop_assert_eq!(plan.pred_at.len(), nodes.len() + 1);
        let edge = |i: usize, j: usize| plan.predecessors(j).contains(&(i as u32));
        prop_assert_eq!(closure(nodes.len(), edge), naive.clone());
        // No edge follows from others: the lists are short enough for the search to find every
        // indirect path.
        for j in 0..nodes.len() {
            for &i in plan.predecessors(j) {
                let i = i as usize;
                let detour = plan.predecessors(j).iter().any(|&k| naive[k as usize][i]);
                prop_assert!(i < j && !detour, "edge {} to {} is redundant or backwards", i, j);
            }
        }
        let undeclared = nodes.iter().any(|n| matches!(n, Node::Barrier));
        let written = |b: &Binding| nodes.iter().any(|n| match n {
            Node::Touches(all) => all.iter().any(|w| w.access.writes() && w.overlaps(b)),
            Node::Barrier => false,
        });
        for (i, node) in nodes.iter().enumerate() {
            let granted = match node {
                Node::Touches(all) if !undeclared => {
                    let free = all.iter().enumerate().filter(|(_, b)| !written(b));
                    free.fold(0, |bits, (i, _)| bits | 1 << i) & EARLY
                }
                _ => 0,
            };
            prop_assert_eq!(plan.early_reads(i), granted, "node {}", i);
        }
        let chain = (1..nodes.len()).all(|j| naive[j][j - 1]);
        prop_assert_eq!(plan.is_chain(), chain);
    }
}

#[test]
fn a_range_at_the_end_of_the_address_space_is_cut_there() {
    let mut tracker = Tracker::new();
    tracker.access(0, u64::MAX - 4, 100, Access::Write, |_| panic!("nothing came before"));
    let mut deps = Vec::new();
    tracker.access(1, u64::MAX - 1, 1, Access::Read, |d| deps.push(d));
    tracker.access(1, 0, 90, Access::Write, |d| deps.push(d));
    assert_eq!(deps, [0]);
    tracker.access(2, 5, 0, Access::Write, |_| panic!("no bytes, no hazard"));
}

/// Regression: leaves and redundant edges were searched linearly, which took seconds for wide
/// lists.
#[test]
fn plans_of_4096_nodes_of_every_shape_take_milliseconds() {
    const N: u64 = 4096;
    let one =
        |f: &dyn Fn(u64) -> Vec<Binding>| (0..N).map(|i| Node::Touches(f(i))).collect::<Vec<_>>();
    let (r, w, rw) = (Access::Read, Access::Write, Access::ReadWrite);
    let shapes: [(&str, Vec<Node>, usize); 6] = [
        ("independent", one(&|i| vec![binding(1 + i * 16, 16, w)]), 0),
        ("chain", one(&|_| vec![binding(16, 64, rw)]), 4095),
        (
            "readers of one, then one writer, in turn",
            one(&|i| vec![binding(16, 64, if i % 64 == 63 { w } else { r })]),
            63 + 63 * 126,
        ),
        (
            "fan in",
            one(&|i| {
                if i == N - 1 {
                    vec![binding(1, N * 16, r)]
                } else {
                    vec![binding(1 + i * 16, 16, w)]
                }
            }),
            4095,
        ),
        (
            "one write over many pieces, again and again",
            one(&|i| {
                if i < N / 2 {
                    vec![binding(1 + i * 16, 16, w)]
                } else {
                    vec![binding(1, N * 8, w)]
                }
            }),
            4095,
        ),
        (
            "many barriers",
            (0..N)
                .map(|i| {
                    if i % 2 == 0 {
                        Node::Barrier
                    } else {
                        Node::Touches(vec![binding(16, 64, rw)])
                    }
                })
                .collect(),
            4095,
        ),
    ];
    for (name, nodes, edges) in shapes {
        let ops = list(&nodes);
        let start = Instant::now();
        let plan = Plan::new(ops);
        let took = start.elapsed();
        assert!(took < Duration::from_millis(250), "{name}: {took:?}");
        assert_eq!(plan.pred.len(), edges, "{name}");
    }
}
