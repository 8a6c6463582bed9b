//! `leasehold bench`: measurements of a model. They print figures, and are no tests that fail for
//! slowness.

pub use crate::commands::arguments::{Common, DecodeArguments};
use crate::commands::bench_batch;
use crate::commands::bench_decode;
use crate::commands::bench_ranks;
pub use crate::commands::bench_suspend::{SuspendArguments, run as suspend};
use crate::failure::Failure;
use crate::ranks::Plan;
use crate::system::Devices;

/// `leasehold bench decode`.
pub fn decode(a: &DecodeArguments, devices: &dyn Devices) -> Result<(), Failure> {
    let plan = a.ranks.plan(a.on.device(), devices.simulates(a.on.device())?)?;
    match (plan, &a.batch[..], a.join) {
        (Plan::Alone, [], _) => bench_decode::run(a, devices),
        (Plan::Alone, sizes, None) => bench_batch::run(a, sizes, devices),
        (Plan::Alone, _, Some(prompt)) => bench_batch::run_join(a, prompt, devices),
        (plan, ..) => bench_ranks::run(a, plan, devices),
    }
}
