//! Collectives between simulated devices: the ranks of a program, as threads of one process, each
//! with a device of one simulated machine.
//!
//! [`SimCollectives`] is a library of collectives ([`CollectiveOps`]) over a
//! [machine](crate): that of a [`SimBackend`], or that under a simulated CUDA driver. All
//! ranks get clones of one ([`CommConfig::ops`](leasehold_collective::CommConfig::ops)).
//!
//! A call becomes a command of the rank's queue at which the ranks meet ([`Meet`]). So the machine
//! computes the right values in virtual time, and its seed picks the order. It reports memory that
//! is used without an order, calls that do not fit each other, and cycles of calls that wait for
//! each other ([`Monitor::take_reports`]).
//!
//! # Limits
//! Nothing ends a call whose other ranks never come. A wait for such a call ends when nothing has
//! run for the machine's timeout
//! ([`MachineConfig::timeout`](crate::MachineConfig::timeout)). Its error names the
//! ranks. The timeout must not be zero, because the ranks are threads. On simulated CUDA such a
//! wait needs a limit of its own; [`Monitor::waits`] then names the ranks.
//!
//! Calls that do not fit each other fail their streams, with `Mismatch`. On simulated CUDA the
//! devices are lost, because CUDA has no failed streams.
//!
//! An abort ends calls as NCCL does: without an error, and with garbage in their memory.
//!
//! # Windows
//! A window is a whole mapping of shareable memory. The machine reports one over other memory, and
//! one whose memory went before it ([`ReportKind::Misuse`](crate::ReportKind::Misuse)).
//! Calls in windows have the values that they have elsewhere; [`SimCollectives::windowed`] counts
//! them.
//!
//! # Faults
//! The library's functions are counted under NCCL's names, and a fault plan may fail, delay or hang
//! them ([`FaultPlan`](crate::FaultPlan)): `ncclCommInitRank`, `ncclGroupEnd`, `ncclCommAbort`,
//! `ncclCommGetAsyncError`, `ncclCommDestroy`.
//!
//! ```
//! use leasehold::{Context, Result, Runtime};
//! use leasehold_collective::{CommConfig, Reduce, World};
//! use leasehold_sim::collective::SimCollectives;
//! use leasehold_sim::{MachineConfig, SimBackend};
//! use std::sync::Arc;
//! # fn main() -> Result<()> {
//! let backend = Arc::new(SimBackend::new(MachineConfig::seed(7).devices(3, 1 << 26))?);
//! let config = CommConfig::new("data").ops(Arc::new(SimCollectives::of_sim(&backend)));
//! let context = Context::with_backends(vec![backend.clone()]);
//! let ranks: Vec<_> = World::threads(3)?
//!     .into_iter()
//!     .map(|world| {
//!         let (context, config) = (context.clone(), config.clone());
//!         std::thread::spawn(move || -> Result<Vec<u32>> {
//!             let runtime = context.runtime(format!("sim:{}", world.rank()).parse()?)?;
//!             let comm = world.comm(&runtime, &config)?;
//!             let x = runtime.upload(&[world.rank(), 10])?;
//!             comm.all_reduce(runtime.stream(), &x, Reduce::Sum)?;
//!             runtime.to_vec(&x)
//!         })
//!     })
//!     .collect();
//! for rank in ranks {
//!     assert_eq!(rank.join().unwrap()?, [3, 30]);
//! }
//! assert!(backend.machine().take_reports().is_empty());
//! # Ok(())
//! # }
//! ```

use crate::cuda::SimDriver;
use crate::{
    CommCall, CommId, CommJoin, CommOp, Command, Element, Machine, Meet, Monitor, QueueId,
    Reduction, SimBackend,
};
use leasehold::backend::BackendKind;
use leasehold::backend::sync::atomic::{AtomicU64, Ordering};
use leasehold::backend::sync::{Arc, Mutex, thread};
use leasehold::{Error, Result};
use leasehold_collective::driver::{Call, CollectiveOps, Communicator, Place};
use leasehold_collective::{ElementType, Kind, Reduce};
use leasehold_cuda::driver::ops::NativeStream;
use std::fmt;

/// A library of collectives between the devices of a simulated machine. Clones are the same
/// library; any thread may call it.
#[derive(Clone)]
pub struct SimCollectives(Arc<Library>);

struct Library {
    machine: Monitor,
    native: Native,
    /// Distinguishes the libraries of a process.
    serial: u64,
    /// Calls that were in windows.
    windowed: AtomicU64,
}

/// The streams that calls are given to.
enum Native {
    /// Queues of the machine.
    Queues(Machine),
    /// Streams of a simulated CUDA driver.
    Cuda(Arc<SimDriver>),
}

/// Libraries that were made.
static MADE: AtomicU64 = AtomicU64::new(0);

