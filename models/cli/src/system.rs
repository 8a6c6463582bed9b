//! The system of a command: the machine's devices, or simulated ones.
//!
//! Simulated devices run the CPU's kernels under the names of the CUDA entries, with the race
//! detector on. Its reports become an error at the command's end.
//!
//! This module must not know what the commands do.

use crate::commands::memory::Wishes;
use crate::failure::Failure;
use leasehold::backend::Backend;
use leasehold::cpu::{CpuBackend, CpuConfig};
use leasehold::{BackendKind, Context, DeviceId, Runtime};
use leasehold_collective::CollectiveOps;
use std::sync::Arc;

/// The device of a command, and its settings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub(crate) device: DeviceId,
    /// Threads of a kernel, on the CPU.
    pub(crate) threads: Option<usize>,
    /// The seed of a simulated driver.
    pub(crate) sim: Option<u64>,
    /// Devices that are used, from `device` on.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(
            dead_code,
            reason = "a machine of simulated CUDA devices alone has a number of them"
        )
    )]
    pub(crate) devices: u32,
    pub(crate) memory: Wishes,
}

impl Request {
    /// A device with default settings.
    pub(crate) fn new(device: DeviceId, threads: Option<usize>) -> Self {
        Self { device, threads, sim: None, devices: 1, memory: Wishes::default() }
    }
}

/// A runtime and, for a simulated device, its machine.
pub(crate) struct System {
    pub(crate) context: Context,
    pub(crate) runtime: Runtime,
    #[cfg(feature = "sim")]
    library: Option<Arc<dyn CollectiveOps>>,
    #[cfg(feature = "sim")]
    machine: Option<leasehold_sim::Monitor>,
}

/// A backend and, for a simulated device, its machine.
struct Made {
    backend: Arc<dyn Backend>,
    #[cfg(feature = "sim")]
    simulated: Option<Simulated>,
}

/// A machine, and the library of collectives between its devices.
#[cfg(feature = "sim")]
struct Simulated {
    machine: leasehold_sim::Monitor,
    library: Option<Arc<dyn CollectiveOps>>,
}

impl System {
    /// Opens the device.
    pub(crate) fn open(request: &Request) -> Result<Self, Failure> {
        let device = request.device;
        if request.threads.is_some() && device.backend != BackendKind::Cpu {
            let other = device.backend;
            return Err(Failure::misuse(format!(
                "--threads is for the CPU; {other} devices have their own"
            )));
        }
        let made = make(request)?;
        let context = made
            .as_ref()
            .map_or_else(Context::new, |m| Context::with_backends(vec![m.backend.clone()]));
        let aids = request.memory.debug;
        let runtime = context.runtime(device).map_err(|e| {
            if aids.any() && matches!(e, leasehold::Error::Unsupported(_)) {
                let cure = "cuda devices have pass-through and quarantine, the CPU has all";
                return Failure::misuse(format!("--memory-debug {aids}: {e}; {cure}"));
            }
            let named = e.to_string().contains(&device.to_string());
            let failure = Failure::from(e);
            if named { failure } else { failure.at(device) }
        })?;
        #[cfg(feature = "sim")]
        let (machine, library) =
            made.and_then(|m| m.simulated).map(|s| (s.machine, s.library)).unzip();
        Ok(Self {
            context,
            runtime,
            #[cfg(feature = "sim")]
            library: library.flatten(),
            #[cfg(feature = "sim")]
            machine,
        })
    }

    /// The first device.
    pub(crate) fn device(&self) -> DeviceId {
        self.runtime.device()
    }

    /// The library of collectives between simulated devices; `None` for the device's own.
    pub(crate) fn library(&self) -> Option<Arc<dyn CollectiveOps>> {
        #[cfg(feature = "sim")]
        return self.library.clone();
        #[cfg(not(feature = "sim"))]
        None
    }

    /// Checks that the race detector has no reports so far; always `Ok` without one.
    ///
    /// # Errors
    /// The first reports, if any exist.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        #[cfg(feature = "sim")]
        if let Some(machine) = &self.machine {
            let reports = machine.take_reports();
            if !reports.is_empty() {
                let first: Vec<String> = reports.iter().take(3).map(ToString::to_string).collect();
                return Err(Failure::new(format!(
                    "the race detector reports {}: {}",
                    reports.len(),
                    first.join("; ")
                )));
            }
        }
        Ok(())
    }
}

/// The CPU backend of the request.
fn cpu(request: &Request) -> Result<Arc<dyn Backend>, Failure> {
    let config = request.threads.map_or_else(CpuConfig::default, CpuConfig::threads);
    let config = config.debug(request.memory.debug).trace_events(request.memory.trace_events);
    let backend = CpuBackend::with_config(config).map_err(|e| match request.threads {
        Some(n) => Failure::misuse(format!("--threads {n}: {e}")),
        None => Failure::from(e),
    })?;
    Ok(Arc::new(backend))
}

#[cfg(not(feature = "sim"))]
fn make(request: &Request) -> Result<Option<Made>, Failure> {
    if request.sim.is_some() {
        return Err(Failure::misuse("--sim: this build has no simulated devices (feature `sim`)"));
    }
    match request.device.backend {
        BackendKind::Cpu => Ok(Some(Made { backend: cpu(request)? })),
        _ => Ok(None),
    }
}

