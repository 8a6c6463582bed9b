//! Pools: the main memory of a device, and memory beside it that a captured graph or a region of
//! the program has for itself.
//!
//! A pool is an allocator over a backing of its own. All pools of a device share its budget. Blocks
//! do not count their pool: a pool that is released lives on in its blocks.
//!
//! This module must not know the C ABI.

use crate::registry::unknown;
use crate::source::Sources;
use leasehold::pool::PoolMemory;
use leasehold::{Buffer, Error, Lease, PoolKind, Result, Runtime};
use leasehold_alloc::{Allocator, AllocatorConfig, Budget, Layout, On, Policy};
use leasehold_core::sync::{Arc, RwLock};
use leasehold_hal::{MemoryKind, SharedSegment};

/// The state of a pool.
enum State {
    /// Its handle is open. `None`: its memory is ordinary, neither suspendable nor shareable.
    Open(Option<PoolMemory>),
    /// Its handle was closed. It lives on in its blocks, and is not suspended any more. A pool that
    /// had no memory then has no blocks either, and gives none.
    Released { memory: bool },
}

impl State {
    fn is_suspended(&self) -> bool {
        matches!(self, State::Open(Some(memory)) if memory.is_suspended())
    }
}

/// The settings of a pool.
pub(crate) struct PoolSettings {
    pub(crate) name: String,
    pub(crate) policy: Policy,
    pub(crate) trace_events: usize,
    /// `None`: its memory is ordinary.
    pub(crate) kind: Option<PoolKind>,
    /// Memory under free blocks may be moved and taken back.
    pub(crate) movable: bool,
}

/// A pool.
pub(crate) struct Pool {
    /// 0 for a device's main memory.
    pub(crate) handle: u64,
    pub(crate) name: String,
    pub(crate) allocator: Allocator,
    /// Whether memory under free blocks may go without the caller's word. Otherwise a captured
    /// graph may use it.
    pub(crate) movable: bool,
    /// Whether the pool was made to be suspended.
    suspendable: bool,
    /// Allocations of a suspendable pool share it; a suspension, a resumption and a release take it
    /// alone.
    state: RwLock<State>,
}

impl Pool {
    pub(crate) fn new(
        runtime: &Runtime,
        budget: &Arc<Budget>,
        settings: PoolSettings,
    ) -> Result<Self> {
        let config = AllocatorConfig {
            name: format!("{} {}", runtime.device(), settings.name).into(),
            policy: settings.policy,
            immovable: !settings.movable,
            shared_budget: Some(budget.clone()),
            trace_events: settings.trace_events,
            ..AllocatorConfig::default()
        };
        let (memory, allocator) = match settings.kind {
            Some(kind) => {
                let (memory, allocator) = PoolMemory::new(runtime, kind, config)?;
                (Some(memory), allocator)
            }
            None => {
                let backing = runtime.raw_device().backing(MemoryKind::Device)?;
                (None, Allocator::new(backing, config)?)
            }
        };
        Ok(Self {
            handle: 0,
            name: settings.name,
            movable: settings.movable,
            allocator,
            suspendable: settings.kind == Some(PoolKind::Suspendable),
            state: RwLock::new(State::Open(memory)),
        })
    }

    /// The pool with its handle.
    pub(crate) fn named(self, handle: u64) -> Self {
        Self { handle, ..self }
    }

    pub(crate) fn alloc(&self, bytes: u64, on: On<'_>) -> Result<Lease<Buffer>> {
        if !self.suspendable {
            return self.allocator.alloc(Layout::new(bytes), on);
        }
        let state = self.state.read();
        match *state {
            State::Released { memory: false } => return Err(unknown("pool", self.handle)),
            _ if state.is_suspended() => return Err(self.is_suspended()),
            _ => {}
        }
        self.allocator.alloc(Layout::new(bytes), on)
    }

