//! The targets of programs: a fresh backend for each, and the findings at its end.
//!
//! This is the one module that names backends.

#[cfg(feature = "sim")]
use crate::dice::Dice;
use crate::kernels::Kernel;
use crate::prelude::Place;
use leasehold::backend::Backend;
use leasehold::backend::sync::Arc;
use leasehold::kernel::KernelSource;
use leasehold::{BackendKind, Context, DeviceId, Error, KernelBase, Result, Runtime};
use leasehold_collective::{CollectiveOps, ElementType};
#[cfg(feature = "sim")]
use leasehold_sim::collective::SimCollectives;
use std::time::{Duration, Instant};

#[cfg(feature = "cuda")]
use leasehold_cuda::{CudaBackend, CudaConfig};
#[cfg(feature = "mps")]
use leasehold_mps::{MpsBackend, MpsConfig};
#[cfg(feature = "sim")]
use leasehold_sim::{
    FaultAction, FaultPlan, FaultRule, KernelBody, KernelRegistry, KernelSpec, MachineConfig,
    Monitor, ReportKind, SimBackend, When,
};

/// A device, and whether the driver under it is simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// The device.
    pub device: DeviceId,
    /// CUDA or Metal over the simulated driver.
    pub simulated: bool,
}

/// The disturbances in a program's driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weather {
    /// Nothing.
    Fair,
    /// Commands come late and in another order; nothing fails.
    Late,
    /// Calls fail, and so may steps.
    Foul,
}

/// The kernels, in the order of [`Kernel::ALL`].
pub(crate) type Kernels = [KernelBase; Kernel::ALL.len()];

/// A backend in use.
pub struct Bench {
    under: Under,
    runtime: Runtime,
    kernels: Kernels,
    /// Another device with its kernels. Its runtime is kept until it is first asked for.
    far: Option<(DeviceId, Kernels, Place<Runtime>)>,
}

/// Ranks: a device for each, or one that they share, and what makes their calls.
pub(crate) struct RankBench {
    pub(crate) under: Under,
    /// By rank.
    pub(crate) runtimes: Vec<Runtime>,
    pub(crate) kernels: Kernels,
    /// `None`: the device's own.
    pub(crate) library: Option<Arc<dyn CollectiveOps>>,
}

/// The machine and the drivers under the runtimes.
pub(crate) struct Under {
    context: Context,
    pub(crate) weather: Weather,
    #[cfg(feature = "sim")]
    machine: Option<Monitor>,
    /// Says what is left in the simulated driver, and which of its rules were broken.
    #[cfg(feature = "sim")]
    left: Option<Left>,
}

/// A backend that was made, and what is known of it alone.
struct Made {
    backend: Arc<dyn Backend>,
    #[cfg(feature = "sim")]
    machine: Option<Monitor>,
    #[cfg(feature = "sim")]
    left: Option<Left>,
    /// The library of collectives, if it is not the device's own.
    library: Option<Arc<dyn CollectiveOps>>,
}

impl Made {
    /// A backend whose driver is not simulated.
    fn real(backend: Arc<dyn Backend>) -> Self {
        Self {
            backend,
            #[cfg(feature = "sim")]
            machine: None,
            #[cfg(feature = "sim")]
            left: None,
            library: None,
        }
    }
}

/// Finds what is left in a simulated driver. The argument says whether a device was lost.
#[cfg(feature = "sim")]
type Left = Box<dyn Fn(bool) -> Vec<String> + Send + Sync>;

/// Bytes of a simulated device.
const MEMORY: u64 = 1 << 30;
/// Bytes of a rank's simulated device.
const RANK_MEMORY: u64 = 1 << 28;
/// How long a wait of a simulated machine goes on without a command that can run.
const TIMEOUT: Duration = Duration::from_secs(10);

impl Target {
    /// A device as it is named.
    ///
    /// # Errors
    /// `InvalidArgument` for a simulated CPU; `Unsupported` for devices that this build cannot try.
    pub fn new(device: DeviceId, simulated: bool) -> Result<Self> {
        match (device.backend, simulated) {
            (BackendKind::Cpu, true) => Err(Error::invalid("the CPU has no driver to simulate")),
            (BackendKind::Cpu, false) => Ok(Self { device, simulated }),
            #[cfg(feature = "cuda")]
            (BackendKind::Cuda, _) => Ok(Self { device, simulated }),
            #[cfg(feature = "mps")]
            (BackendKind::Mps, _) => Ok(Self { device, simulated }),
            #[cfg(feature = "sim")]
            (BackendKind::Sim, _) => Ok(Self { device, simulated: true }),
            (other, _) => {
                Err(Error::Unsupported(format!("this build cannot stress {other} devices").into()))
            }
        }
    }