/// The backend of the request; `None` if this build does not have it.
#[cfg(feature = "sim")]
fn make(request: &Request) -> Result<Option<Made>, Failure> {
    use leasehold_collective_sim::SimCollectives;
    use leasehold_sim::SimBackend;
    let backed = matches!(request.device.backend, BackendKind::Cuda | BackendKind::Mps);
    if backed && request.memory.debug.guard {
        let (aids, device) = (request.memory.debug, request.device);
        return Err(Failure::misuse(format!(
            "--memory-debug {aids}: {device} cannot put a block between guard granules; \
             {} devices have pass-through and quarantine, the CPU has all",
            device.backend
        )));
    }
    let devices = request.device.ordinal.saturating_add(request.devices).max(simulated::DEVICES);
    let machine =
        |seed, kernels| simulated::machine(seed, kernels).devices(devices, simulated::MEMORY);
    let (backend, simulated): (Arc<dyn Backend>, _) = match (request.device.backend, request.sim) {
        (BackendKind::Cpu, Some(_)) => {
            return Err(Failure::misuse("--sim: the CPU has no driver to simulate"));
        }
        (BackendKind::Cpu, None) => (cpu(request)?, None),
        #[cfg(feature = "cuda")]
        (BackendKind::Cuda, sim) => {
            let config = leasehold_cuda::CudaConfig::default()
                .debug(request.memory.debug)
                .trace_events(request.memory.trace_events);
            match sim {
                None => (Arc::new(leasehold_cuda::CudaBackend::with_config(config)), None),
                Some(seed) => {
                    let machine = machine(seed, simulated::operators()?);
                    let (backend, driver) = simulated::cuda(machine, config)?;
                    let library: Arc<dyn CollectiveOps> =
                        Arc::new(SimCollectives::of_cuda(&driver));
                    let (machine, library) = (driver.machine().clone(), Some(library));
                    (Arc::new(backend), Some(Simulated { machine, library }))
                }
            }
        }
        #[cfg(feature = "mps")]
        (BackendKind::Mps, sim) => {
            let config = leasehold_mps::MpsConfig::default()
                .debug(request.memory.debug)
                .trace_events(request.memory.trace_events);
            match sim {
                None => (Arc::new(leasehold_mps::MpsBackend::with_config(config)), None),
                Some(seed) => {
                    let machine = machine(seed, simulated::metal_operators()?);
                    let (backend, driver) = simulated::mps(machine, config)?;
                    let machine = driver.machine().clone();
                    (Arc::new(backend), Some(Simulated { machine, library: None }))
                }
            }
        }
        (BackendKind::Sim, seed) => {
            unaided(request.device, request.memory)?;
            let seed = seed.unwrap_or(simulated::SEED);
            let config = machine(seed, simulated::operators()?);
            let backend = SimBackend::new(config)?;
            let library: Arc<dyn CollectiveOps> = Arc::new(SimCollectives::of_sim(&backend));
            let (machine, library) = (backend.machine().clone(), Some(library));
            (Arc::new(backend), Some(Simulated { machine, library }))
        }
        _ => return Ok(None),
    };
    Ok(Some(Made { backend, simulated }))
}

/// Refuses settings that a plain simulated device would ignore.
#[cfg(feature = "sim")]
pub(crate) fn unaided(device: DeviceId, wishes: Wishes) -> Result<(), Failure> {
    if wishes.debug.any() {
        let aids = wishes.debug;
        return Err(Failure::misuse(format!(
            "memory debug aids ({aids}): {device} has none; cuda:0 --sim has"
        )));
    }
    if wishes.trace_events > 0 {
        return Err(Failure::misuse(format!(
            "{device} records no memory trace or snapshot; cuda:0 --sim does"
        )));
    }
    Ok(())
}

/// Simulated devices for the commands.
#[cfg(feature = "sim")]
pub(crate) mod simulated {
    use leasehold_sim::{KernelRegistry, MachineConfig};
    use std::sync::Arc;

    /// Bytes of memory of a simulated device. Only accessed memory occupies host memory.
    pub(crate) const MEMORY: u64 = 4 << 30;
    /// The number of simulated devices, if no more are asked for.
    pub(crate) const DEVICES: u32 = 2;
    /// The default seed of a simulated driver's random order.
    pub(crate) const SEED: u64 = 1;

    /// A simulated machine with these kernels.
    pub(crate) fn machine(seed: u64, kernels: KernelRegistry) -> MachineConfig {
        MachineConfig::seed(seed).devices(DEVICES, MEMORY).kernels(kernels)
    }

    /// The CUDA backend over a simulated driver.
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda(
        machine: MachineConfig,
        config: leasehold_cuda::CudaConfig,
    ) -> leasehold::Result<(leasehold_cuda::CudaBackend, Arc<leasehold_cuda_sim::SimDriver>)> {
        use leasehold_cuda_sim::{SimDriver, SimDriverConfig};
        let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine))?);
        Ok((leasehold_cuda::CudaBackend::with_ops(driver.clone(), config)?, driver))
    }

    /// The Metal backend over a simulated driver.
    #[cfg(feature = "mps")]
    pub(crate) fn mps(
        machine: MachineConfig,
        config: leasehold_mps::MpsConfig,
    ) -> leasehold::Result<(leasehold_mps::MpsBackend, Arc<leasehold_mps_sim::SimDriver>)> {
        use leasehold_mps_sim::{SimDriver, SimDriverConfig};
        let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine))?);
        Ok((leasehold_mps::MpsBackend::with_ops(driver.clone(), config)?, driver))
    }

    /// The operators' kernels, by the names of their Metal entries.
    #[cfg(feature = "mps")]
    pub(crate) fn metal_operators() -> leasehold::Result<KernelRegistry> {
        let registry = KernelRegistry::new();
        leasehold_operators::simulate_mps(&registry)?;
        Ok(registry)
    }

    /// The operators' kernels, by the names of their CUDA entries.
    pub(crate) fn operators() -> leasehold::Result<KernelRegistry> {
        let registry = KernelRegistry::new();
        leasehold_operators::simulate(&registry)?;
        Ok(registry)
    }
}
