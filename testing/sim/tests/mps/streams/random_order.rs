//! Random programs: a mistake in the order of work shows by the race detector, the bytes, broken
//! rules or leaks. `ci/planted.sh` plants such mistakes, and this test finds each.

use super::common::*;

#[test]
fn no_seed_shows_a_mistake() {
    order::nothing_is_found::<Mps>();
}