    /// The other device of a seed's program, if there is one.
    pub(crate) fn far(&self, seed: u64) -> Option<DeviceId> {
        let cpu = Some(DeviceId::cpu(0));
        match self.device.backend {
            BackendKind::Cpu if cfg!(feature = "sim") => {
                Some(DeviceId { backend: BackendKind::Sim, ordinal: 0 })
            }
            BackendKind::Cpu => None,
            _ if !self.simulated || seed % 2 == 1 => cpu,
            backend => {
                Some(DeviceId { backend, ordinal: if self.device.ordinal == 0 { 1 } else { 0 } })
            }
        }
    }

    fn source(device: DeviceId, kernel: Kernel) -> KernelSource<'static> {
        match device.backend {
            BackendKind::Cuda => {
                KernelSource::Ptx(include_str!("kernels/cuda/ptx/stress_kernels.ptx").into())
            }
            BackendKind::Mps => {
                KernelSource::Msl(include_str!("kernels/mps/stress_kernels.metal").into())
            }
            BackendKind::Cpu => KernelSource::Cpu(kernel.function()),
            _ => KernelSource::Registered(kernel.name().into()),
        }
    }

    /// The weather of a seed's program.
    pub(crate) fn weather(&self, seed: u64, faults: bool) -> Weather {
        match (faults, self.simulated, seed % 4) {
            (false, ..) => Weather::Fair,
            (true, true, 0) => Weather::Late,
            (true, ..) => Weather::Foul,
        }
    }

    /// A fresh backend of the device's kind; the ranks' devices are of one machine.
    fn make(&self, seed: u64, devices: u32, memory: u64, timeout: Duration) -> Result<Made> {
        #[cfg(feature = "sim")]
        let config = || machine_config(seed).devices(devices, memory).timeout(timeout);
        let _ = (seed, devices, memory, timeout);
        Ok(match self.device.backend {
            #[cfg(feature = "sim")]
            BackendKind::Sim => {
                let made = SimBackend::new(config())?;
                let library: Arc<dyn CollectiveOps> = Arc::new(SimCollectives::of_sim(&made));
                let machine = Some(made.machine().clone());
                Made { backend: Arc::new(made), machine, left: None, library: Some(library) }
            }
            #[cfg(feature = "cuda")]
            BackendKind::Cuda if self.simulated => {
                use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
                let made = Arc::new(SimDriver::new(SimDriverConfig::new(config()))?);
                let machine = Some(made.machine().clone());
                let driver = made.clone();
                let left = Some(Box::new(move |lost: bool| {
                    let mut all = driver.take_leaks();
                    if !driver.census().is_nothing() {
                        all.push(format!("left in the driver: {:?}", driver.census()));
                    }
                    if lost { Vec::new() } else { all }
                }) as Left);
                let library: Arc<dyn CollectiveOps> = Arc::new(SimCollectives::of_cuda(&made));
                let backend = Arc::new(CudaBackend::with_ops(made, CudaConfig::default())?);
                Made { backend, machine, left, library: Some(library) }
            }
            #[cfg(feature = "mps")]
            BackendKind::Mps if self.simulated => {
                use leasehold_sim::mps::{SimDriver, SimDriverConfig};
                let made = Arc::new(SimDriver::new(SimDriverConfig::new(config()))?);
                let machine = Some(made.machine().clone());
                let driver = made.clone();
                let left = Some(Box::new(move |_: bool| {
                    let broken = driver.take_broken_rules();
                    let mut all: Vec<_> = broken.iter().map(ToString::to_string).collect();
                    if !driver.census().is_nothing() {
                        all.push(format!("left in the driver: {:?}", driver.census()));
                    }
                    all
                }) as Left);
                let backend = Arc::new(MpsBackend::with_ops(made, MpsConfig::default())?);
                Made { backend, machine, left, library: None }
            }
            #[cfg(feature = "mps")]
            BackendKind::Mps => Made::real(Arc::new(MpsBackend::new())),
            #[cfg(feature = "cuda")]
            BackendKind::Cuda => {
                Made::real(Arc::new(CudaBackend::with_config(CudaConfig::default())))
            }
            _ => Made::real(Arc::new(leasehold::cpu::CpuBackend::new())),
        })
    }

    /// The kernels for a device's kind.
    fn kernels(device: DeviceId) -> Result<Kernels> {
        let [add, mask, scale, gather] = Kernel::ALL;
        // SAFETY: the sources of one kernel for all devices.
        let base = |k: Kernel| unsafe { k.base(Self::source(device, k)) };
        Ok([base(add)?, base(mask)?, base(scale)?, base(gather)?])
    }

    /// A fresh backend with a runtime and the kernels made ready.
    ///
    /// # Errors
    /// The driver's own.
    pub fn open(&self, seed: u64, faults: bool) -> Result<Bench> {
        let weather = self.weather(seed, faults);
        let made = self.make(seed, 2, MEMORY, TIMEOUT)?;
        #[cfg(feature = "sim")]
        let mut machine = made.machine;
        let mut backends = vec![made.backend];
        let far = self.far(seed);
        match far.map(|far| far.backend) {
            Some(other) if other == self.device.backend => {}
            #[cfg(feature = "sim")]
            Some(BackendKind::Sim) => {
                let made = SimBackend::new(machine_config(seed))?;
                machine = Some(made.machine().clone());
                backends.push(Arc::new(made));
            }
            Some(_) => backends.push(Arc::new(leasehold::cpu::CpuBackend::new())),
            None => {}
        }
        let context = Context::with_backends(backends);
        let ready = |device: DeviceId| {
            let (runtime, kernels) = (context.runtime(device)?, Self::kernels(device)?);
            kernels.iter().try_for_each(|k| k.prepare(&runtime))?;
            Ok::<_, Error>((runtime, kernels))
        };
        let (runtime, kernels) = ready(self.device)?;
        let far = match far {
            Some(device) => {
                let (runtime, kernels) = ready(device)?;
                let place = Place::new();
                place.put(runtime);
                Some((device, kernels, place))
            }
            None => None,
        };
        #[cfg(feature = "sim")]
        if let Some(machine) = &machine {
            machine.set_faults(plan(seed, weather, self.device.backend));
        }
        let under = Under {
            context,
            weather,
            #[cfg(feature = "sim")]
            machine,
            #[cfg(feature = "sim")]
            left: made.left,
        };
        Ok(Bench { under, runtime, kernels, far })
    }

    /// Checks that the device's kind has collectives, so that it can have programs of ranks.
    ///
    /// # Errors
    /// `Unsupported` for Metal.
    pub fn has_collectives(&self) -> Result<()> {
        match self.device.backend {
            BackendKind::Mps => Err(Error::Unsupported(
                "there is no library of collectives for Metal; take cpu:0, sim:0 or cuda:0".into(),
            )),
            _ => Ok(()),
        }
    }

    /// The types of elements whose calls the device's library makes.
    pub(crate) fn elements(&self) -> Vec<ElementType> {
        let real = self.device.backend == BackendKind::Cuda && !self.simulated;
        // NCCL reduces no integers of 16 bits.
        let has = |e: &ElementType| !real || !matches!(e, ElementType::I16 | ElementType::U16);
        ElementType::ALL.into_iter().filter(has).collect()
    }

    /// A fresh backend with a device for each rank from the target's own on. On the CPU the ranks
    /// share one. Waits of a simulated machine end after `timeout`. With faults, commands come
    /// late or in another order.
    ///
    /// # Errors
    /// The driver's own; `Unsupported` and `Unavailable` without a library or devices.
    pub(crate) fn open_ranks(
        &self,
        seed: u64,
        faults: bool,
        ranks: u32,
        timeout: Duration,
    ) -> Result<RankBench> {
        self.has_collectives()?;
        let weather = if faults { Weather::Late } else { Weather::Fair };
        let first = self.device.ordinal;
        let shared = self.device.backend == BackendKind::Cpu;
        let made = self.make(seed, first.saturating_add(ranks).max(2), RANK_MEMORY, timeout)?;
        let context = Context::with_backends(vec![made.backend]);
        let kernels = Self::kernels(self.device)?;
        let mut runtimes = Vec::new();
        for rank in 0..ranks {
            let ordinal = if shared { first } else { first + rank };
            let device = context.runtime(DeviceId { ordinal, ..self.device })?;
            kernels.iter().try_for_each(|k| k.prepare(&device))?;
            // A rank has a stream of its own.
            runtimes.push(device.create_stream()?.runtime());
        }
        #[cfg(feature = "sim")]
        if let Some(machine) = &made.machine {
            machine.set_faults(plan(seed, weather, self.device.backend));
        }
        let under = Under {
            context,
            weather,
            #[cfg(feature = "sim")]
            machine: made.machine,
            #[cfg(feature = "sim")]
            left: made.left,
        };
        Ok(RankBench { under, runtimes, kernels, library: made.library })
    }
}