impl SimCollectives {
    /// The library for the devices of a simulated backend: `sim:0`, `sim:1`, ….
    #[must_use]
    pub fn of_sim(backend: &SimBackend) -> Self {
        let machine = backend.machine().clone();
        // SAFETY: calls enter the queue that a foreign call is given, in its turn, and use memory
        // that the foreign call declares. Nothing else is changed.
        let native = Native::Queues(unsafe { machine.drive() });
        Self::of(machine, native)
    }

    /// The library for the devices of a simulated CUDA driver: `cuda:0`, `cuda:1`, ….
    #[must_use]
    pub fn of_cuda(driver: &Arc<SimDriver>) -> Self {
        Self::of(driver.machine().clone(), Native::Cuda(driver.clone()))
    }

    fn of(machine: Monitor, native: Native) -> Self {
        let serial = MADE.fetch_add(1, Ordering::Relaxed);
        Self(Arc::new(Library { machine, native, serial, windowed: AtomicU64::new(0) }))
    }

    /// Calls of all ranks so far whose memory was in windows. A call of a graph counts as often as
    /// the backend makes it.
    #[must_use]
    pub fn windowed(&self) -> u64 {
        self.0.windowed.load(Ordering::Relaxed)
    }

    /// The machine: reports, faults and time.
    #[must_use]
    pub fn machine(&self) -> &Monitor {
        &self.0.machine
    }
}

impl fmt::Debug for SimCollectives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimCollectives").field("machine", self.machine()).finish()
    }
}

impl CollectiveOps for SimCollectives {
    fn name(&self) -> &str {
        concat!("simulated collectives ", env!("CARGO_PKG_VERSION"))
    }

    fn unique_id(&self) -> Result<Vec<u8>> {
        let key = self.0.machine.comm_key();
        Ok([self.0.serial, key].iter().flat_map(|word| word.to_le_bytes()).collect())
    }

    fn init(&self, place: &Place) -> Result<Arc<dyn Communicator>> {
        let library = &self.0;
        let own = match library.native {
            Native::Queues(_) => BackendKind::Sim,
            Native::Cuda(_) => BackendKind::Cuda,
        };
        let id = place.runtime.device();
        if id.backend != own {
            return Err(Error::Unsupported(
                format!(
                    "rank {} of {} is on {id}; this library is for the simulated devices of another backend",
                    place.rank,
                    place.name.as_str()
                )
                .into(),
            ));
        }
        let key = place.id.strip_prefix(&library.serial.to_le_bytes());
        let key = key.and_then(|key| key.try_into().ok()).map(u64::from_le_bytes);
        let key = key.ok_or_else(|| {
            Error::state(format!(
                "rank {} of {} has another library than rank 0; give all ranks clones of one SimCollectives",
                place.rank,
                place.name.as_str()
            ))
        })?;
        let (machine, device) = (&library.machine, id.ordinal);
        machine.note(device, "ncclCommInitRank")?;
        let name = place.name.as_str();
        let (size, rank) = (place.size, place.rank);
        let comm = machine.comm_join(&CommJoin { key, name, size, rank, device })?;
        let part = Part {
            library: library.clone(),
            comm,
            device,
            aborted: Mutex::default(),
            windows: Mutex::default(),
        };
        if let Err(e) = machine.comm_wait(comm, Some(place.limit)) {
            part.leave();
            return Err(e);
        }
        Ok(Arc::new(part))
    }
}

/// A rank of a communicator.
struct Part {
    library: Arc<Library>,
    comm: CommId,
    device: u32,
    aborted: Mutex<Option<Error>>,
    /// Addresses and bytes.
    windows: Mutex<Vec<(u64, u64)>>,
}

impl Part {
    /// Counts a function of the library. A loss of the device is no failure of it.
    fn note(&self, function: &str) -> Result<()> {
        match self.library.machine.note(self.device, function) {
            Err(Error::DeviceLost { .. }) => Ok(()),
            other => other,
        }
    }

    /// As long as it is held the rank is not aborted.
    fn living(&self) -> Result<impl Sized + '_> {
        let aborted = self.aborted.lock();
        match &*aborted {
            Some(cause) => Err(cause.clone()),
            None => Ok(aborted),
        }
    }

    /// Leaves a communicator that other ranks have not joined.
    fn leave(&self) {
        let machine = &self.library.machine;
        // The rank has joined and made no call, so a failure is one of the fault plan.
        let _ = machine.comm_abort(self.comm).and_then(|()| machine.comm_destroy(self.comm));
    }
}

impl Part {
    /// Counts calls in windows, and reports windows without memory.
    fn look_at_windows(&self, calls: &[Call<'_>]) {
        let machine = &self.library.machine;
        let windows = self.windows.lock();
        for &(addr, bytes) in
            windows.iter().filter(|(addr, bytes)| !machine.is_shared(*addr, *bytes))
        {
            machine.misused(format!(
                "a call while a window of {bytes} bytes at {addr:#x} has no memory"
            ));
        }
        let inside = |b: leasehold::backend::Binding| {
            windows.iter().any(|&(at, len)| at <= b.addr && b.addr + b.len <= at + len)
        };
        let inside = |call: &&Call<'_>| {
            let mut sides = [call.src, call.dst].into_iter().flatten().peekable();
            sides.peek().is_some() && sides.all(inside)
        };
        let count = calls.iter().filter(inside).count() as u64;
        self.library.windowed.fetch_add(count, Ordering::Relaxed);
    }
}

