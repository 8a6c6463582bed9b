//! A backing that backs nothing: addresses without memory, with counters, a physical limit, a leak
//! check and fault injection.
//!
//! Used by tests and by the replay of traces on a virtual device, where an 18 GB trace runs on a
//! small machine. All clones share one backing: the holder of any clone sees and steers it. It
//! checks its caller: a mapping over a mapping, an unmapping of what is not mapped and the like are
//! recorded as violations.

use leasehold_alloc::{Backing, BackingCaps, Chunk};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, OutOfMemory, Result};
use std::collections::BTreeMap;

/// The calls of a [`Backing`], for counting and for faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Call {
    /// [`Backing::reserve`].
    Reserve,
    /// [`Backing::commit`].
    Commit,
    /// [`Backing::decommit`].
    Decommit,
    /// [`Backing::create`].
    Create,
    /// [`Backing::destroy`].
    Destroy,
    /// [`Backing::map`].
    Map,
    /// [`Backing::enable`].
    Enable,
    /// [`Backing::unmap`].
    Unmap,
}

impl Call {
    /// All of them.
    pub const ALL: [Call; 8] = [
        Call::Reserve,
        Call::Commit,
        Call::Decommit,
        Call::Create,
        Call::Destroy,
        Call::Map,
        Call::Enable,
        Call::Unmap,
    ];
}

/// When a call fails.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    /// The `n`-th call of its kind from now on, counted from zero, and no other.
    Once(u64),
    /// Every call of its kind from the `n`-th on.
    From(u64),
    /// Each call with this probability (per mille), by a fixed sequence.
    PerMille(u32),
}

#[derive(Default)]
struct State {
    next_addr: u64,
    next_handle: u64,
    physical: u64,
    used: u64,
    reservations: BTreeMap<u64, u64>,
    handles: BTreeMap<u64, u64>,
    mapped: BTreeMap<u64, (u64, u64)>,
    segments: BTreeMap<u64, u64>,
    faults: Vec<(Call, Fault, u64)>,
    lost: bool,
    seed: u64,
    violations: Vec<String>,
    calls: [u64; Call::ALL.len()],
    before: Option<(Call, std::sync::Arc<dyn Fn() + Send + Sync>)>,
}

/// The fake backing. Clones share their state.
#[derive(Clone)]
pub struct FakeBacking {
    caps: BackingCaps,
    state: Arc<Mutex<State>>,
    calls: Arc<AtomicU64>,
}

impl FakeBacking {
    /// A device with virtual memory management, 2 MiB granules and `physical` bytes.
    ///
    /// ```
    /// use leasehold_alloc::Backing;
    /// use leasehold_sim::memory::FakeBacking;
    /// let fake = FakeBacking::new(1 << 30);
    /// assert!(fake.caps().vmm);
    /// assert!(fake.create(2 << 30).is_err(), "more than there is");
    /// ```
    #[must_use]
    pub fn new(physical: u64) -> Self {
        Self::with_caps(BackingCaps {
            vmm: true,
            reserve: true,
            aliases: true,
            physical,
            ..BackingCaps::default()
        })
    }

    /// A device that only gives whole segments.
    #[must_use]
    pub fn segments(physical: u64) -> Self {
        Self::with_caps(BackingCaps { physical, segment: 2 << 20, ..BackingCaps::default() })
    }

    /// A device with these capabilities.
    #[must_use]
    pub fn with_caps(caps: BackingCaps) -> Self {
        let state = State {
            // Low enough that no address has bit 63 set, high enough that offset arithmetic without
            // a base is noticed.
            next_addr: 0x10_0000_0000,
            next_handle: 1,
            physical: caps.physical,
            seed: 0x9E37_79B9_7F4A_7C15,
            ..State::default()
        };
        Self { caps, state: Arc::new(Mutex::new(state)), calls: Arc::new(AtomicU64::new(0)) }
    }

    /// Makes calls of one kind fail from now on. Several faults may be armed.
    pub fn fail(&self, call: Call, fault: Fault) {
        self.state.lock().faults.push((call, fault, 0));
    }

    /// Has each call of one kind call a function first, without a lock: it may wait.
    pub fn before(&self, call: Call, function: impl Fn() + Send + Sync + 'static) {
        self.state.lock().before = Some((call, std::sync::Arc::new(function)));
    }

    /// No call fails any more.
    pub fn heal(&self) {
        let mut s = self.state.lock();
        s.faults.clear();
        s.lost = false;
    }

