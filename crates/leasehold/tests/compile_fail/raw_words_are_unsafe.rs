//! A caller that hands raw addresses and words to a backend vouches for them.
#![forbid(unsafe_code)]

use leasehold::backend::{Device, GraphExec, Op, Plan, Stream, TimestampQuery};

fn raw_words(device: &dyn Device, stream: &dyn Stream, graph: &dyn GraphExec, ops: &[Op<'_>], plan: Plan) {
    let forged = TimestampQuery::new(8);
    forged.set(1);
    let _ = device.elapsed(&forged, &forged);
    let _ = device.instantiate(plan);
    let _ = graph.update(&[]);
    let _ = stream.submit(ops);
}

fn main() {}