#[cfg(feature = "sim")]
fn machine_config(seed: u64) -> MachineConfig {
    let kernels = KernelRegistry::new();
    for kernel in Kernel::ALL {
        let spec = KernelSpec::new(
            kernel.bindings(),
            size_of::<crate::kernels::Params>() as u32,
            // SAFETY: the machine runs what the runtime launches, which asks the kernel's check.
            unsafe { KernelBody::cpu(kernel.function()) },
        );
        // An update of a graph may leave blocks out, and what they would write is as it was.
        let spec = spec.leaving_gaps();
        let spec = if kernel.reads_early() { spec.reading_early() } else { spec };
        kernels.register(kernel.name(), spec);
    }
    MachineConfig::seed(seed).devices(2, MEMORY).kernels(kernels)
}

/// Which calls are disturbed, by the weather.
#[cfg(feature = "sim")]
fn plan(seed: u64, weather: Weather, backend: BackendKind) -> FaultPlan {
    const CUDA: [&[&str]; 3] = [
        &["cuMemCreate", "cuMemHostAlloc", "cuMemMap", "cuMemAddressReserve"],
        &[
            "cuLaunchKernel",
            "cuMemcpyHtoDAsync",
            "cuMemcpyDtoHAsync",
            "cuMemcpyDtoDAsync",
            "cuGraphLaunch",
        ],
        &["cuStreamCreateWithPriority", "cuEventCreate", "cuGraphInstantiate", "cuGraphCreate"],
    ];
    const MPS: [&[&str]; 3] = [
        &["newHeapWithDescriptor", "newBufferWithLength:options:offset"],
        &["commit", "commandBufferWithDescriptor"],
        &["newEvent", "newSharedEvent", "newFence"],
    ];
    const SIM: [&[&str]; 3] = [
        &["create", "host_alloc", "map", "reserve"],
        &["submit", "enqueue"],
        &["queue_create", "event_create", "instantiate", "graph_create"],
    ];
    let mut dice = Dice::new(seed ^ 0xFA17);
    let rules = |calls: &[&str], p: f64, action: &FaultAction| {
        calls
            .iter()
            .map(|c| FaultRule::on(c, When::Probability(p), action.clone()))
            .collect::<Vec<_>>()
    };
    let [memory, submissions, creations] = match backend {
        BackendKind::Cuda => CUDA,
        BackendKind::Mps => MPS,
        _ => SIM,
    };
    let rules = match weather {
        Weather::Fair => Vec::new(),
        Weather::Late => {
            let mut all = rules(submissions, 0.05, &FaultAction::Delay(1 + dice.below(40)));
            all.extend(rules(submissions, 0.05, &FaultAction::Reorder));
            all.extend(rules(submissions, 0.05, &FaultAction::LateCallback(1 + dice.below(40))));
            all.extend(rules(&["ncclGroupEnd"], 0.05, &FaultAction::Delay(1 + dice.below(40))));
            all
        }
        Weather::Foul => match dice.below(8) {
            0 | 1 => rules(memory, 0.3, &FaultAction::OutOfMemory),
            2..5 => rules(submissions, 0.002, &FaultAction::Fail(999)),
            5 | 6 => rules(creations, 0.05, &FaultAction::Fail(218)),
            _ => vec![FaultRule::any(
                When::At(u64::from(500 + dice.below(20_000))),
                FaultAction::DeviceLost,
            )],
        },
    };
    rules.into_iter().fold(FaultPlan::none(), FaultPlan::with)
}

