//! The system of a command: a device's context and runtime, from who makes devices.
//!
//! This module must not know what the commands do.

use crate::commands::memory::AllocatorOptions;
use crate::failure::Failure;
use leasehold::backend::Backend;
use leasehold::cpu::{CpuBackend, CpuConfig};
#[cfg(feature = "cuda")]
use leasehold::cuda::{CudaBackend, CudaConfig};
#[cfg(feature = "mps")]
use leasehold::mps::{MpsBackend, MpsConfig};
use leasehold::{BackendKind, Context, DeviceId, Runtime};
use leasehold_collective::CollectiveOps;
use leasehold_operators::Library;
use leasehold_operators::kernels::cpu::isa::Isa;
use std::sync::Arc;

/// The device of a command, and its settings.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    pub device: DeviceId,
    /// Threads of a kernel, on the CPU.
    pub threads: Option<usize>,
    /// The level of the kernels' instructions, on the CPU; the best one when left out.
    pub level: Option<Isa>,
    /// Devices that are used, from `device` on.
    pub devices: u32,
    pub memory: AllocatorOptions,
}

impl Request {
    /// A device with default settings.
    pub fn new(device: DeviceId, threads: Option<usize>) -> Self {
        Self { device, threads, level: None, devices: 1, memory: AllocatorOptions::default() }
    }
}

/// The maker of a command's devices: the [`Machine`], or a program that simulates some.
pub trait Devices {
    /// Opens the device of a request.
    ///
    /// # Errors
    /// A device that is not there, or that has not got what is asked for.
    fn open(&self, request: &Request) -> Result<System, Failure>;

    /// Returns whether a device is simulated.
    ///
    /// # Errors
    /// A device that these cannot be.
    fn simulates(&self, device: DeviceId) -> Result<bool, Failure>;
}

/// The devices of this machine.
#[derive(Debug, Clone, Copy)]
pub struct Machine;

impl Devices for Machine {
    fn open(&self, request: &Request) -> Result<System, Failure> {
        self.simulates(request.device)?;
        let context = match backend(request)? {
            Some(backend) => Context::with_backends(vec![backend]),
            None => Context::new(),
        };
        System::of(context, request)
    }

    fn simulates(&self, device: DeviceId) -> Result<bool, Failure> {
        match device.backend {
            BackendKind::Sim => Err(Failure::misuse(format!(
                "--device {device}: simulated devices are in leasehold-workbench, with the same options"
            ))),
            _ => Ok(false),
        }
    }
}

/// The parts of a simulated system that a real device has not.
pub struct Simulation {
    /// The library of collectives between the devices.
    pub library: Option<Arc<dyn CollectiveOps>>,
    /// Checks what has run so far.
    pub check: Box<dyn Fn() -> Result<(), Failure> + Send + Sync>,
}

/// A runtime with its context.
pub struct System {
    pub context: Context,
    pub runtime: Runtime,
    simulation: Option<Simulation>,
}

impl System {
    /// The request's device of a context.
    ///
    /// # Errors
    /// As [`Devices::open`].
    pub fn of(context: Context, request: &Request) -> Result<Self, Failure> {
        let device = request.device;
        if request.threads.is_some() && device.backend != BackendKind::Cpu {
            let other = device.backend;
            return Err(Failure::misuse(format!(
                "--threads is for the CPU; {other} devices have their own"
            )));
        }
        let debug = request.memory.debug;
        let runtime = context.runtime(device).map_err(|e| {
            if debug.any() && matches!(e, leasehold::Error::Unsupported(_)) {
                let cure = "cuda devices have pass-through and quarantine, the CPU has all";
                return Failure::misuse(format!("--memory-debug {debug}: {e}; {cure}"));
            }
            let named = e.to_string().contains(&device.to_string());
            let failure = Failure::from(e);
            if named { failure } else { failure.at(device) }
        })?;
        if let Some(level) = request.level {
            runtime
                .extension(|runtime| Library::with_level(runtime, Some(level)))
                .map_err(|e| Failure::misuse(format!("--level {level}: {e}")))?;
        }
        Ok(Self { context, runtime, simulation: None })
    }

    /// The same as a simulated one.
    #[must_use]
    pub fn simulated(self, simulation: Simulation) -> Self {
        Self { simulation: Some(simulation), ..self }
    }

    /// Returns whether the devices are simulated.
    pub fn is_simulated(&self) -> bool {
        self.simulation.is_some()
    }

    /// The first device.
    pub fn device(&self) -> DeviceId {
        self.runtime.device()
    }

    /// The library of collectives between simulated devices; `None` for the device's own.
    pub fn library(&self) -> Option<Arc<dyn CollectiveOps>> {
        self.simulation.as_ref().and_then(|simulation| simulation.library.clone())
    }

    /// Checks what has run on simulated devices so far; always `Ok` for others.
    ///
    /// # Errors
    /// The simulation's finding.
    pub fn check(&self) -> Result<(), Failure> {
        self.simulation.as_ref().map_or(Ok(()), |simulation| (simulation.check)())
    }
}

/// Refuses debug checks that a backend over a driver has not got.
///
/// # Errors
/// Guard granules on a GPU.
pub fn check_aids(request: &Request) -> Result<(), Failure> {
    let backed = matches!(request.device.backend, BackendKind::Cuda | BackendKind::Mps);
    if backed && request.memory.debug.guard {
        let (debug, device) = (request.memory.debug, request.device);
        return Err(Failure::misuse(format!(
            "--memory-debug {debug}: {device} cannot put a block between guard granules; \
             {} devices have pass-through and quarantine, the CPU has all",
            device.backend
        )));
    }
    Ok(())
}

/// The backend of the request; `None` if this build does not have it.
fn backend(request: &Request) -> Result<Option<Arc<dyn Backend>>, Failure> {
    check_aids(request)?;
    let AllocatorOptions { debug, trace_events } = request.memory;
    Ok(Some(match request.device.backend {
        BackendKind::Cpu => {
            let config = request.threads.map_or_else(CpuConfig::default, CpuConfig::threads);
            let config = config.debug(debug).trace_events(trace_events);
            Arc::new(CpuBackend::with_config(config).map_err(|e| match request.threads {
                Some(n) => Failure::misuse(format!("--threads {n}: {e}")),
                None => Failure::from(e),
            })?)
        }
        #[cfg(feature = "cuda")]
        BackendKind::Cuda => {
            let config = CudaConfig::default().debug(debug).trace_events(trace_events);
            Arc::new(CudaBackend::with_config(config))
        }
        #[cfg(feature = "mps")]
        BackendKind::Mps => {
            let config = MpsConfig::default().debug(debug).trace_events(trace_events);
            Arc::new(MpsBackend::with_config(config))
        }
        _ => return Ok(None),
    }))
}
