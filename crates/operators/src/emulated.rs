//! The sources of the Metal kernels on the host, for tests: compiled by clang, and registered as
//! the kernels of simulated Metal.
//!
//! This module must not know the machine, only its registry.

use crate::kernels::cpu::tile::KernelSpec;
use crate::kernels::mps::{MODULES, MpsSpec};
use crate::simulated::simulate_mps_with;
use leasehold::backend::sync::{Arc, OnceLock};
use leasehold::{Error, Result};
use leasehold_emulator::{Emulator, Source};
use leasehold_hal::kernel::Binding;
use leasehold_sim::KernelRegistry;

/// The Metal kernels, compiled for the host.
#[derive(Debug, Clone)]
pub struct EmulatedMps(Arc<Emulator>);

impl EmulatedMps {
    /// The kernels; the first call of a process compiles them, for seconds. `None` without clang.
    ///
    /// # Errors
    /// `Compile`, with the compiler's messages.
    pub fn new() -> Result<Option<Self>> {
        static MADE: OnceLock<std::result::Result<Option<EmulatedMps>, String>> = OnceLock::new();
        let made = MADE.get_or_init(|| {
            let sources: Vec<Source<'_>> =
                MODULES.iter().map(|m| Source { name: m.name, text: m.source }).collect();
            // SAFETY: the library's sources declare no variable with an initialiser that runs.
            let emulator = unsafe { Emulator::metal(&sources)? };
            Ok(emulator.map(|emulator| EmulatedMps(Arc::new(emulator))))
        });
        made.clone().map_err(|log| Error::Compile { log: log.into() })
    }

    /// Runs a launch of kernel `name`, with blocks and threads in reverse order on request. Returns
    /// whether Metal has a geometry for the launch.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown kernel, and for parameters or operands that it refuses.
    ///
    /// # Safety
    /// - The bindings are live memory, which no other code accesses meanwhile.
    pub unsafe fn run(
        &self,
        name: &str,
        params: &[u8],
        bindings: &[Binding],
        reverse: bool,
    ) -> Result<bool> {
        let spec = KernelSpec::find(name)
            .zip(MpsSpec::find(name))
            .ok_or_else(|| Error::invalid(format!("no Metal kernel is named {name}")))?;
        let (spec, mps) = spec;
        let launch = spec.plan(params).map_err(Error::InvalidArgument)?;
        spec.check(&launch, bindings).map_err(Error::InvalidArgument)?;
        let Ok(geometry) = mps.geometry(params) else { return Ok(false) };
        let operands: Vec<u64> = bindings.iter().map(|b| b.addr).collect();
        let (grid, block) = (geometry.grid, geometry.block);
        // SAFETY: the caller vouches for the bindings, whose sizes and alignment were checked
        // against the requirements of the launch.
        unsafe { self.0.run(name, &operands, params, grid, block, reverse) }
            .map_err(Error::invalid)?;
        Ok(true)
    }
}

/// Registers the sources of the Metal kernels for simulated Metal, under the names of
/// [`simulate_mps`](crate::simulate_mps). Returns whether clang is there to compile them.
///
/// # Errors
/// `Compile`, with the compiler's messages.
pub fn emulate_mps(registry: &KernelRegistry) -> Result<bool> {
    let Some(kernels) = EmulatedMps::new()? else { return Ok(false) };
    simulate_mps_with(registry, move |spec, launch| {
        // SAFETY: the machine has checked that the bindings lie in live memory, and has translated
        // them for the duration of the call. No other code runs meanwhile.
        let ran =
            unsafe { kernels.run(spec.name, launch.params_bytes(), launch.bindings(), false) };
        ran.map(drop)
    })?;
    Ok(true)
}