impl Bench {
    /// The runtime.
    #[must_use]
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// The kernels, in the order of [`Kernel::ALL`].
    #[must_use]
    pub fn kernels(&self) -> &[KernelBase; Kernel::ALL.len()] {
        &self.kernels
    }

    /// The runtime of another device of the context, if there is one.
    ///
    /// # Errors
    /// As [`Context::runtime`].
    pub fn far(&self) -> Option<Result<Runtime>> {
        let (device, _, first) = self.far.as_ref()?;
        Some(first.take().map_or_else(|| self.under.context.runtime(*device), Ok))
    }

    pub(crate) fn far_device(&self) -> Option<DeviceId> {
        self.far.as_ref().map(|far| far.0)
    }

    /// The other device's kernels, in the order of [`Kernel::ALL`]; the device's own where there is
    /// no other.
    #[must_use]
    pub fn far_kernels(&self) -> &[KernelBase; Kernel::ALL.len()] {
        self.far.as_ref().map_or(&self.kernels, |far| &far.1)
    }

    /// Nothing is disturbed any more.
    pub(crate) fn calm(&self) {
        self.under.calm();
    }

    pub(crate) fn weather(&self) -> Weather {
        self.under.weather
    }

    /// Ends the runtime and the backend, and says what is left or was seen.
    ///
    /// # Errors
    /// The findings.
    pub fn close(self) -> std::result::Result<(), String> {
        let mut findings = Vec::new();
        let far = self.far().transpose().unwrap_or_else(|e| {
            findings.extend(
                (self.weather() != Weather::Foul)
                    .then(|| format!("a runtime cannot be opened again: {e}")),
            );
            None
        });
        drop((self.kernels, self.far));
        let runtimes = [Some(self.runtime), far].into_iter().flatten().collect();
        self.under.end(runtimes, findings)
    }

