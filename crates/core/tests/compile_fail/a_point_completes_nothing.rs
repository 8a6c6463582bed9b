//! The holder of a timepoint can read and wait. Only the owner can complete work.

use leasehold_core::{Error, Timepoint, TimelineSource};

fn forge(point: Timepoint) {
    point.timeline().complete(point.value());
    point.timeline().poison(1, Error::invalid("forged"));
    point.timeline().learn(point);
    let _ = point.timeline().advance();
    let _ = point.timeline().advance_to(1 << 40);
    point.timeline().set_publisher(None);
}

struct Liar;

impl TimelineSource for Liar {}

fn main() {}
