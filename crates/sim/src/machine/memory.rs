//! The machine's memory, as its callers see it.
//!
//! Memory of devices has addresses from [`DEVICE_BASE`](super::DEVICE_BASE) on, one space for all devices. Allocations have both, addresses and memory;
//! reservations, pieces and mappings have them apart. Host memory that is pinned or registered is reached by devices at its own address;
//! other host memory by copies only.
//!
//! What is freed while nothing says that its last use is over, or while a command that names it is pending, is reported. It goes all the same.

use super::detect::{Actor, HOST, Operation, ReportKind};
use super::space::{Gone, Part, Reach};
use super::{Machine, MemoryUse, Monitor, PieceId, QueueId, State};
use leasehold_core::{Error, Result};
use leasehold_hal::Access;

impl Machine {
    /// Allocates `bytes` of a device's memory.
    ///
    /// # Errors
    /// `OutOfMemory`; `InvalidArgument` for no bytes; `DeviceLost`; the fault plan's.
    pub fn alloc(&self, device: u32, bytes: u64) -> Result<u64> {
        self.enter(device, "alloc")?.space.alloc(device, bytes)
    }

    /// Frees an allocation.
    ///
    /// # Errors
    /// `InvalidArgument` for an address that is none; `DeviceLost`; the fault plan's. Nothing has changed then.
    pub fn free(&self, addr: u64) -> Result<()> {
        let device = self.lock().space.owner(addr).unwrap_or(0);
        let mut state = self.enter(device, "free")?;
        let gone = state.space.allocation(addr)?;
        state.is_gone(&gone, "free", ReportKind::UseAfterFree, true);
        state.space.free(addr)?;
        state.detector.forget(gone.key, gone.bytes);
        Ok(())
    }

