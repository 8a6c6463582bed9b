//! `leasehold-workbench run`: the user's command, also on simulated devices.

use crate::devices::{SEED, Simulator};
use leasehold_cli::commands::run::{self, DEVICE};
use leasehold_cli::failure::Failure;

#[derive(Debug, clap::Args)]
pub(crate) struct RunArguments {
    #[command(flatten)]
    run: run::Arguments,
    /// Runs over a simulated driver, with the race detector on; the kernels are the CPU's
    #[arg(long, help_heading = DEVICE)]
    sim: bool,
    /// The seed of a simulated device's random order
    #[arg(long, help_heading = DEVICE, value_name = "SEED", default_value_t = SEED)]
    sim_seed: u64,
}

impl RunArguments {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        run::run(&self.run, &Simulator { sim: self.sim, seed: self.sim_seed })
    }
}
