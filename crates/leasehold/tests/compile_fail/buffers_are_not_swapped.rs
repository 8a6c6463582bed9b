//! A buffer belongs to its allocator's table: who holds two alone cannot swap them.
#![forbid(unsafe_code)]

use leasehold::Runtime;

fn misuse(one: &Runtime, other: &Runtime) -> leasehold::Result<()> {
    let (Ok(mut a), Ok(mut b)) = (one.alloc(64)?.try_unique(), other.alloc(64)?.try_unique()) else { return Ok(()) };
    std::mem::swap(&mut *a, &mut *b);
    one.to_vec::<u8>(&a.share()).map(drop)
}

fn main() {}
