//! A driver of one's own says what safe code relies on; so does who vouches for all calls at once.
#![forbid(unsafe_code)]

use leasehold_cuda::driver::ops::CudaSlowOps;
use leasehold_sim::traces::vouched::Vouched;

struct Liar;

impl CudaSlowOps for Liar {}

fn vouched(ops: &dyn CudaSlowOps) -> Vouched<'_> {
    Vouched::new(ops)
}

fn vouched_by_hand(ops: &dyn CudaSlowOps) -> Vouched<'_> {
    Vouched(ops)
}

fn main() {}
