//! The operators' kernels on simulated devices, under the names of the entries for CUDA or Metal.
//!
//! On such a device a launch has the grid of CUDA or Metal. The CPU kernels do all the work of a
//! launch in one call, divided into tiles by their own parameters. The requirements of a launch are
//! checked again, because a simulated device serves to find defects.
//!
//! This module must not know the machine, only its registry.

use crate::kernels::cpu::tile::{KernelSpec, Refusal};
use crate::kernels::cuda::CudaSpec;
use crate::kernels::mps::{KERNELS as MPS_KERNELS, MpsSpec};
use leasehold::kernel::Grid;
use leasehold::{Access, Error, Result};
use leasehold_sim::{KernelBody, KernelRegistry, Launch};

/// The kernels that write every byte of their output bindings. The others write rows, with gaps
/// between them if the parameters say so.
const DENSE: [&str; 3] = ["argmax", "fill", "not_finite"];

/// Registers every operator kernel for simulated devices: the CPU kernels, with the grids of CUDA.
///
/// # Errors
/// `NotFound` if a CUDA entry has no CPU kernel.
pub fn simulate(registry: &KernelRegistry) -> Result<()> {
    simulate_with(registry, run)
}

/// Like [`simulate`], with another way to run a launch of an entry that meets the requirements.
pub(crate) fn simulate_with(registry: &KernelRegistry, run: impl Run) -> Result<()> {
    for cuda in CudaSpec::all() {
        let geometry = move |params: &[u8]| CudaSpec::geometry(cuda, params);
        let early = |spec: &KernelSpec| cuda.early_reads(spec) != 0;
        register(registry, (cuda.entry, cuda.name), geometry, early, run.clone())?;
    }
    Ok(())
}

/// Registers every operator kernel for simulated Metal: the CPU kernels, with the grids of Metal.
///
/// # Errors
/// `NotFound` if a Metal kernel has no CPU kernel.
pub fn simulate_mps(registry: &KernelRegistry) -> Result<()> {
    simulate_mps_with(registry, run)
}

/// Like [`simulate_mps`], with another way to run a launch that meets the requirements.
pub(crate) fn simulate_mps_with(registry: &KernelRegistry, run: impl Run) -> Result<()> {
    for mps in MPS_KERNELS {
        let geometry = move |params: &[u8]| MpsSpec::geometry(mps, params);
        register(registry, (mps.name, mps.name), geometry, |_| false, run.clone())?;
    }
    Ok(())
}

/// Runs a launch of an entry, whose CPU kernel is given.
pub(crate) trait Run:
    Fn(&'static str, &KernelSpec, &Launch<'_>) -> Result<()> + Clone + Send + Sync + 'static
{
}

impl<F> Run for F where
    F: Fn(&'static str, &KernelSpec, &Launch<'_>) -> Result<()> + Clone + Send + Sync + 'static
{
}

/// Registers the kernel called `name` under the name of its entry. `early` says whether it can read
/// operands early.
fn register(
    registry: &KernelRegistry,
    (entry, name): (&'static str, &str),
    geometry: impl Fn(&[u8]) -> std::result::Result<Grid, Refusal> + Send + Sync + 'static,
    early: impl FnOnce(&KernelSpec) -> bool,
    run: impl Run,
) -> Result<()> {
    let spec = KernelSpec::find(name)
        .ok_or_else(|| Error::NotFound(format!("entry {entry} has no CPU kernel").into()))?;
    let accesses: Vec<Access> = spec.operands.iter().map(|o| o.access).collect();
    let body = KernelBody::run(move |launch| {
        let geometry = geometry(launch.params_bytes()).map_err(Error::InvalidArgument)?;
        let shape = Grid::new(launch.grid()).threads(launch.block()).shared(launch.shared());
        if shape != geometry {
            return Err(Error::invalid(format!(
                "kernel {entry} was launched as {shape:?}; its parameters ask for {geometry:?}"
            )));
        }
        run(entry, spec, launch)
    });
    let made = leasehold_sim::KernelSpec::new(&accesses, spec.params_bytes as u32, body);
    let made = if early(spec) { made.reading_early() } else { made };
    let made = match spec.limited() {
        Some((cache, limits)) => made.limited_by(cache, limits),
        None => made,
    };
    let dense = DENSE.contains(&spec.name);
    registry.register(entry, if dense { made } else { made.leaving_gaps() });
    Ok(())
}

fn run(_entry: &str, spec: &KernelSpec, launch: &Launch<'_>) -> Result<()> {
    // SAFETY: the machine has checked that the bindings lie in live memory, and has translated them
    // for the duration of the call. No other code runs meanwhile.
    unsafe { spec.run(None, launch.params_bytes(), launch.bindings()) }
        .map_err(Error::InvalidArgument)
}