    /// From now on every call fails with `DeviceLost`.
    pub fn lose(&self) {
        self.state.lock().lost = true;
    }

    /// How often a call was made.
    #[must_use]
    pub fn count(&self, call: Call) -> u64 {
        self.state.lock().calls[call as usize]
    }

    /// Bytes of physical memory in use.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.state.lock().used
    }

    /// The counts of what is still taken: reservations, handles, mappings, segments. All are zero
    /// once everything was given back.
    #[must_use]
    pub fn outstanding(&self) -> (usize, usize, usize, usize) {
        let s = self.state.lock();
        (s.reservations.len(), s.handles.len(), s.mapped.len(), s.segments.len())
    }

    /// Wrong calls of the allocator, in words. Empty unless there is a defect.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.state.lock().violations.clone()
    }

    /// Whether all of `[addr, addr + bytes)` is backed.
    #[must_use]
    pub fn is_backed(&self, addr: u64, bytes: u64) -> bool {
        self.walk(addr, bytes, |_, _| {})
    }

    /// Which memory backs `[addr, addr + bytes)`: runs of it, as where each begins and how many
    /// bytes it has. Equal numbers are the same bytes, whatever address they are seen at.
    ///
    /// # Panics
    /// If not all of it is backed.
    #[must_use]
    pub fn memory(&self, addr: u64, bytes: u64) -> Vec<(u64, u64)> {
        let mut runs = Vec::new();
        assert!(
            self.walk(addr, bytes, |at, len| runs.push((at, len))),
            "{addr:#x}+{bytes:#x} is not backed"
        );
        runs
    }

    /// Calls `each` with the runs of memory that back a range, up to the first address that nothing
    /// backs; whether there is none.
    fn walk(&self, addr: u64, bytes: u64, mut each: impl FnMut(u64, u64)) -> bool {
        let s = self.state.lock();
        let Some(last) = addr.checked_add(bytes) else { return false };
        let mut at = addr;
        while at < last {
            let mapped = s
                .mapped
                .range(..=at)
                .next_back()
                .map(|(&a, &(b, handle))| (a, a + b, handle << 44));
            let segment = s.segments.range(..=at).next_back().map(|(&a, &b)| (a, a + b, a));
            let Some((from, end, memory)) =
                [mapped, segment].into_iter().flatten().find(|m| m.1 > at)
            else {
                return false;
            };
            let end = end.min(last);
            each(memory + (at - from), end - at);
            at = end;
        }
        true
    }

    fn enter(&self, call: Call) -> Result<leasehold_core::sync::MutexGuard<'_, State>> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let before = self.state.lock().before.clone().filter(|(kind, _)| *kind == call);
        if let Some((_, function)) = before {
            function();
        }
        let mut s = self.state.lock();
        s.calls[call as usize] += 1;
        if s.lost {
            return Err(Error::DeviceLost { cause: "injected".into() });
        }
        let mut fails = false;
        let State { faults, seed, .. } = &mut *s;
        for (kind, fault, seen) in faults.iter_mut().filter(|f| f.0 == call) {
            debug_assert_eq!(*kind, call);
            fails |= match *fault {
                Fault::Once(n) => *seen == n,
                Fault::From(n) => *seen >= n,
                Fault::PerMille(p) => {
                    *seed = seed
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    (*seed >> 33) % 1000 < u64::from(p)
                }
            };
            *seen += 1;
        }
        if fails {
            return Err(Error::Driver {
                api: "fake",
                code: call as i32,
                name: format!("{call:?} injected").into(),
            });
        }
        Ok(s)
    }
}

impl State {
    fn take(&mut self, bytes: u64) -> Result<()> {
        if self.used.checked_add(bytes).is_none_or(|u| u > self.physical) {
            return Err(OutOfMemory::new("fake physical memory", bytes).into());
        }
        self.used += bytes;
        Ok(())
    }

    /// New addresses, with a gap behind them, so that segments never look like neighbours.
    fn place(&mut self, bytes: u64, granule: u64) -> Result<u64> {
        let at = self.next_addr;
        let whole = bytes.checked_next_multiple_of(granule).and_then(|b| b.checked_add(granule));
        let next = whole.and_then(|whole| at.checked_add(whole));
        self.next_addr = next.ok_or_else(|| OutOfMemory::new("fake addresses", bytes))?;
        Ok(at)
    }

    fn wrong(&mut self, what: String) -> Error {
        self.violations.push(what.clone());
        Error::invalid(what)
    }

