//! Pools: memory beside the runtime's own, which can leave the device or which others may map.
//!
//! # Protocol
//! A buffer of a pool is an import of the runtime's allocator: whatever takes a buffer of the
//! runtime takes one of a pool. The import keeps a block of the pool's own allocator, until nobody
//! holds the buffer and its last use is over.
//!
//! A suspension takes four steps. It locks the records of all buffers, as a submission does
//! (`stream/suspended.rs`), so no work with them begins from then on. It waits for the
//! uses that the records have. It makes sure that each block of the pool is under a buffer that it
//! has locked: one that a holder has exclusively could be used later without a look at its record's
//! lock. Then the memory goes. The records stay locked, and the pool keeps the buffers, until the
//! memory is back.
//!
//! The state's lock is taken first, and held across all of this. An allocation shares it.

mod memory;
mod segments;

pub use memory::{PoolKind, PoolMemory};

use crate::array::Array;
use crate::growing::{Growing, Source, blocks};
use crate::runtime::{Runtime, RuntimeInner, pending};
use crate::share::{Export, SharedBlock};
use crate::stream::{PoolTurn, in_submission, is_suspended};
use crate::view::BufferView;
use leasehold_alloc::{Allocator, AllocatorConfig, Budget, Buffer, Layout, On, Protection};
use leasehold_core::sync::{Arc, Mutex, RwLock, RwLockReadGuard};
use leasehold_core::{Error, Lease, Result, WeakLease};
use leasehold_hal::SharedSegment;
use std::fmt;
use std::sync::Weak;
use std::time::Duration;

/// The fate of a suspended pool's contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Contents {
    /// They go to pinned host memory, and come back with the memory.
    Keep,
    /// They are lost: the memory comes back with any contents.
    Discard,
}

/// The state of a pool in numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolUsage {
    /// Buffers whose memory is the pool's: those that are held, and dropped ones whose last use was
    /// not known to be over yet.
    pub live: u64,
    /// Their bytes.
    pub live_bytes: u64,
    /// Bytes of device memory that the pool has now. 0 while it is suspended.
    pub reserved: u64,
    /// The most bytes of device memory that it may have.
    pub limit: u64,
    /// Bytes of pinned host memory with the contents of a suspended pool.
    pub saved: u64,
    /// Segments that a shareable pool has now (count).
    pub segments: u64,
}

/// Device memory beside the runtime's own, [suspendable](PoolKind::Suspendable) or
/// [shareable](PoolKind::Shareable). Its buffers are buffers of the runtime, and the pool lives on
/// in them. Clones are the same pool; `Send + Sync`.
///
/// # A suspendable pool
/// Its memory goes back to the device as a whole, and comes back at the same addresses: for the
/// weights of a model that is idle. While the pool is suspended, whatever would use one of its
/// buffers is refused with [`Error::Suspended`] and changes nothing: copies, fills, sessions,
/// launches of graphs. After [`resume`](Self::resume) all works again, also graphs that were
/// recorded before. Work without such a buffer goes on meanwhile. A buffer that is dropped
/// meanwhile is freed by the resumption, or with the pool. If the last clone of the pool is dropped
/// while it is suspended, the contents are lost, and buffers that are still held are refused for
/// good.
///
/// ```
/// use leasehold::pool::{Contents, Pool, PoolKind};
/// use leasehold::prelude::*;
/// # fn main() -> Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let pool = Pool::new(&runtime, "weights", PoolKind::Suspendable)?;
/// let (weights, y) = (pool.alloc(12)?, runtime.alloc(12)?);
/// runtime.stream().upload(weights.view(), &[1u32, 2, 3])?;
/// let graph = runtime.record_graph(|r| r.stream().copy(y.view(), weights.view()))?;
///
/// pool.suspend(Contents::Keep)?;
/// assert_eq!(pool.stats().reserved, 0);
/// assert!(matches!(graph.launch(), Err(Error::Suspended(_))));
///
/// pool.resume()?;
/// graph.launch()?;
/// assert_eq!(runtime.to_vec::<u32>(&y)?, [1, 2, 3]);
/// # Ok(())
/// # }
/// ```
///
/// # A shareable pool
/// Other processes may map its memory, and the libraries of collectives: the module
/// [`share`](crate::share) says how. Its segments neither move nor go while somebody needs them. So
/// it is worth its price only for what is shared: ordinary memory is moved to where it is needed,
/// and is never passed on.
#[derive(Clone)]
pub struct Pool(Arc<Inner>);

