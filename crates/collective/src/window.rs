//! Calls in windows: which memory of a call lies in registered memory, and whether it does on all
//! ranks.
//!
//! # When a call uses windows
//! A library takes the offsets in its own window for those of all ranks. If one rank calls it with
//! another offset, bytes of another buffer are written, on another rank. So a call uses windows
//! only if all ranks have agreed on its offsets before. Recordings are compared before they are
//! launched ([`stop`](crate::stop)), so the calls of recordings use windows. Eager calls do not.
//!
//! A segment is mapped twice, and its second mapping is the window. So a large message, for which a
//! window is slower, goes by the first address, and the library sees ordinary memory.
//!
//! This module must not know how memory is registered.

use crate::error::unsupported;
use crate::group::Draft;
use crate::inner::{Core, Planned};
use crate::signature::{FNV, Kind, fnv};
use leasehold::backend::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use leasehold::backend::sync::{Arc, Mutex, OnceLock, thread};
use leasehold::backend::{Binding, SharedSegment};
use leasehold::graph::{LaunchCheck, Note, StopCheck};
use leasehold::{BufferView, Error, Result};
use std::borrow::Cow;
use std::sync::Weak;
use std::time::Duration;

/// The most bytes of a rank's message in a window. Beyond it the library is faster without.
pub(crate) const MOST: u64 = 16 << 10;

/// How long a window waits for work that uses it, once nobody names it any more.
const LAST_USE: Duration = Duration::from_secs(60);

/// A segment of a pool and the window over it.
pub(crate) struct Part {
    /// The range of the pool's buffers.
    pub(crate) segment: Arc<dyn SharedSegment>,
    /// The same memory, where the library has its window.
    pub(crate) alias: Arc<dyn SharedSegment>,
    pub(crate) window: u64,
}

/// The windows of a registration. Graphs with calls in them keep them.
pub(crate) struct Windows {
    /// Taken by the drop alone.
    taken: Option<Taken>,
    /// The number of the registration, the same on all ranks.
    number: u64,
}

struct Taken {
    core: Arc<Core>,
    parts: Vec<Part>,
}

impl Windows {
    pub(crate) fn new(core: Arc<Core>, number: u64, parts: Vec<Part>) -> Self {
        Self { taken: Some(Taken { core, parts }), number }
    }

    pub(crate) fn add(&mut self, part: Part) {
        if let Some(taken) = &mut self.taken {
            taken.parts.push(part);
        }
    }

    fn parts(&self) -> &[Part] {
        self.taken.as_ref().map_or(&[], |taken| &taken.parts)
    }

    /// Bytes of the windows.
    pub(crate) fn bytes(&self) -> u64 {
        self.parts().iter().map(|part| part.segment.bytes()).sum()
    }

    /// The part that holds all of a range, and the range's offset in it.
    fn find(&self, addr: u64, bytes: u64) -> Option<(usize, u64)> {
        let end = addr.checked_add(bytes)?;
        self.parts().iter().enumerate().find_map(|(i, part)| {
            let (from, len) = (part.segment.addr(), part.segment.bytes());
            (from <= addr && end <= from + len).then(|| (i, addr - from))
        })
    }
}

impl Taken {
    /// Gives the windows back, and then the memory.
    fn give_back(self) {
        let Self { core, parts } = self;
        // A graph may be gone while the device still runs its last launch.
        let over = core.device.upgrade().map(|device| device.synchronize(Some(LAST_USE)));
        if let Some(Err(Error::Timeout(_))) = over {
            tracing::warn!(communicator = %core.members.name, "windows are leaked: work of their device does not end");
            std::mem::forget(parts);
            return;
        }
        for part in parts {
            let turn = core.turn.as_ref().map(|turn| turn.0.lock());
            let given = core.native.part().deregister(part.window);
            drop(turn);
            if let Err(error) = given {
                tracing::warn!(%error, "a window was not given back; its memory stays");
                std::mem::forget(part);
            }
        }
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        let Some(taken) = self.taken.take() else { return };
        // The library may block, and a drop does not. Without a thread the memory stays.
        let taken = std::mem::ManuallyDrop::new(taken);
        let give_back = move || std::mem::ManuallyDrop::into_inner(taken).give_back();
        let _ = thread::Builder::new().name("lh-collective".to_owned()).spawn(give_back);
    }
}

/// The registrations of a communicator.
#[derive(Default)]
pub(crate) struct Registered {
    all: Mutex<Vec<Weak<Windows>>>,
    /// Registrations that there ever were.
    pub(crate) made: AtomicU64,
    /// Recordings that were compared.
    stops: Arc<AtomicU64>,
}

impl Registered {
    pub(crate) fn add(&self, windows: &Arc<Windows>) {
        let mut all = self.all.lock();
        all.retain(|windows| windows.strong_count() != 0);
        all.push(Arc::downgrade(windows));
    }