    fn inside(&self, at: u64, bytes: u64) -> bool {
        let last = at.checked_add(bytes);
        let near = self.reservations.range(..=at).next_back();
        near.zip(last).is_some_and(|((a, b), last)| last <= a + b)
    }

    fn overlaps(&self, at: u64, bytes: u64) -> bool {
        self.mapped
            .range(..at.saturating_add(bytes))
            .next_back()
            .is_some_and(|(a, (b, _))| a + b > at)
    }
}

// SAFETY: its addresses belong to no device and to no memory of the host: it backs nothing, so
// nobody can use them.
unsafe impl Backing for FakeBacking {
    fn caps(&self) -> BackingCaps {
        self.caps
    }

    fn reserve(&self, bytes: u64) -> Result<u64> {
        let mut s = self.enter(Call::Reserve)?;
        let at = s.place(bytes, self.caps.granule)?;
        s.reservations.insert(at, bytes);
        Ok(at)
    }

    unsafe fn commit(&self, at: Option<u64>, bytes: u64) -> Result<Chunk> {
        let mut s = self.enter(Call::Commit)?;
        s.take(bytes)?;
        let addr = match at {
            Some(at) => at,
            None => s.place(bytes, self.caps.granule).inspect_err(|_| s.used -= bytes)?,
        };
        s.segments.insert(addr, bytes);
        Ok(Chunk { addr, bytes, native: 0 })
    }

    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        let mut s = self.enter(Call::Decommit)?;
        match s.segments.remove(&chunk.addr) {
            Some(bytes) if bytes == chunk.bytes => {
                s.used -= bytes;
                Ok(())
            }
            other => Err(s.wrong(format!("decommit of {chunk:x?}, which is {other:x?}"))),
        }
    }

    unsafe fn release(&self, addr: u64, bytes: u64) {
        let mut s = self.state.lock();
        if s.reservations.remove(&addr) != Some(bytes) {
            s.wrong(format!("release of {addr:x}+{bytes:x}, which is not reserved"));
        }
        if s.overlaps(addr, bytes) {
            s.wrong(format!("release of {addr:x}+{bytes:x}, which is still mapped"));
        }
    }

    fn create(&self, bytes: u64) -> Result<u64> {
        let mut s = self.enter(Call::Create)?;
        s.take(bytes)?;
        let handle = s.next_handle;
        s.next_handle += 1;
        s.handles.insert(handle, bytes);
        Ok(handle)
    }

    unsafe fn destroy(&self, handle: u64, bytes: u64) -> Result<()> {
        let mut s = self.enter(Call::Destroy)?;
        if s.mapped.values().any(|m| m.1 == handle) {
            return Err(s.wrong(format!("destroy of handle {handle}, which is mapped")));
        }
        match s.handles.remove(&handle) {
            Some(b) if b == bytes => {
                s.used -= b;
                Ok(())
            }
            other => {
                Err(s
                    .wrong(format!("destroy of handle {handle} of {bytes:x}, which is {other:x?}")))
            }
        }
    }

    unsafe fn map(&self, at: u64, handle: u64, bytes: u64) -> Result<()> {
        let mut s = self.enter(Call::Map)?;
        if s.handles.get(&handle) != Some(&bytes) {
            return Err(s.wrong(format!(
                "map of handle {handle}, which does not exist with {bytes:x} bytes"
            )));
        }
        if !s.inside(at, bytes) || s.overlaps(at, bytes) {
            return Err(s.wrong(format!(
                "map at {at:x}+{bytes:x}, outside a reservation or over a mapping"
            )));
        }
        s.mapped.insert(at, (bytes, handle));
        Ok(())
    }

    unsafe fn enable(&self, at: u64, bytes: u64) -> Result<()> {
        drop(self.enter(Call::Enable)?);
        if !self.is_backed(at, bytes) {
            return Err(self
                .state
                .lock()
                .wrong(format!("enable of {at:x}+{bytes:x}, which is not mapped")));
        }
        Ok(())
    }

    unsafe fn unmap(&self, at: u64, bytes: u64) -> Result<()> {
        let mut s = self.enter(Call::Unmap)?;
        match s.mapped.remove(&at) {
            Some((b, _)) if b == bytes => Ok(()),
            other => Err(s.wrong(format!("unmap of {at:x}+{bytes:x}, which is {other:x?}"))),
        }
    }

    fn driver_calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}
