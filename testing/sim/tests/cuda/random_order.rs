//! Random programs: a mistake in the order of work shows by the race detector, the bytes or the
//! leaks. `ci/planted.sh` plants such mistakes, and this test finds each.

use crate::common::*;

#[test]
fn no_seed_shows_a_mistake() {
    order::nothing_is_found::<Cuda>();
}