    /// The memory of a recorded call, if calls of this kind and size use windows.
    pub(crate) fn place(&self, core: &Arc<Core>, drafts: &[Draft<'_>]) -> Option<Arc<Placed>> {
        let [draft] = drafts else { return None };
        let fits =
            matches!(draft.kind, Kind::AllReduce(_) | Kind::AllGather | Kind::ReduceScatter(_));
        let bytes = [draft.src, draft.dst].into_iter().flatten().map(|v| v.len()).max()?;
        if self.made.load(Ordering::Relaxed) == 0 || !fits || bytes == 0 || bytes > MOST {
            return None;
        }
        let all: Vec<_> = self.all.lock().iter().filter_map(Weak::upgrade).collect();
        let mut sides = Vec::new();
        let mut text = String::new();
        for view in [draft.src, draft.dst].into_iter().flatten() {
            let Some(side) = Side::find(&all, view, &mut text) else {
                (sides, text) = (Vec::new(), NOWHERE.to_owned());
                break;
            };
            sides.push(side);
        }
        let (core, stops) = (Arc::downgrade(core), self.stops.clone());
        Some(Arc::new(Placed { core, stops, sides, text, agreed: AtomicBool::new(false) }))
    }
}

/// The text of a call that is in no window.
const NOWHERE: &str = "-";

/// The memory of one side of a call.
struct Side {
    addr: u64,
    alias: u64,
    _windows: Arc<Windows>,
}

impl Side {
    /// Adds where it is to the text.
    fn find(all: &[Arc<Windows>], view: BufferView<'_>, text: &mut String) -> Option<Self> {
        let (addr, bytes) = (view.addr(), view.len());
        let found = |w: &Arc<Windows>| w.find(addr, bytes).map(|(part, at)| (w.clone(), part, at));
        let (windows, part, at) = all.iter().find_map(found)?;
        text.push_str(&format!("{}.{part}.{at} ", windows.number));
        let alias = windows.parts()[part].alias.addr() + at;
        Some(Self { addr, alias, _windows: windows })
    }
}

/// A recorded call that may use windows.
pub(crate) struct Placed {
    core: Weak<Core>,
    stops: Arc<AtomicU64>,
    /// Empty: it lies in no window.
    sides: Vec<Side>,
    text: String,
    /// All ranks' memory is at the same offsets.
    agreed: AtomicBool,
}

impl Placed {
    /// The addresses for the library: those of the windows, if all ranks have agreed.
    ///
    /// # Errors
    /// `Unsupported` for a graph that was updated with other memory: the other ranks' calls are in
    /// windows still.
    pub(crate) fn bind<'b>(
        &self,
        planned: &[Planned],
        bound: &'b [Binding],
    ) -> Result<Cow<'b, [Binding]>> {
        if !self.agreed.load(Ordering::Acquire) {
            return Ok(bound.into());
        }
        let mut aliased = bound.to_vec();
        // In the order in which the sides were found. A source is no destination, even if both lie
        // in windows: the other ranks' offsets are those of their sources.
        let operands = planned.iter().flat_map(|p| [p.src, p.dst]).flatten();
        for (at, side) in std::iter::zip(operands, &self.sides) {
            if bound.get(at).map(|binding| binding.addr) != Some(side.addr) {
                return Err(unsupported(
                    "a graph's call in registered memory cannot take another buffer, since the other ranks' calls stay as they were compared; record it anew",
                ));
            }
            aliased[at].addr = side.alias;
        }
        Ok(aliased.into())
    }
}

/// The number and the hash of texts, by which ranks see whether theirs are the same.
fn summary(texts: &[&str]) -> String {
    let hash = texts.iter().fold(FNV, |hash, text| fnv(hash, text));
    format!("{} {hash:x}", texts.len())
}

struct WindowCheck;

/// The check of all recordings of the process. It comes after that of their calls.
pub(crate) fn check() -> &'static Arc<dyn StopCheck> {
    static CHECK: OnceLock<Arc<dyn StopCheck>> = OnceLock::new();
    CHECK.get_or_init(|| Arc::new(WindowCheck))
}

impl StopCheck for WindowCheck {
    fn check(&self, notes: &[Note]) -> Result<Option<Arc<dyn LaunchCheck>>> {
        let calls: Vec<&Placed> = notes.iter().filter_map(|n| n.downcast_ref()).collect();
        let mut all: Vec<(Arc<Core>, Vec<&Placed>)> = Vec::new();
        for call in calls {
            let Some(core) = call.core.upgrade() else { continue };
            match all.iter_mut().find(|(c, _)| Arc::ptr_eq(c, &core)) {
                Some((_, own)) => own.push(call),
                None => all.push((core, vec![call])),
            }
        }
        // All are told before any is waited for, as in `stop`.
        let mut begun = Vec::new();
        for (core, own) in &all {
            let number = own[0].stops.fetch_add(1, Ordering::Relaxed);
            let subject = format!("windows/{number}");
            let text: Vec<&str> = own.iter().map(|call| call.text.as_str()).collect();
            let said = summary(&text);
            core.members.publish(&subject, said.as_bytes())?;
            begun.push((subject, said));
        }
        for ((core, own), (subject, ours)) in std::iter::zip(&all, &begun) {
            let members = &core.members;
            let what = format!("it has stopped no recording with calls of {}", members.name);
            let mut same = true;
            for rank in members.others() {
                same &= members.hear(subject, rank, &what)? == *ours;
            }
            if same {
                let inside = own.iter().filter(|call| call.text != NOWHERE);
                inside.for_each(|call| call.agreed.store(true, Ordering::Release));
            }
        }
        Ok(None)
    }
}
