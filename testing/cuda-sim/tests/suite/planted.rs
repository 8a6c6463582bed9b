//! Ten planted mistakes in the order of work, one at a time. The race detector, the bytes or
//! the leaks show each mistake within 50 seeds. Without a mistake, no seed finds anything.

use crate::common::*;
use leasehold_cuda::defects::Defect;

#[test]
fn a_clean_build_is_found_clean_under_every_seed() {
    order::nothing_is_found::<Cuda>();
}

#[test]
fn each_planted_defect_is_found_within_fifty_seeds() {
    order::each_is_found::<Cuda, _>(&Defect::ALL, |defect| inline().defect(defect));
}