    /// The segment of a block of the pool.
    ///
    /// # Errors
    /// `Unsupported` for a pool whose memory other processes cannot map.
    pub(crate) fn segment_of(&self, addr: u64, bytes: u64) -> Result<Arc<dyn SharedSegment>> {
        let segment = match &*self.state.read() {
            State::Open(Some(memory)) => memory.segment_of(addr, bytes),
            _ => None,
        };
        segment.ok_or_else(|| {
            Error::Unsupported(
                format!(
                    "the memory of pool {} was not made to be shared with other processes; open \
                     the device with LEASEHOLD_DEVICE_SHAREABLE",
                    self.name
                )
                .into(),
            )
        })
    }

    fn is_suspended(&self) -> Error {
        Error::Suspended(format!("pool {} is suspended; resume it first", self.name).into())
    }

    /// Gives free memory back to the driver. Returns the bytes that went.
    pub(crate) fn trim(&self, keep: u64) -> Result<u64> {
        let state = self.state.read();
        if state.is_suspended() { Ok(0) } else { self.allocator.trim(keep) }
    }

    /// Whether the pool is suspended.
    pub(crate) fn suspended(&self) -> bool {
        self.state.read().is_suspended()
    }

    /// Marks that the pool's handle is closed: it is not suspended from now on. Returns whether it
    /// was open.
    ///
    /// # Errors
    /// `Suspended` while it is suspended and has blocks: nobody could give them memory again.
    pub(crate) fn release(&self) -> Result<bool> {
        let mut state = self.state.write();
        if let State::Released { .. } = *state {
            return Ok(false);
        }
        let (suspended, held) = (state.is_suspended(), self.allocator.stats().live);
        if suspended && held > 0 {
            return Err(Error::Suspended(
                format!(
                    "pool {} is suspended, and {held} of its blocks are held; resume it or free \
                     them first",
                    self.name
                )
                .into(),
            ));
        }
        *state = State::Released { memory: !suspended };
        Ok(true)
    }

    /// The memory of an open pool.
    ///
    /// # Errors
    /// `Unsupported` for a pool that was not made to be suspended; that the pool is unknown once it
    /// is released.
    fn memory<'s>(&self, state: &'s mut State) -> Result<&'s mut PoolMemory> {
        match state {
            State::Open(Some(memory)) if self.suspendable => Ok(memory),
            State::Released { .. } if self.suspendable => Err(unknown("pool", self.handle)),
            _ => Err(Error::Unsupported(
                format!("pool {} was not made to be suspended", self.name).into(),
            )),
        }
    }

    /// Gives all memory back to the device, and keeps the addresses. Waits for the context's work.
    ///
    /// # Safety
    /// - No work that uses the pool's memory is submitted until it is resumed.
    pub(crate) unsafe fn suspend(
        &self,
        runtime: &Runtime,
        sources: &Sources,
        keep: bool,
    ) -> Result<u64> {
        let mut state = self.state.write();
        let memory = self.memory(&mut state)?;
        if memory.is_suspended() {
            return Err(Error::state(format!("pool {} is suspended already", self.name)));
        }
        sources.synchronize(runtime)?;
        if self.movable {
            // Free memory has no contents to keep.
            self.allocator.trim(0)?;
        }
        let keep = if keep { PoolMemory::ALL } else { &[] };
        // SAFETY: all work of the context is over, and the caller vouches for later work.
        unsafe { memory.suspend(runtime, keep) }
    }

    /// Takes memory again at the same addresses, with the contents that were kept. After an error
    /// the pool is as it was.
    pub(crate) fn resume(&self, runtime: &Runtime) -> Result<()> {
        let mut state = self.state.write();
        let memory = self.memory(&mut state)?;
        if !memory.is_suspended() {
            return Err(Error::state(format!("pool {} is not suspended", self.name)));
        }
        if self.movable {
            // Memory under blocks that were freed meanwhile is not needed.
            self.allocator.trim(0)?;
        }
        memory.resume(runtime)
    }
}
