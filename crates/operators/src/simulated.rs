//! The operators' kernels on a simulated device: the CPU kernels, under the names of the CUDA entries.
//!
//! A launch has CUDA's grid there; a kernel does all of its work in one call, cut into tiles by its own parameters. What a launch needs of
//! its operands is checked again, since a simulated device is there to find what is wrong.
//!
//! This module must not know the machine, only its registry.

use crate::kernels::cpu::KERNELS;
use crate::kernels::cpu::tile::KernelSpec;
use crate::kernels::cuda::CudaSpec;
use leasehold::{Access, Error, Result};
use leasehold_sim::{KernelBody, KernelRegistry, Launch};

/// The kernels that write all of what they declare to write. The others write rows, with gaps between them where the parameters say so.
const DENSE: [&str; 4] = ["argmax", "sample", "next_token", "fill"];

/// Makes every operator kernel known to simulated devices.
///
/// # Errors
/// `NotFound` where a kernel has no CUDA entry.
pub fn simulate(registry: &KernelRegistry) -> Result<()> {
    for spec in KERNELS {
        let cuda = CudaSpec::find(spec.name)
            .ok_or_else(|| Error::NotFound(format!("kernel {} has no CUDA entry", spec.name).into()))?;
        let accesses: Vec<Access> = spec.operands.iter().map(|o| o.access).collect();
        let body = KernelBody::run(move |launch| run(spec, cuda, launch));
        let made = leasehold_sim::KernelSpec::new(&accesses, spec.params_bytes as u32, body);
        let dense = DENSE.contains(&spec.name);
        registry.register(spec.name, if dense { made } else { made.leaving_gaps() });
    }
    Ok(())
}

fn run(spec: &KernelSpec, cuda: &CudaSpec, launch: &Launch<'_>) -> Result<()> {
    let geometry = cuda.geometry(launch.params_bytes()).map_err(Error::InvalidArgument)?;
    if (launch.grid(), launch.block()) != (geometry.grid, geometry.block) {
        return Err(Error::invalid(format!(
            "kernel {} was launched with {:?} blocks of {:?} threads; its parameters ask for {geometry:?}",
            spec.name,
            launch.grid(),
            launch.block()
        )));
    }
    // SAFETY: the machine has checked that the bindings lie in live memory and translated them for the time of the call; nobody else runs.
    unsafe { spec.run(None, launch.params_bytes(), launch.bindings()) }.map_err(Error::InvalidArgument)
}
