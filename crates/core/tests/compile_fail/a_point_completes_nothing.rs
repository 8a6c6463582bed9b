//! The holder of a timepoint can read and wait. Only the owner can complete work.

use leasehold_core::{Error, Point, Timeline};

fn forge(point: Point) {
    point.line().complete(point.value());
    point.line().poison(1, Error::invalid("forged"));
    point.line().learn(point);
    let _ = point.line().advance();
    let _ = point.line().advance_to(1 << 40);
    point.line().set_publisher(None);
}

struct Liar;

impl Timeline for Liar {}

fn main() {}