    /// Allocates memory in the order of a queue: its address is known at once, and work that comes after this on the queue may use it.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_async(&self, queue: QueueId, bytes: u64) -> Result<u64> {
        let mut state = self.enter_queue(queue, "alloc_async")?;
        let device = state.queue(queue)?.device;
        let addr = state.space.alloc(device, bytes)?;
        if let Err(e) = state.push_allocated(queue, addr) {
            state.space.free(addr)?;
            return Err(e);
        }
        Ok(addr)
    }

    /// Frees an allocation in the order of a queue.
    ///
    /// # Errors
    /// `InvalidArgument` for an address that is no allocation; `DeviceLost`; the fault plan's.
    pub fn free_async(&self, queue: QueueId, addr: u64) -> Result<()> {
        let mut state = self.enter_queue(queue, "free_async")?;
        state.push(queue, super::Command::Free(addr))
    }

    /// Reserves addresses. `align` is a power of two, or 0 for [`GRANULARITY`](super::GRANULARITY), of which `bytes` is a multiple.
    ///
    /// # Errors
    /// `InvalidArgument`; `OutOfMemory` without addresses; the fault plan's.
    pub fn reserve(&self, bytes: u64, align: u64) -> Result<u64> {
        self.enter_host("reserve")?.space.reserve(bytes, align)
    }

    /// Gives a whole reservation back, in which nothing is mapped any more.
    ///
    /// # Errors
    /// `InvalidArgument`; the fault plan's.
    pub fn release(&self, addr: u64, bytes: u64) -> Result<()> {
        self.enter_host("release")?.space.release(addr, bytes)
    }

    /// Creates memory without addresses, a multiple of [`GRANULARITY`](super::GRANULARITY).
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn create(&self, device: u32, bytes: u64) -> Result<PieceId> {
        self.enter(device, "create")?.space.create(device, bytes)
    }

    /// Gives a piece up. It cannot be mapped any more; its memory goes with its last mapping.
    ///
    /// # Errors
    /// `InvalidArgument` for one that does not exist; the fault plan's.
    pub fn destroy(&self, piece: PieceId) -> Result<()> {
        let device = self.lock().space.piece_owner(piece).unwrap_or(0);
        let mut state = self.enter(device, "destroy")?;
        if let Some(gone) = state.space.destroy(piece)? {
            state.detector.forget(gone.key, gone.bytes);
        }
        Ok(())
    }

    /// Maps a piece at an address inside a reservation where nothing is mapped. Nobody reaches it before [`set_access`](Self::set_access).
    ///
    /// # Errors
    /// `InvalidArgument`; the fault plan's.
    pub fn map(&self, addr: u64, piece: PieceId) -> Result<()> {
        let device = self.lock().space.piece_owner(piece).unwrap_or(0);
        self.enter(device, "map")?.space.map(addr, piece)
    }

    /// Lets a device reach a range of whole mappings.
    ///
    /// # Errors
    /// `InvalidArgument`; the fault plan's.
    pub fn set_access(&self, device: u32, addr: u64, bytes: u64) -> Result<()> {
        self.enter(device, "set_access")?.space.set_access(device, addr, bytes)
    }

    /// Unmaps a range of whole mappings.
    ///
    /// # Errors
    /// `InvalidArgument`; the fault plan's.
    pub fn unmap(&self, addr: u64, bytes: u64) -> Result<()> {
        let device = self.lock().space.owner(addr).unwrap_or(0);
        let mut state = self.enter(device, "unmap")?;
        for gone in state.space.mapped(addr, bytes)? {
            state.is_gone(&gone, "unmap", ReportKind::UseAfterFree, true);
        }
        for gone in state.space.unmap(addr, bytes)? {
            state.detector.forget(gone.key, gone.bytes);
        }
        Ok(())
    }

    /// Allocates zeroed host memory that all devices reach, at an address of the host.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn host_alloc(&self, bytes: u64) -> Result<u64> {
        let addr = self.enter_host("host_alloc")?.space.host_alloc(bytes)?;
        Ok(addr)
    }

    /// Frees pinned host memory.
    ///
    /// # Errors
    /// `InvalidArgument` for an address that is none; the fault plan's.
    pub fn host_free(&self, addr: u64) -> Result<()> {
        let mut state = self.enter_host("host_free")?;
        let mut gone = state.space.host_free(addr)?;
        state.host_is_gone(&mut gone, "host free");
        Ok(())
    }

    /// Lets devices reach existing host memory.
    ///
    /// # Errors
    /// `InvalidArgument`; `InvalidState` where a part of it is registered already; the fault plan's.
    ///
    /// # Safety
    /// - The range is memory of this process that may be read and written, and stays so until it is unregistered and no work
    ///   uses it; nobody holds a reference to it while work does.
    pub unsafe fn host_register(&self, addr: u64, bytes: u64) -> Result<()> {
        self.enter_host("host_register")?.space.host_register(addr, bytes)
    }

    /// Ends what [`host_register`](Self::host_register) began.
    ///
    /// # Errors
    /// `InvalidArgument`; the fault plan's.
    pub fn host_unregister(&self, addr: u64) -> Result<()> {
        let mut state = self.enter_host("host_unregister")?;
        let mut gone = state.space.host_unregister(addr)?;
        state.host_is_gone(&mut gone, "host unregister");
        Ok(())
    }

    /// Lets kernels of `from` reach allocations of `to`. Says whether they could not before.
    ///
    /// # Errors
    /// `NotFound` for a device that does not exist; the fault plan's.
    pub fn enable_peer(&self, from: u32, to: u32) -> Result<bool> {
        let mut state = self.enter(from, "enable_peer")?;
        if to >= self.config().devices {
            return Err(Error::NotFound(format!("device {to} of {}", self.config().devices).into()));
        }
        Ok(state.space.enable_peer(from, to))
    }

    /// The opposite of [`enable_peer`](Self::enable_peer). Says whether they could before.
    ///
    /// # Errors
    /// As there.
    pub fn disable_peer(&self, from: u32, to: u32) -> Result<bool> {
        let mut state = self.enter(from, "disable_peer")?;
        if to >= self.config().devices {
            return Err(Error::NotFound(format!("device {to} of {}", self.config().devices).into()));
        }
        Ok(state.space.disable_peer(from, to))
    }

    /// Reads memory past all order, for tests and reports: whatever is there now. The detector does not look.
    ///
    /// # Errors
    /// `InvalidArgument` for an address where nothing is.
    pub fn peek(&self, addr: u64, to: &mut [u8]) -> Result<()> {
        let state = self.lock();
        let from = state.space.resolve(Reach::Engine, addr, to.len() as u64, &mut Vec::new());
        let from = from.map_err(Error::invalid)?;
        // SAFETY: as many bytes of the machine's memory are mapped there; the lock keeps the mapping.
        unsafe { std::ptr::copy(from, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Writes memory past all order, for tests and debug aids. For the detector nobody wrote it.
    ///
    /// # Errors
    /// `InvalidArgument` for an address where nothing is.
    pub fn poke(&self, addr: u64, from: &[u8]) -> Result<()> {
        let state = self.lock();
        let to = state.space.resolve(Reach::Engine, addr, from.len() as u64, &mut Vec::new());
        let to = to.map_err(Error::invalid)?;
        // SAFETY: as many bytes of the machine's memory are mapped there; the lock keeps the mapping.
        unsafe { std::ptr::copy(from.as_ptr(), to, from.len()) };
        Ok(())
    }
}

impl Monitor {
    /// Whether host memory is pinned or registered, all of it. No call of the plan's.
    #[must_use]
    pub fn is_pinned(&self, addr: u64, bytes: u64) -> bool {
        self.lock().space.is_pinned(addr, bytes)
    }

    /// Bytes in use of a device's memory, and in all. No call of the plan's.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn device_memory(&self, device: u32) -> Result<(u64, u64)> {
        if device >= self.0.config.devices {
            return Err(Error::NotFound(format!("device {device} of {}", self.0.config.devices).into()));
        }
        Ok(self.lock().space.device(device))
    }

    /// The device whose memory is at an address; `None` for what is no memory of a device. No call of the plan's.
    #[must_use]
    pub fn owner(&self, addr: u64) -> Option<u32> {
        self.lock().space.owner(addr)
    }

    /// Whether memory is in use that was not at `before`. For leak checks.
    #[must_use]
    pub fn leaked_since(&self, before: &MemoryUse) -> bool {
        self.memory_in_use() != *before
    }

    /// Tells the detector that the host reads host memory now.
    pub fn host_read(&self, addr: u64, bytes: u64) {
        self.lock().host_access(addr, bytes, Access::Read);
    }

    /// Tells the detector that the host writes host memory now.
    pub fn host_write(&self, addr: u64, bytes: u64) {
        self.lock().host_access(addr, bytes, Access::Write);
    }

    /// Tells the detector that pageable host memory is gone: a copy that is still to use it is reported.
    pub fn host_gone(&self, addr: u64, bytes: u64) {
        let mut state = self.lock();
        let mut gone = Gone { region: 0, key: addr, addr, bytes, pages: None };
        state.host_is_gone(&mut gone, "host memory's end");
    }
}

impl State {
    /// An access of the host's to its own memory.
    fn host_access(&mut self, addr: u64, bytes: u64, access: Access) {
        if !self.detector.on {
            return;
        }
        self.host_acts();
        self.host_accesses += 1;
        let name = if access.writes() { "host write" } else { "host read" }.into();
        let (clock, index) = (self.host.clone(), self.host_accesses);
        let who =
            Actor { agent: HOST, epoch: self.host_epoch, clock: &clock, name: &name, queue: None, index, node: None };
        self.detector.access(&who, addr, addr, bytes, access);
    }

    /// Reports who still uses memory that goes now: accesses that the host does not know to be over, and commands that are pending.
    fn is_gone(&mut self, gone: &Gone, by: &str, kind: ReportKind, accesses: bool) {
        if !self.detector.on {
            return;
        }
        self.host_accesses += 1;
        let second = Operation { name: by.into(), queue: None, stream: None, index: self.host_accesses, node: None };
        let mut first = Vec::new();
        if accesses {
            first = self.detector.unknown(&self.host, gone.key, gone.addr, gone.bytes);
        }
        let end = gone.addr + gone.bytes;
        for (id, q) in &self.queues {
            for entry in &q.entries {
                let mut touches = gone.region != 0 && entry.regions.iter().any(|r| r.1 == gone.region);
                if gone.region == 0 {
                    entry.action.for_each_range(|r| touches |= r.start < end && gone.addr < r.end);
                }
                if touches {
                    first.push(Operation {
                        name: entry.action.name(),
                        queue: Some(id.0),
                        stream: None,
                        index: entry.index,
                        node: None,
                    });
                }
            }
        }
        for operation in first {
            self.detector.report(kind, Some(operation), second.clone(), gone.addr, gone.bytes);
        }
    }

    /// Host memory goes: pending commands are reported, and its past is forgotten.
    fn host_is_gone(&mut self, gone: &mut Gone, by: &str) {
        self.is_gone(gone, by, ReportKind::HostGone, true);
        self.detector.forget(gone.key, gone.bytes);
        self.words.retain(|&at, _| at < gone.addr || at >= gone.addr + gone.bytes);
        if let Some(pages) = gone.pages.take() {
            self.trash.push(Box::new(pages));
        }
    }

    /// The regions of an action's addresses, as they are now.
    pub(super) fn regions(&self, action: &super::command::Action) -> Vec<(u64, u64)> {
        let mut regions = Vec::new();
        if self.detector.on {
            let mut parts: Vec<Part> = Vec::new();
            action.for_each_range(|r| {
                parts.clear();
                if r.start < r.end && self.space.resolve(Reach::Engine, r.start, r.end - r.start, &mut parts).is_ok() {
                    regions.extend(parts.iter().filter(|p| p.region != 0).map(|p| (p.addr, p.region)));
                }
            });
            regions.sort_unstable();
            regions.dedup();
        }
        regions
    }
}
