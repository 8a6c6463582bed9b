//! Pools: the main memory of a device, and memory beside it that a captured graph or a region of
//! the program has for itself.
//!
//! A pool is an allocator over a backing of its own. All pools of a device share its budget. Blocks
//! do not count their pool: a pool that is released lives on in its blocks.
//!
//! This module must not know the C ABI.

use crate::registry::unknown;
use crate::source::Sources;
use leasehold::{Buffer, Error, Lease, Protection, Result, Runtime, View};
use leasehold_alloc::{
    Allocator, AllocatorConfig, Layout, On, Policy, SharedBudget, SuspendableBacking,
};
use leasehold_core::sync::RwLock;
use leasehold_hal::MemoryKind;

/// The contents of a suspended pool: each range with its copy in pinned memory.
type Saved = Vec<(u64, Lease<Buffer>)>;

/// The state of a pool.
enum State {
    /// It has memory.
    Awake,
    /// Its memory is gone, but for the contents that were kept.
    Suspended(Saved),
    /// Its handle was closed. It lives on in its blocks, and is not suspended any more. A pool that
    /// had no memory then has no blocks either, and gives none.
    Released { memory: bool },
}

/// The settings of a pool.
pub(crate) struct PoolSettings {
    pub(crate) name: String,
    pub(crate) policy: Policy,
    pub(crate) trace_events: usize,
    pub(crate) suspendable: bool,
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
    backing: Option<SuspendableBacking>,
    /// Allocations share it; a suspension, a resumption and a release take it alone.
    state: RwLock<State>,
}

impl Pool {
    pub(crate) fn new(
        runtime: &Runtime,
        budget: &SharedBudget,
        settings: PoolSettings,
    ) -> Result<Self> {
        let backing = runtime.raw_device().backing(MemoryKind::Device)?;
        let config = AllocatorConfig {
            name: format!("{} {}", runtime.device(), settings.name).into(),
            policy: settings.policy,
            immovable: !settings.movable,
            shared_budget: Some(budget.clone()),
            trace_events: settings.trace_events,
            ..AllocatorConfig::default()
        };
        let (allocator, backing) = if settings.suspendable {
            let backing = SuspendableBacking::new(backing, Some(budget.clone()))?;
            let allocator = Allocator::new(Box::new(backing.clone()), config)?;
            if !backing.has_addresses() {
                return Err(Error::Unsupported("the driver has no addresses to reserve".into()));
            }
            (allocator, Some(backing))
        } else {
            (Allocator::new(backing, config)?, None)
        };
        Ok(Self {
            handle: 0,
            name: settings.name,
            movable: settings.movable,
            allocator,
            backing,
            state: RwLock::new(State::Awake),
        })
    }

    /// The pool with its handle.
    pub(crate) fn named(self, handle: u64) -> Self {
        Self { handle, ..self }
    }

    pub(crate) fn alloc(&self, bytes: u64, on: On<'_>) -> Result<Lease<Buffer>> {
        if self.backing.is_none() {
            return self.allocator.alloc(Layout::new(bytes), on);
        }
        let state = self.state.read();
        match *state {
            State::Awake | State::Released { memory: true } => {}
            State::Suspended(_) => return Err(self.is_suspended()),
            State::Released { memory: false } => return Err(unknown("pool", self.handle)),
        }
        self.allocator.alloc(Layout::new(bytes), on)
    }

    fn is_suspended(&self) -> Error {
        Error::Suspended(format!("pool {} is suspended; resume it first", self.name).into())
    }

    /// Gives free memory back to the driver. Returns the bytes that went.
    pub(crate) fn trim(&self, keep: u64) -> Result<u64> {
        let state = self.state.read();
        if let State::Suspended(_) = *state { Ok(0) } else { self.allocator.trim(keep) }
    }

    /// Whether the pool is suspended.
    pub(crate) fn suspended(&self) -> bool {
        matches!(*self.state.read(), State::Suspended(_))
    }

