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
use leasehold::kernel::{Binding, Grid, TensorMap};
use leasehold::{Access, Error, Result};
use leasehold_sim::machine::tensor_map;
use leasehold_sim::{KernelBody, KernelRegistry};

/// Bytes of a tensor map.
const MAP: usize = TensorMap::BYTES as usize;

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

/// Like [`simulate`], with kernels that compute nothing: what is left of a program is the host's
/// work. Results are what memory had before.
///
/// # Errors
/// As [`simulate`].
pub fn simulate_without_results(registry: &KernelRegistry) -> Result<()> {
    simulate_with(registry, |_, _, _| Ok(()))
}

/// Like [`simulate`], with another way to run a launch of an entry that meets the requirements.
pub(crate) fn simulate_with(registry: &KernelRegistry, run: impl Run) -> Result<()> {
    for cuda in CudaSpec::all() {
        let geometry = move |params: &[u8]| CudaSpec::geometry(cuda, params);
        let early = |spec: &KernelSpec| cuda.early_reads(spec) != 0;
        register(registry, (cuda.entry, cuda.name), (geometry, cuda.mapped()), early, run.clone())?;
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
        register(registry, (mps.name, mps.name), (geometry, &[]), |_| false, run.clone())?;
    }
    Ok(())
}

/// Runs a launch of an entry, whose CPU kernel is given, with parameters and bindings.
pub(crate) trait Run:
    Fn(&'static str, &KernelSpec, (&[u8], &[Binding])) -> Result<()> + Clone + Send + Sync + 'static
{
}

impl<F> Run for F where
    F: Fn(&'static str, &KernelSpec, (&[u8], &[Binding])) -> Result<()>
        + Clone
        + Send
        + Sync
        + 'static
{
}

/// Registers the kernel called `name` under the name of its entry. `early` says whether it can read
/// operands early; the parameters are behind the tensor maps of the operands `mapped`.
fn register(
    registry: &KernelRegistry,
    (entry, name): (&'static str, &str),
    (geometry, mapped): (
        impl Fn(&[u8]) -> std::result::Result<Grid, Refusal> + Send + Sync + 'static,
        &'static [u32],
    ),
    early: impl FnOnce(&KernelSpec) -> bool,
    run: impl Run,
) -> Result<()> {
    let spec = KernelSpec::find(name)
        .ok_or_else(|| Error::NotFound(format!("entry {entry} has no CPU kernel").into()))?;
    let accesses: Vec<Access> = spec.operands.iter().map(|o| o.access).collect();
    let body = KernelBody::run(move |launch| {
        let (maps, params) = launch
            .params_bytes()
            .split_at_checked(mapped.len() * MAP)
            .ok_or_else(|| Error::invalid("parameters without their tensor maps"))?;
        for (map, &operand) in std::iter::zip(maps.chunks_exact(MAP), mapped) {
            if tensor_map::address(map) != Some(launch.given()[operand as usize].addr) {
                return Err(Error::invalid(format!(
                    "kernel {entry} has a tensor map that is not of operand {operand}"
                )));
            }
        }
        let geometry = geometry(params).map_err(Error::InvalidArgument)?;
        let shape = Grid::new(launch.grid()).threads(launch.block()).shared(launch.shared());
        if shape != geometry {
            return Err(Error::invalid(format!(
                "kernel {entry} was launched as {shape:?}; its parameters ask for {geometry:?}"
            )));
        }
        run(entry, spec, (params, launch.bindings()))
    });
    let bytes = mapped.len() * MAP + spec.params_bytes;
    let mut made = leasehold_sim::KernelSpec::new(&accesses, bytes as u32, body);
    made.maps = !mapped.is_empty();
    let made = if early(spec) { made.reading_early() } else { made };
    let made = match spec.limited() {
        Some((cache, limits)) => made.limited_by(cache, limits),
        None => made,
    };
    let dense = DENSE.contains(&spec.name);
    registry.register(entry, if dense { made } else { made.leaving_gaps() });
    Ok(())
}

fn run(_entry: &str, spec: &KernelSpec, (params, bindings): (&[u8], &[Binding])) -> Result<()> {
    // SAFETY: the machine has checked that the bindings lie in live memory, and has translated them
    // for the duration of the call. No other code runs meanwhile.
    unsafe { spec.run(None, params, bindings) }.map_err(Error::InvalidArgument)
}