/// The order of the fields is that of their end.
struct Inner {
    name: Arc<str>,
    state: RwLock<State>,
    /// All buffers of a suspendable pool that may be held.
    buffers: Mutex<Vec<Noted>>,
    /// A suspendable pool's.
    turn: Option<Arc<PoolTurn>>,
    allocator: Allocator,
    budget: Arc<Budget>,
    runtime: Arc<RuntimeInner>,
}

struct State {
    memory: PoolMemory,
    /// The buffers whose records are locked: all, while the memory is away.
    locked: Vec<Held>,
}

/// The blocks of growing parts.
type Parts = Arc<[Lease<Buffer>]>;

/// A buffer that may be held.
struct Noted {
    buffer: WeakLease<Buffer>,
    /// Of a buffer over several blocks. The buffer keeps them.
    parts: Option<Weak<[Lease<Buffer>]>>,
}

/// A buffer that a suspension has found.
struct Held {
    buffer: Lease<Buffer>,
    parts: Option<Parts>,
}

impl Held {
    /// The blocks of the pool under the buffer.
    fn blocks(&self) -> &[Lease<Buffer>] {
        self.parts.as_deref().unwrap_or(std::slice::from_ref(&self.buffer))
    }
}

/// The things that a buffer of a pool keeps until its last use is over: a block, or several.
struct Block<B> {
    _block: B,
    /// The record of a buffer may be locked for as long as somebody holds the buffer.
    _turn: Option<Arc<PoolTurn>>,
}

impl Source for Arc<Inner> {
    fn with(&self, f: &mut dyn FnMut(&Allocator) -> Result<()>) -> Result<()> {
        let _state = self.with_all()?;
        with_memory(&Runtime::from_inner(self.runtime.clone()), || f(&self.allocator))
    }
}

impl State {
    /// Unlocks the records that a suspension has locked.
    fn unlock(&mut self, turn: &PoolTurn) {
        // SAFETY: the records of all these were locked, and their memory is there.
        self.locked.drain(..).for_each(|held| unsafe { turn.unlock(&held.buffer) });
    }
}

impl Inner {
    /// The state, of a pool that is not suspended.
    ///
    /// # Errors
    /// `Suspended` while it is.
    fn with_all(&self) -> Result<RwLockReadGuard<'_, State>> {
        let state = self.state.read();
        if state.memory.is_suspended() { Err(is_suspended(&self.name)) } else { Ok(state) }
    }

    /// The turn of a suspendable pool.
    ///
    /// # Errors
    /// `Unsupported` for a shareable one.
    fn turn(&self) -> Result<&PoolTurn> {
        self.turn.as_deref().ok_or_else(|| {
            Error::Unsupported(
                format!(
                    "pool {} is shareable, and what others have mapped cannot leave; make a pool \
                     of PoolKind::Suspendable",
                    self.name
                )
                .into(),
            )
        })
    }
}

impl Pool {
    /// A pool without memory on the runtime's device. The name is for reports and errors.
    ///
    /// # Errors
    /// As [`PoolMemory::new`]; `OutOfMemory` without timelines for a suspendable pool.
    pub fn new(runtime: &Runtime, name: &str, kind: PoolKind) -> Result<Self> {
        let budget = Arc::new(Budget::new(u64::MAX));
        let config = AllocatorConfig {
            name: format!("{} {name}", runtime.device()).into(),
            shared_budget: Some(budget.clone()),
            ..AllocatorConfig::default()
        };
        let (memory, allocator) = PoolMemory::new(runtime, kind, config)?;
        let name: Arc<str> = name.into();
        let turn = match kind {
            PoolKind::Suspendable => Some(Arc::new(PoolTurn::new(&name)?)),
            PoolKind::Shareable => None,
        };
        Ok(Self(Arc::new(Inner {
            name,
            state: RwLock::new(State { memory, locked: Vec::new() }),
            buffers: Mutex::default(),
            turn,
            allocator,
            budget,
            runtime: runtime.inner.clone(),
        })))
    }