impl Communicator for Part {
    unsafe fn enqueue(&self, stream: u64, calls: &[Call<'_>]) -> Result<()> {
        drop(self.living()?);
        let Library { machine, native, .. } = &*self.library;
        let _turn = machine.library_enter(self.device, "ncclGroupEnd")?;
        // Two threads that do not take turns meet here more often.
        thread::yield_now();
        machine.note(self.device, "ncclGroupEnd")?;
        self.look_at_windows(calls);
        let meet = Meet { comm: self.comm, calls: calls.iter().map(call).collect::<Result<_>>()? };
        // An abort on another thread comes before this or after it.
        let _living = self.living()?;
        match native {
            Native::Queues(machine) => machine.enqueue(QueueId(stream), Command::Meet(meet)),
            // SAFETY: the caller vouches for the stream and for the calls' memory.
            Native::Cuda(driver) => unsafe { driver.meet(NativeStream(stream), meet) },
        }
    }

    fn abort(&self, cause: Error) {
        self.aborted.lock().get_or_insert(cause);
        // A fault plan may fail the call, or let it hang.
        if self.note("ncclCommAbort").is_ok() {
            let _ = self.library.machine.comm_abort(self.comm);
        }
    }

    fn failure(&self) -> Option<Error> {
        let status = self.note("ncclCommGetAsyncError");
        let own = self.aborted.lock().clone();
        own.or_else(|| status.and_then(|()| self.library.machine.comm_status(self.comm)).err())
    }

    unsafe fn register(&self, addr: u64, bytes: u64) -> Result<u64> {
        self.note("ncclCommWindowRegister")?;
        let machine = &self.library.machine;
        if !machine.is_shared(addr, bytes) {
            machine.misused(format!(
                "a window of {bytes} bytes at {addr:#x}, which are not one segment of shareable memory"
            ));
            return Err(Error::invalid("a window needs one whole segment of shareable memory"));
        }
        self.windows.lock().push((addr, bytes));
        Ok(addr)
    }

    fn deregister(&self, window: u64) -> Result<()> {
        self.note("ncclCommWindowDeregister")?;
        let mut windows = self.windows.lock();
        let found = windows.iter().position(|(addr, _)| *addr == window);
        let machine = &self.library.machine;
        let Some(found) = found else {
            machine.misused(format!("the end of a window at {window:#x}, which there is not"));
            return Err(Error::invalid("a window that was not registered"));
        };
        let (addr, bytes) = windows.swap_remove(found);
        if !machine.is_shared(addr, bytes) {
            machine.misused(format!("memory of {bytes} bytes at {addr:#x} went before its window"));
        }
        Ok(())
    }

    fn destroy(&self) -> Result<()> {
        self.note("ncclCommDestroy")?;
        self.library.machine.comm_destroy(self.comm)
    }
}

/// A call in the machine's form.
fn call(call: &Call<'_>) -> Result<CommCall> {
    let signature = call.signature;
    let op = match signature.kind {
        Kind::AllReduce(reduce) => CommOp::AllReduce(reduction(reduce)),
        Kind::AllGather => CommOp::AllGather,
        Kind::ReduceScatter(reduce) => CommOp::ReduceScatter(reduction(reduce)),
        Kind::Broadcast { root } => CommOp::Broadcast { root },
        Kind::Reduce { reduce, root } => CommOp::Reduce { reduction: reduction(reduce), root },
        Kind::AllToAll => CommOp::AllToAll,
        Kind::Barrier => CommOp::Barrier,
        Kind::Send { to } => CommOp::Send { to },
        Kind::Recv { from } => CommOp::Recv { from },
    };
    let [send, recv] = [call.src, call.dst].map(|binding| binding.map_or(0, |b| b.addr));
    Ok(CommCall { op, element: element(signature.element)?, count: signature.count, send, recv })
}

fn reduction(reduce: Reduce) -> Reduction {
    match reduce {
        Reduce::Sum => Reduction::Sum,
        Reduce::Product => Reduction::Product,
        Reduce::Least => Reduction::Least,
        Reduce::Largest => Reduction::Largest,
        Reduce::Average => Reduction::Average,
    }
}

/// The type that has the same name.
fn element(element: ElementType) -> Result<Element> {
    let mut all = Element::ALL.into_iter();
    all.find(|e| e.to_string() == element.name()).ok_or_else(|| {
        Error::Unsupported(format!("collectives of {element} are not simulated").into())
    })
}
