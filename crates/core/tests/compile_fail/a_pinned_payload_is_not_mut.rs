//! Two sole holders must not swap the payloads of two pools.

use leasehold_core::*;
use std::marker::PhantomPinned;

struct Row(u8, PhantomPinned);

impl Tagged for Row {
    type Tag = tags::Buffer;
}

fn swap(mut a: UniqueLease<Row>, mut b: UniqueLease<Row>) -> u8 {
    std::mem::swap(&mut *a, &mut *b);
    a.0
}

fn main() {}