    /// The pool's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// `bytes` of the pool's memory, aligned to 256: a buffer of the runtime. No stream has used
    /// the memory that is not over with it. Its contents are not specified. Blocks while a
    /// suspension or a resumption goes on, and as [`Runtime::alloc`].
    ///
    /// # Errors
    /// `Suspended` while the pool is suspended; `OutOfMemory` with a report; `OverBudget`.
    pub fn alloc(&self, bytes: u64) -> Result<Lease<Buffer>> {
        let inner = &*self.0;
        let _state = inner.with_all()?;
        let runtime = self.runtime();
        if bytes == 0 {
            return runtime.alloc(0);
        }
        let core = runtime.stream().under();
        let on = On { timeline: core.timeline, source: core.source() };
        let block = with_memory(&runtime, || inner.allocator.alloc(Layout::new(bytes), on))?;
        let (addr, native) = (block.addr(), block.native());
        let keep = Block { _block: block, _turn: inner.turn.clone() };
        // SAFETY: the block is this call's, and nobody else's while the import keeps it. It has
        // memory of the runtime's device while no record of the pool is locked: a suspension locks
        // the record before, as long as this call shares the state after.
        let buffer = unsafe {
            let keep = Box::new(keep);
            runtime.allocator().import(addr, bytes, native, Protection::ReadWrite, keep)
        }?;
        self.note(&buffer, None);
        Ok(buffer)
    }

    /// A growing buffer of the pool's memory, with `count` parts of at most `most` values each. As
    /// [`Growing::with_parts`]; its memory goes and comes back with the pool's.
    ///
    /// # Errors
    /// `Suspended` while the pool is suspended; `Unsupported` for a shareable one; as
    /// [`Growing::with_parts`].
    pub fn growing<T>(&self, count: usize, most: usize) -> Result<Growing<T>> {
        let inner = &*self.0;
        let _state = inner.with_all()?;
        inner.turn()?;
        let (runtime, bytes) = (self.runtime(), Array::<T>::bytes_of(most)?);
        let (parts, each) = with_memory(&runtime, || blocks(&inner.allocator, count, bytes))?;
        let keep = Block { _block: parts.clone(), _turn: inner.turn.clone() };
        // SAFETY: the parts are this call's, and nobody else's while the import keeps them.
        let buffer = unsafe { runtime.allocator().import_growing(&parts[0], Box::new(keep)) }?;
        self.note(&buffer, Some(Arc::downgrade(&parts)));
        Growing::over(&runtime, parts, each, buffer, Some(Box::new(self.0.clone())))
    }

    /// Notes a buffer of a suspendable pool that may be held.
    fn note(&self, buffer: &Lease<Buffer>, parts: Option<Weak<[Lease<Buffer>]>>) {
        if self.0.turn.is_none() {
            return;
        }
        let mut buffers = self.0.buffers.lock();
        if buffers.len() == buffers.capacity() {
            buffers.retain(|b| !matches!(b.buffer.try_upgrade(), Err(Error::StaleHandle { .. })));
        }
        buffers.push(Noted { buffer: buffer.downgrade(), parts });
    }

    /// The most bytes of device memory that the pool may have. At first there is no limit. A limit
    /// below what it has stops growth, and refuses a resumption.
    pub fn set_limit(&self, bytes: u64) {
        self.0.budget.set_limit(bytes);
    }

