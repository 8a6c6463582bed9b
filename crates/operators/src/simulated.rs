//! The operators' kernels on a simulated device: the CPU kernels, under the names of the CUDA
//! entries.
//!
//! On such a device a launch has CUDA's grid. A kernel does all its work in one call, divided into
//! tiles by its own parameters. The requirements of a launch are checked again, because a simulated
//! device serves to find defects.
//!
//! This module must not know the machine, only its registry.

use crate::kernels::cpu::KERNELS;
use crate::kernels::cpu::tile::KernelSpec;
use crate::kernels::cuda::{CudaSpec, KERNELS as CUDA_KERNELS, TENSOR_KERNELS};
use leasehold::{Access, Error, Result};
use leasehold_sim::{KernelBody, KernelRegistry, Launch};

/// The kernels that write every byte of their output bindings. The others write rows, with gaps
/// between them if the parameters say so.
const DENSE: [&str; 4] = ["argmax", "sample", "next_token", "fill"];

/// Registers every operator kernel for simulated devices.
///
/// # Errors
/// `NotFound` if a kernel has no CUDA entry.
pub fn simulate(registry: &KernelRegistry) -> Result<()> {
    for spec in KERNELS {
        CudaSpec::find(spec.name).ok_or_else(|| {
            Error::NotFound(format!("kernel {} has no CUDA entry", spec.name).into())
        })?;
    }
    for cuda in CUDA_KERNELS.iter().chain(TENSOR_KERNELS) {
        let spec = KernelSpec::find(cuda.name).ok_or_else(|| {
            Error::NotFound(format!("CUDA entry {} has no kernel", cuda.entry).into())
        })?;
        let accesses: Vec<Access> = spec.operands.iter().map(|o| o.access).collect();
        let body = KernelBody::run(move |launch| run(spec, cuda, launch));
        let made = leasehold_sim::KernelSpec::new(&accesses, spec.params_bytes as u32, body);
        let dense = DENSE.contains(&spec.name);
        registry.register(cuda.entry, if dense { made } else { made.leaving_gaps() });
    }
    Ok(())
}

fn run(spec: &KernelSpec, cuda: &CudaSpec, launch: &Launch<'_>) -> Result<()> {
    let geometry = cuda.geometry(launch.params_bytes()).map_err(Error::InvalidArgument)?;
    if (launch.grid(), launch.block()) != (geometry.grid, geometry.block) {
        return Err(Error::invalid(format!(
            "kernel {} was launched with {:?} blocks of {:?} threads; its parameters ask for {geometry:?}",
            cuda.entry,
            launch.grid(),
            launch.block()
        )));
    }
    // SAFETY: the machine has checked that the bindings lie in live memory, and has translated them
    // for the duration of the call. No other code runs meanwhile.
    unsafe { spec.run(None, launch.params_bytes(), launch.bindings()) }
        .map_err(Error::InvalidArgument)
}