    /// Marks that the pool's handle is closed: it is not suspended from now on. Returns whether it
    /// was open.
    ///
    /// # Errors
    /// `Suspended` while it is suspended and has blocks: nobody could give them memory again.
    pub(crate) fn release(&self) -> Result<bool> {
        let mut state = self.state.write();
        let held = self.allocator.stats().live;
        match *state {
            State::Suspended(_) if held > 0 => Err(Error::Suspended(
                format!(
                    "pool {} is suspended, and {held} of its blocks are held; resume it or free \
                     them first",
                    self.name
                )
                .into(),
            )),
            State::Released { .. } => Ok(false),
            State::Suspended(_) | State::Awake => {
                *state = State::Released { memory: matches!(*state, State::Awake) };
                Ok(true)
            }
        }
    }

    fn backing(&self) -> Result<&SuspendableBacking> {
        self.backing.as_ref().ok_or_else(|| {
            Error::Unsupported(format!("pool {} was not made to be suspended", self.name).into())
        })
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
        let backing = self.backing()?;
        let mut state = self.state.write();
        match *state {
            State::Awake => {}
            State::Suspended(_) => {
                return Err(Error::state(format!("pool {} is suspended already", self.name)));
            }
            State::Released { .. } => return Err(unknown("pool", self.handle)),
        }
        sources.synchronize(runtime)?;
        if self.movable {
            // Free memory has no contents to keep.
            self.allocator.trim(0)?;
        }
        let mut saved = Saved::new();
        let save = |at, bytes| {
            if !keep {
                return Ok(None);
            }
            let copy = runtime.alloc_pinned(bytes)?;
            let from = import(runtime, at, bytes)?;
            runtime.stream().copy(copy.view(), from.view())?;
            Ok(Some((at, copy, runtime.stream().now())))
        };
        let finish = |copied| {
            if let Some((at, copy, point)) = copied {
                runtime.wait_for([point])?;
                saved.push((at, copy));
            }
            Ok(())
        };
        // SAFETY: all work of the context is over, and the caller vouches for later work.
        let freed = unsafe { backing.suspend(save, finish) };
        if freed.is_err() {
            // Copies that began may still read the memory. Their failure is told already.
            let _ = runtime.stream().synchronize();
        }
        if backing.is_suspended() {
            *state = State::Suspended(saved);
        }
        freed.inspect_err(|_| {
            // The parts that went come back with their contents, or the pool stays suspended.
            if let State::Suspended(_) = *state {
                let _ = self.take_again(runtime, &mut state);
            }
        })
    }

    /// Takes memory again at the same addresses, with the contents that were kept.
    pub(crate) fn resume(&self, runtime: &Runtime) -> Result<()> {
        let mut state = self.state.write();
        self.backing()?;
        match *state {
            State::Suspended(_) => self.take_again(runtime, &mut state),
            State::Awake => Err(Error::state(format!("pool {} is not suspended", self.name))),
            State::Released { .. } => Err(unknown("pool", self.handle)),
        }
    }

    /// Takes memory again for a suspended pool. After an error the pool is as it was.
    fn take_again(&self, runtime: &Runtime, state: &mut State) -> Result<()> {
        let (backing, State::Suspended(saved)) = (self.backing()?, &*state) else { return Ok(()) };
        if self.movable {
            // Memory under blocks that were freed meanwhile is not needed.
            self.allocator.trim(0)?;
        }
        let restore = |at: u64, bytes: u64| {
            saved.iter().try_for_each(|(from, copy)| {
                let begin = at.max(*from);
                let end = (at + bytes).min(from + copy.len());
                if begin >= end {
                    return Ok(());
                }
                let to = import(runtime, begin, end - begin)?;
                let kept = copy.view().narrowed(begin - from, end - begin);
                runtime.stream().copy(to.view(), kept)
            })
        };
        backing.resume(restore, || runtime.stream().synchronize())?;
        *state = State::Awake;
        Ok(())
    }
}

/// A range of a pool as a buffer, for a copy that is over before the range changes.
fn import(runtime: &Runtime, at: u64, bytes: u64) -> Result<Lease<Buffer>> {
    // SAFETY: the range has memory of this device, which only the calling suspension or resumption
    // uses until its copy is over.
    unsafe { runtime.allocator().import(at, bytes, 0, Protection::ReadWrite, Box::new(())) }
}