    /// Returns whether the pool is suspended. Blocks while a suspension or a resumption goes on.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.0.state.read().memory.is_suspended()
    }

    /// The pool in numbers. Blocks while a suspension or a resumption goes on.
    #[must_use]
    pub fn stats(&self) -> PoolUsage {
        let (inner, state) = (&*self.0, self.0.state.read());
        let stats = inner.allocator.stats();
        PoolUsage {
            live: stats.live,
            live_bytes: stats.live_bytes,
            reserved: inner.budget.reserved(),
            limit: inner.budget.limit(),
            saved: state.memory.saved_bytes(),
            segments: state.memory.segments().len() as u64,
        }
    }

    /// Gives free memory back to the device, until at most `keep` bytes lie free. Returns the bytes
    /// that went: 0 while the pool is suspended. A segment that somebody has exported or registered
    /// goes once that is over.
    ///
    /// # Errors
    /// `OutOfMemory` for host memory; the driver's own.
    pub fn trim(&self, keep: u64) -> Result<u64> {
        let state = self.0.state.read();
        if state.memory.is_suspended() {
            return Ok(0);
        }
        // Buffers that were dropped keep their blocks until somebody looks.
        self.0.runtime.memory.drain();
        self.0.allocator.trim(keep)
    }

    /// The segments that a shareable pool has now, in the order in which they were made, for a
    /// library that maps memory. A segment stays mapped at its address for as long as somebody
    /// holds it.
    #[must_use]
    pub fn segments(&self) -> Vec<Arc<dyn SharedSegment>> {
        self.0.state.read().memory.segments()
    }

    /// Makes a buffer of a shareable pool, or a part of it, ready for another process. The buffer
    /// is held as long as the export is.
    ///
    /// The whole segment of the buffer can be mapped by who gets its descriptor, so it goes to
    /// processes that are trusted with all of the pool.
    ///
    /// # Errors
    /// `InvalidArgument` for a buffer that is not of this pool, for one of a suspendable pool, and
    /// for one without bytes.
    ///
    /// # Safety
    /// - Whoever gets the descriptor, by [`Export::send`] or [`Export::descriptor`], uses the block
    ///   only in an order with the uses of this process, and the rest of the segment not at all.
    pub unsafe fn export(&self, view: BufferView<'_>) -> Result<Export> {
        let inner = &*self.0;
        if view.is_empty() {
            return Err(Error::invalid("a view without bytes has no memory to export"));
        }
        let memory = &inner.state.read().memory;
        let own = inner.runtime.owns(view.buffer());
        let segment = own.then(|| memory.segment_of(view.addr(), view.len())).flatten();
        let segment = segment.ok_or_else(|| {
            Error::invalid(format!(
                "a buffer of {} bytes is not memory of {} that can be shared; ordinary memory \
                 cannot be exported: allocate the buffer of a pool of PoolKind::Shareable, and \
                 copy to it",
                view.buffer().len(),
                inner.name
            ))
        })?;
        let block = SharedBlock::of(&self.runtime(), &*segment, view.addr(), view.len());
        Ok(Export::new(inner.runtime.clone(), view.buffer().clone(), segment, block))
    }

    /// Gives all memory of the pool back to the device, and keeps the addresses. Returns the bytes
    /// that went.
    ///
    /// Refuses further work with the pool's buffers at once, then blocks until the work that was
    /// submitted before is over, without a limit of time, until the contents are copied, and on the
    /// driver. Work of other threads is refused, not lost. The first suspension pins host memory
    /// for the contents, which the runtime's pinned pool then has for the next one.
    ///
    /// # Errors
    /// `Unsupported` for a shareable pool; `InvalidState` if it is suspended already, and while a
    /// buffer of the pool cannot be locked: one that a holder has exclusively, or to which no
    /// handle leads; `Occupied` in the middle of a submission and while this thread has a session
    /// open on the default stream; `OutOfMemory` without host memory for the contents; the cause of
    /// a default stream that has failed; `DeviceLost`; the driver's own. The pool is as it was
    /// then. If memory went and does not come back, the pool is suspended with its contents kept:
    /// [`is_suspended`](Self::is_suspended).
    pub fn suspend(&self, contents: Contents) -> Result<u64> {
        let inner = &*self.0;
        let turn = inner.turn()?;
        if in_submission() {
            return Err(Error::Occupied {
                resource: "pool (this very thread is in the middle of a submission)",
            });
        }
        let mut state = inner.state.write();
        if state.memory.is_suspended() {
            return Err(Error::state(format!("pool {} is suspended already", inner.name)));
        }
        let freed = self.give_away(&mut state, turn, contents);
        if !state.memory.is_suspended() {
            state.unlock(turn);
        }
        freed
    }

    /// Locks the records, and gives the memory away once it is idle. Locked records are in the
    /// state, also after an error.
    fn give_away(&self, state: &mut State, turn: &PoolTurn, contents: Contents) -> Result<u64> {
        let (inner, runtime) = (&*self.0, self.runtime());
        {
            let mut buffers = inner.buffers.lock();
            let mut at = 0;
            while at < buffers.len() {
                match buffers[at].buffer.try_upgrade() {
                    Ok(buffer) => {
                        let parts = buffers[at].parts.as_ref().and_then(Weak::upgrade);
                        // SAFETY: the state's lock is the pool's turn, and each buffer is in the
                        // list once; what a buffer keeps has a share in the turn; this thread
                        // submits nothing now.
                        unsafe { turn.lock(&buffer) };
                        state.locked.push(Held { buffer, parts });
                        at += 1;
                    }
                    Err(Error::StaleHandle { .. }) => drop(buffers.swap_remove(at)),
                    Err(_) => return Err(self.out_of_reach(1)),
                }
            }
        }
        for Held { buffer, .. } in &state.locked {
            loop {
                // A failure may add a use that others had hidden.
                let uses = pending(buffer);
                if uses.is_empty() {
                    break;
                }
                uses.into_iter().try_for_each(|point| inner.runtime.wait_over(point))?;
            }
        }
        self.see_all(state, &runtime)?;
        // Free memory has no contents to keep.
        inner.allocator.trim(0)?;
        let mut keep: Vec<_> = match contents {
            Contents::Keep => {
                let blocks = state.locked.iter().flat_map(Held::blocks);
                blocks.map(|block| (block.addr(), block.len())).collect()
            }
            Contents::Discard => Vec::new(),
        };
        keep.sort_unstable();
        // SAFETY: each block of the pool is under a buffer whose record is locked, and whose uses
        // are over. Other blocks are free, and were used until that was so. A submission that finds
        // a locked record is refused, and so is a look from the host. The records are unlocked
        // after the resumption only.
        unsafe { state.memory.suspend(&runtime, &keep) }
    }

    /// Makes sure that the pool has no other blocks than those of the locked buffers.
    fn see_all(&self, state: &State, runtime: &Runtime) -> Result<()> {
        // Dropped buffers keep their blocks until their last use is over, and somebody looks.
        const LOOKS: u32 = 20;
        let locked = state.locked.iter().map(|held| held.blocks().len() as u64).sum();
        for look in 0..LOOKS {
            runtime.allocator().trim(u64::MAX)?;
            if self.0.allocator.stats().live == locked {
                return Ok(());
            }
            if look == 0 {
                // A stream's failure is no affair of the pool's: the next look says what is over.
                let _ = runtime.synchronize();
            } else {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Err(self.out_of_reach(self.0.allocator.stats().live.saturating_sub(locked)))
    }

    #[cold]
    fn out_of_reach(&self, buffers: u64) -> Error {
        Error::state(format!(
            "{buffers} buffers of pool {} cannot be locked: a holder has them exclusively, no \
             handle leads to them, or they were dropped in the middle of work on another device; \
             share them, or wait for that work, and suspend the pool then",
            self.0.name
        ))
    }

    /// Takes memory for the pool again, at the same addresses and with the contents that were kept.
    /// Blocks until they are there, and on the driver. If the device has no memory, what lies free
    /// in the runtime's own allocator is given back, and the driver is asked once more.
    ///
    /// # Errors
    /// `InvalidState` unless it is suspended; `OutOfMemory`; `OverBudget`; `Occupied` while this
    /// thread has a session open on the default stream; the cause of a default stream that has
    /// failed; the driver's own. The pool is suspended still, with all contents kept, and the call
    /// may be repeated.
    pub fn resume(&self) -> Result<()> {
        let (inner, runtime) = (&*self.0, self.runtime());
        let mut state = inner.state.write();
        if !state.memory.is_suspended() {
            return Err(Error::state(format!("pool {} is not suspended", inner.name)));
        }
        // A buffer that nobody else holds needs no memory.
        state.locked = std::mem::take(&mut state.locked)
            .into_iter()
            .filter_map(|Held { buffer, parts }| {
                buffer.try_unique().err().map(|buffer| Held { buffer, parts })
            })
            .collect();
        inner.allocator.trim(0)?;
        with_memory(&runtime, || state.memory.resume(&runtime))?;
        state.unlock(inner.turn()?);
        Ok(())
    }

    /// The runtime, with what is its default stream now.
    #[must_use]
    pub fn runtime(&self) -> Runtime {
        Runtime::from_inner(self.0.runtime.clone())
    }
}

/// Takes memory of a pool. If there is none, the runtime's own allocator first gives back what lies
/// free there.
fn with_memory<T>(runtime: &Runtime, mut take: impl FnMut() -> Result<T>) -> Result<T> {
    match take() {
        Err(e) if e.is_out_of_memory() => match runtime.allocator().trim(0) {
            Ok(_) => take(),
            Err(_) => Err(e),
        },
        taken => taken,
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} on {})", self.0.name, self.0.runtime.id())
    }
}
