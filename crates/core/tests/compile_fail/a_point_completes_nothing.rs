//! Whoever has a point may look and wait. Saying that work is over is the owner's.

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