    /// Says what the queues of the simulated machine wait for.
    pub(crate) fn waits(&self) -> Box<dyn Fn() -> String> {
        self.under.waits()
    }
}

impl Under {
    fn calm(&self) {
        #[cfg(feature = "sim")]
        if let Some(machine) = &self.machine {
            machine.set_faults(FaultPlan::none());
        }
    }

    /// Ends the runtimes and the backend, and says what is left or was seen.
    pub(crate) fn end(
        self,
        runtimes: Vec<Runtime>,
        mut findings: Vec<String>,
    ) -> std::result::Result<(), String> {
        let lost = self.is_lost();
        for runtime in runtimes {
            if let Err(e) = runtime.synchronize()
                && self.weather != Weather::Foul
            {
                findings.push(format!("the device ends with an error: {e}"));
            }
            let live = runtime.allocator().stats().live;
            if live != 0 {
                findings.push(format!("{live} buffers live on after the last lease is gone"));
            }
            findings.extend(runtime.allocator().check().err());
            let closed = runtime.close(Duration::from_secs(20));
            if let Err(e) = closed
                && self.weather != Weather::Foul
            {
                findings.push(format!("the runtime cannot be closed: {e}"));
            }
        }
        // Threads of the backend give up the resources that a stream still kept.
        let end = Instant::now() + Duration::from_secs(10);
        let mut shut = self.context.shutdown();
        while matches!(shut, Err(Error::LeasesOutstanding { .. })) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
            shut = self.context.shutdown();
        }
        if let Err(e) = shut
            && !lost
        {
            findings.push(format!("the backend cannot be shut down: {e}"));
        }
        findings.extend(self.reports());
        #[cfg(feature = "sim")]
        if let Some(left) = &self.left {
            findings.extend(left(lost).into_iter().take(4));
        }
        if findings.is_empty() { Ok(()) } else { Err(findings.join("; ")) }
    }

    /// The first four reports of the simulated machine since the last call.
    pub(crate) fn reports(&self) -> Vec<String> {
        #[cfg(feature = "sim")]
        if let Some(machine) = &self.machine {
            let mut reports = machine.take_reports();
            // Where a write failed, nobody wrote.
            reports.retain(|r| self.weather != Weather::Foul || r.kind != ReportKind::NeverWritten);
            return reports.iter().take(4).map(|r| format!("the race detector: {r}")).collect();
        }
        Vec::new()
    }

    /// Says what the queues of the simulated machine wait for.
    pub(crate) fn waits(&self) -> Box<dyn Fn() -> String> {
        #[cfg(feature = "sim")]
        if let Some(machine) = self.machine.clone() {
            return Box::new(move || format!("; {}", machine.waits()));
        }
        Box::new(String::new)
    }

    fn is_lost(&self) -> bool {
        #[cfg(feature = "sim")]
        if let Some(machine) = &self.machine {
            return (0..2).any(|d| machine.device_status(d).is_err());
        }
        false
    }
}
