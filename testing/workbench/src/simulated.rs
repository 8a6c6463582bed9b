//! Simulated devices for the commands.
//!
//! They run the CPU's kernels under the names of the CUDA or Metal entries, with the race detector
//! on. Its reports become an error at the command's end.
//!
//! This module must not know what the commands do.

use leasehold::backend::Backend;
use leasehold::{BackendKind, Context, DeviceId};
use leasehold_cli::commands::memory::AllocatorOptions;
use leasehold_cli::failure::Failure;
use leasehold_cli::system::{Request, Simulation, System, check_aids};
use leasehold_collective::CollectiveOps;
use leasehold_sim::collective::SimCollectives;
use leasehold_sim::{KernelRegistry, MachineConfig, Monitor, SimBackend};
use std::sync::Arc;

/// Bytes of memory of a simulated device. Only accessed memory occupies host memory.
const MEMORY: u64 = 4 << 30;
/// The number of simulated devices, if no more are asked for.
const DEVICES: u32 = 2;

/// Opens a simulated device.
pub(crate) fn open(request: &Request, seed: u64) -> Result<System, Failure> {
    check_aids(request)?;
    let device = request.device;
    let devices = device.ordinal.saturating_add(request.devices).max(DEVICES);
    let machine = |kernels| machine(seed, kernels).devices(devices, MEMORY);
    let (backend, monitor, library): (Arc<dyn Backend>, Monitor, _) = match device.backend {
        #[cfg(feature = "cuda")]
        BackendKind::Cuda => {
            let AllocatorOptions { debug, trace_events } = request.memory;
            let config = leasehold_cuda::CudaConfig::default();
            let config = config.debug(debug).trace_events(trace_events);
            let (backend, driver) = cuda(machine(operators()?), config)?;
            let library: Arc<dyn CollectiveOps> = Arc::new(SimCollectives::of_cuda(&driver));
            (Arc::new(backend), driver.machine().clone(), Some(library))
        }
        #[cfg(feature = "mps")]
        BackendKind::Mps => {
            let AllocatorOptions { debug, trace_events } = request.memory;
            let config = leasehold_mps::MpsConfig::default();
            let config = config.debug(debug).trace_events(trace_events);
            let (backend, driver) = mps(machine(metal_operators()?), config)?;
            (Arc::new(backend), driver.machine().clone(), None)
        }
        BackendKind::Sim => {
            no_debug_checks(device, request.memory)?;
            let backend = SimBackend::new(machine(operators()?))?;
            let library: Arc<dyn CollectiveOps> = Arc::new(SimCollectives::of_sim(&backend));
            let monitor = backend.machine().clone();
            (Arc::new(backend), monitor, Some(library))
        }
        other => {
            return Err(Failure::misuse(format!("{device}: this build has no simulated {other}")));
        }
    };
    let system = System::of(Context::with_backends(vec![backend]), request)?;
    let check = Box::new(move || races(&monitor));
    Ok(system.simulated(Simulation { library, check }))
}

/// The reports of the race detector as a failure.
fn races(machine: &Monitor) -> Result<(), Failure> {
    let reports = machine.take_reports();
    if reports.is_empty() {
        return Ok(());
    }
    let first: Vec<String> = reports.iter().take(3).map(ToString::to_string).collect();
    Err(Failure::new(format!("the race detector reports {}: {}", reports.len(), first.join("; "))))
}

/// Refuses settings that a plain simulated device would ignore.
pub(crate) fn no_debug_checks(device: DeviceId, options: AllocatorOptions) -> Result<(), Failure> {
    if options.debug.any() {
        let debug = options.debug;
        return Err(Failure::misuse(format!(
            "memory debug checks ({debug}): {device} has none; cuda:0 --sim has"
        )));
    }
    if options.trace_events > 0 {
        return Err(Failure::misuse(format!(
            "{device} records no memory trace or snapshot; cuda:0 --sim does"
        )));
    }
    Ok(())
}

/// A simulated machine with these kernels.
pub(crate) fn machine(seed: u64, kernels: KernelRegistry) -> MachineConfig {
    MachineConfig::seed(seed).devices(DEVICES, MEMORY).kernels(kernels)
}

/// The CUDA backend over a simulated driver.
#[cfg(feature = "cuda")]
pub(crate) fn cuda(
    machine: MachineConfig,
    config: leasehold_cuda::CudaConfig,
) -> leasehold::Result<(leasehold_cuda::CudaBackend, Arc<leasehold_sim::cuda::SimDriver>)> {
    use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
    let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine))?);
    Ok((leasehold_cuda::CudaBackend::with_ops(driver.clone(), config)?, driver))
}

/// The Metal backend over a simulated driver.
#[cfg(feature = "mps")]
pub(crate) fn mps(
    machine: MachineConfig,
    config: leasehold_mps::MpsConfig,
) -> leasehold::Result<(leasehold_mps::MpsBackend, Arc<leasehold_sim::mps::SimDriver>)> {
    use leasehold_sim::mps::{SimDriver, SimDriverConfig};
    let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine))?);
    Ok((leasehold_mps::MpsBackend::with_ops(driver.clone(), config)?, driver))
}

/// The operators' kernels, by the names of their Metal entries.
#[cfg(feature = "mps")]
fn metal_operators() -> leasehold::Result<KernelRegistry> {
    let registry = KernelRegistry::new();
    leasehold_operators::simulate_mps(&registry)?;
    Ok(registry)
}

/// The operators' kernels, by the names of their CUDA entries.
fn operators() -> leasehold::Result<KernelRegistry> {
    let registry = KernelRegistry::new();
    leasehold_operators::simulate(&registry)?;
    Ok(registry)
}
